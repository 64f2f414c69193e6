// SPDX-License-Identifier: Apache-2.0
#include "core/held_norm.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/channels.hpp"
#include "core/index_math.hpp"

namespace upconv3d {
namespace {

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
/// Bytes that a block takes in alone sooner than those of a cluster have waited for each other.
constexpr std::int64_t kAloneBesideClusters = 16 * 1024;
/// Blocks of a cluster on any GPU that has them, and bytes of each: where it were more, more blocks that all
/// wait are quicker.
constexpr std::int64_t kClusterBlocks = 8, kMostClusterTileBytes = 32 * 1024;
/// Threads of all clusters that run at once, with up to 128 registers each. (Of an H200's 132
/// multiprocessors 16 clusters of 8 that fill one each did not; a second wave took 4 to 8 us.)
constexpr std::int64_t kClusterThreads = 12 * kClusterBlocks * kMaxHeldThreads;
/// Bytes of a tile worth a block of its own, where blocks wait.
constexpr std::int64_t kLeastTileBytes = 4 * 1024;
/// Vectors of a team's thread, of NCDHW, that are worth a wider team: of small groups a block takes several.
constexpr std::int64_t kTeamLoadsWanted = 4;
/// Threads of teams that an H200 runs at once, of 64 registers each (of those whose values stay in registers
/// three quarters, which was not tried to choose by), on as many multiprocessors as blocks may
/// wait for each other, and vectors of a thread where there are more: those of the first wave take twice as
/// many sooner than a second wave begins. Of 16 samples of 192 float32 groups of 12^3 values 16 vectors
/// took 31.5 us, 8 33, 4 37.6; of groups that all run at once, 8 took 0.94 to 1.5 times as long as 4
/// (perf/results/h200_peers_found.txt, part 4).
constexpr std::int64_t kTeamsThreadsAtOnce = kWaitingBlocks * 1024, kMostTeamLoads = 16;
/// From which compute capability on that was timed, and the next.
constexpr int kTeamsTimed = 90;
/// Threads of NDHWC's blocks that do not wait which an H200 runs at once, of up to 128 registers each, as one
/// block of 512 on a multiprocessor or four of 128, and vectors of a thread where there are more. Of 64
/// samples of 256 channels at 8^3 positions, 512 blocks, a launch of 512 threads each took 45 us behind a
/// convolution, of 128 threads 30 (perf/results/h200_one_voxel.txt, part 6).
constexpr std::int64_t kAloneThreadsAtOnce = kWaitingBlocks * 512, kMostAloneLoads = 16;
/// Threads of a block of several groups.
constexpr std::int64_t kTeamsThreads = 256;
/// Sectors of memory are 32 bytes: of narrower slabs' rows the rest would be read in vain.
constexpr std::int64_t kLeastRowBytes = 32;
/// Partial moments that every block reads of all its groups: 8 KB, less than the values it holds.
constexpr std::int64_t kMostPartials = 1024;

/// Whether registers may keep a tile's values until they are normalized: what is due of a value is known when
/// the kernel is compiled, and there are few of them.
///
/// \param held_bytes of shared memory that they take all the same, to be transposed
template <class Cut>
bool may_keep(const Problem& p, const Cut& t, std::int64_t held_bytes) {
  return has_held_kernel(p.tail.before()) && t.loads <= kept_vectors(static_cast<int>(size_of(p.dtype))) &&
         t.shared_bytes() - t.held_bytes + held_bytes <= kUnaskedSharedBytes;
}

/// Rows whose values a thread stores together, of y in NCDHW; 1 where they are not to be.
///
/// \param rows of a sample
std::int64_t run_rows(const Problem& p, std::int64_t rows) {
  return p.y_layout == Layout::kNCDHW && rows % HeldTiles::kRunRows == 0 ? HeldTiles::kRunRows : 1;
}

/// Threads and shared memory of a block.
///
/// \param run run_rows
/// \param narrows whether blocks of more threads than run at once, which do not wait, are made smaller
void fill_block(const Problem& p, HeldTiles& t, std::int64_t run, bool narrows) {
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  const std::int64_t vectors = t.rows * t.columns;
  t.threads = 128;
  while (t.threads < kMaxHeldThreads && (t.threads < t.columns || vectors > kLoadsWanted * t.threads)) {
    t.threads *= 2;
  }
  const auto loads_of = [&t](std::int64_t threads) {
    return ceil_div(t.rows, std::min(threads / t.columns, t.rows));
  };
  while (narrows && t.tiles == 1 && t.threads > 128 && t.threads >= 2 * t.columns &&
         p.n * t.slabs * t.threads > kAloneThreadsAtOnce && loads_of(t.threads / 2) <= kMostAloneLoads) {
    t.threads /= 2;
  }
  t.row_lanes = std::min(t.threads / t.columns, t.rows);
  t.row_lanes = std::max(t.row_lanes / run * run, std::int64_t{1});
  t.loads = ceil_div(t.rows, t.row_lanes);
  t.slot_lanes = std::gcd(p.k / p.num_groups, lanes);
  t.held_bytes = t.loads * t.threads * kVectorBytes;
  t.slot_rows = t.shares_warps() ? t.threads / 32 : t.row_lanes;
  t.slots_bytes = ceil_div(t.slot_rows * t.columns * (lanes / t.slot_lanes), 4) * 16;
  t.table_bytes = HeldTiles::kTableRows * ceil_div(p.k / t.slabs, 4) * 16;
  t.kept = may_keep(p, t, p.y_layout == Layout::kNDHWC ? 0 : t.held_bytes);
}

/// Tiles of a cluster for a slab's or group's `bytes`, or 1 where there is to be none.
std::int64_t cluster_tiles(std::int64_t bytes, int compute_capability) {
  const bool wanted = compute_capability >= 90 && bytes > kAloneBesideClusters &&
                      bytes <= kClusterBlocks * kMostClusterTileBytes;
  return wanted ? std::min(kClusterBlocks, ceil_div(bytes, kLeastTileBytes)) : 1;
}

/// \param parts slabs or groups of all samples
/// \param threads of a block
bool clusters_run_at_once(std::int64_t parts, std::int64_t tiles, std::int64_t threads) {
  return parts * tiles * threads <= kClusterThreads;
}

HeldTiles in_tiles_of_runs(const Problem& p, std::int64_t rows, HeldTiles t, std::int64_t tiles,
                           std::int64_t run, bool narrows) {
  t.rows = ceil_div(ceil_div(rows, tiles), run) * run;
  t.tiles = ceil_div(rows, t.rows);
  fill_block(p, t, run, narrows);
  return t;
}

/// Slabs of `rows` rows in `tiles` tiles, or fewer; of whole runs of rows where that takes no thread and no
/// load more.
HeldTiles in_tiles(const Problem& p, std::int64_t rows, const HeldTiles& slabs, std::int64_t tiles,
                   bool narrows) {
  const HeldTiles any = in_tiles_of_runs(p, rows, slabs, tiles, 1, narrows);
  const std::int64_t run = run_rows(p, rows);
  if (run == 1) return any;
  const HeldTiles runs = in_tiles_of_runs(p, rows, slabs, tiles, run, narrows);
  const bool more =
      runs.threads > any.threads || runs.loads > any.loads || runs.shared_bytes() > any.shared_bytes();
  const bool others = runs.kept != any.kept || (runs.tiles == 1) != (any.tiles == 1);
  return more || others ? any : runs;
}

/// Tiles of slabs of `columns` vectors, or nothing where a block cannot hold one.
/// \param rows of a sample
std::optional<HeldTiles> tiles_of(const Problem& p, std::int64_t rows, const HeldTiles& slabs,
                                  int compute_capability) {
  if (slabs.columns > kMaxHeldThreads) return std::nullopt;
  const std::int64_t bytes = rows * slabs.columns * kVectorBytes;  // of a slab
  const std::int64_t groups = std::max<std::int64_t>(p.num_groups / slabs.slabs, 1);
  const std::int64_t of_cluster = std::min(cluster_tiles(bytes, compute_capability), kMostPartials / groups);
  if (of_cluster > 1) {
    HeldTiles t = in_tiles(p, rows, slabs, of_cluster, false);
    t.clusters = t.tiles > 1;
    const bool fits = t.shared_bytes() <= held_shared_limit(compute_capability);
    if (t.clusters && fits && clusters_run_at_once(p.n * t.slabs, t.tiles, t.threads)) return t;
  }
  std::int64_t tiles = 1;
  if (bytes > kAloneBytes) {
    tiles = std::clamp<std::int64_t>(std::min({kWaitingBlocks / (p.n * slabs.slabs),
                                               ceil_div(bytes, kLeastTileBytes), kMostPartials / groups}),
                                     1, kWaitingBlocks);
  }
  for (const bool narrows : {compute_capability >= kTeamsTimed, false}) {
    const HeldTiles t = in_tiles(p, rows, slabs, tiles, narrows);
    if (t.shared_bytes() <= held_shared_limit(compute_capability)) return t;
  }
  return std::nullopt;
}

/// Groups of `values` values in `tiles` tiles, or fewer.
///
/// \param narrows whether teams of more threads than run at once are made narrower
HeldPlanes in_stretches(const Problem& p, std::int64_t values, std::int64_t tiles, bool narrows) {
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  HeldPlanes t;
  t.tile_values = tiles == 1 ? values : ceil_div(ceil_div(values, tiles), lanes) * lanes;
  t.tiles = ceil_div(values, t.tile_values);
  // One more where the stretch does not start on a vector's boundary.
  const std::int64_t vectors = ceil_div(t.tile_values, lanes) + (p.positions() % lanes == 0 ? 0 : 1);
  t.team_threads = 32;
  while (t.team_threads < kMaxHeldThreads && vectors > kTeamLoadsWanted * t.team_threads) t.team_threads *= 2;
  if (t.tiles == 1) {
    const std::int64_t groups = p.n * p.num_groups;
    while (narrows && t.team_threads > 32 && groups * t.team_threads > kTeamsThreadsAtOnce &&
           vectors <= kMostTeamLoads * t.team_threads / 2) {
      t.team_threads /= 2;
    }
    const std::int64_t most = std::max<std::int64_t>(kTeamsThreads / t.team_threads, 1);
    // Rather more blocks than full ones.
    while (t.teams < most && groups >= 2 * t.teams * kWaitingBlocks) t.teams *= 2;
  }
  t.loads = ceil_div(vectors, t.team_threads);
  t.channels = std::min(p.k / p.num_groups, (t.tile_values - 1) / p.positions() + 2);
  t.held_bytes = t.loads * t.threads() * kVectorBytes;
  t.slots_bytes = ceil_div(t.threads() / 32, 4) * 16;
  t.table_bytes = HeldPlanes::kTableRows * t.teams * t.channels * 4;
  const bool one_channel = p.positions() % lanes == 0 || p.k == p.num_groups;  // of a vector
  t.kept = one_channel && t.threads() <= HeldPlanes::kKeptThreads && may_keep(p, t, 0);
  return t;
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
  const std::int64_t lanes = kVectorBytes / size_of(p.dtype);
  HeldTiles whole;
  whole.fold = std::lcm(p.k, lanes) / p.k;
  if (p.positions() % whole.fold != 0) return std::nullopt;
  const std::int64_t rows = p.positions() / whole.fold;
  whole.columns = p.k * whole.fold / lanes;
  // Channels that end within a vector are not transposed.
  if (whole.fold > 1 && p.y_layout != Layout::kNDHWC) return std::nullopt;
  if (whole.fold > 1) return tiles_of(p, rows, whole, compute_capability);

  // Slabs are whole groups and whole vectors, from the narrowest to all channels: of those whose blocks need
  // not wait for all others the widest that are enough of them, or the narrowest; where all wait, the widest
  // that has nearly as many blocks as any. (Of many groups, what a block merges bounds its slab's tiles: of
  // 64 channels in as many groups, 2.4 MB, the widest has 16 blocks; the launch was expected at 10 us, and
  // some 28 lay behind the convolution: perf/NOTES.md, "The family beside its peers".)
  const std::int64_t unit = std::lcm(p.k / p.num_groups, lanes), units = p.k / unit;
  std::optional<HeldTiles> best;
  std::int64_t most_waiting = 0;
  for (std::int64_t width = 1; width <= units; ++width) {
    HeldTiles t;
    t.slabs = units / width;
    t.columns = unit * width / lanes;
    if (units % width != 0 || (t.columns * kVectorBytes < kLeastRowBytes && width < units)) continue;
    const std::optional<HeldTiles> tiles = tiles_of(p, rows, t, compute_capability);
    if (!tiles) continue;
    const auto is_alone = [](const HeldTiles& of) { return of.tiles == 1 || of.clusters; };
    const bool alone_now = best && is_alone(*best), alone = is_alone(*tiles);
    const std::int64_t blocks = p.n * tiles->slabs * tiles->tiles;
    if (!alone) most_waiting = std::max(most_waiting, blocks);
    const bool takes =
        alone ? !alone_now || blocks >= kAloneBlocks : !alone_now && 4 * blocks >= 3 * most_waiting;
    if (takes) best = tiles;
  }
  return best;
}

std::optional<HeldPlanes> held_planes(const Problem& p, int compute_capability) {
  if (!may_be_held(p, kMostPlanesBytes) || p.y_layout != Layout::kNCDHW) return std::nullopt;
  const std::int64_t groups = p.n * p.num_groups;
  const std::int64_t values = p.k / p.num_groups * p.positions(), bytes = values * size_of(p.dtype);
  const std::int64_t of_cluster = cluster_tiles(bytes, compute_capability);
  if (of_cluster > 1) {
    HeldPlanes t = in_stretches(p, values, of_cluster, false);
    t.clusters = t.tiles > 1;
    const bool fits = t.shared_bytes() <= held_shared_limit(compute_capability);
    if (t.clusters && fits && clusters_run_at_once(groups, t.tiles, t.threads())) return t;
  }
  const bool waits = bytes > kAloneBytes && groups < kWaitingBlocks;
  const std::int64_t tiles = waits ? std::min(kWaitingBlocks / groups, ceil_div(bytes, kLeastTileBytes)) : 1;
  // Narrower teams are more of a block, each with a table of its channels.
  for (const bool narrows : {true, false}) {
    if (narrows && compute_capability < kTeamsTimed) continue;
    const HeldPlanes t = in_stretches(p, values, tiles, narrows);
    if (t.shared_bytes() <= held_shared_limit(compute_capability)) return t;
  }
  return std::nullopt;
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
