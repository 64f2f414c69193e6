// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_scaled_operands: what pack_weight, pack_input and repack do to float32 x and w, in one launch. For
/// small operands, whose launches take the host longer than the device.
///
/// Blocks wait for each other, so the launch is cooperative: once for cleared accumulators, once for the
/// maxima of x, and where those reject the assumed scales once more for the chosen ones. Maxima do not depend
/// on their order, nor on who takes them: the same bits as by three launches.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/verdict.cuh"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {
namespace {

/// As many blocks as an SM's registers hold without spills, see repack.
constexpr int kBlocksPerSm = 3;

struct ScaledOperandsArgs {
  WeightArgs weight;
  InputArgs input;
  VerdictArgs verdict;
  std::uint32_t work;       // blocks of columns of w, then tiles of x
  ZeroRegion accumulators;  // those of scales
  ZeroRegion region;        // the caller's
};

/// The block's share of the columns of w, then of the tiles of x.
template <bool kChannelsFirst, Scaling kScaling, int kVector, int kProducts>
__device__ inline void pack_share(const ScaledOperandsArgs& args) {
  for (std::uint32_t i = blockIdx.x; i < args.work; i += gridDim.x) {
    if (i < args.weight.column_blocks) {
      pack_weight_columns<kScaling, kProducts>(args.weight, i);
    } else {
      const InputTile tile = input_tile(args.input, i - args.weight.column_blocks);
      pack_input_tile<kChannelsFirst, kScaling, kVector, kProducts>(args.input, tile, Nothing{});
    }
    __syncthreads();  // the next turn uses the same shared memory
  }
}

/// Whether any sample and channel breaks the assumption. Reads past L1, which does not see other blocks'
/// atomics. All blocks get the same answer.
template <int kProducts>
__device__ inline bool is_rejected(const VerdictArgs& args) {
  bool outside = false;
  for (std::int64_t i = threadIdx.x; i < args.samples * args.channels; i += kInputThreads) {
    outside = outside || breaks_assumption<kProducts>(__ldcg(args.x_absmax + i));
  }
  return __syncthreads_or(outside) != 0;
}

template <bool kChannelsFirst, int kVector, int kProducts>
__global__ void __launch_bounds__(kInputThreads, kBlocksPerSm)
    pack_scaled_operands(const __grid_constant__ ScaledOperandsArgs args) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  clear(args.accumulators);
  clear(args.region);
  grid.sync();
  pack_share<kChannelsFirst, Scaling::kAssumed, kVector, kProducts>(args);
  grid.sync();
  if (blockIdx.x == 0) {
    for (std::int64_t n = 0; n < args.verdict.samples; ++n) {
      judge_sample<kProducts>(args.verdict, n);
      __syncthreads();  // the next turn uses the same shared memory
    }
    write_scales<kProducts>(args.verdict);
  }
  if (!is_rejected<kProducts>(args.verdict)) return;
  grid.sync();
  pack_share<kChannelsFirst, Scaling::kChosen, kVector, kProducts>(args);
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
void launch(const PackParams& params, std::int64_t accumulator_bytes, cudaStream_t stream) {
  constexpr std::int64_t kSectorColumns = 8;  // 32 bytes of float
  const int sms = sm_count();
  ScaledOperandsArgs args;
  args.weight = weight_args(params, kSectorColumns, sms);
  args.weight.assumed_channel = assumed_exponent(params.products);
  if (params.w == nullptr) args.weight.column_blocks = 0;
  args.input = input_args(params, kVector);
  args.verdict = verdict_args(params);
  const std::int64_t tiles = input_tiles(args.input, params.problem);
  args.work = grid_of(args.weight.column_blocks + tiles, "pack_scaled_operands");
  args.accumulators = {params.scales.x_absmax, accumulator_bytes};
  args.region = {params.zero, params.zero_bytes};
  const int blocks = static_cast<int>(std::min<std::int64_t>(args.work, sms * kBlocksPerSm));
  launch_cooperative("pack_scaled_operands",
                     reinterpret_cast<const void*>(pack_scaled_operands<kChannelsFirst, kVector, kProducts>),
                     &args, {blocks, kInputThreads, 0}, stream, [](int) {});
}

template <bool kChannelsFirst, int kVector>
void launch_products(const PackParams& params, std::int64_t accumulator_bytes, cudaStream_t stream) {
  params.products == 3 ? launch<kChannelsFirst, kVector, 3>(params, accumulator_bytes, stream)
                       : launch<kChannelsFirst, kVector, 1>(params, accumulator_bytes, stream);
}

}  // namespace

void launch_pack_scaled_operands(const PackParams& params, std::int64_t accumulator_bytes,
                                 cudaStream_t stream) {
  const bool by_fours = input_vector(params) == 4;
  if (params.problem.x_layout == Layout::kNCDHW) {
    by_fours ? launch_products<true, 4>(params, accumulator_bytes, stream)
             : launch_products<true, 1>(params, accumulator_bytes, stream);
  } else {
    by_fours ? launch_products<false, 4>(params, accumulator_bytes, stream)
             : launch_products<false, 1>(params, accumulator_bytes, stream);
  }
}

}  // namespace upconv3d::cuda
