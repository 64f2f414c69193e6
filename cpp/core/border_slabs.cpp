// SPDX-License-Identifier: Apache-2.0
#include "core/border_slabs.hpp"

#include <algorithm>
#include <numeric>
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

/// A phase cut where the taps that read the volume change.
std::vector<Band> bands_of(const Band& phase, std::int64_t in) {
  std::vector<Band> bands;
  std::pair<std::int64_t, std::int64_t> previous{-1, -1};
  for (std::int64_t i = 0; i < phase.extent;) {
    const std::int64_t window = phase.window + i * phase.stride;
    auto taps = taps_inside(phase, window, window, in);
    if (taps.first >= taps.second) taps = {0, 0};
    // A window inside the volume keeps all taps until its last one meets the far border.
    const bool inside = phase.taps > 0 && window >= 0 && taps.second == phase.taps;
    const std::int64_t reach =
        inside ? (in - 1 - (phase.taps - 1) * phase.dilation - window) / phase.stride + 1 : 1;
    const std::int64_t extent = std::clamp<std::int64_t>(reach, 1, phase.extent - i);
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

std::vector<Slab> tap_sharing_slabs(const Problem& problem) {
  std::vector<Slab> slabs;
  const std::int64_t columns = problem.out()[2];
  const std::int64_t aligned = columns / kSharedRowUnit * kSharedRowUnit;
  for (const Slab& whole_rows : border_slabs(problem, 1)) {
    const Band row = axis_of(whole_rows, 2);
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, aligned}, std::pair{aligned, columns}}) {
      if (begin == end) continue;
      const auto [tap_begin, tap_end] =
          taps_inside(row, row.window + begin, row.window + end - 1, problem.in[2]);
      slabs.push_back(with_axis(whole_rows, 2, part_of(row, begin, end - begin, tap_begin, tap_end)));
    }
  }
  sort_by_taps(slabs);
  return slabs;
}

bool shares_x_loads(const Problem& problem, const Slab& slab) {
  constexpr Extent3 kOnes = {1, 1, 1};
  const std::int64_t taps = slab.taps[1];
  const bool planes_join = problem.operation == Operation::kConv
                               ? slab.extent[1] * slab.extent[2] % kSharedPlaneUnit == 0
                               : problem.padding[1] == 0;
  return slab.step == kOnes && slab.stride == kOnes && slab.dilation == kOnes && planes_join &&
         slab.extent[1] == problem.out()[1] && taps == problem.kernel[1] && taps > 1 &&
         slab.extent[2] % kSharedRowUnit == 0 && (taps - 1) * slab.extent[2] <= kMaxSharedRows;
}

InputBox input_box(const Problem& problem, const Slab& slab, bool shares_taps) {
  InputBox box;
  const bool reached = slab.tap_count() > 0;
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
    if (shares_taps && axis == 1 && problem.operation == Operation::kConv) box.upper[axis] += taps_reach;
  }
  return box;
}

std::int64_t slab_tiles(const std::vector<Slab>& slabs, std::int64_t block_positions) {
  std::int64_t tiles = 0;
  for (const Slab& slab : slabs) tiles += ceil_div(slab.positions(), block_positions);
  return tiles;
}

}  // namespace upconv3d
