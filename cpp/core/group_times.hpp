// SPDX-License-Identifier: Apache-2.0
/// \file
/// What PyTorch's convolution of several groups is expected to take. cuDNN's times of groups follow neither
/// work nor bytes closely: of 500 blocks in two inputs each (perf/results/h200_plans_of_kinds.txt;
/// perf/NOTES.md, "Groups by one measure") they were off by a factor of 1.65 (standard deviation), most in 16
/// bits and NDHWC, where kernels of like blocks differ by up to five times.
#pragma once

#include "core/problem.hpp"

namespace upconv3d {

/// Whether all plans' times are of such convolution groups: of four input channels and more, strides up to 4,
/// x and y in one order, neither a skip added nor the convolution returned.
bool has_group_times(const Problem& problem);

/// Whether cuDNN has kernels of their own for such groups, and quick ones: of stride 1 and several taps, as
/// many outputs as inputs, a power of two.
bool are_quick_groups(const Problem& problem);

/// cuDNN's convolution of other groups, in us of an H200 with L2 cold.
double cudnn_groups_us(const Problem& problem);

}  // namespace upconv3d
