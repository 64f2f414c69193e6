// SPDX-License-Identifier: Apache-2.0
/// \file
/// The SM90 plan that computes the convolution twice where y is NCDHW and that kernel cannot write it so: it
/// writes [N,Z,P,Q,K] beside y, and another launch transposes.
///
/// That moves y three times, but needs no stored convolution: of strides whose phases take several launches
/// to store, with channels too few for the tiles of those.
#pragma once

#include <optional>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// That plan, where `stored` takes several launches and is estimated slower, or device.forced_plan asks for
/// computing twice.
///
/// \param stored the plan that stores before(conv), which nothing computed twice has replaced
std::optional<Plan> twice_transposed_plan(const Problem& problem, const Device& device,
                                          const std::vector<ConvInstance>& instances, const Plan& stored);

/// Whether a plan is one of those.
inline bool transposes_result(const Problem& problem, const Plan& plan) {
  return plan.twice && plan.conv_layout != problem.y_layout;
}

/// The problem as the convolution's kernel sees it.
inline Problem problem_of_conv(const Problem& problem, const Plan& plan) {
  Problem seen = problem;
  if (transposes_result(problem, plan)) seen.y_layout = plan.conv_layout;
  return seen;
}

}  // namespace upconv3d
