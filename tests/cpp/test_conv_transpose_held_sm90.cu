// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_held_sm90 against a plain double-precision convolution and
/// GroupNorm, to the accuracy of y. Operands are small integers, so that before(conv + bias) is exact in 16
/// bits, but for cases in which it is rounded on purpose. What it writes is NaN before, so that nothing is
/// left unwritten; repeated launches, by a few multiprocessors' blocks and by all, with x and w packed and as
/// they lie, must give the same bits. Needs a GPU of compute capability 9.0. Exit code 0: all passed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/held_tiles.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "gpu_test.hpp"
#include "normalized_fixture.cuh"
#include "tail_cases.hpp"
#include "tally.hpp"

namespace {

using upconv3d::border_slabs;
using upconv3d::ceil_div;
using upconv3d::ConvInstance;
using upconv3d::HeldShape;
using upconv3d::Layout;
using upconv3d::Problem;
using upconv3d::Slab;
using upconv3d::Tail;
using upconv3d::cuda::check;
using upconv3d::tests::Case;
using upconv3d::tests::check_y;
using upconv3d::tests::Fixture;
using upconv3d::tests::group_counts;
using upconv3d::tests::kNaN;
using upconv3d::tests::kNone;
using upconv3d::tests::kOnes;
using upconv3d::tests::make_problem;
using upconv3d::tests::piecewise_linear_tails;
using upconv3d::tests::run_with_types;
using upconv3d::tests::Scratch;
using upconv3d::tests::Tally;

const Case kCases[] = {
    // Kernel = stride; phases with 1 to 8 taps, with none (kernel 1; 1 along the height), unequal extents;
    // 27 phases; channels that fill a tile and that do not, one tile, two and three of them; dilation.
    {1, 128, 128, {12, 9, 10}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 64, 32, {9, 8, 10}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {3, 24, 40, {5, 7, 6}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {2, 16, 8, {6, 5, 7}, {3, 3, 3}, {3, 3, 3}, kNone, kNone, kOnes},
    {1, 72, 136, {4, 5, 6}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {2, 8, 16, {4, 6, 5}, {1, 1, 4}, {1, 1, 4}, kNone, kNone, kOnes},
    {2, 32, 64, {8, 8, 8}, {2, 2, 2}, kOnes, kNone, kNone, kOnes},
    {1, 40, 24, {5, 6, 7}, {1, 1, 1}, {2, 2, 2}, kNone, {1, 1, 1}, kOnes},
    {1, 24, 40, {4, 5, 6}, {3, 1, 4}, {2, 2, 2}, {1, 0, 1}, kNone, kOnes},
    {2, 16, 48, {6, 7, 5}, {2, 3, 2}, {2, 1, 2}, {0, 2, 1}, {0, 0, 1}, {3, 2, 1}},
    {1, 16, 32, {6, 6, 6}, {3, 3, 3}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, {2, 2, 2}},
    {3, 64, 72, {10, 10, 10}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    // One k-block per tile; several, with and without a last one that C does not fill; more than there are
    // stages, of tiles that are fewer than multiprocessors.
    {2, 48, 8, {5, 9, 7}, {1, 1, 1}, kOnes, kNone, kNone, kOnes},
    {2, 136, 24, {1, 2, 256}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes},
    {1, 256, 64, {3, 5, 40}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 256, 136, {3, 4, 5}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {1, 144, 40, {3, 4, 5}, {3, 3, 3}, kOnes, {1, 1, 1}, kNone, kOnes},
    // 258 positions, of which the last tile holds two, and 129, of which it holds one; one tile alone, and
    // phases of one position.
    {2, 64, 64, {1, 2, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, kNaN},
    {2, 64, 32, {1, 2, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, 512.0},
    {2, 64, 136, {1, 1, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, kNaN},
    {2, 136, 8, {1, 1, 129}, {1, 1, 3}, kOnes, {0, 0, 1}, kNone, kOnes, kNaN},
    {2, 16, 40, {1, 1, 129}, {1, 2, 1}, {1, 2, 1}, kNone, kNone, kOnes, 512.0},
    {1, 8, 8, {1, 1, 2}, {1, 1, 1}, kOnes, kNone, kNone, kOnes},
    {1, 64, 64, {1, 1, 1}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    // So many partial moments that groups of 16 channels are merged apart, too, and of several samples: more
    // groups than few blocks, or than many.
    {1, 16, 16, {33, 32, 16}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes},
    {2, 32, 136, {9, 16, 16}, {2, 2, 1}, {2, 2, 1}, kNone, kNone, kOnes},
    // Sums that bfloat16 does not hold: moments are those of what is held.
    {1, 384, 64, {4, 5, 6}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, kNone, kOnes, 0.0, true},
    {2, 256, 40, {5, 6, 7}, {3, 3, 3}, kOnes, {1, 1, 1}, kNone, kOnes, 0.0, true},
};

/// Cases that are launched again and again: three samples, two channel tiles; k-blocks beyond the stages;
/// tiles of one position; groups merged apart.
bool is_repeated(int index) {
  return index == 11 || index == 15 || index == 19 || index == 24;
}

/// By how many multiprocessors' blocks a launch runs, 0 for all, and how its operands lie. Of few blocks,
/// which are no multiple of some cases' channel tiles, each has more tiles than it has room for.
struct Variant {
  int multiprocessors;
  bool x_in_place, w_in_place;
};
constexpr Variant kVariants[] = {
    {0, false, false}, {2, false, true},  {3, true, false},
    {0, true, true},   {2, false, false}, {29, true, true},
};

std::int64_t moments_of(const ConvInstance& instance, const Problem& problem) {
  return slab_tiles(border_slabs(problem, 0), instance.block_positions);
}

/// What conv_transpose_held_sm90 differs in from other kernels, for Fixture.
struct HeldKernel {
  static constexpr bool kRoundsFirst = true;
  static Scratch scratch(const ConvInstance& instance, const Problem& problem) {
    const std::int64_t granules = problem.k >> held_granule_shift(problem);
    return {problem.n * moments_of(instance, problem) * granules * upconv3d::kHeldMomentFloats,
            problem.n * problem.num_groups * 4};
  }
  static bool reads_w_in_place(const Problem& problem) { return problem.k % upconv3d::kChannelUnit == 0; }
  static void complete(upconv3d::cuda::ConvTransposeParams&) {}
};

/// What launches have come to; without one of each kind the cases would leave a part of the kernel untested.
struct Seen {
  bool waits = false;         // tiles wait in y
  bool holds_all = false;     // several tiles of a block are held, and none waits
  bool merges_apart = false;  // params.table is used
  bool merges_each = false;   // it is not
  bool x_in_place = false, w_in_place = false;

  void add(const ConvInstance& instance, const Problem& problem, int sm_count) {
    const HeldShape shape =
        upconv3d::held_shape(instance.block_positions, static_cast<int>(size_of(instance.operand)),
                             static_cast<int>(size_of(instance.output)));
    const std::int64_t moments = moments_of(instance, problem);
    const std::int64_t tiles = problem.n * moments * ceil_div(problem.k, upconv3d::kHeldChannels);
    const std::int64_t of_block = ceil_div(tiles, std::int64_t{sm_count} * shape.blocks_per_sm);
    const int slots = held_rooms(shape, of_block).slots;
    (of_block > slots ? waits : holds_all) |= of_block > 1;
    (held_merges_apart(problem, moments) ? merges_apart : merges_each) = true;
  }

  std::string missing(const ConvInstance& instance) const {
    if (!waits) return "no tile waited in y";
    if (!holds_all) return "no block held all of several tiles";
    if (!merges_apart || !merges_each) return "groups were merged in one way alone";
    if (instance.operand == instance.output && !(x_in_place && w_in_place)) {
      return "an operand was packed throughout";
    }
    return "";
  }
};

/// y as it should be, and the same bits by launch after launch, one variant after the other.
template <class Fixture>
std::string check_launches(Fixture& fixture, const Tail& tail, std::int64_t groups, bool affine, int launches,
                           int sm_count, Seen& seen) {
  std::vector<typename decltype(fixture.y)::value_type> y;
  for (int i = 0; i < launches; ++i) {
    const Variant& variant = kVariants[i % int(std::size(kVariants))];
    const int multiprocessors =
        variant.multiprocessors > 0 ? std::min(variant.multiprocessors, sm_count) : sm_count;
    fixture.launch({.tail = tail,
                    .num_groups = groups,
                    .affine = affine,
                    .sm_count = multiprocessors,
                    .x_in_place = variant.x_in_place,
                    .w_in_place = variant.w_in_place});
    seen.add(fixture.instance(), fixture.problem, multiprocessors);
    seen.x_in_place |= variant.x_in_place && fixture.can_read_x_in_place();
    seen.w_in_place |= variant.w_in_place && fixture.can_read_w_in_place();
    if (i == 0) {
      const std::string problem = check_y(fixture, affine);
      if (!problem.empty()) return problem;
      y = fixture.y;
    }
    const std::int64_t compared = fixture.samples * fixture.problem.positions() * fixture.problem.k;
    if (std::memcmp(y.data(), fixture.y.data(), std::size_t(compared) * sizeof(y[0])) != 0) {
      return "launch " + std::to_string(i) + ", by " + std::to_string(multiprocessors) + " multiprocessors" +
             (variant.x_in_place ? ", x in place" : "") + (variant.w_in_place ? ", w in place" : "") +
             ", stored other bits than launch 0";
    }
  }
  return "";
}

/// group_counts, and 8 groups: of as many channels as no power of two shares, some of two tiles.
std::vector<std::int64_t> held_group_counts(std::int64_t k) {
  std::vector<std::int64_t> counts = group_counts(k);
  if (std::find(counts.begin(), counts.end(), 8) == counts.end()) counts.push_back(8);
  return counts;
}

/// Every case with layer norm, instance norm and what lies between, with gamma and beta and without; with
/// ReLU before a norm, and with two of the others, which take turns.
template <class Operand, class Output>
void run_instance(const ConvInstance& instance, int sm_count, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  Seen seen;
  for (int index = 0; index < int(std::size(kCases)); ++index) {
    const Case& shape = kCases[index];
    const std::string label = "case " + std::to_string(index);
    tally.run(instance, label + ", its operands", [&] {
      Fixture<HeldKernel, Operand, Output> fixture(instance, shape, Layout::kNDHWC, state);
      const std::vector<std::int64_t> counts = held_group_counts(shape.k);
      const std::vector<Tail> others = piecewise_linear_tails(shape.k);
      for (std::size_t turn = 0; turn < counts.size(); ++turn) {
        const bool affine = turn % 3 != 0;
        for (const Tail& tail :
             {Tail{}, others[(turn + index) % others.size()], others[(turn + index + 2) % others.size()]}) {
          const int launches = is_repeated(index) ? 24 : int(std::size(kVariants));
          tally.run(
              instance, label + ", groups " + std::to_string(counts[turn]) + ", " + describe(tail),
              [&] { return check_launches(fixture, tail, counts[turn], affine, launches, sm_count, seen); });
        }
      }
      return std::string();
    });
  }
  tally.run(instance, "its cases", [&] { return seen.missing(instance); });
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  Tally tally;
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "asking for the SM count");
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled || !instance.held) continue;
    run_with_types(instance, [&]<class Operand, class Output>() {
      run_instance<Operand, Output>(instance, sm_count, tally);
    });
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
