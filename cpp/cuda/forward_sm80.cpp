// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward_sm80.hpp"

#include "core/channels.hpp"
#include "cuda/conv_transpose/conv_transpose_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/packed_operands.hpp"
#include "cuda/stage_range.hpp"

namespace upconv3d::cuda {
namespace {

/// Scratch memory of a forward call on the SM80 plan.
struct Sm80Workspace {
  Carver carver;
  PackedOperands operands;
  void* a;         // [N,Z,P,Q,K] activation dtype, where it does not lie in y
  void* part;      // [N,tiles,K,2] float
  void* counts;    // [tiles] int32
  void* finalize;  // finalize_scratch_bytes
  void* table;     // [3,N,K] float
  std::int64_t bytes;

  Sm80Workspace(const Problem& problem, const Plan& plan, const GroupNormShape& shape, void* base)
      : carver(base), operands(problem, plan, carver) {
    constexpr std::int64_t kFloat = sizeof(float);
    a = carver.take(
        plan.activation_in_y ? 0 : problem.n * problem.k * problem.positions() * size_of(plan.activation));
    part = carver.take(problem.n * plan.tiles * problem.k * 2 * kFloat);
    counts = carver.take(plan.tiles * static_cast<std::int64_t>(sizeof(std::int32_t)));
    finalize = carver.take(finalize_scratch_bytes(shape));
    table = carver.take(3 * problem.n * problem.k * kFloat);
    bytes = carver.used();
  }
};

GroupNormShape group_norm_shape(const Problem& problem, const Plan& plan) {
  return {problem.n, problem.k, problem.positions(), problem.num_groups, plan.tile_positions, plan.tiles};
}

}  // namespace

std::int64_t sm80_workspace_bytes(const Problem& problem, const Plan& plan) {
  return Sm80Workspace(problem, plan, group_norm_shape(problem, plan), nullptr).bytes;
}

void run_sm80(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, cudaStream_t stream) {
  const GroupNormShape shape = group_norm_shape(problem, plan);
  const Sm80Workspace workspace(problem, plan, shape, tensors.workspace);
  const PackedOperands& operands = workspace.operands;
  const OperandScales scales = operands.pack(problem, plan, tensors, {}, stream);

  ConvTransposeSm80Params conv;
  conv.problem = problem;
  conv.problem.c = operand_channels(problem);  // zeros behind C add nothing
  conv.x_hi = operands.x(plan, tensors);
  conv.x_lo = operands.x_lo;
  conv.w_hi = operands.w_hi;
  conv.w_lo = operands.w_lo;
  conv.bias = tensors.bias;
  conv.unscale_sample = scales.unscale_sample;
  conv.unscale_column = scales.unscale_column;
  conv.a = plan.activation_in_y ? tensors.y : workspace.a;
  conv.part = static_cast<float*>(workspace.part);
  conv.counts = static_cast<std::int32_t*>(workspace.counts);
  conv.split_axes = plan.split_axes;
  {
    const StageRange range("upconv3d::conv_transpose_relu_moments");
    find_conv_transpose_sm80_launcher(plan.instance->name)(conv, stream);
  }

  FinalizeParams finalize;
  finalize.shape = shape;
  finalize.dtype = problem.dtype;
  finalize.part = workspace.part;
  finalize.counts = conv.counts;
  finalize.gamma = tensors.gamma;
  finalize.beta = tensors.beta;
  finalize.eps = problem.eps;
  finalize.scratch = workspace.finalize;
  finalize.table = workspace.table;
  {
    const StageRange range("upconv3d::finalize");
    launch_group_norm_finalize(finalize, stream);
  }

  NormalizeParams normalize;
  normalize.shape = shape;
  normalize.a_dtype = plan.activation;
  normalize.y_dtype = problem.dtype;
  normalize.a_layout = plan.conv_layout;
  normalize.y_layout = problem.y_layout;
  normalize.a = conv.a;
  normalize.table = workspace.table;
  normalize.y = tensors.y;
  const StageRange range("upconv3d::normalize");
  launch_group_norm_normalize(normalize, stream);
}

}  // namespace upconv3d::cuda
