// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward.hpp"

#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "core/twice_layout.hpp"
#include "cuda/activation_memory.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/forward_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/packed_operands.hpp"
#include "cuda/stage_range.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

GroupNormShape group_norm_shape(const Problem& problem, const Plan& plan) {
  return {problem.n, problem.k, problem.positions(), problem.num_groups, plan.tile_positions, plan.tiles};
}

std::int64_t stat_size(const Problem& problem) {
  return problem.dtype == DType::kFloat64 ? 8 : 4;
}

/// Scratch memory of a forward call on the SM90 plan.
struct Sm90Workspace {
  Carver carver;
  PackedOperands operands;
  float* part;             // [N,tiles,K/granule,2]
  float* channel_table;    // [3,N,K], where normalizing is a stage of its own
  std::int32_t* counters;  // [counter_count]
  std::int64_t counter_bytes;
  std::int64_t activation_offset;  // of ActivationMemory, where it is not kept
  std::int64_t bytes;

  Sm90Workspace(const Problem& problem, const Plan& plan, void* base)
      : carver(base), operands(problem, plan, carver) {
    const int granule_shift = plan.twice ? twice_granule_shift(problem) : moment_granule_shift(problem);
    part = carver.take<float>(problem.n * plan.tiles * (problem.k >> granule_shift) * 2);
    channel_table = carver.take<float>(plan.normalizes ? 0 : 3 * problem.k * problem.n);
    counter_bytes = counter_count(problem) * static_cast<std::int64_t>(sizeof(std::int32_t));
    counters = carver.take<std::int32_t>(counter_count(problem));
    activation_offset = carver.used();
    if (!plan.keeps_activation) const ActivationMemory counted(problem, plan, carver);
    bytes = carver.used();
  }

  /// relu(conv) in this workspace, or in what is kept of the call.
  ActivationMemory activation(const Problem& problem, const Plan& plan, const ForwardTensors& tensors) const {
    Carver memory(plan.keeps_activation ? tensors.saved
                                        : static_cast<char*>(tensors.workspace) + activation_offset);
    return ActivationMemory(problem, plan, memory);
  }
};

/// Scratch memory of a forward call on the library plan.
struct LibraryWorkspace {
  void* part;      // [N,tiles,K,2] stat
  void* table;     // [3,N,K] stat
  void* finalize;  // finalize_scratch_bytes
  std::int64_t bytes;

  LibraryWorkspace(const Problem& problem, const Plan& plan, void* base) {
    Carver carver(base);
    part = carver.take(problem.n * plan.tiles * problem.k * 2 * stat_size(problem));
    table = carver.take(3 * problem.n * problem.k * stat_size(problem));
    finalize = carver.take(finalize_scratch_bytes(group_norm_shape(problem, plan), problem.dtype));
    bytes = carver.used();
  }
};

/// The SM90 plan: pack the operands, then everything else in one kernel, or all but a transposing
/// normalization.
void run_sm90(const Problem& problem, const Plan& plan, const Device& device, const ForwardTensors& tensors,
              cudaStream_t stream) {
  const Sm90Workspace workspace(problem, plan, tensors.workspace);
  const PackedOperands& operands = workspace.operands;
  const ActivationMemory activation = workspace.activation(problem, plan, tensors);
  const OperandScales scales =
      operands.pack(problem, plan, tensors, {workspace.counters, workspace.counter_bytes}, stream);

  ConvTransposeParams conv;
  conv.problem = problem;
  conv.x_hi = operands.x(plan, tensors);
  conv.x_packed = plan.pack_x;
  conv.x_lo = operands.x_lo;
  conv.w_hi = operands.w_hi;
  conv.w_lo = operands.w_lo;
  conv.bias = tensors.bias;
  conv.unscale_sample = scales.unscale_sample;
  conv.unscale_column = scales.unscale_column;
  conv.gamma = tensors.gamma;
  conv.beta = tensors.beta;
  conv.a = plan.activation_in_y ? tensors.y : activation.a;
  conv.y = plan.normalizes && !plan.activation_in_y ? tensors.y : nullptr;
  conv.part = workspace.part;
  conv.table = activation.table;
  conv.channel_table = workspace.channel_table;
  conv.steps = activation.steps;
  conv.moment_of = activation.moment_of;
  conv.counters = workspace.counters;
  conv.split_axes = plan.split_axes;
  conv.share_taps = plan.share_taps;
  conv.window_tiles = plan.window_tiles;
  conv.sm_count = device.sm_count;
  {
    const StageRange range("upconv3d::conv_transpose_relu_group_norm");
    find_conv_transpose_launcher(plan.instance->name)(conv, stream);
  }
  if (plan.normalizes) return;

  NormalizeParams normalize;
  normalize.shape = group_norm_shape(problem, plan);
  normalize.a_dtype = plan.activation;
  normalize.y_dtype = problem.dtype;
  normalize.a_layout = plan.conv_layout;
  normalize.y_layout = problem.y_layout;
  normalize.a = activation.a;
  normalize.a_pitch = padded_channels(problem.k);
  normalize.table = workspace.channel_table;
  normalize.y = tensors.y;
  normalize.steps = conv.steps;
  normalize.moment_of = conv.moment_of;
  const StageRange range("upconv3d::normalize");
  launch_group_norm_normalize(normalize, stream);
}

