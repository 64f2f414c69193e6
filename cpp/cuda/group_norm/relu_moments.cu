// SPDX-License-Identifier: Apache-2.0
/// \file
/// relu_moments: stage 2 of the library plan, for convolutions whose epilogue is not ours.
///
///   c    [N,K,Z,P,Q] or [N,Z,P,Q,K]  dtype  PyTorch's convolution, without bias
///   part [N,tiles,K,2]               stat   (mean, M2) of relu(c + bias), written once
///
/// One read of c at copy bandwidth. A block never straddles two tiles and each value of part has one writer,
/// so there are no atomics. NDHWC: a thread owns as many channels as fit 16 bytes and walks the tile's
/// positions. NCDHW: the threads share one channel's positions, 16 bytes each, and join at the end.
#include <algorithm>
#include <cstdint>

#include "cuda/group_norm/activation.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/geometry.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/moments.cuh"

namespace upconv3d::cuda {
namespace {

template <class T>
struct MomentsArgs {
  GroupNormShape shape;
  const T* c;                   // [N,K,Z,P,Q] or [N,Z,P,Q,K] T
  const T* bias;                // [K] T, or null
  Stat<T>* part;                // [N,tiles,K,2] stat
  std::int64_t channel_blocks;  // blocks along K, NDHWC only
};

/// Blocks are ordered channel block fastest, then tile, then sample.
template <class T, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) relu_moments_ndhwc(const MomentsArgs<T> args) {
  using S = Stat<T>;
  const std::int64_t k = args.shape.k, tiles = args.shape.tiles;
  const std::int64_t sample_tile = blockIdx.x / args.channel_blocks;
  const std::int64_t channel_block = blockIdx.x - sample_tile * args.channel_blocks;
  const std::int64_t sample = sample_tile / tiles, tile = sample_tile - sample * tiles;
  const std::int64_t channel = (channel_block * blockDim.x + threadIdx.x) * kVector;

  S bias[kVector] = {};
  std::int64_t rows_left = 0;  // of this thread, blockDim.y apart
  if (channel < k) {
    const std::int64_t begin = tile * args.shape.tile_positions;
    const std::int64_t rows = min(args.shape.tile_positions, args.shape.positions - begin);
    rows_left = (rows - threadIdx.y + blockDim.y - 1) / static_cast<std::int64_t>(blockDim.y);
    if (args.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) bias[j] = to_stat(args.bias[channel + j]);
    }
  }

  const std::int64_t step = blockDim.y * k;
  const T* from =
      args.c + (sample * args.shape.positions + tile * args.shape.tile_positions + threadIdx.y) * k + channel;
  Moments<S, kVector> moments;
  for (; rows_left >= kLoadsInFlight; rows_left -= kLoadsInFlight) {
    Vector<T, kVector> raw[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i, from += step) raw[i] = load_once<kVector>(from);
    S value[kLoadsInFlight][kVector];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[i][j] = Input{}(to_stat(raw[i].at[j]), bias[j]);
    }
    moments.absorb(value);
  }
  for (; rows_left > 0; --rows_left, from += step) {
    const Vector<T, kVector> raw = load_once<kVector>(from);
    S value[1][kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) value[0][j] = Input{}(to_stat(raw.at[j]), bias[j]);
    moments.absorb(value);
  }

  merge_slots(moments, threadIdx.y * blockDim.x + threadIdx.x, threadIdx.y, blockDim.y, blockDim.x);
  if (threadIdx.y != 0 || channel >= k) return;
  S* to = args.part + part_offset(sample, tile, channel, tiles, k);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    to[2 * j] = moments.mean[j];
    to[2 * j + 1] = moments.m2[j];
  }
}

