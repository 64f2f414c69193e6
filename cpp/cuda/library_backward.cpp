// SPDX-License-Identifier: Apache-2.0
#include "cuda/library_backward.hpp"

#include "cuda/group_norm/activation_backward.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/norm_backward.hpp"
#include "cuda/stage_range.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

GroupNormShape shape_of(const BackwardCall& call) {
  const Problem& problem = call.problem;
  return {problem.n,         problem.k, problem.positions(), problem.num_groups, call.forward.tile_positions,
          call.forward.tiles};
}

struct Workspace {
  void* part;      // [N,tiles,K,2] float
  float* table;    // [3,N,K]
  float* groups;   // [N,G,4]
  void* finalize;  // finalize_scratch_bytes
  void* backward;  // norm_backward_scratch_bytes
  std::int64_t bytes;

  Workspace(const BackwardCall& call, void* base) {
    const GroupNormShape shape = shape_of(call);
    Carver carver(base);
    part = carver.take<float>(shape.n * shape.tiles * shape.k * 2);
    table = carver.take<float>(3 * shape.n * shape.k);
    groups = carver.take<float>(4 * shape.n * shape.num_groups);
    finalize = carver.take(finalize_scratch_bytes(shape));
    backward = carver.take(norm_backward_scratch_bytes(shape));
    bytes = carver.used();
  }
};

/// Moments as the forward pass took them, of the same values: to the same bits where it took them by these
/// kernels too and `conv` begins on as many bytes, else to their last ones.
void take_moments_again(const BackwardCall& call, const BackwardTensors& tensors,
                        const ActivationParams& before, const Workspace& workspace, cudaStream_t stream) {
  const Problem& problem = call.problem;
  ActivationMomentsParams moments;
  moments.shape = shape_of(call);
  moments.dtype = problem.dtype;
  moments.y_dtype = problem.dtype;
  moments.layout = call.forward.conv_layout;
  moments.before = before;
  moments.c = tensors.saved;
  moments.bias = tensors.bias;
  moments.part = workspace.part;
  launch_activation_moments(moments, stream);

  FinalizeParams finalize;
  finalize.shape = moments.shape;
  finalize.dtype = problem.dtype;
  finalize.part = workspace.part;
  finalize.gamma = tensors.gamma;
  finalize.beta = tensors.beta;
  finalize.eps = problem.eps;
  finalize.scratch = workspace.finalize;
  finalize.table = workspace.table;
  finalize.groups = workspace.groups;
  launch_group_norm_finalize(finalize, stream);
}

ActivationParams activation_of(const BackwardCall& call, const BackwardTensors& tensors, Activation kind) {
  const Tail& tail = call.problem.tail;
  return {kind, tail.parameter, tensors.slopes, tail.slopes > 1 ? 1 : 0};
}

void run_activation_backward(const BackwardCall& call, const BackwardTensors& tensors, cudaStream_t stream) {
  ActivationBackwardParams params;
  params.shape = shape_of(call);
  params.dtype = call.problem.dtype;
  params.layout = call.forward.conv_layout;
  params.activation = activation_of(call, tensors, call.problem.tail.activation);
  params.c = tensors.saved;
  params.bias = tensors.bias;
  params.grad_y = tensors.grad_y;
  params.grad_c = tensors.grad_c;
  params.grad_bias = tensors.grad_bias;
  params.grad_slopes = tensors.grad_slopes;
  params.scratch = tensors.workspace;
  const StageRange range("upconv3d::activation_backward");
  launch_activation_backward(params, stream);
}

}  // namespace

std::int64_t library_tail_backward_workspace_bytes(const BackwardCall& call) {
  if (!call.problem.tail.norm) return activation_backward_scratch_bytes(shape_of(call));
  return Workspace(call, nullptr).bytes;
}

void run_library_tail_backward(const BackwardCall& call, const BackwardTensors& tensors,
                               cudaStream_t stream) {
  const Tail& tail = call.problem.tail;
  if (!tail.norm) return run_activation_backward(call, tensors, stream);
  const Workspace workspace(call, tensors.workspace);
  {
    const StageRange range("upconv3d::activation_moments");
    take_moments_again(call, tensors, activation_of(call, tensors, tail.before()), workspace, stream);
  }
  NormBackwardParams params;
  params.shape = shape_of(call);
  params.dtype = call.problem.dtype;
  params.layout = call.forward.conv_layout;
  params.before = activation_of(call, tensors, tail.before());
  params.after = activation_of(call, tensors, tail.after());
  params.c = tensors.saved;
  params.grad_y = tensors.grad_y;
  params.bias = tensors.bias;
  params.gamma = tensors.gamma;
  params.table = workspace.table;
  params.groups = workspace.groups;
  params.grad_c = tensors.grad_c;
  params.grad_gamma = tensors.grad_gamma;
  params.grad_beta = tensors.grad_beta;
  params.grad_bias = tensors.grad_bias;
  params.grad_slopes = tensors.grad_slopes;
  params.scratch = workspace.backward;
  const StageRange range("upconv3d::norm_backward");
  launch_norm_backward(params, stream);
}

}  // namespace upconv3d::cuda
