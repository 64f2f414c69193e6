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

/// Which powers of two multiply an operand.
enum class Scaling {
  kNone,     // 16-bit values stay as they are
  kAssumed,  // those that assumed_exponent() supposes of x
  kChosen,   // those that were chosen after x had been seen
};

inline constexpr int kSmallestReach = -148;
inline constexpr int kLargestReach = 128;
inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;

/// Reach of x * 2^sample[n] can be no less than this. A channel without finite nonzero values counts as this
/// small, so that its weights, which multiply only zeros, take no range from the others.
inline constexpr int kSmallestScaledReach = kSmallestReach + (kOperandExponent - kLargestReach);

/// Added to the reach of w * 2^-channel[c], which is at least -148 - 276, and to that of x * 2^sample[n], so
/// that both are positive and 0 can mean "no finite nonzero value".
inline constexpr int kReachBias = 512;
static_assert(kReachBias + kSmallestReach - (kOperandExponent - kSmallestScaledReach) > 0);

constexpr std::uint32_t bits_of_power(int exponent) {
  return static_cast<std::uint32_t>(exponent + 127) << 23;
}

/// Whether a largest |x| that is not zero lies outside of what the assumed scales fit.
template <int kProducts>
__device__ inline bool breaks_assumption(std::uint32_t largest) {
  constexpr std::uint32_t kSmallest = bits_of_power(smallest_reach(kProducts) - assumed_exponent(kProducts));
  constexpr std::uint32_t kTooLarge = bits_of_power(kInputExponent - assumed_exponent(kProducts));
  return largest != 0 && (largest < kSmallest || largest >= kTooLarge);
}

/// Bits of |v|, which order as |v| does; kInfinityBits or more where v is not finite.
__device__ inline std::uint32_t magnitude(float v) {
  return __float_as_uint(v) & 0x7fffffffu;
}

/// magnitude(v), or 0 where v is not finite.
__device__ inline std::uint32_t finite_magnitude(float v) {
  const std::uint32_t bits = magnitude(v);
  return bits < kInfinityBits ? bits : 0u;
}

/// Reach of a nonzero finite magnitude.
__device__ inline int reach(std::uint32_t finite) {
  const int biased_exponent = static_cast<int>(finite >> 23);
  return biased_exponent != 0 ? biased_exponent - 126 : -117 - __clz(static_cast<int>(finite));
}

__device__ inline std::uint32_t biased_reach(std::uint32_t finite, int exponent) {
  return static_cast<std::uint32_t>(reach(finite) + exponent + kReachBias);
}

/// The column exponent of an output channel, from the biased reach of its largest w * 2^-channel[c].
__device__ inline int column_exponent(std::uint32_t biased) {
  return biased == 0 ? 0 : kOperandExponent - (static_cast<int>(biased) - kReachBias);
}

/// 2^exponent as two factors, because alone it may be no float. The product with a value is exact wherever it
/// is a normal float; exponents beyond +-252 meet only zeros, non-finite values, or results that round to 0.
struct PowerOfTwo {
  float first;
  float second;

  __device__ float times(float v) const { return v * first * second; }
};

__device__ inline PowerOfTwo power_of_two(int exponent) {
  const int clamped = max(-252, min(252, exponent));
  const int half = clamped / 2;
  return {__int_as_float((half + 127) << 23), __int_as_float((clamped - half + 127) << 23)};
}

/// One factor for every value, a power of two that is a float.
struct OneFactor {
  float factor;
  __device__ float times(int, float v) const { return v * factor; }
};

/// One power of two for every value.
struct OnePower {
  PowerOfTwo power;
  __device__ float times(int, float v) const { return power.times(v); }
};

/// A power of two of its own for each value, 2^(exponent + kSign * channel[first + i]). Read when it is
/// needed: those of eight values would take sixteen registers.
template <int kSign>
struct ChannelPowers {
  const std::int32_t* channel;  // [last + 1] int32
  int first;
  int last;  // values behind it take its power
  int exponent;
  __device__ float times(int i, float v) const {
    return power_of_two(exponent + kSign * channel[min(first + i, last)]).times(v);
  }
};

/// `scaled`, or +-2^-24, float16's smallest value, where it would round to zero though v is none: Inf times
/// that is Inf, as it is with v. Between 2^-25 and 2^-24 float16 rounds to 2^-24 anyway.
__device__ inline float kept_from_zero(float scaled, float v) {
  constexpr float kSmallestHalf = 1.0f / (1 << 24);
  return v != 0.0f && fabsf(scaled) < kSmallestHalf ? copysignf(kSmallestHalf, v) : scaled;
}

__device__ inline std::uint32_t half_pair(float even, float odd) {
  const __half2 pair = __floats2half2_rn(even, odd);
  return static_cast<std::uint32_t>(__half_as_ushort(__low2half(pair))) |
         static_cast<std::uint32_t>(__half_as_ushort(__high2half(pair))) << 16;
}

__device__ inline float half_of_word(std::uint32_t word, int which) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * which))));
}

/// Consecutive channels of an operand, two to a word, the lower channel in the lower half.
template <int kCount>
struct SplitWords {
  std::uint32_t hi[kCount / 2];
  std::uint32_t lo[kCount / 2];  // three products only
};

/// float32 values to operand form: hi = fp16(scaled), and with three products lo = fp16(scaled - hi); see
/// pack.hpp for zeros and non-finite values.
///
/// \param scale times(i, v[i]) scales the i-th value
template <int kProducts, int kCount, class Scale>
__device__ inline SplitWords<kCount> encode(const float (&v)[kCount], const Scale& scale) {
  SplitWords<kCount> words;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float scaled[2], hi[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float own = v[2 * i + j];
      scaled[j] = scale.times(2 * i + j, own);
      hi[j] = kept_from_zero(scaled[j], own);
      if (kProducts == 3 && magnitude(own) >= kInfinityBits) hi[j] = 0.0f;
    }
    words.hi[i] = half_pair(hi[0], hi[1]);
    if constexpr (kProducts == 3) {
      words.lo[i] =
          half_pair(scaled[0] - half_of_word(words.hi[i], 0), scaled[1] - half_of_word(words.hi[i], 1));
    }
  }
  return words;
}

__device__ inline std::uint32_t pair_of(std::uint16_t even, std::uint16_t odd) {
  return static_cast<std::uint32_t>(even) | static_cast<std::uint32_t>(odd) << 16;
}

/// Values that keep their 16 bits.
template <int kCount>
__device__ inline SplitWords<kCount> encode(const std::uint16_t (&v)[kCount]) {
  SplitWords<kCount> words;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) words.hi[i] = pair_of(v[2 * i], v[2 * i + 1]);
  return words;
}

/// Stores 8 channels of one row of an operand.
///
/// \param destination [rows,pitch] 16 bit, 16-byte aligned
/// \param channel     a multiple of 8, as pitch is
__device__ inline void store_eight(std::uint16_t* destination, std::int64_t row, std::int64_t channel,
                                   std::int64_t pitch, const uint4& v) {
  *reinterpret_cast<uint4*>(destination + row * pitch + channel) = v;
}

__device__ inline uint4 vector_of(const std::uint32_t (&words)[4]) {
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace upconv3d::cuda
