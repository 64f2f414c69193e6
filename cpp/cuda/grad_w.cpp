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

/// The workspace's parts.
struct Scratch {
  void* x;         // [N,D,H,W,x_pitch] operand, where the plan packs x
  void* scales;    // operand_scales_bytes, likewise
  float* partial;  // [plan.partial_floats()]

  Scratch(const Problem& problem, const GradWPlan& plan, Carver& carver) {
    const std::int64_t row_bytes = plan.x_pitch * size_of(plan.instance->operand);
    x = carver.take(plan.pack_x ? problem.n * volume(problem.in) * row_bytes : 0);
    scales = carver.take(plan.pack_x ? operand_scales_bytes(problem) : 0);
    partial =
        static_cast<float*>(carver.take(plan.partial_floats() * static_cast<std::int64_t>(sizeof(float))));
  }
};

/// x in operand form, one exponent per channel for all samples. Returns the exponents, [C] int32, or null.
const std::int32_t* pack_x(const Problem& problem, const GradWPlan& plan, const void* x,
                           const Scratch& scratch, cudaStream_t stream) {
  PackParams params;
  params.problem = problem;
  params.operand = plan.instance->operand;
  params.x = x;
  params.x_hi = scratch.x;
  params.shared_samples = true;
  if (scratch.scales) params.scales = carve_operand_scales(problem, scratch.scales);
  launch_pack_x(params, stream);
  return params.scales.channel;
}

void require(bool kept, const std::string& rule, const Problem& problem) {
  if (!kept) throw std::invalid_argument("upconv3d: " + rule + " for " + describe(problem) + ".");
}

}  // namespace

std::int64_t grad_w_workspace_bytes(const Problem& problem, const GradWPlan& plan) {
  Carver carver(nullptr);
  const Scratch counted(problem, plan, carver);
  return carver.used();
}

void run_grad_w(const Problem& problem, const GradWPlan& plan, const Device& device,
                const GradWTensors& tensors, cudaStream_t stream) {
  require(plan.obstacle.empty(), "the gradient of the weight has no kernel (" + plan.obstacle + ")", problem);
  require(tensors.grad_c_pitch >= problem.k && tensors.grad_c_pitch % kChannelUnit == 0,
          "rows of grad_c must be whole multiples of 8 channels, at least K; got " +
              std::to_string(tensors.grad_c_pitch),
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
      reduce.scale_c = pack_x(problem, plan, tensors.x, scratch, stream);
      params.x = scratch.x;
    }
    params.grad_c = tensors.grad_c;
    params.grad_c_pitch = tensors.grad_c_pitch;
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
