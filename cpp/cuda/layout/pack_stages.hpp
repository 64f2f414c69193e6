// SPDX-License-Identifier: Apache-2.0
/// \file
/// The stages of launch_pack, one launcher each. Internal to layout/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/index_math.hpp"
#include "cuda/layout/pack.hpp"

namespace upconv3d::cuda {

/// float32: w_hi, w_lo and scales.unscale_column for the assumed scales of x; clears params.zero and
/// `accumulators`, those of scales that pack_input raises.
///
/// \param accumulator_bytes of scales.x_absmax and its three neighbours
void launch_pack_weight(const PackParams& params, std::int64_t accumulator_bytes, cudaStream_t stream);

/// float32: x_hi and x_lo by the assumed scales, and the verdict on those; scales.sample, channel and
/// unscale_sample. The accumulators must be zero before.
void launch_pack_input(const PackParams& params, cudaStream_t stream);

/// float32: x_hi, x_lo, w_hi, w_lo and scales.unscale_column once more, by scales.sample and channel, where
/// scales.verdict asks for it. Without params.w x alone.
void launch_repack(const PackParams& params, cudaStream_t stream);

/// float32: what the three above do, with params.assumed_channel at its own choice; without params.w what
/// the latter two do to x alone.
void launch_pack_scaled_operands(const PackParams& params, std::int64_t accumulator_bytes,
                                 cudaStream_t stream);

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
