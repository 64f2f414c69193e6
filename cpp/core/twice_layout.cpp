// SPDX-License-Identifier: Apache-2.0
#include "core/twice_layout.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>

#include "core/index_math.hpp"

namespace upconv3d {
namespace {

/// Windows and taps of `a` and `b` together, at the positions of `a`; nothing where positions or the grids of
/// their taps differ.
std::optional<Slab> unite(const Slab& a, const Slab& b) {
  if (a.extent != b.extent) return std::nullopt;
  if (b.tap_count() == 0) return a;
  Slab both = a;
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t dilation = b.dilation[axis];
    if (a.tap_count() == 0) {
      both.window[axis] = b.window[axis];
      both.taps[axis] = b.taps[axis];
      both.dilation[axis] = dilation;
      continue;
    }
    if (a.dilation[axis] != dilation || (a.window[axis] - b.window[axis]) % dilation != 0)
      return std::nullopt;
    const std::int64_t end =
        std::max(a.window[axis] + a.taps[axis] * dilation, b.window[axis] + b.taps[axis] * dilation);
    both.window[axis] = std::min(a.window[axis], b.window[axis]);
    both.taps[axis] = (end - both.window[axis]) / dilation;
  }
  return both;
}

/// Phases stacked where they are to be and have equal extents, else views of one phase each.
void make_views(const Problem& problem, TwiceLayout& layout) {
  const std::vector<Slab> slabs = border_slabs(problem, 0);
  const std::int64_t stride = problem.stride[2], columns = problem.out()[2];
  const bool channels_first = problem.y_layout == Layout::kNCDHW;
  const bool stackable = channels_first ? stride == 2 && problem.k % kTwiceStackedChannels == 0
                                        : stride > 1 && stride * problem.k <= kTwiceRows;
  bool folds = stackable && columns % stride == 0;
  std::vector<Slab> views, phases;
  for (const Slab& first : slabs) {
    if (!folds) break;
    if (first.origin[2] != 0) continue;
    Slab view = first;
    for (std::int64_t q = 0; q < stride; ++q) {
      const auto phase = std::find_if(slabs.begin(), slabs.end(), [&](const Slab& slab) {
        return slab.origin == Extent3{first.origin[0], first.origin[1], q};
      });
      const auto both = unite(view, *phase);
      folds = folds && both;
      if (both) view = *both;
      phases.push_back(*phase);
    }
    view.step[2] = 1;
    views.push_back(view);
  }
  layout.fold = folds ? static_cast<int>(stride) : 1;
  if (folds) layout.run = channels_first ? kTwiceStackedChannels : problem.k;
  layout.phases = folds ? phases : slabs;
  layout.views = folds ? views : slabs;
}

/// Rows on their own: all that one warpgroup may be given.
struct Candidate {
  int view;
  std::int64_t row;
};

/// Marks which of the class's taps the rows use.
void count_units(const Problem& problem, const TwiceLayout& layout, const TwiceClass& shared,
                 TwiceRows& rows) {
  if (rows.view < 0) return;
  const Slab& view = layout.views[static_cast<std::size_t>(rows.view)];
  const Slab& window = shared.window;
  std::int64_t used = 0;
  int bit = 0;
  for (std::int64_t t = 0; t < window.taps[0]; ++t) {
    for (std::int64_t r = 0; r < window.taps[1]; ++r) {
      for (std::int64_t s = 0; s < window.taps[2]; ++s, ++bit) {
        const Extent3 at = {t, r, s};
        // Rows that no tap reaches still multiply once, by zeros, so that they have a result.
        bool uses = view.tap_count() > 0 || bit == 0;
        for (int axis = 0; axis < 3 && view.tap_count() > 0; ++axis) {
          const std::int64_t tap = at[axis] + tap_lead(window, view, axis);
          uses = uses && tap >= 0 && tap < view.taps[axis];
        }
        if (!uses || bit >= 32) continue;
        rows.taps |= std::uint32_t{1} << bit;
        ++used;
      }
    }
  }
  rows.units = static_cast<int>(used * (shared.reached ? ceil_div(problem.c, kTwiceBlockC) : 1));
}

TwiceClass make_class(const Problem& problem, const TwiceLayout& layout, const Slab& window,
                      const Candidate& first, const Candidate* second) {
  TwiceClass made;
  made.window = window;
  made.reached = window.tap_count() > 0;
  if (!made.reached) made.window.taps = {1, 1, 1};
  made.rows[0].view = first.view;
  made.rows[0].row = first.row;
  if (second) {
    made.rows[1].view = second->view;
    made.rows[1].row = second->row;
  }
  for (TwiceRows& rows : made.rows) count_units(problem, layout, made, rows);
  return made;
}

bool fits(const Problem& problem, const TwiceClass& made) {
  constexpr std::int64_t kMaskBits = 32;
  return made.window.tap_count() <= kMaskBits && ceil_div(problem.c, kTwiceBlockC) <= kMaxTwiceUnits &&
         made.rows[0].units + made.rows[1].units <= kMaxTwiceUnits;
}

}  // namespace

