// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_few_channels_sm80 is compiled for and what a launch of it is given.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cutlass/fast_math.h"

#include "core/few_channels_layout.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

/// \tparam T            dtype of x, w, bias and y
/// \tparam kColumnTiles of eight output channels each
/// \tparam kPaired      phases along the width that a warp computes together
/// \tparam kOutput      the pass that writes y; else that of the moments
/// \tparam kStaged      it collects tiles in shared memory (few_channels_stage_sm80.cuh)
/// \tparam kProducts    3: of float at float32's accuracy, as TF32 and what that leaves over; else 1
template <class T, int kColumnTiles, int kPaired, bool kOutput, bool kStaged = false, int kProducts = 1>
struct FewTraits {
  using Element = T;
  static constexpr int PRODUCTS = kProducts;
  static_assert(kProducts == 1 || (kProducts == 3 && std::is_same_v<T, float>));
  // Of one product, float operands are rounded to TF32 as they come into shared memory.
  static constexpr bool ROUNDS = std::is_same_v<T, float> && kProducts == 1;
  static constexpr int COLUMN_TILES = kColumnTiles;
  static constexpr int PAIRED = kPaired;
  static constexpr bool OUTPUT = kOutput;
  static constexpr bool STAGED = kStaged;
  static constexpr int ROW_TILES = few_row_tiles(kColumnTiles, kPaired, kProducts);
  static constexpr int COLUMNS = 8 * kColumnTiles;
  // Of a multiprocessor: the fewest accumulators, 32 at most and little beside them, leave registers for
  // three. 64 accumulators, or 32 and the parts of operands, beside 16 sums leave 128 registers too few.
  static constexpr bool FILLS_REGISTERS = !kOutput && kColumnTiles == 4 && (kPaired == 2 || kProducts == 3);
  static constexpr int BLOCKS = kColumnTiles == 1 ? 3 : FILLS_REGISTERS ? 1 : 2;
  static constexpr int RUN = 2 * kColumnTiles;       // neighbouring channels that a thread has
  static constexpr int CHUNK = 16 / int(sizeof(T));  // input channels of 16 bytes
  // Weights of a step and phase; 16 bytes more, so that those of neighbouring taps lie in different banks.
  static constexpr int FRAGMENT_BYTES = kFewColumnBytes * COLUMNS + kFewFragmentPadding;
};

/// Counts of phases along the three axes in a word, each with a guard above it: counts less others keep it
/// where they are no fewer.
inline constexpr int kFewCountBits = 10, kFewCountGuard = 1 << (kFewCountBits - 1);
inline constexpr int kFewCountGuards =
    kFewCountGuard | kFewCountGuard << kFewCountBits | kFewCountGuard << 2 * kFewCountBits;
// kFewMaxGroups pairs along one axis.
static_assert(2 * kFewMaxGroups < kFewCountGuard);
/// `count` phases of one axis, without guards.
__host__ __device__ constexpr int few_counts_of_axis(int count, int axis) {
  return count << axis * kFewCountBits;
}
__host__ __device__ constexpr int few_phase_counts(int depth, int height, int width) {
  return kFewCountGuards + few_counts_of_axis(depth, 0) + few_counts_of_axis(height, 1) +
         few_counts_of_axis(width, 2);
}

/// A group of phases, as FewGroup.
struct FewGroupParams {
  int least_counts;  // of phases, so that the group's first is inside; without guards
  int y_offset;      // elements from a position's first output
  std::int16_t phase[3];
  std::uint16_t steps[kFewLists];
  std::uint16_t first_step, first_fragment;
};

/// A chunk of a box of x: where its position lies in the box, and which of its chunks it is. Also the
/// difference of two such, digit by digit.
struct FewBoxPlace {
  int depth, height, width, chunk;
};

