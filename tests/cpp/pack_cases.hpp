// SPDX-License-Identifier: Apache-2.0
/// \file
/// The cases of test_pack: tensors with the values that matter, and the scales that launch_pack must find.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/problem.hpp"
#include "cuda/layout/pack.hpp"
#include "pack_reference.hpp"

namespace upconv3d::tests {

inline constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
inline constexpr int kTop = cuda::kOperandExponent;

enum class WeightLayout { kContiguous, kChannelsLast, kSliced };

/// What float32 values are. The last six begin with kUniform, which the assumed scales fit.
enum class Content {
  kUniform,         // [-1, 1)
  kManyMagnitudes,  // from denormals to the largest floats
  kSpecial,         // extreme samples, channels and columns, non-finite values
  kFitting,         // the assumption's limits, zeros and non-finite values: just accepted
  kTooLarge,        // one value at the upper limit
  kTooSmall,        // one channel of one sample just below the lower limit
  kSmallSample,     // one sample is 2^-40 of the others
  kSmallChannel,    // one channel is
  kSpecialWeights,  // extreme columns of w, non-finite weights
};

struct Case {
  const char* label;
  std::int64_t n, c, k;
  Extent3 in, kernel;
  DType dtype;
  int products;
  Layout x_layout;
  WeightLayout w_layout;
  Content content;
  std::int64_t x_offset;  // elements by which x is off its 256-byte boundary
  bool rejects = false;   // the assumed scales do not fit x
  bool pack_x = true;
  std::int64_t groups = 1;    // of the convolution
  std::int64_t w_offset = 0;  // elements by which w is off its 256-byte boundary
};

inline Problem problem_of(const Case& test) {
  Problem problem;
  problem.n = test.n;
  problem.c = test.c;
  problem.k = test.k;
  problem.in = test.in;
  problem.kernel = test.kernel;
  problem.dtype = test.dtype;
  problem.x_layout = test.x_layout;
  problem.groups = test.groups;
  return problem;
}

/// Strides of w [C,K/groups,T,R,S], and by return the elements of its storage.
inline std::int64_t weight_strides(const Case& test, std::int64_t (&stride)[5]) {
  const auto [t, r, s] = test.kernel;
  const std::int64_t taps = t * r * s, columns = test.k / test.groups;
  if (test.w_layout == WeightLayout::kChannelsLast) {
    const std::int64_t strides[5] = {columns * taps, 1, r * s * columns, s * columns, columns};
    std::copy(strides, strides + 5, stride);
  } else if (test.w_layout == WeightLayout::kContiguous) {
    const std::int64_t strides[5] = {columns * taps, taps, r * s, s, 1};
    std::copy(strides, strides + 5, stride);
  } else {  // every second element along S of a tensor stored as [K/groups,C,T,R,2S]
    const std::int64_t strides[5] = {2 * taps, 2 * taps * test.c, 2 * r * s, 2 * s, 2};
    std::copy(strides, strides + 5, stride);
    return 2 * test.c * columns * taps;
  }
  return test.c * columns * taps;
}

inline std::int64_t x_index(const Case& test, std::int64_t n, std::int64_t c, std::int64_t p) {
  const std::int64_t positions = volume(test.in);
  return test.x_layout == Layout::kNCDHW ? (n * test.c + c) * positions + p
                                         : (n * positions + p) * test.c + c;
}

/// First input channel of output channel k's group.
inline std::int64_t group_channel(const Case& test, std::int64_t k) {
  return k / (test.k / test.groups) * (test.c / test.groups);
}

/// \param c input channel, \param k output channel of the same group
inline std::int64_t w_index(const Case& test, const std::int64_t (&stride)[5], std::int64_t c, std::int64_t k,
                            std::int64_t tap) {
  const std::int64_t r = test.kernel[1], s = test.kernel[2];
  return c * stride[0] + k % (test.k / test.groups) * stride[1] + tap / (r * s) * stride[2] +
         tap / s % r * stride[3] + tap % s * stride[4];
}

inline void fill(std::vector<std::uint16_t>& values, const Case&, std::mt19937& random) {
  for (std::uint16_t& v : values) v = static_cast<std::uint16_t>(random());
}

inline void fill(std::vector<float>& values, const Case& test, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-148, 126);
  for (float& v : values) {
    v = uniform(random);
    if (test.content == Content::kManyMagnitudes) v = std::ldexp(v, exponent(random));
  }
}

/// Zero and extreme channels and samples; non-finite values beside finite ones and alone.
inline void place_special_inputs(const Case& test, std::vector<float>& x) {
  const std::int64_t positions = volume(test.in);
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
}

