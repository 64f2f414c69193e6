// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "core/col2im_plan.hpp"
#include "core/cut.hpp"
#include "core/held_norm.hpp"
#include "core/held_tiles.hpp"
#include "core/twice_layout.hpp"
#include "core/twice_transposed.hpp"
#include "cuda/activation_memory.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/forward_col2im.hpp"
#include "cuda/forward_direct.hpp"
#include "cuda/forward_sm80.hpp"
#include "cuda/group_norm/finalize_slabs.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/held_norm.hpp"
#include "cuda/layout/channels_last.hpp"
#include "cuda/layout/unpack_rows.hpp"
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
  float* part;             // [N,tiles,K/granule,2], twice [N,K/granule,tiles,2]; where a norm follows
  float* channel_table;    // [3,N,K], where normalizing is a stage of its own
  std::int32_t* counters;  // [counter_count]
  std::int64_t counter_bytes;
  std::int64_t activation_offset;  // of ActivationMemory, where it is not kept
  std::int64_t bytes;

  Sm90Workspace(const Problem& problem, const Plan& plan, void* base)
      : carver(base), operands(problem, plan, carver) {
    const int granule_shift = plan.held    ? held_granule_shift(problem)
                              : plan.twice ? twice_granule_shift(problem)
                                           : moment_granule_shift(problem);
    const std::int64_t moment_floats = plan.held ? kHeldMomentFloats : 2;
    const bool has_table = !plan.normalizes && !plan.linear;
    part = carver.take<float>(
        plan.linear ? 0 : problem.n * plan.tiles * (problem.k >> granule_shift) * moment_floats);
    channel_table = carver.take<float>(has_table ? 3 * problem.k * problem.n : 0);
    counter_bytes = counter_count(problem) * static_cast<std::int64_t>(sizeof(std::int32_t));
    counters = carver.take<std::int32_t>(counter_count(problem));
    activation_offset = carver.used();
    if (!plan.keeps_activation) const ActivationMemory counted(problem, plan, carver);
    bytes = carver.used();
  }

  /// before(conv) in this workspace, in what is kept of the call, or where it is wanted.
  ActivationMemory activation(const Problem& problem, const Plan& plan, const ForwardTensors& tensors) const {
    Carver memory(plan.keeps_activation ? tensors.saved
                                        : static_cast<char*>(tensors.workspace) + activation_offset);
    ActivationMemory found(problem, plan, memory);
    if (plan.activation_in_y) found.a = tensors.y;
    if (returns_activation(problem, plan)) found.a = tensors.c;
    return found;
  }
};

/// Scratch memory of a forward call on the library plan; none where no normalization follows.
struct LibraryWorkspace {
  void* part;      // [N,tiles,K,2] stat
  void* table;     // [3,N,K] stat
  void* finalize;  // finalize_scratch_bytes
  void* held;      // held_part_bytes
  std::int64_t bytes;

  /// \param cut held_cut of the call
  LibraryWorkspace(const Problem& problem, const Plan& plan, const std::optional<HeldCut>& cut, void* base) {
    Carver carver(base);
    const std::int64_t stat = problem.tail.norm ? stat_size(problem) : 0;
    part = carver.take(problem.n * plan.tiles * problem.k * 2 * stat);
    table = carver.take(3 * problem.n * problem.k * stat);
    finalize = carver.take(problem.tail.norm ? finalize_scratch_bytes(group_norm_shape(problem, plan)) : 0);
    held = carver.take(cut ? held_part_bytes(problem.n, problem.num_groups, *cut) : 0);
    bytes = carver.used();
  }
};

/// One of the tail's activations as kernels take it.
ActivationParams activation_params(const Tail& tail, Activation kind, const ForwardTensors& tensors) {
  return {kind, tail.parameter, tensors.slopes, tail.slopes > 1 ? 1 : 0};
}

/// Normalization as a pass over a, or, without one, the activation: y_layout to y_layout in y itself.
NormalizeParams normalize_params(const Problem& problem, const Plan& plan, const ForwardTensors& tensors) {
  NormalizeParams params;
  params.shape = group_norm_shape(problem, plan);
  params.a_dtype = plan.activation;
  params.y_dtype = problem.dtype;
  params.a_layout = plan.conv_layout;
  params.y_layout = problem.y_layout;
  params.after = activation_params(problem.tail, problem.tail.after(), tensors);
  params.y = tensors.y;
  return params;
}

/// Rows of padded channels, as the convolution stores them, to a tensor like y.
void unpack_rows(const Problem& problem, const void* rows, void* dense, cudaStream_t stream) {
  UnpackRowsParams params;
  params.n = problem.n;
  params.positions = problem.positions();
  params.channels = problem.k;
  params.pitch = padded_channels(problem.k);
  params.dtype = problem.dtype;
  params.layout = problem.y_layout;
  params.rows = rows;
  params.dense = dense;
  const StageRange range("upconv3d::unpack_rows");
  launch_unpack_rows(params, stream);
}

