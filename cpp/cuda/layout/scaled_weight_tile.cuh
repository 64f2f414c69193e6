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

/// Which columns the positions of a tile belong to. A slot is a column of the tile.
struct TileColumns {
  std::int64_t first;    // column of the group's first
  std::uint32_t offset;  // contiguous: the tile's first column within the group, else its first position
  std::uint32_t first_position;

  __device__ TileColumns(const ScaledWeightArgs& args, const ChannelTile& at)
      : first(static_cast<std::int64_t>(at.group) * args.columns),
        offset(static_cast<std::uint32_t>(at.first_position) / args.taps),
        first_position(static_cast<std::uint32_t>(at.first_position)) {}

  /// Slot of the thread's i-th position. channels_last_3d: such that a warp's slots lie side by side.
  __device__ std::uint32_t slot(const ScaledWeightArgs& args, int lane, int i) const {
    return args.taps == 1 ? i * 32 + lane : (first_position + lane * 4 + i) / args.taps - offset;
  }
  /// Column of a slot; past the tile's end any number.
  __device__ std::int64_t column(const ScaledWeightArgs& args, std::uint32_t slot) const {
    if (args.taps != 1) return first + offset + slot;
    return first + (offset + slot % 32 * 4 + slot / 32) % args.columns;
  }
};

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
  std::uint32_t* const absmax = args.column_absmax + columns.column(args, thread % kTilePositions);
  // Past L1, which would keep the first value; columns past the tile's end are none of its group's, perhaps.
  const bool is_column =
      thread < kTilePositions && columns.column(args, thread) < columns.first + args.columns;
  const std::uint32_t seen = is_column ? __ldcg(absmax) : 0;

  std::uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) own = max(own, finite_magnitude(values[j][i]));
    // Neighbouring positions of one column go together.
    const std::uint32_t slot = columns.slot(args, lane, i);
    if (i < 3 && slot == columns.slot(args, lane, i + 1)) continue;
    if (own != 0) atomicMax(&largest[slot], own);
    own = 0;
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

/// Packs a tile that the threads have taken. All threads of the block call it; the
/// staged tile is free again behind a barrier.
template <int kProducts>
__device__ inline void pack_scaled_weight_tile(const ScaledWeightArgs& args, std::uint32_t tile, int assumed,
                                               const float (&values)[8][4]) {
  TransposeTile<kProducts>& staged = staged_tile<kProducts>();
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const InputArgs& lines = args.weight.lines;
  const ChannelTile at(lines, input_tile(lines, tile), warp);
  const TileColumns columns(args, at);
  if (at.in_group < lines.pitch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane * 4 + i;
      int exponent = assumed;
      if (at.first_position + row < lines.positions) {
        const std::int64_t k = columns.column(args, columns.slot(args, lane, i));
        exponent = exponent_of_column(args.column_absmax, k, assumed);
      }
      float eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = values[j][i];
      const SplitWords<8> words = encode<kProducts>(eight, OnePower{power_of_two(exponent - assumed)});
      const int slot = tile_slot<4>(row, warp);
      staged.hi[row][slot] = vector_of(words.hi);
      if constexpr (kProducts == 3) staged.lo[row][slot] = vector_of(words.lo);
    }
  }
  __syncthreads();
  store_staged_rows<4, kProducts>(lines, 0, at, thread, args.weight.rows);
}

/// unscale_column of all columns, by a whole grid behind a barrier.
__device__ inline void write_columns(const ScaledWeightArgs& args, std::int32_t* unscale_column,
                                     std::int64_t count, int assumed, std::int64_t thread,
                                     std::int64_t threads) {
  for (std::int64_t k = thread; k < count; k += threads) {
    unscale_column[k] = -exponent_of_column(args.column_absmax, k, assumed);
  }
}

/// No tiles where w is not dense, or 16-byte loads do not fit it; nor for a w so small that columns apart,
/// which no block waits for, take no longer.
inline ScaledWeightArgs scaled_weight_args(const PackParams& params) {
  constexpr std::int64_t kFewWeights = std::int64_t{1} << 19;
  ScaledWeightArgs args{};
  const Problem& problem = params.problem;
  const std::int64_t columns = group_outputs(problem), taps = volume(problem.kernel);
  const bool by_fours =
      reinterpret_cast<std::uintptr_t>(params.w) % (4 * sizeof(float)) == 0 && columns * taps % 4 == 0;
  if (params.w == nullptr || !by_fours || problem.c * columns * taps < kFewWeights) return args;
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
