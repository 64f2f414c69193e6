// SPDX-License-Identifier: Apache-2.0
/// \file
/// The gradient of the weight on a stream. No torch: pointers, extents and a cudaStream_t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/grad_w_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

struct GradWTensors {
  const void* x = nullptr;  // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, problem.x_layout
  // Gradient at the convolution's output, [N,Z,P,Q,grad_c_pitch], zeros behind K, 16-byte aligned: of dtype
  // where that is 16 bit; for float32 float16 that is to be multiplied by 2^unscale_grad_c, where
  // plan.split_grad_c() in rows that are SplitRows (core/channels.hpp) of grad_c_pitch channels.
  const void* grad_c = nullptr;
  std::int64_t grad_c_pitch = 0;                 // a multiple of 8, at least K
  const std::int32_t* unscale_grad_c = nullptr;  // [1] on the device, float32 only, or null for 0
  void* grad_w = nullptr;                        // [C,K,T,R,S] dtype, written
  std::int64_t w_strides[5] = {};                // of grad_w, in elements
  void* workspace = nullptr;                     // grad_w_workspace_bytes, 256-byte aligned
};

/// Scratch memory of a plan without obstacle.
std::int64_t grad_w_workspace_bytes(const Problem& problem, const GradWPlan& plan);

/// Launches packing of x where the plan asks for it, conv_transpose_grad_w_sm90 and grad_w_reduce.
/// Asynchronous.
/// \param device sm_count of it must be the one that the plan was made for.
/// \throws std::runtime_error that names problem and plan where CUDA refuses a launch.
void run_grad_w(const Problem& problem, const GradWPlan& plan, const Device& device,
                const GradWTensors& tensors, cudaStream_t stream);

}  // namespace upconv3d::cuda
