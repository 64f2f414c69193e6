// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward_direct.hpp"

#include <memory>
#include <stdexcept>

#include "core/few_channels_layout.hpp"
#include "core/launch_memo.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"
#include "cuda/conv_transpose/conv_transpose_few_channels_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/stage_range.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

GroupNormShape group_norm_shape(const Problem& problem, const Plan& plan) {
  return {problem.n, problem.k, problem.positions(), problem.num_groups, plan.tile_positions, plan.tiles};
}

/// Scratch memory of a forward call on the direct plan; none where no normalization follows.
struct DirectWorkspace {
  float* part;           // [N,tiles,K,2]
  std::int32_t* counts;  // [tiles]
  void* finalize;        // finalize_scratch_bytes
  float* table;          // [3,N,K]
  std::int64_t bytes;

  DirectWorkspace(const Problem& problem, const Plan& plan, void* base) {
    Carver carver(base);
    const std::int64_t channels = problem.tail.norm ? problem.n * problem.k : 0;
    part = carver.take<float>(channels * plan.tiles * 2);
    counts = carver.take<std::int32_t>(problem.tail.norm ? plan.tiles : 0);
    finalize = carver.take(problem.tail.norm ? finalize_scratch_bytes(group_norm_shape(problem, plan)) : 0);
    table = carver.take<float>(3 * channels);
    bytes = carver.used();
  }
};

/// What working out anew would take longer than the launches.
struct RememberedLayout : RememberedLaunch {
  FewChannelsLayout layout;
  explicit RememberedLayout(const Problem& problem) : layout(few_channels_layout(problem)) {}
};

/// \param layout of the plan on tensor cores; null: that on CUDA cores
void convolve(const ConvTransposeDirectParams& params, const FewChannelsLayout* layout, const char* stage,
              cudaStream_t stream) {
  const StageRange range(stage);
#ifdef UPCONV3D_HAS_SM80
  if (layout) return launch_few_channels(params, *layout, stream);
#endif
  if (layout) {
    throw std::logic_error(
        "upconv3d: conv_transpose_few_channels_sm80 is not part of this build; an arch from 80 on is missing "
        "from UPCONV3D_CUDA_ARCHS");
  }
  launch_direct(params, stream);
}

/// \param layout as of convolve
void run_passes(const Problem& problem, const Plan& plan, const FewChannelsLayout* layout,
                const ForwardTensors& tensors, cudaStream_t stream) {
  const DirectWorkspace workspace(problem, plan, tensors.workspace);
  const Tail& tail = problem.tail;
  const int slope_step = tail.slopes > 1 ? 1 : 0;

  ConvTransposeDirectParams conv;
  conv.problem = problem;
  conv.x = tensors.x;
  conv.w = tensors.w;
  for (int axis = 0; axis < 5; ++axis) conv.w_strides[axis] = tensors.w_strides[axis];
  conv.bias = tensors.bias;
  conv.before = {tail.before(), tail.parameter, tensors.slopes, slope_step};
  conv.after = {tail.after(), tail.parameter, tensors.slopes, slope_step};
  if (tail.norm) {
    ConvTransposeDirectParams moments = conv;
    moments.part = workspace.part;
    moments.counts = workspace.counts;
    convolve(moments, layout, "upconv3d::conv_transpose_moments", stream);

    FinalizeParams finalize;
    finalize.shape = group_norm_shape(problem, plan);
    finalize.dtype = problem.dtype;
    finalize.part = workspace.part;
    finalize.counts = workspace.counts;
    finalize.gamma = tensors.gamma;
    finalize.beta = tensors.beta;
    finalize.eps = problem.eps;
    finalize.scratch = workspace.finalize;
    finalize.table = workspace.table;
    const StageRange range("upconv3d::finalize");
    launch_group_norm_finalize(finalize, stream);
  }
  conv.table = workspace.table;
  conv.y = tensors.y;
  convolve(conv, layout, "upconv3d::conv_transpose_normalize", stream);
}

}  // namespace

std::int64_t direct_workspace_bytes(const Problem& problem, const Plan& plan) {
  return DirectWorkspace(problem, plan, nullptr).bytes;
}

void run_direct(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, cudaStream_t stream,
                LaunchMemo* memo) {
  if (!plan.few_channels) return run_passes(problem, plan, nullptr, tensors, stream);
  LaunchMemo::run<RememberedLayout>(
      memo, [&] { return std::make_unique<RememberedLayout>(problem); },
      [&](const RememberedLayout& kept) { run_passes(problem, plan, &kept.layout, tensors, stream); });
}

}  // namespace upconv3d::cuda
