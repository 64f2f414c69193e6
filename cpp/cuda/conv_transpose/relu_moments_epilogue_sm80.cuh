// SPDX-License-Identifier: Apache-2.0
/// \file
/// The epilogue of conv_transpose_relu_moments_sm80: unscale, bias, activation, rounding; stores; moments.
///
/// All of it in registers, as a thread owns runs of 8 channels: 16 or 32 bytes of a position. Moments are
/// those of the *rounded* values, because that is what normalize reads. Mean first, deviations from it
/// second: no sum of squares is formed, and where |mean| >> std nothing cancels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv_transpose/kernel_params_sm80.cuh"
#include "cuda/conv_transpose/mainloop_sm80.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/moments.cuh"

namespace upconv3d::cuda {

/// max(v, 0) in one instruction, NaN passing through.
struct ReluSm80 {
  __device__ __forceinline__ float operator()(float v) const {
    float result;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(v));
    return result;
  }
};

/// Two values rounded, the first in the lower half.
template <class Stored>
__device__ __forceinline__ std::uint32_t pack_pair(float first, float second) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Stored, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&packed, &pair, sizeof(packed));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&packed, &pair, sizeof(packed));
  }
  return packed;
}

template <class Stored>
__device__ __forceinline__ float2 unpack_pair(std::uint32_t packed) {
  if constexpr (std::is_same_v<Stored, __half>) {
    __half2 pair;
    memcpy(&pair, &packed, sizeof(packed));
    return __half22float2(pair);
  } else {
    // A bfloat16 is the upper half of a float.
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  }
}

template <class Traits, class Activation = ReluSm80>
class ReluMomentsSm80 {
 public:
  /// Shared memory that finish() uses, beginning where the ring was: pixels, then the warps' moments.
  static constexpr int kPixelBytes = Traits::BLK_POS * int(sizeof(std::int64_t));
  static_assert(kPixelBytes + Traits::WARPS_POS * Traits::BLK_K * int(sizeof(float2)) <=
                Traits::SHARED_BYTES);

  __device__ ReluMomentsSm80(const KernelParamsSm80<Traits>& params, const TileSm80& tile, char* shared)
      : params_(params),
        tile_(tile),
        pixels_(reinterpret_cast<std::int64_t*>(shared)),
        moments_(reinterpret_cast<float2*>(shared + kPixelBytes)),
        warp_pos_(int(threadIdx.x) / 32 % Traits::WARPS_POS),
        warp_channel_(int(threadIdx.x) / 32 / Traits::WARPS_POS * Traits::WARP_K),
        row_(int(threadIdx.x) % 32 / 4),
        column_(int(threadIdx.x) % 4 * 8) {}

  /// Consumes the accumulators; all threads call it.
  __device__ void finish(AccumulatorsSm80<Traits>& acc) {
    find_pixels();
    __syncthreads();
#pragma unroll
    for (int g = 0; g < Acc::GROUPS_K; ++g) {
      const int channel = tile_.channel + warp_channel_ + 32 * g + column_;
      activate_and_store(acc, g, channel);
      take_moments(acc, g);
    }
    __syncthreads();
    write_moments();
  }

 private:
  using Acc = AccumulatorsSm80<Traits>;
  using Stored = typename Traits::Stored;
  static constexpr bool kScaled = sizeof(Stored) == 4;

