// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows the SM80 kernel: what it can run, on which variant, cut how.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Taps along an axis of a slab: the kernel keeps a bit for each of three axes in one 32-bit word.
inline constexpr int kMaxSm80Taps = 10;

/// Why the SM80 kernel cannot run, or "" with `instance` set.
std::string sm80_obstacle(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances, std::optional<ConvInstance>& instance);

/// The plan that runs `instance`, where there is no obstacle.
Plan sm80_plan(const Problem& problem, const Device& device, const ConvInstance& instance);

}  // namespace upconv3d
