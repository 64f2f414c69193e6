// SPDX-License-Identifier: Apache-2.0
/// \file
/// w, however it lies, to [T*R*S,K,operand_channels] in 16 bit, scaled and split where it is float32. Dense
/// 16-bit w takes the way of weight_lines.cuh.
///
/// A block takes one or a few neighbouring output channels ("columns" of the GEMM), so that it finds their
/// largest |w| by itself: no other block, no second launch. It reads its w twice, the second time out of L1
/// or L2. Neighbouring threads take neighbouring columns and taps, which memory holds side by side, and a
/// thread gathers 8 input channels of one tap and column for one 16-byte store. Stores of different threads
/// meet in L2, where halves of a sector merge.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

/// Columns of a block at most: the threads of a warp must share them out evenly.
inline constexpr int kMaxBlockColumns = 32;

/// A block of columns and, for 16 bit, a stretch of their items. An item is 8 channels of a tap and column.
struct WeightArgs {
  const void* w;                 // [C,K/groups,T,R,S] float or 16 bit, strides below
  std::uint16_t* hi;             // [T*R*S,K,pitch] 16 bit
  std::uint16_t* lo;             // [T*R*S,K,pitch] 16 bit, three products only
  std::int32_t* unscale_column;  // [K] int32, float32 only: written
  const std::int32_t* channel;   // [C] int32, Scaling::kChosen only
  int assumed_channel;           // of every channel, Scaling::kAssumed only
  std::int64_t stride_c, stride_k, stride_t, stride_r, stride_s;  // elements
  std::int64_t stride_group;    // from a column to where it would be one group later, less what stride_k says
  std::int64_t channels;        // C/groups
  std::int64_t pitch;           // operand_channels
  std::uint32_t group_k;        // K/groups
  std::int64_t k;               // K
  std::uint32_t taps;           // T*R*S
  std::uint32_t r, s;           // extents of the kernel's last two axes
  std::uint32_t columns;        // of a block: a power of two
  std::uint32_t column_blocks;  // K / columns, rounded up
  std::int64_t block_items;     // items that one block packs
};

inline std::int64_t weight_items(const WeightArgs& args) {
  return static_cast<std::int64_t>(args.taps) * args.columns * (args.pitch / 8);
}

/// `sector_columns`: columns that share a 32-byte sector where K is innermost. `blocks`: how many blocks of
/// columns fill the card; fewer columns a block than a sector holds read sectors more than once, but out of
/// L2.
inline WeightArgs weight_args(const PackParams& params, std::int64_t sector_columns, std::int64_t blocks) {
  const Problem& problem = params.problem;
  const std::int64_t* const stride = params.w_strides;
  std::int64_t tap_stride = 0;  // of the innermost tap axis that has an extent; 0: there is a single tap
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t candidate = stride[2 + axis];
    if (problem.kernel[axis] > 1 && (tap_stride == 0 || candidate < tap_stride)) tap_stride = candidate;
  }
  const bool k_innermost = tap_stride == 0 || stride[1] < tap_stride;
  const std::int64_t taps = volume(problem.kernel);
  std::int64_t columns = 1;  // with K outside of the taps, those of one column fill sectors by themselves
  if (k_innermost || taps < sector_columns) {
    while (columns < sector_columns && columns * blocks < problem.k) columns *= 2;
  }
  WeightArgs args{
      .w = params.w,
      .hi = static_cast<std::uint16_t*>(params.w_hi),
      .lo = static_cast<std::uint16_t*>(params.w_lo),
      .unscale_column = params.scales.unscale_column,
      .channel = params.scales.channel,
      .assumed_channel = params.assumed_channel,
      .stride_c = stride[0],
      .stride_k = stride[1],
      .stride_t = stride[2],
      .stride_r = stride[3],
      .stride_s = stride[4],
      .stride_group = group_inputs(problem) * stride[0] - group_outputs(problem) * stride[1],
      .channels = group_inputs(problem),
      .pitch = operand_channels(problem),
      .group_k = static_cast<std::uint32_t>(group_outputs(problem)),
      .k = problem.k,
      .taps = static_cast<std::uint32_t>(taps),
      .r = static_cast<std::uint32_t>(problem.kernel[1]),
      .s = static_cast<std::uint32_t>(problem.kernel[2]),
      .columns = static_cast<std::uint32_t>(columns),
      .column_blocks = static_cast<std::uint32_t>(ceil_div(problem.k, columns)),
      .block_items = 0,
  };
  args.block_items = weight_items(args);
  return args;
}

/// A thread's way through the items of its block. Rows (tap, column), columns innermost, are shared out
/// first, then vectors of 8 channels; a thread keeps its column.
struct WeightWalk {
  std::uint32_t rows;
  std::uint32_t step_row;
  std::int64_t step_vector;
  std::uint32_t row;
  std::int64_t vector;

  __device__ WeightWalk(const WeightArgs& args, std::int64_t first_item) : rows(args.taps * args.columns) {
    const std::int64_t item = first_item + threadIdx.x;
    step_row = blockDim.x % rows;
    step_vector = blockDim.x / rows;
    vector = item / rows;
    row = static_cast<std::uint32_t>(item % rows);
  }
  __device__ void advance() {
    row += step_row;
    vector += step_vector;
    if (row >= rows) {
      row -= rows;
      ++vector;
    }
  }
  __device__ std::uint32_t tap(const WeightArgs& args) const { return row / args.columns; }
};

