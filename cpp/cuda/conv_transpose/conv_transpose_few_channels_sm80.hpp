// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launcher of conv_transpose_few_channels_sm80, which host code can include.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"

namespace upconv3d::cuda {

/// Partial moments per sample and channel: tiles of core/few_channels_layout.hpp.
std::int64_t few_channels_tiles(const Problem& problem);

/// The output pass where params.y is given, else the moments pass.
/// \throws std::logic_error for a block that few_channels_obstacle refuses
/// \throws std::runtime_error where CUDA refuses the launch
void launch_few_channels(const ConvTransposeDirectParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
