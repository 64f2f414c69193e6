// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows the SM90 kernels: what they can run, stored or computed twice. On which
/// tiles, and cut how, sm90_schedule.hpp says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr int kHopper = 90;  // compute capability, major*10 + minor

/// Why the SM90 kernels cannot run, or "" with `instance` set, by which they are compared with other plans.
/// \param trains as for least_channel_share
std::string sm90_obstacle(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances, bool trains,
                          std::optional<ConvInstance>& instance);

/// Time in ms that an H200 takes to read or write [n,channels,positions] of `bytes` each.
double tensor_ms(const Problem& problem, std::int64_t channels, double positions, std::int64_t bytes);

/// What blocks close to the choice took of a stored estimate (perf/NOTES.md, "Stored or computed twice").
double seen_of_stored(const ConvInstance& stored);

/// The plan where there is no obstacle: before(conv) is stored, then normalized where that is due.
/// \param compared sm90_obstacle's `instance`
Plan sm90_plan(const Problem& problem, const Device& device, const ConvInstance& compared,
               const std::vector<ConvInstance>& instances);

/// Why the convolution cannot be computed twice, or "". In that case `plan`, which stores before(conv), gets
/// the estimate, and becomes one that computes twice where that is quicker, or device.forced_plan asks for
/// it, or y is NDHWC, the stored plan takes several launches and the tiles are many. Without a norm that
/// kernel computes once.
std::string consider_twice(const Problem& problem, const Device& device,
                           const std::vector<ConvInstance>& instances, Plan& plan);

}  // namespace upconv3d
