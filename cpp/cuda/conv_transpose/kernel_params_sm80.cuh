// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tile shapes, kernel arguments and tile coordinates of conv_transpose_relu_moments_sm80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cutlass/fast_math.h"

#include "core/border_slabs.hpp"
#include "core/sm80_plan.hpp"

namespace upconv3d::cuda {

/// One variant of the kernel.
///
/// \tparam PRODUCTS_ 1, or 3 where operands come as v = hi + lo
/// \tparam BLK_K_    output channels of a tile
/// \tparam BLK_POS_  output positions of a tile
template <class Operand_, int PRODUCTS_, class Stored_, int BLK_K_, int BLK_POS_>
struct ConvTransposeTraitsSm80 {
  using Operand = Operand_;
  using Stored = Stored_;
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int SPLITS = PRODUCTS == 1 ? 1 : 2;
  static constexpr int BLK_K = BLK_K_;
  static constexpr int BLK_POS = BLK_POS_;
  // Input channels of a k-block. Rows of 64 bytes: at 128 x 128, three stages leave room for two blocks in
  // the 100 KB of compute capability 8.6, 8.9 and 12.0.
  static constexpr int BLK_C = 32;

  // A warp's part of the tile. Squares need least shared memory bandwidth: 64 x 64 is 128 accumulators per
  // thread; three products keep twice as many (see multiply_three_products), so their warps take half. So do
  // those of tiles of 64 channels: four warps are wanted.
  static constexpr int WARP_POS = 64;
  static constexpr int WARP_K = PRODUCTS == 1 && BLK_K >= 128 ? 64 : 32;
  static constexpr int WARPS_POS = BLK_POS / WARP_POS;
  static constexpr int WARPS_K = BLK_K / WARP_K;
  static constexpr int THREADS = 32 * WARPS_POS * WARPS_K;
  static_assert(BLK_POS % WARP_POS == 0 && BLK_K % WARP_K == 0 && THREADS >= BLK_K);
  // Eight warps of up to 255 registers fill a multiprocessor. As two blocks of four, one stores while the
  // other multiplies. Half the accumulators leave room for a third.
  static constexpr int BLOCKS_PER_SM = THREADS != 128 ? 1 : WARP_K == 64 || PRODUCTS == 3 ? 2 : 3;

  static constexpr int ROW_BYTES = BLK_C * 2;
  static constexpr int X_BYTES = BLK_POS * ROW_BYTES;
  static constexpr int W_BYTES = BLK_K * ROW_BYTES;
  static constexpr int STAGE_BYTES = SPLITS * (X_BYTES + W_BYTES);
  static constexpr int STAGES = 3;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
  static_assert(SHARED_BYTES <= 99 * 1024, "what a block gets on compute capability 8.6, 8.9 and 12.0");
};

/// A slab of core/border_slabs.hpp in 32 bits.
struct KernelSlabSm80 {
  int first_tile;                     // tiles of positions in the slabs before it
  int positions;                      // of one sample
  cutlass::FastDivmod height, width;  // extents along p and q
  int origin[3], step[3];
  int window[3], dilation[3], taps[3];
  int tap;          // the first tap's index into [T*R*S]
  int tap_step[3];  // from one tap's index to the next's, which is smaller
};

template <class Traits>
struct KernelParamsSm80 {
  const uint4* x[Traits::SPLITS];       // [N,D,H,W,C/8] vectors of 8 operands
  const uint4* w[Traits::SPLITS];       // [T*R*S,K,C/8] vectors of 8 operands
  const typename Traits::Stored* bias;  // [K], or null
  const std::int32_t* unscale_sample;   // [N] exponents, float only
  const std::int32_t* unscale_column;   // [K] exponents, float only
  typename Traits::Stored* a;           // [N,Z,P,Q,K]
  float2* part;                         // [N,tiles,K]
  std::int32_t* counts;                 // [tiles]
  int in[3];                            // D,H,W
  int out[3];                           // Z,P,Q
  int k;                                // output channels
  int vectors;                          // C/8
  cutlass::FastDivmod k_tiles;          // tiles along the channels
  cutlass::FastDivmod tiles;            // tiles along the positions of a sample
  int num_slabs;
  KernelSlabSm80 slabs[kMaxSlabs];
};
// Beyond 4 KB of arguments a launch needs a driver of CUDA 12.1 and compute capability 7.0, and takes longer.
static_assert(kMaxSlabs * sizeof(KernelSlabSm80) <= 3500);

/// Where a block's tile lies.
struct TileSm80 {
  int n;  // sample
  int slab;
  int channel;   // first of BLK_K
  int position;  // first of BLK_POS within the slab
  int valid;     // positions inside the slab, 1 to BLK_POS
  int moment;    // index of its partial moments
};

/// Channel tiles are innermost, so that neighbouring blocks share x; then positions, costliest slab first.
template <class Traits>
__device__ __forceinline__ TileSm80 tile_of_block(const KernelParamsSm80<Traits>& params) {
  TileSm80 tile;
  tile.n = params.tiles.divmod(tile.moment, params.k_tiles.divmod(tile.channel, int(blockIdx.x)));
  tile.channel *= Traits::BLK_K;
  // One comparison per lane instead of a search whose every step waits for the one before.
  static_assert(kMaxSlabs <= 32);
  const int lane = int(threadIdx.x) % 32;
  const bool begun = lane < params.num_slabs && params.slabs[lane].first_tile <= tile.moment;
  tile.slab = __popc(__ballot_sync(0xffffffffu, begun)) - 1;
  const KernelSlabSm80& slab = params.slabs[tile.slab];
  tile.position = (tile.moment - slab.first_tile) * Traits::BLK_POS;
  tile.valid = min(Traits::BLK_POS, slab.positions - tile.position);
  return tile;
}

/// z,p,q of a slab's position, counted within the slab.
__device__ __forceinline__ void index_of(const KernelSlabSm80& slab, int position, int (&index)[3]) {
  index[0] = slab.height.divmod(index[1], slab.width.divmod(index[2], position));
}

}  // namespace upconv3d::cuda
