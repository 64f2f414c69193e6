// SPDX-License-Identifier: Apache-2.0
/// \file
/// The col2im plan's convolution, to which the library plan's launches are applied.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/forward.hpp"

namespace upconv3d::cuda {

/// Scratch memory of convolve_by_columns.
std::int64_t columns_bytes(const Problem& problem);

/// Writes the convolution, problem.y_layout, to `conv`; with the bias where it is to be returned.
/// \param tensors x, w, bias and a workspace of columns_bytes
/// \param conv    [N,K,Z,P,Q] or [N,Z,P,Q,K] of problem.dtype; written
void convolve_by_columns(const Problem& problem, const ForwardTensors& tensors, void* conv,
                         cudaStream_t stream);

}  // namespace upconv3d::cuda
