// SPDX-License-Identifier: Apache-2.0
/// \file
/// Partial moments of a group, which follow one another in memory, merged in an order that the problem alone
/// decides. (conv_transpose_relu_group_norm_sm90 has its own copy of the sum: sharing it made ptxas
/// spill there.)
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace upconv3d::cuda {

/// Sums of count, count*mean and M2 + count*mean^2, means shifted by `pivot`, in double: 29 bits more than
/// what they sum, so the shift need not be good.
struct MomentSums {
  double pivot = 0, count = 0, sum = 0, sum_squares = 0;

  /// \param mean_shift mean - pivot
  CUTLASS_DEVICE void add(double partial_count, double mean_shift, double m2) {
    count += partial_count;
    sum += partial_count * mean_shift;
    sum_squares += m2 + partial_count * mean_shift * mean_shift;
  }
  /// Adds up a warp's lanes, all of the same pivot.
  CUTLASS_DEVICE void add_lanes() {
    CUTLASS_PRAGMA_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      count += __shfl_xor_sync(0xffffffffu, count, mask);
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      sum_squares += __shfl_xor_sync(0xffffffffu, sum_squares, mask);
    }
  }
  /// Mean, less the pivot.
  CUTLASS_DEVICE double mean_shift() const { return sum / count; }
  CUTLASS_DEVICE double m2(double shift) const {
    double const m2 = sum_squares - sum * shift;
    return m2 < 0 ? 0.0 : m2;  // NaN stays NaN
  }
};

/// Sums of a group's partials `begin` to `end` - 1 by one of some threads, the same in all lanes of a warp.
///
/// \param part (mean, M2) of full_count values each, or, where M2's sign is set, of short_count(index)
/// \param thread,threads its number, and how many there are
/// \tparam kLoads partials on their way to a thread at a time
template <int kLoads, class ShortCount>
CUTLASS_DEVICE MomentSums sum_partials(float2 const* part, int begin, int end, int thread, int threads,
                                       float full_count, ShortCount const& short_count) {
  MomentSums sums;
  sums.pivot = __ldcg(part).x;
  // Of those of full_count, which is multiplied once: a multiprocessor's rate for doubles is what counts.
  int full = 0;
  double shifts = 0, squares = 0, m2 = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int first = begin + thread; first < end; first += threads * kLoads) {
    float2 pair[kLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) pair[i] = __ldcg(part + min(first + threads * i, end - 1));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      int const index = first + threads * i;
      if (index >= end) continue;
      double const shift = pair[i].x - sums.pivot;
      if (signbit(pair[i].y)) {
        sums.add(short_count(index), shift, -pair[i].y);
        continue;
      }
      ++full;
      shifts += shift;
      squares += shift * shift;
      m2 += pair[i].y;
    }
  }
  sums.count += double(full) * full_count;
  sums.sum += shifts * full_count;
  sums.sum_squares += m2 + squares * full_count;
  sums.add_lanes();
  return sums;
}

/// Sums of a group's segments (mean, rest of the mean, variance, count), the same in all lanes of the warp.
CUTLASS_DEVICE MomentSums sum_segments(float4 const* from, int segments) {
  MomentSums sums;
  sums.pivot = __ldcg(from).x;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = threadIdx.x % 32; i < segments; i += 32) {
    float4 const segment = __ldcg(from + i);
    sums.add(segment.w, segment.x - sums.pivot + segment.y, double(segment.w) * segment.z);
  }
  sums.add_lanes();
  return sums;
}

}  // namespace upconv3d::cuda
