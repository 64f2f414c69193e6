// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward.hpp"

#include <stdexcept>
#include <string>

#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/layout/pack.hpp"

namespace upconv3d::cuda {
namespace {

/// Hands out parts of the workspace, 256-byte aligned as cudaMalloc does. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  void* take(std::int64_t bytes) {
    void* const part = base_ && bytes ? base_ + used_ : nullptr;
    used_ += (bytes + 255) / 256 * 256;
    return part;
  }
  std::int64_t used() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

GroupNormShape group_norm_shape(const Problem& problem, const Plan& plan) {
  return {problem.n, problem.k, problem.positions(), problem.num_groups, plan.tile_positions, plan.tiles};
}

std::int64_t stat_size(const Problem& problem) {
  return problem.dtype == DType::kFloat64 ? 8 : 4;
}

/// Scratch memory of a forward call.
struct Workspace {
  void* x_hi;        // [N,D,H,W,C] operand, where the plan packs x
  void* x_lo;        // the same, three products only
  void* w_hi;        // [T*R*S,K,C] operand
  void* w_lo;        // the same, three products only
  void* scales;      // operand_scales_bytes
  void* activation;  // [N,Z,P,Q,K] activation dtype, where it does not lie in y
  void* part;        // [N,tiles,K,2] stat
  void* counts;      // [tiles] int32, SM90 plan only
  void* table;       // [3,N,K] stat
  void* finalize;    // finalize_scratch_bytes
  std::int64_t bytes;