std::int64_t tap_lead(const Slab& window, const Slab& phase, int axis) {
  return (window.window[axis] - phase.window[axis]) / phase.dilation[axis];
}

TwiceLayout twice_layout(const Problem& problem) {
  TwiceLayout layout;
  make_views(problem, layout);
  if (!stacks_phases(problem, layout)) return layout;
  std::vector<Candidate> candidates;
  for (std::size_t view = 0; view < layout.views.size(); ++view) {
    for (std::int64_t row = 0; row < layout.fold * problem.k; row += kTwiceRows) {
      candidates.push_back({static_cast<int>(view), row});
    }
  }
  // The same channels of other phases first: neighbours along the height lie side by side in y.
  if (problem.y_layout == Layout::kNCDHW) {
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.row < b.row; });
  }
  std::vector<bool> taken(candidates.size(), false);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (taken[i]) continue;
    // The partner with whom fewest taps are read in vain; of those the next in order, which is other channels
    // of the same phase if there are any.
    const Slab& own = layout.views[static_cast<std::size_t>(candidates[i].view)];
    TwiceClass best = make_class(problem, layout, own, candidates[i], nullptr);
    if (!fits(problem, best)) return {};
    std::size_t partner = i;
    for (std::size_t j = i + 1; j < candidates.size(); ++j) {
      if (taken[j]) continue;
      const auto both = unite(own, layout.views[static_cast<std::size_t>(candidates[j].view)]);
      if (!both || (partner != i && both->tap_count() >= best.window.tap_count())) continue;
      const TwiceClass made = make_class(problem, layout, *both, candidates[i], &candidates[j]);
      if (!fits(problem, made)) continue;
      best = made;
      partner = j;
    }
    taken[i] = taken[partner] = true;
    layout.classes.push_back(best);
    if (layout.classes.size() > static_cast<std::size_t>(kMaxTwiceClasses)) return {};
  }
  return layout;
}

std::int64_t twice_tile_cycles(const TwiceClass& of, std::int64_t c_blocks, bool staged) {
  // 64 x 256 x 64 multiply-adds, 2048 a cycle. wgmma reads 8 KB of w and 32 KB of x, TMA writes x; 118 bytes
  // a cycle, and as many again for two staged half tiles.
  constexpr std::int64_t kUnitCycles = 512, kUnitBytes = 40 << 10, kLoadBytes = 32 << 10,
                         kStagedBytes = 64 << 10;
  constexpr std::int64_t kSharedBytesPerCycle = 118;
  // Of a warpgroup: beside the other's multiplication it was seen to take as long as it would alone.
  constexpr std::int64_t kEpilogueCycles = 1000;
  const std::int64_t units = of.rows[0].units + of.rows[1].units;
  const std::int64_t loads = of.reached ? of.loads() * c_blocks : 1;
  const std::int64_t shared =
      (units * kUnitBytes + loads * kLoadBytes + (staged ? kStagedBytes : 0)) / kSharedBytesPerCycle;
  return std::max(units * kUnitCycles, shared) + (of.rows[1].view < 0 ? 1 : 2) * kEpilogueCycles;
}

int twice_granule_shift(const Problem& problem) {
  // A warp's 16 rows, which are 8 channels where phases are stacked for y [N,K,Z,P,Q].
  const int max_shift = problem.y_layout == Layout::kNDHWC ? 4 : 3;
  return std::min(max_shift, std::countr_zero(static_cast<std::uint64_t>(problem.k / problem.num_groups)));
}

std::int64_t twice_moments(const TwiceLayout& layout) {
  return slab_tiles(layout.phases, kTwicePositions);
}

std::int64_t twice_table_floats(const Problem& problem, std::int64_t moments) {
  constexpr std::int64_t kFloats = 4;
  const std::int64_t granules = problem.k / problem.num_groups >> twice_granule_shift(problem);
  const std::int64_t partials = moments * granules;
  return kFloats * problem.n * problem.num_groups * ceil_div(partials, twice_segment_length(partials));
}

std::int64_t twice_segment_length(std::int64_t partials) {
  constexpr std::int64_t kWarp = 32;
  const std::int64_t length = std::max(kTwiceSegmentPartials, ceil_div(partials, kMaxTwiceSegments));
  return ceil_div(length, kWarp) * kWarp;
}

}  // namespace upconv3d
