// SPDX-License-Identifier: Apache-2.0
/// \file
/// launch_pack: which kernel runs, and what it is told; and the memory of the scales.

#include "cuda/layout/pack.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/ndhwc_tile.cuh"
#include "cuda/layout/pack_stages.hpp"

namespace upconv3d::cuda {
namespace {

/// Each array begins where 16-byte accesses may, and shares no L2 line with its neighbour.
constexpr std::int64_t kAlignment = 256;

std::int64_t padded_bytes(std::int64_t count) {
  return ceil_div(count * static_cast<std::int64_t>(sizeof(std::int32_t)), kAlignment) * kAlignment;
}

bool is_scaled(const Problem& problem) {
  return problem.dtype == DType::kFloat32;
}

void require_packable(const PackParams& params, bool with_x) {
  const DType dtype = params.problem.dtype;
  if (dtype == DType::kFloat32) {
    const bool known = params.operand == DType::kFloat16 && (params.products == 1 || params.products == 3);
    if (known && with_x == (params.x_hi != nullptr)) return;
    throw std::invalid_argument(
        std::string("upconv3d: float32 is packed to float16 operands with 1 or 3 products; got ") +
        name(params.operand) + " with " + std::to_string(params.products) + " products and " +
        (params.x_hi == nullptr ? "no" : "a") + " destination for x. Choose another plan.");
  }
  const bool is_16_bit = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (is_16_bit && params.operand == dtype && params.products == 1) return;
  throw std::invalid_argument(std::string("upconv3d: 16-bit input is packed as it is, with 1 product; got ") +
                              name(dtype) + " to " + name(params.operand) + " with " +
                              std::to_string(params.products) + " products. Choose another plan.");
}

/// x_absmax, channel_reach, suspect, tickets and column_absmax: see carve_operand_scales.
std::int64_t accumulator_bytes(const Problem& problem) {
  return padded_bytes(problem.n * problem.c) + padded_bytes(problem.c) + 2 * padded_bytes(1) +
         padded_bytes(problem.k);
}

}  // namespace

InputArgs input_args(const PackParams& params, int vector) {
  const Problem& problem = params.problem;
  const std::int64_t positions = volume(problem.in);
  const bool is_ncdhw = problem.x_layout == Layout::kNCDHW;
  std::int64_t tile_positions = kTilePositions;
  std::int64_t channel_tiles = problem.groups * ceil_div(group_inputs(problem), kTileChannels);
  std::int64_t lanes = 0;
  if (!is_ncdhw) {
    const std::int64_t vectors = problem.groups * operand_channels(problem) / vector;
    channel_tiles = ceil_div(vectors, kInputThreads);
    lanes = ceil_div(vectors, channel_tiles);
    const auto count = static_cast<std::uint32_t>(lanes);
    tile_positions = vector == 4 ? ndhwc_tile_positions<4>(count) : ndhwc_tile_positions<1>(count);
  }
  const std::int64_t position_tiles = ceil_div(positions, tile_positions);
  grid_of(saturating_product(problem.n, channel_tiles, position_tiles), "packing x");
  return {
      .x = params.x,
      .hi = static_cast<std::uint16_t*>(params.x_hi),
      .lo = static_cast<std::uint16_t*>(params.x_lo),
      .x_absmax = params.scales.x_absmax,
      .suspect = params.scales.suspect,
      .channels = problem.c,
      .positions = positions,
      .pitch = static_cast<std::uint32_t>(operand_channels(problem)),
      .groups = static_cast<std::uint32_t>(problem.groups),
      .group_channels = static_cast<std::uint32_t>(group_inputs(problem)),
      .position_tiles = static_cast<std::uint32_t>(position_tiles),
      .channel_tiles = static_cast<std::uint32_t>(channel_tiles),
      .lanes = static_cast<std::uint32_t>(lanes),
  };
}

std::int64_t operand_scales_bytes(const Problem& problem) {
  if (!is_scaled(problem)) return 0;
  return accumulator_bytes(problem) + 2 * padded_bytes(problem.n) + padded_bytes(problem.c) +
         padded_bytes(problem.k);
}

OperandScales carve_operand_scales(const Problem& problem, void* memory) {
  OperandScales scales;
  if (!is_scaled(problem)) return scales;
  auto* next = static_cast<std::byte*>(memory);
  const auto take = [&next](std::int64_t count) {
    std::byte* const begin = next;
    next += padded_bytes(count);
    return static_cast<void*>(begin);
  };
  scales.x_absmax = static_cast<std::uint32_t*>(take(problem.n * problem.c));
  scales.channel_reach = static_cast<std::uint32_t*>(take(problem.c));
  scales.suspect = static_cast<std::uint32_t*>(take(1));
  scales.tickets = static_cast<std::uint32_t*>(take(1));
  scales.column_absmax = static_cast<std::uint32_t*>(take(problem.k));
  scales.sample = static_cast<std::int32_t*>(take(problem.n));
  scales.channel = static_cast<std::int32_t*>(take(problem.c));
  scales.unscale_sample = static_cast<std::int32_t*>(take(problem.n));
  scales.unscale_column = static_cast<std::int32_t*>(take(problem.k));
  return scales;
}

void launch_pack(const PackParams& params, cudaStream_t stream) {
  require_packable(params, true);
  if (params.problem.n == 0) return;
  if (is_scaled(params.problem)) {
    PackParams assumed = params;
    assumed.assumed_channel = assumed_exponent(params.products);
    launch_pack_scaled_operands(assumed, {params.scales.x_absmax, accumulator_bytes(params.problem)}, stream);
  } else {
    launch_pack_operands(params, stream);
  }
}

void launch_pack_w(const PackParams& params, cudaStream_t stream) {
  require_packable(params, false);
  if (params.problem.n == 0) return;
  PackParams alone = params;
  alone.x = nullptr;
  alone.x_hi = nullptr;
  if (is_scaled(params.problem)) {
    launch_pack_weight(alone, stream);
  } else {
    launch_pack_operands(alone, stream);
  }
}

void launch_pack_x(const PackParams& params, cudaStream_t stream) {
  require_packable(params, true);
  if (params.problem.n == 0) return;
  PackParams x_alone = params;
  x_alone.w = nullptr;
  x_alone.zero_bytes = 0;
  if (is_scaled(params.problem)) {
    launch_pack_scaled_operands(x_alone, {params.scales.x_absmax, accumulator_bytes(params.problem)}, stream);
  } else {
    launch_pack_operands(x_alone, stream);
  }
}

}  // namespace upconv3d::cuda
