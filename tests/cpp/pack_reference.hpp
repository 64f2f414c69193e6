// SPDX-License-Identifier: Apache-2.0
/// \file
/// What launch_pack must do to one float32, in double on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/layout/pack.hpp"

namespace upconv3d::tests {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? kNaN : sign * kInf;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

/// Nearest float16, ties to even.
inline double round_to_half(double v) {
  if (v == 0.0 || !std::isfinite(v)) return v;
  int exponent = 0;
  std::frexp(v, &exponent);
  const int quantum = std::max(exponent - 11, -24);
  return std::ldexp(std::nearbyint(std::ldexp(v, -quantum)), quantum);
}

struct HostSplit {
  double hi, lo;
};

inline HostSplit split(float v, int exponent, int products) {
  const double scaled = std::ldexp(static_cast<double>(v), exponent);
  if (!std::isfinite(v)) return products == 3 ? HostSplit{0.0, v} : HostSplit{v, 0.0};
  double hi = round_to_half(scaled);
  if (hi == 0.0 && v != 0.0f) hi = std::copysign(std::ldexp(1.0, -24), v);
  const float rest = static_cast<float>(scaled) - static_cast<float>(hi);
  return {hi, products == 3 ? round_to_half(rest) : 0.0};
}

/// Largest e with |v| >= 2^(e-1); `none` where v is zero or not finite.
inline int reach(float v, int none) {
  if (v == 0.0f || !std::isfinite(v)) return none;
  int exponent = 0;
  std::frexp(static_cast<double>(v), &exponent);
  return exponent;
}

/// Whether assumed scales hold for the largest finite |x| of a sample and channel.
inline bool is_as_assumed(float largest, int products) {
  if (largest == 0.0f) return true;
  const double scaled = std::ldexp(static_cast<double>(largest), cuda::assumed_exponent(products));
  return scaled >= std::ldexp(1.0, cuda::smallest_reach(products)) &&
         scaled < std::ldexp(1.0, cuda::kInputExponent);
}

}  // namespace upconv3d::tests
