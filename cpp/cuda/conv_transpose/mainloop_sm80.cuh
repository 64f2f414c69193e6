// SPDX-License-Identifier: Apache-2.0
/// \file
/// The multiplication of conv_transpose_relu_moments_sm80: operands come by cp.async into a ring of stages in
/// shared memory, and go by ldmatrix into the registers of mma.sync m16n8k16.
///
/// A stage holds a k-block, 32 input channels of one tap: for x and w, and hi and lo of each where there are
/// three products, rows of 64 bytes [BLK_POS or BLK_K][4 chunks of 8 channels]. Chunks are permuted within
/// their row so that the eight rows of an ldmatrix lie in different banks: x's by row/2, for it takes
/// neighbouring rows; w's by row/8, for it takes rows 8*i and 8*i + 1 (see Fragments::load).
///
/// x is gathered: each thread brings the same chunk of a few positions. Their addresses advance alike from
/// tap to tap; whether a tap reads inside the volume is a bit per axis and tap, found once per tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/mma_sm80.hpp"

#include "cuda/conv_transpose/kernel_params_sm80.cuh"

namespace upconv3d::cuda {

/// Bit of tap m along an axis, in masks of all three.
__device__ __forceinline__ std::uint32_t tap_bit(int axis, int m) {
  return 1u << (axis * kMaxSm80Taps + m);
}
static_assert(3 * kMaxSm80Taps <= 32);

/// Brings k-blocks in order: channels innermost, then taps along the width, the height and the depth.
template <class Traits>
class OperandLoader {
 public:
  __device__ OperandLoader(const KernelParamsSm80<Traits>& params, const TileSm80& tile, char* shared)
      : params_(params), slab_(params.slabs[tile.slab]), chunk_(int(threadIdx.x) % 4) {
    const int row = int(threadIdx.x) / 4;
    x_to_ = shared + row * Traits::ROW_BYTES + (chunk_ ^ (row / 2 % 4)) * 16;
    w_to_ =
        shared + Traits::SPLITS * Traits::X_BYTES + row * Traits::ROW_BYTES + (chunk_ ^ (row / 8 % 4)) * 16;
    const std::int64_t sample =
        std::int64_t(params.in[0]) * params.in[1] * params.in[2] * params.vectors * tile.n;
    for (int split = 0; split < Traits::SPLITS; ++split) x_[split] = params.x[split] + sample;
#pragma unroll
    for (int i = 0; i < kRowsX; ++i) locate(tile, i, row + i * kRowStep);
    w_offset_ = std::uint32_t(tile.channel + row) * std::uint32_t(params.vectors);
    w_rows_ = params.k - tile.channel - row;
    tap_index_ = slab_.tap;
    tap_bits_ = tap_bit(0, 0) | tap_bit(1, 0) | tap_bit(2, 0);
  }

  /// k-blocks of the tile; none where no tap reaches it.
  __device__ int k_blocks() const {
    return slab_.taps[0] * slab_.taps[1] * slab_.taps[2] * ((params_.vectors + 3) / 4);
  }

  /// Begins to bring the next k-block into stage `stage`.
  __device__ void load(int stage) {
    const int vector = vector_ + chunk_;
    const bool has_channels = vector < params_.vectors;
    char* const x_to = x_to_ + stage * Traits::STAGE_BYTES;
    char* const w_to = w_to_ + stage * Traits::STAGE_BYTES;
    const std::int64_t w_tap = std::int64_t(tap_index_) * params_.k * params_.vectors + vector;
#pragma unroll
    for (int split = 0; split < Traits::SPLITS; ++split) {
#pragma unroll
      for (int i = 0; i < kRowsX; ++i) {
        // Modulo 2^32, as windows may begin before the volume.
        const std::uint32_t offset = x_offset_[i] + tap_offset_ + std::uint32_t(vector);
        const bool inside = has_channels && (x_taps_[i] & tap_bits_) == tap_bits_;
        copy_chunk(x_[split] + offset, x_to + split * Traits::X_BYTES + i * kRowStep * Traits::ROW_BYTES,
                   inside);
      }
#pragma unroll
      for (int i = 0; i < kRowsW; ++i) {
        copy_chunk(params_.w[split] + w_tap + (w_offset_ + std::uint32_t(i * kRowStep * params_.vectors)),
                   w_to + split * Traits::W_BYTES + i * kRowStep * Traits::ROW_BYTES,
                   has_channels && i * kRowStep < w_rows_);
      }
    }
    advance();
  }

