// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_relu_group_norm_sm90 on its own against a plain
/// double-precision convolution and GroupNorm. Where the kernel ends with the moments: relu(conv) exactly, on
/// small integers, or to half a step of 16 bits; and its table to float accuracy or that of those steps.
/// Where it normalizes: y to the accuracy of what it stores. What it writes is NaN before, so that nothing is
/// left unwritten; repeated launches must give the same bits. Needs a GPU of compute capability 9.0. Exit
/// code 0: all passed.
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

#include "conv_transpose_cases.hpp"
#include "conv_transpose_reference.cuh"
#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cutlass/numeric_types.h"
#include "gpu_test.hpp"
#include "tally.hpp"

namespace {

using upconv3d::ConvInstance;
using upconv3d::DType;
using upconv3d::Extent3;
using upconv3d::plan_slabs;
using upconv3d::Problem;
using upconv3d::slab_tiles;
using upconv3d::volume;
using upconv3d::cuda::check;
using upconv3d::tests::Case;
using upconv3d::tests::DeviceBuffer;
using upconv3d::tests::group_counts;
using upconv3d::tests::kCases;
using upconv3d::tests::kNaN;
using upconv3d::tests::next_random;
using upconv3d::tests::reference_kernel;
using upconv3d::tests::rounded;
using upconv3d::tests::small_integers;
using upconv3d::tests::Tally;

/// The case that is launched again and again: five samples, several channel tiles, most work.
constexpr int kRepeatedCase = 9;

/// How the output is cut: border_slabs along 0 to 3 axes, or tap_sharing_slabs.
struct Cut {
  int split_axes;
  bool share_taps;
};
constexpr Cut kCuts[] = {{0, false}, {1, false}, {2, false}, {3, false}, {0, true}};

/// Few blocks, so that each walks several tiles and waits for the others.
constexpr int kFewBlocks = 5;

/// Scaling x by 2^3 and w by 2^-2 and undoing it with unscale exponents exercises the float epilogue.
constexpr int kSampleExponent = 3;
constexpr int kColumnExponent = -2;

/// What float statistics and their use are held to: 32 roundings.
constexpr double kStatAccuracy = 32 * 0x1p-24;

bool is_quantized(const ConvInstance& instance) {
  return instance.stored_bits < 8 * size_of(instance.output);
}

/// Half a unit in the last place of a value of 1.
double unit_roundoff(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

/// One case's tensors on the device and its exact relu(conv + bias), for all launches of an instance.
template <class Operand, class Output>
class Fixture {
 public:
  Fixture(const ConvInstance& instance, const Case& shape, std::uint64_t& state)
      : instance_(instance),
        problem_(make_problem(instance, shape)),
        x_packed_(kScaled || !upconv3d::has_operand_channels(problem_)),
        x_hi_(packed_x_size()),
        x_lo_(packed_x_size()),
        w_hi_(packed_w_size()),
        w_lo_(packed_w_size()),
        bias_(problem_.k),
        gamma_(problem_.k),
        beta_(problem_.k),
        a_(problem_.n * problem_.positions() * upconv3d::padded_channels(problem_.k)),
        unscale_sample_(problem_.n),
        unscale_column_(problem_.k),
        samples(shape.next == 0.0 ? problem_.n : 1),
        channels(shape.nan_group ? problem_.k - upconv3d::group_outputs(problem_) : problem_.k) {
    // Sparse and small enough that every sum is exact in a 16-bit output: at most 2^8 in bfloat16.
    auto x = small_integers(x_size(), 1, state);
    const auto w = small_integers(w_size(), 1, state);
    for (double& v : x) v = next_random(state) % 16 == 0 ? v : 0.0;
    if (shape.next != 0.0) {
      const auto sample = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
      std::fill(sample, sample + 64 * problem_.c, shape.next);
    }
    const std::int64_t finite = problem_.c - upconv3d::group_inputs(problem_);
    for (std::size_t i = 0; shape.nan_group && i < x.size(); ++i) {
      if (std::int64_t(i) % problem_.c >= finite) x[i] = kNaN;
    }
    auto bias = small_integers(problem_.k, 3, state);
    // Thirds, which 16 bits with a power-of-two step must round.
    if (is_quantized(instance)) {
      for (double& v : bias) v = double(float(v / 3));
    }
    gamma = small_integers(problem_.k, 3, state);
    beta = small_integers(problem_.k, 3, state);
    for (double& v : gamma) v = 1.5 + v / 4;
    compute_reference(x, w, bias);
    upload_operands(x, w);
    bias_.upload(rounded<Output>(bias));
    gamma_.upload(rounded<Output>(gamma));
    beta_.upload(rounded<Output>(beta));
    unscale_sample_.upload(std::vector<std::int32_t>(problem_.n, kSampleExponent));
    unscale_column_.upload(std::vector<std::int32_t>(problem_.k, kColumnExponent));
  }

  /// Launches the kernel once. \param affine gamma and beta are given
  /// \param normalizes else the kernel ends with the moments, as channel_table
  void launch(const Cut& cut, std::int64_t num_groups, bool affine, bool normalizes, int sm_count) {
    problem_.num_groups = num_groups;
    const auto slabs = plan_slabs(problem_, cut.split_axes, cut.share_taps);
    const std::int64_t tiles = slab_tiles(slabs, moment_positions(instance_));
    const std::int64_t pitch = upconv3d::padded_channels(problem_.k);
    const bool with_steps = is_quantized(instance_) && !normalizes;
    const std::int64_t granules = problem_.k >> moment_granule_shift(problem_);
    DeviceBuffer<float> part(problem_.n * tiles * granules * 2);
    DeviceBuffer<float> table(normalizes ? problem_.n * num_groups * 4 : 3 * problem_.n * problem_.k);
    DeviceBuffer<std::int8_t> steps(problem_.n * tiles * pitch);
    DeviceBuffer<std::int32_t> moment_of(problem_.positions());
    DeviceBuffer<std::int32_t> counters(upconv3d::cuda::counter_count(problem_));
    part.poison(), table.poison(), steps.poison(), moment_of.poison(), a_.poison();
    counters.clear();
    upconv3d::cuda::ConvTransposeParams params;
    params.problem = problem_;
    params.x_hi = x_hi_.get(), params.x_lo = x_lo_.get(), params.w_hi = w_hi_.get(),
    params.w_lo = w_lo_.get(), params.x_packed = x_packed_;
    params.bias = bias_.get();
    if (affine) params.gamma = gamma_.get(), params.beta = beta_.get();
    if (kScaled) params.unscale_sample = unscale_sample_.get(), params.unscale_column = unscale_column_.get();
    params.a = a_.get(), params.part = part.get(), params.counters = counters.get();
    (normalizes ? params.table : params.channel_table) = table.get();
    if (is_quantized(instance_)) params.steps = steps.get();
    if (with_steps) params.moment_of = moment_of.get();
    params.split_axes = cut.split_axes;
    params.share_taps = cut.share_taps;
    params.sm_count = sm_count;
    upconv3d::cuda::find_conv_transpose_launcher(instance_.name)(params, nullptr);
    check(cudaDeviceSynchronize(), instance_.name);
    const auto rows = a_.download();
    a.resize(expected.size());
    if (with_steps) {
      const auto moments =
          upconv3d::tests::moments_of_positions(problem_, slabs, moment_positions(instance_));
      if (moment_of.download() != moments) throw std::runtime_error("moment_of is not where tiles are");
      decode(rows, steps.download(), moments, tiles);
    } else {
      for (std::size_t i = 0; i < a.size(); ++i) a[i] = rows[i / problem_.k * pitch + i % problem_.k];
    }
    channel_table = normalizes ? std::vector<float>() : table.download();
  }

  const Problem& problem() const { return problem_; }
  const ConvInstance& instance() const { return instance_; }

 private:
  static constexpr bool kScaled = std::is_same_v<Output, float>;

  const ConvInstance& instance_;
  Problem problem_;
  const bool x_packed_;
  DeviceBuffer<Operand> x_hi_, x_lo_, w_hi_, w_lo_;
  DeviceBuffer<Output> bias_, gamma_, beta_, a_;
  DeviceBuffer<std::int32_t> unscale_sample_, unscale_column_;

 public:
  const std::int64_t samples;        // that are compared, from the first on
  const std::int64_t channels;       // likewise
  std::vector<double> expected;      // [N,Z,P,Q,K] relu(conv + bias)
  std::vector<double> gamma, beta;   // [K]
  std::vector<Output> a;             // [N,Z,P,Q,K] of the last launch
  std::vector<double> half_step;     // [N,Z,P,Q,K] of the last launch, where a was stored with steps
  std::vector<float> channel_table;  // [3,N,K] of the last launch, where it did not normalize

 private:
  /// a and half_step from 16 bits of `rows` and their steps [N,tiles,pitch].
  void decode(const std::vector<Output>& rows, const std::vector<std::int8_t>& steps,
              const std::vector<std::int32_t>& moments, std::int64_t tiles) {
    const std::int64_t pitch = upconv3d::padded_channels(problem_.k), positions = problem_.positions();
    std::vector<std::uint16_t> bits(problem_.n * positions * pitch);
    std::memcpy(bits.data(), rows.data(), bits.size() * sizeof(bits[0]));
    half_step.resize(a.size());
    for (std::int64_t i = 0; i < std::int64_t(a.size()); ++i) {
      const std::int64_t row = i / problem_.k, k = i % problem_.k;
      const int step = steps[(row / positions * tiles + moments[row % positions]) * pitch + k];
      a[i] = Output(step == -128 ? float(kNaN) : std::ldexp(float(bits[row * pitch + k]), step));
      half_step[i] = std::ldexp(0.5, step);
    }
  }
  static Problem make_problem(const ConvInstance& instance, const Case& shape) {
    Problem problem;
    problem.n = shape.n, problem.c = shape.c, problem.k = shape.k;
    problem.in = shape.in, problem.kernel = shape.kernel, problem.padding = shape.padding;
    problem.stride = shape.stride;
    problem.dtype = instance.output;
    problem.groups = shape.groups;
    problem.has_bias = true;
    return problem;
  }
  std::size_t x_size() const { return problem_.n * volume(problem_.in) * problem_.c; }
  std::size_t w_size() const {
    return volume(problem_.kernel) * problem_.k * upconv3d::group_inputs(problem_);
  }
  std::size_t packed_x_size() const {
    return x_packed_ ? x_size() / upconv3d::group_inputs(problem_) * operand_channels(problem_) : x_size();
  }
  std::size_t packed_w_size() const {
    return volume(problem_.kernel) * problem_.k * operand_channels(problem_);
  }

  void compute_reference(const std::vector<double>& x, const std::vector<double>& w,
                         const std::vector<double>& bias) {
    const std::int64_t elements = problem_.n * problem_.positions() * problem_.k;
    DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size()), reference(elements);
    x64.upload(x), w64.upload(w), bias64.upload(bias);
    reference_kernel<<<unsigned((elements + 127) / 128), 128>>>(x64.get(), w64.get(), bias64.get(),
                                                                reference.get(), problem_, problem_.out());
    upconv3d::cuda::check_launch("reference_kernel");
    expected = reference.download();
  }

  /// hi and lo of integers that make w_hi*x_lo + w_lo*x_hi + w_hi*x_hi = w*x and use every product:
  /// x = (3x, -2x), w = (-2w, w).
  void upload_operands(std::vector<double> x, std::vector<double> w) {
    const std::int64_t channels = upconv3d::group_inputs(problem_), pitch = operand_channels(problem_);
    if (x_packed_) x = upconv3d::tests::packed(x, problem_.n, problem_.groups, channels, pitch);
    w = upconv3d::tests::packed(w, 1, 1, channels, pitch);
    const bool split = instance_.products == 3;
    const double x_scale = kScaled ? std::ldexp(1.0, -kSampleExponent) : 1.0;
    const double w_scale = kScaled ? std::ldexp(1.0, -kColumnExponent) : 1.0;
    x_hi_.upload(rounded<Operand>(x, x_scale * (split ? 3 : 1)));
    w_hi_.upload(rounded<Operand>(w, w_scale * (split ? -2 : 1)));
    x_lo_.upload(rounded<Operand>(x, x_scale * -2));
    w_lo_.upload(rounded<Operand>(w, w_scale));
  }
};

/// Moments of one group of a sample, in double.
struct GroupMoments {
  double mean = 0, rstd = 0;
  double largest = 0;                   // value of the group
  std::vector<double> channel_largest;  // [K/G] value of each channel
};

GroupMoments group_moments(const std::vector<double>& values, const Problem& problem, std::int64_t n,
                           std::int64_t group) {
  const std::int64_t channels = problem.k / problem.num_groups, positions = problem.positions();
  const double* const first = values.data() + n * positions * problem.k + group * channels;
  GroupMoments moments;
  moments.channel_largest.resize(channels);
  for (std::int64_t i = 0; i < positions * channels; ++i) {
    const double v = first[i / channels * problem.k + i % channels];
    moments.mean += v;
    double& largest = moments.channel_largest[i % channels];
    largest = std::max(largest, v);
  }
  const double count = double(positions * channels);
  moments.mean /= count;
  double m2 = 0;
  for (std::int64_t i = 0; i < positions * channels; ++i) {
    const double delta = first[i / channels * problem.k + i % channels] - moments.mean;
    m2 += delta * delta;
  }
  moments.rstd = 1 / std::sqrt(m2 / count + problem.eps);
  for (const double v : moments.channel_largest) moments.largest = std::max(moments.largest, v);
  return moments;
}

std::string disagreement(const char* what, std::int64_t n, std::int64_t index, std::int64_t k, double got,
                         double expected) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s of n=%lld position=%lld k=%lld is %.9g, expected %.9g", what,
                (long long)n, (long long)index, (long long)k, got, expected);
  return text;
}

