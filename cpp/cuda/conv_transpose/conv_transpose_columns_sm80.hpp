// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_columns_sm80: every product of a transposed convolution, summed up over input channels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

struct ConvTransposeColumnsParams {
  Problem problem;                 // float32, bfloat16 or float16
  const void* x = nullptr;         // [N,C,D,H,W] or [N,D,H,W,C], problem.x_layout
  const void* w = nullptr;         // [C,K,T,R,S]
  std::int64_t w_strides[5] = {};  // in elements
  void* columns = nullptr;         // ColumnsLayout (core/col2im_plan.hpp), written; 16-byte aligned
};

/// columns(k, tap, input) = sum over c of w(c, k, tap) * x(c, input).
/// \throws std::runtime_error where CUDA refuses the launch
void launch_columns(const ConvTransposeColumnsParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
