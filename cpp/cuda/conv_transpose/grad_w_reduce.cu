// SPDX-License-Identifier: Apache-2.0
/// \file
/// grad_w_reduce: the final sum of the gradient of the weight.
///
///   partial [splits,tiles,...] float  accumulators of conv_transpose_grad_w_sm90 (grad_w_partials.cuh)
///   grad_w  [C,K,T,R,S]        dtype  any strides
///
/// A block takes 16 rows and 8 columns, channels of one operand and of the other, of every tap: what lies
/// close together in grad_w, with taps or with channels innermost. One warp or a few, where there are few
/// taps, add up a tap's splits, in their order; then all threads write, in memory's order.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_grad_w_sm90.hpp"
#include "cuda/conv_transpose/grad_w_partials.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {
namespace {

constexpr int kThreads = 1024;  // small weights make fewer blocks than there are multiprocessors
constexpr int kWarps = kThreads / 32;
constexpr int kPairs = kGradWWarpRows * kGradWBlockColumns;
constexpr int kChunk = static_cast<int>(kGradWChunk);

/// Where an operand's chunks are.
struct ReduceOperand {
  int taps[3];  // 1 along axes whose taps move the other operand
  int channel_chunks;
};

struct ReduceArgs {
  const float4* partial;               // [splits,tiles,2,blocks,128]
  const std::int32_t* scale_c;         // [C] or null
  const std::int32_t* unscale_grad_c;  // [1] or null
  void* grad_w;                        // [C,K,T,R,S] dtype
  std::int64_t strides[5];             // of grad_w, in elements
  std::int64_t c, k;
  int kernel[3];  // T,R,S
  bool moves_x[3];
  bool rows_are_x;
  bool k_innermost;  // grad_w has neighbouring k closer together than taps
  ReduceOperand rows, columns;
  int row_chunks, column_chunks;  // of a tile
  int column_tiles, tiles, splits;
  int warps_per_tap;
};

/// Tap of grad_w as a coordinate along an axis.
__device__ inline void tap_of(const ReduceArgs& args, unsigned tap, int (&at)[3]) {
  const unsigned r = args.kernel[1], s = args.kernel[2];
  at[2] = static_cast<int>(tap % s);
  at[1] = static_cast<int>(tap / s % r);
  at[0] = static_cast<int>(tap / s / r);
}

/// The chunk of an operand for a tap; those of x count taps backwards.
__device__ inline int chunk_of(const ReduceArgs& args, const ReduceOperand& operand, bool is_x,
                               const int (&tap)[3], int channel_chunk) {
  int index = 0;
  for (int axis = 0; axis < 3; ++axis) {
    const bool moves = args.moves_x[axis] == is_x;
    const int own = !moves ? 0 : is_x ? args.kernel[axis] - 1 - tap[axis] : tap[axis];
    index = index * operand.taps[axis] + own;
  }
  return index * operand.channel_chunks + channel_chunk;
}

/// The block's 16 rows and 8 columns.
struct Patch {
  int row_chunk, column_chunk;  // of channels
  int row_part, column_part;    // of those chunks: 16 rows, 8 columns

  __device__ Patch(const ReduceArgs& args, int block) {
    row_part = block % (kChunk / kGradWWarpRows);
    block /= kChunk / kGradWWarpRows;
    column_part = block % (kChunk / kGradWBlockColumns);
    block /= kChunk / kGradWBlockColumns;
    column_chunk = block % args.columns.channel_chunks;
    row_chunk = block / args.columns.channel_chunks;
  }
};

/// sum += kCount splits from `from` on, all loaded before the first is added; moves `from` behind them.
template <int kCount>
__device__ inline void add_splits(const float4*& from, std::int64_t step, float4& sum) {
  float4 parts[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) parts[i] = __ldcs(from + i * step);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum.x += parts[i].x, sum.y += parts[i].y, sum.z += parts[i].z, sum.w += parts[i].w;
  }
  from += kCount * step;
}

