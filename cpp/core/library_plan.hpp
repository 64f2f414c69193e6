// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the library plan promises, and where it is expected to be quicker than the SM90 kernels.
#pragma once

#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether the library plan must ask PyTorch for a deterministic convolution: where the SM90 kernels could
/// run, the same bits on every run are promised whichever plan is chosen.
bool promises_same_bits(const Problem& problem, const Device& device,
                        const std::vector<ConvInstance>& instances);

/// Why PyTorch's convolution and one launch after it are expected to be quicker than the SM90 plan, or "":
/// of small blocks, whose time is mostly what that plan takes beside its estimate.
/// \param sm90 the SM90 plan
std::string library_advantage(const Problem& problem, const Device& device, const Plan& sm90);

}  // namespace upconv3d
