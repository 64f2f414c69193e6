// SPDX-License-Identifier: Apache-2.0
/// \file
/// Runs a backward plan on a stream, stage by stage, so that each stage's scratch memory can be the next
/// one's result. No torch: pointers, extents and a cudaStream_t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/backward_plan.hpp"
#include "core/launch_memo.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

/// Of the gradients, those that are wanted; null pointers otherwise.
struct BackwardTensors {
  const void* grad_y = nullptr;  // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, dense, any alignment
  Layout grad_y_layout = Layout::kNCDHW;
  void* saved = nullptr;       // saved_bytes(problem, forward), as the forward pass left it
  const void* bias = nullptr;  // [K] dtype, or null; where the convolution without bias was kept
  const void* x = nullptr;     // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, problem.x_layout; for grad_w
  const void* w = nullptr;     // [C,K,T,R,S] dtype; for grad_x
  std::int64_t w_strides[5] = {};
  const void* gamma = nullptr;   // [K] dtype, or null for 1
  const void* beta = nullptr;    // [K] dtype, or null for 0; read where an activation follows the norm
  const void* slopes = nullptr;  // [tail.slopes] dtype, or null

  void* grad_x = nullptr;  // as x, 16-byte aligned
  void* grad_w = nullptr;  // [C,K,T,R,S] dtype
  std::int64_t grad_w_strides[5] = {};
  void* grad_bias = nullptr;    // [K] dtype
  void* grad_gamma = nullptr;   // [K] dtype
  void* grad_beta = nullptr;    // [K] dtype
  void* grad_slopes = nullptr;  // [tail.slopes] dtype
  // Gradient at the convolution's output, between the stages, 16-byte aligned: [N,Z,P,Q,plan.grad_c_pitch],
  // dtype or float16 (plan.scaled) or SplitRows (plan.split). May be overwritable_activation. Where the
  // convolution was kept, as that lies, of any alignment.
  void* grad_c = nullptr;
  std::int32_t* unscale = nullptr;  // [1] with plan.scaled or split: grad_c is to be multiplied by 2^unscale
  void* workspace = nullptr;        // of the stage that runs, 256-byte aligned
};

/// In launch order; the last two where the plan has them.
enum class BackwardStage : std::uint8_t { kGroupNorm, kGradW, kGradX };

/// What a stage is to run: a forward plan that kept before(conv) or the convolution, and the backward plan.
struct BackwardCall {
  const Problem& problem;
  const Plan& forward;
  const BackwardPlan& plan;
  const Device& device;
  LaunchMemo* grad_x_memo = nullptr;  // of grad_x in calls of this plan on this device; or null
};

/// Where what was kept lies in tensors.saved if grad_c may take its place; else null. Reads grad_y_layout
/// too.
void* overwritable_activation(const BackwardCall& call, const BackwardTensors& tensors);

/// Scratch memory of a stage; pointers of `tensors` tell which gradients are wanted.
std::int64_t backward_workspace_bytes(const BackwardCall& call, BackwardStage stage,
                                      const BackwardTensors& tensors);

/// Launches a stage. Asynchronous. problem.n is at least 1.
/// \throws std::runtime_error that names problem and plan where CUDA refuses a launch.
void run_backward_stage(const BackwardCall& call, BackwardStage stage, const BackwardTensors& tensors,
                        cudaStream_t stream);

}  // namespace upconv3d::cuda
