// SPDX-License-Identifier: Apache-2.0
/// \file
/// Dense float32 w [C,K/groups,T,R,S] to [T*R*S,K,operand_channels] in float16, by the tiles of
/// weight_lines.cuh, for an x that is scaled as assumed.
///
/// A column's weights lie in many tiles, and its exponent takes all of them. So a grid measures its tiles
/// first, waits, and packs them then: the last one of each block out of shared memory, the others out of L2.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "cuda/layout/awaited_tile.cuh"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/operand_scale.cuh"
#include "cuda/layout/weight_lines.cuh"

namespace upconv3d::cuda {

struct ScaledWeightArgs {
  WeightLines weight;
  std::uint32_t* column_absmax;  // [K] uint32: bits of the largest finite |w|, raised
  std::uint32_t columns;         // K/groups
  std::uint32_t taps;            // T*R*S; of channels_last_3d 1: each position is a column of its own
  std::uint32_t tiles;           // 0: w goes another way
};

/// Which columns the positions of a tile belong to. A slot is a column of the tile; of channels_last_3d each
/// position has one, in such an order that a warp's lie side by side.
struct TileColumns {
  std::int64_t first;    // column of the group's first
  std::uint32_t offset;  // contiguous: the tile's first column within the group, else its first position
  std::uint32_t phase;   // contiguous: positions of that column before the tile

  __device__ TileColumns(const ScaledWeightArgs& args, const ChannelTile& at)
      : first(static_cast<std::int64_t>(at.group) * args.columns),
        offset(static_cast<std::uint32_t>(at.first_position)),
        phase(0) {
    if (args.taps == 1) return;
    offset /= args.taps;
    phase = static_cast<std::uint32_t>(at.first_position) - offset * args.taps;
  }

  /// Column of a slot; past the tile's end any number.
  __device__ std::int64_t of_slot(const ScaledWeightArgs& args, std::uint32_t slot) const {
    return args.taps == 1 ? of_position(args, slot % 32 * 4 + slot / 32) : first + offset + slot;
  }
  /// Column of a position of the tile; past the line's end any number.
  __device__ std::int64_t of_position(const ScaledWeightArgs& args, std::uint32_t position) const {
    return first +
           (args.taps == 1 ? (offset + position) % args.columns : offset + (phase + position) / args.taps);
  }
};

/// Largest finite |w| of 8 channels at a position.
__device__ inline std::uint32_t position_absmax(const float (&values)[8][4], int i) {
  float of_numbers = 0.0f;  // fmaxf passes NaN over, and takes |w| as it comes
#pragma unroll
  for (int j = 0; j < 8; ++j) of_numbers = fmaxf(of_numbers, fabsf(values[j][i]));
  std::uint32_t largest = __float_as_uint(of_numbers);
  if (largest >= kInfinityBits) {  // seldom
    largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max(largest, finite_magnitude(values[j][i]));
  }
  return largest;
}

/// Requests a tile; L2 keeps it for the second time.
__device__ inline void request_weight_tile(const ScaledWeightArgs& args, std::uint32_t tile, float* memory,
                                           std::uint64_t policy) {
  request_ncdhw_tile<4>(args.weight.lines, input_tile(args.weight.lines, tile), memory, policy);
}

/// Raises column_absmax by a tile that the threads have taken. All threads of the block call it.
///
/// \param largest shared by all tiles of the block, zeros before and after; two in turns, so that a tile need
///                not wait for the one before
__device__ inline void measure_weight_tile(const ScaledWeightArgs& args, std::uint32_t tile,
                                           std::uint32_t (&largest)[kTilePositions],
                                           const float (&values)[8][4]) {
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const InputArgs& lines = args.weight.lines;
  const ChannelTile at(lines, input_tile(lines, tile), thread / 32);
  const TileColumns columns(args, at);
  const std::int64_t column = columns.of_slot(args, thread % kTilePositions);
  std::uint32_t* const absmax = args.column_absmax + column;
  // Past L1, which would keep the first value; columns past the tile's end may be no columns.
  const bool is_column = thread < kTilePositions && column < columns.first + args.columns;
  const std::uint32_t seen = is_column ? __ldcg(absmax) : 0;

  if (args.taps == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t own = position_absmax(values, i);
      if (own != 0) atomicMax(&largest[i * 32 + lane], own);
    }
  } else {
    std::uint32_t slot = (columns.phase + lane * 4) / args.taps;
    std::uint32_t left = (slot + 1) * args.taps - (columns.phase + lane * 4);  // positions of that column
    std::uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own = max(own, position_absmax(values, i));
      if (--left != 0 && i < 3) continue;  // positions of one column go together
      if (own != 0) atomicMax(&largest[slot], own);
      ++slot;
      left = args.taps;
      own = 0;
    }
  }
  __syncthreads();
  if (thread < kTilePositions && largest[thread] != 0) {
    if (largest[thread] > seen) atomicMax(absmax, largest[thread]);
    largest[thread] = 0;
  }
}

