// SPDX-License-Identifier: Apache-2.0
/// \file
/// Sums of a staged half tile of 16-bit values, and of their squares, on the tensor cores: a sixth of the
/// instructions that a warp needs to add them up one by one. Where tiles have few k-blocks, the warps that
/// take moments are what the multiplication would wait for.
///
/// With D [16 channels][16 positions], d = v - pivot, the products D*1 and D*D^T hold each channel's sum, and
/// its sum of squares on the diagonal. The fragments of D are also those of D^T (mma.m16n8k16: A by rows, B
/// by columns), so that one ldmatrix serves both. d is rounded to 16 bits: exact where the values lie close
/// to the pivot, where alone the variance is small against the mean; elsewhere an error of 2^-9 of d that is
/// as often up as down.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cutlass/numeric_types.h"

#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"

namespace upconv3d::cuda {

/// Sums of one channel, shifted by its pivot.
struct ChannelSums {
  float pivot, sum, sum_squares;
};

/// Takes the sums of 64 channels x POSITIONS positions, all of them valid. The whole warp calls it.
///
/// \tparam Stored bfloat16_t or half_t
template <class Stored, int POSITIONS>
class MmaMoments {
 public:
  static constexpr int kBlocks = 64 / 16;  // of 16 channels

  /// \param staging a staged half tile, see relu_epilogue_sm90.cuh
  CUTLASS_DEVICE explicit MmaMoments(char const* staging) {
    static_assert(POSITIONS % 16 == 0);
    int const lane = threadIdx.x % 32, matrix = lane / 8;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) sums_[block][i] = squares_[block][0][i] = squares_[block][1][i] = 0.f;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < POSITIONS; first += 16) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        // Matrices: channels 0-7 and 8-15 of positions 0-7, then of positions 8-15.
        int const position = first + matrix / 2 * 8 + lane % 8;
        char const* const address = staging + staged_chunk<Stored>(position, 2 * block + matrix % 2);
        std::uint32_t d[4];
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(address), d[0], d[1], d[2],
                                      d[3]);
        if (first == 0) set_pivot(block, d);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) d[i] = subtract(d[i], pivot_[block][i % 2]);
        multiply(sums_[block], d, ones(), ones());
        multiply(squares_[block][0], d, d[0], d[2]);
        multiply(squares_[block][1], d, d[1], d[3]);
      }
    }
  }

  /// Sums of the channels 8*chunk to 8*chunk+7, chunk = lane%8.
  CUTLASS_DEVICE void chunk_sums(ChannelSums (&to)[8]) const {
    int const lane = threadIdx.x % 32, quad = lane % 4;
    // Lane l holds row l/4 of all blocks, that is channel l/4 of all chunks. Its quad shares them out: lane%4
    // offers those of chunks lane%4 and lane%4 + 4.
    ChannelSums low{}, high{};
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < 8; ++chunk) {
      ChannelSums const own = row_sums(chunk / 2, chunk % 2);
      if (chunk % 4 == quad) (chunk < 4 ? low : high) = own;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 8; ++row) {
      int const from = 4 * row + quad;
      ChannelSums const a = shuffle(low, from), b = shuffle(high, from);
      to[row] = lane % 8 < 4 ? a : b;
    }
  }

 private:
  static constexpr bool kHalf = std::is_same_v<Stored, cutlass::half_t>;

  CUTLASS_DEVICE static std::uint32_t ones() { return kHalf ? 0x3c003c00u : 0x3f803f80u; }

  /// a - b, two values at once.
  CUTLASS_DEVICE static std::uint32_t subtract(std::uint32_t a, std::uint32_t b) {
    std::uint32_t d;
    if constexpr (kHalf) {
      asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    } else {
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    }
    return d;
  }

  /// c += A*B
  CUTLASS_DEVICE static void multiply(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
    using Mma =
        std::conditional_t<kHalf, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
  }

  /// Position 0's values, which the first lane of each four has, twice in a register.
  CUTLASS_DEVICE void set_pivot(int block, std::uint32_t const (&d)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      std::uint32_t const first = __shfl_sync(0xffffffffu, d[half], threadIdx.x % 32 / 4 * 4);
      pivot_[block][half] = __byte_perm(first, 0, 0x1010);
    }
  }

  /// Of channel lane/4 of a block's first or second 8.
  CUTLASS_DEVICE ChannelSums row_sums(int block, int half) const {
    int const row = threadIdx.x % 32 / 4;
    // The diagonal: column `row` of row `row` lies in the quad's lane row/2.
    float const even = __shfl_sync(0xffffffffu, squares_[block][half][2 * half], row * 4 + row / 2);
    float const odd = __shfl_sync(0xffffffffu, squares_[block][half][2 * half + 1], row * 4 + row / 2);
    std::uint16_t const bits = static_cast<std::uint16_t>(pivot_[block][half]);
    return {float(reinterpret_cast<Stored const&>(bits)), sums_[block][2 * half], row % 2 ? odd : even};
  }

  CUTLASS_DEVICE static ChannelSums shuffle(ChannelSums const& value, int lane) {
    return {__shfl_sync(0xffffffffu, value.pivot, lane), __shfl_sync(0xffffffffu, value.sum, lane),
            __shfl_sync(0xffffffffu, value.sum_squares, lane)};
  }

  std::uint32_t pivot_[kBlocks][2];  // of channels lane/4 and lane/4 + 8
  float sums_[kBlocks][4];           // accumulators of D*1: all columns are equal
  float squares_[kBlocks][2][4];     // of D*D^T, columns 0-7 and 8-15
};

}  // namespace upconv3d::cuda
