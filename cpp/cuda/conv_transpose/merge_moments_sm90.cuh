// SPDX-License-Identifier: Apache-2.0
/// \file
/// Partial moments of a group, part [N,moments,K/granule,2], merged by one warp in an order that the problem
/// alone decides. (conv_transpose_relu_group_norm_sm90 has its own copy of the sum: sharing it made ptxas
/// spill there.)
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"

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
  /// Adds up lanes that differ in the bits of kFirstMask and below; all must have the same pivot.
  template <int kFirstMask>
  CUTLASS_DEVICE void add_lanes() {
    CUTLASS_PRAGMA_UNROLL
    for (int mask = kFirstMask; mask > 0; mask /= 2) {
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

/// A group's partials: index i is granule i % granules of moment i / granules.
struct GroupPartials {
  float2 const* part;                   // of the sample, from the group's first granule on
  int row;                              // K/granule
  cutlass::FastDivmod const& granules;  // of a group; stays in the kernel's parameters
  float granule;                        // channels
};

/// Sums of the partials from `begin` to `end`, the same in all lanes of the warp.
///
/// \param positions (moment) -> positions that it covers; called with rising moments by each lane
template <class Positions>
CUTLASS_DEVICE MomentSums sum_partials(GroupPartials const& of, int begin, int end, Positions positions) {
  constexpr int kLoads = 8;  // in flight per lane
  MomentSums sums;
  sums.pivot = __ldcg(of.part).x;
  for (int first = begin + threadIdx.x % 32; first < end; first += 32 * kLoads) {
    float2 pair[kLoads];
    float pair_count[kLoads];
    int moment[kLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      int const index = min(first + 32 * i, end - 1);
      int sub;
      moment[i] = of.granules.divmod(sub, index);
      pair[i] = __ldcg(of.part + std::int64_t(moment[i]) * of.row + sub);
    }
    // Not beside each load: it may take as long as several.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      pair_count[i] = first + 32 * i < end ? of.granule * float(positions(moment[i])) : 0.f;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      if (pair_count[i] == 0.f) continue;
      sums.add(pair_count[i], pair[i].x - sums.pivot, pair[i].y);
    }
  }
  sums.add_lanes<16>();
  return sums;
}

}  // namespace upconv3d::cuda
