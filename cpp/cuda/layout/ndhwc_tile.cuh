// SPDX-License-Identifier: Apache-2.0
/// \file
/// float32 x [N,D,H,W,C] to [N,groups,D,H,W,operand_channels] in float16, a tile per block, see
/// input_tile.cuh; and tiles of either layout by one name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

/// Where channel `packed` of all groups' rows side by side, zeros included, comes from.
struct PackedChannel {
  std::uint32_t group;
  std::uint32_t within;  // the group; of zeros no less than group_channels

  __device__ PackedChannel(const InputArgs& args, std::uint32_t packed)
      : group(packed / args.pitch), within(packed - group * args.pitch) {}
  __device__ bool is_zero(const InputArgs& args) const { return within >= args.group_channels; }
  __device__ std::int64_t channel(const InputArgs& args) const {
    return static_cast<std::int64_t>(group) * args.group_channels + within;
  }
};

/// Positions that a thread packs: 128 bytes with 16-byte loads, 64 where x only allows single floats.
template <int kVector>
inline constexpr int kThreadPositions = kVector == 4 ? 8 : 16;

/// Positions of a tile.
template <int kVector>
__host__ __device__ inline std::uint32_t ndhwc_tile_positions(std::uint32_t lanes) {
  return kInputThreads / lanes * kThreadPositions<kVector>;
}

/// Largest finite |x| of each channel of the tile, in the order of the packed channels.
template <int kVector>
struct BlockAbsmax {
  std::uint32_t largest[kVector][kInputThreads];
};

template <int kVector>
__device__ inline BlockAbsmax<kVector>& block_absmax() {
  __shared__ BlockAbsmax<kVector> absmax;
  return absmax;
}

/// Fills block_absmax; complete behind a barrier. All threads of the block call it.
template <int kVector, int kCount>
__device__ inline void gather_block_absmax(const InputArgs& args, const float (&values)[kCount][kVector]) {
  BlockAbsmax<kVector>& block = block_absmax<kVector>();
  const std::uint32_t lane = threadIdx.x % args.lanes;
#pragma unroll
  for (int j = 0; j < kVector; ++j) block.largest[j][threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, magnitude(values[i][j]));
    if (largest >= kInfinityBits) {  // seldom: leave non-finite values out
      largest = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest = max(largest, finite_magnitude(values[i][j]));
    }
    if (largest != 0) atomicMax(&block.largest[j][lane], largest);
  }
}

/// block_absmax to x_absmax.
template <int kVector, int kProducts>
__device__ inline void record_block_absmax(const InputArgs& args, const InputTile& tile) {
  const BlockAbsmax<kVector>& block = block_absmax<kVector>();
  const std::uint32_t first = tile.channel * args.lanes * kVector;
  const std::uint32_t count = min(args.lanes * kVector, args.groups * args.pitch - first);
  for (std::uint32_t i = threadIdx.x; i < count; i += kInputThreads) {
    const std::uint32_t largest = block.largest[i % kVector][i / kVector];
    if (largest == 0) continue;  // as zeros behind a group are
    const std::int64_t channel = PackedChannel(args, first + i).channel(args);
    const std::uint32_t before = atomicMax(args.x_absmax + tile.n * args.channels + channel, largest);
    count_misfits<kProducts>(args, before, largest);
  }
}

/// A thread's values of a tile to packed x.
///
/// \param out index of the first position's element
template <int kVector, int kProducts, class Scale>
__device__ inline void store_positions(const InputArgs& args,
                                       const float (&values)[kThreadPositions<kVector>][kVector],
                                       const Scale& scale, std::int64_t first_position, std::uint32_t rows,
                                       std::int64_t out) {
#pragma unroll
  for (int i = 0; i < kThreadPositions<kVector>; ++i) {
    if (first_position + i * rows >= args.positions) break;
    const std::int64_t to = out + static_cast<std::int64_t>(i * rows) * args.pitch;
    if constexpr (kVector == 4) {
      const SplitWords<4> words = encode<kProducts>(values[i], scale);
      *reinterpret_cast<uint2*>(args.hi + to) = {words.hi[0], words.hi[1]};
      if constexpr (kProducts == 3) *reinterpret_cast<uint2*>(args.lo + to) = {words.lo[0], words.lo[1]};
    } else {
      const float pair[2] = {values[i][0], 0.0f};
      const SplitWords<2> words = encode<kProducts>(pair, scale);
      args.hi[to] = static_cast<std::uint16_t>(words.hi[0]);
      if constexpr (kProducts == 3) args.lo[to] = static_cast<std::uint16_t>(words.lo[0]);
    }
  }
}

