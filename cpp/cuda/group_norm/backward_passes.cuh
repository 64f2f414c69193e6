// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the backward's streaming passes share: how they walk over tiles of dense tensors, of rows
/// [N*Z*P*Q, K] or of planes [N*K, Z*P*Q], how a block adds up its threads' sums, and what an activation lets
/// through. Tiles are those of a GroupNormShape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/geometry.hpp"
#include "cuda/group_norm/group_norm.hpp"

namespace upconv3d::cuda {

/// g*derivative, but 0 behind ReLU's closed gate even where g is Inf or NaN, as in PyTorch.
template <class Functor>
__device__ __forceinline__ float through_activation(Functor functor, float v, float parameter, float g) {
  if constexpr (std::is_same_v<Functor, ReluActivation>) {
    return v <= 0.f ? 0.f : g;
  } else {
    return g * functor.derivative(v, parameter);
  }
}

/// Positions of rows of which a thread loads all that it reads before it uses the first.
inline constexpr int kRowPositions = 4;

/// Vectors of either of two tensors that a thread of a plane has in flight: 64 bytes, as in the forward's
/// passes.
inline constexpr int kPlanePairs = kLoadsInFlight / 2;

/// A tile of positions of a block of channels, channel block fastest, then tile, then sample. A thread owns
/// kVector channels.
template <int kVector>
struct RowTile {
  std::int64_t sample, tile, channel;
  std::int64_t at, step;  // element offset of this thread's first vector, and to the next one
  std::int64_t count;     // of vectors; 0 where this thread has no channels
  bool exists;

  /// \param channel_blocks along K
  __device__ __forceinline__ RowTile(const GroupNormShape& shape, std::int64_t channel_blocks,
                                     std::int64_t block) {
    const std::int64_t sample_tile = block / channel_blocks;
    sample = sample_tile / shape.tiles;
    tile = sample_tile - sample * shape.tiles;
    channel = ((block - sample_tile * channel_blocks) * blockDim.x + threadIdx.x) * kVector;
    exists = channel < shape.k;
    if (!exists) channel = 0;
    const std::int64_t begin = tile * shape.tile_positions;
    const std::int64_t positions = min(shape.tile_positions, shape.positions - begin);
    step = blockDim.y * shape.k;
    at = (sample * shape.positions + begin + threadIdx.y) * shape.k + channel;
    count = exists ? (positions - threadIdx.y + blockDim.y - 1) / static_cast<std::int64_t>(blockDim.y) : 0;
  }

  /// Calls several(offset) for kRowPositions vectors `step` apart, single(offset) for what is left.
  template <class Several, class Single>
  __device__ __forceinline__ void each(Several several, Single single) const {
    std::int64_t left = count, from = at;
    for (; left >= kRowPositions; left -= kRowPositions, from += kRowPositions * step) several(from);
    for (; left > 0; --left, from += step) single(from);
  }
};

/// A tile of a plane, which the threads of a row of the block share: element offsets, the vectors between
/// `first` and `last` aligned. Planes start anywhere, at the same place in all tensors.
template <int kVector>
struct PlaneTile {
  std::int64_t sample, channel, row, tile;
  std::int64_t begin, end, first, last;
  bool exists;

  __device__ __forceinline__ PlaneTile(const GroupNormShape& shape, std::int64_t block) {
    const std::int64_t row_block = block / shape.tiles;
    tile = block - row_block * shape.tiles;
    row = row_block * blockDim.y + threadIdx.y;
    exists = row < shape.n * shape.k;
    if (!exists) row = 0;
    sample = row / shape.k;
    channel = row - sample * shape.k;
    begin = row * shape.positions + tile * shape.tile_positions;
    end = exists ? min(begin + shape.tile_positions, (row + 1) * shape.positions) : begin;
    first = min((begin + kVector - 1) / kVector * kVector, end);
    last = max(end / kVector * kVector, first);
  }

  /// Calls whole(offset, step) for kPlanePairs vectors `step` elements apart, vector(offset) for one vector,
  /// and single(offset) for one element, until this thread's share is done.
  template <class Whole, class One, class Single>
  __device__ __forceinline__ void each(Whole whole, One vector, Single single) const {
    const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kVector;
    std::int64_t at = first + static_cast<std::int64_t>(threadIdx.x) * kVector;
    for (; at + (kPlanePairs - 1) * step < last; at += kPlanePairs * step) whole(at, step);
    for (; at < last; at += step) vector(at);
    for (std::int64_t i = begin + threadIdx.x; i < first; i += blockDim.x) single(i);
    for (std::int64_t i = last + threadIdx.x; i < end; i += blockDim.x) single(i);
  }
};

/// Sums over the threads of the same channels, by halves; right in those with threadIdx.y 0. All threads of
/// the block call this; it has kStreamThreads at most.
template <int kSums>
__device__ __forceinline__ void sum_slots(float (&sums)[kSums]) {
  __shared__ float memory[kSums][kStreamThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, slot = threadIdx.y;
  int live = blockDim.y;
  while (live > 1) {
    const int width = (live + 1) / 2;
    if (slot >= width && slot < live) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) memory[i][thread] = sums[i];
    }
    __syncthreads();
    if (slot + width < live) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += memory[i][thread + width * blockDim.x];
    }
    __syncthreads();
    live = width;
  }
}

/// Sums over the threads of a row of the block, in an order that blockDim.x alone decides; right in the row's
/// first thread. blockDim.x is a power of two, and the block has kStreamThreads threads.
template <int kSums>
__device__ __forceinline__ void sum_row(float (&sums)[kSums]) {
  __shared__ float warps[kStreamThreads / 32][kSums];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    for (int lane = min(static_cast<int>(blockDim.x), 32) / 2; lane > 0; lane /= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lane);
    }
    if (thread % 32 == 0) warps[thread / 32][i] = sums[i];
  }
  if (blockDim.x <= 32) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    float sum = 0.f;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += warps[thread / 32 + warp][i];
    sums[i] = sum;
  }
}

/// Writes a vector and leaves it in L2, unlike store_once: the convolution's gradients read grad_c next.
/// \param to [kCount] T, aligned to their bytes, at most 16
template <int kCount, class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, kCount>& vector) {
  using W = Word<kCount * sizeof(T)>;
  static_assert(sizeof(W) == kCount * sizeof(T));
  W word;
  memcpy(&word, &vector, sizeof(word));
  *reinterpret_cast<W*>(to) = word;
}

/// Launches a kernel whose threads own `vector` channels of rows, by RowTile.
/// \param args its channel_blocks are set here
template <class Args>
void launch_rows(const char* name, void (*kernel)(Args), const GroupNormShape& shape, int vector, Args args,
                 cudaStream_t stream) {
  const BlockShape block = channel_block_shape(shape.k, vector, kStreamThreads);
  args.channel_blocks = block.blocks;
  launch(name, kernel, shape.n * shape.tiles * block.blocks, dim3(block.x, block.y), stream, args);
}

/// Launches a kernel of planes, by PlaneTile.
template <class Args>
void launch_planes(const char* name, void (*kernel)(Args), const GroupNormShape& shape, int vector,
                   const Args& args, cudaStream_t stream) {
  const BlockShape block =
      row_block_shape(std::min(shape.tile_positions, shape.positions), vector, kStreamThreads);
  launch(name, kernel, shape.tiles * ceil_div(shape.n * shape.k, block.y), dim3(block.x, block.y), stream,
         args);
}

}  // namespace upconv3d::cuda