/// relu(conv) exactly; with steps to half of one, which is at most 2^-16 of the channel's largest value.
template <class Fixture>
std::string check_activation(const Fixture& fixture) {
  const std::int64_t k = fixture.problem().k, positions = fixture.problem().positions();
  std::vector<double> largest(fixture.problem().n * k, 0);  // [N,K] value of each channel
  for (std::size_t i = 0; i < fixture.expected.size(); ++i) {
    double& of_channel = largest[i / k / positions * k + i % k];
    of_channel = std::max(of_channel, fixture.expected[i]);
  }
  for (std::int64_t i = 0; i < fixture.samples * positions * k; ++i) {
    if (i % k >= fixture.channels) continue;
    const double got = double(float(fixture.a[i])), want = fixture.expected[i];
    double slack = 0;
    if (is_quantized(fixture.instance())) {
      slack = 1.01 * fixture.half_step[i] + 0x1p-23 * want;  // a float is what was rounded
      const double bound = 1.01 * 0x1p-16 * largest[i / k / positions * k + i % k] + 0x1p-126;
      if (!(fixture.half_step[i] <= bound)) {
        return disagreement("half a step", i / k / positions, i / k % positions, i % k, fixture.half_step[i],
                            bound);
      }
    }
    if (!(std::abs(got - want) <= slack)) {
      return disagreement("a", i / k / positions, i / k % positions, i % k, got, fixture.expected[i]);
    }
  }
  return "";
}

