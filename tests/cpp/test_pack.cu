// SPDX-License-Identifier: Apache-2.0
/// \file
/// launch_pack against a host reference in double, bit for bit. Needs a GPU; returns non-zero on a mismatch.
///
///   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -I cpp tests/cpp/test_pack.cu
///   cpp/cuda/layout/*.cu
///        cpp/cuda/check.cpp cpp/core/*.cpp -o test_pack
///   ./test_pack          checks, in a second; also under compute-sanitizer
///   ./test_pack --time   times the headline shape and a large weight (ms, GB/s of bytes that must move)

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/layout/pack.hpp"
#include "gpu_test.hpp"

namespace {

using upconv3d::DType;
using upconv3d::Layout;
using upconv3d::Problem;
using upconv3d::cuda::check;
using upconv3d::cuda::OperandScales;
using upconv3d::cuda::PackParams;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
constexpr int kTop = upconv3d::cuda::kOperandExponent;

/// Elements are float, or the bits of a 16-bit dtype.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t count) : count_(count) {
    check(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T)),
          "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(static_cast<std::int64_t>(host.size())) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  std::vector<T> download() const {
    std::vector<T> host(static_cast<std::size_t>(count_));
    check(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_;
};

enum class WeightLayout { kContiguous, kChannelsLast, kSliced };
enum class Content { kUniform, kManyMagnitudes, kSpecial };

struct Case {
  const char* label;
  std::int64_t n, c, k;
  upconv3d::Extent3 in, kernel;
  DType dtype;
  int products;
  Layout x_layout;
  WeightLayout w_layout;
  Content content;
  std::int64_t x_offset;  // elements by which x is off its 256-byte boundary
  bool pack_x = true;
};

Problem problem_of(const Case& test) {
  Problem problem;
  problem.n = test.n;
  problem.c = test.c;
  problem.k = test.k;
  problem.in = test.in;
  problem.kernel = test.kernel;
  problem.dtype = test.dtype;
  problem.x_layout = test.x_layout;
  return problem;
}

/// Strides of w [C,K,T,R,S], and by return the elements of its storage.
std::int64_t weight_strides(const Case& test, std::int64_t (&stride)[5]) {
  const auto [t, r, s] = test.kernel;
  const std::int64_t taps = t * r * s;
  if (test.w_layout == WeightLayout::kChannelsLast) {
    const std::int64_t strides[5] = {test.k * taps, 1, r * s * test.k, s * test.k, test.k};
    std::copy(strides, strides + 5, stride);
  } else if (test.w_layout == WeightLayout::kContiguous) {
    const std::int64_t strides[5] = {test.k * taps, taps, r * s, s, 1};
    std::copy(strides, strides + 5, stride);
  } else {  // every second element along S of a tensor stored as [K,C,T,R,2S]
    const std::int64_t strides[5] = {2 * taps, 2 * taps * test.c, 2 * r * s, 2 * s, 2};
    std::copy(strides, strides + 5, stride);
    return 2 * test.c * test.k * taps;
  }
  return test.c * test.k * taps;
}

std::int64_t x_index(const Case& test, std::int64_t n, std::int64_t c, std::int64_t p) {
  const std::int64_t positions = upconv3d::volume(test.in);
  return test.x_layout == Layout::kNCDHW ? (n * test.c + c) * positions + p
                                         : (n * positions + p) * test.c + c;
}

std::int64_t w_index(const Case& test, const std::int64_t (&stride)[5], std::int64_t c, std::int64_t k,
                     std::int64_t tap) {
  const std::int64_t r = test.kernel[1], s = test.kernel[2];
  return c * stride[0] + k * stride[1] + tap / (r * s) * stride[2] + tap / s % r * stride[3] +
         tap % s * stride[4];
}

void fill(std::vector<std::uint16_t>& values, const Case&, std::mt19937& random) {
  for (std::uint16_t& v : values) v = static_cast<std::uint16_t>(random());
}

void fill(std::vector<float>& values, const Case& test, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-148, 126);
  for (float& v : values) {
    v = uniform(random);
    if (test.content == Content::kManyMagnitudes) v = std::ldexp(v, exponent(random));
  }
}

