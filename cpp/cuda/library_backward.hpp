// SPDX-License-Identifier: Apache-2.0
/// \file
/// Backward of the library plan up to grad_c, from the convolution that the forward pass kept: its moments
/// again, then norm_backward, or without a norm activation_backward. What convolves grad_c is PyTorch's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/backward.hpp"

namespace upconv3d::cuda {

/// Scratch memory of run_library_tail_backward.
std::int64_t library_tail_backward_workspace_bytes(const BackwardCall& call);

/// Launches it. `tensors` as for BackwardStage::kGroupNorm of a forward plan with keeps_conv.
void run_library_tail_backward(const BackwardCall& call, const BackwardTensors& tensors, cudaStream_t stream);

}  // namespace upconv3d::cuda
