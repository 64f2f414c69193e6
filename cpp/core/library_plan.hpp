// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where the library plan is expected to be quicker than the SM90 kernels.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Why PyTorch's convolution and one launch after it are expected to be quicker than the SM90 plan, or "":
/// of small blocks, whose time is mostly what that plan takes beside its estimate.
/// \param sm90 the SM90 plan
std::string library_advantage(const Problem& problem, const Device& device, const Plan& sm90);

}  // namespace upconv3d
