// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where nothing is normalized: whether PyTorch's convolution, with a launch for what follows it, is expected
/// to be quicker than the SM90 plan, which adds a bias and applies ReLU as it stores.
#pragma once

#include "core/library_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// What the SM90 plan of a problem whose tail has no norm is expected to take, in us, with packing.
double sm90_us_without_norm(const Problem& problem, const Plan& sm90);

/// \param sm90 the SM90 plan of the problem, whose tail has no norm
LibraryAdvantage advantage_without_norm(const Problem& problem, const Plan& sm90);

}  // namespace upconv3d