/// Exponent of a column, complete behind a barrier of the grid.
__device__ inline int exponent_of_column(const std::uint32_t* column_absmax, std::int64_t k, int assumed) {
  const std::uint32_t largest = __ldcg(column_absmax + k);
  return column_exponent(largest != 0 ? biased_reach(largest, -assumed) : 0);
}

/// What the positions of a tile are multiplied by, and where they go: found once, for all its channels.
struct WeightPositions {
  PowerOfTwo power[kTilePositions];
  std::int64_t row[kTilePositions];

  __device__ std::int64_t operator()(const InputArgs&, std::int64_t, std::uint32_t, std::int64_t,
                                     int position) const {
    return row[position];
  }
};

/// Packs a tile that the threads have taken. All threads of the block call it; its shared memory is free
/// again behind a barrier.
template <int kProducts>
__device__ inline void pack_scaled_weight_tile(const ScaledWeightArgs& args, std::uint32_t tile, int assumed,
                                               const float (&values)[8][4]) {
  __shared__ WeightPositions positions;
  TransposeTile<kProducts>& staged = staged_tile<kProducts>();
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const InputArgs& lines = args.weight.lines;
  const ChannelTile at(lines, input_tile(lines, tile), warp);
  if (thread < kTilePositions && at.first_position + thread < lines.positions) {
    const std::int64_t k = TileColumns(args, at).of_position(args, thread);
    positions.power[thread] = power_of_two(exponent_of_column(args.column_absmax, k, assumed) - assumed);
    positions.row[thread] = args.weight.rows(lines, 0, at.group, at.first_position, thread);
  }
  __syncthreads();
  if (at.in_group < lines.pitch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane * 4 + i;
      float eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = values[j][i];
      const SplitWords<8> words = encode<kProducts>(eight, OnePower{positions.power[row]});
      const int slot = tile_slot<4>(row, warp);
      staged.hi[row][slot] = vector_of(words.hi);
      if constexpr (kProducts == 3) staged.lo[row][slot] = vector_of(words.lo);
    }
  }
  __syncthreads();
  store_staged_rows<4, kProducts>(lines, 0, at, thread, positions);
}

/// unscale_column of all columns, by a whole grid behind a barrier.
__device__ inline void write_columns(const ScaledWeightArgs& args, std::int32_t* unscale_column,
                                     std::int64_t count, int assumed, std::int64_t thread,
                                     std::int64_t threads) {
  for (std::int64_t k = thread; k < count; k += threads) {
    unscale_column[k] = -exponent_of_column(args.column_absmax, k, assumed);
  }
}

/// No tiles where w is not dense, or 16-byte loads do not fit it.
inline ScaledWeightArgs scaled_weight_args(const PackParams& params) {
  ScaledWeightArgs args{};
  const Problem& problem = params.problem;
  const std::int64_t columns = group_outputs(problem), taps = volume(problem.kernel);
  const bool by_fours =
      reinterpret_cast<std::uintptr_t>(params.w) % (4 * sizeof(float)) == 0 && columns * taps % 4 == 0;
  if (params.w == nullptr || !by_fours) return args;
  const std::optional<WeightLines> lines = weight_lines(params);
  if (!lines) return args;
  args.weight = *lines;
  args.column_absmax = params.scales.column_absmax;
  args.columns = static_cast<std::uint32_t>(columns);
  args.taps = lines->rows.outer_step == 1 ? static_cast<std::uint32_t>(taps) : 1;
  args.tiles = static_cast<std::uint32_t>(weight_tiles(*lines));
  return args;
}

}  // namespace upconv3d::cuda
