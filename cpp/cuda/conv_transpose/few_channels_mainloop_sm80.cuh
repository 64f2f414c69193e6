// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: a warp's multiplication of one group of phases.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv_transpose/few_channels_operands_sm80.cuh"

namespace upconv3d::cuda {

/// A warp's results. Values e and 2 + e of lane l belong to positions l/4 and 8 more of 16, and to output
/// channel l%4*RUN + 2*(column tile) + e.
template <class Traits>
struct FewAccumulators {
  float at[Traits::PAIRED][Traits::ROW_TILES][Traits::COLUMN_TILES][4];
};

/// d += a*b: 16 positions by 8 columns, 32 bytes of gemm_k.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Reads x and w of one group after the other.
template <class Traits>
class FewMultiplier {
 public:
  /// \param first_row the warp's first of the tile's rows
  __device__ FewMultiplier(const FewParams& params, const char* shared, int first_row)
      : steps_(reinterpret_cast<const std::uint32_t*>(shared + params.steps_at)), weights_(shared) {
    const int lane = int(threadIdx.x) % 32;
    place_shift_ = lane < 16 ? 0 : kFewOffsetBits;
#pragma unroll
    for (int i = 0; i < Traits::ROW_TILES; ++i) {
      const int row = first_row + 16 * i + lane % 16;
      int at[3];
      at[0] = params.tile_height.divmod(at[1], params.tile_width.divmod(at[2], row));
      const int position = (at[0] * params.box_height.divisor + at[1]) * params.box_width.divisor + at[2];
      // Rows behind the tile's read some position of it, and their results go nowhere.
      rows_[i] = at[0] < params.tile[0] ? position * params.pitch_bytes : 0;
    }
    weights_ += lane * (Traits::COLUMN_TILES == 1 ? 8 : 16);
  }

  /// acc = start + the group's convolution.
  /// \param x     the box, in shared memory
  /// \param start of the thread's channels
  __device__ __forceinline__ void multiply(const FewGroupParams& group, std::uint32_t x,
                                           const float (&start)[Traits::RUN],
                                           FewAccumulators<Traits>& acc) const {
#pragma unroll
    for (int phase = 0; phase < Traits::PAIRED; ++phase) {
#pragma unroll
      for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
        for (int i = 0; i < 4 * Traits::COLUMN_TILES; ++i) {
          acc.at[phase][row][i / 4][i % 4] = start[i / 4 * 2 + i % 2];
        }
      }
    }
    const std::uint32_t* step = steps_ + group.first_step;
    const char* fragment = weights_ + group.first_fragment * Traits::FRAGMENT_BYTES;
    if constexpr (Traits::PAIRED == 2) {
      multiply_list<true, true>(group.steps[kFewBoth], x, step, fragment, acc);
      multiply_list<false, true>(group.steps[kFewSecond], x, step, fragment, acc);
    }
    multiply_list<true, false>(group.steps[kFewFirst], x, step, fragment, acc);
  }

 private:
  /// Whose loads are in flight together. ptxas finds no registers for two beside the sums on Ampere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kStepsAtOnce = Traits::OUTPUT ? 2 : 1;
#else
  static constexpr int kStepsAtOnce = 2;
#endif

  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void multiply_list(int count, std::uint32_t x, const std::uint32_t*& step,
                                                const char*& fragment, FewAccumulators<Traits>& acc) const {
#pragma unroll kStepsAtOnce
    for (int i = 0; i < count; ++i) {
      const std::uint32_t place = (*step++ >> place_shift_) & ((1u << kFewOffsetBits) - 1);
      std::uint32_t a[Traits::ROW_TILES][4];
#pragma unroll
      for (int row = 0; row < Traits::ROW_TILES; ++row) load_rows(x + rows_[row] + place * 16, a[row]);
      if constexpr (kFirst) multiply_phase(a, fragment, acc.at[0]);
      if constexpr (kSecond) multiply_phase(a, fragment, acc.at[Traits::PAIRED - 1]);
    }
  }

  __device__ __forceinline__ static void load_rows(std::uint32_t from, std::uint32_t (&a)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from));
    if constexpr (std::is_same_v<typename Traits::Element, float>) {
#pragma unroll
      for (std::uint32_t& word : a) word = to_tf32(__uint_as_float(word));
    }
  }

  __device__ __forceinline__ static void multiply_phase(
      const std::uint32_t (&a)[Traits::ROW_TILES][4], const char*& fragment,
      float (&acc)[Traits::ROW_TILES][Traits::COLUMN_TILES][4]) {
    std::uint32_t b[Traits::COLUMN_TILES][2];
    if constexpr (Traits::COLUMN_TILES == 1) {
      const uint2 words = *reinterpret_cast<const uint2*>(fragment);
      b[0][0] = words.x, b[0][1] = words.y;
    } else {
#pragma unroll
      for (int i = 0; i < Traits::COLUMN_TILES; i += 2) {
        const uint4 words = *reinterpret_cast<const uint4*>(fragment + i / 2 * 512);
        b[i][0] = words.x, b[i][1] = words.y, b[i + 1][0] = words.z, b[i + 1][1] = words.w;
      }
    }
    fragment += Traits::FRAGMENT_BYTES;
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int column = 0; column < Traits::COLUMN_TILES; ++column) {
        multiply_add<typename Traits::Element>(acc[row][column], a[row], b[column][0], b[column][1]);
      }
    }
  }

  const std::uint32_t* steps_;
  const char* weights_;  // this lane's words of the first unit
  int rows_[Traits::ROW_TILES];
  int place_shift_;
};

}  // namespace upconv3d::cuda
