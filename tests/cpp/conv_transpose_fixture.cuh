// SPDX-License-Identifier: Apache-2.0
/// \file
/// A case of test_conv_transpose_sm90 on the device: its tensors, its exact convolution, and launches of a
/// variant of conv_transpose_relu_group_norm_sm90 in every mode that the kernel has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "conv_transpose_cases.hpp"
#include "conv_transpose_reference.cuh"
#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/im2col_limits.hpp"
#include "core/phase_pairs.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/slab_launches.hpp"
#include "core/sm90_schedule.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/group_norm/finalize_slabs.hpp"
#include "tail_cases.hpp"

namespace upconv3d::tests {

/// border_slabs along 0 to 3 axes, tap_sharing_slabs, and pairs of phases, which share loads or do not.
inline constexpr Cut kCuts[] = {{0, false}, {1, false},       {2, false},     {3, false},
                                {0, true},  {0, false, true}, {0, true, true}};

/// What the kernel ends with.
enum class Mode {
  kMoments,              // a and the moments, as channel_table
  kInPlace,              // y in a's memory
  kBeside,               // a and y
  kLinear,               // a alone
  kLinearChannelsFirst,  // the same, [N,K,Z,P,Q]
};
inline constexpr Mode kModes[] = {Mode::kMoments, Mode::kInPlace, Mode::kBeside, Mode::kLinear,
                                  Mode::kLinearChannelsFirst};

inline bool normalizes(Mode mode) {
  return mode == Mode::kInPlace || mode == Mode::kBeside;
}
inline bool is_linear(Mode mode) {
  return mode == Mode::kLinear || mode == Mode::kLinearChannelsFirst;
}

struct Launch {
  Cut cut{0, false};
  std::int64_t num_groups = 1;
  bool affine = true;  // gamma and beta are given
  Mode mode = Mode::kInPlace;
  Tail tail{};
  bool w_in_place = false;       // w is [C,T,R,S,K], not packed
  bool clears_counters = false;  // which are poisoned; else they are zero
  bool windows = false;  // of one position tile of all slabs; pairs of phases always have them, of two
};

/// Whether the planner has launches with that cut go window by window where they are large.
inline bool can_have_windows(const Problem& problem, const Cut& cut) {
  return problem.groups == 1 && plan_slabs(problem, cut).size() > 1;
}

/// Scaling x by 2^3 and w by 2^-2 and undoing it with unscale exponents exercises the float epilogue.
inline constexpr int kSampleExponent = 3;
inline constexpr int kColumnExponent = -2;

inline bool is_quantized(const ConvInstance& instance) {
  return instance.stored_bits < 8 * size_of(instance.output);
}

/// Whether the variant has the mode, and the case allows for it with the cut.
inline bool can_launch(const ConvInstance& instance, const Problem& problem, Mode mode, const Cut& cut) {
  // Loads that serve several taps leave three products no room for w.
  if (cut.share_taps && instance.products == 3) return false;
  if (cut.share_taps && problem.dilation != Extent3{1, 1, 1}) return false;
  // Phases of a stride are slabs already, of which some share loads or none.
  const bool has_stride = problem.stride != Extent3{1, 1, 1};
  if (has_stride && cut.split_axes > 0) return false;
  if (cut.pair_phases) {
    const PhasePairs paired = pair_phases(problem);
    const bool has_kernel = pairs_phases(instance.block_channels, instance.block_positions,
                                         instance.block_inputs, instance.products, instance.stored_bits);
    if (!has_kernel || paired.pairs.empty() || 2 * paired.pairs.size() > std::size_t{kMaxSlabs}) return false;
    if (!within_im2col(problem, reads_of_pairs(paired), cut.share_taps)) return false;
  } else if (has_stride && cut.share_taps) {
    const std::vector<Slab> slabs = tap_sharing_slabs(problem);
    const bool shares = std::any_of(slabs.begin(), slabs.end(),
                                    [&](const Slab& slab) { return shares_x_loads(problem, slab); });
    if (!shares || slabs.size() > std::size_t{kMaxSlabs}) return false;
  }
  if (is_linear(mode) && is_quantized(instance)) return false;
  if (mode == Mode::kLinearChannelsFirst) {
    Problem planes = problem;
    planes.y_layout = Layout::kNCDHW;
    return stores_in_place(planes, cut);
  }
  // This kernel does not normalize rows of y that are no whole chunks, nor in several launches.
  return !normalizes(mode) || (problem.k % kChannelUnit == 0 && slab_launches(problem) == 1);
}

/// Whether the variant takes the case's w as it lies.
inline bool can_read_w_in_place(const ConvInstance& instance, const Problem& problem) {
  return instance.products == 1 && instance.output == instance.operand && problem.groups == 1 &&
         problem.k % kChannelUnit == 0;
}

/// One case's tensors on the device and its exact convolution, for all launches of an instance.
template <class Operand, class Output>
class Fixture {
 public:
  Fixture(const ConvInstance& instance, const Case& shape, std::uint64_t& state)
      : instance_(instance),
        problem_(make_problem(instance, shape)),
        x_packed_(kScaled || !has_operand_channels(problem_)),
        x_hi_(packed_x_size()),
        x_lo_(packed_x_size()),
        w_hi_(packed_w_size()),
        w_lo_(packed_w_size()),
        w_in_place_(w_size()),
        bias_(problem_.k),
        gamma_(problem_.k),
        beta_(problem_.k),
        slopes_(problem_.k),
        a_(problem_.n * problem_.positions() * padded_channels(problem_.k)),
        y_(problem_.n * problem_.positions() * problem_.k),
        unscale_sample_(problem_.n),
        unscale_column_(problem_.k),
        is_real(shape.real),
        samples(shape.next == 0.0 ? problem_.n : 1),
        channels(shape.nan_group ? problem_.k - group_outputs(problem_) : problem_.k) {
    // Sparse and small enough that every sum is exact in a 16-bit output: at most 2^8 in bfloat16.
    auto x = small_integers(x_size(), 1, state);
    auto w = small_integers(w_size(), 1, state);
    for (double& v : x) v = next_random(state) % 16 == 0 ? v : 0.0;
    if (shape.next != 0.0) {
      const auto sample = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
      std::fill(sample, sample + 64 * problem_.c, shape.next);
    }
    const std::int64_t finite = problem_.c - group_inputs(problem_);
    for (std::size_t i = 0; shape.nan_group && i < x.size(); ++i) {
      if (std::int64_t(i) % problem_.c >= finite) x[i] = kNaN;
    }
    auto bias = small_integers(problem_.k, 3, state);
    // Thirds, which 16 bits with a power-of-two step must round.
    if (is_quantized(instance)) {
      for (double& v : bias) v = double(float(v / 3));
    }
    if (shape.real) fill_reals(x, w, bias, state);
    if (!shape.has_bias) std::fill(bias.begin(), bias.end(), 0.0);
    gamma = small_integers(problem_.k, 3, state);
    beta = small_integers(problem_.k, 3, state);
    for (double& v : gamma) v = 1.5 + v / 4;
    compute_reference(x, w, bias);
    upload_operands(x, w);
    bias_.upload(rounded<Output>(bias));
    gamma_.upload(rounded<Output>(gamma));
    beta_.upload(rounded<Output>(beta));
    slopes_.upload(rounded<Output>(prelu_slopes(problem_.k)));
    unscale_sample_.upload(std::vector<std::int32_t>(problem_.n, kSampleExponent));
    unscale_column_.upload(std::vector<std::int32_t>(problem_.k, kColumnExponent));
  }

