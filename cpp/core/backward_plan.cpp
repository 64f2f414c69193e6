// SPDX-License-Identifier: Apache-2.0
#include "core/backward_plan.hpp"

#include "core/channels.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

/// Sets what our kernels are to compute. Returns why they cannot, or "".
std::string plan_convolutions(const Problem& p, const Device& device, const GradientMask& wanted,
                              const std::vector<ConvInstance>& instances,
                              const std::vector<GradWInstance>& grad_w_variants, BackwardPlan& plan) {
  if (device.forced_plan == "library") return "UPCONV3D_PLAN=library";
  if (wanted.x) {
    const std::string obstacle = grad_x_obstacle(p, device, instances, plan.grad_x);
    if (!obstacle.empty()) return concat("grad_x: ", obstacle);
  }
  if (wanted.w) {
    plan.grad_w = grad_w_plan(p, device, grad_w_variants);
    if (!plan.grad_w->obstacle.empty()) return concat("grad_w: ", plan.grad_w->obstacle);
  }
  return "";
}

}  // namespace

BackwardPlan select_backward_plan(const Problem& p, const Device& device, const GradientMask& wanted,
                                  const std::vector<ConvInstance>& instances,
                                  const std::vector<GradWInstance>& grad_w_variants) {
  BackwardPlan plan;
  plan.stages = {"group_norm_backward"};
  if (!wanted.convolution()) return plan;
  plan.reason = plan_convolutions(p, device, wanted, instances, grad_w_variants, plan);
  if (!plan.reason.empty()) {
    plan.library = true;
    plan.grad_x.reset();
    plan.grad_w.reset();
    plan.grad_c_pitch = padded_channels(p.k);
    plan.stages.push_back("aten::convolution_backward");
    return plan;
  }
  plan.scaled = p.dtype == DType::kFloat32 && p.precision != Precision::kIEEE;
  plan.split = p.is_ieee();
  plan.grad_c_pitch = grad_c_pitch(p);
  if (plan.grad_x)
    plan.stages.insert(plan.stages.end(), plan.grad_x->stages.begin(), plan.grad_x->stages.end());
  if (plan.grad_w) plan.stages.push_back(plan.grad_w->instance->name);
  return plan;
}

bool begins_with_result(const Tail& tail) {
  return !tail.norm && (tail.activation == Activation::kRelu || tail.activation == Activation::kNone);
}

BackwardPlan library_backward_plan(const Problem& p, const GradientMask& wanted) {
  BackwardPlan plan;
  if (p.tail.norm) {
    plan.stages = {"activation_moments", "group_norm_finalize", "norm_backward"};
  } else if (p.tail.activation != Activation::kNone || wanted.bias) {
    plan.stages = {"activation_backward"};
  }
  if (!wanted.convolution()) return plan;
  plan.reason = p.tail.norm
                    ? "what it begins with, the convolution that was kept or returned, or its sum with a skip"
                    : "what it begins with, the convolution, its sum with a skip, or ReLU's result";
  plan.library = true;
  plan.grad_c_pitch = p.k;
  plan.stages.push_back("aten::convolution_backward");
  return plan;
}

std::string describe(const BackwardPlan& plan) {
  std::string text = concat("backward: grad_c in ", plan.library  ? "the input's dtype, for the library"
                                                    : plan.scaled ? "float16 with a power of two"
                                                    : plan.split  ? "two float16 with a power of two"
                                                                  : "the input's dtype");
  if (plan.library) text += concat("\n  because of ", plan.reason);
  if (plan.grad_x) text += concat("\n  grad_x: ", describe(*plan.grad_x));
  if (plan.grad_w) text += concat("\n  grad_w: ", describe(*plan.grad_w));
  return text;
}

}  // namespace upconv3d
