// SPDX-License-Identifier: Apache-2.0
/// \file
/// Values stored as 16 bits with a step: value = (bits - zero) * 2^step, NaN where the step is -128. The zero
/// is 0, or 32768 where values may be negative.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace upconv3d::cuda {

/// 2^step of four steps at once: as the bits of floats, except for -128, which is NaN.
struct StepValues {
  unsigned exponents, nan;  // four bytes each: a float's exponent, and ones throughout where that is 255

  __device__ __forceinline__ void set(unsigned steps) {
    exponents = __vadd4(steps, 0x7f7f7f7fu);
    nan = __vcmpeq4(exponents, 0xffffffffu);
  }

  /// \param j constant after unrolling
  __device__ __forceinline__ float at(int j) const {
    const unsigned selector = static_cast<unsigned>(j << 12 | (4 + j) << 8 | (4 + j) << 4 | (4 + j));
    return __uint_as_float(__byte_perm(exponents, nan, selector) >> 1);
  }
};

/// What stored_bits() subtracts: exactly, because the difference is an integer below 2^24.
constexpr float stored_origin(bool is_signed) {
  return is_signed ? 0x1p23f + 0x1p15f : 0x1p23f;
}

/// 16 bits of a word as a float, less the zero: from 2^23 on a float's last bit is worth 1.
/// \param half 0: the lower; constant after unrolling
/// \param origin stored_origin()
__device__ __forceinline__ float stored_bits(unsigned word, int half, float origin = stored_origin(false)) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, half == 0 ? 0x7610 : 0x7632)) - origin;
}

}  // namespace upconv3d::cuda
