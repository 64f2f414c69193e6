// SPDX-License-Identifier: Apache-2.0
/// \file
/// Moments of a few values, as the SM90 kernels' epilogues take them.
#pragma once

#include "cutlass/cutlass.h"

namespace upconv3d::cuda {

/// (count, mean, M2), merged by Chan, Golub & LeVeque (1979).
struct RunningMoments {
  float count = 0.f;
  float mean = 0.f;
  float m2 = 0.f;

  CUTLASS_DEVICE void merge(RunningMoments const& other) {
    // What counts nothing may hold anything, NaN too.
    if (other.count == 0.f) return;
    float const total = count + other.count;
    float const delta = other.mean - mean;
    float const share = other.count / total;
    mean += delta * share;
    // In this order a weight of 0 silences a delta whose square would overflow.
    m2 += other.m2 + delta * (count * share) * delta;
    count = total;
  }

  CUTLASS_DEVICE RunningMoments from_lane(int lane_mask) const {
    return {__shfl_xor_sync(0xffffffffu, count, lane_mask), __shfl_xor_sync(0xffffffffu, mean, lane_mask),
            __shfl_xor_sync(0xffffffffu, m2, lane_mask)};
  }
};

/// Moments of `count` values from their sums shifted by one of them, p: as n*(mean-p)^2 <= n*M2, the
/// subtraction loses at most log2(n+1) of 24 bits, and nothing in practice.
///
/// \param mean_shift sum/count
CUTLASS_DEVICE RunningMoments shifted_moments(float count, float pivot, float sum, float sum_squares,
                                              float mean_shift) {
  // Squares that overflow are a variance of Inf, not Inf - Inf.
  float const m2 = isinf(sum_squares) ? sum_squares : sum_squares - sum * mean_shift;
  // A comparison, not fmaxf: NaN must reach the variance.
  return {count, pivot + mean_shift, m2 < 0.f ? 0.f : m2};
}
CUTLASS_DEVICE RunningMoments shifted_moments(float count, float pivot, float sum, float sum_squares) {
  return shifted_moments(count, pivot, sum, sum_squares, sum / count);
}

/// 1/count of a count that is 1 or more, exact for powers of two. A division would bring along its slow path,
/// a call, for which whoever has accumulators spills registers.
CUTLASS_DEVICE float inverse_of_count(float count) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(count));
  return inverse + inverse * (1.f - count * inverse);
}

}  // namespace upconv3d::cuda