struct FewParams {
  const void* x;         // [N,C,D,H,W] or [N,D,H,W,C]
  const void* w;         // [C,K/groups,T,R,S] of w_strides
  const void* bias;      // [K] or null
  const float* table;    // [3,N,K] mean, scale, shift, or null; output pass
  float* part;           // [N,tiles,K,2] mean, M2; moments pass
  std::int32_t* counts;  // [tiles]; moments pass
  void* y;               // [N,K,Z,P,Q] or [N,Z,P,Q,K]; output pass
  ActivationParams before, after;
  std::int64_t x_sample, y_sample;  // elements of a sample
  std::int64_t w_strides[5];
  int x_channel, x_position;  // elements from one to the next
  int y_channel, y_position;
  int samples, k;                      // output channels
  int channels, group_outputs;         // input and output channels of a convolution group
  cutlass::FastDivmod channel_blocks;  // of a convolution group, which are the grid's y
  int in[3], out[3], stride[3], kernel[3];
  int lower[3];               // the least offset
  int tile[3];                // j
  bool copies;                // chunks of x lie together in memory, on 16-byte boundaries
  int store_values;           // channels, or positions of a pair, that one store takes, whole and aligned
  bool channels_first;        // y [N,K,Z,P,Q]
  bool taps_first;            // w's taps lie closer than its output channels
  int items;                  // samples times tiles
  cutlass::FastDivmod tiles;  // of a sample
  cutlass::FastDivmod tiles_height, tiles_width;
  cutlass::FastDivmod tile_height, tile_width;
  cutlass::FastDivmod box_height, box_width;
  int box_depth;
  cutlass::FastDivmod chunks, box;  // of a position; positions
  FewBoxPlace box_step;             // from one of a thread's chunks of x to its next
  int pitch_bytes;
  int row_warps, groups;
  int taps, steps, fragments;
  // Shared memory, in bytes from its beginning; weights lie first.
  int x_at, rows_at, channels_at, moments_at, steps_at;
  FewGroupParams group[kFewMaxGroups];
  FewTap tap[kFewMaxTaps];
  std::uint32_t step[kFewMaxSteps];
  // Where the stage lies, in bytes; FewStage, in values; planes of a tile.
  int stage_at, stage_plane, stage_channel;
  cutlass::FastDivmod stage_planes;
};

/// A block's convolution group, and its first output channel within that.
struct FewChannelBlock {
  int group, in_group;
};

/// \param columns of a block
/// \param index   blockIdx.y
__device__ __forceinline__ FewChannelBlock few_channel_block(const FewParams& params, int columns,
                                                             int index) {
  FewChannelBlock block;
  block.group = params.channel_blocks.divmod(block.in_group, index);
  block.in_group *= columns;
  return block;
}

/// The block's first output channel, which the caller keeps. Before Hopper ptxas has no register for it in
/// variants of the moments pass: there it is found anew where it is needed.
template <class Traits>
__device__ __forceinline__ int few_first_channel(const FewParams& params, int kept) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (!Traits::OUTPUT) {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(index));  // volatile: not kept
    const FewChannelBlock block = few_channel_block(params, Traits::COLUMNS, index);
    return block.group * params.group_outputs + block.in_group;
  }
#endif
  return kept;
}

/// The thread's index where addresses made of it are wanted once per tile: before Hopper they are found anew,
/// too.
__device__ __forceinline__ int few_thread_index() {
  int index = int(threadIdx.x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm volatile("" : "+r"(index));
#endif
  return index;
}

/// The first output channel that is not the block's convolution group's.
__device__ __forceinline__ int few_end_channel(const FewParams& params) {
  return (params.channel_blocks.div(int(blockIdx.y)) + 1) * params.group_outputs;
}

/// A tile of a sample.
struct FewItem {
  int sample, tile;
  int first[3];  // j
};

__device__ __forceinline__ FewItem few_item(const FewParams& params, int number) {
  FewItem item;
  item.sample = params.tiles.divmod(item.tile, number);
  int at;
  const int plane = params.tiles_width.divmod(at, item.tile);
  item.first[2] = at * params.tile[2];
  item.first[0] = params.tiles_height.divmod(at, plane) * params.tile[0];
  item.first[1] = at * params.tile[1];
  return item;
}

}  // namespace upconv3d::cuda
