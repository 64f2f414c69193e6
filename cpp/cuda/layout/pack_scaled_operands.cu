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
#include "cuda/layout/awaited_tile.cuh"
#include "cuda/layout/chosen_input.cuh"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/ndhwc_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/scaled_weight_tile.cuh"
#include "cuda/layout/verdict.cuh"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/zero_region.cuh"
#include "cuda/reserved_shared_memory.hpp"
#include "cuda/resident_blocks.hpp"

namespace upconv3d::cuda {
namespace {

/// Blocks that Hopper's SMs hold, those of other GPUs perhaps fewer: as many as registers and shared memory
/// do without spills. 128 KB are on their way then, 96 with three products or a misaligned x.
template <int kVector, int kProducts>
inline constexpr int kBlocksPerSm = kVector == 4 && kProducts == 1 ? 4 : 3;

struct ScaledOperandsArgs {
  WeightArgs weight;  // columns apart: where w has no tiles, and for chosen scales
  ScaledWeightArgs weight_lines;
  InputArgs input;
  VerdictArgs verdict;
  std::uint32_t apart;      // blocks of columns of w for the assumed scales; 0: w goes by tiles
  std::uint32_t input_end;  // apart, and tiles of x behind them
  std::uint32_t* tickets;   // [1] uint32: work indices dealt out; null: in equal shares
  ZeroRegion accumulators;  // those of scales
  ZeroRegion region;        // the caller's
};

/// Tile of x of a work index; x's end first: what the convolution reads first is then what L2 still holds.
__device__ inline InputTile tile_of(const ScaledOperandsArgs& args, std::uint32_t index) {
  return input_tile(args.input, args.input_end - 1 - index);
}

/// A block's way through its work: what it works on, and what it awaits.
template <bool kChannelsFirst, int kVector, int kProducts>
struct PackingBlock {
  const ScaledOperandsArgs& args;
  float* memory;  // [kAwaitedBytes]

  /// Requests what a work index reads, unless that is columns apart; behind the tiles of x the block's first
  /// tile of w.
  __device__ void request(std::uint32_t index) const {
    if (index < args.apart) return;
    if (index >= args.input_end) return request_weight(blockIdx.x);
    const std::uint64_t policy = streaming_policy();
    if constexpr (kChannelsFirst) {
      request_ncdhw_tile<kVector>(args.input, tile_of(args, index), memory, policy);
    } else {
      request_ndhwc_tile<kVector>(args.input, tile_of(args, index), memory, policy);
    }
  }

  /// Requests a tile of w, if there is one, to be measured; L2 keeps it unless it is the block's last.
  __device__ void request_weight(std::uint32_t tile) const {
    if (tile >= args.weight_lines.tiles) return;
    const bool again = args.weight_lines.tiles - tile > gridDim.x;
    request_weight_tile(args.weight_lines, tile, memory, again ? staying_policy() : streaming_policy());
  }

  /// Packs a tile of x by assumed scales; requests `next` as soon as there is room.
  __device__ void pack_input(std::uint32_t index, std::uint32_t next) const {
    if constexpr (kChannelsFirst) {
      float values[8][4];
      take_ncdhw_tile<kVector>(memory, values);
      request(next);
      pack_ncdhw_values<kVector, kProducts>(args.input, tile_of(args, index), values);
    } else {
      float values[kThreadPositions<kVector>][kVector];
      take_ndhwc_tile<kVector>(memory, values);
      request(next);
      pack_ndhwc_values<kVector, kProducts>(args.input, tile_of(args, index), values);
    }
  }

  /// What needs no maxima: columns of w apart, then tiles of x. A block's first two are its own, further ones
  /// are dealt out: on an H200, with equal shares, some blocks were done in half of the others' time. A share
  /// is drawn while the block works on another, so that it waits for none.
  __device__ void pack_inputs() const {
    __shared__ std::uint32_t drawn;
    std::uint32_t next = blockIdx.x + gridDim.x;
    for (std::uint32_t i = blockIdx.x; i < args.input_end;) {
      std::uint32_t later = next + gridDim.x;
      if (args.tickets != nullptr && threadIdx.x == 0) later = 2 * gridDim.x + atomicAdd(args.tickets, 1u);
      if (i < args.apart) {
        pack_weight_columns<Scaling::kAssumed, kProducts>(args.weight, i);
        request(next);
      } else {
        AwaitedTile<kVector>::wait();
        pack_input(i, next);
      }
      if (threadIdx.x == 0) drawn = later;
      __syncthreads();  // the next turn uses the same shared memory
      i = next;
      next = drawn;  // written again behind a barrier of the next turn
    }
  }