  /// Where the tile's positions lie in a sample of a.
  __device__ void find_pixels() {
    const KernelSlabSm80& slab = params_.slabs[tile_.slab];
    for (int row = int(threadIdx.x); row < tile_.valid; row += Traits::THREADS) {
      int at[3];
      index_of(slab, tile_.position + row, at);
      std::int64_t pixel = 0;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        pixel = pixel * params_.out[axis] + slab.origin[axis] + std::int64_t(at[axis]) * slab.step[axis];
      }
      pixels_[row] = pixel;
    }
  }

  /// The tile's row of accumulators (i, g, j)[2*half + e].
  __device__ int row_of(int i, int half) const {
    return warp_pos_ * Traits::WARP_POS + 16 * i + 8 * half + row_;
  }

  /// 2^e within float's normal range, the nearest end of it otherwise.
  __device__ static float clamped_power_of_two(int e) {
    return __int_as_float((max(-126, min(127, e)) + 127) << 23);
  }

  /// What a thread's 8 channels from `channel0` on are multiplied by, and their bias. Two factors, since 2^e
  /// of a product of scales may leave float's range where the value does not.
  struct Affine {
    float scale[2][8];
    float bias[8];
  };

  __device__ Affine load_affine(int channel0) const {
    Affine affine;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int channel = min(channel0 + c, params_.k - 1);
      affine.bias[c] = params_.bias ? to_stat(__ldg(params_.bias + channel)) : 0.f;
      if constexpr (kScaled) {
        const int exponent =
            __ldg(params_.unscale_sample + tile_.n) + __ldg(params_.unscale_column + channel);
        affine.scale[0][c] = clamped_power_of_two(exponent / 2);
        affine.scale[1][c] = clamped_power_of_two(exponent - exponent / 2);
      }
    }
    return affine;
  }

  /// acc = activation(unscaled acc + bias), rounded to Stored; stores what lies inside the tensor.
  __device__ void activate_and_store(Acc& acc, int g, int channel) const {
    const Affine affine = load_affine(channel);
    const std::int64_t sample = std::int64_t(params_.out[0]) * params_.out[1] * params_.out[2] * tile_.n;
#pragma unroll
    for (int i = 0; i < Acc::BLOCKS_POS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t words[2 * sizeof(Stored)];
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
          activate_pair(acc.at[i][g][c / 2][2 * half], acc.at[i][g][c / 2][2 * half + 1], affine, c, words);
        }
        const int row = row_of(i, half);
        if (row >= tile_.valid || channel >= params_.k) continue;
        uint4* const to = reinterpret_cast<uint4*>(params_.a + (sample + pixels_[row]) * params_.k + channel);
#pragma unroll
        for (int w = 0; w < int(sizeof(Stored)) / 2; ++w) {
          to[w] = make_uint4(words[4 * w], words[4 * w + 1], words[4 * w + 2], words[4 * w + 3]);
        }
      }
    }
  }

  /// The values of channels c and c+1 as above, also into `words` as they are stored.
  __device__ static void activate_pair(float& first, float& second, const Affine& affine, int c,
                                       std::uint32_t (&words)[2 * sizeof(Stored)]) {
    if constexpr (kScaled) {
      first = Activation{}(first * affine.scale[0][c] * affine.scale[1][c] + affine.bias[c]);
      second = Activation{}(second * affine.scale[0][c + 1] * affine.scale[1][c + 1] + affine.bias[c + 1]);
      words[c] = __float_as_uint(first);
      words[c + 1] = __float_as_uint(second);
    } else {
      words[c / 2] =
          pack_pair<Stored>(Activation{}(first + affine.bias[c]), Activation{}(second + affine.bias[c + 1]));
      const float2 rounded = unpack_pair<Stored>(words[c / 2]);
      first = rounded.x;
      second = rounded.y;
    }
  }

  /// Sums over the warp's 8 rows of 8 columns, the same bits in every lane; all columns in step, so that
  /// one's shuffles hide the others'.
  __device__ static void sum_columns(float (&sums)[8]) {
#pragma unroll
    for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, lane_mask);
    }
  }

  /// (mean, M2) of each of the thread's 8 channels over the warp's positions, into shared memory.
  __device__ void take_moments(const Acc& acc, int g) const {
    const int count = min(max(tile_.valid - warp_pos_ * Traits::WARP_POS, 0), Traits::WARP_POS);
    const float share = count > 0 ? 1.f / float(count) : 0.f;
    float mean[8] = {}, m2[8] = {};
#pragma unroll
    for (int i = 0; i < 2 * Acc::BLOCKS_POS; ++i) {
      if (8 * i + row_ >= count) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c) mean[c] += acc.at[i / 2][g][c / 2][2 * (i % 2) + c % 2];
    }
    sum_columns(mean);
#pragma unroll
    for (float& m : mean) m *= share;
#pragma unroll
    for (int i = 0; i < 2 * Acc::BLOCKS_POS; ++i) {
      if (8 * i + row_ >= count) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float deviation = acc.at[i / 2][g][c / 2][2 * (i % 2) + c % 2] - mean[c];
        m2[c] += deviation * deviation;
      }
    }
    sum_columns(m2);
    if (row_ != 0) return;
    float2* const to = moments_ + warp_pos_ * Traits::BLK_K + warp_channel_ + 32 * g + column_;
#pragma unroll
    for (int c = 0; c < 8; ++c) to[c] = make_float2(mean[c], m2[c]);
  }

  /// Merges the warps' moments in order, a channel per thread, and writes them.
  __device__ void write_moments() const {
    const int channel = tile_.channel + int(threadIdx.x);
    if (threadIdx.x == 0 && tile_.n == 0 && tile_.channel == 0) params_.counts[tile_.moment] = tile_.valid;
    if (int(threadIdx.x) >= Traits::BLK_K || channel >= params_.k) return;
    Moments<float, 1> merged;
    for (int warp = 0; warp < Traits::WARPS_POS; ++warp) {
      const float2 own = moments_[warp * Traits::BLK_K + int(threadIdx.x)];
      const float mean[1] = {own.x}, m2[1] = {own.y};
      merged.merge(float(min(max(tile_.valid - warp * Traits::WARP_POS, 0), Traits::WARP_POS)), mean, m2);
    }
    params_.part[(std::int64_t(tile_.n) * params_.tiles.divisor + tile_.moment) * params_.k + channel] =
        make_float2(merged.mean[0], merged.m2[0]);
  }

  const KernelParamsSm80<Traits>& params_;
  const TileSm80& tile_;
  std::int64_t* pixels_;  // [BLK_POS] within the sample's output
  float2* moments_;       // [WARPS_POS][BLK_K] (mean, M2)
  int warp_pos_;          // which WARP_POS positions of the tile
  int warp_channel_;      // first channel of the warp within the tile
  int row_;               // first position of the thread within the warp's
  int column_;            // first channel of the thread within the warp's, of each 32
};

}  // namespace upconv3d::cuda