/// Zero and extreme channels, samples and columns; non-finite values beside finite ones and alone.
void place_special_values(const Case& test, const std::int64_t (&stride)[5], std::vector<float>& x,
                          std::vector<float>& w) {
  const std::int64_t positions = upconv3d::volume(test.in), taps = upconv3d::volume(test.kernel);
  for (std::int64_t n = 0; n < test.n; ++n) {
    for (std::int64_t c = 0; c < test.c; ++c) {
      for (std::int64_t p = 0; p < positions; ++p) {
        float& v = x[x_index(test, n, c, p)];
        if (n == 1 || c == 0) v = 0.0f;                 // zero sample, zero channel
        if (c == 1) v = n == 0 ? 3 * kDenormal : 0.0f;  // nothing but denormals
        if (c == 2) v = std::ldexp(v, 127);             // near the largest float
        if (c == 3) v = std::ldexp(v, n == 0 ? -120 : -20);
        if (c == 4) v = p % 2 == 0 ? kInf : -kInf;  // nothing finite
      }
    }
  }
  x[x_index(test, 0, 5, 0)] = kNaN;
  x[x_index(test, test.n - 1, 6, positions - 1)] = -kInf;
  for (std::int64_t c = 0; c < test.c; ++c) {
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      w[w_index(test, stride, c, 0, tap)] = 0.0f;                  // zero column
      w[w_index(test, stride, c, 1, tap)] = c == 0 ? 1.0f : 0.0f;  // meets a zero channel only
      float& huge = w[w_index(test, stride, c, 2, tap)];
      huge = std::ldexp(huge, 127);
      float& tiny = w[w_index(test, stride, c, 3, tap)];
      tiny = std::ldexp(tiny, -135);
    }
  }
  w[w_index(test, stride, 1, 4, 0)] = kInf;
  w[w_index(test, stride, 2, 5, taps - 1)] = kNaN;
}

double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? kNaN : sign * kInf;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

/// Nearest float16, ties to even.
double round_to_half(double v) {
  if (v == 0.0 || !std::isfinite(v)) return v;
  int exponent = 0;
  std::frexp(v, &exponent);
  const int quantum = std::max(exponent - 11, -24);
  return std::ldexp(std::nearbyint(std::ldexp(v, -quantum)), quantum);
}

struct HostSplit {
  double hi, lo;
};

HostSplit split(float v, int exponent, int products) {
  const double scaled = std::ldexp(static_cast<double>(v), exponent);
  if (!std::isfinite(v)) return products == 3 ? HostSplit{0.0, v} : HostSplit{v, 0.0};
  double hi = round_to_half(scaled);
  if (hi == 0.0 && v != 0.0f) hi = std::copysign(std::ldexp(1.0, -24), v);
  const float rest = static_cast<float>(scaled) - static_cast<float>(hi);
  return {hi, products == 3 ? round_to_half(rest) : 0.0};
}

/// Largest e with |v| >= 2^(e-1); `none` where v is zero or not finite.
int reach(float v, int none) {
  if (v == 0.0f || !std::isfinite(v)) return none;
  int exponent = 0;
  std::frexp(static_cast<double>(v), &exponent);
  return exponent;
}

struct HostScales {
  std::vector<int> sample, channel, column;
};

HostScales reference_scales(const Case& test, const std::int64_t (&stride)[5], const std::vector<float>& x,
                            const std::vector<float>& w) {
  constexpr int kNone = -100000;
  const std::int64_t positions = upconv3d::volume(test.in), taps = upconv3d::volume(test.kernel);
  HostScales scales{std::vector<int>(test.n), std::vector<int>(test.c), std::vector<int>(test.k)};
  std::vector<int> channel_reach(test.c, -148 + kTop - 128);
  for (std::int64_t n = 0; n < test.n; ++n) {
    std::vector<int> own(test.c, kNone);
    for (std::int64_t c = 0; c < test.c; ++c) {
      for (std::int64_t p = 0; p < positions; ++p)
        own[c] = std::max(own[c], reach(x[x_index(test, n, c, p)], kNone));
    }
    const int largest = *std::max_element(own.begin(), own.end());
    scales.sample[n] = largest == kNone ? 0 : kTop - largest;
    for (std::int64_t c = 0; c < test.c; ++c) {
      if (own[c] != kNone) channel_reach[c] = std::max(channel_reach[c], own[c] + scales.sample[n]);
    }
  }
  for (std::int64_t c = 0; c < test.c; ++c) scales.channel[c] = kTop - channel_reach[c];
  for (std::int64_t k = 0; k < test.k; ++k) {
    int largest = kNone;
    for (std::int64_t c = 0; c < test.c; ++c) {
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        const int own = reach(w[w_index(test, stride, c, k, tap)], kNone);
        if (own != kNone) largest = std::max(largest, own - scales.channel[c]);
      }
    }
    scales.column[k] = largest == kNone ? 0 : kTop - largest;
  }
  return scales;
}