 private:
  static constexpr int kRowStep = Traits::THREADS / 4;
  static constexpr int kRowsX = Traits::BLK_POS / kRowStep;
  static constexpr int kRowsW = Traits::BLK_K / kRowStep;
  static_assert(kRowStep % 32 == 0, "a thread's rows must share their permutation");

  /// Finds where row i's window begins and which taps read inside the volume.
  __device__ void locate(const TileSm80& tile, int i, int row) {
    x_taps_[i] = 0;
    x_offset_[i] = 0;
    if (row >= tile.valid) return;
    int at[3];
    index_of(slab_, tile.position + row, at);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      at[axis] += slab_.window[axis];
      x_offset_[i] = x_offset_[i] * std::uint32_t(params_.in[axis]) + std::uint32_t(at[axis]);
      for (int m = 0; m < slab_.taps[axis]; ++m) {
        const bool inside = unsigned(at[axis] + m * slab_.dilation[axis]) < unsigned(params_.in[axis]);
        x_taps_[i] |= inside ? tap_bit(axis, m) : 0u;
      }
    }
    x_offset_[i] *= std::uint32_t(params_.vectors);
  }

  /// 16 bytes to shared memory, zeros unless `inside`.
  __device__ static void copy_chunk(const uint4* from, char* to, bool inside) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(*from, *reinterpret_cast<uint4*>(to), inside);
  }

  __device__ void advance() {
    vector_ += 4;
    if (vector_ < params_.vectors) return;
    vector_ = 0;
    bool carry = true;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      if (!carry) continue;
      carry = axis > 0 && tap_[axis] + 1 == slab_.taps[axis];
      tap_index_ += carry ? tap_[axis] * slab_.tap_step[axis] : -slab_.tap_step[axis];
      tap_[axis] = carry ? 0 : tap_[axis] + 1;
    }
    tap_bits_ = tap_bit(0, tap_[0]) | tap_bit(1, tap_[1]) | tap_bit(2, tap_[2]);
    const int depth = tap_[0] * slab_.dilation[0], height = tap_[1] * slab_.dilation[1],
              width = tap_[2] * slab_.dilation[2];
    tap_offset_ = ((std::uint32_t(depth) * std::uint32_t(params_.in[1]) + std::uint32_t(height)) *
                       std::uint32_t(params_.in[2]) +
                   std::uint32_t(width)) *
                  std::uint32_t(params_.vectors);
  }

  const KernelParamsSm80<Traits>& params_;
  const KernelSlabSm80& slab_;
  const uint4* x_[Traits::SPLITS];  // the sample's x
  char *x_to_, *w_to_;              // this thread's first chunk in stage 0
  std::uint32_t x_offset_[kRowsX];  // of each window's first tap, in vectors from x_
  std::uint32_t x_taps_[kRowsX];    // taps that read inside the volume, by tap_bit
  std::uint32_t w_offset_;          // of this thread's first channel, in vectors from its tap
  int w_rows_;                      // channels from that one on
  int chunk_;
  // The next k-block.
  int vector_ = 0;
  int tap_[3] = {0, 0, 0};
  int tap_index_;
  std::uint32_t tap_bits_;
  std::uint32_t tap_offset_ = 0;  // in vectors
};