  /// Measures the block's tiles of w. The last one stays in shared memory.
  ///
  /// \return its index, or that of none
  __device__ std::uint32_t measure_weights() const {
    __shared__ std::uint32_t largest[2][kTilePositions];
    if (threadIdx.x < kTilePositions) largest[0][threadIdx.x] = largest[1][threadIdx.x] = 0;
    __syncthreads();
    std::uint32_t last = args.weight_lines.tiles;
    int turn = 0;
    for (std::uint32_t tile = blockIdx.x; tile < args.weight_lines.tiles; tile += gridDim.x, turn ^= 1) {
      AwaitedTile<4>::wait();
      last = tile;
      float values[8][4];
      take_ncdhw_tile<4>(memory, values);
      request_weight(tile + gridDim.x);
      measure_weight_tile(args.weight_lines, tile, largest[turn], values);
    }
    return last;
  }

  /// Packs the tiles that it measured, the last one first.
  __device__ void pack_measured(std::uint32_t last) const {
    for (std::uint32_t tile = last; tile < args.weight_lines.tiles; tile -= gridDim.x) {
      AwaitedTile<4>::wait();
      float values[8][4];
      take_ncdhw_tile<4>(memory, values);
      if (tile >= gridDim.x) {
        request_weight_tile(args.weight_lines, tile - gridDim.x, memory, streaming_policy());
      }
      pack_scaled_weight_tile<kProducts>(args.weight_lines, tile, args.weight.assumed_channel, values);
      __syncthreads();  // the next tile uses the same shared memory
    }
  }
};

/// Everything once more, by chosen scales, which are chosen first.
template <bool kChannelsFirst, int kProducts>
__device__ inline void pack_chosen(const ScaledOperandsArgs& args, const cooperative_groups::grid_group& grid,
                                   std::int64_t thread, std::int64_t threads) {
  for (std::int64_t n = blockIdx.x; n < args.verdict.samples; n += gridDim.x) choose_sample(args.verdict, n);
  grid.sync();
  choose_channels(args.verdict, thread, threads);
  grid.sync();
  for (std::uint32_t i = blockIdx.x; i < args.weight.column_blocks; i += gridDim.x) {
    pack_weight_columns<Scaling::kChosen, kProducts>(args.weight, i);
    __syncthreads();  // the next turn uses the same shared memory
  }
  pack_chosen_inputs<kChannelsFirst, kProducts>(args.input, args.verdict, thread, threads);
}

template <bool kChannelsFirst, int kVector, int kProducts>
__global__ void __launch_bounds__(kInputThreads, kBlocksPerSm<kVector, kProducts>)
    pack_scaled_operands(const __grid_constant__ ScaledOperandsArgs args) {
  extern __shared__ float4 awaited[];
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const PackingBlock<kChannelsFirst, kVector, kProducts> block{args, reinterpret_cast<float*>(awaited)};
  block.request(blockIdx.x);
  clear(args.accumulators);
  clear(args.region);
  if constexpr (!kChannelsFirst) clear_block_absmax<kVector>();
  grid.sync();
  block.pack_inputs();
  const std::uint32_t last = block.measure_weights();
  grid.sync();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kInputThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kInputThreads + thread_of_block();
  const bool has_inputs = args.verdict.suspect != nullptr;
  if (has_inputs && is_rejected<kProducts>(args.verdict)) {
    AwaitedTile<4>::wait();
    pack_chosen<kChannelsFirst, kProducts>(args, grid, thread, threads);
    return;
  }
  if (has_inputs) write_assumed_scales<kProducts>(args.verdict, thread, threads);
  if (args.weight_lines.tiles == 0) return;
  write_columns(args.weight_lines, args.weight.unscale_column, args.weight.k, args.weight.assumed_channel,
                thread, threads);
  block.pack_measured(last);
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
    args.tickets = params.scales.tickets;
    tiles = input_tiles(args.input, params.problem);
  }
  args.input_end = grid_of(args.apart + tiles, "pack_scaled_operands");
  args.accumulators = accumulators;
  args.region = {params.zero, params.zero_bytes};
  const auto kernel = reinterpret_cast<const void*>(pack_scaled_operands<kChannelsFirst, kVector, kProducts>);
  static ReservedSharedMemory reserved;
  reserved.ensure("pack_scaled_operands", kernel, kAwaitedBytes);
  static ResidentBlocks resident;
  const std::int64_t held = sms * resident.per_multiprocessor(kernel, kInputThreads, kAwaitedBytes);
  const auto blocks = std::min<std::int64_t>(std::max(args.input_end, args.weight_lines.tiles), held);
  launch_cooperative("pack_scaled_operands", kernel, &args,
                     {static_cast<int>(blocks), kInputThreads, kAwaitedBytes}, stream, [](int) {});
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
