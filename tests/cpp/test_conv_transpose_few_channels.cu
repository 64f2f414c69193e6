// SPDX-License-Identifier: Apache-2.0
/// Checks both passes of conv_transpose_few_channels_sm80, with group_norm_finalize between them, against a
/// plain double-precision convolution and norm, to the accuracy of y. Operands are small integers, so that
/// the convolution is exact; of float also fractions, as TF32 rounds them or to float32's accuracy. What is
/// written is NaN before, so that nothing is left unwritten, nor anything beside it written, and a second run
/// must give the same bits, one whose odd rows are not staged too. Needs a GPU of compute capability 8.0.
/// Exit code 0: all passed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/few_channels_layout.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_few_channels_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "gpu_test.hpp"
#include "tail_cases.hpp"

namespace {

using namespace upconv3d;
using namespace upconv3d::tests;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr Extent3 kNone = {0, 0, 0}, kOnes = {1, 1, 1}, kTwos = {2, 2, 2};

enum class Values { kIntegers, kFractions, kInfinity, kFarFromZero, kLargest };

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, stride, padding, output_padding, dilation;
  std::int64_t num_groups;
  Values values = Values::kIntegers;
  std::int64_t groups = 1;

  std::int64_t inputs() const { return c / groups; }
  std::int64_t outputs() const { return k / groups; }
};

// Every variant; channels that fill chunks, steps and columns and that do not; lists of taps of odd length;
// phases without taps; borders that cut tiles, rows and pairs; dilation; two blocks of output channels; one
// infinity, which must not meet zeros that stand for nothing, and the largest float; odd rows, of which tiles
// take several, one and single values; output channels of which a store takes fewer than a thread has;
// convolution groups, of which blocks have one.
const Case kCases[] = {
    {2, 32, 16, {6, 9, 10}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 8},
    {1, 16, 8, {9, 8, 20}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 8},
    {2, 32, 2, {5, 6, 12}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 2},
    {2, 64, 32, {5, 7, 9}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 8},
    {2, 64, 16, {8, 8, 6}, kTwos, kTwos, kNone, kNone, kOnes, 4},
    {1, 64, 32, {3, 16, 14}, {1, 2, 2}, {1, 2, 2}, kNone, kNone, kOnes, 32},
    {3, 3, 16, {5, 6, 7}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 4},
    {2, 48, 24, {5, 6, 7}, {4, 4, 4}, kTwos, kOnes, kNone, kOnes, 3},
    {1, 16, 16, {6, 7, 18}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 4},
    {1, 8, 24, {6, 7, 11}, {3, 3, 3}, kOnes, kNone, kNone, kOnes, 24},
    {2, 24, 40, {5, 7, 6}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 5},
    {1, 5, 3, {4, 5, 6}, {3, 2, 3}, {3, 3, 3}, kNone, kNone, kOnes, 1},
    {2, 12, 7, {4, 5, 6}, {2, 2, 5}, {1, 2, 4}, {0, 0, 1}, {0, 1, 2}, kOnes, 7},
    {1, 16, 12, {5, 5, 7}, {1, 1, 1}, kTwos, kNone, kOnes, kOnes, 4},
    {2, 16, 20, {6, 7, 5}, {2, 3, 2}, {2, 1, 2}, {0, 2, 1}, {0, 0, 1}, {3, 2, 1}, 4},
    {40, 16, 8, {9, 9, 17}, kTwos, kTwos, kNone, kNone, kOnes, 4},
    {2, 33, 16, {6, 5, 8}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 8, Values::kFractions},
    {1, 4, 16, {8, 8, 8}, kTwos, kTwos, kNone, kNone, kOnes, 16, Values::kFarFromZero},
    {2, 3, 16, {5, 5, 9}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 16, Values::kInfinity},
    {1, 8, 16, {5, 5, 9}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 16, Values::kInfinity},
    {1, 8, 16, {5, 5, 9}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 16, Values::kLargest},
    {3, 3, 16, {5, 9, 32}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 4},
    {2, 8, 12, {6, 7, 16}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 4},
    {2, 8, 7, {9, 12, 5}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 7},
    {2, 16, 20, {9, 40, 1}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 4},
    {1, 8, 40, {5, 6, 24}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 5},
    {2, 4, 16, {5, 6, 20}, {4, 4, 5}, {2, 2, 4}, kOnes, kNone, kOnes, 2},
    {2, 8, 16, {9, 20, 63}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 4},
    {2, 8, 20, {9, 20, 31}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 4},
    {5, 3, 16, {9, 16, 48}, {3, 3, 3}, kTwos, kOnes, {1, 1, 0}, kOnes, 1},
    {2, 16, 10, {6, 7, 18}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 5},
    {2, 8, 22, {5, 9, 17}, kTwos, kTwos, kNone, kNone, kOnes, 2},
    {1, 8, 26, {5, 9, 17}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 13},
    {2, 64, 100, {5, 7, 9}, kTwos, kTwos, kNone, kNone, kOnes, 4, Values::kIntegers, 4},
    {2, 40, 2, {5, 6, 10}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 1, Values::kIntegers, 2},
    {1, 24, 20, {6, 7, 11}, {3, 3, 3}, kOnes, kOnes, kNone, kOnes, 5, Values::kIntegers, 4},
    {2, 32, 96, {5, 6, 7}, {3, 3, 3}, kTwos, kOnes, kNone, kOnes, 8, Values::kIntegers, 2},
    {1, 16, 16, {5, 5, 9}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes, 16, Values::kInfinity, 2},
};

