// SPDX-License-Identifier: Apache-2.0
#include "core/twice_layout.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>

#include "core/im2col_limits.hpp"
#include "core/index_math.hpp"

namespace upconv3d {
namespace {

constexpr std::int64_t kPile = 2;  // views

/// united_windows, where `b` has the positions of `a`.
std::optional<Slab> unite(const Slab& a, const Slab& b) {
  return a.extent == b.extent ? united_windows(a, b) : std::nullopt;
}

/// The phases along the width that begin with `first`: of the same planes and rows.
std::vector<Slab> row_of_phases(const std::vector<Slab>& slabs, const Slab& first, std::int64_t stride) {
  std::vector<Slab> row;
  for (std::int64_t q = 0; q < stride; ++q) {
    row.push_back(*std::find_if(slabs.begin(), slabs.end(), [&](const Slab& slab) {
      return slab.origin == Extent3{first.origin[0], first.origin[1], q};
    }));
  }
  return row;
}

/// Whether phases of a row may be stacked: together they make up loads of x.
bool unites(const std::vector<Slab>& row) {
  Slab together = row.front();
  return std::all_of(row.begin(), row.end(), [&](const Slab& phase) {
    const auto both = unite(together, phase);
    if (both) together = *both;
    return both.has_value();
  });
}

bool reads_alike(const Slab& a, const Slab& b) {
  return a.extent == b.extent && a.window == b.window && a.dilation == b.dilation && a.taps == b.taps;
}

/// Whether phases of a row are to be folded for y [N,Z,P,Q,K]: where phases that are then stacked multiply
/// few zeros, because they use the same taps or would leave most of the rows empty; or, of phases whose rows
/// are whole blocks, where there would be too many views.
///
/// \param phases of all rows
bool folds_rows(const Problem& problem, const std::vector<Slab>& row, std::size_t phases) {
  if (problem.k % kTwiceRows == 0) return phases > static_cast<std::size_t>(kMaxTwiceViews);
  if (problem.stride[2] * problem.k <= kTwiceRows) return unites(row);
  return std::all_of(row.begin(), row.end(),
                     [&](const Slab& phase) { return reads_alike(phase, row.front()); });
}

/// Phases folded where they are to be and have equal extents, else views of one phase each.
void make_views(const Problem& problem, const std::vector<Slab>& slabs, TwiceLayout& layout) {
  const std::int64_t stride = problem.stride[2], columns = problem.out()[2];
  const bool channels_first = problem.y_layout == Layout::kNCDHW;
  bool folds = stride > 1 && columns % stride == 0;
  if (channels_first) folds = folds && stride == 2 && problem.k % kTwiceStackedChannels == 0;
  std::vector<Slab> views, phases;
  for (const Slab& first : slabs) {
    if (!folds) break;
    if (first.origin[2] != 0) continue;
    const std::vector<Slab> row = row_of_phases(slabs, first, stride);
    folds = channels_first ? unites(row) : folds_rows(problem, row, slabs.size());
    phases.insert(phases.end(), row.begin(), row.end());
    views.push_back(first);
    views.back().step[2] = 1;
  }
  layout.phases = folds ? phases : slabs;
  layout.views = folds ? views : slabs;
  if (!folds) return;
  layout.fold = static_cast<int>(stride);
  layout.run = channels_first ? kTwiceStackedChannels : problem.k;
  layout.box = std::gcd(layout.run, kTwiceRows);
}

/// Piles up views of 32 rows where each two that follow one another, along the width, the height and then the
/// depth, read alike enough.
void pile_views(TwiceLayout& layout) {
  const auto fold = static_cast<std::size_t>(layout.fold);
  if (kPile * layout.view_rows != kTwiceRows || layout.views.size() % kPile != 0) return;
  std::vector<std::size_t> order(layout.views.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return layout.views[a].origin < layout.views[b].origin;
  });
  TwiceLayout piled = layout;
  piled.views.clear(), piled.phases.clear();
  for (const std::size_t view : order) {
    piled.views.push_back(layout.views[view]);
    const auto first = layout.phases.begin() + static_cast<std::ptrdiff_t>(view * fold);
    piled.phases.insert(piled.phases.end(), first, first + layout.fold);
  }
  for (auto first = piled.phases.begin(); first != piled.phases.end(); first += kPile * layout.fold) {
    if (!unites({first, first + kPile * layout.fold})) return;
  }
  piled.pile = static_cast<int>(kPile);
  piled.box = std::min(layout.box, layout.view_rows);
  layout = std::move(piled);
}

/// Rows on their own: all that one warpgroup may be given.
struct Candidate {
  TwiceRows rows;
  Slab reads;         // what its phases read, taken together
  std::size_t phase;  // the first one's place among the slabs, costliest first
};

/// \param slabs the phases, costliest first
Candidate make_candidate(const TwiceLayout& layout, const std::vector<Slab>& slabs, const TwiceRows& rows) {
  const auto phase_of = [&](std::int64_t row) { return layout.phases[twice_phase(layout, rows, row)]; };
  Candidate candidate{rows, phase_of(rows.row), 0};
  const std::int64_t end = std::min(rows.row + kTwiceRows, twice_rows_end(layout));
  for (std::int64_t row = rows.row; row < end; row += layout.box) {
    // Of phases that cannot be united, none are stacked.
    candidate.reads = unite(candidate.reads, phase_of(row)).value_or(candidate.reads);
  }
  const Extent3 origin = phase_of(rows.row).origin;
  const auto at =
      std::find_if(slabs.begin(), slabs.end(), [&](const Slab& slab) { return slab.origin == origin; });
  candidate.phase = static_cast<std::size_t>(at - slabs.begin());
  return candidate;
}

/// All rows, in the order in which they are to be given away.
std::vector<Candidate> make_candidates(const Problem& problem, const TwiceLayout& layout,
                                       const std::vector<Slab>& slabs) {
  std::vector<Candidate> candidates;
  for (int view = 0; view < static_cast<int>(layout.views.size()); view += layout.pile) {
    for (std::int64_t row = 0; row < twice_rows_end(layout); row += kTwiceRows) {
      candidates.push_back(make_candidate(layout, slabs, {view, row}));
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    // For y [N,K,Z,P,Q] the same channels of other phases first: neighbours along the height lie side by
    // side.
    if (problem.y_layout == Layout::kNCDHW && a.rows.row != b.rows.row) return a.rows.row < b.rows.row;
    return a.phase < b.phase;
  });
  return candidates;
}

/// Which of the class's taps a warpgroup uses that is to compute `reads`.
TwiceUnits count_units(const Problem& problem, const TwiceClass& shared, const Slab& reads) {
  const Slab& window = shared.window;
  TwiceUnits units;
  std::int64_t used = 0;
  for (std::int64_t t = 0; t < window.taps[0]; ++t) {
    for (std::int64_t r = 0; r < window.taps[1]; ++r) {
      for (std::int64_t s = 0; s < window.taps[2]; ++s) {
        const Extent3 at = {t, r, s};
        const int bit = tap_bit(shared, at);
        // Rows that no tap reaches still multiply once, by zeros, so that they have a result.
        bool uses = reads.tap_count() > 0 || bit == 0;
        for (int axis = 0; axis < 3 && reads.tap_count() > 0; ++axis) {
          const std::int64_t tap = at[axis] + tap_lead(window, reads, axis);
          uses = uses && tap >= 0 && tap < reads.taps[axis];
        }
        if (!uses || bit >= 32) continue;
        units.taps |= std::uint32_t{1} << bit;
        ++used;
      }
    }
  }
  units.count =
      static_cast<int>(used * (shared.reached ? ceil_div(problem.c, twice_block_inputs(problem)) : 1));
  return units;
}

/// A class of one set: `first` and, unless null, `second`, which read `window` together.
TwiceClass make_class(const Problem& problem, const Slab& window, const Candidate& first,
                      const Candidate* second) {
  TwiceClass made;
  made.window = window;
  made.reached = window.tap_count() > 0;
  if (!made.reached) made.window.taps = {1, 1, 1};
  made.units[0] = count_units(problem, made, first.reads);
  if (second) made.units[1] = count_units(problem, made, second->reads);
  made.sets.push_back({{first.rows, second ? second->rows : TwiceRows{}}});
  return made;
}

bool fits(const Problem& problem, const TwiceLayout& layout, const TwiceClass& made) {
  constexpr std::int64_t kMaskBits = 32;
  const std::int64_t most = max_twice_units(problem, layout);
  return made.window.tap_count() <= kMaskBits && ceil_div(problem.c, twice_block_inputs(problem)) <= most &&
         made.units[0].count + made.units[1].count <= most;
}

/// Adds the set of `made` to the class that it is one of.
void add_class(const TwiceClass& made, std::vector<TwiceClass>& classes) {
  const auto like = std::find_if(classes.begin(), classes.end(), [&](const TwiceClass& other) {
    return reads_alike(made.window, other.window) && made.reached == other.reached &&
           made.units[0].taps == other.units[0].taps && made.units[1].taps == other.units[1].taps;
  });
  if (like == classes.end()) {
    classes.push_back(made);
  } else {
    like->sets.push_back(made.sets.front());
  }
}

/// The mask of the taps of `from`, in the order of `to`, of which `from` differs by what its loads serve.
std::uint32_t reordered(std::uint32_t taps, const TwiceClass& from, const TwiceClass& to) {
  const Extent3& count = from.window.taps;
  std::uint32_t result = 0;
  for (std::int64_t t = 0; t < count[0]; ++t) {
    for (std::int64_t r = 0; r < count[1]; ++r) {
      for (std::int64_t s = 0; s < count[2]; ++s) {
        const std::uint32_t bit = taps >> tap_bit(from, {t, r, s}) & 1;
        result |= bit << tap_bit(to, {t, r, s});
      }
    }
  }
  return result;
}

/// Lets loads of x serve several taps where they can: if two slots of the longest fit beside all weights.
void share_loads(const Problem& problem, TwiceLayout& layout) {
  std::vector<TwiceClass> classes = layout.classes;
  std::int64_t units = 0;
  for (std::size_t i = 0; i < classes.size(); ++i) {
    TwiceClass& made = classes[i];
    if (made.reached && within_im2col(problem, {made.window}, true))
      made.shared = shared_loads(problem, made.window);
    for (TwiceUnits& of : made.units) of.taps = reordered(of.taps, layout.classes[i], made);
    units = std::max<std::int64_t>(units, made.units[0].count + made.units[1].count);
  }
  constexpr std::int64_t kSlots = 2;
  TwiceLayout shared = layout;
  shared.classes = std::move(classes);
  const std::int64_t rows = units * kTwiceRows + kSlots * twice_shared_rows(shared);
  if (rows * twice_block_inputs(problem) * 2 <= max_twice_weight_bytes(problem, layout))
    layout = std::move(shared);
}

}  // namespace

