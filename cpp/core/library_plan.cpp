// SPDX-License-Identifier: Apache-2.0
#include "core/library_plan.hpp"

#include <optional>

#include "core/sm90_plan.hpp"

namespace upconv3d {

bool promises_same_bits(const Problem& problem, const Device& device,
                        const std::vector<ConvInstance>& instances) {
  if (!device.is_cuda) return false;
  Device unforced = device;
  unforced.forced_plan.clear();
  std::optional<ConvInstance> instance;
  return sm90_obstacle(problem, unforced, instances, instance).empty();
}

}  // namespace upconv3d
