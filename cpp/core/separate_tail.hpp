// SPDX-License-Identifier: Apache-2.0
/// \file
/// Plans that put the convolution in memory and run what follows it by launches of its own: the library's, on
/// a GPU and on the CPU, and col2im.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether the backward pass is to begin with a convolution. In float64, autograd records PyTorch's own
/// calls. With a skip it begins with the sum, or with a result.
bool keeps_library_conv(const Problem& problem);

/// Adds what follows a convolution that is in memory.
void add_tail_stages(const Problem& problem, const Device& device, Plan& plan);

/// \param for_training whether a backward pass will want the convolution
Plan cuda_library_plan(const Problem& problem, const Device& device, const std::string& reason,
                       bool for_training);

/// \param for_training as of cuda_library_plan
Plan cuda_col2im_plan(const Problem& problem, const Device& device, const std::string& reason,
                      bool for_training);

Plan cpu_library_plan(const Problem& problem, const Device& device);

}  // namespace upconv3d
