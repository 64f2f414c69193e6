// SPDX-License-Identifier: Apache-2.0
/// \file
/// float32 x [N,D,H,W,C] to [N,groups,D,H,W,operand_channels] in float16, a tile per block, see
/// input_tile.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/layout/awaited_tile.cuh"
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

/// Largest finite |x| of each channel of the tile, in the order of the packed channels. Zeros before and
/// after a tile.
template <int kVector>
struct BlockAbsmax {
  std::uint32_t largest[kVector][kInputThreads];
};

template <int kVector>
__device__ inline BlockAbsmax<kVector>& block_absmax() {
  __shared__ BlockAbsmax<kVector> absmax;
  return absmax;
}

/// To precede the first tile; complete behind a barrier.
template <int kVector>
__device__ inline void clear_block_absmax() {
#pragma unroll
  for (int j = 0; j < kVector; ++j) block_absmax<kVector>().largest[j][threadIdx.x] = 0;
}

/// The thread's part of block_absmax; complete behind a barrier.
template <int kVector, int kCount>
__device__ inline void gather_block_absmax(std::uint32_t lane, const float (&values)[kCount][kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    float of_numbers = 0.0f;  // fmaxf passes NaN over, and takes |x| as it comes
#pragma unroll
    for (int i = 0; i < kCount; ++i) of_numbers = fmaxf(of_numbers, fabsf(values[i][j]));
    std::uint32_t largest = __float_as_uint(of_numbers);
    if (largest >= kInfinityBits) {  // seldom
      largest = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest = max(largest, finite_magnitude(values[i][j]));
    }
    if (largest != 0) atomicMax(&block_absmax<kVector>().largest[j][lane], largest);
  }
}

/// block_absmax to x_absmax.
template <int kVector, int kProducts>
__device__ inline void record_block_absmax(const InputArgs& args, const InputTile& tile) {
  BlockAbsmax<kVector>& block = block_absmax<kVector>();
  const std::uint32_t first = tile.channel * args.lanes * kVector;
  const std::uint32_t count = min(args.lanes * kVector, args.groups * args.pitch - first);
  for (std::uint32_t i = threadIdx.x; i < count; i += kInputThreads) {
    const std::uint32_t largest = block.largest[i % kVector][i / kVector];
    if (largest == 0) continue;  // as zeros behind a group are
    block.largest[i % kVector][i / kVector] = 0;
    const std::int64_t channel = PackedChannel(args, first + i).channel(args);
    atomicMax(args.x_absmax + tile.n * args.channels + channel, largest);
    note_suspect<kProducts>(args, largest);
  }
}

/// What a thread has of a tile of ndhwc_tile_positions x (lanes * kVector) channels, zeros behind a group
/// among them. kVector is 4 where C/groups is a multiple of 4 and x is 16-byte aligned, else 1.
template <int kVector>
struct StreamTile {
  std::uint32_t lane;
  std::uint32_t rows;  // positions side by side; the last threads may idle
  PackedChannel from;
  std::int64_t first_position;
  bool in_channels;

  __device__ StreamTile(const InputArgs& args, const InputTile& tile, std::uint32_t thread)
      : lane(thread % args.lanes),
        rows(kInputThreads / args.lanes),
        from(args, (tile.channel * args.lanes + lane) * kVector),
        first_position(tile.position * (rows * kThreadPositions<kVector>)+thread / args.lanes),
        in_channels(thread / args.lanes < rows && from.group < args.groups) {}
};

template <int kVector>
__device__ inline void request_ndhwc_tile(const InputArgs& args, const InputTile& tile, float* memory,
                                          std::uint64_t policy) {
  const int thread = thread_of_block();
  const StreamTile<kVector> at(args, tile, thread);
  const AwaitedTile<kVector> awaited(memory, thread);
  const bool has_values = at.in_channels && !at.from.is_zero(args);
  const float* const source = static_cast<const float*>(args.x) +
                              (tile.n * args.positions + at.first_position) * args.channels +
                              at.from.channel(args);
  const std::int64_t step = at.rows * args.channels;
#pragma unroll
  for (int i = 0; i < kThreadPositions<kVector>; ++i) {
    const bool inside = has_values && at.first_position + i * at.rows < args.positions;
    awaited.request(i, source + i * step, inside, policy);
  }
}

template <int kVector>
__device__ inline void take_ndhwc_tile(float* memory, float (&values)[kThreadPositions<kVector>][kVector]) {
  const AwaitedTile<kVector> awaited(memory, thread_of_block());
#pragma unroll
  for (int i = 0; i < kThreadPositions<kVector>; ++i) awaited.take(i, values[i]);
}

/// A tile by assumed scales, out of the values that its threads have taken, and its maxima. block_absmax is
/// zero behind a barrier.
template <int kVector, int kProducts>
__device__ inline void pack_ndhwc_values(const InputArgs& args, const InputTile& tile,
                                         const float (&values)[kThreadPositions<kVector>][kVector]) {
  const StreamTile<kVector> at(args, tile, thread_of_block());
  gather_block_absmax(at.lane, values);
  const std::int64_t out_row = (tile.n * args.groups + at.from.group) * args.positions + at.first_position;
#pragma unroll
  for (int i = 0; i < kThreadPositions<kVector>; ++i) {
    if (!at.in_channels || at.first_position + i * at.rows >= args.positions) break;
    const std::int64_t out = (out_row + i * at.rows) * args.pitch + at.from.within;
    if constexpr (kVector == 4) {
      const SplitWords<4> words = encode<kProducts>(values[i], assumed_scale<kProducts>());
      *reinterpret_cast<uint2*>(args.hi + out) = {words.hi[0], words.hi[1]};
      if constexpr (kProducts == 3) *reinterpret_cast<uint2*>(args.lo + out) = {words.lo[0], words.lo[1]};
    } else {
      const float pair[2] = {values[i][0], 0.0f};
      const SplitWords<2> words = encode<kProducts>(pair, assumed_scale<kProducts>());
      args.hi[out] = static_cast<std::uint16_t>(words.hi[0]);
      if constexpr (kProducts == 3) args.lo[out] = static_cast<std::uint16_t>(words.lo[0]);
    }
  }
  __syncthreads();
  record_block_absmax<kVector, kProducts>(args, tile);
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
