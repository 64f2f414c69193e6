// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_scaled_operands: float32 x and w to float16 operands, with the scales, in one launch.
///
/// Blocks wait for each other, so the launch is cooperative: once for cleared accumulators, once for the
/// maxima of x and w, and where those of x reject the assumed scales until chosen ones are known. Maxima do
/// not depend on their order: the same bits with any number of blocks.
///
/// x comes before w, so that what is read of w last is still at hand when the maxima are known.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/ndhwc_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/scaled_weight_tile.cuh"
#include "cuda/layout/verdict.cuh"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {
namespace {

/// Blocks that an SM holds: as many as have registers without spills. Their loads, and those that L2 has been
/// asked for, are 192 KB.
template <bool kChannelsFirst, int kVector>
inline constexpr int kBlocksPerSm = kChannelsFirst || kVector == 4 ? 3 : 2;

struct ScaledOperandsArgs {
  WeightArgs weight;  // columns apart: where w has no tiles, and for chosen scales
  ScaledWeightArgs weight_lines;
  InputArgs input;
  VerdictArgs verdict;
  std::uint32_t apart;       // blocks of columns of w for the assumed scales; 0: w goes by tiles
  std::uint32_t input_end;   // apart, and tiles of x behind them
  std::uint32_t chosen_end;  // all blocks of columns of w, and tiles of x behind them
  ZeroRegion accumulators;   // those of scales
  ZeroRegion region;         // the caller's
};

/// Tile of x of a work index; x's end first: what the convolution reads first is then what L2 still holds.
__device__ inline InputTile tile_of(const ScaledOperandsArgs& args, std::uint32_t index) {
  return input_tile(args.input, args.input_end - 1 - index);
}

/// Asks L2 for what a work index reads, unless that is columns apart.
template <bool kChannelsFirst, int kVector>
__device__ inline void prefetch(const ScaledOperandsArgs& args, std::uint32_t index) {
  if (index < args.apart) return;
  if (index < args.input_end) {
    prefetch_input_tile<kChannelsFirst, kVector>(args.input, tile_of(args, index));
  } else if (index - args.input_end < args.weight_lines.tiles) {
    const InputArgs& lines = args.weight_lines.weight.lines;
    prefetch_ncdhw_tile(lines, input_tile(lines, index - args.input_end));
  }
}

/// The block's share of everything that assumed scales allow before w's maxima are known: columns apart, then
/// tiles of x, then the measuring of w's tiles.
///
/// \param values of the last tile of w
/// \return its index, or that of none
template <bool kChannelsFirst, int kVector, int kProducts>
__device__ inline std::uint32_t pack_assumed(const ScaledOperandsArgs& args, float (&values)[8][4]) {
  __shared__ std::uint32_t largest[kTilePositions];
  if (threadIdx.x < kTilePositions) largest[threadIdx.x] = 0;
  __syncthreads();
  std::uint32_t i = blockIdx.x;
  for (; i < args.input_end; i += gridDim.x) {
    prefetch<kChannelsFirst, kVector>(args, i + gridDim.x);
    if (i < args.apart) {
      pack_weight_columns<Scaling::kAssumed, kProducts>(args.weight, i);
    } else {
      pack_input_tile<kChannelsFirst, Scaling::kAssumed, kVector, kProducts>(args.input, tile_of(args, i));
    }
    __syncthreads();  // the next turn uses the same shared memory
  }
  std::uint32_t last = args.weight_lines.tiles;
  for (; i - args.input_end < args.weight_lines.tiles; i += gridDim.x) {
    prefetch<kChannelsFirst, kVector>(args, i + gridDim.x);
    last = i - args.input_end;
    measure_weight_tile(args.weight_lines, last, largest, values);
  }
  return last;
}

/// The tiles of w that this block measured, the last one first.
template <int kProducts>
__device__ inline void pack_measured(const ScaledOperandsArgs& args, std::uint32_t last,
                                     float (&values)[8][4]) {
  const InputArgs& lines = args.weight_lines.weight.lines;
  for (std::uint32_t tile = last; tile < args.weight_lines.tiles; tile -= gridDim.x) {
    if (tile != last) {
      __syncthreads();  // the tile before uses the same shared memory
      const int thread = thread_of_block();
      load_weight_tile<false>(lines, ChannelTile(lines, input_tile(lines, tile), thread / 32), thread % 32,
                              values);
    }
    pack_scaled_weight_tile<kProducts>(args.weight_lines, tile, args.weight.assumed_channel, values);
  }
}

/// The block's share of everything once more, by chosen scales.
template <bool kChannelsFirst, int kVector, int kProducts>
__device__ inline void pack_chosen(const ScaledOperandsArgs& args) {
  for (std::uint32_t i = blockIdx.x; i < args.chosen_end; i += gridDim.x) {
    if (i < args.weight.column_blocks) {
      pack_weight_columns<Scaling::kChosen, kProducts>(args.weight, i);
    } else {
      const InputTile tile = input_tile(args.input, i - args.weight.column_blocks);
      pack_input_tile<kChannelsFirst, Scaling::kChosen, kVector, kProducts>(args.input, tile);
    }
    __syncthreads();  // the next turn uses the same shared memory
  }
}

template <bool kChannelsFirst, int kVector, int kProducts>
__global__ void __launch_bounds__(kInputThreads, kBlocksPerSm<kChannelsFirst, kVector>)
    pack_scaled_operands(const __grid_constant__ ScaledOperandsArgs args) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  prefetch<kChannelsFirst, kVector>(args, blockIdx.x);
  clear(args.accumulators);
  clear(args.region);
  grid.sync();
  float values[8][4];
  const std::uint32_t last = pack_assumed<kChannelsFirst, kVector, kProducts>(args, values);
  grid.sync();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kInputThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kInputThreads + thread_of_block();
  if (args.verdict.misfits == nullptr || __ldcg(args.verdict.misfits) == 0) {
    if (args.verdict.misfits != nullptr) write_assumed_scales<kProducts>(args.verdict, thread, threads);
    if (args.weight_lines.tiles == 0) return;
    write_columns(args.weight_lines, args.weight.unscale_column, args.weight.k, args.weight.assumed_channel,
                  thread, threads);
    pack_measured<kProducts>(args, last, values);
    return;
  }
  for (std::int64_t n = blockIdx.x; n < args.verdict.samples; n += gridDim.x) choose_sample(args.verdict, n);
  grid.sync();
  choose_channels(args.verdict, thread, threads);
  grid.sync();
  pack_chosen<kChannelsFirst, kVector, kProducts>(args);
}