/// The convolution's launch on the SM90 plan.
ConvTransposeParams conv_params(const Problem& problem, const Plan& plan, const Device& device,
                                const ForwardTensors& tensors, const Sm90Workspace& workspace,
                                const ActivationMemory& activation) {
  ConvTransposeParams conv;
  conv.problem = problem;
  conv.x_hi = workspace.operands.x(plan, tensors);
  conv.x_packed = plan.pack_x;
  conv.x_lo = workspace.operands.x_lo;
  conv.w_in_place = plan.w_in_place;
  conv.piles_views = plan.piles_views;
  conv.w_hi = workspace.operands.w(plan, tensors);
  conv.w_lo = workspace.operands.w_lo;
  conv.bias = tensors.bias;
  conv.before = activation_params(problem.tail, problem.tail.before(), tensors);
  conv.a = activation.a;
  conv.counters = workspace.counters;
  conv.clears_counters = PackedOperands::packs_nothing(plan);
  conv.split_axes = plan.split_axes;
  conv.share_taps = plan.share_taps;
  conv.pair_phases = plan.pair_phases;
  conv.launches = plan.launches;
  conv.window_tiles = plan.window_tiles;
  conv.sm_count = device.sm_count;
  conv.normalized_beside = plan.leaving_blocks > 0;
  conv.leaving_blocks = plan.leaving_blocks;
  conv.linear = plan.linear;
  if (plan.linear) {
    conv.channels_first = plan.activation_in_y && problem.y_layout == Layout::kNCDHW;
    return conv;
  }
  conv.gamma = tensors.gamma;
  conv.beta = tensors.beta;
  if (plan.normalizes) conv.after = activation_params(problem.tail, problem.tail.after(), tensors);
  conv.y = plan.normalizes && !plan.activation_in_y ? tensors.y : nullptr;
  conv.part = workspace.part;
  conv.table = activation.table;
  conv.channel_table = workspace.channel_table;
  conv.steps = activation.steps;
  conv.moment_of = activation.moment_of;
  return conv;
}

/// Merges the moments that several launches of the convolution took.
void finalize_slabs(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                    const Sm90Workspace& workspace, const ActivationMemory& activation, cudaStream_t stream) {
  FinalizeSlabsParams params;
  params.problem = problem;
  params.slabs = plan_slabs(problem, {plan.split_axes, plan.share_taps, plan.pair_phases});
  params.moment_positions = plan.tile_positions;
  params.granule_shift = moment_granule_shift(problem);
  params.part = workspace.part;
  params.gamma = tensors.gamma;
  params.beta = tensors.beta;
  params.channel_table = workspace.channel_table;
  params.table = activation.table;
  const StageRange range("upconv3d::finalize");
  launch_group_norm_finalize_slabs(params, stream);
}

/// y [N,K,Z,P,Q] from what was computed twice and stored as [N,Z,P,Q,K], complete: neither normalized nor
/// activated again.
void transpose_result(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                      const ActivationMemory& activation, cudaStream_t stream) {
  NormalizeParams transpose = normalize_params(problem, plan, tensors);
  transpose.after = {};
  transpose.a = activation.a;
  const StageRange range("upconv3d::transpose");
  launch_group_norm_normalize(transpose, stream);
}

/// The SM90 plan: pack the operands that must be, then everything else in one kernel, or all but a
/// normalization that transposes, or that an activation follows which is too much for that kernel. Of more
/// phases than one launch takes, the convolution in several, then moments are merged and normalized.
void run_sm90(const Problem& problem, const Plan& plan, const Device& device, const ForwardTensors& tensors,
              cudaStream_t stream, LaunchMemo* memo) {
  const Problem seen = problem_of_conv(problem, plan);
  const Sm90Workspace workspace(seen, plan, tensors.workspace);
  const ActivationMemory activation = workspace.activation(seen, plan, tensors);
  const OperandScales scales =
      workspace.operands.pack(problem, plan, tensors, {workspace.counters, workspace.counter_bytes}, stream);
  ConvTransposeParams conv = conv_params(seen, plan, device, tensors, workspace, activation);
  conv.unscale_sample = scales.unscale_sample;
  conv.unscale_column = scales.unscale_column;
  conv.memo = memo;
  {
    const StageRange range("upconv3d::conv_transpose_relu_group_norm");
    find_conv_transpose_launcher(plan.instance->name)(conv, stream);
  }
  if (plan.linear) {
    if (!plan.activation_in_y) unpack_rows(problem, activation.a, tensors.y, stream);
    return;
  }
  if (plan.launches > 1) finalize_slabs(problem, plan, tensors, workspace, activation, stream);
  if (tensors.c && tensors.c != activation.a) unpack_rows(problem, activation.a, tensors.c, stream);
  if (transposes_result(problem, plan)) return transpose_result(problem, plan, tensors, activation, stream);
  if (plan.normalizes) return;

  NormalizeParams normalize = normalize_params(problem, plan, tensors);
  normalize.a = activation.a;
  normalize.a_pitch = padded_channels(problem.k);
  normalize.table = workspace.channel_table;
  normalize.steps = conv.steps;
  normalize.signed_steps = problem.tail.before() != Activation::kRelu;
  normalize.moment_of = conv.moment_of;
  if (conv.normalized_beside) {
    normalize.merged = workspace.counters + merged_counters(problem);
    normalize.merged_count = kSampleMerged;
  }
  const StageRange range("upconv3d::normalize");
  launch_group_norm_normalize(normalize, stream);
}

