// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tiles of conv_transpose_held_sm90, which stay in shared memory until the norm's moments are known.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Output channels of a tile: the rows that a warpgroup multiplies.
inline constexpr std::int64_t kHeldChannels = 64;

/// Barriers, and what is known of norm groups.
inline constexpr int kHeldControlBytes = 4096;

/// K-blocks on their way: fewer leave tensor cores waiting for L2, more than there are barriers for gain
/// nothing.
inline constexpr int kMinHeldStages = 3, kMaxHeldStages = 8;

/// How one variant of the kernel divides a multiprocessor.
struct HeldShape {
  int blocks_per_sm;
  int shared_bytes;  // of a block
  int stage_bytes;   // of a k-block's operands
  int tile_bytes;    // held
};

/// Two blocks share a multiprocessor: one multiplies while the other waits.
constexpr HeldShape held_shape(int positions, int operand_bytes, int held_bytes) {
  constexpr int kHalf = 113 * 1024;  // each block takes 1 KB more
  constexpr int kChannels = static_cast<int>(kHeldChannels), kInputs = static_cast<int>(kBlockInputs);
  HeldShape shape{};
  shape.blocks_per_sm = 2;
  shape.shared_bytes = kHalf;
  shape.stage_bytes = (kChannels + positions) * kInputs * operand_bytes;
  shape.tile_bytes = kChannels * positions * held_bytes;
  return shape;
}

/// Shared memory of a block that has so many tiles.
struct HeldRooms {
  int slots;   // tiles held; where they are fewer than a block's tiles, others wait in y
  int stages;  // k-blocks on their way
};
constexpr HeldRooms held_rooms(const HeldShape& shape, std::int64_t tiles_of_block) {
  const int bytes = shape.shared_bytes - kHeldControlBytes;
  const int room = (bytes - kMinHeldStages * shape.stage_bytes) / shape.tile_bytes;
  const int slots = static_cast<int>(std::min<std::int64_t>(tiles_of_block, room));
  return {slots, std::min((bytes - slots * shape.tile_bytes) / shape.stage_bytes, kMaxHeldStages)};
}

/// Neighbouring channels of one norm group that share a partial moment, as a power of two: at most the 16 of
/// a warp.
inline int held_granule_shift(const Problem& problem) {
  constexpr int kMaxShift = 4;
  return std::min(kMaxShift, std::countr_zero(static_cast<std::uint64_t>(problem.k / problem.num_groups)));
}

/// Whether norm groups are merged by one block each, for all, and not by all blocks that need them: those
/// would wait longer for so many partial moments of a tile's channels than for another barrier.
inline bool held_merges_apart(const Problem& problem, std::int64_t moments) {
  constexpr std::int64_t kMost = 1024;
  return moments * (kHeldChannels >> held_granule_shift(problem)) > kMost;
}

/// Floats of a partial moment: mean, M2, count, and one that fills 16 bytes.
inline constexpr std::int64_t kHeldMomentFloats = 4;

}  // namespace upconv3d
