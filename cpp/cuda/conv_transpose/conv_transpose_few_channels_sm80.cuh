// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_few_channels_sm80: the forward pass of blocks whose arithmetic is small against their
/// output, on any GPU from compute capability 8.0 on. A block has the channels of one convolution group.
///
///   x       [N,C,D,H,W] or [N,D,H,W,C]  T      a box of it is brought into shared memory per tile
///   w       [C,K/groups,T,R,S], any strides
///                                       T      stays in shared memory
///   part    [N,tiles,K,2]               float  (mean, M2) of before(conv + bias), unrounded
///   counts  [tiles]                     int32  positions of each tile
///   table   [3,N,K]                     float  mean, scale and shift, as group_norm_finalize writes them
///   y       [N,K,Z,P,Q] or [N,Z,P,Q,K]  T      written once
///
/// The convolution is computed twice, for part and counts, and again for y; nothing else goes to memory, and
/// nothing is packed before. An implicit GEMM whose rows are positions j of core/few_channels_layout.hpp,
/// whose columns are output channels, by mma.sync m16n8k16, of float as TF32 by m16n8k8, or by three of these
/// for float32's accuracy. From one box of x, a block computes all phases of the stride, so that they are
/// written next to each other. Where rows of y [N,K,Z,P,Q] begin amid a sector of memory, the output pass
/// may have tiles of its own, of whole rows, that it collects in shared memory first
/// (few_channels_stage_sm80.cuh).
///
/// Blocks take tiles in turn, each its own, and keep their weights. A tile's moments are its own, so part
/// needs no atomics and results repeat bit for bit.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/few_channels_layout.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/compiled_arch.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"
#include "cuda/conv_transpose/few_channels_epilogue_sm80.cuh"
#include "cuda/launch.cuh"
#include "cuda/reserved_shared_memory.hpp"
#include "cuda/resident_blocks.hpp"

