// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launcher of conv_transpose_few_channels_sm80, which host code can include.
#pragma once

#include <cuda_runtime_api.h>

#include "core/few_channels_layout.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"

namespace upconv3d::cuda {

/// The output pass where params.y is given, else the moments pass.
/// \param layout few_channels_layout(params.problem): part has its tiles
/// \throws std::runtime_error where CUDA refuses the launch
void launch_few_channels(const ConvTransposeDirectParams& params, const FewChannelsLayout& layout,
                         cudaStream_t stream);

}  // namespace upconv3d::cuda
