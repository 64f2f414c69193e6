// SPDX-License-Identifier: Apache-2.0
#include "cuda/grad_w.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "cuda/conv_transpose/conv_transpose_grad_w_sm90.hpp"
#include "cuda/layout/pack.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

/// x in packed form: hi, lo and what it was scaled by.
struct PackedInput {
  void* hi;      // [N,D,H,W,operand_channels] operand
  void* lo;      // the same, three products only
  void* scales;  // operand_scales_bytes

  PackedInput(const Problem& problem, const GradWPlan& plan, Carver& carver) {
    const std::int64_t row_bytes = operand_channels(problem) * size_of(plan.instance->operand);
    const std::int64_t bytes = plan.pack_x ? problem.n * volume(problem.in) * row_bytes : 0;
    hi = carver.take(bytes);
    lo = carver.take(plan.instance->products == 3 ? bytes : 0);
    scales = carver.take(plan.pack_x ? operand_scales_bytes(problem) : 0);
  }

  /// Packs x with one exponent per channel for all samples. Returns those, [C] int32, or null for 16-bit
  /// dtypes.
  const std::int32_t* pack(const Problem& problem, const GradWInstance& instance, const void* x,
                           cudaStream_t stream) const {
    PackParams params;
    params.problem = problem;
    params.operand = instance.operand;
    params.products = instance.products;
    params.x = x;
    params.x_hi = hi;
    params.x_lo = lo;
    params.shared_samples = true;
    if (scales) params.scales = carve_operand_scales(problem, scales);
    launch_pack_x(params, stream);
    return params.scales.channel;
  }
};

/// The workspace's parts.
struct Scratch {
  PackedInput x;
  float* partial;  // [plan.partial_floats()]

  Scratch(const Problem& problem, const GradWPlan& plan, Carver& carver) : x(problem, plan, carver) {
    partial =
        static_cast<float*>(carver.take(plan.partial_floats() * static_cast<std::int64_t>(sizeof(float))));
  }
};

/// \param rule composes its text, which only an error needs
template <class Rule>
void require(bool kept, const Rule& rule, const Problem& problem) {
  if (!kept) throw std::invalid_argument("upconv3d: " + rule() + " for " + describe(problem) + ".");
}

}  // namespace

std::int64_t grad_w_workspace_bytes(const Problem& problem, const GradWPlan& plan) {
  Carver carver(nullptr);
  const Scratch counted(problem, plan, carver);
  return carver.used();
}

void run_grad_w(const Problem& problem, const GradWPlan& plan, const Device& device,
                const GradWTensors& tensors, cudaStream_t stream) {
  require(
      plan.obstacle.empty(),
      [&] { return "the gradient of the weight has no kernel (" + plan.obstacle + ")"; }, problem);
  require(
      tensors.grad_c_pitch >= problem.k && tensors.grad_c_pitch % kChannelUnit == 0,
      [&] {
        return "rows of grad_c must be whole multiples of 8 channels, at least K; got " +
               std::to_string(tensors.grad_c_pitch);
      },
      problem);
  try {
    Carver carver(tensors.workspace);
    const Scratch scratch(problem, plan, carver);
    GradWParams params;
    GradWReduceParams reduce;
    params.problem = problem;
    params.plan = plan;
    params.x = tensors.x;
    if (plan.pack_x) {
      reduce.scale_c = scratch.x.pack(problem, *plan.instance, tensors.x, stream);
      params.x = scratch.x.hi;
      params.x_lo = scratch.x.lo;
    }
    params.grad_c = tensors.grad_c;
    params.grad_c_pitch = tensors.grad_c_pitch;
    if (plan.split_grad_c()) {
      params.grad_c_lo = static_cast<const char*>(tensors.grad_c) +
                         SplitRow(tensors.grad_c_pitch).lo_step * size_of(plan.instance->operand);
    }
    params.partial = scratch.partial;
    params.sm_count = device.sm_count;
    find_grad_w_launcher(plan.instance->name)(params, stream);

    reduce.problem = problem;
    reduce.plan = plan;
    reduce.partial = scratch.partial;
    reduce.unscale_grad_c = tensors.unscale_grad_c;
    reduce.grad_w = tensors.grad_w;
    std::copy_n(tensors.w_strides, 5, reduce.w_strides);
    launch_grad_w_reduce(reduce, stream);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n  problem: " + describe(problem) +
                             "\n  plan: " + describe(plan));
  }
}

}  // namespace upconv3d::cuda
