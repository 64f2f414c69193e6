// SPDX-License-Identifier: Apache-2.0
#include "core/border_slabs.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "core/index_math.hpp"

namespace upconv3d {
namespace {

/// One axis of a slab.
struct Band {
  std::int64_t origin, extent, step;
  std::int64_t stride;
  std::int64_t window, dilation;
  std::int64_t tap, tap_step, taps;
};

/// `band` from position `first` on, `extent` of them, with its taps from `tap_begin` to `tap_end`.
Band part_of(const Band& band, std::int64_t first, std::int64_t extent, std::int64_t tap_begin,
             std::int64_t tap_end) {
  Band part = band;
  part.origin += first * band.step;
  part.extent = extent;
  part.window += first * band.stride + tap_begin * band.dilation;
  part.tap -= tap_begin * band.tap_step;
  part.taps = std::max<std::int64_t>(tap_end - tap_begin, 0);
  return part;
}

/// Taps of `band` that read the volume for some of the windows from `first` to `last`: their range.
std::pair<std::int64_t, std::int64_t> taps_inside(const Band& band, std::int64_t first, std::int64_t last,
                                                  std::int64_t in) {
  const std::int64_t begin = last >= 0 ? 0 : ceil_div(-last, band.dilation);
  const std::int64_t end = first >= in ? 0 : ceil_div(in - first, band.dilation);
  return {std::min(begin, band.taps), std::min(end, band.taps)};
}

/// `band` without the taps that read the volume for none of its positions.
Band reached_part(const Band& band, std::int64_t in) {
  const std::int64_t last = band.window + (band.extent - 1) * band.stride;
  const auto [begin, end] = taps_inside(band, band.window, last, in);
  return part_of(band, 0, band.extent, begin, end);
}

/// The phases of one axis: output coordinates of equal remainder modulo the stride. Of a plain convolution
/// all of them.
std::vector<Band> phases_of(const Problem& problem, int axis) {
  const std::int64_t stride = problem.stride[axis], dilation = problem.dilation[axis];
  const std::int64_t in = problem.in[axis], out = problem.out()[axis];
  if (problem.operation == Operation::kConv) {
    const Band all{0, out, 1, stride, -problem.padding[axis], dilation, 0, -1, problem.kernel[axis]};
    return {reached_part(all, in)};
  }
  // Tap t reaches output i*stride - padding + t*dilation: every tap_step-th tap reaches the same phase.
  const std::int64_t tap_step = stride / std::gcd(stride, dilation);
  std::vector<Band> phases;
  for (std::int64_t origin = 0; origin < std::min(stride, out); ++origin) {
    Band phase{
        origin, ceil_div(out - origin, stride), stride, 1, 0, tap_step * dilation / stride, 0, tap_step, 0};
    for (std::int64_t tap = 0; tap < problem.kernel[axis]; ++tap) {
      const std::int64_t reach = origin + problem.padding[axis] - tap * dilation;
      if (reach % stride != 0) continue;
      phase.tap = tap;  // the last one reads the lowest input
      phase.window = reach / stride;
      ++phase.taps;
    }
    phases.push_back(reached_part(phase, in));
  }
  return phases;
}

/// By how many inputs a window has to move on for one of its taps to enter the volume or leave it; 0 for no
/// number of them.
std::int64_t inputs_to_next_change(const Band& phase, std::int64_t window, std::int64_t in) {
  const std::int64_t span = (phase.taps - 1) * phase.dilation;  // from the first tap to the last one
  std::int64_t least = 0;
  for (const std::int64_t border : {std::int64_t{0}, in}) {
    const std::int64_t away = border - window;
    if (away <= 0) continue;  // all taps are beyond it
    // The next to meet it is the last one before it.
    const std::int64_t inputs = away > span ? away - span : (away - 1) % phase.dilation + 1;
    if (least == 0 || inputs < least) least = inputs;
  }
  return least;
}

/// A phase cut where the taps that read the volume change.
std::vector<Band> bands_of(const Band& phase, std::int64_t in) {
  // Without taps nothing changes, and there would be no step but from position to position.
  if (phase.taps == 0) return {part_of(phase, 0, phase.extent, 0, 0)};
  std::vector<Band> bands;
  std::pair<std::int64_t, std::int64_t> previous{-1, -1};
  for (std::int64_t i = 0; i < phase.extent;) {
    const std::int64_t window = phase.window + i * phase.stride;
    auto taps = taps_inside(phase, window, window, in);
    if (taps.first >= taps.second) taps = {0, 0};
    const std::int64_t inputs = inputs_to_next_change(phase, window, in), left = phase.extent - i;
    const std::int64_t extent = inputs == 0 ? left : std::min(ceil_div(inputs, phase.stride), left);
    if (taps == previous) {
      bands.back().extent += extent;
    } else {
      bands.push_back(part_of(phase, i, extent, taps.first, taps.second));
    }
    previous = taps;
    i += extent;
  }
  return bands;
}

Band axis_of(const Slab& slab, int axis) {
  return {slab.origin[axis],   slab.extent[axis], slab.step[axis],     slab.stride[axis], slab.window[axis],
          slab.dilation[axis], slab.tap[axis],    slab.tap_step[axis], slab.taps[axis]};
}

Slab with_axis(Slab slab, int axis, const Band& band) {
  slab.origin[axis] = band.origin;
  slab.extent[axis] = band.extent;
  slab.step[axis] = band.step;
  slab.stride[axis] = band.stride;
  slab.window[axis] = band.window;
  slab.dilation[axis] = band.dilation;
  slab.tap[axis] = band.tap;
  slab.tap_step[axis] = band.tap_step;
  slab.taps[axis] = band.taps;
  return slab;
}

void sort_by_taps(std::vector<Slab>& slabs) {
  std::stable_sort(slabs.begin(), slabs.end(),
                   [](const Slab& a, const Slab& b) { return a.tap_count() > b.tap_count(); });
}

}  // namespace

std::vector<Slab> border_slabs(const Problem& problem, int split_axes) {
  std::vector<Slab> slabs;
  const std::vector<Band> height = phases_of(problem, 1), width = phases_of(problem, 2);
  for (const Band& z : phases_of(problem, 0)) {
    for (const Band& p : height) {
      for (const Band& q : width) {
        Slab rest = with_axis(with_axis(with_axis({}, 0, z), 1, p), 2, q);
        for (int axis = 0; axis < split_axes; ++axis) {
          const std::vector<Band> bands = bands_of(axis_of(rest, axis), problem.in[axis]);
          const auto widest = std::max_element(
              bands.begin(), bands.end(), [](const Band& a, const Band& b) { return a.extent < b.extent; });
          for (auto band = bands.begin(); band != bands.end(); ++band) {
            if (band != widest) slabs.push_back(with_axis(rest, axis, *band));
          }
          rest = with_axis(rest, axis, *widest);
        }
        slabs.push_back(rest);
      }
    }
  }
  sort_by_taps(slabs);
  return slabs;
}

namespace {

bool tiles_end_with_planes(const Slab& slab) {
  return slab.extent[1] * slab.extent[2] % kSharedPlaneUnit == 0;
}

/// Where `extent` of a band's positions begin that most taps reach: at either end the fewest are left over.
std::int64_t inside_begin(const Band& band, std::int64_t extent, std::int64_t in) {
  const auto taps_of = [&](std::int64_t i) {
    const std::int64_t window = band.window + i * band.stride;
    const auto [begin, end] = taps_inside(band, window, window, in);
    return end - begin;
  };
  std::int64_t begin = 0, end = band.extent;
  while (end - begin > extent) {
    if (taps_of(begin) <= taps_of(end - 1)) {
      ++begin;
    } else {
      --end;
    }
  }
  return begin;
}

/// Positions `begin` to `end` of a slab's axis, with the taps that read the volume for any of them.
Slab part_along(const Slab& slab, int axis, std::int64_t begin, std::int64_t end, std::int64_t in) {
  const Band band = axis_of(slab, axis);
  return with_axis(slab, axis, reached_part(part_of(band, begin, end - begin, 0, band.taps), in));
}

/// Cuts `slab` down to `extent` positions along an axis; what that leaves over goes to `rest`.
void cut_ends(Slab& slab, int axis, std::int64_t extent, std::int64_t in, std::vector<Slab>& rest) {
  const std::int64_t all = slab.extent[axis], begin = inside_begin(axis_of(slab, axis), extent, in);
  if (begin > 0) rest.push_back(part_along(slab, axis, 0, begin, in));
  if (begin + extent < all) rest.push_back(part_along(slab, axis, begin + extent, all, in));
  slab = part_along(slab, axis, begin, begin + extent, in);
}

/// A phase cut for shared loads.
struct SharedCut {
  std::vector<Slab> inside;  // that share, side by side along the width
  std::vector<Slab> rest;
};

/// A phase with an inside of `rows` and as many parts of `columns` as the width has room for.
SharedCut shared_cut(const Problem& problem, Slab phase, std::int64_t rows, std::int64_t columns) {
  SharedCut cut;
  cut_ends(phase, 1, rows, problem.in[1], cut.rest);
  const std::int64_t parts = phase.extent[2] / columns;
  cut_ends(phase, 2, parts * columns, problem.in[2], cut.rest);
  for (std::int64_t part = 0; part < parts; ++part) {
    cut.inside.push_back(part_along(phase, 2, part * columns, (part + 1) * columns, problem.in[2]));
  }
  return cut;
}

/// Of the products of one sample, in those of a tile and tap.
double product_cost(const Problem& problem, const std::vector<Slab>& slabs) {
  // Of a 128 x 256 tile's k-block, the tensor cores take 1024 cycles, loading x and w for one tap 1170.
  constexpr double kOwnLoad = 1.15;
  double cost = 0;
  for (const Slab& slab : slabs) {
    // A tile costs about a tap more than its own.
    const double taps =
        static_cast<double>(slab.tap_count()) * (shares_x_loads(problem, slab) ? 1 : kOwnLoad) + 1;
    cost += static_cast<double>(ceil_div(slab.positions(), kSharedPlaneUnit)) * taps;
  }
  return cost;
}

/// The cheapest cut of a phase; with an empty inside where none of its loads can be shared for less.
SharedCut cheapest_shared_cut(const Problem& problem, const Slab& phase) {
  if (shares_x_loads(problem, phase)) return {{phase}, {}};
  SharedCut best{{}, {phase}};
  const std::int64_t taps = phase.taps[1], height = phase.extent[1], width = phase.extent[2];
  if (taps < 2 || phase.tap_count() == 0) return best;
  double best_cost = product_cost(problem, best.rest);
  std::int64_t columns = std::min(width, kMaxSharedRows / (taps - 1)) / kSharedRowUnit * kSharedRowUnit;
  // Fewer columns make more parts.
  for (; columns > 0 && width / columns <= kMaxSlabs; columns -= kSharedRowUnit) {
    const std::int64_t unit = kSharedPlaneUnit / std::gcd(columns, kSharedPlaneUnit);  // rows
    for (const std::int64_t rows : {height / unit * unit, height}) {
      if (rows == 0) continue;
      const SharedCut cut = shared_cut(problem, phase, rows, columns);
      if (!shares_x_loads(problem, cut.inside.front())) continue;
      const double cost = product_cost(problem, cut.inside) + product_cost(problem, cut.rest);
      if (cost < best_cost) {
        best = cut;
        best_cost = cost;
      }
    }
  }
  return best;
}

/// The slab, cut where the taps along the depth change if that costs less.
void cut_depth(const Problem& problem, const Slab& slab, std::vector<Slab>& to) {
  std::vector<Slab> bands;
  for (const Band& band : bands_of(axis_of(slab, 0), problem.in[0]))
    bands.push_back(with_axis(slab, 0, band));
  if (product_cost(problem, bands) >= product_cost(problem, {slab})) bands = {slab};
  to.insert(to.end(), bands.begin(), bands.end());
}

}  // namespace

std::vector<Slab> tap_sharing_slabs(const Problem& problem) {
  const std::vector<Slab> phases = border_slabs(problem, 0);
  std::vector<Slab> slabs, depth_cut;
  for (const Slab& phase : phases) {
    const SharedCut cut = cheapest_shared_cut(problem, phase);
    slabs.insert(slabs.end(), cut.inside.begin(), cut.inside.end());
    for (const Slab& slab : cut.inside) cut_depth(problem, slab, depth_cut);
    slabs.insert(slabs.end(), cut.rest.begin(), cut.rest.end());
    depth_cut.insert(depth_cut.end(), cut.rest.begin(), cut.rest.end());
  }
  // Phases are many slabs already.
  if (phases.size() == 1 && depth_cut.size() <= std::size_t{kMaxSlabs}) slabs = depth_cut;
  sort_by_taps(slabs);
  return slabs;
}

std::optional<Slab> united_windows(const Slab& a, const Slab& b) {
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

SharedLoads shared_loads(const Problem& problem, const Slab& slab) {
  constexpr Extent3 kOnes = {1, 1, 1};
  if (slab.stride != kOnes || slab.dilation != kOnes || slab.tap_count() == 0) return {};
  const auto fits = [&](int axis, std::int64_t rows) {
    return slab.taps[axis] > 1 && rows % kSharedRowUnit == 0 &&
           (slab.taps[axis] - 1) * rows <= kMaxSharedRows;
  };
  const std::int64_t row = slab.extent[2], plane = slab.extent[1] * row;
  const bool nothing_behind_planes = problem.operation == Operation::kConvTranspose && slab.step == kOnes &&
                                     problem.padding[1] == 0 && slab.extent[1] == problem.out()[1];
  if (fits(1, row) && (tiles_end_with_planes(slab) || nothing_behind_planes)) return {1, slab.taps[1], row};
  if (fits(0, plane)) return {0, slab.taps[0], plane};
  return {};
}

InputBox input_box(const Problem& problem, const Slab& slab, bool shares_taps) {
  InputBox box;
  const bool reached = slab.tap_count() > 0;
  const SharedLoads shared = shares_taps ? shared_loads(problem, slab) : SharedLoads{};
  const bool goes_on = shared.taps > 1 && (shared.axis == 0 || tiles_end_with_planes(slab));
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t reach = (slab.extent[axis] - 1) * slab.stride[axis];  // of the windows
    if (!reached) {
      box.extent[axis] = std::min(problem.in[axis], reach + 1);
      box.upper[axis] = reach + 1 - box.extent[axis];
      continue;
    }
    const std::int64_t first = slab.window[axis];
    const std::int64_t taps_reach = (slab.taps[axis] - 1) * slab.dilation[axis];
    box.origin[axis] = std::max<std::int64_t>(first, 0);
    box.extent[axis] = std::min(first + reach + taps_reach, problem.in[axis] - 1) - box.origin[axis] + 1;
    box.lower[axis] = first - box.origin[axis];
    box.upper[axis] = box.lower[axis] + reach + 1 - box.extent[axis];
    if (goes_on && axis == shared.axis) box.upper[axis] += taps_reach;
  }
  return box;
}

std::int64_t slab_tiles(const std::vector<Slab>& slabs, std::int64_t block_positions) {
  std::int64_t tiles = 0;
  for (const Slab& slab : slabs) tiles += ceil_div(slab.positions(), block_positions);
  return tiles;
}

}  // namespace upconv3d