  /// Launches the kernel once, over poisoned memory.
  void launch(const Launch& launch, int sm_count) {
    set_tail(launch.tail);
    problem_.num_groups = launch.num_groups;
    const auto slabs = plan_slabs(problem_, launch.cut);
    const std::int64_t tiles = slab_tiles(slabs, moment_positions(instance_));
    const bool table_of_groups = normalizes(launch.mode), linear = is_linear(launch.mode);
    const bool keeps_steps =
        is_quantized(instance_) && (launch.mode == Mode::kMoments || launch.mode == Mode::kBeside);
    const std::int64_t granules = problem_.k >> moment_granule_shift(problem_);
    DeviceBuffer<float> part(problem_.n * tiles * granules * 2);
    DeviceBuffer<float> table(table_of_groups ? problem_.n * launch.num_groups * 4
                                              : 3 * problem_.n * problem_.k);
    DeviceBuffer<std::int8_t> steps(problem_.n * tiles * padded_channels(problem_.k));
    DeviceBuffer<std::int32_t> moment_of(problem_.positions());
    DeviceBuffer<std::int32_t> counters(cuda::counter_count(problem_));
    part.poison(), table.poison(), steps.poison(), moment_of.poison(), a_.poison(), y_.poison();
    launch.clears_counters ? counters.poison() : counters.clear();
    cuda::ConvTransposeParams params = operands();
    params.w_in_place = launch.w_in_place, params.clears_counters = launch.clears_counters;
    if (launch.w_in_place) params.w_hi = w_in_place_.get();
    if (launch.affine) params.gamma = gamma_.get(), params.beta = beta_.get();
    params.a = a_.get(), params.counters = counters.get();
    params.linear = linear;
    params.channels_first = launch.mode == Mode::kLinearChannelsFirst;
    if (!linear) {
      params.part = part.get();
      (table_of_groups ? params.table : params.channel_table) = table.get();
      if (is_quantized(instance_)) params.steps = steps.get();
      if (keeps_steps) params.moment_of = moment_of.get();
    }
    params.before = activation(problem_.tail.before());
    if (normalizes(launch.mode)) params.after = activation(problem_.tail.after());
    if (launch.mode == Mode::kBeside) params.y = y_.get();
    params.split_axes = launch.cut.split_axes;
    params.share_taps = launch.cut.share_taps;
    params.pair_phases = launch.cut.pair_phases;
    params.window_tiles = launch.cut.pair_phases ? 2 : launch.windows ? 1 : 0;
    params.launches = slab_launches(slabs.size());
    params.sm_count = sm_count;
    params.normalized_beside = launch.mode == Mode::kMoments && params.launches == 1;
    params.leaving_blocks = params.normalized_beside ? sm_count / 4 : 0;
    cuda::find_conv_transpose_launcher(instance_.name)(params, nullptr);
    if (params.launches > 1 && !linear) finalize(params, slabs);
    check(cudaDeviceSynchronize(), instance_.name);
    if (params.normalized_beside) require_merged(counters.download());
    a.clear(), y.clear(), channel_table.clear();
    if (launch.mode == Mode::kMoments) channel_table = table.download();
    if (launch.mode == Mode::kBeside) y = y_.download();
    if (keeps_steps) {
      const auto moments = moments_of_positions(problem_, slabs, moment_positions(instance_));
      if (moment_of.download() != moments) throw std::runtime_error("moment_of is not where tiles are");
      return decode(a_.download(), steps.download(), moments, tiles);
    }
    (launch.mode == Mode::kInPlace ? y : a) = rows(a_.download(), params.channels_first);
  }