/// A float rounded to TF32's ten bits, ties away from zero, as the kernel rounds it.
double to_tf32(double v) {
  const float f = float(v);
  std::uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  bits = (bits + 0x1000u) & ~0x1fffu;
  float rounded_value;
  std::memcpy(&rounded_value, &bits, sizeof(bits));
  return rounded_value;
}

template <class T>
constexpr DType kDType = std::is_same_v<T, float>           ? DType::kFloat32
                         : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                            : DType::kFloat16;

Problem problem_of(const Case& c, DType dtype, Precision precision, Layout x_layout, Layout y_layout,
                   const Tail& tail) {
  Problem p;
  p.n = c.n, p.c = c.c, p.k = c.k;
  p.in = c.in, p.kernel = c.kernel, p.stride = c.stride, p.padding = c.padding;
  p.output_padding = c.output_padding, p.dilation = c.dilation;
  p.num_groups = c.num_groups, p.groups = c.groups;
  p.dtype = dtype, p.precision = precision;
  p.x_layout = x_layout, p.y_layout = y_layout;
  p.has_bias = true;
  p.tail = tail;
  return p;
}

/// Operands in double, and the exact convolution of what of them the kernel multiplies.
struct Operands {
  std::vector<double> x;                  // [N,D,H,W,C]
  std::vector<double> w;                  // [T*R*S,K,C/groups]
  std::vector<double> bias, gamma, beta;  // [K]
  std::vector<double> conv;               // [N,Z,P,Q,K]

  Operands(const Case& c, bool tf32, std::uint64_t& state) {
    x = small_integers(c.n * c.c * volume(c.in), 1, state);
    w = small_integers(volume(c.kernel) * c.k * c.inputs(), 1, state);
    bias = small_integers(c.k, 3, state), gamma = small_integers(c.k, 3, state);
    beta = small_integers(c.k, 3, state);
    for (double& v : gamma) v = 1.5 + v / 4;
    for (double& v : x) v = next_random(state) % 4 == 0 ? v : 0.0;
    if (c.values == Values::kFractions) {
      for (double& v : x) v = double(float(v + double(next_random(state) % 1000) / 997));
      for (double& v : w) v = double(float(v / 3));
    }
    if (c.values == Values::kFarFromZero) {
      // Means some hundred times the deviations.
      for (double& v : bias) v += 1024;
    }
    if (c.values == Values::kLargest) {
      x[(volume(c.in) / 2 + 1) * c.c] = std::numeric_limits<float>::max();
      for (double& v : w) v = std::ldexp(v, -100);
    }
    if (c.values == Values::kInfinity) {
      for (double& v : x) v = v < 0 ? 0 : v;
      for (std::size_t i = 0; i < w.size(); ++i) w[i] = std::int64_t(i) / c.inputs() % c.k % 2 == 0 ? 1 : -1;
      x[(volume(c.in) / 2 + 1) * c.c] = kInfinity;
    }
    std::vector<double> x_read = x, w_read = w;
    if (tf32) {
      std::transform(x.begin(), x.end(), x_read.begin(), to_tf32);
      std::transform(w.begin(), w.end(), w_read.begin(), to_tf32);
    }
    const Problem p =
        problem_of(c, DType::kFloat32, Precision::kIEEE, Layout::kNDHWC, Layout::kNDHWC, Tail{});
    const std::int64_t values = p.n * p.positions() * p.k;
    DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size()), y64(values);
    x64.upload(x_read), w64.upload(w_read), bias64.upload(bias);
    reference_kernel<<<unsigned((values + 255) / 256), 256>>>(x64.get(), w64.get(), bias64.get(), y64.get(),
                                                              p, p.out());
    conv = y64.download();
  }
};

