// SPDX-License-Identifier: Apache-2.0
/// \file
/// Powers of two on the device, from denormals to Inf: how large a value is, scaling it, splitting it.
///
/// The reach of a value is the smallest e with |v| < 2^e, from -148 (the smallest denormal) to 128.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/layout/pack.hpp"

namespace upconv3d::cuda {

inline constexpr int kSmallestReach = -148;
inline constexpr int kLargestReach = 128;

/// Reach of x * 2^sample[n] can be no less than this. A channel without finite nonzero values counts as this
/// small, so that its weights, which multiply only zeros, take no range from the others.
inline constexpr int kSmallestScaledReach = kSmallestReach + (kOperandExponent - kLargestReach);

/// Added to the reach of w * 2^-channel[c], which is at least -148 - 276, so that it is positive and 0 can
/// mean "no finite nonzero weight".
inline constexpr int kReachBias = 512;
static_assert(kReachBias + kSmallestReach - (kOperandExponent - kSmallestScaledReach) > 0);

/// Bits of |v|, which order as |v| does; 0 where v is not finite.
__device__ inline std::uint32_t finite_magnitude(float v) {
  const std::uint32_t bits = __float_as_uint(v) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

/// Reach of a nonzero finite magnitude.
__device__ inline int reach(std::uint32_t magnitude) {
  const int biased_exponent = static_cast<int>(magnitude >> 23);
  return biased_exponent != 0 ? biased_exponent - 126 : -117 - __clz(static_cast<int>(magnitude));
}

/// The column exponent of an output channel, from its entry of OperandScales::w_reach.
__device__ inline int column_exponent(std::uint32_t biased_reach) {
  return biased_reach == 0 ? 0 : kOperandExponent - (static_cast<int>(biased_reach) - kReachBias);
}

/// 2^exponent as two factors, because alone it may be no float. The product with a value is exact wherever it
/// is a normal float; exponents beyond +-252 meet only zeros, non-finite values, or results that round to 0.
struct alignas(8) PowerOfTwo {
  float first;
  float second;

  __device__ float times(float v) const { return v * first * second; }
};

__device__ inline PowerOfTwo power_of_two(int exponent) {
  const int clamped = max(-252, min(252, exponent));
  const int half = clamped / 2;
  return {__int_as_float((half + 127) << 23), __int_as_float((clamped - half + 127) << 23)};
}

/// A float32 as one or two float16, as bits.
struct SplitValue {
  std::uint16_t hi;
  std::uint16_t lo;
};

template <int kProducts>
__device__ inline SplitValue split(float v, const PowerOfTwo& factor) {
  const float scaled = factor.times(v);
  std::uint16_t hi = __half_as_ushort(__float2half_rn(scaled));
  if ((hi & 0x7fffu) == 0 && v != 0.0f) hi |= 1u;  // +-2^-24: Inf times this is Inf, as it is with v
  if constexpr (kProducts == 1) {
    return {hi, 0};
  } else {
    const bool finite = (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u;
    const float rest = scaled - __half2float(__ushort_as_half(hi));
    return {finite ? hi : std::uint16_t{0}, __half_as_ushort(__float2half_rn(finite ? rest : scaled))};
  }
}

/// Eight consecutive channels of an operand, ready for a 16-byte store.
template <int kProducts>
struct SplitVector {
  uint4 hi;
  uint4 lo;  // products == 3 only
};

__device__ inline std::uint32_t pair_of(std::uint16_t even, std::uint16_t odd) {
  return static_cast<std::uint32_t>(even) | (static_cast<std::uint32_t>(odd) << 16);
}

__device__ inline uint4 pack_eight(const std::uint16_t (&v)[8]) {
  return {pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7])};
}

/// float32 values, each with its factor, to operand form.
template <int kProducts>
__device__ inline SplitVector<kProducts> encode(const float (&v)[8], const PowerOfTwo (&factor)[8]) {
  std::uint16_t hi[8], lo[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const SplitValue s = split<kProducts>(v[i], factor[i]);
    hi[i] = s.hi;
    lo[i] = s.lo;
  }
  SplitVector<kProducts> packed;
  packed.hi = pack_eight(hi);
  if constexpr (kProducts == 3) packed.lo = pack_eight(lo);
  return packed;
}

}  // namespace upconv3d::cuda
