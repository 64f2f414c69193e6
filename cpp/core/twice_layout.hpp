// SPDX-License-Identifier: Apache-2.0
/// \file
/// How conv_transpose_twice_sm90 divides the convolution among blocks: into classes of tiles that use the
/// same weights and the same part of x.
///
/// A tile has 64 rows for each of two warpgroups, and 256 positions of a phase. Rows are output channels.
/// Phases along the width may be stacked, "folded": all of their channels where they fit into 64 rows, as y
/// [N,Z,P,Q,K] is also [N,Z,P,Q/fold,fold*K]. For y [N,K,Z,P,Q], 8 channels of one and the same 8 of the
/// other of two phases, whose accumulators lie in the same threads, so that neighbours along the width are
/// stored together. Phases that are stacked, or given to the two warpgroups of a block, share loads of x; a
/// tap that only some of them use is skipped by the other warpgroup, and multiplied by zeros within one.
#pragma once

#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr std::int64_t kTwiceRows = 64;        // of a warpgroup
inline constexpr std::int64_t kTwicePositions = 256;  // of a tile
inline constexpr std::int64_t kTwiceBlockC = 64;      // input channels of a k-block

/// Channels of one phase, then of the other, where phases are stacked for y [N,K,Z,P,Q]: a thread holds rows
/// of wgmma's result that lie so far apart.
inline constexpr std::int64_t kTwiceStackedChannels = 8;

/// k-blocks of weights, 8 KB each, that the two warpgroups of a block may hold together: 128 KB.
inline constexpr int kMaxTwiceUnits = 16;

/// Classes of one launch: bounded by its parameters.
inline constexpr int kMaxTwiceClasses = 32;

/// What one warpgroup of a class computes.
struct TwiceRows {
  int view = -1;           // index into TwiceLayout::views; -1: nothing
  std::int64_t row = 0;    // first of 64, of fold*K
  std::uint32_t taps = 0;  // bit mask of the class's taps that it uses
  int units = 0;           // k-blocks: taps that it uses x blocks of input channels
};

/// Tiles that share loads of x.
struct TwiceClass {
  Slab window;          // extent, and windows and taps of the rows taken together
  bool reached = true;  // some tap reads x
  TwiceRows rows[2];
  std::int64_t loads() const { return window.tap_count(); }
};

struct TwiceLayout {
  int fold = 1;                   // phases along the width that are stacked
  std::int64_t run = kTwiceRows;  // channels of a phase that follow each other; then come the next phase's
  std::vector<Slab> phases;       // of all positions; phases view*fold to view*fold + fold - 1 make up a view
  std::vector<Slab> views;  // origin, extent and step in [N,Z,P,Q/fold,fold*K]; window and taps of its phases
  std::vector<TwiceClass> classes;  // empty where the kernel cannot run
};

/// The classes of a problem, costliest first; none where weights of a class do not fit into shared memory, or
/// where y is NCDHW and its phases cannot be stacked (stacks_phases).
TwiceLayout twice_layout(const Problem& problem);

/// Whether the layout stacks two phases for y [N,K,Z,P,Q], or need not.
inline bool stacks_phases(const Problem& problem, const TwiceLayout& layout) {
  return problem.y_layout == Layout::kNDHWC || layout.fold == 2;
}

/// What a row of a view computes.
struct TwiceRow {
  int phase;  // of the view's fold
  std::int64_t channel;
};
inline TwiceRow twice_row(const TwiceLayout& layout, std::int64_t row) {
  const std::int64_t run = row / layout.run;
  return {static_cast<int>(run % layout.fold), run / layout.fold * layout.run + row % layout.run};
}

/// Of the taps of `window`, along one axis: the index of its tap 0 among `phase`'s, times -1. Whole, since
/// windows are united only where it is.
std::int64_t tap_lead(const Slab& window, const Slab& phase, int axis);

/// Estimated cycles of one tile of a class: the slower of the tensor cores and shared memory.
///
/// \param staged whether y goes through shared memory, as it does but for NCDHW
std::int64_t twice_tile_cycles(const TwiceClass& of, std::int64_t c_blocks, bool staged);

/// Neighbouring channels of one norm group that share a partial moment, as a power of two.
int twice_granule_shift(const Problem& problem);

/// Partial moments of a sample along its positions.
std::int64_t twice_moments(const TwiceLayout& layout);

/// Floats of scratch that partials of a problem's groups are merged into.
std::int64_t twice_table_floats(const Problem& problem, std::int64_t moments);

/// The smallest partial merge worth a warp, and the most of them per group, see twice_segment_length.
inline constexpr std::int64_t kTwiceSegmentPartials = 256;
inline constexpr std::int64_t kMaxTwiceSegments = 32;

/// Partial moments that one warp merges, of a group's `partials`; the problem alone decides it.
std::int64_t twice_segment_length(std::int64_t partials);

}  // namespace upconv3d