/// Moments of before(conv + bias + skip), merged into workspace.table.
void take_library_moments(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                          const NormalizeParams& normalize, const LibraryWorkspace& workspace,
                          cudaStream_t stream) {
  ActivationMomentsParams moments;
  moments.shape = normalize.shape;
  moments.dtype = problem.dtype;
  moments.y_dtype = problem.dtype;
  moments.layout = plan.conv_layout;
  moments.before = normalize.before;
  moments.c = normalize.a;
  moments.bias = normalize.bias;
  moments.skip = normalize.skip;
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
  const StageRange range("upconv3d::finalize");
  launch_group_norm_finalize(finalize, stream);
}

/// Whether 16 bytes at a time can be read of the convolution and written of y.
bool has_aligned_rows(const ForwardTensors& tensors) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  };
  return aligned(tensors.conv) && aligned(tensors.y);
}

/// Everything after PyTorch's convolution in one launch.
void run_held(const Problem& problem, const Plan& plan, const HeldCut& cut, const Device& device,
              const ForwardTensors& tensors, void* part, cudaStream_t stream) {
  HeldNormParams params;
  params.max_blocks = device.sm_count;  // a block that waits may be all that fits a multiprocessor
  params.cut = cut;
  params.y_planes = problem.y_layout == Layout::kNCDHW && plan.conv_layout == Layout::kNDHWC;
  params.n = problem.n;
  params.k = problem.k;
  params.positions = problem.positions();
  params.num_groups = problem.num_groups;
  params.dtype = problem.dtype;
  params.eps = problem.eps;
  params.before = activation_params(problem.tail, problem.tail.before(), tensors);
  params.after = activation_params(problem.tail, problem.tail.after(), tensors);
  params.c = tensors.conv;
  params.bias = tensors.bias;
  params.gamma = tensors.gamma;
  params.beta = tensors.beta;
  params.y = tensors.y;
  params.part = part;
  const StageRange range("upconv3d::activation_group_norm_held");
  launch_held_norm(params, stream);
}

/// conv + bias + skip.
void add_skip(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, cudaStream_t stream) {
  NormalizeParams sum;
  sum.shape = group_norm_shape(problem, plan);
  sum.a_dtype = sum.y_dtype = problem.dtype;
  sum.a_layout = sum.y_layout = plan.conv_layout;
  sum.a = tensors.conv;
  sum.bias = tensors.bias;
  sum.skip = tensors.skip;
  sum.y = tensors.sum;
  const StageRange range("upconv3d::add");
  launch_group_norm_normalize(sum, stream);
}

/// What follows the convolution, or its sum with a skip: moments of what is normalized, merge them, normalize
/// into y; in one launch where that can be.
void run_library_tail(const Problem& problem, const Plan& plan, const Device& device,
                      const ForwardTensors& tensors, cudaStream_t stream) {
  const std::optional<HeldCut> cut = held_cut(problem, plan.conv_layout, device.compute_capability);
  const LibraryWorkspace workspace(problem, plan, cut, tensors.workspace);
  if (cut && has_aligned_rows(tensors)) {
    return run_held(problem, plan, *cut, device, tensors, workspace.held, stream);
  }
  NormalizeParams normalize = normalize_params(problem, plan, tensors);
  normalize.before = activation_params(problem.tail, problem.tail.before(), tensors);
  normalize.a = tensors.conv;
  normalize.bias = tensors.bias;
  normalize.skip = tensors.skip;
  normalize.sum = tensors.sum;
  if (problem.tail.norm) {
    take_library_moments(problem, plan, tensors, normalize, workspace, stream);
    normalize.table = workspace.table;
  } else if (problem.tail.activation == Activation::kNone && !tensors.bias && !tensors.skip &&
             tensors.y == tensors.conv) {
    return;
  }
  const StageRange range("upconv3d::normalize");
  launch_group_norm_normalize(normalize, stream);
}