  const Problem& problem() const { return problem_; }
  const ConvInstance& instance() const { return instance_; }

  /// Whether another activation than ReLU comes before the norm, or without one.
  bool has_curve() const { return !is_floor(problem_.tail.before()); }

  /// Half a step at most, where 16 bits with steps are stored, relative to the channel's largest magnitude.
  double step_roundoff() const {
    if (!is_quantized(instance_)) return 0.0;
    return problem_.tail.before() == Activation::kRelu ? 0x1p-16 : 0x1p-15;
  }

 private:
  static constexpr bool kScaled = std::is_same_v<Output, float>;

  const ConvInstance& instance_;
  Problem problem_;
  const bool x_packed_;
  DeviceBuffer<Operand> x_hi_, x_lo_, w_hi_, w_lo_, w_in_place_;
  DeviceBuffer<Output> bias_, gamma_, beta_, slopes_, a_, y_;
  DeviceBuffer<std::int32_t> unscale_sample_, unscale_column_;
  std::vector<double> convolved_;  // [N,Z,P,Q,K] conv + bias

 public:
  const bool is_real;                // Case::real
  const std::int64_t samples;        // that are compared, from the first on
  const std::int64_t channels;       // likewise; the others are NaN
  std::vector<double> expected;      // [N,Z,P,Q,K] before(conv + bias) of the last launch
  std::vector<double> gamma, beta;   // [K]
  std::vector<Output> a;             // [N,Z,P,Q,K] of the last launch, where it was kept
  std::vector<Output> y;             // likewise, where it normalized
  std::vector<double> half_step;     // [N,Z,P,Q,K] of the last launch, where a was stored with steps
  std::vector<float> channel_table;  // [3,N,K] of the last launch, where it ended with the moments

