// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_relu_moments_sm80, with group_norm_finalize behind it,
/// against a plain double-precision convolution: relu(conv) exactly, on small integers; the table to float
/// accuracy. What they write is NaN before, so that nothing is left unwritten; repeated launches must give
/// the same bits. Needs a GPU of compute capability 8.0 or later. Exit code 0: all passed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/border_slabs.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cutlass/numeric_types.h"
#include "gpu_test.hpp"
#include "tally.hpp"

namespace {

using upconv3d::border_slabs;
using upconv3d::concat;
using upconv3d::ConvInstance;
using upconv3d::DType;
using upconv3d::Extent3;
using upconv3d::Problem;
using upconv3d::volume;
using upconv3d::cuda::check;
using upconv3d::tests::DeviceBuffer;
using upconv3d::tests::next_random;
using upconv3d::tests::reference_kernel;
using upconv3d::tests::rounded;
using upconv3d::tests::small_integers;
using upconv3d::tests::Tally;

constexpr Extent3 kOnes = {1, 1, 1};
constexpr Extent3 kNone = {0, 0, 0};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, padding;
  Extent3 stride = kOnes, dilation = kOnes, output_padding = kNone;
  // Where not 0: what all samples but the first consist of, which may not reach it. Then sample 0 alone is
  // compared.
  double others = 0.0;
};

// One 8-channel corner case; tails of every tile extent and of the k-blocks; kernels with an axis of 1;
// padding up to beyond the kernel; several channel tiles; strides with phases of several sizes, of which some
// have no tap; dilations that remain or vanish in the phases; as many taps along an axis as the kernel takes.
const Case kCases[] = {
    {1, 8, 8, {2, 3, 4}, {1, 1, 1}, {0, 0, 0}},
    {2, 64, 128, {6, 6, 6}, {3, 3, 3}, {0, 0, 0}},
    {3, 72, 136, {5, 4, 7}, {3, 3, 3}, {1, 1, 1}},
    {2, 16, 264, {4, 9, 5}, {2, 3, 1}, {0, 2, 0}},
    {1, 128, 64, {8, 8, 8}, {5, 5, 5}, {2, 2, 2}},
    {2, 24, 40, {1, 1, 40}, {1, 1, 7}, {0, 0, 3}},
    {2, 8, 16, {9, 9, 9}, {3, 3, 3}, {3, 3, 3}},
    {1, 16, 24, {3, 3, 14}, {1, 10, 10}, {0, 5, 0}},
    {2, 32, 64, {7, 5, 6}, {2, 2, 2}, {0, 0, 0}, {2, 2, 2}},
    {2, 40, 72, {6, 5, 4}, {3, 3, 3}, {1, 1, 1}, {2, 2, 2}, kOnes, {1, 1, 1}},
    {1, 64, 128, {5, 6, 7}, {4, 4, 4}, {1, 1, 1}, {2, 2, 2}},
    {2, 16, 32, {4, 3, 5}, {1, 2, 3}, {0, 0, 1}, {3, 2, 3}, {1, 3, 1}, {2, 0, 1}},
    {1, 24, 16, {6, 7, 5}, {3, 3, 2}, {2, 1, 0}, {1, 2, 1}, {2, 2, 3}},
    {5, 64, 272, {10, 10, 10}, {3, 3, 3}, {0, 0, 0}},
    // 258 positions: the last tile of every variant holds two
    {2, 64, 64, {1, 2, 129}, {1, 1, 1}, {0, 0, 0}, kOnes, kOnes, kNone, kNaN},
    {3, 40, 48, {3, 4, 5}, {3, 3, 3}, {1, 1, 1}, {2, 2, 2}, kOnes, kNone, kNaN},
    {2, 64, 64, {4, 5, 6}, {3, 3, 3}, {2, 2, 2}, kOnes, kOnes, kNone, 512.0},
};

/// The case that is launched again and again: five samples, several channel tiles, most work.
constexpr int kRepeatedCase = 13;

