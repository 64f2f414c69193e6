// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the SM90 kernel that stores the convolution divides more slabs than one launch takes among several
/// launches: one after the other, each of neighbouring slabs.
///
/// Each launch takes the moments of its own slabs. Merging them, and normalizing, is left to kernels behind
/// the last launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/index_math.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Phases that the SM90 plan takes: stride 4 along three axes, or 8 along two.
inline constexpr int kMaxPhases = 64;

/// Launches for so many slabs.
inline int slab_launches(std::size_t slabs) {
  return static_cast<int>(ceil_div(static_cast<std::int64_t>(slabs), std::int64_t{kMaxSlabs}));
}

/// Launches for the slabs of a problem whose borders are not cut.
inline int slab_launches(const Problem& problem) {
  return slab_launches(border_slabs(problem, 0).size());
}

/// The first slab of launch `launch` of `launches`: shares differ by one at most.
inline std::size_t first_slab(std::size_t slabs, int launch, int launches) {
  return slabs * static_cast<std::size_t>(launch) / static_cast<std::size_t>(launches);
}

/// The slabs of launch `launch`, and those of the launches before it.
inline std::vector<Slab> slabs_of_launch(const std::vector<Slab>& slabs, int launch, int launches) {
  const auto at = [&](int next) {
    return slabs.begin() + static_cast<std::ptrdiff_t>(first_slab(slabs.size(), next, launches));
  };
  return {at(launch), at(launch + 1)};
}
inline std::vector<Slab> slabs_before(const std::vector<Slab>& slabs, int launch, int launches) {
  const std::size_t count = first_slab(slabs.size(), launch, launches);
  return {slabs.begin(), slabs.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace upconv3d
