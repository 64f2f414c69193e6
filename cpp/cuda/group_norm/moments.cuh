// SPDX-License-Identifier: Apache-2.0
/// \file
/// (count, mean, M2) in registers, M2 = sum of (v - mean)^2, merged by Chan, Golub & LeVeque (1979).
///
/// No sum of squares is ever formed, so a mean of 1e4 beside a deviation of 1 costs nothing; and every merge
/// happens in an order that the launch alone decides, so results repeat bit for bit.
#pragma once

#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// Moments of kLanes series that advance together and so share one count.
template <class S, int kLanes>
struct Moments {
  S count = 0;
  S mean[kLanes] = {};
  S m2[kLanes] = {};

  __device__ __forceinline__ void merge(S other_count, const S (&other_mean)[kLanes],
                                        const S (&other_m2)[kLanes]) {
    if (other_count == S(0)) return;
    const S total = count + other_count;
    const S share = other_count / total;
    const S weight = count * share;
    count = total;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const S delta = other_mean[lane] - mean[lane];
      mean[lane] += delta * share;
      // In this order a weight of 0 silences a delta whose square would overflow.
      m2[lane] += other_m2[lane] + (delta * weight) * delta;
    }
  }

  /// Takes in kRows values per lane: mean first, deviations from it second, then one merge.
  template <int kRows>
  __device__ __forceinline__ void absorb(const S (&value)[kRows][kLanes]) {
    S chunk_mean[kLanes], chunk_m2[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      S sum = value[0][lane];
#pragma unroll
      for (int row = 1; row < kRows; ++row) sum += value[row][lane];
      chunk_mean[lane] = sum * (S(1) / kRows);
      chunk_m2[lane] = 0;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const S deviation = value[row][lane] - chunk_mean[lane];
        chunk_m2[lane] += deviation * deviation;
      }
    }
    merge(S(kRows), chunk_mean, chunk_m2);
  }

  /// All lanes as one series.
  __device__ __forceinline__ Moments<S, 1> join_lanes() const {
    Moments<S, 1> joined;
    joined.count = count * kLanes;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) joined.mean[0] += mean[lane] * (S(1) / kLanes);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const S delta = mean[lane] - joined.mean[0];
      joined.m2[0] += m2[lane] + (delta * count) * delta;
    }
    return joined;
  }
};

/// Merges the moments of `slots` threads into the one with slot 0, by halves: slot s takes in slot s + width.
/// The threads that merge with each other lie `stride` apart. Every thread of the block must call this.
template <class S, int kLanes>
__device__ __forceinline__ void merge_slots(Moments<S, kLanes>& own, int thread, int slot, int slots,
                                            int stride) {
  __shared__ S count[kStreamThreads];
  __shared__ S mean[kLanes][kStreamThreads];
  __shared__ S m2[kLanes][kStreamThreads];
  int live = slots;
  while (live > 1) {
    const int width = (live + 1) / 2;
    if (slot >= width && slot < live) {
      count[thread] = own.count;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        mean[lane][thread] = own.mean[lane];
        m2[lane][thread] = own.m2[lane];
      }
    }
    __syncthreads();
    if (slot + width < live) {
      const int from = thread + width * stride;
      S other_mean[kLanes], other_m2[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        other_mean[lane] = mean[lane][from];
        other_m2[lane] = m2[lane][from];
      }
      own.merge(count[from], other_mean, other_m2);
    }
    __syncthreads();
    live = width;
  }
}

/// Element offset of (mean, M2) of a channel in part [N,tiles,K,2].
__device__ __forceinline__ std::int64_t part_offset(std::int64_t sample, std::int64_t tile,
                                                    std::int64_t channel, std::int64_t tiles,
                                                    std::int64_t k) {
  return ((sample * tiles + tile) * k + channel) * 2;
}

}  // namespace upconv3d::cuda
