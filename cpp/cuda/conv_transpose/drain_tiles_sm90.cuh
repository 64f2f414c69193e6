// SPDX-License-Identifier: Apache-2.0
/// \file
/// Helper warps 1 and 2 of conv_transpose_relu_group_norm_sm90, one for each consumer warpgroup.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"

#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/group_norm_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"

namespace upconv3d::cuda {

/// Stores what a warpgroup stages, and takes the moments that it does not.
template <class Traits>
CUTLASS_DEVICE void drain_tiles(KernelParams<Traits> const& params, SharedMemory<Traits> const& shared,
                                int warpgroup) {
  ControlStorage<Traits>& control = *shared.control;
  char const* const staging = shared.staging + warpgroup * Traits::WG_STAGING_BYTES;
  std::int8_t const* const steps = control.step[warpgroup];
  RingCursor slot;
  RingCursor staged{warpgroup, 0};
  // Arriving takes until the stores are written, microseconds. Where the next half tile is staged by then, it
  // comes first: tiles of few k-blocks would else wait for that.
  int* pending = nullptr;
  for (;;) {
    if (!control.tiles.is_full(slot) || !control.staging.is_full(staged)) arrive_stored<0>(pending);
    control.tiles.wait_full(slot);
    TileNote<Traits> const note = control.tile[slot.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.tiles.arrive_empty(slot.slot);
    slot.advance(kTileSlots);
    if (is_end(note)) break;
    TileCoord const coord = noted_tile(params, note);
    KernelSlab<Traits> const& slab = params.slabs[coord.slab];
    for (int round = 0; round < Traits::STAGE_ROUNDS; ++round) {
      if (round > 0 && !control.staging.is_full(staged)) arrive_stored<0>(pending);
      control.staging.wait_full(staged);
      __syncwarp();
      HalfTile const half = Drain<Traits>::half_tile(params, coord, warpgroup, round);
      if (half.valid > 0) {
        if constexpr (Traits::QUANTIZED) {
          Drain<Traits>::write_steps(params, half, steps);
          Drain<Traits>::write_moment_of(params, slab, half);
        }
        Drain<Traits>::store(params, slab, half, staging);
        if (consumers_take_moments(slab, half.valid)) {
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
      if (threadIdx.x % 32 == 0) control.staging.arrive_empty(warpgroup);
      arrive_stored<1>(pending);
      if (!params.linear) pending = params.arrivals + coord.n;
      staged.phase ^= 1;
    }
  }
  arrive_stored<0>(pending);
}

}  // namespace upconv3d::cuda
