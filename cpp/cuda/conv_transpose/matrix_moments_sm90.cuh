// SPDX-License-Identifier: Apache-2.0
/// \file
/// Sums of values and of their squares by tensor cores, as relu_epilogue_sm90.cuh takes them: two mma.sync
/// for four pairs of values of a thread, where adding and multiplying takes sixteen instructions. For who has
/// the tensor cores to himself: an mma.sync beside another warpgroup's wgmma costs that several times its
/// share.
///
/// Operands are values of 16 bits, packed as they are staged (StagedTile). Where a warp holds wgmma's
/// accumulators, that is mma.sync's own layout: 8 channels x 16 positions, once as the upper half of A above
/// rows of ones, once as B. Of D, 16 x 8, the diagonal of the upper half is then the sums of squares, and
/// each row of the lower half the sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/half.h"

namespace upconv3d::cuda {

/// Sums of the 16 channels of a warp: of rows lane/4 (j = 0) and lane/4 + 8 (j = 1), as accumulator_row has
/// them. Tensor cores truncate each product where it is aligned with the sum, and the sum: of 256 positions,
/// in 16 steps of which later ones count for more, squares lack some 2^-21 of bfloat16's, 2^-20 of float16's.
/// \tparam Stored bfloat16_t or half_t
template <class Stored>
struct MatrixMoments {
  static_assert(std::is_same_v<Stored, cutlass::bfloat16_t> || std::is_same_v<Stored, cutlass::half_t>);

  /// Of a sum of squares a variance that is less than this share does not follow: by what squares lack, it
  /// leaves an inverse deviation 14 bits, three and more beyond the values' own.
  static constexpr float kLeastShare = std::is_same_v<Stored, cutlass::half_t> ? 0x1p-6f : 0x1p-8f;

  float d[2][4] = {};  // (j) mma.sync's accumulators

  /// Adds 16 positions if `wanted`, which is the same for the warp.
  /// \param packed pairs of positions: of row j = 0 the first 8 positions' and the others', then of j = 1
  CUTLASS_DEVICE void add(bool wanted, std::uint32_t const (&packed)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) multiply(wanted, packed[2 * j], packed[2 * j + 1], d[j]);
  }

  /// Whether the thread has the sums of its two rows: one of a row's four threads does.
  CUTLASS_DEVICE static bool has_sums() { return threadIdx.x % 4 == threadIdx.x / 8 % 4; }
  CUTLASS_DEVICE float squares(int j) const { return odd() ? d[j][1] : d[j][0]; }
  CUTLASS_DEVICE float sum(int j) const { return odd() ? d[j][3] : d[j][2]; }

 private:
  /// A thread of row lane/4 has columns 2*(lane%4) and the next one.
  CUTLASS_DEVICE static bool odd() { return threadIdx.x / 4 % 2 != 0; }

  /// By a predicate, not a branch, which the compiler would make for each.
  CUTLASS_DEVICE static void multiply(bool wanted, std::uint32_t first, std::uint32_t second, float (&d)[4]) {
    if constexpr (std::is_same_v<Stored, cutlass::half_t>) {
      constexpr std::uint32_t kOnes = 0x3c003c00;
      asm volatile(
          "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %7, 0;\n"
          "@wanted mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, "
          "{%4, %5}, {%0, %1, %2, %3};\n}"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(first), "r"(second), "r"(kOnes), "r"(int(wanted)));
    } else {
      constexpr std::uint32_t kOnes = 0x3f803f80;
      asm volatile(
          "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %7, 0;\n"
          "@wanted mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, "
          "{%4, %5}, {%0, %1, %2, %3};\n}"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(first), "r"(second), "r"(kOnes), "r"(int(wanted)));
    }
  }
};

}  // namespace upconv3d::cuda
