// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the tests of the SM90 kernels that write nothing but a normalized y share: a case on the device, with
/// its exact convolution, launches over poisoned memory, and y compared with a normalization in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cutlass/numeric_types.h"
#include "tail_cases.hpp"

namespace upconv3d::tests {

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, stride, padding, output_padding, dilation;
  // Where not 0: what sample 1 is filled with, and no tile of sample 0 may take in. Then sample 0 alone is
  // compared.
  double next = 0.0;
  bool is_rounded = false;  // conv + bias may be what 16 bits do not hold; see Fixture
};

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr Extent3 kNone = {0, 0, 0}, kOnes = {1, 1, 1};

/// Scaling x by 2^3 and w by 2^-2 and undoing it with unscale exponents exercises the float epilogue.
inline constexpr int kSampleExponent = 3;
inline constexpr int kColumnExponent = -2;

/// What float statistics and their use are held to: 32 roundings.
inline constexpr double kStatAccuracy = 32 * 0x1p-24;

inline double unit_roundoff(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

/// Divisors of K: layer norm, instance norm, groups of 2, 4 and 8 channels.
inline std::vector<std::int64_t> group_counts(std::int64_t k) {
  std::vector<std::int64_t> counts;
  for (const std::int64_t groups : {std::int64_t{1}, k / 2, k / 4, k / 8, k}) {
    if (std::find(counts.begin(), counts.end(), groups) == counts.end()) counts.push_back(groups);
  }
  return counts;
}

inline Problem make_problem(const ConvInstance& instance, const Case& shape, Layout y_layout) {
  Problem problem;
  problem.n = shape.n, problem.c = shape.c, problem.k = shape.k;
  problem.in = shape.in, problem.kernel = shape.kernel, problem.stride = shape.stride;
  problem.padding = shape.padding, problem.output_padding = shape.output_padding;
  problem.dilation = shape.dilation;
  problem.dtype = instance.output;
  problem.has_bias = true;
  problem.y_layout = y_layout;
  return problem;
}

/// One in how many values of x may differ from 0 for sums of products, of -2 to 2 each, to be integers that
/// bfloat16 holds: 2^8 is then 6.4 standard deviations.
inline std::int64_t sparsity(const Problem& problem) {
  constexpr std::int64_t kProducts = 400;
  std::int64_t products = 1;
  for (const Slab& slab : border_slabs(problem, 0)) {
    products = std::max(products, slab.tap_count() * problem.c);
  }
  return ceil_div(products, kProducts);
}

/// Scratch memory of a launch, in floats.
struct Scratch {
  std::int64_t part, table;
};

struct Launch {
  Tail tail{};  // linear where it has no norm
  std::int64_t num_groups = 1;
  bool affine = true;  // gamma and beta are given
  int sm_count = 0;
  bool x_in_place = false;       // x is as it lies, where it can be, and not packed
  bool w_in_place = false;       // likewise, where Fixture::can_read_w_in_place
  bool clears_counters = false;  // which are poisoned; else they are zero
};

/// One case's tensors on the device and its exact convolution, for all launches of an instance.
///
/// \tparam Kernel has
///   kRoundsFirst: before(conv + bias) is rounded to Output, and then normalized. Then x is so sparse that
///     nothing is lost, but for cases that are to be rounded.
///   scratch(instance, problem)
///   reads_w_in_place(problem) whether w may be as it lies, of 16 bit
///   complete(params) sets what no other kernel takes
template <class Kernel, class Operand, class Output>
class Fixture {
 public:
  Fixture(const ConvInstance& instance, const Case& shape, Layout y_layout, std::uint64_t& state)
      : problem(make_problem(instance, shape, y_layout)),
        samples(shape.next == 0.0 ? shape.n : 1),
        instance_(instance),
        x_(shape.n * volume(shape.in) * operand_channels(problem)),
        x_in_place_(shape.n * volume(shape.in) * shape.c),
        w_(volume(shape.kernel) * shape.k * operand_channels(problem)),
        w_in_place_(volume(shape.kernel) * shape.k * shape.c),
        bias_(shape.k),
        gamma_(shape.k),
        beta_(shape.k),
        slopes_(shape.k),
        y_(problem.n * problem.positions() * problem.k),
        unscale_sample_(shape.n),
        unscale_column_(shape.k) {
    auto x = small_integers(shape.n * volume(shape.in) * shape.c, 2, state);
    const auto w = small_integers(volume(shape.kernel) * shape.k * shape.c, 2, state);
    const auto bias = small_integers(shape.k, 3, state);
    if (Kernel::kRoundsFirst && !shape.is_rounded) {
      const std::uint64_t one_in = static_cast<std::uint64_t>(sparsity(problem));
      for (double& v : x) v = next_random(state) % one_in == 0 ? v : 0.0;
    }
    if (shape.next != 0.0)
      std::fill(x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end(), shape.next);
    gamma = small_integers(shape.k, 3, state);
    beta = small_integers(shape.k, 3, state);
    for (double& v : gamma) v = 1.5 + v / 4;
    convolve(x, w, bias);
    if (Kernel::kRoundsFirst) round_convolution(shape.is_rounded);
    const std::int64_t pitch = operand_channels(problem);
    x_.upload(rounded<Operand>(packed(x, shape.n, 1, shape.c, pitch),
                               kScaled ? std::ldexp(1.0, -kSampleExponent) : 1.0));
    x_in_place_.upload(rounded<Operand>(x));
    w_.upload(
        rounded<Operand>(packed(w, 1, 1, shape.c, pitch), kScaled ? std::ldexp(1.0, -kColumnExponent) : 1.0));
    w_in_place_.upload(rounded<Operand>(transposed(w, shape.c)));
    bias_.upload(rounded<Output>(bias));
    gamma_.upload(rounded<Output>(gamma));
    beta_.upload(rounded<Output>(beta));
    slopes_.upload(rounded<Output>(prelu_slopes(shape.k)));
    unscale_sample_.upload(std::vector<std::int32_t>(shape.n, kSampleExponent));
    unscale_column_.upload(std::vector<std::int32_t>(shape.k, kColumnExponent));
  }

  const ConvInstance& instance() const { return instance_; }

  /// Whether the variant takes the case's w as it lies.
  bool can_read_w_in_place() const { return !kScaled && Kernel::reads_w_in_place(problem); }
  /// Whether it takes x so.
  bool can_read_x_in_place() const { return !kScaled && has_operand_channels(problem); }

  /// Launches the kernel once, over poisoned memory.
  void launch(const Launch& launch) {
    problem.tail = launch.tail;
    problem.num_groups = launch.num_groups;
    const bool norm = launch.tail.norm;
    // Without a norm compared as it is.
    expected = norm && launch.tail.before() == Activation::kRelu ? rectified(convolved_) : convolved_;
    const Scratch scratch = Kernel::scratch(instance_, problem);
    DeviceBuffer<float> part(scratch.part), table(scratch.table);
    DeviceBuffer<std::int32_t> counters(cuda::counter_count(problem));
    part.poison(), table.poison(), y_.poison();
    launch.clears_counters ? counters.poison() : counters.clear();
    cuda::ConvTransposeParams params;
    params.problem = problem;
    params.x_packed = !(launch.x_in_place && can_read_x_in_place());
    params.x_hi = params.x_packed ? x_.get() : x_in_place_.get();
    params.w_in_place = launch.w_in_place && can_read_w_in_place();
    params.w_hi = params.w_in_place ? w_in_place_.get() : w_.get();
    params.bias = bias_.get();
    if (launch.affine) params.gamma = gamma_.get(), params.beta = beta_.get();
    if (kScaled) params.unscale_sample = unscale_sample_.get(), params.unscale_column = unscale_column_.get();
    params.before = activation(launch.tail.before());
    params.after = activation(launch.tail.after());
    params.a = y_.get();
    params.linear = !norm;
    if (norm) params.part = part.get(), params.table = table.get();
    params.counters = counters.get(), params.clears_counters = launch.clears_counters;
    params.sm_count = launch.sm_count;
    Kernel::complete(params);
    cuda::find_conv_transpose_launcher(instance_.name)(params, nullptr);
    check(cudaDeviceSynchronize(), instance_.name);
    y = y_.download();
  }

  Problem problem;
  const std::int64_t samples;       // that are compared, from the first on
  std::vector<double> expected;     // [N,Z,P,Q,K] before(conv + bias) of the last launch
  std::vector<double> gamma, beta;  // [K]
  std::vector<Output> y;            // [N,Z,P,Q,K] or [N,K,Z,P,Q] of the last launch

 private:
  static constexpr bool kScaled = std::is_same_v<Output, float>;

  void convolve(const std::vector<double>& x, const std::vector<double>& w, const std::vector<double>& bias) {
    const std::int64_t elements = problem.n * problem.positions() * problem.k;
    DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size()), reference(elements);
    x64.upload(x), w64.upload(w), bias64.upload(bias);
    reference_kernel<<<unsigned((elements + 127) / 128), 128>>>(x64.get(), w64.get(), bias64.get(),
                                                                reference.get(), problem, problem.out());
    cuda::check_launch("reference_kernel");
    convolved_ = reference.download();
  }

  /// \throws std::runtime_error where values change that should not, or none does that should.
  void round_convolution(bool is_rounded) {
    const std::vector<Output> held = rounded<Output>(convolved_);
    bool changes = false;
    for (std::size_t i = 0; i < held.size(); ++i) {
      const double v = double(float(held[i]));
      const bool is_compared = std::int64_t(i) < samples * problem.positions() * problem.k;
      changes = changes || (is_compared && v != convolved_[i]);
      convolved_[i] = v;
    }
    // bfloat16 alone has too few bits for the sums of any case.
    if (changes && !is_rounded) throw std::runtime_error("the case's sums are not exact in y's dtype");
    if (is_rounded && !changes && std::is_same_v<Output, cutlass::bfloat16_t>) {
      throw std::runtime_error("the case's sums are all exact in y's dtype");
    }
  }

  cuda::ActivationParams activation(Activation kind) const {
    cuda::ActivationParams params;
    params.kind = kind;
    params.parameter = problem.tail.parameter;
    params.slopes = slopes_.get();
    params.slope_step = problem.tail.slopes > 1 ? 1 : 0;
    return params;
  }

  const ConvInstance& instance_;
  DeviceBuffer<Operand> x_, x_in_place_, w_, w_in_place_;
  DeviceBuffer<Output> bias_, gamma_, beta_, slopes_, y_;
  DeviceBuffer<std::int32_t> unscale_sample_, unscale_column_;
  std::vector<double> convolved_;  // [N,Z,P,Q,K] conv + bias
};