/// mean, scale and shift; together mean and shift must hold the mean and beta.
template <class Fixture>
std::string check_channel_table(const Fixture& fixture, bool affine) {
  const Problem& problem = fixture.problem();
  const std::int64_t channels = problem.k / problem.num_groups, plane = problem.n * problem.k;
  // What the errors of all values do to mean and deviation.
  const double step = is_quantized(fixture.instance()) ? 1.01 * 0x1p-16 : 0.0;
  for (std::int64_t ng = 0; ng < fixture.samples * problem.num_groups; ++ng) {
    const std::int64_t n = ng / problem.num_groups, group = ng % problem.num_groups;
    if (group * channels >= fixture.channels) continue;
    const GroupMoments moments = group_moments(fixture.expected, problem, n, group);
    for (std::int64_t k = group * channels; k < (group + 1) * channels; ++k) {
      const float* const row = fixture.channel_table.data() + n * problem.k + k;
      const double scale = (affine ? fixture.gamma[k] : 1.0) * moments.rstd;
      const double shift = (affine ? fixture.beta[k] : 0.0) - (moments.mean - row[0]) * scale;
      if (!(std::abs(row[0] - moments.mean) <= (kStatAccuracy + step) * moments.largest)) {
        return disagreement("mean", n, -1, k, row[0], moments.mean);
      }
      if (!(std::abs(row[plane] - scale) <=
            (kStatAccuracy + step * moments.largest * moments.rstd) * std::abs(scale))) {
        return disagreement("scale", n, -1, k, row[plane], scale);
      }
      const double slack =
          (kStatAccuracy + step) * moments.largest * std::abs(scale) + kStatAccuracy * std::abs(shift);
      if (!(std::abs(row[2 * plane] - shift) <= slack)) {
        return disagreement("shift", n, -1, k, row[2 * plane], shift);
      }
    }
  }
  return "";
}