double activation_of(const Tail& tail, Activation activation, double v, std::int64_t channel) {
  if (activation == Activation::kRelu) return v < 0 ? 0 : v;  // of infinity too
  return activation == Activation::kNone ? v : activated(tail, activation, v, channel);
}

/// y [N,Z,P,Q,K] in double.
std::vector<double> expected(const Problem& p, const Operands& from) {
  std::vector<double> y = from.conv;
  const std::int64_t positions = p.positions(), channels = p.k / p.num_groups;
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = activation_of(p.tail, p.tail.before(), y[i], std::int64_t(i) % p.k);
  }
  for (std::int64_t n = 0; n < p.n; ++n) {
    for (std::int64_t group = 0; group < p.num_groups; ++group) {
      double sum = 0, squares = 0;
      const auto for_each = [&](const auto& visit) {
        for (std::int64_t i = 0; i < positions; ++i) {
          for (std::int64_t k = group * channels; k < (group + 1) * channels; ++k) {
            visit(y[(n * positions + i) * p.k + k], k);
          }
        }
      };
      for_each([&](double v, std::int64_t) { sum += v; });
      const double count = double(positions * channels), mean = sum / count;
      for_each([&](double v, std::int64_t) { squares += (v - mean) * (v - mean); });
      const double scale = 1 / std::sqrt(squares / count + p.eps);
      for_each([&](double& v, std::int64_t k) {
        v = activation_of(p.tail, p.tail.after(), (v - mean) * scale * from.gamma[k] + from.beta[k], k);
      });
    }
  }
  return y;
}

/// [N,positions,channels] as [N,channels,positions].
template <class T>
std::vector<T> planes(const std::vector<T>& rows, std::int64_t n, std::int64_t channels) {
  std::vector<T> result(rows.size());
  const std::int64_t positions = std::int64_t(rows.size()) / n / channels;
  for (std::int64_t i = 0; i < std::int64_t(rows.size()); ++i) {
    const std::int64_t channel = i % channels, position = i / channels % positions,
                       sample = i / channels / positions;
    result[(sample * channels + channel) * positions + position] = rows[i];
  }
  return result;
}

/// Orders in which w may lie: [C,K/groups,T,R,S], [C,T,R,S,K/groups], and [K/groups,T,R,S,C].
constexpr int kWeightOrders = 3;

/// w [T*R*S,K,C/groups] in an order, and its strides as [C,K/groups,T,R,S].
std::vector<double> ordered_weight(const Case& c, int order, const std::vector<double>& w,
                                   std::int64_t (&strides)[5]) {
  const std::int64_t taps = volume(c.kernel), outputs = c.outputs();
  const std::int64_t of_c[] = {outputs * taps, outputs * taps, 1}, of_k[] = {taps, 1, taps * c.c};
  const std::int64_t of_tap[] = {1, outputs, c.c};
  strides[0] = of_c[order], strides[1] = of_k[order], strides[4] = of_tap[order];
  strides[3] = strides[4] * c.kernel[2], strides[2] = strides[3] * c.kernel[1];
  std::vector<double> result(w.size());
  for (std::int64_t i = 0; i < std::int64_t(w.size()); ++i) {
    const std::int64_t k = i / c.inputs() % c.k, tap = i / c.inputs() / c.k;
    const std::int64_t channel = k / outputs * c.inputs() + i % c.inputs();
    result[channel * strides[0] + k % outputs * strides[1] + tap * strides[4]] = w[i];
  }
  return result;
}

