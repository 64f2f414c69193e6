// SPDX-License-Identifier: Apache-2.0
/// \file
/// Backward stage 2: the gradient at x, out of the gradient at the convolution's output.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/grad_x_plan.hpp"
#include "core/plan.hpp"

namespace upconv3d::cuda {

/// Of the block [N,C,D,H,W] -> [N,K,Z,P,Q], whose dtype is meant where none is named.
struct GradXTensors {
  // [N,Z,P,Q,grad_c_pitch(block)] of plan.instance.operand, zeros behind K; 16-byte aligned. Of a float32
  // block it is grad_c / 2^unscale; where plan.split_grad_c(), rows are SplitRows (core/channels.hpp).
  const void* grad_c = nullptr;
  const std::int32_t* unscale = nullptr;  // [1], the exponent for all samples: of a float32 block
  const void* w = nullptr;                // [C,K,T,R,S] dtype, any strides
  std::int64_t w_strides[5] = {};         // of w, in elements
  void* grad_x = nullptr;     // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense in the block's x_layout, 16-byte
                              // aligned; written
  void* workspace = nullptr;  // grad_x_workspace_bytes(plan), 256-byte aligned
};

/// Scratch memory of run_grad_x.
std::int64_t grad_x_workspace_bytes(const GradXPlan& plan);

/// Packs w, then convolves. Asynchronous; the same bits on every run;
/// N = 0 launches nothing.
/// \throws std::runtime_error that names the plan where CUDA refuses a launch.
void run_grad_x(const GradXPlan& plan, const Device& device, const GradXTensors& tensors,
                cudaStream_t stream);

}  // namespace upconv3d::cuda
