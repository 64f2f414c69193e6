// SPDX-License-Identifier: Apache-2.0
/// \file
/// The SM80 plan's part of run_forward and complete_plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/forward.hpp"

namespace upconv3d::cuda {

std::int64_t sm80_workspace_bytes(const Problem& problem, const Plan& plan);

/// Pack the operands, convolve with moments, merge those, normalize into y.
void run_sm80(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, cudaStream_t stream);

}  // namespace upconv3d::cuda
