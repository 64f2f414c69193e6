// SPDX-License-Identifier: Apache-2.0
/// \file
/// What TMA's im2col descriptors can say of a slab's inputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/problem.hpp"

namespace upconv3d {

// TMA im2col in 3-D: signed 5-bit box corners, 5-bit filter offsets, and channel strides in units of 16
// bytes.
inline constexpr std::int64_t kIm2colMinCorner = -16;
inline constexpr std::int64_t kIm2colMaxCorner = 15;
inline constexpr std::int64_t kIm2colMaxOffset = 30;
inline constexpr std::int64_t kIm2colMaxStride = 8;

/// Whether TMA im2col can describe what the slabs read.
inline bool within_im2col(const Problem& p, const std::vector<Slab>& slabs, bool share_taps = false) {
  return std::all_of(slabs.begin(), slabs.end(), [&](const Slab& slab) {
    const InputBox box = input_box(p, slab, share_taps && shares_x_loads(p, slab));
    for (int axis = 0; axis < 3; ++axis) {
      if (slab.stride[axis] > kIm2colMaxStride || box.lower[axis] < kIm2colMinCorner ||
          box.upper[axis] < kIm2colMinCorner || box.upper[axis] > kIm2colMaxCorner ||
          (slab.taps[axis] - 1) * slab.dilation[axis] > kIm2colMaxOffset) {
        return false;
      }
    }
    return true;
  });
}

}  // namespace upconv3d
