// SPDX-License-Identifier: Apache-2.0
/// \file
/// Loads of x that serve several taps, walked through as im2col does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/problem.hpp"

namespace upconv3d::tests {

/// A slab's i-th position along each axis; those beyond its last plane lie in the planes that would follow.
inline Extent3 index_of(const Slab& slab, std::int64_t i) {
  return {i / slab.extent[2] / slab.extent[1], i / slab.extent[2] % slab.extent[1], i % slab.extent[2]};
}

/// Input coordinate that a slab says its m-th tap reads at `index`.
inline std::int64_t slab_input(const Slab& slab, int axis, std::int64_t index, std::int64_t m) {
  return slab.window[axis] + index * slab.stride[axis] + m * slab.dilation[axis];
}

/// Windows of a tile's load, in im2col's order: along the width, then the height, then the depth of the box.
class Walk {
 public:
  Walk(const Slab& slab, const InputBox& box, std::int64_t begin) : box_(box), at_(index_of(slab, begin)) {
    for (int axis = 0; axis < 3; ++axis) count_[axis] = box.extent[axis] + box.upper[axis] - box.lower[axis];
  }
  /// The input that the first tap of the window reads.
  Extent3 input() const {
    Extent3 input;
    for (int axis = 0; axis < 3; ++axis) input[axis] = box_.origin[axis] + box_.lower[axis] + at_[axis];
    return input;
  }
  void advance() {
    for (int axis = 2; axis >= 0 && ++at_[axis] == count_[axis]; --axis) at_[axis] = 0;
  }

 private:
  InputBox box_;
  Extent3 at_, count_{};
};

/// Whether in every tile of `tile` positions, what the load brings m times SharedLoads::rows behind a
/// position's is what its tap m reads, or neither reads input.
inline bool shared_loads_are_right(const Problem& p, const Slab& slab, std::int64_t tile) {
  const InputBox box = input_box(p, slab, true);
  const SharedLoads shared = shared_loads(p, slab);
  const auto axis = static_cast<std::size_t>(shared.axis);
  const auto inside = [&](std::int64_t input) { return input >= 0 && input < p.in[axis]; };
  bool right = true;
  for (std::int64_t begin = 0; begin < slab.positions(); begin += tile) {
    std::vector<Extent3> loaded;
    Walk walk(slab, box, begin);
    for (std::int64_t i = 0; i < tile + (shared.taps - 1) * shared.rows; ++i, walk.advance())
      loaded.push_back(walk.input());
    for (std::int64_t j = 0; j < std::min(tile, slab.positions() - begin); ++j) {
      const Extent3 own = index_of(slab, begin + j);
      for (std::int64_t tap = 0; tap < shared.taps; ++tap) {
        const Extent3& got = loaded[static_cast<std::size_t>(j + tap * shared.rows)];
        Extent3 wanted;
        for (int i = 0; i < 3; ++i) wanted[i] = slab_input(slab, i, own[i], i == shared.axis ? tap : 0);
        // Along the other axes all taps move alike; along this one both may lie outside.
        const bool neither = !inside(got[axis]) && !inside(wanted[axis]);
        right = right && (neither || got == wanted);
      }
    }
  }
  return right;
}

}  // namespace upconv3d::tests
