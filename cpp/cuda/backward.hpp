// SPDX-License-Identifier: Apache-2.0
/// \file
/// Runs a backward plan on a stream. No torch: pointers, extents and a cudaStream_t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/backward_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

/// Of the gradients, those that are wanted; null pointers otherwise.
struct BackwardTensors {
  const void* grad_y = nullptr;  // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, dense, any alignment
  Layout grad_y_layout = Layout::kNCDHW;
  const void* saved = nullptr;  // saved_bytes(problem, forward), as the forward pass left it
  const void* x = nullptr;      // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, problem.x_layout; for grad_w
  const void* w = nullptr;      // [C,K,T,R,S] dtype; for grad_x
  std::int64_t w_strides[5] = {};
  const void* gamma = nullptr;  // [K] dtype, or null for 1

  void* grad_x = nullptr;  // as x, 16-byte aligned
  void* grad_w = nullptr;  // [C,K,T,R,S] dtype
  std::int64_t grad_w_strides[5] = {};
  void* grad_bias = nullptr;   // [K] dtype
  void* grad_gamma = nullptr;  // [K] dtype
  void* grad_beta = nullptr;   // [K] dtype
  void* grad_c = nullptr;      // plan.library: [N,Z,P,Q,plan.grad_c_pitch] dtype, 16-byte aligned
  void* workspace = nullptr;   // backward_workspace_bytes, 256-byte aligned
};

/// Scratch memory of run_backward.
/// \param forward the plan of the forward pass, which kept relu(conv)
std::int64_t backward_workspace_bytes(const Problem& problem, const Plan& forward, const BackwardPlan& plan,
                                      const Device& device, const BackwardTensors& tensors);

/// Launches every stage. Asynchronous. problem.n is at least 1.
/// \throws std::runtime_error that names problem and plan where CUDA refuses a launch.
void run_backward(const Problem& problem, const Plan& forward, const BackwardPlan& plan, const Device& device,
                  const BackwardTensors& tensors, cudaStream_t stream);

}  // namespace upconv3d::cuda
