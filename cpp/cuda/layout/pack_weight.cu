// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_weight: float32 w alone to [T*R*S,K,operand_channels] in float16, for an x that is scaled as assumed:
/// a gradient, whose scale is known. No block waits for another, and a column may have 1024 threads.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {
namespace {

constexpr int kMaxThreads = 1024;

/// pack_weight: one block per few output channels.
template <int kProducts>
__global__ void __launch_bounds__(kMaxThreads) pack_weight(const WeightArgs args, const ZeroRegion region) {
  clear(region);
  pack_weight_columns<Scaling::kAssumed, kProducts>(args, blockIdx.x);
}

}  // namespace

void launch_pack_weight(const PackParams& params, cudaStream_t stream) {
  constexpr std::int64_t kSectorColumns = 8;  // 32 bytes of float
  constexpr std::int64_t kBlocks = 132;       // one for each SM of an H200: a block may hold 1024 threads
  const WeightArgs args = weight_args(params, kSectorColumns, kBlocks);
  // An item per thread where that is possible, so that a small weight waits for memory only once.
  int threads = 128;
  while (threads < kMaxThreads && threads < args.block_items) threads *= 2;
  const ZeroRegion region{params.zero, params.zero_bytes};
  const unsigned grid = grid_of(args.column_blocks, "pack_weight");
  if (params.products == 3) {
    pack_weight<3><<<grid, threads, 0, stream>>>(args, region);
  } else {
    pack_weight<1><<<grid, threads, 0, stream>>>(args, region);
  }
  check_launch("pack_weight");
}

}  // namespace upconv3d::cuda
