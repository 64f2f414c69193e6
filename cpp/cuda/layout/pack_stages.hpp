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

/// scales.x_absmax, which must be zero before. float32 only.
void launch_absmax_input(const PackParams& params, cudaStream_t stream);

/// scales.x_absmax to scales.sample, channel and unscale_sample. float32 only.
void launch_choose_input_exponents(const PackParams& params, cudaStream_t stream);

/// scales.w_reach, which must be zero before, from w and scales.channel. float32 only.
void launch_weight_reach(const PackParams& params, cudaStream_t stream);

/// x_hi and x_lo.
void launch_pack_input(const PackParams& params, cudaStream_t stream);

/// w_hi and w_lo, and for float32 scales.unscale_column.
void launch_pack_weight(const PackParams& params, cudaStream_t stream);

/// \throws std::invalid_argument where the hardware takes no such grid.
inline dim3 grid_of(std::int64_t x, std::int64_t y, const char* kernel) {
  constexpr std::int64_t kMaxX = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t kMaxY = 65535;
  if (x > kMaxX || y > kMaxY) {
    throw std::invalid_argument("upconv3d: the grid of " + std::string(kernel) +
                                " must be at most 2147483647 x 65535; got " + std::to_string(x) + " x " +
                                std::to_string(y) + ". Use fewer input channels or a smaller batch.");
  }
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace upconv3d::cuda
