// SPDX-License-Identifier: Apache-2.0
/// \file
/// The epilogue of conv_transpose_relu_moments_sm80: unscale, bias, activation, rounding; stores; moments.
///
/// All of it in registers, as a thread owns runs of 8 channels: 16 or 32 bytes of a position. Moments are
/// those of the *rounded* values, because that is what normalize reads. Mean first, deviations from it
/// second: no sum of squares is formed, and where |mean| >> std nothing cancels.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/kernel_params_sm80.cuh"
#include "cuda/conv_transpose/mainloop_sm80.cuh"
#include "cuda/group_norm/activation.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/moments.cuh"

namespace upconv3d::cuda {

template <class Traits, class Activation = Relu>
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
      activate(acc, g, channel);
      if (channel < params_.k) store(acc, g, channel);
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

  /// acc = activation(unscaled acc + bias), rounded to Stored.
  __device__ void activate(Acc& acc, int g, int channel0) const {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int channel = min(channel0 + c, params_.k - 1);
      const float bias = params_.bias ? to_stat(params_.bias[channel]) : 0.f;
      // Two factors, since 2^e of a product of scales may leave float's range where the value does not.
      float scale[2] = {1.f, 1.f};
      if constexpr (kScaled) {
        const int exponent = params_.unscale_sample[tile_.n] + params_.unscale_column[channel];
        scale[0] = clamped_power_of_two(exponent / 2);
        scale[1] = clamped_power_of_two(exponent - exponent / 2);
      }
#pragma unroll
      for (int i = 0; i < Acc::BLOCKS_POS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& v = acc.at[i][g][c / 2][2 * half + c % 2];
          if constexpr (kScaled) {
            v = Activation{}(v * scale[0] * scale[1] + bias);
          } else {
            v = to_stat(from_stat<Stored>(Activation{}(v + bias)));
          }
        }
      }
    }
  }

  /// Stores the thread's 8 channels from `channel` on of all its positions.
  __device__ void store(const Acc& acc, int g, int channel) const {
    const std::int64_t sample = std::int64_t(params_.out[0]) * params_.out[1] * params_.out[2] * tile_.n;
#pragma unroll
    for (int i = 0; i < Acc::BLOCKS_POS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        if (row >= tile_.valid) continue;
        Vector<Stored, 8> values;
#pragma unroll
        for (int c = 0; c < 8; ++c) values.at[c] = from_stat<Stored>(acc.at[i][g][c / 2][2 * half + c % 2]);
        uint4 words[sizeof(values) / sizeof(uint4)];
        memcpy(words, &values, sizeof(values));
        uint4* const to = reinterpret_cast<uint4*>(params_.a + (sample + pixels_[row]) * params_.k + channel);
#pragma unroll
        for (int word = 0; word < int(sizeof(values) / sizeof(uint4)); ++word) to[word] = words[word];
      }
    }
  }

  /// Sum over the warp's 8 rows of a column, the same bits in every lane.
  __device__ static float column_sum(float v) {
#pragma unroll
    for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, lane_mask);
    return v;
  }

  /// (mean, M2) of each of the thread's 8 channels over the warp's positions, into shared memory.
  __device__ void take_moments(const Acc& acc, int g) const {
    const int count = min(max(tile_.valid - warp_pos_ * Traits::WARP_POS, 0), Traits::WARP_POS);
    const float share = count > 0 ? 1.f / float(count) : 0.f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float sum = 0.f, m2 = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * Acc::BLOCKS_POS; ++i) {
        const float v = acc.at[i / 2][g][c / 2][2 * (i % 2) + c % 2];
        sum += 8 * i + row_ < count ? v : 0.f;
      }
      const float mean = column_sum(sum) * share;
#pragma unroll
      for (int i = 0; i < 2 * Acc::BLOCKS_POS; ++i) {
        const float deviation = acc.at[i / 2][g][c / 2][2 * (i % 2) + c % 2] - mean;
        m2 += 8 * i + row_ < count ? deviation * deviation : 0.f;
      }
      m2 = column_sum(m2);
      if (row_ == 0) {
        moments_[warp_pos_ * Traits::BLK_K + warp_channel_ + 32 * g + column_ + c] = make_float2(mean, m2);
      }
    }
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
    params_.part[(std::int64_t(tile_.n) * params_.tiles + tile_.moment) * params_.k + channel] =
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