/// Zero and extreme columns, and non-finite weights.
inline void place_special_weights(const Case& test, const std::int64_t (&stride)[5], std::vector<float>& w) {
  const std::int64_t taps = volume(test.kernel);
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

/// Breaks the assumption in one place, or goes to its limits without breaking it.
inline void place_limits(const Case& test, std::vector<float>& x) {
  const std::int64_t positions = volume(test.in), last = test.n - 1;
  const int assumed = cuda::assumed_exponent(test.products);
  const float upper = std::ldexp(1.0f, cuda::kInputExponent - assumed);
  const float lower = std::ldexp(1.0f, cuda::smallest_reach(test.products) - assumed);
  const auto at = [&](std::int64_t n, std::int64_t c, std::int64_t p) -> float& {
    return x[x_index(test, n, c, p)];
  };
  for (std::int64_t p = 0; p < positions; ++p) {
    if (test.content == Content::kTooSmall) at(last, test.c - 1, p) = 0.0f;
    for (std::int64_t c = 0; test.content == Content::kSmallSample && c < test.c; ++c) {
      at(last, c, p) = std::ldexp(at(last, c, p), -40);
    }
    for (std::int64_t n = 0; test.content == Content::kSmallChannel && n < test.n; ++n) {
      at(n, 1, p) = std::ldexp(at(n, 1, p), -40);
    }
  }
  if (test.content == Content::kTooLarge) at(last, test.c - 1, positions - 1) = -upper;
  if (test.content == Content::kTooSmall) at(last, test.c - 1, positions - 1) = std::nextafter(-lower, 0.0f);
  if (test.content != Content::kFitting) return;
  for (std::int64_t p = 0; p < positions; ++p) {
    for (std::int64_t c = 0; c < test.c; ++c) {
      if (c == 0 || test.n > 1) at(last, c, p) = 0.0f;  // zero channel; zero sample beside others
    }
    at(0, 1, p) = p % 2 == 0 ? kDenormal : -3 * kDenormal;
    at(0, 2, p) = p % 2 == 0 ? kInf : kNaN;  // nothing finite
  }
  for (std::int64_t p = 0; p < positions; ++p) at(0, 5, p) = p == positions / 2 ? lower : kDenormal;
  at(0, 1, positions - 1) = -std::nextafter(upper, 0.0f);
  at(0, 3, positions / 2) = kNaN;
  at(0, 4, positions / 2) = -kInf;
}

struct HostScales {
  bool rejected = false;
  std::vector<int> sample, channel, column;
};

/// Chosen where any sample and channel breaks the assumption, else assumed.
inline HostScales reference_scales(const Case& test, const std::int64_t (&stride)[5],
                                   const std::vector<float>& x, const std::vector<float>& w) {
  constexpr int kNone = -100000;
  const int assumed = cuda::assumed_exponent(test.products);
  const std::int64_t positions = volume(test.in), taps = volume(test.kernel);
  HostScales scales{false, std::vector<int>(test.n), std::vector<int>(test.c), std::vector<int>(test.k)};
  std::vector<int> channel_reach(test.c, -148 + kTop - 128);
  for (std::int64_t n = 0; n < test.n; ++n) {
    std::vector<int> own(test.c, kNone);
    for (std::int64_t c = 0; c < test.c; ++c) {
      float largest = 0.0f;
      for (std::int64_t p = 0; p < positions; ++p) {
        const float v = std::fabs(x[x_index(test, n, c, p)]);
        if (std::isfinite(v)) largest = std::max(largest, v);
      }
      own[c] = reach(largest, kNone);
      scales.rejected = scales.rejected || !is_as_assumed(largest, test.products);
    }
    const int largest = *std::max_element(own.begin(), own.end());
    scales.sample[n] = largest == kNone ? 0 : kTop - largest;
    for (std::int64_t c = 0; c < test.c; ++c) {
      if (own[c] != kNone) channel_reach[c] = std::max(channel_reach[c], own[c] + scales.sample[n]);
    }
  }
  for (std::int64_t c = 0; c < test.c; ++c) scales.channel[c] = kTop - channel_reach[c];
  if (!scales.rejected) {
    std::fill(scales.sample.begin(), scales.sample.end(), 0);
    std::fill(scales.channel.begin(), scales.channel.end(), assumed);
  }
  for (std::int64_t k = 0; k < test.k; ++k) {
    int largest = kNone;
    for (std::int64_t i = 0; i < test.c / test.groups; ++i) {
      const std::int64_t c = group_channel(test, k) + i;
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        const int own = reach(w[w_index(test, stride, c, k, tap)], kNone);
        if (own != kNone) largest = std::max(largest, own - scales.channel[c]);
      }
    }
    scales.column[k] = largest == kNone ? 0 : kTop - largest;
  }
  return scales;
}

}  // namespace upconv3d::tests
