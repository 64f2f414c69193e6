// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows conv_transpose_held_sm90: which blocks it can run, on which tiles, and
/// when it is expected to be quicker than the SM90 plan's other kernels.
#pragma once

#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Why the result cannot be held, or "". In that case `plan`, an SM90 plan of inference, becomes one that
/// holds it where that is expected to be quicker, or device.forced_plan asks for it.
std::string consider_held(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances, Plan& plan);

}  // namespace upconv3d
