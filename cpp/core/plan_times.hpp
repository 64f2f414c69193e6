// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the plans are expected to take, in us of an H200 with L2 cold, all launches: by which select_plan
/// chooses among those that can run a block. The times of all plans were fitted together to 700 blocks in one
/// or two inputs each, 0.2 to 140 MB, in bfloat16 and float32 ("tf32"), either layout
/// (perf/results/h200_plan_times.txt, perf/plan_times.py; perf/NOTES.md, "All plans by one measure"). Of
/// blocks that were left out of the fit they were off by 10 to 15 % (standard deviation).
#pragma once

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether these times are of such a block. They are not of float32's accuracy, of groups of the convolution,
/// of strides beyond 4, of dilation with a stride, where a skip is added, or where x and y lie in different
/// orders.
bool has_plan_times(const Problem& problem);

/// Whether the plans that can run a block are compared by their times: those here, or, of convolution groups,
/// the library plan's here, group_times.hpp, and what library_plan.hpp and direct_plan.hpp say of the others.
bool has_times(const Problem& problem);

/// The SM90 plan `sm90`, of whichever kernel.
double sm90_plan_us(const Problem& problem, const Plan& sm90);

/// The library plan: cuDNN's convolution, benchmarked, of its deterministic ones, and what follows it.
double library_plan_us(const Problem& problem, const Device& device);

/// The col2im plan.
double col2im_plan_us(const Problem& problem, const Device& device);

/// Within library_plan_us: what PyTorch takes to bring a weight of the other order to that of x in
/// NDHWC, at every call.
double library_weight_copy_us(const Problem& problem);

}  // namespace upconv3d
