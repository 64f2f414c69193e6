// SPDX-License-Identifier: Apache-2.0
/// \file
/// How conv_transpose_twice_sm90 divides the convolution among blocks: into classes of tiles that use the
/// same weights and the same part of x.
///
/// A tile has 64 rows for each of two warpgroups, and 256 positions of a phase. Rows are output channels.
/// Phases along the width lie side by side in y [N,Z,P,Q,K], which is also [N,Z,P,Q/fold,fold*K]: there they
/// are "folded" into one view of y, whose rows 64 may be one phase's or, "stacked", several phases'. For y
/// [N,K,Z,P,Q], 8 channels of one and the same 8 of the other of two phases are stacked, whose accumulators
/// lie in the same threads, so that neighbours along the width are stored together. Phases that are stacked,
/// or given to the two warpgroups of a block, share loads of x; a tap that only some of them use is skipped
/// by the other warpgroup, and multiplied by zeros within one.
///
/// Views of 32 rows, which would leave half of a warpgroup's rows empty, lie in pairs below each other in its
/// 64, where both can be read together: neighbours along the height as a rule.
///
/// Where kernel and stride are equal all phases read the same x: they are one class then, of as many sets of
/// weights as it takes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/half_blocks.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr std::int64_t kTwiceRows = 64;        // of a warpgroup
inline constexpr std::int64_t kTwicePositions = 256;  // of a tile
inline constexpr std::int64_t kTwiceBlockC = 64;      // input channels of a k-block

/// Channels of one phase, then of the other, where phases are stacked for y [N,K,Z,P,Q]: a thread holds rows
/// of wgmma's result that lie so far apart.
inline constexpr std::int64_t kTwiceStackedChannels = 8;

/// What the k-blocks of weights that the two warpgroups of a block hold may take together.
inline constexpr std::int64_t kMaxTwiceWeightBytes = 128 * 1024;

/// What one launch takes, bounded by its 18 KB of parameters, which cost time: a launch with small ones took
/// 2 us less. 64 phases are stride 4 along three axes or 8 along two. Views are a launch's descriptors of y:
/// phases, but for those that are folded. Sets of weights: 512 channels of 64 phases.
inline constexpr int kMaxTwicePhases = 64;
inline constexpr int kMaxTwiceViews = 27;
inline constexpr int kMaxTwiceClasses = 32;
inline constexpr int kMaxTwiceSets = 256;

/// The 64 rows that one warpgroup computes at a time: of a view, or of two that lie below each other.
struct TwiceRows {
  int view = -1;         // index into TwiceLayout::views, of two the first; -1: nothing
  std::int64_t row = 0;  // first of 64, of fold*K
};

/// Weights that a block keeps in shared memory: both warpgroups' rows.
struct TwiceSet {
  TwiceRows rows[2];
};

/// What one warpgroup multiplies in a tile of a class.
struct TwiceUnits {
  std::uint32_t taps = 0;  // bit mask of the class's taps that it uses, in the order of tap_bit
  int count = 0;           // k-blocks: taps that it uses x blocks of input channels; 0: it has no rows
};

/// Sets that share loads of x and use the same of its taps.
struct TwiceClass {
  Slab window;          // extent, and windows and taps of the rows taken together
  bool reached = true;  // some tap reads x
  SharedLoads shared;   // taps that one load of x serves
  TwiceUnits units[2];
  std::vector<TwiceSet> sets;
  std::int64_t loads() const { return window.tap_count(); }
};

/// Place of the tap `at`, along T,R,S, among a class's: load by load along T, then R, then S; where loads are
/// shared along one of them, the taps that a load serves come last.
int tap_bit(const TwiceClass& of, const Extent3& at);

struct TwiceLayout {
  int fold = 1;                   // phases along the width that are folded
  std::int64_t run = kTwiceRows;  // channels of a phase that follow each other; then come the next phase's
  std::int64_t box = kTwiceRows;  // rows of any 64 that are one phase's for certain, a divisor of 64
  std::int64_t view_rows = 0;     // fold*K
  int pile = 1;                   // views below each other in 64 rows, from every pile-th on: 1 or 2
  std::vector<Slab> phases;       // of all positions; phases view*fold to view*fold + fold - 1 make up a view
  std::vector<Slab> views;        // where they lie: origin, extent and step in [N,Z,P,Q/fold,fold*K]
  std::vector<TwiceClass> classes;  // empty where the kernel cannot run
};

/// The classes of a problem, costliest first; none where weights of a set do not fit into shared memory,
/// where y is NCDHW and its phases cannot be stacked (stacks_phases), or where one launch cannot take them
/// all.
///
/// \param problem of at most kMaxTwicePhases phases
TwiceLayout twice_layout(const Problem& problem);

