// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: a warp's multiplication of one group of phases.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/few_channels_operands_sm80.cuh"
#include "cuda/conv_transpose/tensor_cores_sm80.cuh"

namespace upconv3d::cuda {

/// A warp's results. Values e and 2 + e of lane l belong to positions l/4 and 8 more of 16, and to output
/// channel l%4*RUN + 2*(column tile) + e.
template <class Traits>
struct FewAccumulators {
  float at[Traits::PAIRED][Traits::ROW_TILES][Traits::COLUMN_TILES][4];
};

/// Reads x and w of one group after the other.
template <class Traits>
class FewMultiplier {
 public:
  /// \param first_row the warp's first of the tile's rows
  __device__ FewMultiplier(const FewParams& params, const char* shared, int first_row) : weights_(shared) {
    const int lane = int(threadIdx.x) % 32;
    steps_ = reinterpret_cast<const std::uint32_t*>(shared + params.steps_at) + lane / 16;
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
    Walk walk;
    walk.step = steps_ + group.first_step * 2;
    walk.fragment = weights_ + group.first_fragment * Traits::FRAGMENT_BYTES;
    walk.x = x;
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) load_rows(x + walk.step[0] + rows_[row], walk.a[row]);
    walk.next = walk.step[2];
    // The first step adds to `start`: accumulators that begin as copies of it cost an instruction each.
    constexpr bool kPairs = Traits::PAIRED == 2;
    multiply_step<true, kPairs, true>(walk, start, acc);
    multiply_list<true, kPairs>(group.steps[kPairs ? kFewBoth : kFewFirst] - 1, walk, acc);
    if constexpr (kPairs) {
      multiply_list<false, true>(group.steps[kFewSecond], walk, acc);
      multiply_list<true, false>(group.steps[kFewFirst], walk, acc);
    }
  }

 private:
  using Rows = OperandWords<4, Traits::PRODUCTS>;
  using Column = OperandWords<2, Traits::PRODUCTS>;

  /// Where a warp is in a group's steps, whose lists lie one behind the other.
  struct Walk {
    const std::uint32_t* step;
    std::uint32_t x;
    std::uint32_t next;  // place of the step behind this one
    const char* fragment;
    std::uint32_t a[Traits::ROW_TILES][4];  // x of this step
  };

  // Not unrolled: for a loop of two steps at once ptxas copies all accumulators, twice.
  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void multiply_list(int count, Walk& walk, FewAccumulators<Traits>& acc) const {
    constexpr float kUnused[Traits::RUN] = {};
#pragma unroll 1
    for (int i = 0; i < count; ++i) multiply_step<kFirst, kSecond, false>(walk, kUnused, acc);
  }

  /// acc += step of the pair's first phase, its second, or both. The next step's x is loaded meanwhile, also
  /// behind a group's last, which is why kFewStepsAhead steps follow all others.
  /// \tparam kBegins acc is start instead before that
  template <bool kFirst, bool kSecond, bool kBegins>
  __device__ __forceinline__ void multiply_step(Walk& walk, const float (&start)[Traits::RUN],
                                                FewAccumulators<Traits>& acc) const {
    static_assert(kFewStepsAhead == 2);
    const std::uint32_t next = walk.x + walk.next;
    walk.next = walk.step[2 * kFewStepsAhead];
    walk.step += 2;
    constexpr int kPhases = int(kFirst) + int(kSecond);
    Column b[kPhases][Traits::COLUMN_TILES];
#pragma unroll
    for (int i = 0; i < kPhases; ++i) load_columns(walk.fragment + i * Traits::FRAGMENT_BYTES, b[i]);
    walk.fragment += kPhases * Traits::FRAGMENT_BYTES;
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
      Rows a;
      a.set(walk.a[row]);
#pragma unroll
      for (int i = 0; i < kPhases; ++i) {
        multiply_row<kBegins>(a, b[i], start, acc.at[kFirst ? i : Traits::PAIRED - 1][row]);
      }
      load_rows(next + rows_[row], walk.a[row]);
    }
  }

  __device__ __forceinline__ static void load_rows(std::uint32_t from, std::uint32_t (&a)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from));
  }

  __device__ __forceinline__ static void load_columns(const char* fragment,
                                                      Column (&b)[Traits::COLUMN_TILES]) {
    if constexpr (Traits::COLUMN_TILES == 1) {
      const uint2 words = *reinterpret_cast<const uint2*>(fragment);
      b[0].set({words.x, words.y});
    } else {
#pragma unroll
      for (int i = 0; i < Traits::COLUMN_TILES; i += 2) {
        const uint4 words = *reinterpret_cast<const uint4*>(fragment + i / 2 * 512);
        b[i].set({words.x, words.y}), b[i + 1].set({words.z, words.w});
      }
    }
  }

  template <bool kBegins>
  __device__ __forceinline__ static void multiply_row(const Rows& a, const Column (&b)[Traits::COLUMN_TILES],
                                                      const float (&start)[Traits::RUN],
                                                      float (&acc)[Traits::COLUMN_TILES][4]) {
    using T = typename Traits::Element;
#pragma unroll
    for (int column = 0; column < Traits::COLUMN_TILES; ++column) {
      float (&d)[4] = acc[column];
      if constexpr (kBegins) {
        const float first = start[2 * column], second = start[2 * column + 1];
        const float begun[4] = {first, second, first, second};
        multiply_add<T>(d, a, b[column], begun);
      } else {
        multiply_add<T>(d, a, b[column], d);
      }
    }
  }

  const std::uint32_t* steps_;  // [steps][2] where a step's chunks lie, in bytes; this lane's
  const char* weights_;         // this lane's words of the first unit
  int rows_[Traits::ROW_TILES];
};

}  // namespace upconv3d::cuda