void require(bool condition, const Case& test, const std::string& what) {
  if (!condition) throw std::runtime_error(std::string(test.label) + ": " + what);
}

void compare_value(std::uint16_t bits, double expected, const Case& test, const char* array,
                   std::int64_t index) {
  const double got = half_value(bits);
  if (std::isnan(expected) ? std::isnan(got) : got == expected) return;
  throw std::runtime_error(std::string(test.label) + ": " + array + "[" + std::to_string(index) +
                           "] must be " + std::to_string(expected) + "; got " + std::to_string(got));
}

/// Every element of a packed tensor; `expected(row, c)` yields its two halves.
template <class Expected>
void compare_packed(const Case& test, const char* array, std::int64_t rows,
                    const std::vector<std::uint16_t>& hi, const std::vector<std::uint16_t>& lo,
                    const Expected& expected) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t c = 0; c < test.c; ++c) {
      const std::int64_t i = row * test.c + c;
      const HostSplit reference = expected(row, c);
      compare_value(hi[i], reference.hi, test, array, i);
      if (test.products == 3) compare_value(lo[i], reference.lo, test, array, i);
    }
  }
}

void compare_exponents(const Case& test, const char* array, const std::int32_t* device,
                       const std::vector<int>& expected, int sign) {
  std::vector<std::int32_t> got(expected.size());
  check(cudaMemcpy(got.data(), device, got.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost),
        "download");
  for (std::size_t i = 0; i < got.size(); ++i) {
    require(got[i] == sign * expected[i], test,
            std::string(array) + "[" + std::to_string(i) + "] must be " + std::to_string(sign * expected[i]) +
                "; got " + std::to_string(got[i]));
  }
}

/// What a packed buffer holds before: a NaN, so that an element never written is noticed.
constexpr std::uint16_t kPoison = 0x7fff;

template <class T>
void run_case(const Case& test, std::mt19937& random) {
  const Problem problem = problem_of(test);
  const std::int64_t positions = upconv3d::volume(test.in), taps = upconv3d::volume(test.kernel);
  const std::int64_t x_count = test.n * test.c * positions, w_count = test.c * test.k * taps;
  PackParams params;
  std::vector<T> x(x_count), w(weight_strides(test, params.w_strides));
  fill(x, test, random);
  fill(w, test, random);
  if constexpr (std::is_same_v<T, float>) {
    if (test.content == Content::kSpecial) place_special_values(test, params.w_strides, x, w);
  }
  std::vector<T> shifted(x.size() + test.x_offset);
  std::copy(x.begin(), x.end(), shifted.begin() + test.x_offset);

  const DeviceArray<T> device_x(shifted), device_w(w);
  const DeviceArray<std::uint16_t> x_hi(std::vector<std::uint16_t>(x_count, kPoison)), x_lo(x_hi.download());
  const DeviceArray<std::uint16_t> w_hi(std::vector<std::uint16_t>(w_count, kPoison)), w_lo(w_hi.download());
  const DeviceArray<std::uint8_t> memory(
      std::vector<std::uint8_t>(upconv3d::cuda::operand_scales_bytes(problem), 0xa5));
  params.problem = problem;
  params.operand = std::is_same_v<T, float> ? DType::kFloat16 : test.dtype;
  params.products = test.products;
  params.x = device_x.get() + test.x_offset;
  params.w = device_w.get();
  params.x_hi = test.pack_x ? x_hi.get() : nullptr;
  params.x_lo = test.products == 3 ? x_lo.get() : nullptr;
  params.w_hi = w_hi.get();
  params.w_lo = test.products == 3 ? w_lo.get() : nullptr;
  params.scales = upconv3d::cuda::carve_operand_scales(problem, memory.get());
  upconv3d::cuda::launch_pack(params, nullptr);
  check(cudaDeviceSynchronize(), test.label);
  if (test.n == 0) {
    require(w_hi.download() == std::vector<std::uint16_t>(w_count, kPoison), test, "nothing may be launched");
    return;
  }

  const auto x_at = [&](std::int64_t row, std::int64_t c) {
    return x[x_index(test, row / positions, c, row % positions)];
  };
  const auto w_at = [&](std::int64_t row, std::int64_t c) {
    return w[w_index(test, params.w_strides, c, row % test.k, row / test.k)];
  };
  if constexpr (std::is_same_v<T, float>) {
    const HostScales scales = reference_scales(test, params.w_strides, x, w);
    compare_exponents(test, "sample", params.scales.sample, scales.sample, 1);
    compare_exponents(test, "channel", params.scales.channel, scales.channel, 1);
    compare_exponents(test, "unscale_sample", params.scales.unscale_sample, scales.sample, -1);
    compare_exponents(test, "unscale_column", params.scales.unscale_column, scales.column, -1);
    compare_packed(test, "x", test.n * positions, x_hi.download(), x_lo.download(),
                   [&](std::int64_t row, std::int64_t c) {
                     return split(x_at(row, c), scales.sample[row / positions] + scales.channel[c],
                                  test.products);
                   });
    compare_packed(
        test, "w", taps * test.k, w_hi.download(), w_lo.download(), [&](std::int64_t row, std::int64_t c) {
          return split(w_at(row, c), scales.column[row % test.k] - scales.channel[c], test.products);
        });
  } else {
    const std::vector<std::uint16_t> packed_x = x_hi.download(), packed_w = w_hi.download();
    for (std::int64_t i = 0; i < x_count; ++i) {
      const std::uint16_t expected = test.pack_x ? x_at(i / test.c, i % test.c) : kPoison;
      require(packed_x[i] == expected, test, "x[" + std::to_string(i) + "] differs");
    }
    for (std::int64_t i = 0; i < w_count; ++i) {
      require(packed_w[i] == w_at(i / test.c, i % test.c), test, "w[" + std::to_string(i) + "] differs");
    }
  }
}

