// SPDX-License-Identifier: Apache-2.0
#include "cuda/grad_x.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/channels.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/layout/pack.hpp"
#include "cuda/layout/unpack_rows.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

/// Scratch memory of a call; letters as in the block.
struct GradXWorkspace {
  void* w;                       // [T*R*S,C,operand_channels] operand
  void* w_lo;                    // the same, three products only
  std::int32_t* unscale_column;  // [C], float32 only
  void* counters;                // [counter_count] int32
  std::int64_t counter_bytes;
  void* rows;  // [N,D,H,W,padded_channels(C)] dtype, where grad_x is not stored in place
  std::int64_t bytes;

  GradXWorkspace(const GradXPlan& plan, void* base) {
    const Problem& p = plan.problem;
    Carver carver(base);
    const std::int64_t row_bytes = operand_channels(p) * size_of(plan.instance.operand);
    const std::int64_t w_bytes = volume(p.kernel) * p.k * row_bytes;
    w = carver.take(w_bytes);
    w_lo = carver.take(plan.split_grad_c() ? w_bytes : 0);
    unscale_column = carver.take<std::int32_t>(p.dtype == DType::kFloat32 ? p.k : 0);
    counter_bytes = counter_count(p) * static_cast<std::int64_t>(sizeof(std::int32_t));
    counters = carver.take(counter_bytes);
    rows = carver.take(plan.in_place ? 0 : p.n * p.positions() * padded_channels(p.k) * size_of(p.dtype));
    bytes = carver.used();
  }
};

/// w [C,K,T,R,S] as the plain convolution takes it: from K to C channels.
void pack(const GradXPlan& plan, const GradXTensors& tensors, const GradXWorkspace& workspace,
          cudaStream_t stream) {
  PackParams params;
  params.problem = plan.problem;
  params.operand = plan.instance.operand;
  params.products = plan.instance.products;
  params.w = tensors.w;
  for (int axis = 0; axis < 5; ++axis) params.w_strides[axis] = tensors.w_strides[axis];
  std::swap(params.w_strides[0], params.w_strides[1]);
  params.w_hi = workspace.w;
  params.w_lo = workspace.w_lo;
  params.scales.unscale_column = workspace.unscale_column;
  params.zero = workspace.counters;
  params.zero_bytes = workspace.counter_bytes;
  launch_pack_w(params, stream);
}

void convolve(const GradXPlan& plan, const Device& device, const GradXTensors& tensors,
              const GradXWorkspace& workspace, cudaStream_t stream, LaunchMemo* memo) {
  ConvTransposeParams conv;
  conv.problem = plan.problem;
  conv.linear = true;
  conv.x_hi = tensors.grad_c;
  conv.x_pitch = plan.grad_c_pitch;
  if (plan.split_grad_c()) {
    conv.x_split = true;
    conv.x_lo = static_cast<const char*>(tensors.grad_c) +
                SplitRow(plan.grad_c_pitch).lo_step * size_of(plan.instance.operand);
  }
  conv.unscale_sample = tensors.unscale;
  conv.one_unscale_sample = true;
  conv.w_hi = workspace.w;
  conv.w_lo = workspace.w_lo;
  conv.unscale_column = workspace.unscale_column;
  conv.a = plan.in_place ? tensors.grad_x : workspace.rows;
  conv.counters = static_cast<std::int32_t*>(workspace.counters);
  conv.channels_first = plan.in_place && plan.problem.y_layout == Layout::kNCDHW;
  conv.split_axes = plan.cut.split_axes;
  conv.share_taps = plan.cut.share_taps;
  conv.pair_phases = plan.cut.pair_phases;
  conv.sm_count = device.sm_count;
  conv.memo = memo;
  find_conv_transpose_launcher(plan.instance.name)(conv, stream);
}

void unpack(const GradXPlan& plan, const GradXTensors& tensors, const GradXWorkspace& workspace,
            cudaStream_t stream) {
  const Problem& p = plan.problem;
  UnpackRowsParams params;
  params.n = p.n;
  params.positions = p.positions();
  params.channels = p.k;
  params.pitch = padded_channels(p.k);
  params.dtype = p.dtype;
  params.layout = p.y_layout;
  params.rows = workspace.rows;
  params.dense = tensors.grad_x;
  launch_unpack_rows(params, stream);
}

}  // namespace

std::int64_t grad_x_workspace_bytes(const GradXPlan& plan) {
  return plan.problem.n == 0 ? 0 : GradXWorkspace(plan, nullptr).bytes;
}

void run_grad_x(const GradXPlan& plan, const Device& device, const GradXTensors& tensors, cudaStream_t stream,
                LaunchMemo* memo) {
  if (plan.problem.n == 0) return;
  try {
    const GradXWorkspace workspace(plan, tensors.workspace);
    pack(plan, tensors, workspace, stream);
    convolve(plan, device, tensors, workspace, stream, memo);
    if (!plan.in_place) unpack(plan, tensors, workspace, stream);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running " + describe(plan));
  }
}

}  // namespace upconv3d::cuda