/// A warp's accumulators. In block (i, g, j), values e and 2+e of lane l belong to positions 16*i + l/4 and 8
/// more, and to channel 32*g + 8*(l%4) + 2*j + e: a thread owns 8 neighbouring channels of each g.
template <class Traits>
struct AccumulatorsSm80 {
  static constexpr int BLOCKS_POS = Traits::WARP_POS / 16;
  static constexpr int GROUPS_K = Traits::WARP_K / 32;
  float at[BLOCKS_POS][GROUPS_K][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& v : reinterpret_cast<float (&)[sizeof(at) / sizeof(float)]>(at)) v = 0.f;
  }
};

/// 16 input channels of a warp's x and w in registers.
template <class Traits>
struct FragmentsSm80 {
  using Acc = AccumulatorsSm80<Traits>;
  std::uint32_t x[Acc::BLOCKS_POS][4];
  std::uint32_t w[Acc::GROUPS_K][4][2];

  /// \param x_rows  the warp's [WARP_POS] rows of a stage, w_rows its [WARP_K] rows
  /// \param step    which 16 of the 32 channels
  __device__ __forceinline__ void load(const char* x_rows, const char* w_rows, int step) {
    const int lane = int(threadIdx.x) % 32;
    const int x_row = lane % 16, x_chunk = (2 * step + lane / 16) ^ (x_row / 2 % 4);
    const char* const x_from = x_rows + x_row * Traits::ROW_BYTES + x_chunk * 16;
#pragma unroll
    for (int i = 0; i < Acc::BLOCKS_POS; ++i) {
      load_matrices(x_from + i * 16 * Traits::ROW_BYTES, x[i][0], x[i][1], x[i][2], x[i][3]);
    }
    // Column n of block j is channel 8*(n/2) + 2*j + n%2. Lanes 0-7 name the rows of j's first eight input
    // channels, 8-15 those of the other eight, 16-31 the same of j+1.
    const int n = lane % 8;
    const int w_row = 8 * (n / 2) + 2 * (lane / 16) + n % 2, w_chunk = (2 * step + lane / 8 % 2) ^ (n / 2);
    const char* const w_from = w_rows + w_row * Traits::ROW_BYTES + w_chunk * 16;
#pragma unroll
    for (int g = 0; g < Acc::GROUPS_K; ++g) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        load_matrices(w_from + (32 * g + 2 * j) * Traits::ROW_BYTES, w[g][j][0], w[g][j][1], w[g][j + 1][0],
                      w[g][j + 1][1]);
      }
    }
  }

 private:
  __device__ static void load_matrices(const char* row, std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                       std::uint32_t& d) {
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(row), a, b, c, d);
  }
};

/// acc += x*w over the fragments' 16 input channels.
template <class Traits>
__device__ __forceinline__ void multiply_fragments(const std::uint32_t (&x)[Traits::WARP_POS / 16][4],
                                                   const std::uint32_t (&w)[Traits::WARP_K / 32][4][2],
                                                   AccumulatorsSm80<Traits>& acc) {
  using Mma = std::conditional_t<std::is_same_v<typename Traits::Operand, __half>,
                                 cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
#pragma unroll
  for (int i = 0; i < Traits::WARP_POS / 16; ++i) {
#pragma unroll
    for (int g = 0; g < Traits::WARP_K / 32; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float (&d)[4] = acc.at[i][g][j];
        Mma::fma(d[0], d[1], d[2], d[3], x[i][0], x[i][1], x[i][2], x[i][3], w[g][j][0], w[g][j][1], d[0],
                 d[1], d[2], d[3]);
      }
    }
  }
}

/// A warp's view of the ring: waits for k-blocks in order and keeps STAGES - 1 of them on their way.
template <class Traits>
class OperandRing {
 public:
  __device__ OperandRing(OperandLoader<Traits>& loader, const char* shared)
      : loader_(loader), k_blocks_(loader.k_blocks()) {
    const int warp = int(threadIdx.x) / 32;
    x_rows_ = shared + warp % Traits::WARPS_POS * Traits::WARP_POS * Traits::ROW_BYTES;
    w_rows_ = shared + Traits::SPLITS * Traits::X_BYTES +
              warp / Traits::WARPS_POS * Traits::WARP_K * Traits::ROW_BYTES;
    for (int stage = 0; stage < Traits::STAGES - 1; ++stage) load_into(stage);
  }