/// Scaling x by 2^3 and w by 2^-2 and undoing it with unscale exponents exercises the float epilogue.
constexpr int kSampleExponent = 3;
constexpr int kColumnExponent = -2;

/// What float statistics are held to: 32 roundings.
constexpr double kStatAccuracy = 32 * 0x1p-24;

/// One case's tensors on the device and its exact relu(conv + bias), for all launches of an instance.
template <class Operand, class Output>
class Fixture {
 public:
  Fixture(const ConvInstance& instance, const Case& shape, std::uint64_t& state)
      : instance_(instance),
        problem_(make_problem(instance, shape)),
        x_hi_(x_size()),
        x_lo_(x_size()),
        w_hi_(w_size()),
        w_lo_(w_size()),
        bias_(problem_.k),
        a_(problem_.n * problem_.positions() * problem_.k),
        unscale_sample_(problem_.n),
        unscale_column_(problem_.k),
        samples(shape.others == 0.0 ? problem_.n : 1) {
    // Sparse and small enough that every sum is exact in a 16-bit output: at most 2^8 in bfloat16.
    auto x = small_integers(x_size(), 1, state);
    const auto w = small_integers(w_size(), 1, state);
    for (double& v : x) v = next_random(state) % 16 == 0 ? v : 0.0;
    if (shape.others != 0.0) {
      std::fill(x.begin() + static_cast<std::ptrdiff_t>(x_size() / problem_.n), x.end(), shape.others);
    }
    const auto bias = small_integers(problem_.k, 3, state);
    compute_reference(x, w, bias);
    upload_operands(x, w);
    bias_.upload(rounded<Output>(bias));
    unscale_sample_.upload(std::vector<std::int32_t>(problem_.n, kSampleExponent));
    unscale_column_.upload(std::vector<std::int32_t>(problem_.k, kColumnExponent));
  }

  /// Launches the kernel and finalize once.
  void launch(int split_axes, std::int64_t num_groups) {
    problem_.num_groups = num_groups;
    const std::int64_t tiles = slab_tiles(border_slabs(problem_, split_axes), instance_.block_positions);
    DeviceBuffer<float> part(problem_.n * tiles * problem_.k * 2);
    DeviceBuffer<std::int32_t> counts(tiles);
    part.poison(), counts.poison(), a_.poison();
    upconv3d::cuda::ConvTransposeSm80Params params;
    params.problem = problem_;
    params.x_hi = x_hi_.get(), params.x_lo = x_lo_.get(), params.w_hi = w_hi_.get(),
    params.w_lo = w_lo_.get();
    params.bias = bias_.get();
    if (kScaled) params.unscale_sample = unscale_sample_.get(), params.unscale_column = unscale_column_.get();
    params.a = a_.get(), params.part = part.get(), params.counts = counts.get();
    params.split_axes = split_axes;
    upconv3d::cuda::find_conv_transpose_sm80_launcher(instance_.name)(params, nullptr);
    finalize(tiles, part, counts);
    check(cudaDeviceSynchronize(), instance_.name);
    a = a_.download();
  }

  const Problem& problem() const { return problem_; }

 private:
  static constexpr bool kScaled = std::is_same_v<Output, float>;

  const ConvInstance& instance_;
  Problem problem_;
  DeviceBuffer<Operand> x_hi_, x_lo_, w_hi_, w_lo_;
  DeviceBuffer<Output> bias_, a_;
  DeviceBuffer<std::int32_t> unscale_sample_, unscale_column_;

 public:
  const std::int64_t samples;        // that are compared, from the first on
  std::vector<double> expected;      // [N,Z,P,Q,K] relu(conv + bias)
  std::vector<Output> a;             // [N,Z,P,Q,K] of the last launch
  std::vector<float> channel_table;  // [3,N,K] of the last launch: mean, scale, shift

