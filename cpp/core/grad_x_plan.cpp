// SPDX-License-Identifier: Apache-2.0
#include "core/grad_x_plan.hpp"

#include <algorithm>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/sm90_plan.hpp"
#include "core/sm90_schedule.hpp"
#include "core/text.hpp"

namespace upconv3d {

Problem grad_x_problem(const Problem& block) {
  Problem p = block;
  p.operation = Operation::kConv;
  p.c = block.k;
  p.k = block.c;
  p.in = block.out();
  p.num_groups = 1;
  p.x_layout = Layout::kNDHWC;
  p.y_layout = block.x_layout;
  p.x_aligned = true;
  p.has_bias = false;
  p.tail = {};
  p.tail.norm = false;
  p.tail.activation = Activation::kNone;
  return p;
}

void cut_output(GradXPlan& plan, const Cut& cut) {
  plan.cut = cut;
  plan.in_place = stores_in_place(plan.problem, cut);
}

std::string grad_x_obstacle(const Problem& block, const Device& device,
                            const std::vector<ConvInstance>& instances, std::optional<GradXPlan>& plan) {
  plan.reset();
  if (block.groups != 1) return concat("groups ", block.groups, " is not 1");
  const Problem p = grad_x_problem(block);
  std::optional<ConvInstance> instance;
  const std::string obstacle = sm90_obstacle(p, device, instances, true, instance);
  if (!obstacle.empty()) return obstacle;
  plan.emplace();
  plan->problem = p;
  plan->instance = *instance;
  plan->grad_c_pitch = grad_c_pitch(block);
  const Schedule schedule = cheapest_cut_in_place(p, *instance, device.sm_count);
  cut_output(*plan, schedule.cut);
  plan->estimated_multiply_ms = schedule.multiply_ms;
  plan->stages = {p.dtype == DType::kFloat32 ? "pack_scaled_operands" : "pack_operands"};
  plan->stages.emplace_back(instance->name);
  if (!plan->in_place) plan->stages.emplace_back("unpack_rows");
  return "";
}

std::string describe(const GradXPlan& plan) {
  std::string text = concat("grad_x: ", describe(plan.problem), "\n  kernel: ", plan.instance.name);
  text += plan.cut.share_taps ? ", loads shared by taps"
                              : concat(", borders cut along ", plan.cut.split_axes, " axes");
  text += concat(", estimated ", plan.estimated_multiply_ms, " ms\n  stages:");
  for (const std::string& stage : plan.stages) text += ' ' + stage;
  return text;
}

}  // namespace upconv3d
