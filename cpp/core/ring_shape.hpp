// SPDX-License-Identifier: Apache-2.0
/// \file
/// How a block of the SM90 kernel that stores the convolution divides shared memory between the rings of x
/// and w. A unit is one operand tile of one split (hi or lo).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/channels.hpp"

namespace upconv3d {

struct RingShape {
  int x_units;
  int x_unit_bytes;
  int w_units;
};

inline constexpr int kMaxXUnits = 8;
inline constexpr int kMaxWUnits = 12;

/// What the rings are made for.
struct RingNeeds {
  int bytes;         // of both
  int x_rows;        // positions of the longest load of x
  bool shares_taps;  // whether such a load serves several taps
  int row_bytes;     // of a row of either operand
  int w_bytes;       // of a unit of w
  int splits;        // 1, or 2 of hi and lo
};

inline RingShape ring_shape(const RingNeeds& of) {
  // Units of w, behind those of x, have to begin on 1024 bytes.
  constexpr int kAlignment = 1024;
  const int x_bytes = (of.x_rows * of.row_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const auto w_units = [&](int stages) { return (of.bytes - stages * of.splits * x_bytes) / of.w_bytes; };
  // At least two loads of x of a whole k-block, or as many bytes.
  int stages = 2 * static_cast<int>(kBlockInputs) * 2 / of.row_bytes;
  // Loads that serve several taps last long; but of four, tiles of 64 channels that share none take a fifth
  // less, where six units of w remain. Else as many stages of x as of w.
  constexpr int kMostShared = 4, kLeastW = 6;
  const auto fits = [&](int more) {
    if (of.shares_taps) return more <= kMostShared && w_units(more) >= kLeastW;
    return more * of.splits <= kMaxXUnits && w_units(more) >= more * of.splits;
  };
  while (fits(stages + 1)) ++stages;
  return {stages * of.splits, x_bytes, std::min(w_units(stages), kMaxWUnits)};
}

}  // namespace upconv3d