/// What lies before and behind y.
constexpr std::int64_t kGuard = 16;

/// \param all y and its guards, poisoned before
template <class T>
void check_guards(const std::vector<T>& all, std::int64_t first, std::int64_t values) {
  T poison;
  std::memset(&poison, 0xff, sizeof(T));
  for (std::int64_t i = 0; i < std::int64_t(all.size()); ++i) {
    const bool is_guard = i < first || i >= first + values;
    if (is_guard && std::memcmp(&all[i], &poison, sizeof(T)) != 0) {
      throw std::runtime_error(concat("a value is written at ", i - first, " of y"));
    }
  }
}

/// y of a run over poisoned memory, as it lies.
/// \param apart values between a boundary of 16 bytes and y
template <class T>
std::vector<T> run(const Case& c, const Problem& p, const FewChannelsLayout& layout, const Operands& from,
                   int order, int apart) {
  const std::int64_t tiles = layout.tile_count(), values = p.n * p.k * p.positions();
  DeviceBuffer<T> x(from.x.size()), w(from.w.size()), y(values + 2 * kGuard);
  DeviceBuffer<T> bias(p.k), gamma(p.k), beta(p.k), slopes(p.k);
  DeviceBuffer<float> part(p.n * tiles * p.k * 2), table(3 * p.n * p.k);
  DeviceBuffer<std::int32_t> counts(tiles);
  y.poison(), part.poison(), table.poison(), counts.poison();
  const auto x_typed = rounded<T>(from.x);
  x.upload(p.x_layout == Layout::kNDHWC ? x_typed : planes(x_typed, p.n, p.c));
  cuda::ConvTransposeDirectParams params;
  w.upload(rounded<T>(ordered_weight(c, order, from.w, params.w_strides)));
  bias.upload(rounded<T>(from.bias)), gamma.upload(rounded<T>(from.gamma)),
      beta.upload(rounded<T>(from.beta));
  slopes.upload(rounded<T>(prelu_slopes(p.k)));
  params.problem = p;
  params.x = x.get(), params.w = w.get(), params.bias = bias.get();
  params.before = {p.tail.before(), p.tail.parameter, slopes.get(), p.tail.slopes == 1 ? 0 : 1};
  params.after = params.before, params.after.kind = p.tail.after();
  params.part = part.get(), params.counts = counts.get();
  cuda::launch_few_channels(params, layout, nullptr);

  cuda::FinalizeParams finalize;
  finalize.shape = {p.n, p.k, p.positions(), p.num_groups, 0, tiles};
  DeviceBuffer<char> scratch(cuda::finalize_scratch_bytes(finalize.shape));
  finalize.dtype = p.dtype;
  finalize.part = part.get(), finalize.counts = counts.get();
  finalize.gamma = gamma.get(), finalize.beta = beta.get(), finalize.eps = p.eps;
  finalize.scratch = scratch.get(), finalize.table = table.get();
  cuda::launch_group_norm_finalize(finalize, nullptr);

  params.part = nullptr, params.counts = nullptr;
  params.table = table.get(), params.y = y.get() + kGuard + apart;
  cuda::launch_few_channels(params, layout, nullptr);
  check(cudaDeviceSynchronize(), "conv_transpose_few_channels_sm80");
  std::int64_t counted = 0;
  for (const std::int32_t count : counts.download()) counted += count;
  if (counted != p.positions()) throw std::runtime_error(concat("counts sum up to ", counted));
  const std::vector<T> all = y.download();
  check_guards(all, kGuard + apart, values);
  return {all.begin() + kGuard + apart, all.begin() + kGuard + apart + values};
}

/// The first disagreement, or "".
/// \param slack    absolute
/// \param relative beside y's own rounding
template <class T>
std::string compare(const Problem& p, const std::vector<T>& y, std::vector<double> reference, double slack,
                    double relative) {
  if (p.y_layout == Layout::kNCDHW) reference = planes(reference, p.n, p.k);
  const double roundoff = kDType<T> == DType::kFloat32 ? 0 : kDType<T> == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double got = double(float(y[i])), want = reference[i];
    if (std::isnan(got) && std::isnan(want)) continue;
    if (std::abs(got - want) <= slack + (1.01 * roundoff + relative) * std::abs(want)) continue;
    return concat("y[", i, "] is ", got, ", not ", want);
  }
  return "";
}

