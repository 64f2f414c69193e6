// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which copies channels_last_copies makes by the tiles of cuda/layout/input_tile.cuh, four values a load and
/// eight a store, which in stretches, by vectors of 16 bytes, and which value by value.
#pragma once

#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"

namespace upconv3d {

/// Tiles of a copy [batch,channels,positions] to [batch,positions,channels].
struct CopyTiles {
  static constexpr std::int64_t kPositions = 128, kChannels = 64;
  static constexpr std::int64_t kLoad = 4;  // values; of other positions a tile loads them one by one

  std::int64_t across, down, count;

  CopyTiles(std::int64_t batch, std::int64_t channels, std::int64_t positions)
      : across(ceil_div(positions, kPositions)),
        down(ceil_div(channels, kChannels)),
        count(batch * across * down) {}
};

/// Bytes of a stretch, which a block holds: all positions of some channels, or a cache line's of each.
inline constexpr std::int64_t kStretchBytes = 16 * 1024;
/// Bytes that a stretch writes of a position, at least: a sector of memory.
inline constexpr std::int64_t kLeastStretchColumnBytes = 32;

/// Whether a stretch has all positions of its channels, and so is contiguous.
inline bool has_contiguous_stretches(std::int64_t positions) {
  return kLeastStretchColumnBytes * positions <= kStretchBytes;
}

/// Where channels fall into whole vectors, as addresses are to, and either all positions fit a stretch, as of
/// weights but of the longest kernels, and of small x, or they fall into whole vectors, too.
inline bool is_copied_in_stretches(std::int64_t channels, std::int64_t positions,
                                   std::int64_t element_bytes) {
  return channels * element_bytes % kVectorBytes == 0 &&
         (has_contiguous_stretches(positions) || positions * element_bytes % kVectorBytes == 0);
}

/// Of values of 16 bits, where channels are whole vectors, tiles are full along the positions and enough for
/// an H200's multiprocessors twice: 9 MB take 7 us instead of 12.6, and fewer tiles leave multiprocessors
/// without one.
inline bool is_copied_by_tiles(std::int64_t batch, std::int64_t channels, std::int64_t positions,
                               std::int64_t element_bytes) {
  constexpr std::int64_t kLeastTiles = 256;
  if (positions % CopyTiles::kLoad != 0 && is_copied_in_stretches(channels, positions, element_bytes))
    return false;
  return element_bytes == 2 && channels % kChannelUnit == 0 && positions >= CopyTiles::kPositions &&
         CopyTiles(batch, channels, positions).count >= kLeastTiles;
}

}  // namespace upconv3d
