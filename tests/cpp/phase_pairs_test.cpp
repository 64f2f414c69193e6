// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/phase_pairs.hpp: every phase is one of a pair, and what the pair reads is what its phases read, each
/// in a run of taps of its own.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/cut.hpp"
#include "core/phase_pairs.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

Problem strided(std::int64_t k, const Extent3& in, const Extent3& kernel, const Extent3& stride,
                const Extent3& padding, const Extent3& output_padding) {
  Problem p = headline();
  p.k = k, p.in = in, p.kernel = kernel, p.stride = stride, p.padding = padding,
  p.output_padding = output_padding;
  return p;
}

/// Whether phase `i` of the pair reads, by its m-th tap along each axis, what the pair's taps read from its
/// lead on, for the same positions.
bool reads_as_pair(const PhasePairs& of, const PhasePair& pair, int i) {
  const Slab& phase = pair.phases[i];
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t lead = axis == of.axis ? pair.lead[i] : 0;
    const std::int64_t first = pair.reads.window[axis] + lead * pair.reads.dilation[axis];
    if (phase.window[axis] != first || lead + phase.taps[axis] > pair.reads.taps[axis]) return false;
    if (axis != of.axis && phase.taps[axis] != pair.reads.taps[axis]) return false;
    if (phase.dilation[axis] != pair.reads.dilation[axis]) return false;
    // Position j of the pair is position j of either: rows and planes are alike, but for the last plane.
    const bool may_end = axis == 0 && of.axis == 0 && i == 1;
    const std::int64_t extent = pair.reads.extent[axis];
    if (phase.extent[axis] != extent && !(may_end && phase.extent[axis] == extent - 1)) return false;
  }
  return true;
}

void test_pairs(const Problem& p, int axis, std::size_t pairs) {
  const PhasePairs of = pair_phases(p);
  expect(of.pairs.size() == pairs && of.axis == axis, concat(pairs, " pairs: ", describe(p)));
  bool right = true;
  for (const PhasePair& pair : of.pairs) {
    right = right && reads_as_pair(of, pair, 0) && reads_as_pair(of, pair, 1);
    // Some tap is either phase's, at both ends.
    const std::int64_t all = pair.reads.taps[of.axis];
    std::int64_t end = 0;
    for (int i = 0; i < 2; ++i) end = std::max(end, pair.lead[i] + pair.phases[i].taps[of.axis]);
    right = right && std::min(pair.lead[0], pair.lead[1]) == 0 && end == all;
  }
  expect(right, concat("taps of pairs: ", describe(p)));
  // The slabs are the phases, each once.
  std::vector<Extent3> found, wanted;
  for (const Slab& slab : plan_slabs(p, {0, false, true})) found.push_back(slab.origin);
  for (const Slab& slab : border_slabs(p, 0)) wanted.push_back(slab.origin);
  std::sort(found.begin(), found.end()), std::sort(wanted.begin(), wanted.end());
  if (pairs > 0) expect(found == wanted, concat("phases of pairs: ", describe(p)));
}

void test_phase_pairs() {
  const Extent3 ones = {1, 1, 1}, twos = {2, 2, 2}, threes = {3, 3, 3}, none = {0, 0, 0};
  test_pairs(strided(64, {8, 9, 10}, threes, twos, ones, ones), 0, 4);
  test_pairs(strided(64, {8, 9, 10}, threes, twos, ones, none), 0, 4);  // of 8 and 7 planes
  test_pairs(strided(8, {3, 4, 5}, {4, 4, 4}, twos, ones, none), 0, 4);
  test_pairs(strided(20, {3, 4, 5}, {5, 2, 1}, {4, 2, 1}, {1, 0, 0}, none), 0, 4);
  test_pairs(strided(64, {5, 8, 9}, {1, 4, 3}, {1, 2, 2}, {0, 1, 1}, none), 1, 2);
  // More channels than a warpgroup has rows, groups, an odd number of phases, no stride.
  test_pairs(strided(72, {8, 9, 10}, threes, twos, ones, ones), 0, 0);
  Problem grouped = strided(64, {8, 9, 10}, threes, twos, ones, ones);
  grouped.groups = 2;
  test_pairs(grouped, 0, 0);
  test_pairs(strided(64, {8, 9, 10}, threes, threes, ones, none), 0, 0);
  test_pairs(strided(64, {8, 9, 10}, threes, ones, ones, none), 0, 0);
  // Rows of unlike height along the height; more than one tap before it; a phase without a tap.
  test_pairs(strided(64, {5, 8, 9}, {1, 3, 3}, {1, 2, 2}, {0, 1, 1}, none), 0, 0);
  test_pairs(strided(64, {5, 8, 9}, {3, 4, 3}, {1, 2, 2}, {1, 1, 1}, none), 0, 0);
  test_pairs(strided(64, {5, 8, 9}, {1, 2, 2}, twos, none, none), 0, 0);
  // Windows that lie one input apart, and taps three.
  Problem dilated = strided(64, {8, 9, 10}, twos, twos, none, none);
  dilated.dilation = threes;
  test_pairs(dilated, 0, 0);
}

/// k3 s2 p1: the first phase has one tap along the depth, the second two, of which one is beside the first's.
void test_taps_of_pairs() {
  const Extent3 ones = {1, 1, 1}, twos = {2, 2, 2}, threes = {3, 3, 3};
  const PhasePairs of = pair_phases(strided(64, {32, 32, 32}, threes, twos, ones, ones));
  const PhasePair& longest = of.pairs.front();
  expect(longest.reads.taps == twos, "taps of the longest pair");
  expect(longest.phases[0].taps[0] == 1 && longest.phases[1].taps[0] == 2, "taps of its phases");
  expect(longest.lead[0] == 0 && longest.lead[1] == 0, "both begin with the same input");
  expect(shared_loads_of_pair(strided(64, {32, 32, 32}, threes, twos, ones, ones), of, longest).taps == 2,
         "a load serves two taps along the height");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_phase_pairs();
    upconv3d::test_taps_of_pairs();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "phase pairs: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