/// y, to its own rounding, that of the statistics and, of 16 bits with a step, at most 2^-16 of the channel's
/// largest value.
template <class Fixture>
std::string check_y(const Fixture& fixture, bool affine) {
  const Problem& problem = fixture.problem();
  const std::int64_t channels = problem.k / problem.num_groups, positions = problem.positions();
  const double roundoff = 1.01 * unit_roundoff(fixture.instance().output);
  const double step = is_quantized(fixture.instance()) ? 0x1p-16 : 0.0;
  for (std::int64_t ng = 0; ng < fixture.samples * problem.num_groups; ++ng) {
    const std::int64_t n = ng / problem.num_groups, group = ng % problem.num_groups;
    if (group * channels >= fixture.channels) continue;
    const GroupMoments moments = group_moments(fixture.expected, problem, n, group);
    for (std::int64_t i = 0; i < positions * channels; ++i) {
      const std::int64_t k = group * channels + i % channels;
      const std::int64_t at = (n * positions + i / channels) * problem.k + k;
      const double gamma = affine ? fixture.gamma[k] : 1.0, beta = affine ? fixture.beta[k] : 0.0;
      const double normalized = (fixture.expected[at] - moments.mean) * moments.rstd;
      const double y = normalized * gamma + beta;
      const double scale = std::abs(gamma) * moments.rstd;
      // The value's own error, and what the errors of all values do to mean and deviation.
      const double stored =
          step * scale *
          (moments.channel_largest[i % channels] + moments.largest * (1 + std::abs(normalized)));
      const double slack =
          roundoff * std::abs(y) + stored +
          kStatAccuracy * (moments.largest * scale + std::abs(normalized * gamma) + std::abs(beta));
      const double got = double(float(fixture.a[at]));
      if (!(std::abs(got - y) <= slack)) return disagreement("y", n, i / channels, k, got, y);
    }
  }
  return "";
}

