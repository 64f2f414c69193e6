// SPDX-License-Identifier: Apache-2.0
/// \file
/// How a block of the SM90 kernel that stores the convolution divides shared memory between the rings of x
/// and w. A unit is one operand tile of one split (hi or lo).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/channels.hpp"
#include "core/plan.hpp"

namespace upconv3d {

/// Of a block's shared memory, what is left for both rings beside the tile that is staged, two items of an
/// eighth of it that are normalized, and barriers and small exchanges.
constexpr int ring_bytes(int block_channels, int block_positions, int stored_bits) {
  constexpr int kBlockBytes = 227 * 1024, kControlBytes = 3 * 1024;
  const int staged = block_channels * block_positions * stored_bits / 8 /
                     stage_rounds(block_channels, block_positions, stored_bits);
  return kBlockBytes - kControlBytes - staged - 2 * (staged / 8);
}

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
  // Loads that serve several taps last long, but tiles of the same launch that share none wait for them: with
  // up to four on their way, blocks on tiles of 64 channels took up to a fifth less, where six units of w
  // remain (perf/NOTES.md, "Tiles and cuts"). Else as many stages of x as of w.
  constexpr int kMostShared = 4, kLeastW = 6;
  const auto fits = [&](int more) {
    if (of.shares_taps) return more <= kMostShared && w_units(more) >= kLeastW;
    return more * of.splits <= kMaxXUnits && w_units(more) >= more * of.splits;
  };
  while (fits(stages + 1)) ++stages;
  return {stages * of.splits, x_bytes, std::min(w_units(stages), kMaxWUnits)};
}

}  // namespace upconv3d
