// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_operands: 16-bit x and w to operand form, in one launch.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {
namespace {

/// What happens to x.
enum class InputPath { kStays, kCopied, kTransposedByFours, kTransposed };

constexpr int kCopiesPerThread = 16;  // single elements in flight

/// Right in layout and dtype, x is packed only because TMA wants an aligned address: no wider loads.
__device__ inline void copy_stretch(const InputArgs& args, std::int64_t elements, std::uint32_t stretch) {
  const std::int64_t first = static_cast<std::int64_t>(stretch) * (kInputThreads * kCopiesPerThread);
  const std::uint16_t* const x = static_cast<const std::uint16_t*>(args.x);
  std::uint16_t values[kCopiesPerThread];
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    const std::int64_t e = first + i * kInputThreads + threadIdx.x;
    values[i] = e < elements ? __ldcs(x + e) : std::uint16_t{0};
  }
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    const std::int64_t e = first + i * kInputThreads + threadIdx.x;
    if (e < elements) args.hi[e] = values[i];
  }
}

/// pack_operands: the first `weight_blocks` blocks pack w, the others x, beginning at x's end: what the
/// convolution reads first is then what L2 still holds.
///
/// \param elements of x, N*C*D*H*W
template <InputPath kPath>
__global__ void __launch_bounds__(kInputThreads)
    pack_operands(const WeightArgs weight, const std::uint32_t weight_blocks, const InputArgs input,
                  const std::int64_t elements, const ZeroRegion region) {
  clear(region);
  if (blockIdx.x < weight_blocks) {
    pack_weight_columns<Scaling::kNone, 1>(weight, blockIdx.x);
    return;
  }
  const std::uint32_t index = gridDim.x - 1 - blockIdx.x;
  if constexpr (kPath == InputPath::kCopied) {
    copy_stretch(input, elements, index);
  } else if constexpr (kPath != InputPath::kStays) {
    constexpr int kVector = kPath == InputPath::kTransposedByFours ? 4 : 1;
    pack_ncdhw_tile<Scaling::kNone, kVector, 1>(input, input_tile(input, index));
  }
}

template <InputPath kPath>
void launch(const PackParams& params, cudaStream_t stream) {
  constexpr std::int64_t kSectorColumns = 16;  // 32 bytes of 16 bit
  constexpr std::int64_t kBlocks = 1;          // items are parted too: columns alone need not fill the card
  constexpr std::int64_t kItemsPerThread = 2;  // 16 loads in flight
  const Problem& problem = params.problem;
  WeightArgs weight = weight_args(params, kSectorColumns, kBlocks);
  const std::int64_t items = weight.block_items;
  weight.block_items = std::min(items, kItemsPerThread * kInputThreads);
  const std::int64_t weight_blocks = weight.column_blocks * ceil_div(items, weight.block_items);

  const std::int64_t elements = problem.n * problem.c * volume(problem.in);
  InputArgs input{};
  std::int64_t input_blocks = 0;
  if constexpr (kPath == InputPath::kCopied) {
    input.x = params.x;
    input.hi = static_cast<std::uint16_t*>(params.x_hi);
    input_blocks = ceil_div(elements, kInputThreads * kCopiesPerThread);
  } else if constexpr (kPath != InputPath::kStays) {
    input = input_args(params, kPath == InputPath::kTransposedByFours ? 4 : 1);
    input_blocks = input_tiles(input, problem);
  }
  const unsigned grid = grid_of(weight_blocks + input_blocks, "pack_operands");
  const ZeroRegion region{params.zero, params.zero_bytes};
  pack_operands<kPath><<<grid, kInputThreads, 0, stream>>>(weight, static_cast<std::uint32_t>(weight_blocks),
                                                           input, elements, region);
  check_launch("pack_operands");
}

}  // namespace

void launch_pack_operands(const PackParams& params, cudaStream_t stream) {
  if (params.x_hi == nullptr) {
    launch<InputPath::kStays>(params, stream);
  } else if (params.problem.x_layout == Layout::kNDHWC) {
    launch<InputPath::kCopied>(params, stream);
  } else if (input_vector(params) == 4) {
    launch<InputPath::kTransposedByFours>(params, stream);
  } else {
    launch<InputPath::kTransposed>(params, stream);
  }
}

}  // namespace upconv3d::cuda
