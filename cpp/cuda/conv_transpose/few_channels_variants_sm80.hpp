// SPDX-License-Identifier: Apache-2.0
/// \file
/// The launchers of conv_transpose_few_channels_sm80 by dtype, each in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "core/few_channels_layout.hpp"

namespace upconv3d::cuda {

struct FewParams;

void launch_few_channels_bf16(const FewParams& params, const FewChannelsLayout& layout, bool output,
                              cudaStream_t stream);
void launch_few_channels_f16(const FewParams& params, const FewChannelsLayout& layout, bool output,
                             cudaStream_t stream);
/// As TF32.
void launch_few_channels_f32(const FewParams& params, const FewChannelsLayout& layout, bool output,
                             cudaStream_t stream);
/// At float32's accuracy.
void launch_few_channels_f32x3(const FewParams& params, const FewChannelsLayout& layout, bool output,
                               cudaStream_t stream);

}  // namespace upconv3d::cuda
