// SPDX-License-Identifier: Apache-2.0
#include "core/held_norm.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/index_math.hpp"

namespace upconv3d {
namespace {

constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kMaxThreads = 512;
/// Vectors of a thread that are worth more threads: its loads are on the way at once.
constexpr std::int64_t kLoadsWanted = 4;
/// Blocks that may wait for each other: all are to run at once, one on each multiprocessor of an H100 or
/// H200.
constexpr std::int64_t kWaitingBlocks = 128;
/// Bytes of all values at most, in either order. Where they fit the multiprocessors together, L2 holds them
/// too.
constexpr std::int64_t kMostTilesBytes = 16 * 1024 * 1024, kMostPlanesBytes = 24 * 1024 * 1024;
/// Blocks of a launch whose blocks do not wait; more of them, for narrower slabs, gain nothing.
constexpr std::int64_t kAloneBlocks = 264;
/// Bytes that a block takes in alone sooner than blocks have waited for each other, 2 us at 32 to 50 bytes a
/// cycle.
constexpr std::int64_t kAloneBytes = 48 * 1024;
/// Bytes of a tile worth a block of its own, where blocks wait.
constexpr std::int64_t kLeastTileBytes = 4 * 1024;
/// Vectors of a team's thread, of NCDHW, that are worth a wider team: of small groups a block takes several.
constexpr std::int64_t kTeamLoadsWanted = 4;
/// Threads of a block of several groups.
constexpr std::int64_t kTeamsThreads = 256;
/// Sectors of memory are 32 bytes: of narrower slabs' rows the rest would be read in vain.
constexpr std::int64_t kLeastRowBytes = 32;
/// Partial moments that every block reads of all its groups: 8 KB, less than the values it holds.
constexpr std::int64_t kMostPartials = 1024;

/// Threads and shared memory of a block.
void fill_block(const Problem& p, HeldTiles& t) {
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  const std::int64_t vectors = t.rows * t.columns;
  t.threads = 128;
  while (t.threads < kMaxThreads && (t.threads < t.columns || vectors > kLoadsWanted * t.threads)) {
    t.threads *= 2;
  }
  t.row_lanes = std::min(t.threads / t.columns, t.rows);
  t.loads = ceil_div(t.rows, t.row_lanes);
  t.slot_lanes = std::gcd(p.k / p.num_groups, lanes);
  t.held_bytes = t.loads * t.threads * kVectorBytes;
  t.slot_rows = t.shares_warps() ? t.threads / 32 : t.row_lanes;
  t.slots_bytes = ceil_div(t.slot_rows * t.columns * (lanes / t.slot_lanes), 4) * 16;
  t.table_bytes = 4 * ceil_div(p.k / t.slabs, 4) * 16;
}

/// Tiles of slabs of `columns` vectors, or nothing where a block cannot hold one.
/// \param rows of a sample
std::optional<HeldTiles> tiles_of(const Problem& p, std::int64_t rows, HeldTiles t, std::int64_t limit) {
  if (t.columns > kMaxThreads) return std::nullopt;
  const std::int64_t bytes = rows * t.columns * kVectorBytes;  // of a slab
  if (bytes > kAloneBytes) {
    const std::int64_t groups = std::max<std::int64_t>(p.num_groups / t.slabs, 1);
    t.tiles = std::clamp<std::int64_t>(std::min({kWaitingBlocks / (p.n * t.slabs),
                                                 ceil_div(bytes, kLeastTileBytes), kMostPartials / groups}),
                                       1, kWaitingBlocks);
  }
  t.rows = ceil_div(rows, t.tiles);
  t.tiles = ceil_div(rows, t.rows);
  fill_block(p, t);
  return t.shared_bytes() <= limit ? std::optional(t) : std::nullopt;
}

/// Whether what follows the convolution can be one launch, and its values are few enough.
bool may_be_held(const Problem& p, std::int64_t most_bytes) {
  const Tail& tail = p.tail;
  return p.n > 0 && tail.norm && !tail.has_skip && p.dtype != DType::kFloat64 &&
         saturating_product(p.n, p.k, p.positions(), size_of(p.dtype)) <= most_bytes;
}

}  // namespace

std::int64_t held_shared_limit(int compute_capability) {
  // Less than each has for one block. Before 8.0, no load goes to shared memory directly.
  if (compute_capability < 80) return 0;
  const bool largest = compute_capability == 90 || compute_capability == 100;
  return (largest ? 208 : compute_capability == 80 ? 160 : 96) * std::int64_t{1024};
}

std::optional<HeldTiles> held_tiles(const Problem& p, int compute_capability) {
  if (!may_be_held(p, kMostTilesBytes)) return std::nullopt;
  const std::int64_t limit = held_shared_limit(compute_capability);
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  HeldTiles whole;
  whole.fold = std::lcm(p.k, lanes) / p.k;
  if (p.positions() % whole.fold != 0) return std::nullopt;
  const std::int64_t rows = p.positions() / whole.fold;
  whole.columns = p.k * whole.fold / lanes;
  // Channels that end within a vector are not transposed.
  if (whole.fold > 1 && p.y_layout != Layout::kNDHWC) return std::nullopt;
  if (whole.fold > 1) return tiles_of(p, rows, whole, limit);

  // Slabs are whole groups and whole vectors, from the narrowest to all channels: of those whose blocks need
  // not wait the widest that are enough of them, or the narrowest; where all wait, the widest.
  const std::int64_t unit = std::lcm(p.k / p.num_groups, lanes), units = p.k / unit;
  std::optional<HeldTiles> best;
  for (std::int64_t width = 1; width <= units; ++width) {
    HeldTiles t;
    t.slabs = units / width;
    t.columns = unit * width / lanes;
    if (units % width != 0 || (t.columns * kVectorBytes < kLeastRowBytes && width < units)) continue;
    const std::optional<HeldTiles> tiles = tiles_of(p, rows, t, limit);
    if (!tiles) continue;
    const bool alone_now = best && best->tiles == 1, alone = tiles->tiles == 1;
    const bool takes = alone ? !alone_now || p.n * t.slabs >= kAloneBlocks : !alone_now;
    if (takes) best = tiles;
  }
  return best;
}

std::optional<HeldPlanes> held_planes(const Problem& p, int compute_capability) {
  if (!may_be_held(p, kMostPlanesBytes) || p.y_layout != Layout::kNCDHW) return std::nullopt;
  const std::int64_t limit = held_shared_limit(compute_capability);
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  const std::int64_t groups = p.n * p.num_groups, group_channels = p.k / p.num_groups;
  const std::int64_t values = group_channels * p.positions(), bytes = values * size_of(p.dtype);
  HeldPlanes t;
  if (bytes > kAloneBytes && groups < kWaitingBlocks) {
    t.tiles = std::min(kWaitingBlocks / groups, ceil_div(bytes, kLeastTileBytes));
  }
  t.tile_values = t.tiles == 1 ? values : ceil_div(ceil_div(values, t.tiles), lanes) * lanes;
  t.tiles = ceil_div(values, t.tile_values);
  // One more where the stretch does not start on a vector's boundary.
  const std::int64_t vectors = ceil_div(t.tile_values, lanes) + (p.positions() % lanes == 0 ? 0 : 1);
  t.team_threads = 32;
  while (t.team_threads < kMaxThreads && vectors > kTeamLoadsWanted * t.team_threads) t.team_threads *= 2;
  if (t.tiles == 1) {
    const std::int64_t most = std::max<std::int64_t>(kTeamsThreads / t.team_threads, 1);
    // Rather more blocks than full ones.
    while (t.teams < most && groups >= 2 * t.teams * kWaitingBlocks) t.teams *= 2;
  }
  t.loads = ceil_div(vectors, t.team_threads);
  t.channels = std::min(group_channels, (t.tile_values - 1) / p.positions() + 2);
  t.held_bytes = t.loads * t.threads() * kVectorBytes;
  t.slots_bytes = ceil_div(t.threads() / 32, 4) * 16;
  t.table_bytes = 3 * t.teams * t.channels * 4;
  return t.shared_bytes() <= limit ? std::optional(t) : std::nullopt;
}

std::optional<HeldCut> held_cut(const Problem& p, Layout layout, int compute_capability) {
  if (layout == Layout::kNDHWC) {
    const std::optional<HeldTiles> tiles = held_tiles(p, compute_capability);
    return tiles ? std::optional<HeldCut>(*tiles) : std::nullopt;
  }
  const std::optional<HeldPlanes> planes = held_planes(p, compute_capability);
  return planes ? std::optional<HeldCut>(*planes) : std::nullopt;
}

}  // namespace upconv3d
