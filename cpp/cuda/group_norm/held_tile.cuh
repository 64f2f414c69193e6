// SPDX-License-Identifier: Apache-2.0
/// \file
/// What activation_group_norm_held (held_norm.cuh) is given, a block's shared memory, and a thread's part of
/// a tile.
#pragma once

#include <cstdint>

#include "cuda/activation.hpp"
#include "cuda/group_norm/held_moments.cuh"

namespace upconv3d::cuda {

/// Counts are 32-bit: the values are few (core/held_norm.cpp).
template <class T>
struct HeldArgs {
  const T* c;      // [N,Z,P,Q,K] T
  const T* bias;   // [K] T, or null
  const T* gamma;  // [K] T, or null
  const T* beta;   // [K] T, or null
  T* y;            // as c, or in the other order
  float2* part;    // [N,G,tiles] mean, M2
  double eps;      // activation units squared
  TileCounts counts;
  ActivationParams activation;  // the only one
  float parameter;              // activation.parameter
  bool y_planes;                // whether y lies [N,K,Z,P,Q], and is transposed on the way there
  bool clusters;                // HeldTiles::clusters
  int num_groups, slabs;
  int work;         // tiles of all samples and slabs
  int sample_rows;  // of fold positions each
  int tile_rows, columns, row_lanes;
  int row_elements;  // from one row of c to the next
  int fold, slab_channels, slab_groups, group_channels;
  int table_pitch;    // of shared memory's rows of channels
  int slot_shift;     // log2 of the lanes of a slot
  int slot_rows;      // rows of a slot, which with a fold take turns
  bool shares_warps;  // whether the rows of a warp are added up before they take a slot
  bool stores_runs;   // with y_planes: whether a thread stores kRunRows at a time, else one
  int wide;           // with y_planes: columns of a warp's stores, a power of two that divides all
  int group_lanes;    // threads that merge a group, a power of two up to 32
  int held_bytes, slots_bytes;
};

/// Rows that a thread stores at once into planes.
inline constexpr int kRunRows = HeldTiles::kRunRows;

/// A block's shared memory.
struct HeldShared {
  uint4* held;   // [loads,threads] vectors, each of its own thread unless y is transposed; none where kept
  float* slots;  // [slots of a row without fold,fold*slot_rows] sums
  // [slab_channels] each; until the tiles are merged mean is the tile's, scale gamma and shift beta
  float *mean, *scale, *shift, *bias;
  float* slope;  // [slab_channels] of PReLU with a slope per channel
  float* m2;     // [slab_groups] of groups whose mean is to be corrected; of others less than 0

  template <class T>
  __device__ HeldShared(char* base, const HeldArgs<T>& args)
      : held(reinterpret_cast<uint4*>(base)),
        slots(reinterpret_cast<float*>(base + args.held_bytes)),
        mean(reinterpret_cast<float*>(base + args.held_bytes + args.slots_bytes)),
        scale(mean + args.table_pitch),
        shift(scale + args.table_pitch),
        bias(shift + args.table_pitch),
        slope(bias + args.table_pitch),
        m2(slope + args.table_pitch) {}
};

/// A tile, and this thread's part of it.
struct HeldTile {
  int sample, slab, tile;
  int offset;   // elements of c before this thread's first vector
  int step;     // from one of its vectors to the next
  int count;    // of its vectors
  int row;      // of those that the block takes in at once
  int channel;  // of the slab, which its vectors begin with
  int folded;   // position of the row, which they begin with

  template <class T>
  __device__ HeldTile(const HeldArgs<T>& args, unsigned work) {
    const unsigned sample_slab = work / args.counts.tiles, row_lane = threadIdx.x / args.columns;
    tile = work - sample_slab * args.counts.tiles;
    sample = sample_slab / args.slabs;
    slab = sample_slab - sample * args.slabs;
    row = row_lane;
    const unsigned lane = (threadIdx.x - row_lane * args.columns) * kLanes<T>;
    folded = args.fold > 1 ? lane / args.slab_channels : 0;
    channel = lane - folded * args.slab_channels;
    offset = (sample * args.sample_rows + tile * args.tile_rows + row) * args.row_elements +
             slab * args.slab_channels + lane;
    step = args.row_lanes * args.row_elements;
    const int rows = min(args.tile_rows, args.sample_rows - tile * args.tile_rows) - row;
    count = row < args.row_lanes && rows > 0 ? static_cast<unsigned>(rows - 1) / args.row_lanes + 1 : 0;
  }
};

}  // namespace upconv3d::cuda
