// SPDX-License-Identifier: Apache-2.0
/// \file
/// The order in which the SM90 kernel that stores phases computes their tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Position tiles of a window of the launch order, 0 for slab by slab. Phases read the same x; slab by slab,
/// a large sample's x has left L2 when the next phase comes.
inline std::int64_t window_tiles(const Problem& p, const std::vector<Slab>& slabs,
                                 const ConvInstance& instance) {
  constexpr std::int64_t kTiles = 16;  // 8 and 32 were as quick
  std::int64_t longest = 0;
  for (const Slab& slab : slabs)
    longest = std::max(longest, ceil_div(slab.positions(), instance.block_positions));
  const std::int64_t windows = longest / kTiles;
  // Convolution groups read parts of x of their own; windows were not tried on them.
  if (slabs.size() == 1 || windows < 2 || p.groups > 1) return 0;
  // Places of the order that hold no tile are passed over, one after the other, by the thread that loads:
  // slabs of unlike sizes follow each other whole.
  constexpr double kMostPlaces = 1.25;  // of the tiles
  const std::int64_t window = ceil_div(longest, windows);
  const std::int64_t places = static_cast<std::int64_t>(slabs.size()) * window * windows;
  if (static_cast<double>(places) >
      kMostPlaces * static_cast<double>(slab_tiles(slabs, instance.block_positions)))
    return 0;
  return saturating_product(p.n, places, channel_tiles(p, instance.block_channels)) <= kMaxSm90Count ? window
                                                                                                     : 0;
}

}  // namespace upconv3d
