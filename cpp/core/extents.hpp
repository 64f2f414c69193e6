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

}  // namespace upconv3d
