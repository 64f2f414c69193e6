// SPDX-License-Identifier: Apache-2.0
/// \file
/// The one transpose of layout/: channels, which lie far apart in memory, become the innermost axis.
///
///   source       [C][rows]  T       row j of channel c at rows.first(j)[c * rows.channel_stride]
///   destination  [rows][C]  16 bit  row j at rows.destination(j)
///
/// A block moves 64 channels x 64 rows. Reading, a warp takes 32 consecutive rows of one channel per load:
/// full sectors whatever the alignment or count of rows, so odd extents need no path of their own. A thread
/// gathers 8 channels of a row, converts them, and puts 16 bytes into shared memory. Writing, 8 threads store
/// the 128 bytes of a row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

inline constexpr int kTransposeThreads = 256;
inline constexpr int kTileRows = 64;      // 128 or 256 bytes of every channel: whole cache lines
inline constexpr int kTileChannels = 64;  // 128 bytes of every destination row: one cache line
inline constexpr int kTileVectors = kTileChannels / 8;
inline constexpr int kVectorsPerThread = kTileRows * kTileVectors / kTransposeThreads;

template <int kProducts>
struct TransposeTile {
  uint4 hi[kTileRows][kTileVectors];
  uint4 lo[kProducts == 3 ? kTileRows : 1][kTileVectors];
};

/// Where vector v of a row lies in the tile: both a column of 8 rows (written) and a row of 8 vectors (read)
/// then touch every bank once.
__device__ inline int tile_slot(int row, int vector) {
  return vector ^ (row % kTileVectors);
}

/// \param destination [rows,C] 16 bit, 16-byte aligned
/// \param channels    C; a multiple of 8 is stored 16 bytes at a time
__device__ inline void store_vector(std::uint16_t* destination, std::int64_t row, std::int64_t channel,
                                    std::int64_t channels, const uint4& v) {
  std::uint16_t* const out = destination + row * channels + channel;
  if (channels % 8 == 0) {
    *reinterpret_cast<uint4*>(out) = v;
    return;
  }
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (channel + i < channels) out[i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

/// Moves the tile that begins at (first_row, first_channel). All threads of the block call it, once.
///
/// Rows describes both sides:
///   count, channels, channel_stride       extents, and elements from a channel to the next
///   const T* first(j)                     channel 0 of row j
///   int64_t destination(j)                index of row j in the destination
///   PowerOfTwo factor(j, c)               float32 only: scales the element
///
/// Past the last row or channel a thread reads the last one again, which spares a branch per load, and stores
/// nothing.
///
/// \param hi [rows,C] 16 bit
/// \param lo [rows,C] 16 bit, kProducts == 3 only
template <class T, int kProducts, class Rows>
__device__ inline void transpose_tile(const Rows& rows, std::int64_t first_row, std::int64_t first_channel,
                                      std::uint16_t* hi, std::uint16_t* lo) {
  __shared__ TransposeTile<kProducts> tile;

  // Thread t reads one row, of the vectors of channels t / kTileRows, + kVectorStep, + 2 * kVectorStep, ...
  constexpr int kVectorStep = kTransposeThreads / kTileRows;
  const int read_row = static_cast<int>(threadIdx.x) % kTileRows;
  const int read_vector = static_cast<int>(threadIdx.x) / kTileRows;
  const std::int64_t row = min(first_row + read_row, rows.count - 1);
  const int last_channel =
      static_cast<int>(min(std::int64_t{kTileChannels}, rows.channels - first_channel)) - 1;
  const T* const source = rows.first(row) + first_channel * rows.channel_stride;

  // All loads of a thread are issued before the first is used: 16 in flight hide the latency of memory.
  T values[kVectorsPerThread][8];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int channel = (read_vector + i * kVectorStep) * 8;
    if (channel > last_channel) break;
#pragma unroll
    for (int j = 0; j < 8; ++j) values[i][j] = source[min(channel + j, last_channel) * rows.channel_stride];
  }

#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int vector = read_vector + i * kVectorStep;
    if (vector * 8 > last_channel) break;
    const int slot = tile_slot(read_row, vector);
    if constexpr (std::is_same_v<T, float>) {
      PowerOfTwo factor[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        factor[j] = rows.factor(row, first_channel + min(vector * 8 + j, last_channel));
      const SplitVector<kProducts> packed = encode<kProducts>(values[i], factor);
      tile.hi[read_row][slot] = packed.hi;
      if constexpr (kProducts == 3) tile.lo[read_row][slot] = packed.lo;
    } else {
      tile.hi[read_row][slot] = pack_eight(values[i]);
    }
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int item = i * kTransposeThreads + static_cast<int>(threadIdx.x);
    const int tile_row = item / kTileVectors;
    const int vector = item % kTileVectors;
    const std::int64_t channel = first_channel + vector * 8;
    if (first_row + tile_row >= rows.count || channel >= rows.channels) continue;
    const std::int64_t out = rows.destination(first_row + tile_row);
    const int slot = tile_slot(tile_row, vector);
    store_vector(hi, out, channel, rows.channels, tile.hi[tile_row][slot]);
    if constexpr (kProducts == 3) store_vector(lo, out, channel, rows.channels, tile.lo[tile_row][slot]);
  }
}

}  // namespace upconv3d::cuda
