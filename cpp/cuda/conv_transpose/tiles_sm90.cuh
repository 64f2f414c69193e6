// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which tile of conv_transpose_relu_group_norm_sm90 lies where, and in which order a launch takes them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"

#include "core/index_math.hpp"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"

namespace upconv3d::cuda {

/// First output channel of a tile.
template <class Traits>
CUTLASS_DEVICE int tile_channel(KernelParams<Traits> const& params, int k_tile) {
  int k_tile_of_group;
  int const group = params.group_k_tiles.divmod(k_tile_of_group, k_tile);
  return group * params.group_k.divisor + k_tile_of_group * Traits::BLK_K;
}

/// The convolution group of output channel `channel`, and the end of that group's channels: what a tile
/// computes beyond is neither its group's nor anyone's.
template <class Traits>
CUTLASS_DEVICE int group_of(KernelParams<Traits> const& params, int channel) {
  return params.group_k.div(channel);
}
template <class Traits>
CUTLASS_DEVICE int channel_end(KernelParams<Traits> const& params, int channel) {
  return (group_of(params, channel) + 1) * params.group_k.divisor;
}

/// Where tile `local` of a sample lies. Slab by slab, channels innermost, so that neighbours share x in L2.
template <class Traits>
CUTLASS_DEVICE TileCoord tile_of_sample(KernelParams<Traits> const& params, int n, int local) {
  TileCoord coord;
  coord.n = n;
  coord.slab = 0;
  while (coord.slab + 1 < params.tile_slabs && local >= params.slabs[coord.slab + 1].first_tile) ++coord.slab;
  int k_tile;
  int const pos_tile = params.k_tiles.divmod(k_tile, local - params.slabs[coord.slab].first_tile);
  coord.channel = tile_channel(params, k_tile);
  coord.position = pos_tile * Traits::BLK_POS;
  return coord;
}

/// The slab whose positions consumer warpgroup `warpgroup` computes of a tile of slab `slab`.
template <class Traits>
CUTLASS_DEVICE int slab_of_warpgroup(KernelParams<Traits> const& params, int slab, int warpgroup) {
  return Traits::PAIRED ? slab + warpgroup * params.tile_slabs : slab;
}

/// Which tile one is, sample by sample: the inverse of tile_of_sample.
template <class Traits>
CUTLASS_DEVICE int index_of_tile(KernelParams<Traits> const& params, TileCoord const& coord) {
  int channel_of_group;
  int const group = params.group_k.divmod(channel_of_group, coord.channel);
  int const k_tile = group * params.group_k_tiles.divisor + channel_of_group / Traits::BLK_K;
  int const pos_tile = coord.position / Traits::BLK_POS;
  int const of_sample = params.slabs[coord.slab].first_tile + pos_tile * params.k_tiles.divisor + k_tile;
  return coord.n * params.tiles_per_sample.divisor + of_sample;
}

/// Which tile has place `local` of sample n in an order of windows: of neighbouring position tiles of all
/// slabs, so that phases find x in L2, the last few of the launch taken as one, so that its end is even too.
/// Slabs of fewer tiles than the longest leave places empty: their position lies beyond the slab.
template <class Traits>
CUTLASS_DEVICE TileCoord tile_of_windows(KernelParams<Traits> const& params, int n, int local) {
  TileCoord coord;
  coord.n = n;
  int k_tile;
  int window = params.order_per_window.divmod(local, local);
  if (n == params.samples - 1 && window >= params.first_end_window) {
    local += (window - params.first_end_window) * params.order_per_window.divisor;
    window = params.first_end_window;
    coord.slab = params.order_per_end_slab.divmod(local, local);
  } else {
    coord.slab = params.order_per_slab.divmod(local, local);
  }
  int const pos_tile = window * params.window_tiles + params.k_tiles.divmod(k_tile, local);
  coord.channel = tile_channel(params, k_tile);
  coord.position = pos_tile * Traits::BLK_POS;
  return coord;
}

/// Which tile has place `place` of the launch order: sample by sample, so that a sample can be normalized
/// while the next is computed. Within one, slabs with the costliest first, so that the end of the launch is
/// even; or windows.
template <class Traits>
CUTLASS_DEVICE TileCoord tile_of_launch(KernelParams<Traits> const& params, int place) {
  int local;
  int const n = params.order_per_sample.divmod(local, place);
  return params.window_tiles == 0 ? tile_of_sample(params, n, local) : tile_of_windows(params, n, local);
}

/// Whether a block may keep the tile if it is its last one: items of the sample are shares of tiles.
template <class Traits>
CUTLASS_DEVICE bool may_keep(KernelParams<Traits> const& params, TileCoord const& tile) {
  return Traits::KEEPS_TILE && tile.n >= params.first_kept;
}

/// Of the late tiles, consumers take the moments of half tiles of at least this many positions, too: of
/// fewer, the drain warps are done soon.
inline constexpr int kLeastLatePositions = 64;

/// Whether the consumers take a half tile's moments, as they stage it; else its drain warp does, from what is
/// staged: of a whole one in the time of 11 k-blocks, which nothing hides behind the last tiles.
///
/// \param place of the tile in launch order
/// \param valid positions inside the slab
template <class Traits>
CUTLASS_DEVICE bool consumers_take_moments(KernelParams<Traits> const& params, KernelSlab<Traits> const& slab,
                                           int place, int valid) {
  if (!Traits::TAKES_ROW_MOMENTS) return false;
  bool const late = !Traits::QUANTIZED && place >= params.first_late;
  return (slab.row_moments && valid >= Traits::STAGED_POS) ||
         (late && valid >= min(kLeastLatePositions, Traits::STAGED_POS));
}

/// What it takes to multiply the tile at `coord`, which has place `place` of the launch order.
template <class Traits>
CUTLASS_DEVICE TileWork tile_work(KernelParams<Traits> const& params, TileCoord const& coord, int place) {
  KernelSlab<Traits> const& slab = params.slabs[coord.slab];
  return {coord, place, slab.positions - coord.position, slab.x_loads, slab.shared_taps, slab.shared_rows};
}

/// The loading thread's note of the tile at `coord`, which has place `place` of the launch order.
template <class Traits>
CUTLASS_DEVICE TileNote<Traits> note_tile(KernelParams<Traits> const& params, TileCoord const& coord,
                                          int place) {
  if constexpr (Traits::TELLS_TILES) {
    return tile_work(params, coord, place);
  } else {
    return place;
  }
}

/// The note behind the last tile.
template <class Traits>
CUTLASS_DEVICE TileNote<Traits> note_end() {
  if constexpr (Traits::TELLS_TILES) {
    TileWork end{};
    end.n = -1;
    return end;
  } else {
    return -1;
  }
}

/// A note that the compiler knows to be the same for a whole warp. Else it takes the loops over k-blocks for
/// such that lanes may part in, guards each one, and moves every descriptor by itself: with three products 3
/// to 8 % of a block (perf/NOTES.md, "Descriptors in uniform registers").
CUTLASS_DEVICE int uniform_note(int place) {
  return __shfl_sync(0xffffffffu, place, 0);
}
CUTLASS_DEVICE TileWork uniform_note(TileWork const& work) {
  TileWork same;
  same.n = uniform_note(work.n);
  same.slab = uniform_note(work.slab);
  same.channel = uniform_note(work.channel);
  same.position = uniform_note(work.position);
  same.place = uniform_note(work.place);
  same.positions = uniform_note(work.positions);
  same.x_loads = uniform_note(work.x_loads);
  same.shared_taps = uniform_note(work.shared_taps);
  same.shared_rows = uniform_note(work.shared_rows);
  return same;
}

/// The tile of a note that is not the end.
template <class Traits>
CUTLASS_DEVICE TileWork noted_tile(KernelParams<Traits> const& params, TileNote<Traits> const& note) {
  if constexpr (Traits::TELLS_TILES) {
    return note;
  } else {
    return tile_work(params, tile_of_launch(params, note), note);
  }
}

/// Windows of the launch order that are taken as one at its end. Of a single window the last long tile would
/// begin when all else is nearly done. Four or eight gained 1 to 2 %, two nothing.
inline constexpr std::int64_t kEndWindows = 4;

/// The order in windows of `window_tiles` position tiles; returns its places per sample.
///
/// \param longest position tiles of the longest slab
/// \param k_tiles of all groups
template <class Traits>
std::int64_t fill_windows(std::int64_t window_tiles, std::int64_t longest, std::int64_t k_tiles,
                          KernelParams<Traits>& to) {
  const std::int64_t windows = (longest + window_tiles - 1) / window_tiles;
  const std::int64_t end_windows = std::min(windows, kEndWindows);
  const std::int64_t per_slab = window_tiles * k_tiles;
  const std::int64_t per_window = per_slab * to.tile_slabs;
  to.window_tiles = static_cast<int>(window_tiles);
  to.order_per_slab = cutlass::FastDivmod(static_cast<int>(per_slab));
  to.order_per_end_slab = cutlass::FastDivmod(static_cast<int>(end_windows * per_slab));
  to.order_per_window = cutlass::FastDivmod(static_cast<int>(per_window));
  to.first_end_window = static_cast<int>(windows - end_windows);
  return per_window * windows;
}

/// KernelParams::item_fold: of few output channels as many positions as a tile has room for. Else most of
/// each item were empty, and a warp's lanes with it.
template <class Traits>
int item_fold(const Problem& problem) {
  if (Traits::QUANTIZED || problem.groups != 1) return 1;
  std::int64_t fold = std::max<std::int64_t>(Traits::BLK_K / problem.k, 1);
  while (problem.positions() % fold != 0) --fold;
  return static_cast<int>(fold);
}

/// KernelParams::first_late: as many tiles before the end as an H200 has multiprocessors. By place, not by
/// which block comes to which tile, nor by how many blocks there are: moments must not depend on either.
template <class Traits>
int first_late_place(const KernelParams<Traits>& of) {
  constexpr std::int64_t kLateTiles = 132;
  const std::int64_t places =
      ceil_div(kLateTiles * of.order_per_sample.divisor, std::int64_t{of.tiles_per_sample.divisor});
  return static_cast<int>(std::max<std::int64_t>(of.order_size - places, 0));
}

/// Index in [Z,P,Q] of a slab's position.
template <class Traits>
CUTLASS_DEVICE int pixel_of(KernelParams<Traits> const& params, KernelSlab<Traits> const& slab,
                            int position) {
  return slab.pixel(params.out, position);
}

}  // namespace upconv3d::cuda
