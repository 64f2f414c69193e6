// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80, first pass: a tile's moments of before(conv + bias).
///
/// A thread adds up its channels' deviations from the first value of each that it sees; lanes, then warps,
/// are merged by Chan's formula, always in the same order.
#pragma once

#include "cuda/conv_transpose/few_channels_mainloop_sm80.cuh"

namespace upconv3d::cuda {

struct FewMoment {
  float count, mean, m2;

  __device__ __forceinline__ void merge(const FewMoment& other) {
    const float total = count + other.count;
    const float share = total > 0.f ? other.count / total : 0.f;
    const float apart = other.mean - mean;
    m2 += other.m2 + apart * apart * (count * share);
    mean += apart * share;
    count = total;
  }
};

template <class Traits>
class FewMoments {
 public:
  __device__ FewMoments(const FewParams& params, char* shared, int first_channel)
      : params_(params),
        first_channel_(first_channel),
        moments_(reinterpret_cast<float2*>(shared + params.moments_at)),
        counts_(reinterpret_cast<float*>(moments_ + kFewWarps * Traits::COLUMNS)) {}

  __device__ __forceinline__ void begin() { count_ = 0; }

  /// Adds the values of the thread's rows; those of a row are `valid` of the pair's phases, from the first.
  /// \param valid_of (row tile, half of it) -> phases
  template <class ValidOf>
  __device__ __forceinline__ void add(const FewAccumulators<Traits>& acc, const ValidOf& valid_of) {
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int valid = valid_of(row, half);
        if (valid <= 0) continue;
        if (count_ == 0) begin_at(acc, row, half);
        count_ += min(valid, Traits::PAIRED);
#pragma unroll
        for (int phase = 0; phase < Traits::PAIRED; ++phase) {
          if (phase >= valid) continue;
#pragma unroll
          for (int i = 0; i < Traits::RUN; ++i) {
            const float apart = acc.at[phase][row][i / 2][2 * half + i % 2] - pivot_[i];
            sum_[i] += apart;
            squares_[i] += apart * apart;
          }
        }
      }
    }
  }

  /// Leaves the warp's moments in shared memory.
  __device__ __forceinline__ void end() {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    const float count = float(count_);
    float all = count;
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      const float shift = count_ > 0 ? sum_[i] / count : 0.f;
      const float m2 = count_ > 0 ? squares_[i] - sum_[i] * shift : 0.f;
      FewMoment moment{count, count_ > 0 ? pivot_[i] + shift : 0.f, m2 < 0.f ? 0.f : m2};
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const FewMoment other{__shfl_down_sync(~0u, moment.count, step),
                              __shfl_down_sync(~0u, moment.mean, step),
                              __shfl_down_sync(~0u, moment.m2, step)};
        moment.merge(other);
      }
      all = moment.count;
      if (lane < 4) {
        moments_[warp * Traits::COLUMNS + lane * Traits::RUN + i] = make_float2(moment.mean, moment.m2);
      }
    }
    if (lane == 0) counts_[warp] = all;
  }

  /// Merges what the warps left and writes it. Between two barriers of the block.
  __device__ __forceinline__ void write(const FewItem& item) const {
    const int column = int(threadIdx.x), channel = first_channel_ + column;
    if (column >= Traits::COLUMNS || channel >= params_.k) return;
    FewMoment all{0.f, 0.f, 0.f};
    for (int warp = 0; warp < kFewWarps; ++warp) {
      const float2 moment = moments_[warp * Traits::COLUMNS + column];
      all.merge({counts_[warp], moment.x, moment.y});
    }
    const std::int64_t at =
        (std::int64_t(item.sample) * params_.tiles.divisor + item.tile) * params_.k + channel;
    reinterpret_cast<float2*>(params_.part)[at] = make_float2(all.mean, all.m2);
    if (channel == 0 && item.sample == 0) params_.counts[item.tile] = int(all.count);
  }

 private:
  /// The thread's first values of a tile.
  __device__ __forceinline__ void begin_at(const FewAccumulators<Traits>& acc, int row, int half) {
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      pivot_[i] = acc.at[0][row][i / 2][2 * half + i % 2];
      sum_[i] = squares_[i] = 0.f;
    }
  }

  const FewParams& params_;
  const int first_channel_;
  float2* const moments_;  // [kFewWarps][COLUMNS] mean, M2
  float* const counts_;    // [kFewWarps]
  int count_ = 0;
  float pivot_[Traits::RUN], sum_[Traits::RUN], squares_[Traits::RUN];
};

}  // namespace upconv3d::cuda
