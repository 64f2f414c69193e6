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
#include "cuda/library_backward.hpp"
#include "cuda/stage_range.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

GroupNormBackwardParams group_norm_params(const BackwardCall& call, const BackwardTensors& tensors) {
  const Problem& problem = call.problem;
  Carver carver(tensors.saved);
  const ActivationMemory activation(problem, call.forward, carver);
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
  params.moments = call.forward.tiles;
  params.table = activation.table;
  params.gamma = tensors.gamma;
  params.beta = tensors.beta;
  params.before = problem.tail.before();
  params.after = {problem.tail.after(), problem.tail.parameter, tensors.slopes,
                  problem.tail.slopes > 1 ? 1 : 0};
  params.signed_steps = params.steps != nullptr && params.before == Activation::kNone;
  params.operand = call.plan.scaled  ? GradOperand::kScaledFloat16
                   : call.plan.split ? GradOperand::kSplitFloat16
                                     : GradOperand::kOwn;
  params.grad_c = tensors.grad_c;
  params.grad_c_pitch = call.plan.grad_c_pitch;
  params.unscale = tensors.unscale;
  params.grad_gamma = tensors.grad_gamma;
  params.grad_beta = tensors.grad_beta;
  params.grad_bias = tensors.grad_bias;
  params.grad_slopes = tensors.grad_slopes;
  params.scratch = tensors.workspace;
  params.sm_count = call.device.sm_count;
  return params;
}

void run_group_norm(const BackwardCall& call, const BackwardTensors& tensors, cudaStream_t stream) {
  if (call.forward.keeps_conv) return run_library_tail_backward(call, tensors, stream);
  const StageRange range("upconv3d::group_norm_backward");
  launch_group_norm_backward(group_norm_params(call, tensors), stream);
}

void run_weight(const BackwardCall& call, const BackwardTensors& tensors, cudaStream_t stream) {
  const StageRange range("upconv3d::grad_w");
  GradWTensors grad_w;
  grad_w.x = tensors.x;
  grad_w.grad_c = tensors.grad_c;
  grad_w.grad_c_pitch = call.plan.grad_c_pitch;
  grad_w.unscale_grad_c = tensors.unscale;
  grad_w.grad_w = tensors.grad_w;
  std::copy_n(tensors.grad_w_strides, 5, grad_w.w_strides);
  grad_w.workspace = tensors.workspace;
  run_grad_w(call.problem, *call.plan.grad_w, call.device, grad_w, stream);
}

void run_input(const BackwardCall& call, const BackwardTensors& tensors, cudaStream_t stream) {
  const StageRange range("upconv3d::grad_x");
  GradXTensors grad_x;
  grad_x.grad_c = tensors.grad_c;
  grad_x.unscale = tensors.unscale;
  grad_x.w = tensors.w;
  std::copy_n(tensors.w_strides, 5, grad_x.w_strides);
  grad_x.grad_x = tensors.grad_x;
  grad_x.workspace = tensors.workspace;
  run_grad_x(*call.plan.grad_x, call.device, grad_x, stream, call.grad_x_memo);
}

}  // namespace

void* overwritable_activation(const BackwardCall& call, const BackwardTensors& tensors) {
  if (call.forward.keeps_conv) return tensors.saved;
  if (!may_overwrite_activation(group_norm_params(call, tensors))) return nullptr;
  Carver carver(tensors.saved);
  return ActivationMemory(call.problem, call.forward, carver).a;
}

std::int64_t backward_workspace_bytes(const BackwardCall& call, BackwardStage stage,
                                      const BackwardTensors& tensors) {
  switch (stage) {
    case BackwardStage::kGroupNorm:
      if (call.forward.keeps_conv) return library_tail_backward_workspace_bytes(call);
      return group_norm_backward_scratch_bytes(group_norm_params(call, tensors));
    case BackwardStage::kGradW:
      return grad_w_workspace_bytes(call.problem, *call.plan.grad_w);
    case BackwardStage::kGradX:
      return grad_x_workspace_bytes(*call.plan.grad_x);
  }
  throw std::logic_error("upconv3d: BackwardStage out of range");
}

void run_backward_stage(const BackwardCall& call, BackwardStage stage, const BackwardTensors& tensors,
                        cudaStream_t stream) {
  try {
    switch (stage) {
      case BackwardStage::kGroupNorm:
        return run_group_norm(call, tensors, stream);
      case BackwardStage::kGradW:
        return run_weight(call, tensors, stream);
      case BackwardStage::kGradX:
        return run_input(call, tensors, stream);
    }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running the backward pass of " +
                             describe(call.problem) + "\n" + describe(call.plan));
  }
}

}  // namespace upconv3d::cuda