 private:
  void set_tail(const Tail& tail) {
    const auto before = [](const Tail& t) { return std::tuple(t.before(), t.parameter, t.slopes); };
    const bool is_known = !expected.empty() && before(tail) == before(problem_.tail);
    problem_.tail = tail;
    if (is_known) return;
    expected = convolved_;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = activated(tail, tail.before(), expected[i], std::int64_t(i) % problem_.k);
    }
    // Of 16 bit the moments are those of what is stored; sums of integers are stored as they are.
    if (has_curve() && !is_real && !kScaled) {
      const std::vector<Output> stored = rounded<Output>(expected);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = double(float(stored[i]));
    }
  }

  /// What a kernel beside this one waits for.
  void require_merged(const std::vector<std::int32_t>& counters) const {
    for (std::int64_t n = 0; n < problem_.n; ++n) {
      if (counters[static_cast<std::size_t>(2 + problem_.n + n)] < cuda::kSampleMerged) {
        throw std::runtime_error("sample " + std::to_string(n) + " is not said to be merged");
      }
    }
  }

  /// What no launch of several does: merges the moments that they took.
  void finalize(const cuda::ConvTransposeParams& conv, const std::vector<Slab>& slabs) const {
    cuda::FinalizeSlabsParams params;
    params.problem = problem_;
    params.slabs = slabs;
    params.moment_positions = moment_positions(instance_);
    params.granule_shift = moment_granule_shift(problem_);
    params.part = conv.part;
    params.gamma = conv.gamma, params.beta = conv.beta;
    params.channel_table = conv.channel_table;
    cuda::launch_group_norm_finalize_slabs(params, nullptr);
  }

  cuda::ActivationParams activation(Activation kind) const {
    cuda::ActivationParams params;
    params.kind = kind;
    params.parameter = float(problem_.tail.parameter);
    if (params.kind == Activation::kPrelu) params.slopes = slopes_.get();
    params.slope_step = problem_.tail.slopes > 1 ? 1 : 0;
    return params;
  }

  cuda::ConvTransposeParams operands() const {
    cuda::ConvTransposeParams params;
    params.problem = problem_;
    params.x_hi = x_hi_.get(), params.x_lo = x_lo_.get();
    params.w_hi = w_hi_.get(), params.w_lo = w_lo_.get();
    params.x_packed = x_packed_;
    if (problem_.has_bias) params.bias = bias_.get();
    if (kScaled) params.unscale_sample = unscale_sample_.get(), params.unscale_column = unscale_column_.get();
    return params;
  }

  /// [N,Z,P,Q,K] of rows of padded_channels(K), or of [N,K,Z,P,Q].
  std::vector<Output> rows(const std::vector<Output>& from, bool channels_first) const {
    const std::int64_t k = problem_.k, positions = problem_.positions(), pitch = padded_channels(k);
    std::vector<Output> to(expected.size());
    for (std::int64_t i = 0; i < std::int64_t(to.size()); ++i) {
      const std::int64_t row = i / k, channel = i % k;
      to[i] = channels_first ? from[(row / positions * k + channel) * positions + row % positions]
                             : from[row * pitch + channel];
    }
    return to;
  }

  /// a and half_step from 16 bits of `rows` and their steps [N,tiles,pitch].
  void decode(const std::vector<Output>& rows, const std::vector<std::int8_t>& steps,
              const std::vector<std::int32_t>& moments, std::int64_t tiles) {
    const std::int64_t pitch = padded_channels(problem_.k), positions = problem_.positions();
    const int zero = problem_.tail.before() == Activation::kRelu ? 0 : 32768;
    std::vector<std::uint16_t> bits(problem_.n * positions * pitch);
    std::memcpy(bits.data(), rows.data(), bits.size() * sizeof(bits[0]));
    a.resize(expected.size());
    half_step.resize(a.size());
    for (std::int64_t i = 0; i < std::int64_t(a.size()); ++i) {
      const std::int64_t row = i / problem_.k, k = i % problem_.k;
      const int step = steps[(row / positions * tiles + moments[row % positions]) * pitch + k];
      const int value = int(bits[row * pitch + k]) - zero;
      a[i] = Output(step == -128 ? float(kNaN) : std::ldexp(float(value), step));
      half_step[i] = std::ldexp(0.5, step);
    }
  }

