// SPDX-License-Identifier: Apache-2.0
/// \file
/// Dense w [C,K/groups,T,R,S] to [T*R*S,K,operand_channels], by transposition in tiles; float32 see
/// scaled_weight_tile.cuh.
///
/// Contiguous or channels_last_3d, the weights of an input channel are one stretch of memory, a line. Lines
/// lie one behind the other as the positions of an x [1,C,D,H,W] do, so the tiles of input_tile.cuh take
/// them: they read 128 elements of a line at a time and write whole 128-byte rows, each to where its tap and
/// output channel belong.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/layout/input_tile.cuh"

namespace upconv3d::cuda {

/// Where the weights of a line go in packed w [T*R*S,K,pitch].
struct LineRows {
  std::uint32_t inner;      // contiguous: T*R*S, channels_last_3d: K/groups; the line's other axis is outer
  std::int64_t inner_step;  // rows from one to the next along either axis
  std::int64_t outer_step;
  std::int64_t group_step;  // K/groups

  __device__ std::int64_t operator()(const InputArgs&, std::int64_t, std::uint32_t group,
                                     std::int64_t first_position, int row) const {
    const std::uint32_t p = static_cast<std::uint32_t>(first_position) + row;
    const std::uint32_t outer = p / inner;
    return outer * outer_step + (p - outer * inner) * inner_step + group * group_step;
  }
};

struct WeightLines {
  InputArgs lines;  // w as an x of one sample whose positions are the C lines' elements
  LineRows rows;
};

/// Whether w [C,K/groups,T,R,S] has these strides; those of axes of one element say nothing.
inline bool has_weight_strides(const PackParams& params, const std::int64_t (&expected)[5]) {
  const Problem& problem = params.problem;
  const std::int64_t extents[5] = {problem.c, group_outputs(problem), problem.kernel[0], problem.kernel[1],
                                   problem.kernel[2]};
  for (int axis = 0; axis < 5; ++axis) {
    if (extents[axis] > 1 && params.w_strides[axis] != expected[axis]) return false;
  }
  return true;
}

/// Nothing where w is not dense, in neither order, or its lines are too long for 32-bit positions.
inline std::optional<WeightLines> weight_lines(const PackParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t r = problem.kernel[1], s = problem.kernel[2], taps = volume(problem.kernel);
  const std::int64_t columns = group_outputs(problem), line = columns * taps;
  if (line > std::numeric_limits<std::int32_t>::max()) return std::nullopt;
  LineRows rows{};
  if (has_weight_strides(params, {line, taps, r * s, s, 1})) {
    rows = {static_cast<std::uint32_t>(taps), problem.k, 1, columns};
  } else if (has_weight_strides(params, {line, 1, r * s * columns, s * columns, columns})) {
    rows = {static_cast<std::uint32_t>(columns), 1, problem.k, columns};
  } else {
    return std::nullopt;
  }
  InputArgs lines{};
  lines.x = params.w;
  lines.hi = static_cast<std::uint16_t*>(params.w_hi);
  lines.lo = static_cast<std::uint16_t*>(params.w_lo);
  lines.channels = problem.c;
  lines.positions = line;
  lines.pitch = static_cast<std::uint32_t>(operand_channels(problem));
  lines.groups = static_cast<std::uint32_t>(problem.groups);
  lines.group_channels = static_cast<std::uint32_t>(group_inputs(problem));
  lines.position_tiles = static_cast<std::uint32_t>(ceil_div(line, kTilePositions));
  lines.channel_tiles =
      static_cast<std::uint32_t>(problem.groups * ceil_div(group_inputs(problem), kTileChannels));
  return WeightLines{lines, rows};
}

/// 4 where lines can be read four elements at a time, else 1.
inline int line_vector(const WeightLines& weight) {
  constexpr std::uintptr_t kBytes = 4 * sizeof(std::uint16_t);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(weight.lines.x) % kBytes == 0;
  return is_aligned && weight.lines.positions % 4 == 0 ? 4 : 1;
}

inline std::int64_t weight_tiles(const WeightLines& weight) {
  return static_cast<std::int64_t>(weight.lines.channel_tiles) * weight.lines.position_tiles;
}

template <int kVector>
__device__ inline void pack_weight_tile(const WeightLines& weight, std::uint32_t tile) {
  pack_ncdhw_tile<kVector>(weight.lines, input_tile(weight.lines, tile), weight.rows);
}

}  // namespace upconv3d::cuda
