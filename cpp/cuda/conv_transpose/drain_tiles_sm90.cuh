// SPDX-License-Identifier: Apache-2.0
/// \file
/// Helper warps 1 and 2 of conv_transpose_relu_group_norm_sm90, one for each consumer warpgroup.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm90_tma.hpp"

#include "core/channels.hpp"
#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/group_norm_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/tiles_sm90.cuh"

namespace upconv3d::cuda {

/// Items that a drain warp normalizes in the memory of the half tile that it stored, while the next tile is
/// multiplied, which is the one noted in `slot`: no more than it will be done with by then.
template <class Traits>
CUTLASS_DEVICE int items_beside_next(KernelParams<Traits> const& params,
                                     ControlStorage<Traits> const& control, RingCursor const& slot) {
  if (!control.tiles.is_full(slot)) return 0;
  control.tiles.wait_full(slot);  // by every lane, before it reads
  TileNote<Traits> const note = control.tile[slot.slot];
  if (is_end(note)) return 0;
  TileWork const next = noted_tile(params, note);
  // In k-blocks: until the first item is here, and the warp ready for the tile again; to normalize one.
  constexpr int kMargin = 8, kItem = 4, kMost = 4;
  static_assert(Traits::ITEM_BUFFERS * Traits::ITEM_BYTES <= Traits::WG_STAGING_BYTES);
  int const k_blocks = next.x_loads * next.shared_taps * Traits::BLK_C / int(kBlockInputs);
  return max(min((k_blocks - kMargin) / kItem, kMost), 0);
}

/// Where the drain warps have moments to take of all tiles, and no time for more.
struct NoGroupNormWorker {
  template <class... Any>
  CUTLASS_DEVICE explicit NoGroupNormWorker(Any const&...) {}
  CUTLASS_DEVICE int held_item() const { return -1; }
  CUTLASS_DEVICE void run_ready(char*, int) {}
  CUTLASS_DEVICE void run(char*) {}
};

/// Whether a block keeps a tile where it is staged: one that may be kept, with none behind it at `next`.
template <class Traits>
CUTLASS_DEVICE bool keeps_tile(KernelParams<Traits> const& params, ControlStorage<Traits> const& control,
                               TileCoord const& tile, RingCursor const& next) {
  if (!may_keep(params, tile)) return false;
  // Not for long: the next tile is asked for before all of this one is loaded.
  control.tiles.wait_full(next);
  TileNote<Traits> const note = control.tile[next.slot];
  return is_end(note);
}

/// Stores what a warpgroup stages and takes the moments that it does not; between two tiles, and in the end,
/// normalizes.
template <class Traits>
CUTLASS_DEVICE void drain_tiles(KernelParams<Traits> const& params, SharedMemory<Traits> const& shared,
                                int warpgroup) {
  ControlStorage<Traits>& control = *shared.control;
  char* const memory = shared.staging + warpgroup * Traits::WG_STAGING_BYTES;
  char const* const staging = memory;
  std::int8_t const* const steps = control.step[warpgroup];
  RingCursor slot;
  RingCursor staged{warpgroup, 0};
  using Worker =
      std::conditional_t<Traits::TAKES_ROW_MOMENTS, GroupNormWorker<Traits, false>, NoGroupNormWorker>;
  Worker worker(params, control, control.items[1 + kConsumerWarps + warpgroup]);
  // Arriving takes until the stores are written, microseconds. Where the next half tile is staged by then, it
  // comes first: tiles of few k-blocks would else wait for that.
  int* pending = nullptr;
  bool keeps = false;
  for (;;) {
    if (!control.tiles.is_full(slot) || !control.staging.is_full(staged)) arrive_stored<0>(pending);
    control.tiles.wait_full(slot);
    TileNote<Traits> const note = control.tile[slot.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.tiles.arrive_empty(slot.slot);
    slot.advance(kTileSlots);
    if (is_end(note)) break;
    TileWork const tile = noted_tile(params, note);
    KernelSlab<Traits> const& slab = params.slabs[slab_of_warpgroup(params, tile.slab, warpgroup)];
    keeps = keeps_tile(params, control, tile, slot);
    if (keeps) {
      if (threadIdx.x % 32 == 0) {
        if (warpgroup == 0) params.kept[blockIdx.x] = 1 + index_of_tile(params, tile);
        control.handed_item[warpgroup] = worker.held_item();
      }
      __syncwarp();
      KeptTileBarrier::arrive();
    }
    for (int round = 0; round < Traits::STAGE_ROUNDS; ++round) {
      if (round > 0 && !control.staging.is_full(staged)) arrive_stored<0>(pending);
      control.staging.wait_full(staged);
      __syncwarp();
      HalfTile const half = Drain<Traits>::half_tile(params, tile, warpgroup, round);
      if (half.valid > 0) {
        if constexpr (Traits::QUANTIZED) {
          Drain<Traits>::write_steps(params, half, steps);
          Drain<Traits>::write_moment_of(params, half);
        }
        if (!keeps) Drain<Traits>::store(params, half, staging);
        if (consumers_take_moments(params, slab, tile.place, half.valid)) {
          Drain<Traits>::write_row_moments(params, half, control.row[warpgroup]);
        } else if (!params.linear) {
          Drain<Traits>::moments(params, half, staging, steps);
        }
      }
      if (threadIdx.x % 32 == 0) {
        cute::tma_store_arrive();   // one group of stores per half tile, also where there are none
        cute::tma_store_wait<0>();  // read from shared memory
      }
      __syncwarp();
      bool const normalizes = params.drains_normalize && slab.row_moments;  // so there is one round
      int const items = normalizes ? items_beside_next(params, control, slot) : 0;
      auto const release = [&] {
        if (threadIdx.x % 32 == 0) control.staging.arrive_empty(warpgroup);
      };
      if (items == 0) release();
      arrive_stored<1>(pending);
      if (!params.linear) pending = params.arrivals + tile.n;
      if (items > 0) {
        arrive_stored<0>(pending);
        worker.run_ready(memory, items);
        release();
      }
      staged.phase ^= 1;
    }
  }
  arrive_stored<0>(pending);
  // A tile that is kept lies in the memory that items would come to.
  if (params.normalizes && !keeps) worker.run(memory);
}

}  // namespace upconv3d::cuda
