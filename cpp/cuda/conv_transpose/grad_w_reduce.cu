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
constexpr int kLoads = 8;  // of 16 bytes that a thread has in flight: 128 KB of a multiprocessor
static_assert(kLoads == 8, "sum_splits takes what is left by fours, twos and ones");
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
__device__ inline void tap_of(const ReduceArgs& args, int tap, int (&at)[3]) {
  at[2] = tap % args.kernel[2];
  at[1] = tap / args.kernel[2] % args.kernel[1];
  at[0] = tap / args.kernel[2] / args.kernel[1];
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
__device__ inline float4 sum_splits(const ReduceArgs& args, const Patch& patch, int tap, int begin, int end) {
  int at[3];
  tap_of(args, tap, at);
  const int row = chunk_of(args, args.rows, args.rows_are_x, at, patch.row_chunk);
  const int column = chunk_of(args, args.columns, !args.rows_are_x, at, patch.column_chunk);
  const int warpgroup_chunks = warpgroup_columns(args.row_chunks, args.column_chunks);
  const int in_tile = column % args.column_chunks;
  const int warpgroup = args.row_chunks == 2 ? row % 2 : in_tile / warpgroup_chunks;
  const int block = in_tile % warpgroup_chunks * (kChunk / kGradWBlockColumns) + patch.column_part;
  const int blocks = warpgroup_chunks * (kChunk / kGradWBlockColumns);
  const int tile = row / args.row_chunks * args.column_tiles + column / args.column_chunks;
  const int thread = patch.row_part * 32 + static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = grad_w_partial(args.tiles, 0, blocks, 0, 0);
  const float4* from = args.partial + grad_w_partial(tile, warpgroup, blocks, block, thread) + begin * step;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int left = end - begin;
  for (; left >= kLoads; left -= kLoads) add_splits<kLoads>(from, step, sum);
  if (left & 4) add_splits<4>(from, step, sum);
  if (left & 2) add_splits<2>(from, step, sum);
  if (left & 1) add_splits<1>(from, step, sum);
  return sum;
}

/// Writes `taps` taps from `first_tap` on.
///
/// \param sums [16 * 8][taps * warps_per_tap] by row, column, tap and warp
template <class T>
__device__ inline void write_taps(const ReduceArgs& args, const Patch& patch, int first_tap, int taps,
                                  const float (&sums)[kPairs][kWarps + 1]) {
  const int k_count = args.rows_are_x ? kGradWBlockColumns : kGradWWarpRows;
  const int first_row = patch.row_chunk * kChunk + patch.row_part * kGradWWarpRows;
  const int first_column = patch.column_chunk * kChunk + patch.column_part * kGradWBlockColumns;
  const int unscale = args.unscale_grad_c ? *args.unscale_grad_c : 0;
  for (int i = threadIdx.x; i < kPairs * taps; i += kThreads) {
    int tap, c_part, k_part;
    if (args.k_innermost) {
      k_part = i % k_count, tap = i / k_count % taps, c_part = i / k_count / taps;
    } else {
      tap = i % taps, k_part = i / taps % k_count, c_part = i / taps / k_count;
    }
    const int row = args.rows_are_x ? c_part : k_part, column = args.rows_are_x ? k_part : c_part;
    const int c = args.rows_are_x ? first_row + row : first_column + column;
    const int k = args.rows_are_x ? first_column + column : first_row + row;
    if (c >= args.c || k >= args.k) continue;
    int at[3];
    tap_of(args, first_tap + tap, at);
    const int exponent = unscale - (args.scale_c ? args.scale_c[c] : 0);
    const float* const parts = sums[row * kGradWBlockColumns + column] + tap * args.warps_per_tap;
    float sum = parts[0];
    for (int part = 1; part < args.warps_per_tap; ++part) sum += parts[part];
    const float value = power_of_two(exponent).times(sum);
    T* const to = static_cast<T*>(args.grad_w) + c * args.strides[0] + k * args.strides[1];
    to[at[0] * args.strides[2] + at[1] * args.strides[3] + at[2] * args.strides[4]] = from_stat<T>(value);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) grad_w_reduce(const ReduceArgs args) {
  __shared__ float sums[kPairs][kWarps + 1];
  const Patch patch(args, blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int all_taps = args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int batch = kWarps / args.warps_per_tap;
  const int part = warp % args.warps_per_tap;
  for (int first = 0; first < all_taps; first += batch) {
    const int taps = min(batch, all_taps - first);
    const int tap = warp / args.warps_per_tap;
    if (tap < taps) {
      const float4 sum = sum_splits(args, patch, first + tap, part * args.splits / args.warps_per_tap,
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
      launch("grad_w_reduce", grad_w_reduce<T>, blocks, dim3(kThreads), stream, args);
    }
  });
}

}  // namespace upconv3d::cuda
