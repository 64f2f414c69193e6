// SPDX-License-Identifier: Apache-2.0
#include "core/separate_tail.hpp"

#include <string>

#include "core/col2im_plan.hpp"
#include "core/cpu_conv_layout.hpp"
#include "core/held_norm.hpp"
#include "core/library_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {

bool keeps_library_conv(const Problem& p) {
  return !p.tail.has_skip && p.dtype != DType::kFloat64;
}

void add_tail_stages(const Problem& p, const Device& device, Plan& plan) {
  if (held_cut(p, plan.conv_layout, device.compute_capability)) {
    plan.stages.push_back("activation_group_norm_held");
  } else if (p.tail.norm) {
    plan.stages.insert(plan.stages.end(),
                       {"activation_moments", "group_norm_finalize", "group_norm_normalize"});
  } else if (p.has_bias || p.tail.has_skip || p.tail.activation != Activation::kNone) {
    const bool only_adds = p.tail.activation == Activation::kNone;
    plan.stages.push_back(only_adds ? "add" : name(p.tail.activation));
  }
}

Plan cuda_library_plan(const Problem& p, const Device& device, const std::string& reason, bool for_training) {
  Plan plan;
  plan.algorithm = Algorithm::kCudaLibrary;
  plan.reason = reason;
  plan.conv_layout = p.y_layout;  // what cuDNN keeps
  plan.activation = p.dtype;
  plan.keeps_conv = for_training && keeps_library_conv(p);
  plan.activation_in_y = !p.tail.returns_conv && !plan.keeps_conv;
  if (!for_training && library_copies_operands(p, device)) plan.conv_layout = Layout::kNDHWC;
  if (copies_operands(p, plan)) {
    plan.stages = {"channels_last_copies"};
    plan.activation_in_y = false;
  }
  plan.stages.push_back("aten::convolution");
  add_tail_stages(p, device, plan);
  return plan;
}

Plan cuda_col2im_plan(const Problem& p, const Device& device, const std::string& reason, bool for_training) {
  Plan plan;
  plan.algorithm = Algorithm::kCudaCol2im;
  plan.reason = reason;
  plan.conv_layout = p.y_layout;
  plan.activation = p.dtype;
  plan.keeps_conv = for_training && keeps_library_conv(p);
  plan.activation_in_y = !p.tail.returns_conv && !plan.keeps_conv;
  plan.stages = {"conv_transpose_columns_sm80", "col2im"};
  if (!col2im_finishes(p, plan.keeps_conv)) add_tail_stages(p, device, plan);
  return plan;
}

Plan cpu_library_plan(const Problem& p, const Device& device) {
  Plan plan;
  plan.algorithm = Algorithm::kCpuLibrary;
  plan.conv_layout = cpu_conv_layout(p, device.max_threads);
  plan.reason =
      concat("input is on the CPU; PyTorch's convolution is expected quicker in ", name(plan.conv_layout),
             " on ", device.max_threads, device.max_threads == 1 ? " thread" : " threads");
  plan.activation = p.dtype;
  plan.activation_in_y = plan.conv_layout == p.y_layout;
  plan.stages = {"aten::convolution"};
  if (p.tail.is_relu_group_norm()) {
    plan.stages.push_back("relu_group_norm");
    return plan;
  }
  plan.reason = "input is on the CPU, where PyTorch's operators compute what is not relu before a group norm";
  if (p.tail.has_skip) plan.stages.push_back("aten::add");
  if (p.tail.before() != Activation::kNone) plan.stages.push_back(concat("aten::", name(p.tail.before())));
  if (p.tail.norm) plan.stages.push_back("aten::group_norm");
  if (p.tail.after() != Activation::kNone) plan.stages.push_back(concat("aten::", name(p.tail.after())));
  return plan;
}

}  // namespace upconv3d