/// This lane's part of a tap's sum over splits [begin,end).
template <int kLoads>
__device__ inline float4 sum_splits(const ReduceArgs& args, const Patch& patch, int tap, int begin, int end) {
  int at[3];
  tap_of(args, tap, at);
  const unsigned row = chunk_of(args, args.rows, args.rows_are_x, at, patch.row_chunk);
  const unsigned column = chunk_of(args, args.columns, !args.rows_are_x, at, patch.column_chunk);
  const unsigned warpgroup_chunks = warpgroup_columns(args.row_chunks, args.column_chunks);
  const unsigned column_tile = column / static_cast<unsigned>(args.column_chunks);
  const unsigned in_tile = column - column_tile * args.column_chunks;
  const bool own_rows = args.row_chunks == 2;  // of a warpgroup
  const int warpgroup = own_rows ? row % 2 : in_tile >= warpgroup_chunks;
  const int in_warpgroup = own_rows ? in_tile : in_tile - warpgroup * warpgroup_chunks;
  const int block = in_warpgroup * (kChunk / kGradWBlockColumns) + patch.column_part;
  const int blocks = warpgroup_chunks * (kChunk / kGradWBlockColumns);
  const int tile = (own_rows ? row / 2 : row) * args.column_tiles + column_tile;
  const int thread = patch.row_part * 32 + static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = grad_w_partial(args.tiles, 0, blocks, 0, 0);
  const float4* from = args.partial + grad_w_partial(tile, warpgroup, blocks, block, thread) + begin * step;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int left = end - begin;
  for (; left >= kLoads; left -= kLoads) add_splits<kLoads>(from, step, sum);
  if constexpr (kLoads > 1) {
    static_assert(kLoads == 8, "what is left is taken by fours, twos and ones");
    if (left & 4) add_splits<4>(from, step, sum);
    if (left & 2) add_splits<2>(from, step, sum);
    if (left & 1) add_splits<1>(from, step, sum);
  }
  return sum;
}

/// A thread's place among what is to be written of a patch: rows and columns, as c and k, and one tap.
struct Destination {
  int c, k;     // of grad_w
  int pair;     // row * 8 + column in the patch
  bool inside;  // of grad_w

  /// \param index of c and k in the patch, k innermost
  __device__ Destination(const ReduceArgs& args, const Patch& patch, int index) {
    const int first_row = patch.row_chunk * kChunk + patch.row_part * kGradWWarpRows;
    const int first_column = patch.column_chunk * kChunk + patch.column_part * kGradWBlockColumns;
    if (args.rows_are_x) {
      const int row = index / kGradWBlockColumns, column = index % kGradWBlockColumns;
      c = first_row + row, k = first_column + column, pair = index;
    } else {
      const int row = index % kGradWWarpRows, column = index / kGradWWarpRows;
      c = first_column + column, k = first_row + row, pair = row * kGradWBlockColumns + column;
    }
    inside = c < args.c && k < args.k;
  }
};

using Sums = float[kPairs][kWarps + 1];

/// Writes the sum of one element. \param tap of the batch \param to_tap grad_w's first element of that tap
template <class T>
__device__ inline void write_element(const ReduceArgs& args, const Destination& to, int unscale, int tap,
                                     T* to_tap, const Sums& sums) {
  const float* const parts = sums[to.pair] + tap * args.warps_per_tap;
  float sum = parts[0];
  for (int part = 1; part < args.warps_per_tap; ++part) sum += parts[part];
  if constexpr (std::is_same_v<T, float>) {  // 16-bit operands are not scaled
    const int exponent = unscale - (args.scale_c ? args.scale_c[to.c] : 0);
    sum = power_of_two(exponent).times(sum);
  }
  to_tap[to.c * args.strides[0] + to.k * args.strides[1]] = from_stat<T>(sum);
}

template <class T>
__device__ inline T* first_of_tap(const ReduceArgs& args, int tap) {
  int at[3];
  tap_of(args, tap, at);
  return static_cast<T*>(args.grad_w) + at[0] * args.strides[2] + at[1] * args.strides[3] +
         at[2] * args.strides[4];
}

/// Writes `taps` taps from `first_tap` on.
///
/// \param sums [16 * 8][taps * warps_per_tap] by row, column, tap and warp
template <class T>
__device__ inline void write_taps(const ReduceArgs& args, const Patch& patch, int first_tap, int taps,
                                  const Sums& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unscale = args.unscale_grad_c ? *args.unscale_grad_c : 0;
  if (args.k_innermost) {
    constexpr int kParts = kPairs / 32;
    for (int item = warp; item < kParts * taps; item += kWarps) {
      const int tap = item / kParts;
      const Destination to(args, patch, item % kParts * 32 + lane);
      if (to.inside) write_element(args, to, unscale, tap, first_of_tap<T>(args, first_tap + tap), sums);
    }
  } else if (lane < taps) {  // a batch has at most 32
    T* const to_tap = first_of_tap<T>(args, first_tap + lane);
    for (int index = warp; index < kPairs; index += kWarps) {
      const Destination to(args, patch, index);
      if (to.inside) write_element(args, to, unscale, lane, to_tap, sums);
    }
  }
}