  Workspace(const Problem& problem, const Plan& plan, void* base) {
    Carver carver(base);
    const bool sm90 = plan.algorithm == Algorithm::kSm90ImplicitGemm;
    const std::int64_t operand = sm90 ? size_of(plan.instance->operand) : 0;
    const bool split = sm90 && plan.instance->products == 3;
    const std::int64_t x_bytes = plan.pack_x ? problem.n * problem.c * volume(problem.in) * operand : 0;
    const std::int64_t w_bytes = problem.c * problem.k * volume(problem.kernel) * operand;
    const std::int64_t a_bytes = problem.n * problem.k * problem.positions() * size_of(plan.activation);
    x_hi = carver.take(x_bytes);
    x_lo = carver.take(split ? x_bytes : 0);
    w_hi = carver.take(w_bytes);
    w_lo = carver.take(split ? w_bytes : 0);
    scales = carver.take(sm90 ? operand_scales_bytes(problem) : 0);
    activation = carver.take(sm90 && !plan.activation_in_y ? a_bytes : 0);
    part = carver.take(problem.n * plan.tiles * problem.k * 2 * stat_size(problem));
    counts = carver.take(sm90 ? plan.tiles * static_cast<std::int64_t>(sizeof(std::int32_t)) : 0);
    table = carver.take(3 * problem.n * problem.k * stat_size(problem));
    finalize = carver.take(finalize_scratch_bytes(group_norm_shape(problem, plan), problem.dtype));
    bytes = carver.used();
  }
};

/// Stages 1 and 2 of the SM90 plan: pack the operands, then convolution + ReLU + partial moments.
/// Returns relu(conv), [N,Z,P,Q,K] plan.activation.
const void* run_sm90_convolution(const Problem& problem, const Plan& plan, const Device& device,
                                 const ForwardTensors& tensors, const Workspace& workspace,
                                 cudaStream_t stream) {
  PackParams pack;
  pack.problem = problem;
  pack.operand = plan.instance->operand;
  pack.products = plan.instance->products;
  pack.x = tensors.x;
  pack.w = tensors.w;
  for (int axis = 0; axis < 5; ++axis) pack.w_strides[axis] = tensors.w_strides[axis];
  pack.x_hi = workspace.x_hi;
  pack.x_lo = workspace.x_lo;
  pack.w_hi = workspace.w_hi;
  pack.w_lo = workspace.w_lo;
  if (workspace.scales) pack.scales = carve_operand_scales(problem, workspace.scales);
  launch_pack(pack, stream);

  ConvTransposeParams conv;
  conv.problem = problem;
  conv.x_hi = plan.pack_x ? workspace.x_hi : tensors.x;
  conv.x_lo = workspace.x_lo;
  conv.w_hi = workspace.w_hi;
  conv.w_lo = workspace.w_lo;
  conv.bias = tensors.bias;
  conv.unscale_sample = pack.scales.unscale_sample;
  conv.unscale_column = pack.scales.unscale_column;
  conv.a = plan.activation_in_y ? tensors.y : workspace.activation;
  conv.part = static_cast<float*>(workspace.part);
  conv.counts = static_cast<std::int32_t*>(workspace.counts);
  conv.split_axes = plan.split_axes;
  conv.sm_count = device.sm_count;
  find_conv_transpose_launcher(plan.instance->name)(conv, stream);
  return conv.a;
}

/// Stage 2 of the library plan, after PyTorch's convolution: partial moments of relu(conv + bias).
void run_relu_moments(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                      const Workspace& workspace, cudaStream_t stream) {
  ReluMomentsParams moments;
  moments.shape = group_norm_shape(problem, plan);
  moments.dtype = problem.dtype;
  moments.layout = plan.conv_layout;
  moments.c = tensors.conv;
  moments.bias = tensors.bias;
  moments.part = workspace.part;
  launch_relu_moments(moments, stream);
}

/// Stages 3 and 4: merge the moments, then normalize `a` into y.
void run_group_norm(const Problem& problem, const Plan& plan, const ForwardTensors& tensors, const void* a,
                    const Workspace& workspace, cudaStream_t stream) {
  FinalizeParams finalize;
  finalize.shape = group_norm_shape(problem, plan);
  finalize.dtype = problem.dtype;
  finalize.part = workspace.part;
  finalize.gamma = tensors.gamma;
  finalize.beta = tensors.beta;
  finalize.eps = problem.eps;
  finalize.scratch = workspace.finalize;
  finalize.table = workspace.table;
  finalize.counts = static_cast<const std::int32_t*>(workspace.counts);
  launch_group_norm_finalize(finalize, stream);

  const bool raw_convolution = plan.algorithm == Algorithm::kCudaLibrary;
  NormalizeParams normalize;
  normalize.shape = finalize.shape;
  normalize.a_dtype = plan.activation;
  normalize.y_dtype = problem.dtype;
  normalize.a_layout = plan.conv_layout;
  normalize.y_layout = problem.y_layout;
  normalize.apply_relu = raw_convolution;
  normalize.a = a;
  normalize.bias = raw_convolution ? tensors.bias : nullptr;
  normalize.table = workspace.table;
  normalize.y = tensors.y;
  launch_group_norm_normalize(normalize, stream);
}

}  // namespace

void complete_plan(const Problem& problem, const Device& device, Plan& plan) {
  if (plan.algorithm == Algorithm::kCudaLibrary && problem.n > 0) {
    plan.tile_positions = relu_moments_tile_positions(problem.n, problem.k, problem.positions(),
                                                      plan.conv_layout, device.sm_count);
    plan.tiles = (problem.positions() + plan.tile_positions - 1) / plan.tile_positions;
  }
  plan.workspace_bytes = problem.n > 0 ? Workspace(problem, plan, nullptr).bytes : 0;
}

void run_forward(const Problem& problem, const Plan& plan, const Device& device,
                 const ForwardTensors& tensors, cudaStream_t stream) {
  if (problem.n == 0) return;
  try {
    const Workspace workspace(problem, plan, tensors.workspace);
    const void* a = tensors.conv;
    if (plan.algorithm == Algorithm::kSm90ImplicitGemm) {
      a = run_sm90_convolution(problem, plan, device, tensors, workspace, stream);
    } else {
      run_relu_moments(problem, plan, tensors, workspace, stream);
    }
    run_group_norm(problem, plan, tensors, a, workspace, stream);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  while running " + describe(problem) + "\n" +
                             describe(plan));
  }
}

}  // namespace upconv3d::cuda
