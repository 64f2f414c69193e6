// SPDX-License-Identifier: Apache-2.0
/// \file
/// From problem to plan on a real device: the part of selection that asks CUDA and PyTorch.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

/// The plan that the environment asks for on CUDA devices, UPCONV3D_PLAN, or "". Read once per process: calls
/// are remembered with their plans (prepared_call.hpp), and two of the same key must not differ.
const std::string& forced_plan();

/// The numbers of the device that "cpu" or "cuda:1" names, and the plan that is forced upon it.
/// \throws std::runtime_error where this build has no CUDA, no kernels for that GPU, or no driver is found.
Device query_device(const std::string& device);

/// select_plan or, for a forward pass that a backward pass will follow, select_training_plan; with everything
/// filled in that this build can know (workspace bytes need its CUDA part).
Plan make_plan(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances,
               bool for_training);

/// Prints problem and plan to stderr where the environment says UPCONV3D_PRINT_PLAN=1 at this moment.
void print_plan_if_asked(const Problem& problem, const Plan& plan);

}  // namespace upconv3d::bindings