/// y of one group of a sample, to its own rounding and that of the statistics, by which it may be off before
/// an activation of a slope up to kSteepest.
template <class Fixture>
std::string check_group(const Fixture& fixture, std::int64_t n, std::int64_t group, bool affine) {
  const Problem& problem = fixture.problem;
  const std::int64_t channels = problem.k / problem.num_groups, positions = problem.positions();
  const std::int64_t sample = n * positions * problem.k;
  const auto at = [&](std::int64_t i) {
    return sample + i / channels * problem.k + group * channels + i % channels;
  };
  const auto y_at = [&](std::int64_t i) {
    return problem.y_layout == Layout::kNDHWC
               ? at(i)
               : sample + (group * channels + i % channels) * positions + i / channels;
  };
  const std::int64_t count = positions * channels;
  double mean = 0, m2 = 0, largest = 0;
  for (std::int64_t i = 0; i < count; ++i) mean += fixture.expected[at(i)] / double(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const double v = fixture.expected[at(i)];
    m2 += (v - mean) * (v - mean);
    largest = std::max(largest, std::abs(v));
  }
  const double rstd = 1 / std::sqrt(m2 / double(count) + problem.eps);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t k = group * channels + i % channels;
    const double gamma = affine ? fixture.gamma[k] : 1.0, beta = affine ? fixture.beta[k] : 0.0;
    const double normalized = (fixture.expected[at(i)] - mean) * rstd;
    const double y = normalized * gamma + beta;
    constexpr double kSteepest = 1.15;  // GELU's is 1.13
    const double slack =
        kSteepest * unit_roundoff(problem.dtype) * std::abs(y) +
        kSteepest * kStatAccuracy *
            (largest * std::abs(gamma) * rstd + std::abs(normalized * gamma) + std::abs(beta));
    const double want = activated(problem.tail, problem.tail.after(), y, k);
    const double got = double(float(fixture.y[y_at(i)]));
    if (std::abs(got - want) <= slack) continue;
    char text[160];
    std::snprintf(text, sizeof(text), "y of n=%lld position=%lld k=%lld is %.9g, expected %.9g", (long long)n,
                  (long long)(i / channels), (long long)k, got, want);
    return text;
  }
  return "";
}

template <class Fixture>
std::string check_y(const Fixture& fixture, bool affine) {
  for (std::int64_t n = 0; n < fixture.samples; ++n) {
    for (std::int64_t group = 0; group < fixture.problem.num_groups; ++group) {
      const std::string problem = check_group(fixture, n, group, affine);
      if (!problem.empty()) return problem;
    }
  }
  return "";
}

/// run of Operand and Output, which an instance has.
template <class Run>
void run_with_types(const ConvInstance& instance, const Run& run) {
  if (instance.operand == DType::kBFloat16) {
    run.template operator()<cutlass::bfloat16_t, cutlass::bfloat16_t>();
  } else if (instance.output == DType::kFloat16) {
    run.template operator()<cutlass::half_t, cutlass::half_t>();
  } else {
    run.template operator()<cutlass::half_t, float>();
  }
}

}  // namespace upconv3d::tests
