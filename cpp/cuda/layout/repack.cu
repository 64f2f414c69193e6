// SPDX-License-Identifier: Apache-2.0
/// \file
/// repack: float32 x and w to operand form once more, with the scales that pack_input chose, where it found
/// the assumed ones unfit. Otherwise every block returns at once.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/weight_columns.cuh"

namespace upconv3d::cuda {
namespace {

/// SMs of an H200, and blocks for each: as many as its registers hold without spills, enough to repack at
/// memory's rate, and few enough to return at once.
constexpr std::int64_t kSms = 132;
constexpr int kBlocksPerSm = 3;

/// repack: blocks share out the columns of w, then the tiles of x.
template <bool kChannelsFirst, int kVector, int kProducts>
__global__ void __launch_bounds__(kInputThreads, kBlocksPerSm)
    repack(const WeightArgs weight, const InputArgs input, const std::uint32_t work,
           const std::uint32_t* rejected) {
  if (*rejected == 0) return;
  for (std::uint32_t i = blockIdx.x; i < work; i += gridDim.x) {
    if (i < weight.column_blocks) {
      pack_weight_columns<Scaling::kChosen, kProducts>(weight, i);
    } else {
      const InputTile tile = input_tile(input, i - weight.column_blocks);
      pack_input_tile<kChannelsFirst, Scaling::kChosen, kVector, kProducts>(input, tile, Nothing{});
    }
    __syncthreads();  // the next turn uses the same shared memory
  }
}

template <bool kChannelsFirst, int kVector, int kProducts>
void launch(const PackParams& params, cudaStream_t stream) {
  constexpr std::int64_t kSectorColumns = 8;  // 32 bytes of float
  WeightArgs weight = weight_args(params, kSectorColumns, kSms);
  if (params.w == nullptr) weight.column_blocks = 0;
  const InputArgs input = input_args(params, kVector);
  const std::int64_t tiles = input_tiles(input, params.problem);
  const unsigned work = grid_of(weight.column_blocks + tiles, "repack");
  const unsigned grid = static_cast<unsigned>(std::min<std::int64_t>(work, kSms * kBlocksPerSm));
  repack<kChannelsFirst, kVector, kProducts>
      <<<grid, kInputThreads, 0, stream>>>(weight, input, work, params.scales.verdict + 1);
  check_launch("repack");
}

template <bool kChannelsFirst, int kVector>
void launch_products(const PackParams& params, cudaStream_t stream) {
  params.products == 3 ? launch<kChannelsFirst, kVector, 3>(params, stream)
                       : launch<kChannelsFirst, kVector, 1>(params, stream);
}

}  // namespace

void launch_repack(const PackParams& params, cudaStream_t stream) {
  const bool by_fours = input_vector(params) == 4;
  if (params.problem.x_layout == Layout::kNCDHW) {
    by_fours ? launch_products<true, 4>(params, stream) : launch_products<true, 1>(params, stream);
  } else {
    by_fours ? launch_products<false, 4>(params, stream) : launch_products<false, 1>(params, stream);
  }
}

}  // namespace upconv3d::cuda
