// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the SM90 kernels' parameters have of core's slabs, copied by the host.
#pragma once

#include "core/border_slabs.hpp"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"

namespace upconv3d::cuda {

inline void copy_extent(const Extent3& from, int (&to)[3]) {
  for (int axis = 0; axis < 3; ++axis) to[axis] = static_cast<int>(from[axis]);
}

/// Where the slab's positions lie in y.
inline void fill_geometry(const Slab& from, SlabGeometry& to) {
  to.width = cutlass::FastDivmod(static_cast<int>(from.extent[2]));
  to.height = cutlass::FastDivmod(static_cast<int>(from.extent[1]));
  copy_extent(from.origin, to.origin);
  copy_extent(from.step, to.step);
  to.positions = static_cast<int>(from.positions());
}

}  // namespace upconv3d::cuda
