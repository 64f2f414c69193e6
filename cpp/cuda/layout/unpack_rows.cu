// SPDX-License-Identifier: Apache-2.0
/// \file
/// unpack_rows: for results that the convolution cannot store where they belong, because their rows are no
/// whole 16-byte chunks or their layout is another. Those are few, so the kernels are plain.

#include "cuda/layout/unpack_rows.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/layout/pack_stages.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTilePositions = 64;
constexpr int kRowBytes = 128;  // of channels in a tile: a line of memory

/// rows [N,positions,pitch] to dense [N,C,positions], in tiles of 64 positions x 128 bytes of channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    unpack_rows_transposed(const T* rows, T* dense, std::int64_t positions, std::int64_t channels,
                           std::int64_t pitch, std::int64_t position_tiles, std::int64_t channel_tiles) {
  constexpr int kVector = 16 / int(sizeof(T));
  constexpr int kTileChannels = kRowBytes / int(sizeof(T));
  constexpr int kVectors = kTileChannels / kVector;
  // One word more than positions: column by column, writes meet other banks.
  __shared__ T tile[kTileChannels][kTilePositions + 4 / int(sizeof(T))];
  const std::int64_t block = blockIdx.x;
  const std::int64_t channel0 = block % channel_tiles * kTileChannels;
  const std::int64_t position0 = block / channel_tiles % position_tiles * kTilePositions;
  const std::int64_t n = block / channel_tiles / position_tiles;

  const int vector = threadIdx.x % kVectors;
  for (int p = threadIdx.x / kVectors; p < kTilePositions; p += kThreads / kVectors) {
    const std::int64_t channel = channel0 + vector * kVector;
    if (position0 + p >= positions || channel >= pitch) continue;
    const T* const from = rows + (n * positions + position0 + p) * pitch + channel;
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(from));
#pragma unroll
    for (int i = 0; i < kVector; ++i) tile[vector * kVector + i][p] = reinterpret_cast<const T*>(&word)[i];
  }
  __syncthreads();

  const int p = threadIdx.x % kTilePositions;
  if (position0 + p >= positions) return;
  for (int c = threadIdx.x / kTilePositions; c < kTileChannels; c += kThreads / kTilePositions) {
    if (channel0 + c >= channels) return;
    __stcs(dense + (n * channels + channel0 + c) * positions + position0 + p, tile[c][p]);
  }
}

/// rows [count,pitch] to dense [count,C].
template <class T>
__global__ void __launch_bounds__(kThreads)
    unpack_rows(const T* rows, T* dense, std::int64_t elements, std::int64_t channels, std::int64_t pitch) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const std::int64_t row = i / channels;
  __stcs(dense + i, __ldcs(rows + row * pitch + (i - row * channels)));
}

template <class T>
void launch(const UnpackRowsParams& params, cudaStream_t stream) {
  const T* const rows = static_cast<const T*>(params.rows);
  T* const dense = static_cast<T*>(params.dense);
  if (params.layout == Layout::kNCDHW) {
    const std::int64_t position_tiles = ceil_div(params.positions, kTilePositions);
    const std::int64_t channel_tiles = ceil_div(params.channels, kRowBytes / int(sizeof(T)));
    const unsigned grid = grid_of(params.n * position_tiles * channel_tiles, "unpack_rows");
    unpack_rows_transposed<<<grid, kThreads, 0, stream>>>(rows, dense, params.positions, params.channels,
                                                          params.pitch, position_tiles, channel_tiles);
  } else {
    const std::int64_t elements = params.n * params.positions * params.channels;
    const unsigned grid = grid_of(ceil_div(elements, kThreads), "unpack_rows");
    unpack_rows<<<grid, kThreads, 0, stream>>>(rows, dense, elements, params.channels, params.pitch);
  }
  check_launch("unpack_rows");
}

}  // namespace

void launch_unpack_rows(const UnpackRowsParams& params, cudaStream_t stream) {
  if (params.n == 0) return;
  if (size_of(params.dtype) == 2) {
    launch<unsigned short>(params, stream);
  } else if (size_of(params.dtype) == 4) {
    launch<unsigned>(params, stream);
  } else {
    throw std::invalid_argument(std::string("upconv3d: unpack_rows moves elements of 16 or 32 bit; got ") +
                                name(params.dtype) + ". Choose another plan.");
  }
}

}  // namespace upconv3d::cuda
