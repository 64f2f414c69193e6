// SPDX-License-Identifier: Apache-2.0
#include "core/phase_pairs.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>

namespace upconv3d {
namespace {

/// The axis along which phases are paired: each has a partner there, and axes whose taps come before its own
/// in the order of loads have one tap.
std::optional<int> pair_axis(const Problem& problem) {
  const Extent3 out = problem.out();
  const auto pairs_up = [&](int axis) {
    return problem.stride[axis] > 1 && std::min(problem.stride[axis], out[axis]) % 2 == 0;
  };
  if (pairs_up(0)) return 0;
  if (pairs_up(1) && problem.kernel[0] == 1) return 1;
  return std::nullopt;
}

/// Two phases, neighbours along `axis`; nothing where one has no taps or they read between each other's
/// inputs.
std::optional<PhasePair> paired(const Slab& first, const Slab& second, int axis) {
  if (first.tap_count() == 0 || second.tap_count() == 0) return std::nullopt;
  // The first may have a plane more; of rows both have the same, or one's positions were not the other's.
  Extent3 extent = second.extent;
  if (axis == 0) extent[0] = first.extent[0];
  if (extent != first.extent) return std::nullopt;
  const std::optional<Slab> reads = united_windows(first, second);
  if (!reads) return std::nullopt;
  PhasePair pair{*reads, {first, second}};
  for (int i = 0; i < 2; ++i) {
    pair.lead[i] = (pair.phases[i].window[axis] - reads->window[axis]) / reads->dilation[axis];
  }
  return pair;
}

}  // namespace

PhasePairs pair_phases(const Problem& problem) {
  if (problem.operation != Operation::kConvTranspose || problem.groups != 1 || problem.k > kPairedChannels)
    return {};
  const std::optional<int> axis = pair_axis(problem);
  if (!axis) return {};
  PhasePairs found{*axis, {}};
  const std::vector<Slab> phases = border_slabs(problem, 0);
  for (const Slab& first : phases) {
    if (first.origin[*axis] % 2 != 0) continue;
    Extent3 origin = first.origin;
    ++origin[*axis];
    const auto second =
        std::find_if(phases.begin(), phases.end(), [&](const Slab& slab) { return slab.origin == origin; });
    if (second == phases.end()) return {};
    const std::optional<PhasePair> pair = paired(first, *second, *axis);
    if (!pair) return {};
    found.pairs.push_back(*pair);
  }
  std::stable_sort(found.pairs.begin(), found.pairs.end(), [](const PhasePair& a, const PhasePair& b) {
    return a.reads.tap_count() > b.reads.tap_count();
  });
  return found;
}

SharedLoads shared_loads_of_pair(const Problem& problem, const PhasePairs& of, const PhasePair& pair) {
  const SharedLoads loads = shared_loads(problem, pair.reads);
  return loads.axis == of.axis ? SharedLoads{} : loads;
}

std::vector<Slab> reads_of_pairs(const PhasePairs& of) {
  std::vector<Slab> reads;
  for (const PhasePair& pair : of.pairs) reads.push_back(pair.reads);
  return reads;
}

std::vector<Slab> slabs_of_pairs(const PhasePairs& of) {
  std::vector<Slab> slabs;
  for (const int i : {0, 1}) {
    for (const PhasePair& pair : of.pairs) slabs.push_back(pair.phases[i]);
  }
  return slabs;
}

}  // namespace upconv3d