 private:
  static Problem make_problem(const ConvInstance& instance, const Case& shape) {
    Problem problem;
    problem.n = shape.n, problem.c = shape.c, problem.k = shape.k;
    problem.in = shape.in, problem.kernel = shape.kernel, problem.padding = shape.padding;
    problem.stride = shape.stride, problem.dilation = shape.dilation;
    problem.output_padding = shape.output_padding;
    problem.dtype = instance.output;
    problem.has_bias = true;
    return problem;
  }
  std::size_t x_size() const { return problem_.n * volume(problem_.in) * problem_.c; }
  std::size_t w_size() const { return volume(problem_.kernel) * problem_.k * problem_.c; }

  void compute_reference(const std::vector<double>& x, const std::vector<double>& w,
                         const std::vector<double>& bias) {
    const std::int64_t elements = problem_.n * problem_.positions() * problem_.k;
    DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size()), reference(elements);
    x64.upload(x), w64.upload(w), bias64.upload(bias);
    reference_kernel<<<unsigned((elements + 127) / 128), 128>>>(x64.get(), w64.get(), bias64.get(),
                                                                reference.get(), problem_, problem_.out());
    upconv3d::cuda::check_launch("reference_kernel");
    expected = upconv3d::tests::rectified(reference.download());
  }

  /// hi and lo of integers that make w_hi*x_lo + w_lo*x_hi + w_hi*x_hi = w*x and use every product:
  /// x = (3x, -2x), w = (-2w, w).
  void upload_operands(const std::vector<double>& x, const std::vector<double>& w) {
    const bool split = instance_.products == 3;
    const double x_scale = kScaled ? std::ldexp(1.0, -kSampleExponent) : 1.0;
    const double w_scale = kScaled ? std::ldexp(1.0, -kColumnExponent) : 1.0;
    x_hi_.upload(rounded<Operand>(x, x_scale * (split ? 3 : 1)));
    w_hi_.upload(rounded<Operand>(w, w_scale * (split ? -2 : 1)));
    x_lo_.upload(rounded<Operand>(x, x_scale * -2));
    w_lo_.upload(rounded<Operand>(w, w_scale));
  }

  void finalize(std::int64_t tiles, const DeviceBuffer<float>& part,
                const DeviceBuffer<std::int32_t>& counts) {
    upconv3d::cuda::FinalizeParams params;
    params.shape = {
        problem_.n, problem_.k, problem_.positions(), problem_.num_groups, instance_.block_positions, tiles};
    params.dtype = instance_.output;
    params.part = part.get();
    params.counts = counts.get();
    params.eps = problem_.eps;
    DeviceBuffer<char> scratch(upconv3d::cuda::finalize_scratch_bytes(params.shape));
    DeviceBuffer<float> table(3 * problem_.n * problem_.k);
    table.poison();
    params.scratch = scratch.get();
    params.table = table.get();
    upconv3d::cuda::launch_group_norm_finalize(params, nullptr);
    channel_table = table.download();
  }
};

std::string disagreement(const char* what, std::int64_t n, std::int64_t index, std::int64_t k, double got,
                         double expected) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s of n=%lld position=%lld k=%lld is %.9g, expected %.9g", what,
                (long long)n, (long long)index, (long long)k, got, expected);
  return text;
}

/// relu(conv) exactly.
template <class Fixture>
std::string check_activation(const Fixture& fixture) {
  const std::int64_t k = fixture.problem().k, positions = fixture.problem().positions();
  for (std::int64_t i = 0; i < fixture.samples * positions * k; ++i) {
    const double got = double(float(fixture.a[i]));
    if (got != fixture.expected[i]) {
      return disagreement("a", i / k / positions, i / k % positions, i % k, got, fixture.expected[i]);
    }
  }
  return "";
}