namespace upconv3d::cuda {

/// What a block keeps: weights, steps, and zeros behind the channels of its box.
template <class Traits>
__device__ __forceinline__ void prepare_few_channels(const FewParams& params, char* shared) {
  for (int i = threadIdx.x; i < params.fragments * (Traits::FRAGMENT_BYTES / 16); i += kFewThreads) {
    reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
  }
  clear_padding(params, shared + params.x_at);
  std::uint32_t* const steps = reinterpret_cast<std::uint32_t*>(shared + params.steps_at);
  for (int i = threadIdx.x; i < params.steps + kFewStepsAhead; i += kFewThreads) {
    constexpr std::uint32_t kPlace = (1u << kFewOffsetBits) - 1;
    const std::uint32_t places = i < params.steps ? params.step[i] : 0;
    steps[2 * i] = (places & kPlace) * 16;
    steps[2 * i + 1] = (places >> kFewOffsetBits & kPlace) * 16;
  }
  __syncthreads();
  load_weights<Traits>(params, shared);
}

template <class Traits>
__global__ void __launch_bounds__(kFewThreads, Traits::BLOCKS)
    conv_transpose_few_channels_sm80(__grid_constant__ const FewParams params) {
  extern __shared__ __align__(128) char shared[];
  const FewChannelBlock block = few_channel_block(params, Traits::COLUMNS, int(blockIdx.y));
  const int first_channel = block.group * params.group_outputs + block.in_group;
  const int warp = int(threadIdx.x) / 32;
  const int share = warp / params.row_warps, shares = kFewWarps / params.row_warps;
  const int first_row = warp % params.row_warps * 16 * Traits::ROW_TILES;
  // The second pass begins with what the first left in L2.
  const auto item_of = [&](int number) {
    return few_item(params, Traits::OUTPUT ? params.items - 1 - number : number);
  };
  prepare_few_channels<Traits>(params, shared);
  if constexpr (Traits::OUTPUT) wait_for_kernel_before();  // for the table
  const FewMultiplier<Traits> multiplier(params, shared, first_row);
  FewEpilogue<Traits> epilogue(params, shared, first_channel, first_row);
  for (int number = int(blockIdx.x); number < params.items; number += int(gridDim.x)) {
    const FewItem item = item_of(number);
    char* const x = shared + params.x_at;
    load_box<Traits>(params, item, x);
    epilogue.begin(item);
    finish_box<Traits>(params, x);
    __syncthreads();
    epilogue.begin_warp();
    std::uint32_t box = shared_address(x);
    // Found anew for each tile: kept from one to the next, it costs a variant its last register.
    asm volatile("" : "+r"(box));
    // Groups fall in work: to and fro, warps get about equal shares.
    for (int round = 0; round * shares < params.groups; ++round) {
      const int index = round * shares + (round % 2 == 0 ? share : shares - 1 - share);
      if (index >= params.groups) continue;
      FewAccumulators<Traits> acc;
      float start[Traits::RUN];
      epilogue.start(start);
      multiplier.multiply(params.group[index], box, start, acc);
      epilogue.finish(params.group[index], acc);
    }
    if constexpr (!Traits::OUTPUT) epilogue.end();
    __syncthreads();
    if constexpr (!Traits::OUTPUT) epilogue.write_moments(item);
    if constexpr (Traits::STAGED) epilogue.write_stage(item);
  }
}

/// An output pass that is expected to take longer does not begin while moments are merged: begun so, passes
/// of 180 and 330 us took 1 % longer, where short ones gain 4 us (perf/notes/few.md, "An output pass that
/// begins while moments are merged").
inline constexpr double kFewLongPassMs = 0.15;

/// Launches a variant.
template <class Traits>
void launch_few_variant(const FewParams& params, const FewChannelsLayout& layout, cudaStream_t stream) {
  const auto kernel = conv_transpose_few_channels_sm80<Traits>;
  const char* const name = "conv_transpose_few_channels_sm80";
  int device = 0, processors = 0, most = 0;
  check(cudaGetDevice(&device), name);
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), name);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
  // All that there is, of which the kernel has nothing of fixed size: another thread may be about to launch
  // it for a shape that takes more.
  static ReservedSharedMemory reserved;
  reserved.ensure(name, reinterpret_cast<const void*>(kernel), most);
  static ResidentBlocks held;
  const auto shared_bytes = static_cast<std::size_t>(layout.shared_bytes);
  const int blocks =
      held.per_multiprocessor(reinterpret_cast<const void*>(kernel), kFewThreads, shared_bytes);
  const int resident = std::max(1, processors * blocks / layout.channel_blocks);
  const dim3 grid(unsigned(std::min(params.items, resident)), unsigned(layout.channel_blocks));
  // What a GPU runs from PTX of before Hopper does not wait for the kernel that it begins beside.
  static CompiledArch arch;
  const bool beside = Traits::OUTPUT && layout.output_ms < kFewLongPassMs &&
                      arch.of(reinterpret_cast<const void*>(kernel)) >= 90;
  launch_kernel(name, kernel, {grid, dim3(kFewThreads), shared_bytes}, stream, params, beside);
}

/// The variant of the layout's columns and pairs.
template <class T, bool kOutput, int kProducts = 1, bool kStaged = false>
void launch_few_columns(const FewParams& params, const FewChannelsLayout& layout, cudaStream_t stream) {
  if constexpr (kOutput && !kStaged) {
    if (layout.staged) return launch_few_columns<T, true, kProducts, true>(params, layout, stream);
  }
  const int variant = 10 * layout.paired + layout.column_tiles;
  switch (variant) {
    case 12:
      return launch_few_variant<FewTraits<T, 2, 1, kOutput, kStaged, kProducts>>(params, layout, stream);
    case 14:
      return launch_few_variant<FewTraits<T, 4, 1, kOutput, kStaged, kProducts>>(params, layout, stream);
    case 21:
      return launch_few_variant<FewTraits<T, 1, 2, kOutput, kStaged, kProducts>>(params, layout, stream);
    case 22:
      return launch_few_variant<FewTraits<T, 2, 2, kOutput, kStaged, kProducts>>(params, layout, stream);
    case 24:
      return launch_few_variant<FewTraits<T, 4, 2, kOutput, kStaged, kProducts>>(params, layout, stream);
    default:
      throw std::logic_error("upconv3d: conv_transpose_few_channels_sm80 has no variant " +
                             std::to_string(variant));
  }
}

}  // namespace upconv3d::cuda
