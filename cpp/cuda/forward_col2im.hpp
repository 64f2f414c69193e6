// SPDX-License-Identifier: Apache-2.0
/// \file
/// The col2im plan's convolution, to which the library plan's launches are applied.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"
#include "cuda/forward.hpp"

namespace upconv3d::cuda {

/// Scratch memory of convolve_by_columns.
std::int64_t columns_bytes(const Problem& problem);

/// What the gather does with the convolution, and where to.
struct ColumnsTail {
  const void* bias = nullptr;   // [K] of problem.dtype, or null
  ActivationParams activation;  // of the sum
  void* y = nullptr;            // [N,K,Z,P,Q] or [N,Z,P,Q,K] of problem.dtype, in problem.y_layout; written
};

/// Writes activation(conv + bias).
/// \param tensors x, w and a workspace of columns_bytes
void convolve_by_columns(const Problem& problem, const ForwardTensors& tensors, const ColumnsTail& tail,
                         cudaStream_t stream);

}  // namespace upconv3d::cuda
