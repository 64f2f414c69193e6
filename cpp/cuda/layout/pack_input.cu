// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_input: float32 x to [N,groups,D,H,W,operand_channels] in float16 by assumed scales, and the verdict
/// on those scales.
///
/// The verdict needs all of x, yet no block waits: the last block to finish with a sample judges that sample,
/// and the last of those sums up. Every maximum is one of unsigned integers, so neither the order of atomics
/// nor the grid changes a bit.

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/verdict.cuh"

namespace upconv3d::cuda {
namespace {

/// Counts this block in. To follow a barrier: what any thread of the block wrote before that is seen by the
/// block that is told to be last, because fences are cumulative.
///
/// \return in thread 0 how many blocks were there before, elsewhere 0
__device__ inline std::uint32_t count_in(std::uint32_t* counter) {
  if (threadIdx.x != 0) return 0;
  __threadfence();
  return atomicAdd(counter, 1u);
}

/// All threads call it, with what count_in returned, and get the same answer.
__device__ inline bool is_last(std::uint32_t before, std::int64_t blocks) {
  const bool last =
      __syncthreads_or(threadIdx.x == 0 && before == static_cast<std::uint32_t>(blocks - 1)) != 0;
  if (last) __threadfence();  // what it reads comes after what the others counted in with
  return last;
}

/// pack_input: a tile per block, x's end first: what the convolution reads first is then what L2 still holds.
/// A block counts itself in before it stores: its maxima are all that the verdict reads, and a fence behind
/// the stores would wait for those too.
template <bool kChannelsFirst, int kVector, int kProducts>
__global__ void __launch_bounds__(kInputThreads, 4)
    pack_input(const InputArgs args, const VerdictArgs verdict) {
  const InputTile tile = input_tile(args, gridDim.x - 1 - blockIdx.x);
  std::uint32_t before = 0;
  pack_input_tile<kChannelsFirst, Scaling::kAssumed, kVector, kProducts>(
      args, tile, [&] { before = count_in(verdict.sample_done + tile.n); });

  const std::int64_t sample_blocks = static_cast<std::int64_t>(args.position_tiles) * args.channel_tiles;
  if (!is_last(before, sample_blocks)) return;
  judge_sample<kProducts>(verdict, tile.n);
  __syncthreads();
  if (!is_last(count_in(verdict.samples_done), verdict.samples)) return;
  write_scales<kProducts>(verdict);
}

template <bool kChannelsFirst, int kVector, int kProducts>
void launch(const PackParams& params, cudaStream_t stream) {
  const InputArgs args = input_args(params, kVector);
  const unsigned grid = grid_of(input_tiles(args, params.problem), "pack_input");
  pack_input<kChannelsFirst, kVector, kProducts>
      <<<grid, kInputThreads, 0, stream>>>(args, verdict_args(params));
  check_launch("pack_input");
}

template <bool kChannelsFirst, int kVector>
void launch_products(const PackParams& params, cudaStream_t stream) {
  params.products == 3 ? launch<kChannelsFirst, kVector, 3>(params, stream)
                       : launch<kChannelsFirst, kVector, 1>(params, stream);
}

}  // namespace

InputArgs input_args(const PackParams& params, int vector) {
  const Problem& problem = params.problem;
  const std::int64_t positions = volume(problem.in);
  const bool is_ncdhw = problem.x_layout == Layout::kNCDHW;
  std::int64_t tile_positions = kTilePositions;
  std::int64_t channel_tiles = problem.groups * ceil_div(group_inputs(problem), kTileChannels);
  std::int64_t lanes = 0;
  if (!is_ncdhw) {
    const std::int64_t vectors = problem.groups * operand_channels(problem) / vector;
    channel_tiles = ceil_div(vectors, kInputThreads);
    lanes = ceil_div(vectors, channel_tiles);
    const auto count = static_cast<std::uint32_t>(lanes);
    tile_positions = vector == 4 ? ndhwc_tile_positions<4>(count) : ndhwc_tile_positions<1>(count);
  }
  const std::int64_t position_tiles = ceil_div(positions, tile_positions);
  grid_of(saturating_product(problem.n, channel_tiles, position_tiles), "pack_input");
  return {
      .x = params.x,
      .hi = static_cast<std::uint16_t*>(params.x_hi),
      .lo = static_cast<std::uint16_t*>(params.x_lo),
      .sample = params.scales.sample,
      .channel = params.scales.channel,
      .x_absmax = params.scales.x_absmax,
      .channels = problem.c,
      .positions = positions,
      .pitch = static_cast<std::uint32_t>(operand_channels(problem)),
      .groups = static_cast<std::uint32_t>(problem.groups),
      .group_channels = static_cast<std::uint32_t>(group_inputs(problem)),
      .position_tiles = static_cast<std::uint32_t>(position_tiles),
      .channel_tiles = static_cast<std::uint32_t>(channel_tiles),
      .lanes = static_cast<std::uint32_t>(lanes),
  };
}

void launch_pack_input(const PackParams& params, cudaStream_t stream) {
  const bool by_fours = input_vector(params) == 4;
  if (params.problem.x_layout == Layout::kNCDHW) {
    by_fours ? launch_products<true, 4>(params, stream) : launch_products<true, 1>(params, stream);
  } else {
    by_fours ? launch_products<false, 4>(params, stream) : launch_products<false, 1>(params, stream);
  }
}

}  // namespace upconv3d::cuda
