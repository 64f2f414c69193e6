// SPDX-License-Identifier: Apache-2.0
/// \file
/// Accumulators on their way into shared memory, where TMA stores fetch them.
///
/// A consumer warpgroup holds 64 output channels x WG_POS output positions in wgmma's accumulator layout: a
/// thread owns two channels (rows lane/4 and lane/4 + 8 of its warp's 16) and, in each block of 8 positions,
/// the pair at 2*(lane%4).
///
/// Staged half tiles, all WG_POS positions or STAGED_POS of them after the others, 16-byte chunks permuted so
/// that neither side meets a bank conflict:
///   16 bit   [STAGED_POS/64] buffers of [64 positions][64 channels], chunk ^ position%8
///   float    [STAGED_POS/32] buffers of 2 panels of [32 positions][32 channels], the same
/// Or channels first, for results that are wanted so:
///   16 bit   [STAGED_POS/64] buffers of [64 channels][64 positions], chunk ^ channel%8
///   float    [STAGED_POS/32] buffers of [64 channels][32 positions], the same
/// Buffers are 8 KB with rows of 128 bytes, as TMA stores with a 128-byte swizzle want them; but for
/// narrow_staged_chunk's.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

namespace upconv3d::cuda {

inline constexpr int kStageBytes = 8192;

/// Positions of a staging buffer.
template <class Stored>
inline constexpr int kStagePositions = kStageBytes / 64 / int(sizeof(Stored));

/// Channels of a 128-byte row of a staging buffer.
template <class Stored>
inline constexpr int kPanelChannels = 128 / int(sizeof(Stored));

/// Byte of a staged half tile where the 16-byte chunk `chunk` of a position's 64 channels lies.
template <class Stored>
CUTLASS_DEVICE int staged_chunk(int position, int chunk) {
  constexpr int kPositions = kStagePositions<Stored>;
  int const row = position % kPositions;
  return position / kPositions * kStageBytes + chunk / 8 * (kStageBytes / 2) + row * 128 +
         ((chunk % 8) ^ (position % 8)) * 16;
}

/// The same where a buffer holds 32 channels of 16 bit, of 128 positions: rows of 64 bytes, as TMA stores
/// with a 64-byte swizzle want them.
CUTLASS_DEVICE int narrow_staged_chunk(int position, int chunk) {
  return position * 64 + (chunk ^ (position / 2 % 4)) * 16;
}

/// Positions of a buffer that is staged channels first.
template <class Stored>
inline constexpr int kPanelPositions = 128 / int(sizeof(Stored));

/// The thread's first of two rows of wgmma's accumulator, within the warpgroup's 64; the other is 8 further.
CUTLASS_DEVICE int accumulator_row() {
  return (threadIdx.x / 32) % 4 * 16 + threadIdx.x % 32 / 4;
}

/// acc ((2,2,kBlocks),1,1) = value of its row, of the thread's two, from position `valid` on, where nothing
/// is stored.
template <int kBlocks, class Accumulator>
CUTLASS_DEVICE void fill_beyond(int valid, float const (&value)[2], Accumulator& acc) {
  int const end = valid - 2 * int(threadIdx.x % 4);  // of the thread's positions, each block's first being 0
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float& v = acc(i + 4 * block);
      v = 8 * block + i % 2 >= end ? value[i / 2] : v;
    }
  }
}

/// In the place of who wants to see what is staged.
struct NobodySees {
  CUTLASS_DEVICE void operator()(std::uint32_t const (&)[4]) const {}
};

/// Accumulators on their way into staging buffers.
template <class Stored>
struct StagedTile {
  /// Blocks kFirst to kFirst + kBlocks - 1 of 8 positions to the beginning of `staging`.
  ///
  /// \tparam kRelu of 16 bit: ReLU comes with the conversion, which costs nothing
  /// \param see called with each four matrices of 16 bit as they are staged (pack_matrices)
  template <int kFirst, int kBlocks, bool kRelu = false, class Accumulator, class See = NobodySees>
  CUTLASS_DEVICE static void stage(Accumulator const& acc, char* staging, See const& see = {}) {
    if constexpr (sizeof(Stored) == 4) {
      stage_float<kFirst, kBlocks>(acc, staging);
    } else {
      stage_half<kFirst, kBlocks, kRelu>(acc, staging, see);
    }
  }

