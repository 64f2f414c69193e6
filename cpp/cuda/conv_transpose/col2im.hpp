// SPDX-License-Identifier: Apache-2.0
/// \file
/// col2im: sums up the products of a transposed convolution that belong to one output.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

struct Col2imParams {
  Problem problem;
  const void* columns = nullptr;  // ColumnsLayout (core/col2im_plan.hpp), float
  const void* bias = nullptr;     // [K] of problem.dtype, or null
  ActivationParams activation;    // of the sum and its bias
  void* y = nullptr;              // [N,K,Z,P,Q] or [N,Z,P,Q,K] of problem.dtype, in problem.y_layout; written
};

/// \throws std::runtime_error where CUDA refuses the launch
/// \throws std::logic_error of float64
void launch_col2im(const Col2imParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
