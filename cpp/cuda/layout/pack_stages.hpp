// SPDX-License-Identifier: Apache-2.0
/// \file
/// The kernels of launch_pack, one launcher each. Internal to layout/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/index_math.hpp"
#include "cuda/layout/pack.hpp"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {

/// float32: x_hi, x_lo and their scales unless x is null, w_hi, w_lo and scales.unscale_column unless w is;
/// clears params.zero.
///
/// \param accumulators those of params.scales that it clears and raises
void launch_pack_scaled_operands(const PackParams& params, ZeroRegion accumulators, cudaStream_t stream);

/// float32: w_hi, w_lo and scales.unscale_column; clears params.zero.
void launch_pack_weight(const PackParams& params, cudaStream_t stream);

/// 16 bit: w_hi unless w is null, x_hi unless it is null, and clears params.zero.
void launch_pack_operands(const PackParams& params, cudaStream_t stream);

/// Blocks of a one-dimensional grid.
///
/// \throws std::invalid_argument where the hardware takes no such grid.
inline unsigned grid_of(std::int64_t blocks, const char* kernel) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (blocks > kMax) {
    throw std::invalid_argument("upconv3d: the grid of " + std::string(kernel) + " must be at most " +
                                std::to_string(kMax) + " blocks; got " + std::to_string(blocks) +
                                ". Use a smaller batch or volume.");
  }
  return static_cast<unsigned>(blocks);
}

}  // namespace upconv3d::cuda