std::int64_t tap_lead(const Slab& window, const Slab& phase, int axis) {
  return (window.window[axis] - phase.window[axis]) / phase.dilation[axis];
}

int tap_bit(const TwiceClass& of, const Extent3& at) {
  Extent3 load = at, loads = of.window.taps;
  std::int64_t served = 0;
  if (of.shared.taps > 1) {
    served = at[of.shared.axis];
    load[of.shared.axis] = 0;
    loads[of.shared.axis] = 1;
  }
  return static_cast<int>(((load[0] * loads[1] + load[1]) * loads[2] + load[2]) * of.shared.taps + served);
}

std::int64_t twice_shared_rows(const TwiceLayout& layout) {
  std::int64_t rows = 0;
  for (const TwiceClass& of : layout.classes) rows = std::max(rows, (of.shared.taps - 1) * of.shared.rows);
  return rows;
}

namespace {

/// The layout, whose views are piled up if they can and `piles`.
TwiceLayout make_layout(const Problem& problem, bool piles) {
  TwiceLayout layout;
  const std::vector<Slab> slabs = border_slabs(problem, 0);
  make_views(problem, slabs, layout);
  layout.view_rows = layout.fold * problem.k;
  if (piles) pile_views(layout);
  if (!stacks_phases(problem, layout) || slabs.size() > static_cast<std::size_t>(kMaxTwicePhases) ||
      layout.views.size() > static_cast<std::size_t>(kMaxTwiceViews)) {
    return layout;
  }
  const std::int64_t row_blocks = ceil_div(layout.view_rows, kTwiceRows);
  if (static_cast<std::int64_t>(layout.views.size()) * row_blocks > 2 * kMaxTwiceSets) return layout;
  const std::vector<Candidate> candidates = make_candidates(problem, layout, slabs);
  std::vector<bool> taken(candidates.size(), false);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (taken[i]) continue;
    // The partner with whom fewest taps are read in vain; of those the next in order, which is other channels
    // of the same phase if there are any. But where loads serve several taps along the height, first a phase
    // of the same depth: so all classes have those taps, not half of them.
    const Candidate& own = candidates[i];
    const SharedLoads shared = shared_loads(problem, own.reads);
    const auto beside = [&](std::size_t other) {
      return shared.taps == 1 || shared.axis != 1 || candidates[other].reads.origin[0] == own.reads.origin[0];
    };
    TwiceClass best = make_class(problem, own.reads, own, nullptr);
    if (!fits(problem, layout, best)) return {};
    std::size_t partner = i;
    std::vector<const Slab*> refused;  // that do not fit beside it, whichever channels they are for
    for (std::size_t j = i + 1; j < candidates.size(); ++j) {
      // Rows that no tap reaches are satisfied with any others of the kind.
      const bool has_all =
          partner != i && (!best.reached || best.window.tap_count() == own.reads.tap_count());
      if (has_all && beside(partner)) break;
      if (taken[j]) continue;
      const Slab& other = candidates[j].reads;
      const auto is_alike = [&other](const Slab* slab) { return reads_alike(*slab, other); };
      if (std::any_of(refused.begin(), refused.end(), is_alike)) continue;
      const auto both = unite(own.reads, other);
      if (!both) continue;
      const std::int64_t taps = both->tap_count(), best_taps = best.window.tap_count();
      const bool better = taps < best_taps || (taps == best_taps && beside(j) && !beside(partner));
      if (partner != i && !better) continue;
      const TwiceClass made = make_class(problem, *both, own, &candidates[j]);
      if (!fits(problem, layout, made)) {
        refused.push_back(&other);
        continue;
      }
      best = made;
      partner = j;
    }
    taken[i] = taken[partner] = true;
    add_class(best, layout.classes);
  }
  if (layout.classes.size() > static_cast<std::size_t>(kMaxTwiceClasses) ||
      twice_sets(layout) > kMaxTwiceSets) {
    layout.classes.clear();
  }
  share_loads(problem, layout);
  return layout;
}

}  // namespace