/// The library plan after its convolution.
void run_library(const Problem& problem, const Plan& plan, const Device& device,
                 const ForwardTensors& tensors, cudaStream_t stream) {
  if (!plan.adds_skip_first) return run_library_tail(problem, plan, device, tensors, stream);
  add_skip(problem, plan, tensors, stream);
  ForwardTensors summed = tensors;
  summed.conv = tensors.sum;
  summed.bias = summed.skip = nullptr;
  summed.sum = nullptr;
  run_library_tail(after_skip(problem), plan, device, summed, stream);
}

/// Whose workspace is that of the products first, then of what follows.
void run_col2im(const Problem& problem, const Plan& plan, const Device& device, const ForwardTensors& tensors,
                cudaStream_t stream) {
  const bool finishes = col2im_finishes(problem, plan.keeps_conv);
  ColumnsTail tail;
  tail.y = problem.tail.returns_conv ? tensors.c : plan.keeps_conv ? tensors.saved : tensors.y;
  if (finishes || problem.tail.returns_conv) tail.bias = tensors.bias;
  if (finishes) tail.activation = activation_params(problem.tail, problem.tail.activation, tensors);
  convolve_by_columns(problem, tensors, tail, stream);
  if (finishes) return;
  ForwardTensors after = tensors;
  after.conv = tail.y;
  if (problem.tail.returns_conv) after.bias = nullptr;
  run_library(problem, plan, device, after, stream);
}

}  // namespace

void copy_operands(const Problem& problem, const void* x, void* x_to, const void* w, void* w_to,
                   cudaStream_t stream) {
  const ChannelsLastCopy of_x = {problem.n, problem.c, volume(problem.in), x, x_to};
  const ChannelsLastCopy of_w = {w_to ? problem.c : 0, group_outputs(problem), volume(problem.kernel), w,
                                 w_to};
  const StageRange range("upconv3d::channels_last_copies");
  launch_channels_last_copies({of_x, of_w}, problem.dtype, stream);
}

void complete_plan(const Problem& problem, const Device& device, Plan& plan) {
  const bool col2im = plan.algorithm == Algorithm::kCudaCol2im;
  const bool in_tiles = problem.tail.norm || plan.keeps_conv;
  if ((col2im || plan.algorithm == Algorithm::kCudaLibrary) && problem.n > 0 && in_tiles) {
    plan.tile_positions = activation_moments_tile_positions(problem.n, problem.k, problem.positions(),
                                                            plan.conv_layout, device.sm_count);
    plan.tiles = (problem.positions() + plan.tile_positions - 1) / plan.tile_positions;
  }
  if (problem.n == 0) {
    plan.workspace_bytes = 0;
  } else if (plan.algorithm == Algorithm::kSm90ImplicitGemm) {
    plan.workspace_bytes = Sm90Workspace(problem_of_conv(problem, plan), plan, nullptr).bytes;
  } else if (plan.algorithm == Algorithm::kSm80ImplicitGemm) {
    plan.workspace_bytes = sm80_workspace_bytes(problem, plan);
  } else if (plan.algorithm == Algorithm::kCudaDirect) {
    plan.workspace_bytes = direct_workspace_bytes(problem, plan);
  } else {
    const Problem last = plan.adds_skip_first ? after_skip(problem) : problem;
    const auto cut = held_cut(last, plan.conv_layout, device.compute_capability);
    plan.workspace_bytes =
        std::max(LibraryWorkspace(problem, plan, cut, nullptr).bytes, col2im ? columns_bytes(problem) : 0);
  }
}

void run_forward(const Problem& problem, const Plan& plan, const Device& device,
                 const ForwardTensors& tensors, cudaStream_t stream, LaunchMemo* memo) {
  if (problem.n == 0) return;
  try {
    if (plan.algorithm == Algorithm::kSm90ImplicitGemm) {
      run_sm90(problem, plan, device, tensors, stream, memo);
    } else if (plan.algorithm == Algorithm::kSm80ImplicitGemm) {
      run_sm80(problem, plan, tensors, stream);
    } else if (plan.algorithm == Algorithm::kCudaDirect) {
      run_direct(problem, plan, tensors, stream, memo);
    } else if (plan.algorithm == Algorithm::kCudaCol2im) {
      run_col2im(problem, plan, device, tensors, stream);
    } else {
      run_library(problem, plan, device, tensors, stream);
    }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running " + describe(problem) + "\n" +
                             describe(plan));
  }
}

}  // namespace upconv3d::cuda
