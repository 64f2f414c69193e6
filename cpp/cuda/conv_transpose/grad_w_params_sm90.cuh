// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_grad_w_sm90 is compiled for (traits), what a launch hands it (parameters), and how it
/// lays out shared memory.
#pragma once

#include <cstdint>

// kernel_hardware_info.hpp first: sm90 headers of CUTLASS 4.2 use it without including it.
#include "cutlass/kernel_hardware_info.hpp"

#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/collective/builders/sm90_common.inl"

#include "core/grad_w_plan.hpp"
#include "cuda/conv_transpose/grad_w_partials.cuh"
#include "cuda/conv_transpose/ring_sm90.cuh"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

template <class Operand_, int PRODUCTS_, int ROW_CHUNKS_, int COLUMN_CHUNKS_>
struct GradWTraitsSm90 {
  using Operand = Operand_;
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int SPLITS = PRODUCTS == 3 ? 2 : 1;  // hi, or hi and lo
  static_assert(PRODUCTS == 1 || PRODUCTS == 3);
  static constexpr int ROW_CHUNKS = ROW_CHUNKS_;        // of a tile
  static constexpr int COLUMN_CHUNKS = COLUMN_CHUNKS_;  // of a tile
  static_assert(ROW_CHUNKS == 1 || ROW_CHUNKS == 2, "wgmma has 64 rows; two consumer warpgroups");
  static constexpr int CHUNKS = ROW_CHUNKS + COLUMN_CHUNKS;
  static constexpr int WG_COLUMN_CHUNKS = warpgroup_columns(ROW_CHUNKS, COLUMN_CHUNKS);

  static constexpr int CHUNK = int(kGradWChunk);
  static constexpr int BLK_POS = int(kGradWBlock);
  static constexpr int WG_COLUMNS = WG_COLUMN_CHUNKS * CHUNK;

  // Positions are gemm_k and channels lie innermost: both operands are MN-major.
  using MmaOp =
      decltype(cute::GMMA::ss_op_selector<Operand, Operand, float,
                                          cute::Shape<cute::_64, cute::Int<WG_COLUMNS>, cute::Int<BLK_POS>>,
                                          cute::GMMA::Major::MN, cute::GMMA::Major::MN>());
  using TiledMma = decltype(cute::make_tiled_mma(MmaOp{}));  // of one warpgroup

  // A chunk is what one TMA load brings: 64 positions of 64 channels, 128 bytes each.
  using SmemAtom = cute::GMMA::Layout_MN_SW128_Atom<Operand>;
  using SmemLayoutRows =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<CHUNK>, cute::Int<BLK_POS>>{},
                                   cute::Step<cute::_2, cute::_1>{}));  // (CHUNK,BLK_POS)
  using SmemLayoutColumns =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<WG_COLUMNS>, cute::Int<BLK_POS>>{},
                                   cute::Step<cute::_2, cute::_1>{}));  // (WG_COLUMNS,BLK_POS)

  static constexpr int CHUNK_BYTES = CHUNK * BLK_POS * int(sizeof(Operand));
  static constexpr int SPLIT_BYTES = CHUNKS * CHUNK_BYTES;  // hi or lo: rows' chunks, then columns'
  static constexpr int STAGE_BYTES = SPLITS * SPLIT_BYTES;
  static constexpr int kControlBytes = 1024;
  static constexpr int kMaxSharedBytes = 227 * 1024;  // of a block on arch 90
  static constexpr int STAGES = (kMaxSharedBytes - kControlBytes) / STAGE_BYTES;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + kControlBytes;

  static constexpr int THREADS = 3 * 128;  // a warpgroup that loads, two that multiply
  // A launch takes 168 registers for each of 384 threads; what the loading warpgroup gives back, the others
  // may take for accumulators and addresses.
  static constexpr int LOADER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = 224;
  static_assert(128 * LOADER_REGISTERS + 256 * CONSUMER_REGISTERS <= 168 * THREADS,
                "else the launch waits for registers forever");
};

/// Warps that multiply.
inline constexpr int kGradWConsumerWarps = 8;

/// An operand as the loading thread sees it.
struct GradWOperandParams {
  CUtensorMap map[2];                  // hi, lo
  int step[3], lower[3];               // a position's coordinate is position * step + lower
  int dilation[3];                     // from one tap to the next, 0 along axes of one tap
  cutlass::FastDivmod taps_s, taps_r;  // of this operand
  cutlass::FastDivmod channel_chunks;
  int chunk_step;  // elements of a row from one chunk of channels to the next
  int chunks;      // taps and channels, channels innermost
};

struct GradWKernelParams {
  GradWOperandParams rows, columns;
  cutlass::FastDivmod width, height, depth;  // of a sample's positions
  int k_blocks;                              // of all samples
  int splits;
  cutlass::FastDivmod column_tiles;
  cutlass::FastDivmod tiles;
  int units;        // tiles * splits
  float4* partial;  // [splits,tiles] accumulators of a tile in the order of its threads
};

/// A tile and the k-blocks of a split.
struct GradWUnit {
  int row_chunk, column_chunk;  // the tile's first
  int begin, end;               // k-blocks

  /// Tiles of a split one after the other, so that those computed at a time share what L2 holds.
  template <class Traits>
  static CUTLASS_DEVICE GradWUnit make(GradWKernelParams const& params, int index) {
    int tile, column_tile;
    int const split = params.tiles.divmod(tile, index);
    int const row_tile = params.column_tiles.divmod(column_tile, tile);
    auto const first_block = [&](int i) { return int(std::int64_t(i) * params.k_blocks / params.splits); };
    return {row_tile * Traits::ROW_CHUNKS, column_tile * Traits::COLUMN_CHUNKS, first_block(split),
            first_block(split + 1)};
  }
};

/// Barriers, at the end of shared memory.
template <class Traits>
struct GradWControl {
  RingBarriers<Traits::STAGES> stages;
};

}  // namespace upconv3d::cuda