/// The library plan after PyTorch's convolution: moments of relu(conv + bias), merge them, normalize into y.
void run_library(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                 cudaStream_t stream) {
  const LibraryWorkspace workspace(problem, plan, tensors.workspace);
  ActivationMomentsParams moments;
  moments.shape = group_norm_shape(problem, plan);
  moments.dtype = problem.dtype;
  moments.y_dtype = problem.dtype;
  moments.layout = plan.conv_layout;
  moments.before.kind = Activation::kRelu;
  moments.c = tensors.conv;
  moments.bias = tensors.bias;
  moments.part = workspace.part;
  {
    const StageRange range("upconv3d::activation_moments");
    launch_activation_moments(moments, stream);
  }

  FinalizeParams finalize;
  finalize.shape = moments.shape;
  finalize.dtype = problem.dtype;
  finalize.part = workspace.part;
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
  normalize.shape = finalize.shape;
  normalize.a_dtype = plan.activation;
  normalize.y_dtype = problem.dtype;
  normalize.a_layout = plan.conv_layout;
  normalize.y_layout = problem.y_layout;
  normalize.before = moments.before;
  normalize.a = tensors.conv;
  normalize.bias = tensors.bias;
  normalize.table = workspace.table;
  normalize.y = tensors.y;
  const StageRange range("upconv3d::normalize");
  launch_group_norm_normalize(normalize, stream);
}

}  // namespace

void complete_plan(const Problem& problem, const Device& device, Plan& plan) {
  if (plan.algorithm == Algorithm::kCudaLibrary && problem.n > 0) {
    plan.tile_positions = activation_moments_tile_positions(problem.n, problem.k, problem.positions(),
                                                      plan.conv_layout, device.sm_count);
    plan.tiles = (problem.positions() + plan.tile_positions - 1) / plan.tile_positions;
  }
  if (problem.n == 0) {
    plan.workspace_bytes = 0;
  } else if (plan.algorithm == Algorithm::kSm90ImplicitGemm) {
    plan.workspace_bytes = Sm90Workspace(problem, plan, nullptr).bytes;
  } else if (plan.algorithm == Algorithm::kSm80ImplicitGemm) {
    plan.workspace_bytes = sm80_workspace_bytes(problem, plan);
  } else {
    plan.workspace_bytes = LibraryWorkspace(problem, plan, nullptr).bytes;
  }
}

void run_forward(const Problem& problem, const Plan& plan, const Device& device,
                 const ForwardTensors& tensors, cudaStream_t stream) {
  if (problem.n == 0) return;
  try {
    if (plan.algorithm == Algorithm::kSm90ImplicitGemm) {
      run_sm90(problem, plan, device, tensors, stream);
    } else if (plan.algorithm == Algorithm::kSm80ImplicitGemm) {
      run_sm80(problem, plan, tensors, stream);
    } else {
      run_library(problem, plan, tensors, stream);
    }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running " + describe(problem) + "\n" +
                             describe(plan));
  }
}

}  // namespace upconv3d::cuda
