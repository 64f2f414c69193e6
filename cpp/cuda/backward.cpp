// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "cuda/activation_memory.hpp"
#include "cuda/grad_w.hpp"
#include "cuda/grad_x.hpp"
#include "cuda/group_norm/group_norm_backward.hpp"
#include "cuda/stage_range.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

/// Backward stage 1 but for its scratch memory and what it writes there.
GroupNormBackwardParams group_norm_params(const Problem& problem, const Plan& forward,
                                          const BackwardPlan& plan, const Device& device,
                                          const BackwardTensors& tensors) {
  Carver carver(const_cast<void*>(tensors.saved));
  const ActivationMemory activation(problem, forward, carver);
  GroupNormBackwardParams params;
  params.n = problem.n;
  params.k = problem.k;
  params.positions = problem.positions();
  params.num_groups = problem.num_groups;
  params.dtype = problem.dtype;
  params.grad_y_layout = tensors.grad_y_layout;
  params.grad_y = tensors.grad_y;
  params.a = activation.a;
  params.a_pitch = padded_channels(problem.k);
  params.steps = activation.steps;
  params.moment_of = activation.moment_of;
  params.moments = forward.tiles;
  params.table = activation.table;
  params.gamma = tensors.gamma;
  params.operand = plan.scaled ? GradOperand::kScaledFloat16 : GradOperand::kOwn;
  params.grad_c_pitch = plan.grad_c_pitch;
  params.grad_gamma = tensors.grad_gamma;
  params.grad_beta = tensors.grad_beta;
  params.grad_bias = tensors.grad_bias;
  params.sm_count = device.sm_count;
  return params;
}

/// Scratch memory of a backward call. The two convolutions, one after the other, share theirs.
struct BackwardWorkspace {
  void* group_norm;
  std::int32_t* unscale;  // [1], where grad_c is scaled
  void* grad_c;           // [N,Z,P,Q,plan.grad_c_pitch] operand, where our kernels read it
  void* convolution;
  std::int64_t bytes;

  BackwardWorkspace(const Problem& problem, const BackwardPlan& plan, const GroupNormBackwardParams& params,
                    void* base) {
    Carver carver(base);
    group_norm = carver.take(group_norm_backward_scratch_bytes(params));
    unscale = carver.take<std::int32_t>(plan.scaled ? 1 : 0);
    constexpr std::int64_t kOperandBytes = 2;
    const bool ours = plan.grad_x || plan.grad_w;
    grad_c = carver.take(ours ? problem.n * problem.positions() * plan.grad_c_pitch * kOperandBytes : 0);
    convolution = carver.take(std::max(plan.grad_x ? grad_x_workspace_bytes(*plan.grad_x) : 0,
                                       plan.grad_w ? grad_w_workspace_bytes(problem, *plan.grad_w) : 0));
    bytes = carver.used();
  }
};

void run_stages(const Problem& problem, const Plan& forward, const BackwardPlan& plan, const Device& device,
                const BackwardTensors& tensors, cudaStream_t stream) {
  GroupNormBackwardParams norm = group_norm_params(problem, forward, plan, device, tensors);
  const BackwardWorkspace workspace(problem, plan, norm, tensors.workspace);
  norm.scratch = workspace.group_norm;
  norm.unscale = workspace.unscale;
  norm.grad_c = plan.library ? tensors.grad_c : workspace.grad_c;
  {
    const StageRange range("upconv3d::group_norm_backward");
    launch_group_norm_backward(norm, stream);
  }

  if (plan.grad_x) {
    GradXTensors grad_x;
    grad_x.grad_c = workspace.grad_c;
    grad_x.unscale = workspace.unscale;
    grad_x.w = tensors.w;
    std::copy_n(tensors.w_strides, 5, grad_x.w_strides);
    grad_x.grad_x = tensors.grad_x;
    grad_x.workspace = workspace.convolution;
    const StageRange range("upconv3d::grad_x");
    run_grad_x(*plan.grad_x, device, grad_x, stream);
  }
  if (plan.grad_w) {
    GradWTensors grad_w;
    grad_w.x = tensors.x;
    grad_w.grad_c = workspace.grad_c;
    grad_w.grad_c_pitch = plan.grad_c_pitch;
    grad_w.unscale_grad_c = workspace.unscale;
    grad_w.grad_w = tensors.grad_w;
    std::copy_n(tensors.grad_w_strides, 5, grad_w.w_strides);
    grad_w.workspace = workspace.convolution;
    const StageRange range("upconv3d::grad_w");
    run_grad_w(problem, *plan.grad_w, device, grad_w, stream);
  }
}

}  // namespace

std::int64_t backward_workspace_bytes(const Problem& problem, const Plan& forward, const BackwardPlan& plan,
                                      const Device& device, const BackwardTensors& tensors) {
  return BackwardWorkspace(problem, plan, group_norm_params(problem, forward, plan, device, tensors), nullptr)
      .bytes;
}

void run_backward(const Problem& problem, const Plan& forward, const BackwardPlan& plan, const Device& device,
                  const BackwardTensors& tensors, cudaStream_t stream) {
  try {
    run_stages(problem, forward, plan, device, tensors, stream);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running the backward pass of " +
                             describe(problem) + "\n" + describe(plan));
  }
}

}  // namespace upconv3d::cuda