/// A thread's output channel, and what its convolution group says of it.
struct WeightColumn {
  std::int64_t k;
  std::int64_t offset;          // of w's element of the group's first input channel and the first tap
  const std::int32_t* channel;  // [C/groups] int32 of the group, Scaling::kChosen only

  __device__ WeightColumn(const WeightArgs& args, std::int64_t column) : k(column) {
    const std::int64_t group = static_cast<std::uint32_t>(column) / args.group_k;
    offset = column * args.stride_k + group * args.stride_group;
    channel = args.channel + group * args.channels;
  }
};

/// The 8 channels from 8 * walk.vector on; zeros behind the group's.
template <class T>
__device__ inline void load_item(const WeightArgs& args, const WeightWalk& walk, const WeightColumn& column,
                                 T (&v)[8]) {
  const std::uint32_t tap = walk.tap(args);
  const std::uint32_t plane = tap / args.s;
  const std::int64_t channel = walk.vector * 8;
  const T* const source = static_cast<const T*>(args.w) + column.offset + plane / args.r * args.stride_t +
                          plane % args.r * args.stride_r + tap % args.s * args.stride_s +
                          channel * args.stride_c;
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = channel + j < args.channels ? source[j * args.stride_c] : T{};
}

/// Biased reach of the largest w * 2^-channel[c] that this thread meets; 0: nothing finite but zeros.
template <Scaling kScaling>
__device__ inline std::uint32_t item_reach(const WeightColumn& column, std::int64_t first_channel,
                                           const float (&v)[8], int assumed) {
  std::uint32_t largest = 0;
  if constexpr (kScaling == Scaling::kAssumed) {
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max(largest, finite_magnitude(v[j]));
    return largest != 0 ? biased_reach(largest, -assumed) : 0;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t own = finite_magnitude(v[j]);
      if (own != 0) largest = max(largest, biased_reach(own, -column.channel[first_channel + j]));
    }
    return largest;
  }
}

/// Exponents of the block's columns, from all of their weights. All threads call it; blockDim.x is a multiple
/// of 32.
///
/// \return the exponent of this thread's column
template <Scaling kScaling>
__device__ inline int find_column_exponent(const WeightArgs& args, const WeightColumn& own, int assumed) {
  __shared__ std::uint32_t column_reach[kMaxBlockColumns];
  const std::uint32_t column = threadIdx.x % args.columns;
  if (threadIdx.x < kMaxBlockColumns) column_reach[threadIdx.x] = 0;
  __syncthreads();

  std::uint32_t largest = 0;
  const std::int64_t items = own.k < args.k ? args.block_items : 0;
  WeightWalk walk(args, 0);
  for (std::int64_t item = threadIdx.x; item < items; item += blockDim.x, walk.advance()) {
    float v[8];
    load_item(args, walk, own, v);
    largest = max(largest, item_reach<kScaling>(own, walk.vector * 8, v, assumed));
  }
  for (std::uint32_t distance = args.columns; distance < 32; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, static_cast<int>(distance)));
  }
  if (threadIdx.x % 32 < args.columns) atomicMax(&column_reach[column], largest);
  __syncthreads();

  const int exponent = column_exponent(column_reach[column]);
  if (threadIdx.x < args.columns && own.k < args.k) args.unscale_column[own.k] = -exponent;
  return exponent;
}

/// Packs what block `block` of column_blocks * (stretches of block_items) owns. All threads call it.
///
/// float32 needs block_items to cover all items of a column: they decide its exponent.
template <Scaling kScaling, int kProducts>
__device__ inline void pack_weight_columns(const WeightArgs& args, std::uint32_t block) {
  const WeightColumn column(args, static_cast<std::int64_t>(block % args.column_blocks) * args.columns +
                                      threadIdx.x % args.columns);
  const std::int64_t first_item = block / args.column_blocks * args.block_items;
  int exponent = 0;
  if constexpr (kScaling != Scaling::kNone) {
    exponent = find_column_exponent<kScaling>(args, column, args.assumed_channel);
  }
  if (column.k >= args.k) return;

  const std::int64_t items = static_cast<std::int64_t>(args.taps) * args.columns * (args.pitch / 8);
  const std::int64_t end = min(first_item + args.block_items, items);
  WeightWalk walk(args, first_item);
  for (std::int64_t item = first_item + threadIdx.x; item < end; item += blockDim.x, walk.advance()) {
    const std::int64_t channel = walk.vector * 8;
    SplitWords<8> words;
    if constexpr (kScaling == Scaling::kNone) {
      std::uint16_t v[8];
      load_item(args, walk, column, v);
      words = encode(v);
    } else {
      float v[8];
      load_item(args, walk, column, v);
      if constexpr (kScaling == Scaling::kAssumed) {
        words = encode<kProducts>(v, OnePower{power_of_two(exponent - args.assumed_channel)});
      } else {
        const ChannelPowers<-1> scale{column.channel, static_cast<int>(channel),
                                      static_cast<int>(args.channels - 1), exponent};
        words = encode<kProducts>(v, scale);
      }
    }
    const std::int64_t row = walk.tap(args) * args.k + column.k;
    store_eight(args.hi, row, channel, args.pitch, vector_of(words.hi));
    if constexpr (kProducts == 3) store_eight(args.lo, row, channel, args.pitch, vector_of(words.lo));
  }
}

}  // namespace upconv3d::cuda