/// Mean and scale of every group; without gamma and beta, mean and shift together hold the mean.
template <class Fixture>
std::string check_table(const Fixture& fixture) {
  const Problem& problem = fixture.problem();
  const std::int64_t channels = problem.k / problem.num_groups, plane = problem.n * problem.k;
  const std::int64_t positions = problem.positions();
  for (std::int64_t ng = 0; ng < fixture.samples * problem.num_groups; ++ng) {
    const std::int64_t n = ng / problem.num_groups, first = ng % problem.num_groups * channels;
    const double* const values = fixture.expected.data() + n * positions * problem.k + first;
    double mean = 0, largest = 0, m2 = 0;
    for (std::int64_t i = 0; i < positions * channels; ++i) {
      const double v = values[i / channels * problem.k + i % channels];
      mean += v / double(positions * channels);
      largest = std::max(largest, v);
    }
    for (std::int64_t i = 0; i < positions * channels; ++i) {
      m2 += std::pow(values[i / channels * problem.k + i % channels] - mean, 2);
    }
    const double scale = 1 / std::sqrt(m2 / double(positions * channels) + problem.eps);
    for (std::int64_t k = first; k < first + channels; ++k) {
      const float* const row = fixture.channel_table.data() + n * problem.k + k;
      const double whole_mean = row[0] - row[2 * plane] / scale;
      if (!(std::abs(whole_mean - mean) <= kStatAccuracy * largest)) {
        return disagreement("mean", n, -1, k, whole_mean, mean);
      }
      if (!(std::abs(row[plane] - scale) <= kStatAccuracy * scale)) {
        return disagreement("scale", n, -1, k, row[plane], scale);
      }
    }
  }
  return "";
}

/// 20 launches give the same bits.
template <class Fixture>
std::string check_repeats(Fixture& fixture, int split_axes) {
  constexpr int kLaunches = 20;
  constexpr std::int64_t kGroups = 8;
  fixture.launch(split_axes, kGroups);
  const auto a = fixture.a;
  const auto channel_table = fixture.channel_table;
  for (int i = 1; i < kLaunches; ++i) {
    fixture.launch(split_axes, kGroups);
    if (std::memcmp(a.data(), fixture.a.data(), a.size() * sizeof(a[0])) != 0) {
      return "launch " + std::to_string(i) + " stored other bits than launch 0";
    }
    if (channel_table != fixture.channel_table) {
      return "launch " + std::to_string(i) + " wrote another table than launch 0";
    }
  }
  return "";
}

/// Every case uncut and cut along 1 to 3 axes; group counts take turns.
template <class Operand, class Output>
void run_instance(const ConvInstance& instance, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  for (int index = 0; index < int(std::size(kCases)); ++index) {
    Fixture<Operand, Output> fixture(instance, kCases[index], state);
    const std::int64_t counts[] = {1, fixture.problem().k / 8, 2, fixture.problem().k};
    for (int split_axes = 0; split_axes <= 3; ++split_axes) {
      if (border_slabs(fixture.problem(), split_axes).size() > std::size_t(upconv3d::kMaxSlabs)) continue;
      const std::int64_t groups = counts[split_axes];
      const std::string label = concat("case ", index, ": ", describe(fixture.problem()), ", ", groups,
                                       " norm groups, split_axes=", split_axes);
      tally.run(instance, label, [&] {
        fixture.launch(split_axes, groups);
        const std::string problem = check_activation(fixture);
        return problem.empty() ? check_table(fixture) : problem;
      });
      if (index == kRepeatedCase && split_axes % 3 == 0) {
        tally.run(instance, "repeated, " + label, [&] { return check_repeats(fixture, split_axes); });
      }
    }
  }
}

void run_instance(const ConvInstance& instance, Tally& tally) {
  if (instance.operand == DType::kBFloat16) {
    run_instance<cutlass::bfloat16_t, cutlass::bfloat16_t>(instance, tally);
  } else if (instance.output == DType::kFloat16) {
    run_instance<cutlass::half_t, cutlass::half_t>(instance, tally);
  } else {
    run_instance<cutlass::half_t, float>(instance, tally);
  }
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(80)) return upconv3d::tests::kSkipped;
  Tally tally;
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled || instance.arch != 80) continue;
    tally.run(instance, "preparing its cases", [&] {
      run_instance(instance, tally);
      return std::string();
    });
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