TwiceLayout twice_layout(const Problem& problem) {
  TwiceLayout alone = make_layout(problem, false);
  // What does not fit alone does not in a pile, whose taps are those of both.
  if (alone.classes.empty() || kPile * alone.view_rows != kTwiceRows) return alone;
  // Where a pile gains little, it is alone in its block, whose other warpgroup idles.
  constexpr double kWorthIt = 0.9;
  TwiceLayout piled = make_layout(problem, true);
  const bool is_worth_it =
      !piled.classes.empty() && twice_cycles(problem, piled) < kWorthIt * twice_cycles(problem, alone);
  return is_worth_it ? piled : alone;
}

double twice_cycles(const Problem& problem, const TwiceLayout& layout) {
  const std::int64_t block_inputs = twice_block_inputs(problem);
  double sum = 0;
  for (const TwiceClass& of : layout.classes) {
    const std::int64_t each = twice_tile_cycles(of, ceil_div(problem.c, block_inputs), block_inputs,
                                                problem.y_layout == Layout::kNDHWC);
    sum += static_cast<double>(each) * static_cast<double>(of.sets.size()) *
           static_cast<double>(ceil_div(of.window.positions(), kTwicePositions));
  }
  return sum;
}

std::int64_t twice_tile_cycles(const TwiceClass& of, std::int64_t c_blocks, std::int64_t block_inputs,
                               bool staged) {
  // Of 64 input channels 64 x 256 x 64 multiply-adds, 2048 a cycle. wgmma reads 8 KB of w and 32 KB of x, TMA
  // writes x; 118 bytes a cycle, and as many again for two staged half tiles.
  const std::int64_t unit_cycles = 8 * block_inputs, unit_bytes = 640 * block_inputs,
                     load_bytes = 512 * block_inputs;
  constexpr std::int64_t kStagedBytes = 64 << 10;
  constexpr std::int64_t kSharedBytesPerCycle = 118;
  // Of TMA, as seen of half k-blocks. Whole ones that one warpgroup multiplies take longer.
  constexpr std::int64_t kLoadCycles = 600;
  // Of a warpgroup: beside the other's multiplication it was seen to take as long as it would alone.
  constexpr std::int64_t kEpilogueCycles = 1000;
  const std::int64_t units = of.units[0].count + of.units[1].count;
  const std::int64_t loads = of.reached ? of.loads() * c_blocks : 1;
  const std::int64_t shared =
      (units * unit_bytes + loads * load_bytes + (staged ? kStagedBytes : 0)) / kSharedBytesPerCycle;
  const std::int64_t multiply = std::max({units * unit_cycles, shared, loads * kLoadCycles});
  return multiply + (of.units[1].count == 0 ? 1 : 2) * kEpilogueCycles;
}

