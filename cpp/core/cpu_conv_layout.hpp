// SPDX-License-Identifier: Apache-2.0
/// \file
/// In which memory format PyTorch's convolution runs on the host.
#pragma once

#include "core/problem.hpp"

namespace upconv3d {

/// The memory format in which to hand x to PyTorch's conv_transpose3d on the host.
///
/// The convolution may still answer in the other format (it does where PyTorch does not use oneDNN), so
/// what follows it has to look at the strides it got.
///
/// \param max_threads threads that PyTorch would use.
Layout cpu_conv_layout(const Problem& problem, int max_threads);

}  // namespace upconv3d