std::string label(const Problem& problem, const Cut& cut, std::int64_t groups, bool normalizes) {
  return "N=" + std::to_string(problem.n) + " C=" + std::to_string(problem.c) +
         " K=" + std::to_string(problem.k) + " P=" + std::to_string(problem.out()[1]) +
         " groups=" + std::to_string(problem.groups) + " num_groups=" + std::to_string(groups) +
         " split_axes=" + std::to_string(cut.split_axes) + (cut.share_taps ? " share_taps" : "") +
         (normalizes ? " normalizing" : " moments only");
}

/// 20 launches, by few blocks and by all that fit, give the same bits.
template <class Fixture>
std::string check_repeats(Fixture& fixture, const Cut& cut, bool normalizes, int sm_count) {
  constexpr int kLaunches = 20;
  constexpr std::int64_t kGroups = 8;
  fixture.launch(cut, kGroups, true, normalizes, sm_count);
  const auto a = fixture.a;
  const auto channel_table = fixture.channel_table;
  for (int i = 1; i < kLaunches; ++i) {
    fixture.launch(cut, kGroups, true, normalizes, i % 4 == 1 ? kFewBlocks : sm_count);
    if (std::memcmp(a.data(), fixture.a.data(), a.size() * sizeof(a[0])) != 0) {
      return "launch " + std::to_string(i) + " stored other bits than launch 0";
    }
    if (channel_table != fixture.channel_table) {
      return "launch " + std::to_string(i) + " wrote another channel_table than launch 0";
    }
  }
  return "";
}

