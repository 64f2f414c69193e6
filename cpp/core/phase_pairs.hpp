// SPDX-License-Identifier: Apache-2.0
/// \file
/// Phases of a stride in pairs, whose tiles share loads of x.
///
/// Of up to 64 output channels a tile leaves one of two consumer warpgroups without rows, or halves its
/// columns, and then waits for x: 256 positions are loaded for half of the products that they could serve.
/// Two phases along one axis read the same x but for a tap or two, so each of the warpgroups takes one of
/// them: a load of x then serves both, or the one that has this tap.
#pragma once

#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Output channels that a tile of a pair has: the rows of one warpgroup.
inline constexpr std::int64_t kPairedChannels = 64;

/// Whether the SM90 kernel has pairs on such tiles: 64 rows for each of two warpgroups, which have all
/// positions, of 16 bits once they are stored; of whole k-blocks.
constexpr bool pairs_phases(std::int64_t block_channels, std::int64_t block_positions,
                            std::int64_t block_inputs, int products, int stored_bits) {
  return block_channels == 2 * kPairedChannels && block_positions == 256 && block_inputs == kBlockInputs &&
         products == 1 && stored_bits == 16;
}

/// Two phases that differ along one axis. Position j of one is position j of the other, as long as both have
/// it: along the depth, the slowest axis, the first may have a plane more.
struct PhasePair {
  Slab reads;                 // what both read, taken together; where the first lies
  Slab phases[2];             // the first has no fewer positions
  std::int64_t lead[2] = {};  // taps of `reads` along the axis before the phase's own
};

struct PhasePairs {
  int axis = 0;                  // 0 depth, 1 height
  std::vector<PhasePair> pairs;  // costliest first; none where phases cannot be paired
};

/// All phases of a problem in pairs. Taps along the axis are the outermost that have a choice, so that those
/// of one phase follow each other.
PhasePairs pair_phases(const Problem& problem);

/// Loads of x that serve several taps of both phases; not along the axis, where taps differ.
SharedLoads shared_loads_of_pair(const Problem& problem, const PhasePairs& of, const PhasePair& pair);

/// What the tiles of every pair read.
std::vector<Slab> reads_of_pairs(const PhasePairs& of);

/// The first phase of every pair, then the second ones.
std::vector<Slab> slabs_of_pairs(const PhasePairs& of);

}  // namespace upconv3d
