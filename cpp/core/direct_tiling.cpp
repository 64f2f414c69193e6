// SPDX-License-Identifier: Apache-2.0
#include "core/direct_tiling.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/channels.hpp"
#include "core/direct_limits.hpp"
#include "core/index_math.hpp"

namespace upconv3d {
namespace {

constexpr std::int64_t kFloat = 4;

/// The least power of two that is not below `count`, and at most `most`, itself one.
int lanes_for(std::int64_t count, int most) {
  const auto wanted = std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(count, 1)));
  return static_cast<int>(std::min<std::uint64_t>(wanted, static_cast<std::uint64_t>(most)));
}

/// Whether conv_transpose_depthwise was compiled for it, which computes a channel from one channel.
bool is_depthwise(const Problem& p) {
  const std::int64_t taps = p.kernel[0];
  const bool cubic = p.kernel == Extent3{taps, taps, taps} && p.stride == Extent3{2, 2, 2};
  return p.groups == p.c && p.c == p.k && cubic && (taps == 3 || taps == 5 || taps == 7) &&
         p.dilation == Extent3{1, 1, 1};
}

/// Channels of a thread, which it stores side by side.
int channel_vector(const Problem& p, bool depthwise) {
  if (depthwise) {
    // Of more taps than 3, a thread has registers for the inputs of one channel.
    const bool pairs = p.x_layout == Layout::kNDHWC && p.k % 2 == 0 && p.x_aligned;
    return p.y_layout == Layout::kNDHWC && pairs && p.kernel[2] == 3 ? 2 : 1;
  }
  for (const int vector : {8, 4, 2}) {
    if (group_outputs(p) % vector == 0) return vector;
  }
  return 1;
}

/// Lanes along channels, where these lie side by side: rows of whole sectors. Of k5 and k7 one sector of 16
/// bit, for whose weights there is shared memory.
int channel_lanes(const Problem& p, const DirectTiling& tiling) {
  constexpr int kRow = 32, kSector = 16;
  if (p.y_layout == Layout::kNCDHW) return 1;
  const bool few_taps = !tiling.depthwise || p.kernel[2] == 3;
  return lanes_for(ceil_div(p.k, tiling.vector), few_taps ? kRow : kSector);
}

/// Bytes of the weights of a block's channels and of the taps of each phase.
std::int64_t shared_bytes(const Problem& p, const DirectTiling& tiling) {
  const std::int64_t channels = std::int64_t{tiling.lanes_c} * tiling.vector;
  if (tiling.depthwise) {
    const std::int64_t together = 4 / tiling.vector;  // taps of a 16-byte load
    return ceil_div(volume(p.kernel), together) * together * channels * kFloat;
  }
  constexpr std::int64_t kTapsOfPhase = 16;
  const std::int64_t phases = p.stride[0] + p.stride[1] + p.stride[2];
  return saturating_sum(phases * kTapsOfPhase,
                        saturating_product(group_inputs(p), volume(p.kernel), channels * kFloat));
}

/// Whether fewer channels are to share a block: for their weights, or for the threads that bring them.
bool has_too_many_lanes(const Problem& p, const DirectTiling& tiling) {
  // A block has as much on 8.6, 8.9 and 12.x; two blocks of it fit a multiprocessor of 8.0 and 9.0.
  constexpr std::int64_t kSharedWanted = 99 * 1024;
  if (tiling.lanes_c == 1) return false;
  return saturating_sum(shared_bytes(p, tiling), direct_moment_bytes(tiling)) > kSharedWanted ||
         (tiling.depthwise && tiling.lanes_c > kMaxDepthwiseLanes);
}

}  // namespace

std::int64_t direct_moment_bytes(const DirectTiling& tiling) {
  // Count, mean and M2 of each channel by thread; merge_slots (cuda/group_norm/moments.cuh) has room for 256.
  constexpr std::int64_t kThreads = 256;
  return kThreads * (1 + 2 * tiling.vector) * kFloat;
}

DirectTiling direct_tiling(const Problem& p) {
  DirectTiling tiling;
  tiling.depthwise = is_depthwise(p);
  tiling.vector = channel_vector(p, tiling.depthwise);
  tiling.shared_inputs = !tiling.depthwise && tiling.vector > 1;
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    tiling.first[axis] = p.padding[axis] / p.stride[axis];
    tiling.cells[axis] = (out[axis] - 1 + p.padding[axis]) / p.stride[axis] - tiling.first[axis] + 1;
  }
  tiling.lanes_c = channel_lanes(p, tiling);
  while (has_too_many_lanes(p, tiling)) tiling.lanes_c /= 2;
  const std::int64_t columns = tiling.depthwise ? 1 : kDirectColumns;
  tiling.lanes_q = lanes_for(ceil_div(tiling.cells[2], columns), kDirectThreads / tiling.lanes_c);
  tiling.lanes_z = kDirectThreads / (tiling.lanes_c * tiling.lanes_q);
  if (p.y_layout == Layout::kNCDHW) {
    tiling.lanes_z = lanes_for(tiling.cells[0], tiling.lanes_z);
    tiling.lanes_c = kDirectThreads / (tiling.lanes_q * tiling.lanes_z);
    while (has_too_many_lanes(p, tiling)) {
      tiling.lanes_c /= 2;
      tiling.lanes_z *= 2;
    }
  }
  tiling.shared_bytes = shared_bytes(p, tiling);
  tiling.channel_blocks = ceil_div(p.k, std::int64_t{tiling.lanes_c} * tiling.vector);
  tiling.tile = {tiling.lanes_z, 0, columns * tiling.lanes_q};
  // Rows of a tile: as many as leave an H200 12 blocks for each multiprocessor, so that the last ones do not
  // run alone, but not so few that weights, and rows read by neighbours too, weigh.
  constexpr std::int64_t kBlocksWanted = 12 * 132, kMostRows = 32, kLeastRows = 4;
  for (tiling.tile[1] = kMostRows;; tiling.tile[1] /= 2) {
    for (int axis = 0; axis < 3; ++axis) {
      tiling.tiles[axis] = ceil_div(tiling.cells[axis], tiling.tile[axis]);
    }
    const std::int64_t blocks = saturating_product(p.n, tiling.tile_count(), tiling.channel_blocks);
    if (blocks >= kBlocksWanted || tiling.tile[1] == kLeastRows) return tiling;
  }
}

std::int64_t direct_tile_positions(const Problem& p, const DirectTiling& tiling) {
  const Extent3 out = p.out();
  std::int64_t positions = 1;
  for (int axis = 0; axis < 3; ++axis) {
    positions *= std::min(out[axis], tiling.tile[axis] * p.stride[axis]);
  }
  return positions;
}

}  // namespace upconv3d