/// Multiprocessors of the current device.
int sm_count() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
  return count;
}

template <bool kChannelsFirst, int kVector, int kProducts>
void launch(const PackParams& params, ZeroRegion accumulators, cudaStream_t stream) {
  constexpr std::int64_t kSectorColumns = 8;  // 32 bytes of float
  const int sms = sm_count();
  ScaledOperandsArgs args{};
  args.weight = weight_args(params, kSectorColumns, sms);
  if (params.w == nullptr) args.weight.column_blocks = 0;
  args.weight_lines = scaled_weight_args(params);
  args.apart = args.weight_lines.tiles > 0 ? 0 : args.weight.column_blocks;
  std::int64_t tiles = 0;
  if (params.x != nullptr) {
    args.input = input_args(params, kVector);
    args.verdict = verdict_args(params);
    tiles = input_tiles(args.input, params.problem);
  }
  const std::int64_t work = args.apart + tiles + args.weight_lines.tiles;
  args.chosen_end = grid_of(args.weight.column_blocks + tiles, "pack_scaled_operands");
  args.input_end = grid_of(args.apart + tiles, "pack_scaled_operands");
  args.accumulators = accumulators;
  args.region = {params.zero, params.zero_bytes};
  const int blocks = static_cast<int>(std::min<std::int64_t>(grid_of(work, "pack_scaled_operands"),
                                                             sms * kBlocksPerSm<kChannelsFirst, kVector>));
  launch_cooperative("pack_scaled_operands",
                     reinterpret_cast<const void*>(pack_scaled_operands<kChannelsFirst, kVector, kProducts>),
                     &args, {blocks, kInputThreads, 0}, stream, [](int) {});
}

template <bool kChannelsFirst, int kVector>
void launch_products(const PackParams& params, ZeroRegion accumulators, cudaStream_t stream) {
  params.products == 3 ? launch<kChannelsFirst, kVector, 3>(params, accumulators, stream)
                       : launch<kChannelsFirst, kVector, 1>(params, accumulators, stream);
}

}  // namespace

void launch_pack_scaled_operands(const PackParams& params, ZeroRegion accumulators, cudaStream_t stream) {
  const bool by_fours = input_vector(params) == 4;
  if (params.problem.x_layout == Layout::kNCDHW) {
    by_fours ? launch_products<true, 4>(params, accumulators, stream)
             : launch_products<true, 1>(params, accumulators, stream);
  } else {
    by_fours ? launch_products<false, 4>(params, accumulators, stream)
             : launch_products<false, 1>(params, accumulators, stream);
  }
}

}  // namespace upconv3d::cuda
