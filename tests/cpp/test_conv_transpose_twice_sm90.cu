// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_twice_sm90 against a plain double-precision convolution
/// and GroupNorm, to the accuracy of y, in both of y's layouts. Operands are small integers, so that
/// relu(conv + bias) is exact. What it writes is NaN before, so that nothing is left unwritten; repeated
/// launches, by few blocks and by many, with w packed and as it lies, must give the same bits. Needs a GPU of
/// compute capability 9.0. Exit code 0: all passed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/twice_layout.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "gpu_test.hpp"
#include "normalized_fixture.cuh"
#include "tail_cases.hpp"
#include "tally.hpp"

namespace {

using upconv3d::Activation;
using upconv3d::ConvInstance;
using upconv3d::Layout;
using upconv3d::Problem;
using upconv3d::Tail;
using upconv3d::cuda::check;
using upconv3d::tests::activated;
using upconv3d::tests::Case;
using upconv3d::tests::check_y;
using upconv3d::tests::Fixture;
using upconv3d::tests::group_counts;
using upconv3d::tests::kNaN;
using upconv3d::tests::kNone;
using upconv3d::tests::kOnes;
using upconv3d::tests::kStatAccuracy;
using upconv3d::tests::linear_tails;
using upconv3d::tests::make_problem;
using upconv3d::tests::piecewise_linear_tails;
using upconv3d::tests::run_with_types;
using upconv3d::tests::Scratch;
using upconv3d::tests::smooth_tails;
using upconv3d::tests::Tally;
using upconv3d::tests::unit_roundoff;

// For y [N,Z,P,Q,K]: kernel = stride; phases with 1 to 8 taps, with none (kernel 1), unequal extents; 2, 3
// and 4 phases stacked and rows left over; channel tiles that pair and one that does not; several k-blocks;
// dilation; tails of tiles in every sample; more tiles of a class than blocks.
const Case kCases[] = {
    {1, 128, 128, {12, 9, 10}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 64, 32, {9, 8, 10}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {3, 24, 40, {5, 7, 6}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {2, 16, 8, {6, 5, 7}, {3, 3, 3}, {3, 3, 3}, kNone, kNone, kOnes},
    {1, 72, 136, {4, 5, 6}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {2, 8, 16, {4, 6, 5}, {1, 1, 4}, {1, 1, 4}, kNone, kNone, kOnes},
    {2, 32, 64, {8, 8, 8}, {2, 2, 2}, kOnes, kNone, kNone, kOnes},
    {1, 40, 24, {5, 6, 7}, {1, 1, 1}, {2, 2, 2}, kNone, {1, 1, 1}, kOnes},
    {2, 16, 48, {6, 7, 5}, {2, 3, 2}, {2, 1, 2}, {0, 2, 1}, {0, 0, 1}, {3, 2, 1}},
    {3, 64, 72, {10, 10, 10}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {1, 256, 64, {3, 5, 40}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    // 258 positions: the last tile holds two
    {2, 64, 64, {1, 2, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, kNaN},
    {2, 64, 32, {1, 2, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, 512.0},
    // For y [N,K,Z,P,Q], which takes some of those above as well: rows of the volume of odd length, of one
    // voxel, of a whole tile; channels that leave most of a warpgroup's rows over; several k-blocks,
    // dilation, phases along the width without a tap.
    {2, 24, 40, {5, 7, 7}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 32, 8, {4, 9, 11}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {1, 16, 64, {6, 5, 8}, {2, 3, 2}, {2, 1, 2}, {0, 2, 0}, kNone, {3, 2, 1}},
    {2, 136, 24, {1, 2, 256}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes},
    {1, 16, 16, {9, 31, 1}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 24, 72, {3, 6, 18}, {1, 1, 1}, {1, 1, 2}, kNone, {0, 0, 1}, kOnes},
    {1, 64, 32, {6, 6, 6}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    // 64 phases, those along the width folded: each in rows of its own, of one tap and of one to eight;
    // stacked, with channels that divide 64 and that do not; a last tile of two positions.
    {1, 136, 128, {3, 4, 9}, {4, 4, 4}, {4, 4, 4}, kNone, kNone, kOnes},
    {1, 64, 64, {4, 5, 4}, {6, 6, 6}, {4, 4, 4}, {1, 1, 1}, kNone, kOnes},
    {2, 16, 40, {3, 4, 5}, {1, 8, 8}, {1, 8, 8}, kNone, kNone, kOnes},
    {1, 72, 96, {2, 3, 5}, {4, 4, 4}, {4, 4, 4}, kNone, kNone, kOnes},
    {2, 64, 64, {1, 2, 129}, {1, 1, 4}, {1, 1, 4}, kNone, kNone, kOnes, kNaN},
    // For k-blocks of 32: boxes of w of 64 and of 8 rows, a last tile of two positions; more of them in a set
    // than there is room for whole ones, of one warpgroup and of two.
    {2, 32, 64, {5, 6, 8}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {1, 32, 24, {6, 7, 9}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {2, 32, 64, {1, 2, 129}, {1, 1, 2}, {1, 1, 2}, kNone, kNone, kOnes, kNaN},
    {2, 32, 16, {6, 7, 8}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {1, 24, 32, {6, 5, 7}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, kOnes},
    {1, 16, 32, {6, 6, 6}, {3, 3, 3}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, {2, 2, 2}},
    // 32 phases in either layout.
    {1, 40, 64, {3, 4, 5}, {4, 4, 3}, {4, 4, 2}, {1, 0, 1}, {0, 0, 1}, kOnes},
    // Loads that serve two taps along the height, of one k-block and of two, and along the depth.
    {2, 64, 32, {2, 16, 16}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {1, 128, 16, {2, 32, 8}, {1, 3, 2}, {1, 2, 2}, {0, 1, 0}, {0, 1, 0}, kOnes},
    {2, 64, 32, {4, 8, 10}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    // The same of half k-blocks; three taps; across the ends of planes.
    {2, 32, 16, {2, 32, 32}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, kNone, kOnes},
    {1, 16, 8, {3, 16, 16}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {2, 16, 16, {3, 6, 14}, {3, 3, 3}, kOnes, kNone, kNone, kOnes},
    // 16 taps, which reach as far as im2col can, and 17, of which each is loaded.
    {1, 32, 16, {2, 17, 8}, {1, 16, 3}, {1, 1, 3}, kNone, kNone, kOnes},
    {1, 32, 16, {2, 16, 8}, {1, 17, 3}, {1, 1, 3}, kNone, kNone, kOnes},
    // Views of 32 rows, in pairs below each other: of one warpgroup and of two, one k-block and three, less
    // than a tile and more, a last tile of two positions; taps that one of the pair lacks; pairs of phases
    // along the height alone; two sets; four phases along the width. The same of half k-blocks.
    {2, 64, 16, {5, 6, 8}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {1, 136, 16, {4, 8, 17}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 64, 16, {6, 8, 7}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {3, 64, 16, {4, 8, 16}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes},
    {2, 64, 16, {1, 2, 129}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes, kNaN},
    {1, 64, 32, {4, 6, 9}, {2, 2, 1}, {2, 2, 1}, kNone, kNone, kOnes},
    {2, 64, 16, {5, 6, 8}, {4, 2, 2}, {4, 2, 2}, kNone, kNone, kOnes},
    {1, 40, 8, {4, 6, 11}, {2, 2, 4}, {2, 2, 4}, kNone, kNone, kOnes},
    {2, 32, 16, {6, 8, 7}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, kOnes},
    {1, 24, 16, {4, 8, 17}, {2, 2, 2}, {2, 2, 2}, kNone, kNone, kOnes},
    {2, 32, 16, {1, 2, 129}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes, kNaN},
    // Norm groups of 320 partial moments, which blocks merge instead of warps: more groups than few blocks.
    {2, 16, 24, {9, 9, 13}, {4, 4, 4}, {4, 4, 4}, kNone, kNone, kOnes},
};

/// Cases of k-blocks of 64 and of 32 input channels, and those that y [N,K,Z,P,Q] takes.
constexpr int kWholeBlockCases = 26, kHalfBlockCases = 26;
static_assert(kWholeBlockCases + kHalfBlockCases == std::size(kCases));
constexpr int kChannelsFirstWhole = 19, kChannelsFirstHalf = 16;

int expected_cases(const ConvInstance& instance, Layout y_layout) {
  const bool whole = instance.block_inputs == upconv3d::kTwiceBlockC;
  if (y_layout == Layout::kNDHWC) return whole ? kWholeBlockCases : kHalfBlockCases;
  return whole ? kChannelsFirstWhole : kChannelsFirstHalf;
}

/// Cases that are launched again and again: three samples, two channel tiles; phases that share loads; pairs
/// of views; groups merged by blocks.
bool is_repeated(int index) {
  return index == 9 || index == 28 || index == 43 || index == 51;
}

/// Few blocks, so that each walks several classes and waits for the others.
constexpr int kFewBlocks = 5;

/// What conv_transpose_twice_sm90 differs in from other kernels, for Fixture.
struct TwiceKernel {
  static constexpr bool kRoundsFirst = false;
  static Scratch scratch(const ConvInstance&, const Problem& problem) {
    const std::int64_t moments = upconv3d::twice_moments(upconv3d::twice_layout(problem));
    return {problem.n * moments * (problem.k >> twice_granule_shift(problem)) * 2,
            twice_table_floats(problem, moments)};
  }
  static bool reads_w_in_place(const Problem& problem) {
    return problem.y_layout == Layout::kNDHWC && twice_reads_w_in_place(upconv3d::twice_layout(problem));
  }
  static void complete(upconv3d::cuda::ConvTransposeParams& params) {
    params.piles_views = upconv3d::twice_layout(params.problem).pile > 1;
  }
};

/// Launches the kernel once.
///
/// \param tail linear where it has no norm
/// \param affine gamma and beta are given
/// \param w_in_place w and, where it can be, x are as they lie, and counters are the launch's to clear
template <class Fixture>
void launch(Fixture& fixture, const Tail& tail, std::int64_t num_groups, bool affine, int sm_count,
            bool w_in_place) {
  fixture.launch({.tail = tail,
                  .num_groups = num_groups,
                  .affine = affine,
                  .sm_count = sm_count,
                  .x_in_place = w_in_place,
                  .w_in_place = w_in_place,
                  .clears_counters = w_in_place});
}

/// y of a block without a norm, to its own rounding and that of an activation's float.
template <class Fixture>
std::string check_linear(const Fixture& fixture) {
  const Problem& problem = fixture.problem;
  const std::int64_t k = problem.k, positions = problem.positions();
  const double of_float = is_piecewise_linear(problem.tail.activation) ? 0 : kStatAccuracy;
  for (std::int64_t i = 0; i < fixture.samples * positions * k; ++i) {
    const std::int64_t channel = i % k, row = i / k;
    const double want = activated(problem.tail, problem.tail.before(), fixture.expected[i], channel);
    const std::int64_t in_planes = (row / positions * k + channel) * positions + row % positions;
    const double got = double(float(fixture.y[problem.y_layout == Layout::kNDHWC ? i : in_planes]));
    const double slack =
        1.01 * unit_roundoff(problem.dtype) * std::abs(want) + of_float * (1 + std::abs(want));
    if (!(std::abs(got - want) <= slack)) {
      return "y of row " + std::to_string(row) + ", k " + std::to_string(channel) + " is " +
             std::to_string(got) + ", expected " + std::to_string(want);
    }
  }
  return "";
}

/// 20 launches, by few blocks and by all that fit, with w packed and as it lies, give the same bits.
template <class Fixture>
std::string check_repeats(Fixture& fixture, const Tail& tail, std::int64_t groups, int sm_count) {
  constexpr int kLaunches = 20;
  const bool may_lie = fixture.can_read_w_in_place();
  launch(fixture, tail, groups, true, sm_count, false);
  const auto y = fixture.y;
  for (int i = 1; i < kLaunches; ++i) {
    launch(fixture, tail, groups, true, i % 4 == 1 ? kFewBlocks : sm_count, may_lie && i % 3 != 0);
    if (std::memcmp(y.data(), fixture.y.data(), y.size() * sizeof(y[0])) != 0) {
      return "launch " + std::to_string(i) + " stored other bits than launch 0";
    }
  }
  return "";
}

/// The case without a norm, with ReLU and three others, which take turns, by few blocks and by many.
template <class Fixture>
void run_linear(Fixture& fixture, const std::string& label, int index, int sm_count, Tally& tally) {
  const ConvInstance& instance = fixture.instance();
  std::vector<Tail> tails = linear_tails(fixture.problem.k);
  std::rotate(tails.begin(), tails.begin() + index % std::ptrdiff_t(tails.size()), tails.end());
  tails.resize(4);
  tails.back().activation = Activation::kRelu;
  for (const Tail& tail : tails) {
    const std::string name = label + ", " + describe(tail);
    for (const bool w_in_place : {false, true}) {
      if (w_in_place && !fixture.can_read_w_in_place()) continue;
      tally.run(instance, name + (w_in_place ? ", w in place" : ""), [&] {
        launch(fixture, tail, 1, false, (index + w_in_place) % 2 ? kFewBlocks : sm_count, w_in_place);
        return check_linear(fixture);
      });
    }
  }
  if (!is_repeated(index)) return;
  tally.run(instance, label + ", linear, repeated",
            [&] { return check_repeats(fixture, tails.front(), 1, sm_count); });
}

/// Every case with layer norm, instance norm and what lies between, by few blocks and by many; with ReLU
/// before a norm, and with one of the others of either kind, which take turns. And without a norm.
template <class Operand, class Output>
void run_instance(const ConvInstance& instance, Layout y_layout, int sm_count, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  int cases = 0;
  for (int index = 0; index < int(std::size(kCases)); ++index) {
    const Problem problem = make_problem(instance, kCases[index], y_layout);
    if (upconv3d::twice_block_inputs(problem) != instance.block_inputs) continue;
    if (upconv3d::twice_layout(problem).classes.empty()) continue;
    ++cases;
    Fixture<TwiceKernel, Operand, Output> fixture(instance, kCases[index], y_layout, state);
    const std::vector<std::int64_t> counts = group_counts(kCases[index].k);
    run_linear(fixture, "case " + std::to_string(index) + ", " + name(y_layout), index, sm_count, tally);
    const std::vector<Tail> others = piecewise_linear_tails(kCases[index].k), smooth = smooth_tails();
    for (std::size_t turn = 0; turn < counts.size(); ++turn) {
      for (const Tail& tail :
           {Tail{}, others[(turn + index) % others.size()], smooth[(turn + index) % smooth.size()]}) {
        const std::string label = "case " + std::to_string(index) + ", " + name(y_layout) + ", groups " +
                                  std::to_string(counts[turn]) + ", " + describe(tail);
        for (const bool w_in_place : {false, true}) {
          if (w_in_place && !fixture.can_read_w_in_place()) continue;
          tally.run(instance, label + (w_in_place ? ", w in place" : ""), [&] {
            const int blocks = turn % 2 ? kFewBlocks : sm_count;
            launch(fixture, tail, counts[turn], turn % 3 != 0, blocks, w_in_place);
            return check_y(fixture, turn % 3 != 0);
          });
        }
        if (!is_repeated(index)) continue;
        tally.run(instance, label + ", repeated",
                  [&] { return check_repeats(fixture, tail, counts[turn], sm_count); });
      }
    }
  }
  tally.run(instance, "its cases", [&] {
    const int all = expected_cases(instance, y_layout);
    return cases == all ? "" : "the kernel took " + std::to_string(cases) + ", not " + std::to_string(all);
  });
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  Tally tally;
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "asking for the SM count");
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled || !instance.twice) continue;
    for (const Layout y_layout : {Layout::kNDHWC, Layout::kNCDHW}) {
      tally.run(instance, "preparing its cases", [&] {
        run_with_types(instance, [&]<class Operand, class Output>() {
          run_instance<Operand, Output>(instance, y_layout, sm_count, tally);
        });
        return std::string();
      });
    }
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