/// Every case and cut, in both modes that the instance has; group counts, and whether gamma and beta are
/// given, take turns.
template <class Operand, class Output>
void run_instance(const ConvInstance& instance, int sm_count, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  for (int index = 0; index < int(std::size(kCases)); ++index) {
    Fixture<Operand, Output> fixture(instance, kCases[index], state);
    const std::vector<std::int64_t> counts = group_counts(kCases[index]);
    for (const bool normalizes : {false, true}) {
      // This kernel does not normalize rows of y that are no whole chunks.
      if (normalizes && kCases[index].k % upconv3d::kChannelUnit != 0) continue;
      std::size_t turn = normalizes ? 0 : 1;
      for (const Cut& cut : kCuts) {
        // Loads that serve several taps leave three products no room for w.
        if (cut.share_taps && instance.products == 3) continue;
        // Phases of a stride are slabs already.
        if (kCases[index].stride != Extent3{1, 1, 1} && (cut.share_taps || cut.split_axes > 0)) continue;
        const std::int64_t groups = counts[turn++ % counts.size()];
        const bool affine = (turn + index) % 3 != 0;
        tally.run(instance, label(fixture.problem(), cut, groups, normalizes), [&] {
          fixture.launch(cut, groups, affine, normalizes, kFewBlocks);
          if (normalizes) return check_y(fixture, affine);
          const std::string problem = check_activation(fixture);
          return problem.empty() ? check_channel_table(fixture, affine) : problem;
        });
        if (index == kRepeatedCase && (cut.share_taps || cut.split_axes == 3)) {
          tally.run(instance, "repeated, " + label(fixture.problem(), cut, 8, normalizes),
                    [&] { return check_repeats(fixture, cut, normalizes, sm_count); });
        }
      }
    }
  }
}

void run_instance(const ConvInstance& instance, int sm_count, Tally& tally) {
  if (instance.operand == DType::kBFloat16) {
    run_instance<cutlass::bfloat16_t, cutlass::bfloat16_t>(instance, sm_count, tally);
  } else if (instance.output == DType::kFloat16) {
    run_instance<cutlass::half_t, cutlass::half_t>(instance, sm_count, tally);
  } else {
    run_instance<cutlass::half_t, float>(instance, sm_count, tally);
  }
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  Tally tally;
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "asking for the SM count");
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled || instance.arch != 90 || instance.twice) continue;
    tally.run(instance, "preparing its cases", [&] {
      run_instance(instance, sm_count, tally);
      return std::string();
    });
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