  __device__ int k_blocks() const { return k_blocks_; }

  /// Waits until the next k-block is there for all warps, which have also read the one before.
  __device__ void wait() {
    cute::cp_async_wait<Traits::STAGES - 2>();
    __syncthreads();
    stage_ = stage_ + 1 == Traits::STAGES ? 0 : stage_ + 1;
  }

  /// Refills the stage that was read last; once for each wait(), after it.
  __device__ void refill() { load_into(stage_ == 0 ? Traits::STAGES - 1 : stage_ - 1); }

  __device__ const char* x(int split) const {
    return x_rows_ + stage_ * Traits::STAGE_BYTES + split * Traits::X_BYTES;
  }
  __device__ const char* w(int split) const {
    return w_rows_ + stage_ * Traits::STAGE_BYTES + split * Traits::W_BYTES;
  }

  /// Ends all copies and readings, so that the shared memory may serve another purpose.
  __device__ void close() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  __device__ void load_into(int stage) {
    if (loaded_ < k_blocks_) loader_.load(stage);
    ++loaded_;
    cute::cp_async_fence();  // even where there is nothing: wait() counts groups
  }

  OperandLoader<Traits>& loader_;
  const char *x_rows_, *w_rows_;  // this warp's, of stage 0
  int k_blocks_;
  int loaded_ = 0;
  int stage_ = -1;
};

/// acc = sum over k-blocks of x*w, accumulated by the tensor cores throughout.
template <class Traits>
__device__ __forceinline__ void multiply_one_product(OperandRing<Traits>& ring,
                                                     AccumulatorsSm80<Traits>& acc) {
  acc.clear();
  if (ring.k_blocks() == 0) return;
  // While one is multiplied, the other is read.
  FragmentsSm80<Traits> first, second;
  ring.wait();
  first.load(ring.x(0), ring.w(0), 0);
#pragma unroll 1
  for (int k_block = 0; k_block < ring.k_blocks(); ++k_block) {
    second.load(ring.x(0), ring.w(0), 1);
    ring.refill();
    multiply_fragments<Traits>(first.x, first.w, acc);
    ring.wait();
    first.load(ring.x(0), ring.w(0), 0);  // behind the last k-block: whatever lies there, not used
    multiply_fragments<Traits>(second.x, second.w, acc);
  }
}

/// acc = sum over k-blocks of (x_lo*w_hi + x_hi*w_lo + x_hi*w_hi), the small products first; each k-block's
/// sum leaves the tensor cores, which truncate, for float registers, which round (Ootomo & Yokota,
/// arXiv:2203.03341).
template <class Traits>
__device__ __forceinline__ void multiply_three_products(OperandRing<Traits>& ring,
                                                        AccumulatorsSm80<Traits>& acc) {
  acc.clear();
#pragma unroll 1
  for (int k_block = 0; k_block < ring.k_blocks(); ++k_block) {
    ring.wait();
    ring.refill();
    AccumulatorsSm80<Traits> partial;
    partial.clear();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      FragmentsSm80<Traits> hi, lo;
      hi.load(ring.x(0), ring.w(0), step);
      lo.load(ring.x(1), ring.w(1), step);
      multiply_fragments<Traits>(lo.x, hi.w, partial);
      multiply_fragments<Traits>(hi.x, lo.w, partial);
      multiply_fragments<Traits>(hi.x, hi.w, partial);
    }
#pragma unroll
    for (int i = 0; i < Traits::WARP_POS / 16; ++i) {
#pragma unroll
      for (int g = 0; g < Traits::WARP_K / 32; ++g) {
#pragma unroll
        for (int j = 0; j < 16; ++j) acc.at[i][g][j / 4][j % 4] += partial.at[i][g][j / 4][j % 4];
      }
    }
  }
}

}  // namespace upconv3d::cuda