/// \tparam kLoads of 16 bytes that a thread has in flight, 8 or, of few splits, 1: then with half of the
/// registers two blocks of a multiprocessor take turns.
template <class T, int kLoads>
__global__ void __launch_bounds__(kThreads, kLoads == 1 ? 2 : 1) grad_w_reduce(const ReduceArgs args) {
  static_assert(kWarps == 32, "a lane writes a tap of a batch");
  __shared__ Sums sums;
  const Patch patch(args, blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int all_taps = args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int batch = kWarps / args.warps_per_tap;
  const int part = warp % args.warps_per_tap;
  for (int first = 0; first < all_taps; first += batch) {
    const int taps = min(batch, all_taps - first);
    const int tap = warp / args.warps_per_tap;
    if (tap < taps) {
      const float4 sum = sum_splits<kLoads>(args, patch, first + tap, part * args.splits / args.warps_per_tap,
                                            (part + 1) * args.splits / args.warps_per_tap);
      const float parts[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[grad_w_row(lane, i) * kGradWBlockColumns + grad_w_column(lane, i)][warp] = parts[i];
      }
    }
    __syncthreads();
    write_taps<T>(args, patch, first, taps, sums);
    __syncthreads();
  }
}

ReduceOperand reduce_operand(const GradWReduceParams& params, bool is_x) {
  const GradWOperand walk = grad_w_operand(params.problem, params.plan.moves_x, is_x);
  ReduceOperand to{};
  for (int axis = 0; axis < 3; ++axis) to.taps[axis] = static_cast<int>(walk.taps[axis]);
  to.channel_chunks = static_cast<int>(ceil_div(walk.channels, kGradWChunk));
  return to;
}

ReduceArgs reduce_args(const GradWReduceParams& params) {
  const Problem& problem = params.problem;
  const GradWPlan& plan = params.plan;
  ReduceArgs args{};
  args.partial = reinterpret_cast<const float4*>(params.partial);
  args.scale_c = params.scale_c;
  args.unscale_grad_c = params.unscale_grad_c;
  args.grad_w = params.grad_w;
  std::copy_n(params.w_strides, 5, args.strides);
  args.c = problem.c, args.k = problem.k;
  args.k_innermost = true;
  for (int axis = 0; axis < 3; ++axis) {
    args.kernel[axis] = static_cast<int>(problem.kernel[axis]);
    args.moves_x[axis] = plan.moves_x[axis];
    if (problem.kernel[axis] > 1 && args.strides[2 + axis] < args.strides[1]) args.k_innermost = false;
  }
  args.rows_are_x = plan.rows_are_x;
  args.rows = reduce_operand(params, plan.rows_are_x);
  args.columns = reduce_operand(params, !plan.rows_are_x);
  args.row_chunks = plan.instance->row_chunks;
  args.column_chunks = plan.instance->column_chunks;
  args.column_tiles = static_cast<int>(plan.column_tiles);
  args.tiles = static_cast<int>(plan.tiles());
  args.splits = static_cast<int>(plan.splits);
  const std::int64_t taps = volume(problem.kernel);
  args.warps_per_tap = 1;
  while (2 * args.warps_per_tap * taps <= kWarps) args.warps_per_tap *= 2;
  return args;
}

}  // namespace

void launch_grad_w_reduce(const GradWReduceParams& params, cudaStream_t stream) {
  const ReduceArgs args = reduce_args(params);
  const std::int64_t blocks = static_cast<std::int64_t>(args.rows.channel_chunks) *
                              args.columns.channel_chunks * (kChunk / kGradWWarpRows) *
                              (kChunk / kGradWBlockColumns);
  with_element(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>) {
      throw std::invalid_argument("upconv3d: grad_w_reduce writes no float64; choose another plan.");
    } else {
      constexpr int kManySplits = 4;
      const auto kernel = args.splits >= kManySplits ? grad_w_reduce<T, 8> : grad_w_reduce<T, 1>;
      launch("grad_w_reduce", kernel, blocks, dim3(kThreads), stream, args);
    }
  });
}

}  // namespace upconv3d::cuda
