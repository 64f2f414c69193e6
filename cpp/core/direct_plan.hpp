// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows the direct plan: convolutions of so few inputs per output that they are
/// computed twice by a kernel that packs nothing (cuda/conv_transpose/conv_transpose_direct.hpp).
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether conv_transpose_few_channels_sm80 is compared with the SM90 plan of more outputs than few: of at
/// most four inputs and stride 1, where that one multiplies zeros, or copies taps. With a stride it took 0.6
/// to 1.9 of the SM90 plan's time, and no estimate told which (perf/NOTES.md, "Few inputs and many outputs").
bool has_many_outputs_of_few_inputs(const Problem& problem, const Device& device);

/// Why the kernels of this plan cannot run, or "".
std::string direct_obstacle(const Problem& problem, const Device& device);

/// The plan, where there is no obstacle. Its estimated_direct_ms is for an H200.
Plan direct_plan(const Problem& problem, const Device& device);

/// Whether the direct plan is expected to be quicker than PyTorch's convolution with our passes after it.
bool beats_library(const Problem& problem, const Device& device, const Plan& direct);

/// What PyTorch's convolution with our passes after it is expected to take at least, in us, of few channels.
double least_library_us(const Problem& problem);

/// What the direct plan is expected to take, in us on an H200, where it was compared with others; else
/// infinity.
double direct_us(const Problem& problem, const Device& device, const Plan& direct);

/// Whether it is expected to be quicker than the SM90 plan `sm90`, of a block without plan_times.hpp's times.
bool beats_sm90(const Problem& problem, const Device& device, const Plan& direct, const Plan& sm90);

}  // namespace upconv3d