  /// 16 bit, the 32 channels of two of the warps, in rows of their own (narrow_staged_chunk).
  template <int kFirst, int kBlocks, class Accumulator>
  CUTLASS_DEVICE static void stage_narrow(Accumulator const& acc, char* staging) {
    static_assert(sizeof(Stored) == 2);
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // as in stage_half
    int const matrix = lane / 8;
    int const chunk = (threadIdx.x / 32) % 2 * 2 + matrix / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kBlocks; b += 2) {
      std::uint32_t packed[4];
      pack_matrices<false>(acc, kFirst + b, packed);
      char* const address = staging + narrow_staged_chunk((b + matrix % 2) * 8 + lane % 8, chunk);
      cute::SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3],
                                    *reinterpret_cast<cute::uint128_t*>(address));
    }
  }

  /// As `stage`, channels first.
  template <int kFirst, int kBlocks, bool kRelu = false, class Accumulator>
  CUTLASS_DEVICE static void stage_channels_first(Accumulator const& acc, char* staging) {
    if constexpr (sizeof(Stored) == 4) {
      stage_float_channels_first<kFirst, kBlocks>(acc, staging);
    } else {
      stage_half_channels_first<kFirst, kBlocks, kRelu>(acc, staging);
    }
  }

  /// Two values as they are stored, the first in the lower half.
  template <bool kRelu>
  CUTLASS_DEVICE static std::uint32_t pack(float first, float second) {
    std::uint32_t packed;
    if constexpr (std::is_same_v<Stored, Stepped16>) {
      static_assert(!kRelu);
      // In one piece of assembly, because the compiler would else keep the accumulators as integers
      // throughout the main loop, copy them after every wgmma, and so wait for each.
      asm("{\n.reg .b32 first, second;\nmov.b32 first, %1;\nmov.b32 second, %2;\n"
          "prmt.b32 %0, first, second, 0x5410;\n}"
          : "=r"(packed)
          : "f"(first), "f"(second));
    } else if constexpr (!kRelu) {
      cutlass::Array<float, 2> const pair{first, second};
      auto const rounded = cutlass::NumericArrayConverter<Stored, float, 2>{}(pair);
      packed = reinterpret_cast<std::uint32_t const&>(rounded);
    } else if constexpr (std::is_same_v<Stored, cutlass::half_t>) {
      asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(first), "f"(second));
    } else {
      asm("cvt.rn.relu.bf16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(first), "f"(second));
    }
    return packed;
  }

  /// The four 8x8 matrices of positions 8*b to 8*b+15: matrix m has channels 8*(m/2) and positions 8*(m%2)
  /// on.
  template <bool kRelu, class Accumulator>
  CUTLASS_DEVICE static void pack_matrices(Accumulator const& acc, int b, std::uint32_t (&packed)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 4; ++m) {
      int const first = 2 * (m / 2) + 4 * (b + m % 2);
      packed[m] = pack<kRelu>(acc(first), acc(first + 1));
    }
  }

 private:
  template <int kFirst, int kBlocks, bool kRelu, class Accumulator, class See>
  CUTLASS_DEVICE static void stage_half(Accumulator const& acc, char* staging, See const& see) {
    int lane = threadIdx.x % 32;
    // Hides that lane is the same for all tiles: the compiler would keep all addresses, and spill them.
    asm volatile("" : "+r"(lane));
    int const matrix = lane / 8;
    int const chunk = (threadIdx.x / 32) % 4 * 2 + matrix / 2;  // 16-byte column of 8 channels
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kBlocks; b += 2) {
      std::uint32_t packed[4];
      pack_matrices<kRelu>(acc, kFirst + b, packed);
      int const position = (b + matrix % 2) * 8 + lane % 8;
      char* const address = staging + staged_chunk<Stored>(position, chunk);
      cute::SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3],
                                    *reinterpret_cast<cute::uint128_t*>(address));
      see(packed);
    }
  }

  template <int kFirst, int kBlocks, class Accumulator>
  CUTLASS_DEVICE static void stage_float(Accumulator const& acc, char* staging) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      CUTLASS_PRAGMA_UNROLL
      for (int ji = 0; ji < 4; ++ji) {
        int const position = 8 * b + 2 * (lane % 4) + ji % 2;
        int const channel = accumulator_row() + 8 * (ji / 2);
        store_shared(cute::cast_smem_ptr_to_uint(staging) + staged_chunk<Stored>(position, channel / 4) +
                         channel % 4 * 4,
                     acc(ji + 4 * (kFirst + b)));
      }
    }
  }

  template <int kFirst, int kBlocks, bool kRelu, class Accumulator>
  CUTLASS_DEVICE static void stage_half_channels_first(Accumulator const& acc, char* staging) {
    int const lane = threadIdx.x % 32;
    int const matrix = lane / 8, row = lane % 8;
    int const channel = (threadIdx.x / 32) % 4 * 16 + matrix / 2 * 8 + row;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kBlocks; b += 2) {
      std::uint32_t packed[4];
      pack_matrices<kRelu>(acc, kFirst + b, packed);
      int const chunk = b + matrix % 2;  // of 8 positions
      char* const address = staging + chunk / 8 * kStageBytes + channel * 128 + ((chunk % 8) ^ row) * 16;
      cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                    *reinterpret_cast<cute::uint128_t*>(address));
    }
  }

  template <int kFirst, int kBlocks, class Accumulator>
  CUTLASS_DEVICE static void stage_float_channels_first(Accumulator const& acc, char* staging) {
    // Odd channels store a pair's second position first: those of a warp then meet all banks.
    bool const odd = accumulator_row() % 2 != 0;
    int const pair = threadIdx.x % 4;                        // of a block's positions
    int const chunk = (pair / 2) ^ (accumulator_row() % 8);  // of 4 positions, of the first block
    std::uint32_t const row = cute::cast_smem_ptr_to_uint(staging) + accumulator_row() * 128 + chunk * 16 +
                              pair % 2 * 8 + (odd ? 4 : 0);
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      // A block is two chunks of a 128-byte row.
      std::uint32_t const to = (row ^ (b % 4 * 32)) + b / 4 * kStageBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        float const first = acc(2 * j + 4 * (kFirst + b)), second = acc(1 + 2 * j + 4 * (kFirst + b));
        store_shared(to + j * 1024, odd ? second : first);
        store_shared((to ^ 4) + j * 1024, odd ? first : second);
      }
    }
  }

  /// In this order and from 32-bit addresses: else the compiler runs out of registers.
  CUTLASS_DEVICE static void store_shared(std::uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }
};

}  // namespace upconv3d::cuda