/// Tails, one after the other in turn.
std::vector<Tail> all_tails(std::int64_t k) {
  std::vector<Tail> tails = {Tail{}, tail_of(Order::kActNorm, Activation::kElu, 0.75),
                             tail_of(Order::kActNorm, Activation::kPrelu, 0.0, k),
                             tail_of(Order::kActNorm, Activation::kSilu)};
  for (const Tail& tail : piecewise_linear_tails(k)) tails.push_back(tail);
  for (const Tail& tail : smooth_tails()) tails.push_back(tail);
  return tails;
}

struct Counts {
  int passed = 0, failed = 0, refused = 0, staged = 0, number = 0;
};

template <class T, Precision kPrecision = Precision::kTF32>
void check_case(const Case& c, Counts& counts) {
  const bool needs_float = c.values == Values::kFractions || c.values == Values::kFarFromZero;
  if (needs_float && kDType<T> != DType::kFloat32) return;
  // TF32 rounds the largest float to infinity.
  if (c.values == Values::kLargest && kPrecision != Precision::kIEEE) return;
  std::uint64_t state = 88172645463325252u + counts.number;
  constexpr bool kRounds = kDType<T> == DType::kFloat32 && kPrecision == Precision::kTF32;
  constexpr bool kExact = kPrecision == Precision::kIEEE;
  const Operands operands(c, kRounds, state);
  const std::vector<Tail> tails = all_tails(c.k);
  for (const Layout x_layout : {Layout::kNDHWC, Layout::kNCDHW}) {
    for (const Layout y_layout : {Layout::kNDHWC, Layout::kNCDHW}) {
      const int number = counts.number++;
      const int order = number % kWeightOrders, apart = number % 5 == 0 ? 0 : number % 8;
      const Tail tail = c.values == Values::kInfinity ? Tail{} : tails[number % tails.size()];
      const Problem p = problem_of(c, kDType<T>, kPrecision, x_layout, y_layout, tail);
      FewChannelsLayout layout;
      const std::string obstacle = few_channels_shape_obstacle(p, layout);
      std::string failure;
      if (!obstacle.empty()) {
        ++counts.refused;
        continue;
      }
      try {
        const std::vector<T> y = run<T>(c, p, layout, operands, order, apart);
        // One rounding of the mean counts for more where it is far from zero.
        const double slack = c.values == Values::kFarFromZero ? 2e-3 : kExact ? 4e-6 : 3e-5;
        failure = compare(p, y, expected(p, operands), slack, kExact ? 1.5e-6 : 1e-5);
        FewChannelsLayout other = layout;
        counts.staged += other.output != nullptr;
        for (const char* what : {"a second run", "a run that stages nothing"}) {
          const std::vector<T> again = run<T>(c, p, other, operands, order, apart);
          if (failure.empty() && std::memcmp(y.data(), again.data(), y.size() * sizeof(T)) != 0) {
            failure = concat(what, " gives other bits");
          }
          other.output.reset();
        }
      } catch (const std::exception& error) {
        failure = error.what();
      }
      failure.empty() ? ++counts.passed : ++counts.failed;
      if (!failure.empty()) std::printf("FAILED %s: %s\n", describe(p).c_str(), failure.c_str());
    }
  }
}

}  // namespace

int main() {
  if (no_gpu(80)) return kSkipped;
  Counts counts;
  for (const Case& c : kCases) {
    check_case<__nv_bfloat16>(c, counts);
    check_case<__half>(c, counts);
    check_case<float>(c, counts);
    check_case<float, Precision::kIEEE>(c, counts);
  }
  std::printf("%d passed, %d failed, %d do not fit into shared memory, %d staged\n", counts.passed,
              counts.failed, counts.refused, counts.staged);
  // Two cases of float, at either precision in each order of x and y, whose weights take more than a block's
  // shared memory.
  return counts.failed == 0 && counts.refused <= 16 && counts.staged > 0 ? 0 : 1;
}