  static Problem make_problem(const ConvInstance& instance, const Case& shape) {
    Problem problem;
    problem.n = shape.n, problem.c = shape.c, problem.k = shape.k;
    problem.in = shape.in, problem.kernel = shape.kernel, problem.padding = shape.padding;
    problem.stride = shape.stride, problem.dilation = shape.dilation;
    problem.dtype = instance.output;
    problem.groups = shape.groups;
    problem.has_bias = shape.has_bias;
    return problem;
  }
  std::size_t x_size() const { return problem_.n * volume(problem_.in) * problem_.c; }
  std::size_t w_size() const { return volume(problem_.kernel) * problem_.k * group_inputs(problem_); }
  std::size_t packed_x_size() const {
    return x_packed_ ? x_size() / group_inputs(problem_) * operand_channels(problem_) : x_size();
  }
  std::size_t packed_w_size() const {
    return volume(problem_.kernel) * problem_.k * operand_channels(problem_);
  }

  /// Case::real: conv is about 1, bias up to 2. Channels whose variance is a small share of their squares,
  /// that ReLU closes, and that are constant, are 16 of 64: other warps then add up by tensor cores.
  void fill_reals(std::vector<double>& x, std::vector<double>& w, std::vector<double>& bias,
                  std::uint64_t& state) const {
    x = reals<Operand>(x.size(), 1.0, state);
    w = reals<Operand>(w.size(), 0x1p-3, state);
    bias = reals<Output>(bias.size(), 2.0, state);
    for (std::int64_t k = 0; k < problem_.k; ++k) {
      if (k % 64 / 16 != 1) continue;
      if (k % 4 == 1) bias[k] = 24;
      if (k % 4 == 2) bias[k] = -24;
    }
    for (std::size_t i = 0; i < w.size(); ++i) {
      const std::int64_t k = std::int64_t(i) / group_inputs(problem_) % problem_.k;
      if (k % 64 / 16 == 1 && k % 4 == 3) w[i] = 0.0;
    }
  }

  void compute_reference(const std::vector<double>& x, const std::vector<double>& w,
                         const std::vector<double>& bias) {
    const std::int64_t elements = problem_.n * problem_.positions() * problem_.k;
    DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size()), reference(elements);
    x64.upload(x), w64.upload(w), bias64.upload(bias);
    reference_kernel<<<unsigned((elements + 127) / 128), 128>>>(x64.get(), w64.get(), bias64.get(),
                                                                reference.get(), problem_, problem_.out());
    cuda::check_launch("reference_kernel");
    convolved_ = reference.download();
  }

  /// hi and lo of integers that make w_hi*x_lo + w_lo*x_hi + w_hi*x_hi = w*x and use every product:
  /// x = (3x, -2x), w = (-2w, w).
  void upload_operands(std::vector<double> x, std::vector<double> w) {
    const std::int64_t inputs = group_inputs(problem_), pitch = operand_channels(problem_);
    w_in_place_.upload(rounded<Operand>(transposed(w, inputs)));
    if (x_packed_) x = packed(x, problem_.n, problem_.groups, inputs, pitch);
    w = packed(w, 1, 1, inputs, pitch);
    const bool split = instance_.products == 3;
    const double x_scale = kScaled ? std::ldexp(1.0, -kSampleExponent) : 1.0;
    const double w_scale = kScaled ? std::ldexp(1.0, -kColumnExponent) : 1.0;
    x_hi_.upload(rounded<Operand>(x, x_scale * (split ? 3 : 1)));
    w_hi_.upload(rounded<Operand>(w, w_scale * (split ? -2 : 1)));
    x_lo_.upload(rounded<Operand>(x, x_scale * -2));
    w_lo_.upload(rounded<Operand>(w, w_scale));
  }
};

}  // namespace upconv3d::tests
