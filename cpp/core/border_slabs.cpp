// SPDX-License-Identifier: Apache-2.0
#include "core/border_slabs.hpp"

#include <algorithm>
#include <utility>

#include "core/index_math.hpp"

namespace upconv3d {
namespace {

/// Neighbouring output coordinates of one axis that use the same flipped taps.
struct Band {
  std::int64_t origin, extent, tap_begin, taps;
};

std::vector<Band> bands_of(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t padding) {
  std::vector<Band> bands;
  for (std::int64_t o = 0; o < out;) {
    const std::int64_t window = o + padding - (kernel - 1);
    const std::int64_t begin = std::max<std::int64_t>(0, -window);
    const std::int64_t end = std::min(kernel, in - window);
    // A window inside the volume keeps all taps until its last one meets the far border.
    const std::int64_t inside = window >= 0 ? in - kernel - window + 1 : 1;
    const std::int64_t extent = std::clamp<std::int64_t>(inside, 1, out - o);
    bands.push_back({o, extent, begin, end - begin});
    o += extent;
  }
  return bands;
}

}  // namespace

std::vector<Slab> border_slabs(const Problem& problem, int split_axes) {
  Slab rest;
  rest.extent = problem.out();
  rest.taps = problem.kernel;
  std::vector<Slab> slabs;
  for (int axis = 0; axis < split_axes; ++axis) {
    const std::vector<Band> bands =
        bands_of(problem.in[axis], rest.extent[axis], problem.kernel[axis], problem.padding[axis]);
    const auto widest = std::max_element(bands.begin(), bands.end(),
                                         [](const Band& a, const Band& b) { return a.extent < b.extent; });
    const auto cut = [&](const Band& band) {
      Slab slab = rest;
      slab.origin[axis] = band.origin;
      slab.extent[axis] = band.extent;
      slab.tap_begin[axis] = band.tap_begin;
      slab.taps[axis] = band.taps;
      return slab;
    };
    for (auto band = bands.begin(); band != bands.end(); ++band) {
      if (band != widest) slabs.push_back(cut(*band));
    }
    rest = cut(*widest);
  }
  slabs.push_back(rest);
  std::stable_sort(slabs.begin(), slabs.end(),
                   [](const Slab& a, const Slab& b) { return a.tap_count() > b.tap_count(); });
  return slabs;
}

std::vector<Slab> tap_sharing_slabs(const Problem& problem) {
  std::vector<Slab> slabs;
  const std::int64_t columns = problem.out()[2];
  const std::int64_t aligned = columns / kSharedRowUnit * kSharedRowUnit;
  for (const Slab& whole_rows : border_slabs(problem, 1)) {
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, aligned}, std::pair{aligned, columns}}) {
      if (begin == end) continue;
      Slab slab = whole_rows;
      slab.origin[2] = begin;
      slab.extent[2] = end - begin;
      // All taps that reach any of the columns.
      const std::int64_t first_window = begin + problem.padding[2] - (problem.kernel[2] - 1);
      const std::int64_t last_window = end - 1 + problem.padding[2] - (problem.kernel[2] - 1);
      slab.tap_begin[2] = std::clamp<std::int64_t>(-last_window, 0, problem.kernel[2] - 1);
      slab.taps[2] =
          std::clamp<std::int64_t>(problem.in[2] - first_window, slab.tap_begin[2] + 1, problem.kernel[2]) -
          slab.tap_begin[2];
      slabs.push_back(slab);
    }
  }
  std::stable_sort(slabs.begin(), slabs.end(),
                   [](const Slab& a, const Slab& b) { return a.tap_count() > b.tap_count(); });
  return slabs;
}

bool shares_x_loads(const Problem& problem, const Slab& slab) {
  const std::int64_t taps = slab.taps[1];
  return problem.padding[1] == 0 && slab.extent[1] == problem.out()[1] && taps == problem.kernel[1] &&
         taps > 1 && slab.extent[2] % kSharedRowUnit == 0 && (taps - 1) * slab.extent[2] <= kMaxSharedRows;
}

std::int64_t slab_tiles(const std::vector<Slab>& slabs, std::int64_t block_positions) {
  std::int64_t tiles = 0;
  for (const Slab& slab : slabs) tiles += ceil_div(slab.positions(), block_positions);
  return tiles;
}

}  // namespace upconv3d