/// Sets of all classes.
inline std::int64_t twice_sets(const TwiceLayout& layout) {
  std::size_t sets = 0;
  for (const TwiceClass& from : layout.classes) sets += from.sets.size();
  return static_cast<std::int64_t>(sets);
}

/// Rows of x that the longest load of a class has beyond a tile's.
std::int64_t twice_shared_rows(const TwiceLayout& layout);

/// Whether the kernel can read w as it lies, where that is reads_w_in_place: 64 output channels of one tap
/// are a box of w, so rows that one warpgroup holds are to be one phase's, and in the order of the channels.
inline bool twice_reads_w_in_place(const TwiceLayout& layout) {
  return layout.box == kTwiceRows;
}

/// Whether the layout stacks two phases for y [N,K,Z,P,Q], or need not.
inline bool stacks_phases(const Problem& problem, const TwiceLayout& layout) {
  return problem.y_layout == Layout::kNDHWC || layout.fold == 2;
}

/// What a row of a view, or of a pile of them, computes.
struct TwiceRow {
  int view;   // of the pile
  int phase;  // of the view's fold
  std::int64_t channel;
};
inline TwiceRow twice_row(const TwiceLayout& layout, std::int64_t row) {
  const std::int64_t of_view = row % layout.view_rows, run = of_view / layout.run;
  return {static_cast<int>(row / layout.view_rows), static_cast<int>(run % layout.fold),
          run / layout.fold * layout.run + of_view % layout.run};
}

/// Rows behind the last one of a view, or of a pile of them.
inline std::int64_t twice_rows_end(const TwiceLayout& layout) {
  return layout.pile * layout.view_rows;
}

/// Index among the layout's phases of what a row of `rows` computes.
inline std::size_t twice_phase(const TwiceLayout& layout, const TwiceRows& rows, std::int64_t row) {
  const TwiceRow at = twice_row(layout, row);
  return static_cast<std::size_t>((rows.view + at.view) * layout.fold + at.phase);
}

/// Of the taps of `window`, along one axis: the index of its tap 0 among `phase`'s, times -1. Whole, since
/// windows are united only where it is.
std::int64_t tap_lead(const Slab& window, const Slab& phase, int axis);

/// Input channels of a k-block of the kernel that the problem takes.
inline std::int64_t twice_block_inputs(const Problem& problem) {
  return fits_half_block(problem) ? kHalfBlockInputs : kTwiceBlockC;
}

/// What piled views that are staged in a buffer each take of shared memory beyond the fewest buffers.
inline constexpr std::int64_t kTwicePiledBufferBytes = 32 * 1024;

/// Whether piled views are staged in a buffer each, as those of 16 bit are.
inline bool stages_views_apart(const Problem& problem, const TwiceLayout& layout) {
  return layout.pile > 1 && problem.y_layout == Layout::kNDHWC && size_of(problem.dtype) == 2;
}

/// What weights of a layout may take.
inline std::int64_t max_twice_weight_bytes(const Problem& problem, const TwiceLayout& layout) {
  return kMaxTwiceWeightBytes - (stages_views_apart(problem, layout) ? kTwicePiledBufferBytes : 0);
}

/// k-blocks of weights, 64 rows of 16-bit input channels, that may be held: 16, or 32 half ones; 12 or 24
/// where views are staged apart.
inline std::int64_t max_twice_units(const Problem& problem, const TwiceLayout& layout) {
  return max_twice_weight_bytes(problem, layout) / (kTwiceRows * 2 * twice_block_inputs(problem));
}

/// Estimated cycles of one tile of a class: the slowest of the tensor cores, shared memory and TMA.
///
/// \param c_blocks of block_inputs input channels each
/// \param staged whether y goes through shared memory, as it does but for NCDHW
std::int64_t twice_tile_cycles(const TwiceClass& of, std::int64_t c_blocks, std::int64_t block_inputs,
                               bool staged);

/// That of all tiles of a sample.
double twice_cycles(const Problem& problem, const TwiceLayout& layout);

/// Neighbouring channels of one norm group that share a partial moment, as a power of two.
int twice_granule_shift(const Problem& problem);

/// Partial moments of a sample along its positions.
std::int64_t twice_moments(const TwiceLayout& layout);

/// How partial moments are merged, which the problem alone decides.
struct TwiceMerging {
  std::int64_t groups;    // of all samples
  std::int64_t partials;  // of a group
  std::int64_t segments;  // of these, each of which a block merges, or a warp
};
TwiceMerging twice_merging(const Problem& problem, std::int64_t moments);

/// Floats of scratch that moments of a problem's groups are merged into: four of each group and, if there are
/// several, of each segment, and a counter for each group.
std::int64_t twice_table_floats(const Problem& problem, std::int64_t moments);

}  // namespace upconv3d
