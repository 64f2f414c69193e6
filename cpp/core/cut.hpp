// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the SM90 kernel that stores the convolution has the output cut into slabs.
#pragma once

#include <vector>

#include "core/border_slabs.hpp"
#include "core/phase_pairs.hpp"
#include "core/problem.hpp"

namespace upconv3d {

struct Cut {
  int split_axes = 0;        // axes along which borders are cut off
  bool share_taps = false;   // loads of x serve several taps
  bool pair_phases = false;  // two phases share tiles; phases are not cut then
};

/// The slabs of a cut: those of pair_phases, tap_sharing_slabs, or border_slabs.
inline std::vector<Slab> plan_slabs(const Problem& problem, const Cut& cut) {
  if (cut.pair_phases) return slabs_of_pairs(pair_phases(problem));
  return cut.share_taps ? tap_sharing_slabs(problem) : border_slabs(problem, cut.split_axes);
}

}  // namespace upconv3d