/// A tile of ndhwc_tile_positions x (lanes * kVector) channels, zeros behind a group among them. kVector is 4
/// where C/groups is a multiple of 4 and x is 16-byte aligned, else 1.
template <Scaling kScaling, int kVector, int kProducts>
__device__ inline void pack_ndhwc_tile(const InputArgs& args, const InputTile& tile) {
  constexpr int kPositions = kThreadPositions<kVector>;
  const std::uint32_t thread = thread_of_block();
  const std::uint32_t lane = thread % args.lanes;
  const std::uint32_t row = thread / args.lanes;
  const std::uint32_t rows = kInputThreads / args.lanes;  // positions side by side; the last threads may idle
  const PackedChannel from(args, (tile.channel * args.lanes + lane) * kVector);
  const std::int64_t channel = from.channel(args);
  const std::int64_t first_position = tile.position * (rows * kPositions) + row;
  const bool in_channels = row < rows && from.group < args.groups;
  const bool has_values = in_channels && !from.is_zero(args);
  const std::int64_t first = (tile.n * args.positions + first_position) * args.channels + channel;
  const std::int64_t step = rows * args.channels;
  const float* const x = static_cast<const float*>(args.x);

  float values[kPositions][kVector] = {};
#pragma unroll
  for (int i = 0; i < kPositions; ++i) {
    const bool inside = has_values && first_position + i * rows < args.positions;
    if (inside) load_once(x + first + i * step, values[i]);
  }
  if constexpr (kScaling == Scaling::kAssumed) gather_block_absmax(args, values);

  const std::int64_t out_row = (tile.n * args.groups + from.group) * args.positions + first_position;
  const std::int64_t out = out_row * args.pitch + from.within;
  if constexpr (kScaling == Scaling::kAssumed) {
    if (in_channels) {
      store_positions<kVector, kProducts>(args, values, assumed_scale<kProducts>(), first_position, rows,
                                          out);
    }
    __syncthreads();
    record_block_absmax<kVector, kProducts>(args, tile);
  } else if (in_channels) {
    PowerEach<kVector == 4 ? 4 : 2> chosen;  // encode takes pairs
#pragma unroll
    for (int j = 0; j < (kVector == 4 ? 4 : 2); ++j) {
      chosen.power[j] = chosen_power(args, tile.n, channel + j);
    }
    store_positions<kVector, kProducts>(args, values, chosen, first_position, rows, out);
  }
}

/// Asks L2 for a tile that is a stretch of memory, as it is where one tile has all channels.
template <int kVector>
__device__ inline void prefetch_ndhwc_tile(const InputArgs& args, const InputTile& tile) {
  if (args.channel_tiles > 1) return;
  constexpr std::int64_t kLine = 32;  // floats
  const std::int64_t first_position = tile.position * ndhwc_tile_positions<kVector>(args.lanes);
  const std::int64_t positions = min(args.positions - first_position,
                                     static_cast<std::int64_t>(ndhwc_tile_positions<kVector>(args.lanes)));
  const std::int64_t line = thread_of_block() * kLine;
  if (line >= positions * args.channels) return;
  prefetch_line(static_cast<const float*>(args.x) +
                (tile.n * args.positions + first_position) * args.channels + line);
}

/// Either layout.
template <bool kChannelsFirst, Scaling kScaling, int kVector, int kProducts>
__device__ inline void pack_input_tile(const InputArgs& args, const InputTile& tile) {
  if constexpr (kChannelsFirst) {
    pack_ncdhw_tile<kScaling, kVector, kProducts>(args, tile, InputRows{});
  } else {
    pack_ndhwc_tile<kScaling, kVector, kProducts>(args, tile);
  }
}

template <bool kChannelsFirst, int kVector>
__device__ inline void prefetch_input_tile(const InputArgs& args, const InputTile& tile) {
  if constexpr (kChannelsFirst) {
    prefetch_ncdhw_tile(args, tile);
  } else {
    prefetch_ndhwc_tile<kVector>(args, tile);
  }
}

/// 4 where x can be read four elements at a time, else 1.
inline int input_vector(const PackParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t innermost =
      problem.x_layout == Layout::kNCDHW ? volume(problem.in) : group_inputs(problem);
  const auto bytes = static_cast<std::uintptr_t>(4 * size_of(problem.dtype));
  return innermost % 4 == 0 && reinterpret_cast<std::uintptr_t>(params.x) % bytes == 0 ? 4 : 1;
}

/// \throws std::invalid_argument where the tiles are more than a grid takes.
InputArgs input_args(const PackParams& params, int vector);

inline std::uint32_t input_tiles(const InputArgs& args, const Problem& problem) {
  return static_cast<std::uint32_t>(problem.n) * args.channel_tiles * args.position_tiles;
}

}  // namespace upconv3d::cuda
