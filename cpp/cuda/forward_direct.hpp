// SPDX-License-Identifier: Apache-2.0
/// \file
/// The direct plan's part of run_forward and complete_plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/forward.hpp"

namespace upconv3d::cuda {

std::int64_t direct_workspace_bytes(const Problem& problem, const Plan& plan);

/// Convolve for the moments, merge those, convolve again and normalize into y; without a normalization,
/// convolve into y.
/// \param memo of calls of this plan; or null
void run_direct(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, cudaStream_t stream,
                LaunchMemo* memo);

}  // namespace upconv3d::cuda
