// SPDX-License-Identifier: Apache-2.0
/// \file
/// Questions about an extent's three axes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d {

/// The most that an extent has along any axis.
inline std::int64_t longest(const Extent3& extent) {
  return *std::max_element(extent.begin(), extent.end());
}

/// volume() of extents that may be more than 64 bits together, as strides along an axis of one voxel.
inline double volume_of_any(const Extent3& extent) {
  return static_cast<double>(extent[0]) * static_cast<double>(extent[1]) * static_cast<double>(extent[2]);
}

}  // namespace upconv3d
