// SPDX-License-Identifier: Apache-2.0
/// \file
/// Taps of a kernel that reach no output, as padding has them on axes of one voxel: a kernel of 3 with a
/// padding of 1 has one tap there that counts. PyTorch's convolutions multiply by all of them, and cuDNN's
/// deterministic ones may take 20 times as long as without them.
#pragma once

#include <optional>

#include "core/problem.hpp"

namespace upconv3d {

/// A convolution by fewer taps with the same result.
struct CroppedTaps {
  Problem problem;  // with their kernel, padding and output_padding
  Extent3 first;    // of the given weight's taps T,R,S the first that is left
};

/// The problem without the taps at either end of an axis that reach no output, as far as PyTorch's arguments
/// (a padding of at least 0, an output_padding below stride or dilation) can say the rest; or nothing where
/// all taps are left.
std::optional<CroppedTaps> without_idle_taps(const Problem& problem);

}  // namespace upconv3d
