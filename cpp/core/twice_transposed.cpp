// SPDX-License-Identifier: Apache-2.0
#include "core/twice_transposed.hpp"

#include <algorithm>

#include "core/sm90_plan.hpp"

namespace upconv3d {

std::optional<Plan> twice_transposed_plan(const Problem& p, const Device& device,
                                          const std::vector<ConvInstance>& instances, const Plan& stored) {
  // Of fewer phases it was not compared with what runs.
  if (p.y_layout != Layout::kNCDHW || !p.tail.norm || stored.twice || stored.launches == 1)
    return std::nullopt;
  if (device.forced_plan == "stored") return std::nullopt;
  Problem rows = p;
  rows.y_layout = Layout::kNDHWC;
  Plan plan = sm90_plan(rows, device, *stored.compared_instance, instances);
  if (!consider_twice(rows, device, instances, plan).empty() || !plan.twice) return std::nullopt;
  // Of 32 and 64 phases, computing took 1.1 to 2 times the estimate, and storing in several launches 0.8 to
  // 1.1 (perf/NOTES.md, "64 phases in several launches"). Transposing reaches some 0.85 of the copy
  // bandwidth, after a launch.
  constexpr double kSeen = 1.3, kSeenOfStored = 1.1, kTransposedShare = 0.85, kLaunchMs = 0.004;
  const double positions = static_cast<double>(p.positions());
  const double transposing =
      tensor_ms(p, p.k, positions, 2 * size_of(p.dtype)) / kTransposedShare + kLaunchMs;
  const double computing = kSeen * plan.estimated_twice_ms;
  const double storing =
      std::min(seen_of_stored(*stored.compared_instance), kSeenOfStored) * stored.estimated_stored_ms;
  if (device.forced_plan != "twice" && computing + transposing >= storing) return std::nullopt;
  plan.estimated_twice_ms += transposing;
  plan.activation_in_y = false;
  plan.stages.push_back("group_norm_normalize");  // which transposes alone
  return plan;
}

}  // namespace upconv3d