/// Blocks are ordered tile fastest, then blockDim.y rows of [N*K, positions] at a time.
template <class T, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) relu_moments_ncdhw(const MomentsArgs<T> args) {
  using S = Stat<T>;
  const std::int64_t k = args.shape.k, tiles = args.shape.tiles;
  const std::int64_t row_block = blockIdx.x / tiles, tile = blockIdx.x - row_block * tiles;
  const std::int64_t row = row_block * blockDim.y + threadIdx.y;
  const std::int64_t sample = row / k, channel = row - sample * k;
  const bool has_row = row < args.shape.n * k;

  // Element offsets in c. Rows start anywhere; the vectors between `first` and `last` are 16-byte aligned.
  const std::int64_t begin = row * args.shape.positions + tile * args.shape.tile_positions;
  const std::int64_t end =
      has_row ? min(begin + args.shape.tile_positions, (row + 1) * args.shape.positions) : begin;
  const std::int64_t first = min((begin + kVector - 1) / kVector * kVector, end);
  const std::int64_t last = max(end / kVector * kVector, first);
  const S bias = has_row && args.bias != nullptr ? to_stat(args.bias[channel]) : S(0);

  Moments<S, kVector> lanes;
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kVector;
  std::int64_t at = first + static_cast<std::int64_t>(threadIdx.x) * kVector;
  for (; at + (kLoadsInFlight - 1) * step < last; at += kLoadsInFlight * step) {
    Vector<T, kVector> raw[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) raw[i] = load_once<kVector>(args.c + at + i * step);
    S value[kLoadsInFlight][kVector];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[i][j] = Input{}(to_stat(raw[i].at[j]), bias);
    }
    lanes.absorb(value);
  }
  for (; at < last; at += step) {
    const Vector<T, kVector> raw = load_once<kVector>(args.c + at);
    S value[1][kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) value[0][j] = Input{}(to_stat(raw.at[j]), bias);
    lanes.absorb(value);
  }

  Moments<S, 1> moments = lanes.join_lanes();
  const auto absorb_one = [&](std::int64_t offset) {
    const S value[1][1] = {{Input{}(to_stat(args.c[offset]), bias)}};
    moments.absorb(value);
  };
  for (std::int64_t i = begin + threadIdx.x; i < first; i += blockDim.x) absorb_one(i);
  for (std::int64_t i = last + threadIdx.x; i < end; i += blockDim.x) absorb_one(i);

  merge_slots(moments, threadIdx.y * blockDim.x + threadIdx.x, threadIdx.x, blockDim.x, 1);
  if (threadIdx.x != 0 || !has_row) return;
  S* to = args.part + part_offset(sample, tile, channel, tiles, k);
  to[0] = moments.mean[0];
  to[1] = moments.m2[0];
}

template <class T, int kVector>
void launch_vectorized(const ReluMomentsParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  MomentsArgs<T> args{shape, static_cast<const T*>(params.c), static_cast<const T*>(params.bias),
                      static_cast<Stat<T>*>(params.part), 1};
  if (params.layout == Layout::kNDHWC) {
    const BlockShape block = channel_block_shape(shape.k, kVector, kStreamThreads);
    args.channel_blocks = block.blocks;
    launch("relu_moments_ndhwc", relu_moments_ndhwc<T, AfterBias<Relu>, kVector>,
           shape.n * shape.tiles * block.blocks, dim3(block.x, block.y), stream, args);
  } else {
    const BlockShape block =
        row_block_shape(std::min(shape.tile_positions, shape.positions), kVector, kStreamThreads);
    launch("relu_moments_ncdhw", relu_moments_ncdhw<T, AfterBias<Relu>, kVector>,
           shape.tiles * ceil_div(shape.n * shape.k, block.y), dim3(block.x, block.y), stream, args);
  }
}

}  // namespace

void launch_relu_moments(const ReluMomentsParams& params, cudaStream_t stream) {
  if (params.shape.n == 0) return;
  with_element(params.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    constexpr int kVector = kAccessBytes / sizeof(T);
    // NCDHW peels what is not aligned off either end of a row; NDHWC needs whole vectors of channels.
    const bool whole = params.layout == Layout::kNCDHW || params.shape.k % kVector == 0;
    if (whole && is_aligned(params.c)) {
      launch_vectorized<T, kVector>(params, stream);
    } else {
      launch_vectorized<T, 1>(params, stream);
    }
  });
}

std::int64_t relu_moments_tile_positions(std::int64_t n, std::int64_t k, std::int64_t positions,
                                         Layout layout, int sm_count) {
  // Sixteen 16-bit vectors, four rounds of loads, for each thread of a block.
  constexpr std::int64_t kBlockElements = std::int64_t{kStreamThreads} * 8 * 16;
  // A partial is 8 bytes: over 256 positions of two bytes each it adds 1.6 % to the traffic.
  constexpr std::int64_t kTileLeast = 256;
  // Where even so the card is not full, the whole tensor is small and filling the card counts for more.
  constexpr std::int64_t kTileLeastSmall = 32;
  // Two blocks per multiprocessor begin to hide each other's latency.
  const std::int64_t blocks_wanted = 2 * std::int64_t{std::max(sm_count, 1)};

  const std::int64_t channels_per_block = layout == Layout::kNDHWC ? std::max<std::int64_t>(k, 1) : 1;
  const std::int64_t rows = layout == Layout::kNDHWC ? n : n * k;
  std::int64_t tile = std::max(kBlockElements / channels_per_block, kTileLeast);
  while (tile > kTileLeastSmall && rows * ceil_div(positions, tile) < blocks_wanted) tile /= 2;
  return std::max<std::int64_t>(std::min(tile, positions), 1);
}

}  // namespace upconv3d::cuda
