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
bool promises_same_bits(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances);

}  // namespace upconv3d
