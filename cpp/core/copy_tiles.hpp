// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which copies channels_last_copies makes by the tiles of cuda/layout/input_tile.cuh, four values a load and
/// eight a store, which in stretches of whole channels, by vectors of 16 bytes, and which value by value.
#pragma once

#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"

namespace upconv3d {

/// Tiles of a copy [batch,channels,positions] to [batch,positions,channels].
struct CopyTiles {
  static constexpr std::int64_t kPositions = 128, kChannels = 64;

  std::int64_t across, down, count;

  CopyTiles(std::int64_t batch, std::int64_t channels, std::int64_t positions)
      : across(ceil_div(positions, kPositions)),
        down(ceil_div(channels, kChannels)),
        count(batch * across * down) {}
};

/// Of values of 16 bits, where channels are whole vectors, tiles are full along the positions and enough for
/// an H200's multiprocessors twice: 9 MB take 7 us instead of 12.6, and fewer tiles leave multiprocessors
/// without one.
inline bool is_copied_by_tiles(std::int64_t batch, std::int64_t channels, std::int64_t positions,
                               std::int64_t element_bytes) {
  constexpr std::int64_t kLeastTiles = 256;
  return element_bytes == 2 && channels % kChannelUnit == 0 && positions >= CopyTiles::kPositions &&
         CopyTiles(batch, channels, positions).count >= kLeastTiles;
}

/// Bytes of a stretch: all positions of some channels, which a block holds.
inline constexpr std::int64_t kStretchBytes = 16 * 1024;
/// Bytes that a stretch writes of a position, at least: a sector of memory.
inline constexpr std::int64_t kLeastStretchRowBytes = 32;

/// Where channels fall into whole vectors, as addresses are to, and a sector's have few enough positions: of
/// weights, but of the longest kernels, and of small x.
inline bool is_copied_in_stretches(std::int64_t channels, std::int64_t positions,
                                   std::int64_t element_bytes) {
  constexpr std::int64_t kVectorBytes = 16;
  return channels * element_bytes % kVectorBytes == 0 && kLeastStretchRowBytes * positions <= kStretchBytes;
}

}  // namespace upconv3d
