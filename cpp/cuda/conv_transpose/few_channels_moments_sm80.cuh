// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80, first pass: a tile's moments of before(conv + bias).
///
/// Accumulators begin at bias - pivot, so that values come out as deviations from the pivot, which costs
/// little and keeps sums of squares from cancelling. A warp's pivot of a channel is the first value that it
/// computes of a tile, whichever block does. Lanes are added up, then warps merged by Chan's formula, always
/// in the same order.
#pragma once

#include "cuda/conv_transpose/few_channels_mainloop_sm80.cuh"

namespace upconv3d::cuda {

struct FewMoment {
  float count, mean, m2;

  __device__ __forceinline__ void merge(const FewMoment& other) {
    const float total = count + other.count;
    const float share = total > 0.f ? other.count / total : 0.f;
    const float apart = other.mean - mean;
    m2 += other.m2 + apart * (count * share) * apart;  // apart squared may be infinite where count is 0
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

  /// Before a tile.
  __device__ __forceinline__ void begin() {
    count_ = 0;
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) sum_[i] = squares_[i] = 0.f;
  }

  /// Adds the deviations of all rows.
  __device__ __forceinline__ void add_all(const FewAccumulators<Traits>& acc) {
    count_ += 2 * Traits::ROW_TILES * Traits::PAIRED;
#pragma unroll
    for (int phase = 0; phase < Traits::PAIRED; ++phase) {
#pragma unroll
      for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) add_row(acc, phase, row, half);
      }
    }
  }

  /// Adds those of the phases of a row's pair that are inside.
  __device__ __forceinline__ void add(const FewAccumulators<Traits>& acc, int row, int half, bool first,
                                      bool second) {
    count_ += int(first) + int(second);
    if (first) add_row(acc, 0, row, half);
    if (Traits::PAIRED == 2 && second) add_row(acc, Traits::PAIRED - 1, row, half);
  }

  /// Leaves the warp's moments in shared memory.
  /// \param pivot of the thread's channels
  __device__ __forceinline__ void end(const float (&pivot)[Traits::RUN]) {
    const int thread = few_thread_index(), lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) count_ += __shfl_xor_sync(~0u, count_, step);
    const float count = float(count_), each = count_ > 0 ? 1.f / count : 0.f;
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      float sum = sum_[i], squares = squares_[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        squares += __shfl_xor_sync(~0u, squares, step);
      }
      const float shift = sum * each, m2 = squares - sum * shift;
      if (lane < 4) {
        moments_[warp * Traits::COLUMNS + lane * Traits::RUN + i] =
            make_float2(pivot[i] + shift, m2 < 0.f ? 0.f : m2);
      }
    }
    if (lane == 0) counts_[warp] = count;
  }

  /// Merges what the warps left and writes it. Between two barriers of the block.
  __device__ __forceinline__ void write(const FewItem& item) const {
    const int column = int(threadIdx.x),
              channel = few_first_channel<Traits>(params_, first_channel_) + column;
    if (column >= Traits::COLUMNS || channel >= few_end_channel(params_)) return;
    FewMoment all{0.f, 0.f, 0.f};
    for (int warp = 0; warp < kFewWarps; ++warp) {
      const float count = counts_[warp];
      const float2 moment = moments_[warp * Traits::COLUMNS + column];
      if (count > 0.f) all.merge({count, moment.x, moment.y});
    }
    const std::int64_t at =
        (std::int64_t(item.sample) * params_.tiles.divisor + item.tile) * params_.k + channel;
    reinterpret_cast<float2*>(params_.part)[at] = make_float2(all.mean, all.m2);
    if (channel == 0 && item.sample == 0) params_.counts[item.tile] = int(all.count);
  }

 private:
  __device__ __forceinline__ void add_row(const FewAccumulators<Traits>& acc, int phase, int row, int half) {
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      const float apart = acc.at[phase][row][i / 2][2 * half + i % 2];
      sum_[i] += apart;
      squares_[i] += apart * apart;
    }
  }

  const FewParams& params_;
  const int first_channel_;
  float2* const moments_;  // [kFewWarps][COLUMNS] mean, M2
  float* const counts_;    // [kFewWarps]
  int count_ = 0;
  float sum_[Traits::RUN], squares_[Traits::RUN];
};

}  // namespace upconv3d::cuda