int twice_granule_shift(const Problem& problem) {
  // A warp's 16 rows, which are 8 channels where phases are stacked for y [N,K,Z,P,Q].
  const int max_shift = problem.y_layout == Layout::kNDHWC ? 4 : 3;
  return std::min(max_shift, std::countr_zero(static_cast<std::uint64_t>(problem.k / problem.num_groups)));
}

std::int64_t twice_moments(const TwiceLayout& layout) {
  return slab_tiles(layout.phases, kTwicePositions);
}

TwiceMerging twice_merging(const Problem& problem, std::int64_t moments) {
  const std::int64_t groups = problem.n * problem.num_groups;
  const std::int64_t partials = moments * (problem.k / problem.num_groups >> twice_granule_shift(problem));
  // A block takes 0.4 us for 1024 partials, most of it conversions to double; that segments are merged once
  // more, by whoever is the last, takes 2 us.
  constexpr std::int64_t kWorthSegments = 8192, kSegmentPartials = 1024, kBlocks = 128;
  const std::int64_t segments = partials <= kWorthSegments || groups == 0
                                    ? 1
                                    : std::min(kBlocks / groups, ceil_div(partials, kSegmentPartials));
  return {groups, partials, std::max<std::int64_t>(segments, 1)};
}

std::int64_t twice_table_floats(const Problem& problem, std::int64_t moments) {
  constexpr std::int64_t kFloats = 4;
  const TwiceMerging merging = twice_merging(problem, moments);
  return merging.groups * (merging.segments > 1 ? kFloats * (1 + merging.segments) + 1 : kFloats);
}

}  // namespace upconv3d
