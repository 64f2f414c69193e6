// SPDX-License-Identifier: Apache-2.0
/// \file
/// From problem to plan on a real device: the part of selection that asks CUDA and PyTorch.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

/// The plan that the environment asks for by UPCONV3D_PLAN, or "". Read once per process: plans are
/// remembered.
/// \throws ValueViolation where it is not one of "stored" and "twice".
const std::string& forced_plan();

/// The numbers of the device that "cpu" or "cuda:1" names, and forced_plan.
/// \throws std::runtime_error where this build has no CUDA, no kernels for that GPU, or no driver is found.
Device query_device(const std::string& device);

/// select_plan, with everything filled in that this build can know (workspace bytes need its CUDA part).
Plan make_plan(const Problem& problem, const Device& device,
               const std::vector<ConvInstance>& instances = conv_instances());

/// Prints problem and plan to stderr where the environment says UPCONV3D_PRINT_PLAN=1 at this moment.
void print_plan_if_asked(const Problem& problem, const Plan& plan);

}  // namespace upconv3d::bindings
