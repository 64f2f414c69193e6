// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_held_sm90 is compiled for (traits), what a launch hands it (parameters), and how it
/// lays out shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

#include "core/held_tiles.hpp"
#include "cuda/activation.hpp"
#include "cuda/conv_transpose/staged_tile_sm90.cuh"
#include "cuda/conv_transpose/warpgroup_tile_sm90.cuh"

namespace upconv3d::cuda {

/// \tparam kWInPlace w is [C,T,R,S,K], as PyTorch's channels_last_3d leaves it
/// \tparam BLK_POS_  output positions of a tile
template <class Operand_, class Output_, bool kWInPlace, int BLK_POS_>
struct HeldTraitsSm90
    : WarpgroupTileSm90<Operand_, kWInPlace, int(kHeldChannels), BLK_POS_, int(kBlockInputs)> {
  using Operand = Operand_;
  using Output = Output_;  // y, bias, gamma, beta, and before(conv) while it is held
  static constexpr bool W_IN_PLACE = kWInPlace;
  static_assert(std::is_same_v<Operand, Output> && sizeof(Output) == 2, "operands without scales");
  static constexpr int BLK_K = int(kHeldChannels);  // output channels of a tile
  static constexpr int BLK_POS = BLK_POS_;
  static constexpr int BLK_C = int(kBlockInputs);  // input channels of a k-block: a swizzled row

  static constexpr int CONSUMER_WARPS = 4;                   // a warpgroup, which multiplies
  static constexpr int THREADS = 32 * (CONSUMER_WARPS + 1);  // the last warp loads

  static constexpr HeldShape SHAPE = held_shape(BLK_POS, int(sizeof(Operand)), int(sizeof(Output)));
  static_assert(SHAPE.stage_bytes == HeldTraitsSm90::W_BYTES + HeldTraitsSm90::X_BYTES);
};

/// What a phase of the stride loads.
struct HeldSlab : SlabGeometry {
  int corner[3];                  // first window's coordinates in x
  int dilation[3];                // of x's coordinates, from one tap to the next
  int tap[3];                     // the first tap along T,R,S: the largest
  int tap_step[3];                // from one tap to the next, downwards
  int c_begin;                    // first k-block of input channels
  int c_blocks, taps_w, taps_h;   // k-blocks of those; taps along S, R
  int k_blocks;                   // of a tile
  int first_moment;               // of a sample's partial moments
  cutlass::FastDivmod pos_tiles;  // of a sample
};

/// What normalizes a norm group: mean, rest of the mean, 1 / deviation.
using HeldRow = float4;

/// Barriers and small exchanges, at the end of shared memory.
template <class Traits>
struct HeldControl {
  RingBarriers<kMaxHeldStages> stages;
  double sums[4][2];                         // of a norm group, by warps: sum, sum of squares
  HeldRow rows[Traits::BLK_K];               // of the tile's norm groups
  alignas(16) float maps[2][Traits::BLK_K];  // scale, shift of its channels
};

template <class Traits>
struct HeldParams {
  using Output = typename Traits::Output;
  CUtensorMap x[kMaxSlabs];  // just the input that a slab reads
  CUtensorMap w;
  HeldSlab slabs[kMaxSlabs];
  int first_tile[kMaxSlabs];  // of a slab's, among all samples' tiles
  int num_slabs;
  int tiles;                    // of all slabs and samples
  int slots, stages;            // tiles held, and k-blocks on their way
  cutlass::FastDivmod k_tiles;  // ceil(K / BLK_K)
  int kernel[3];                // T,R,S
  int out[3];                   // Z,P,Q
  int positions;                // Z*P*Q
  int k;                        // output channels K
  Output* y;                    // [N,Z,P,Q,K]
  Output const* bias;           // [K], or null
  Output const* gamma;          // [K], or null for 1
  Output const* beta;           // [K], or null for 0
  double inverse_count;         // 1 / values of a norm group
  double eps;                   // activation units squared
  float floor;                  // of conv + bias: 0 for ReLU, -infinity for none
  ActivationParams after;       // the normalization, piecewise linear
  float4* part;                 // [N,moments,K/granule] mean, M2, count, -
  int moments;                  // partial moments of a sample along its positions
  int granule_shift;
  cutlass::FastDivmod group_channels;  // K/G
  cutlass::FastDivmod group_granules;  // K/G/granule
  int groups;                          // G
  int groups_of_all;                   // N*G
  HeldRow* table;                      // [N,G], where each block merges some for all; else null
  // Operands, and how much of them each block brings into L2 at first, in 16 bytes: 0 where they are too
  // much.
  char const* operands[2];
  std::int64_t operand_bytes[2];
  int prefetched_bytes[2];
};

/// A tile's place.
struct HeldTile {
  int slab;
  int n;         // sample
  int channel;   // first output channel
  int position;  // first position within the slab
};

/// The block's tile of round `round`, or one beyond the last: in turn, back and forth, since slabs come with
/// the costliest first; but with the same channels, whose norm groups the block then merges once, as far as
/// blocks are a multiple of channel tiles.
template <class Traits>
CUTLASS_DEVICE int held_tile_index(HeldParams<Traits> const& params, int round) {
  int const blocks = int(gridDim.x), block = int(blockIdx.x);
  int k_tile;
  int const of_channels = params.k_tiles.divmod(k_tile, block);
  int const last = params.k_tiles.div(blocks) - 1 - of_channels;
  bool const turns = round % 2 != 0 && last >= 0;
  return round * blocks + (turns ? last * params.k_tiles.divisor + k_tile : block);
}

/// Slab by slab, of all samples; channels innermost, so that neighbours share x in L2.
template <class Traits>
CUTLASS_DEVICE HeldTile held_tile(HeldParams<Traits> const& params, int index) {
  HeldTile tile;
  tile.slab = 0;
  while (tile.slab + 1 < params.num_slabs && index >= params.first_tile[tile.slab + 1]) ++tile.slab;
  HeldSlab const& slab = params.slabs[tile.slab];
  int k_tile, pos_tile;
  int const of_sample = params.k_tiles.divmod(k_tile, index - params.first_tile[tile.slab]);
  tile.n = slab.pos_tiles.divmod(pos_tile, of_sample);
  tile.channel = k_tile * Traits::BLK_K;
  tile.position = pos_tile * Traits::BLK_POS;
  return tile;
}

/// Calls visit(round, tile, is_last) for each of the block's tiles.
template <class Traits, class Visit>
CUTLASS_DEVICE void for_each_held_tile(HeldParams<Traits> const& params, Visit const& visit) {
  CUTLASS_PRAGMA_NO_UNROLL
  for (int round = 0;; ++round) {
    int const index = held_tile_index(params, round);
    if (index >= params.tiles) return;
    visit(round, held_tile(params, index), held_tile_index(params, round + 1) >= params.tiles);
  }
}

/// The parts of shared memory.
template <class Traits>
struct HeldShared {
  char* stages;  // [stages] w (BLK_K,BLK_C) and x (BLK_POS,BLK_C) of a k-block, swizzled
  char* tiles;   // [slots] staged as StagedTile does
  HeldControl<Traits>* control;

  CUTLASS_DEVICE HeldShared(char* base, HeldParams<Traits> const& params) {
    static_assert(sizeof(HeldControl<Traits>) <= kHeldControlBytes);
    stages = base;
    tiles = base + params.stages * Traits::SHAPE.stage_bytes;
    control = reinterpret_cast<HeldControl<Traits>*>(base + Traits::SHAPE.shared_bytes - kHeldControlBytes);
  }

  /// Where the block's tile of round `round` is held.
  CUTLASS_DEVICE char* tile(HeldParams<Traits> const& params, int round) const {
    return tiles + min(round, params.slots - 1) * Traits::SHAPE.tile_bytes;
  }
};

}  // namespace upconv3d::cuda
