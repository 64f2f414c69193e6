// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the streaming kernels lay their threads over [rows, contiguous elements].
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace upconv3d::cuda {

struct BlockShape {
  int x = 1;                // threads along the contiguous axis
  int y = 1;                // threads across rows
  std::int64_t blocks = 1;  // blocks along the contiguous axis
};

/// Blocks whose threads own fixed channels: K split evenly, so that no block is left with a sliver.
inline BlockShape channel_block_shape(std::int64_t k, int vector, int threads) {
  const std::int64_t vectors = (k + vector - 1) / vector;
  BlockShape shape;
  shape.blocks = (vectors + threads - 1) / threads;
  shape.x = static_cast<int>((vectors + shape.blocks - 1) / shape.blocks);
  shape.y = threads / shape.x;
  return shape;
}

/// Blocks whose threads share a row of `elements`: as many threads as the row has vectors, the rest on
/// further rows.
inline BlockShape row_block_shape(std::int64_t elements, int vector, int threads) {
  const std::int64_t vectors = (elements + vector - 1) / vector;
  BlockShape shape;
  shape.x = static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(vectors, 1, threads))));
  shape.y = threads / shape.x;
  return shape;
}

}  // namespace upconv3d::cuda
