// SPDX-License-Identifier: Apache-2.0
/// \file
/// The estimate of the SM90 kernel that stores the convolution by which that plan is compared with others
/// where plan_times.hpp has no times: what those comparisons were fitted with (perf/NOTES.md, "Small
/// blocks"). How the kernel is run is chosen by sm90_schedule.hpp, which is nearer to what it takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/sm90_schedule.hpp"

namespace upconv3d {

/// An H200 under the power limit of long multiplications.
inline constexpr double kCyclesPerMs = 1.65e6;

/// Estimated cycles of the convolution with its borders left on, each load of x for one tap.
double compared_cycles(const Problem& problem, const ConvInstance& instance, int sm_count);

/// Estimated time of the convolution with its borders cut off where that gains, each load of x for one tap.
double compared_multiply_ms(const Problem& problem, const ConvInstance& instance, int sm_count);

/// The same of a schedule, as leaving_blocks.hpp was fitted with it.
double compared_multiply_ms(const Problem& problem, const Schedule& schedule, int sm_count);

/// Whether neighbouring taps of an axis lie apart.
inline bool is_dilated(const Problem& problem) {
  bool dilated = false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    dilated |= problem.kernel[axis] > 1 && problem.dilation[axis] > 1;
  }
  return dilated;
}

/// What the SM90 plan takes of its estimate where taps are dilated: of tiles of 64 channels, also in pairs,
/// 1.25 and more, seen of four blocks, since no load of x serves several taps.
inline double dilated_share(const Problem& problem, const Plan& sm90) {
  constexpr std::int64_t kSmallTile = 64;
  const bool small = sm90.instance && (sm90.instance->block_channels <= kSmallTile || sm90.pair_phases);
  return small && is_dilated(problem) ? 1.25 : 1.0;
}

}  // namespace upconv3d