std::vector<Case> cases() {
  constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  constexpr Layout kFirst = Layout::kNCDHW, kLast = Layout::kNDHWC;
  constexpr WeightLayout kDense = WeightLayout::kContiguous, kWLast = WeightLayout::kChannelsLast,
                         kSliced = WeightLayout::kSliced;
  constexpr Content kUniform = Content::kUniform, kMany = Content::kManyMagnitudes,
                    kSpecial = Content::kSpecial;
  return {
      {"f32 NCDHW", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 1, kFirst, kDense, kUniform, 0},
      {"f32 NCDHW, 3 products", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 3, kFirst, kDense, kUniform, 0},
      {"f32 NCDHW, long rows", 1, 8, 8, {16, 16, 12}, {2, 2, 2}, kF32, 1, kFirst, kDense, kMany, 0},
      {"f32 NCDHW, odd extents", 3, 72, 40, {3, 5, 7}, {3, 2, 1}, kF32, 3, kFirst, kWLast, kMany, 0},
      {"f32 NCDHW, misaligned", 2, 16, 24, {4, 4, 4}, {1, 1, 1}, kF32, 1, kFirst, kSliced, kMany, 1},
      {"f32 NCDHW, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kF32, 3, kFirst, kSliced, kMany, 3},
      {"f32 NCDHW, special", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 1, kFirst, kDense, kSpecial, 0},
      {"f32 NCDHW, special, 3", 3, 24, 16, {3, 4, 4}, {3, 3, 3}, kF32, 3, kFirst, kWLast, kSpecial, 0},
      {"f32 NDHWC", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 1, kLast, kWLast, kUniform, 0},
      {"f32 NDHWC, 3 products", 3, 72, 40, {5, 5, 7}, {3, 2, 1}, kF32, 3, kLast, kDense, kMany, 0},
      {"f32 NDHWC, many channels", 1, 264, 8, {2, 3, 5}, {1, 2, 3}, kF32, 1, kLast, kSliced, kMany, 0},
      {"f32 NDHWC, misaligned", 2, 16, 24, {4, 4, 4}, {2, 2, 2}, kF32, 3, kLast, kDense, kMany, 1},
      {"f32 NDHWC, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kF32, 1, kLast, kSliced, kMany, 3},
      {"f32 NDHWC, special", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 1, kLast, kSliced, kSpecial, 0},
      {"f32 NDHWC, special, 3", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 3, kLast, kDense, kSpecial, 0},
      {"f32, more samples than warps", 37, 8, 8, {1, 2, 3}, {1, 1, 2}, kF32, 1, kFirst, kDense, kMany, 0},
      {"bf16 NCDHW", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kBF16, 1, kFirst, kDense, kUniform, 0},
      {"f16 NCDHW, odd extents", 3, 72, 40, {3, 5, 7}, {3, 2, 1}, kF16, 1, kFirst, kWLast, kUniform, 0},
      {"bf16 NCDHW, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kBF16, 1, kFirst, kSliced, kUniform, 1},
      {"bf16 NDHWC, misaligned", 2, 16, 24, {4, 4, 4}, {2, 2, 2}, kBF16, 1, kLast, kWLast, kUniform, 3},
      {"f16 NDHWC, x stays", 2, 16, 24, {4, 4, 4}, {2, 2, 2}, kF16, 1, kLast, kDense, kUniform, 0, false},
      {"f32, no samples", 0, 16, 24, {4, 4, 4}, {2, 2, 2}, kF32, 1, kLast, kDense, kUniform, 0, true},
  };
}

/// Median time of launch_pack, and the bandwidth of what it must read and write.
void time_pack(const char* label, const Case& test) {
  constexpr int kRuns = 50;
  const Problem problem = problem_of(test);
  const std::int64_t x_count = test.n * test.c * upconv3d::volume(test.in);
  const std::int64_t w_count = test.c * test.k * upconv3d::volume(test.kernel);
  const std::int64_t size = upconv3d::size_of(test.dtype);
  const DeviceArray<std::uint8_t> x(x_count * size), w(w_count * size),
      memory(upconv3d::cuda::operand_scales_bytes(problem));
  check(cudaMemset(x.get(), 0x3f, x_count * size), "filling x");
  check(cudaMemset(w.get(), 0x3f, w_count * size), "filling w");
  const DeviceArray<std::uint16_t> x_hi(x_count), x_lo(x_count), w_hi(w_count), w_lo(w_count);
  PackParams params;
  weight_strides(test, params.w_strides);
  params.problem = problem;
  params.operand = test.dtype == DType::kFloat32 ? DType::kFloat16 : test.dtype;
  params.products = test.products;
  params.x = x.get(), params.w = w.get();
  params.x_hi = x_hi.get(), params.x_lo = x_lo.get(), params.w_hi = w_hi.get(), params.w_lo = w_lo.get();
  params.scales = upconv3d::cuda::carve_operand_scales(problem, memory.get());

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times(kRuns);
  for (float& ms : times) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    upconv3d::cuda::launch_pack(params, nullptr);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), label);
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  const std::int64_t reads = test.dtype == DType::kFloat32 ? 2 : 1, halves = test.products == 3 ? 2 : 1;
  const double bytes = static_cast<double>((x_count + w_count) * (reads * size + 2 * halves));
  std::printf("%-40s %.4f ms  %.0f GB/s\n", label, times[kRuns / 2], bytes / times[kRuns / 2] * 1e-6);
}

void time_all() {
  const upconv3d::Extent3 cube{32, 32, 32}, k3{3, 3, 3};
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const int products : {1, 3}) {
      const std::string label =
          std::string("headline f32 ") + upconv3d::name(layout) + " x" + std::to_string(products);
      time_pack(label.c_str(), {"", 16, 64, 128, cube, k3, DType::kFloat32, products, layout,
                                WeightLayout::kContiguous, Content::kUniform, 0});
    }
  }
  time_pack("headline bf16 NCDHW", {"", 16, 64, 128, cube, k3, DType::kBFloat16, 1, Layout::kNCDHW,
                                    WeightLayout::kContiguous, Content::kUniform, 0});
  for (const WeightLayout w : {WeightLayout::kContiguous, WeightLayout::kChannelsLast}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const std::string label = std::string("w 512x512x27 ") + upconv3d::name(dtype) +
                                (w == WeightLayout::kContiguous ? " contiguous" : " channels_last_3d");
      time_pack(label.c_str(),
                {"", 1, 512, 512, {1, 1, 1}, k3, dtype, 1, Layout::kNCDHW, w, Content::kUniform, 0});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  try {
    if (argc > 1 && std::strcmp(argv[1], "--time") == 0) {
      time_all();
      return 0;
    }
    std::mt19937 random(20240607);
    const std::vector<Case> all = cases();
    for (const Case& test : all) {
      test.dtype == DType::kFloat32 ? run_case<float>(test, random) : run_case<std::uint16_t>(test, random);
    }
    std::printf("test_pack: %zu cases agree with the host reference\n", all.size());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "test_pack: %s\n", error.what());
    return 1;
  }
}
