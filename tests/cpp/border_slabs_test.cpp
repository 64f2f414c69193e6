// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/border_slabs.hpp: every position lies in one slab with the taps that reach it, and loads that are
/// shared bring what each tap reads. core/slab_launches.hpp: who launches which.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/problem.hpp"
#include "core/slab_launches.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"
#include "shared_loads_check.hpp"

namespace upconv3d {
namespace {

using tests::index_of;
using tests::slab_input;

constexpr std::int64_t kNoInput = std::numeric_limits<std::int64_t>::min();

/// Input coordinate that tap `tap` of w brings to output coordinate `at`, or kNoInput. By the definition:
/// input i reaches at = i*stride - padding + tap*dilation.
std::int64_t input_of(const Problem& p, int axis, std::int64_t at, std::int64_t tap) {
  const std::int64_t reach = at + p.padding[axis] - tap * p.dilation[axis];
  return reach % p.stride[axis] == 0 ? reach / p.stride[axis] : kNoInput;
}

bool inside(const Problem& p, int axis, std::int64_t x) {
  return x >= 0 && x < p.in[axis];
}

/// Whether the slab's taps at `index` are those that reach output coordinate `at`, less some that read
/// padding; with `exact`, less all that do.
bool taps_right(const Problem& p, const Slab& slab, int axis, std::int64_t index, bool exact) {
  const std::int64_t at = slab.origin[axis] + index * slab.step[axis];
  std::vector<std::int64_t> kept(static_cast<std::size_t>(p.kernel[axis]), kNoInput);
  for (std::int64_t m = 0; m < slab.taps[axis]; ++m) {
    const std::int64_t tap = slab.tap[axis] - m * slab.tap_step[axis];
    if (tap < 0 || tap >= p.kernel[axis]) return false;
    kept[static_cast<std::size_t>(tap)] = slab_input(slab, axis, index, m);
  }
  for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
    const std::int64_t wanted = input_of(p, axis, at, tap), got = kept[static_cast<std::size_t>(tap)];
    if (got != kNoInput && got != wanted) return false;
    if (got == kNoInput && inside(p, axis, wanted)) return false;
    if (exact && got != kNoInput && !inside(p, axis, wanted)) return false;
  }
  return true;
}

/// Every position lies in one slab, whose taps are those that reach it; none of them reads padding along the
/// depth, where that was split. (What is cut off along one axis keeps its borders along the next.)
void test_slabs_of(const Problem& p, const std::vector<Slab>& slabs, int split_axes, const char* kind) {
  const Extent3 out = p.out();
  std::vector<int> covered(static_cast<std::size_t>(volume(out)));
  bool right = true;
  std::int64_t previous = slabs.front().tap_count();
  for (const Slab& slab : slabs) {
    right = right && slab.tap_count() <= previous;
    previous = slab.tap_count();
    for (std::int64_t i = 0; i < slab.positions(); ++i) {
      const Extent3 index = index_of(slab, i);
      Extent3 at;
      for (int axis = 0; axis < 3; ++axis) {
        at[axis] = slab.origin[axis] + index[axis] * slab.step[axis];
        right = right && taps_right(p, slab, axis, index[axis], axis == 0 && split_axes > 0);
      }
      ++covered[static_cast<std::size_t>((at[0] * out[1] + at[1]) * out[2] + at[2])];
    }
  }
  for (const int times : covered) right = right && times == 1;
  expect(right, concat(kind, ", ", split_axes, " axes: ", describe(p)));
}

void test_border_slabs_of(const Problem& p, int split_axes) {
  test_slabs_of(p, border_slabs(p, split_axes), split_axes, "border slabs");
}

/// Slabs that share loads among all of a problem's.
int test_tap_sharing_of(const Problem& p) {
  const std::vector<Slab> slabs = tap_sharing_slabs(p);
  test_slabs_of(p, slabs, 0, "tap sharing slabs");
  int shared = 0;
  for (const Slab& slab : slabs) {
    if (!shares_x_loads(p, slab)) continue;
    ++shared;
    for (const std::int64_t tile : {std::int64_t{128}, kSharedPlaneUnit}) {
      expect(tests::shared_loads_are_right(p, slab, tile),
             concat("loads of ", tile, " positions serve several taps: ", describe(p)));
    }
  }
  return shared;
}

void test_tap_sharing() {
  int shared = 0, beyond_planes = 0, along_depth = 0;
  for (const Extent3 in : {Extent3{5, 4, 7}, Extent3{1, 2, 9}, Extent3{3, 6, 14}, Extent3{3, 1, 24},
                           Extent3{2, 17, 16}, Extent3{2, 9, 40}, Extent3{1, 34, 26}, Extent3{4, 8, 8}}) {
    for (const Extent3 kernel : {Extent3{1, 1, 1}, Extent3{3, 3, 3}, Extent3{2, 5, 3}, Extent3{3, 2, 7},
                                 Extent3{2, 2, 11}, Extent3{2, 4, 4}, Extent3{3, 1, 3}, Extent3{4, 4, 4}}) {
      for (const Extent3 padding :
           {Extent3{0, 0, 0}, Extent3{1, 0, 1}, Extent3{0, 1, 0}, Extent3{0, 2, 3}, Extent3{1, 1, 1}}) {
        for (const Extent3 stride :
             {Extent3{1, 1, 1}, Extent3{1, 2, 2}, Extent3{2, 2, 1}, Extent3{2, 2, 2}}) {
          Problem p = headline();
          p.in = in, p.kernel = kernel, p.padding = padding, p.stride = stride;
          const Extent3 out = p.out();
          if (out[0] < 1 || out[1] < 1 || out[2] < 1) continue;
          shared += test_tap_sharing_of(p);
          for (const Slab& slab : tap_sharing_slabs(p)) {
            const SharedLoads loads = shared_loads(p, slab);
            const bool whole_tiles = slab.extent[1] * slab.extent[2] % kSharedPlaneUnit == 0;
            along_depth += loads.taps > 1 && loads.axis == 0;
            beyond_planes += loads.taps > 1 && loads.axis == 1 && !whole_tiles;
          }
        }
      }
    }
  }
  const int within_planes = shared - beyond_planes - along_depth;
  expect(std::min({within_planes, beyond_planes, along_depth}) >= 20,
         concat("slabs that share loads are among the cases: ", within_planes, " in planes, ", beyond_planes,
                " across their ends, ", along_depth, " along the depth"));
}

/// Where the first slab lies, and how many slabs share among all: "1,1,1 30x32x32, 5 of 9".
std::string shared_text(const Problem& p) {
  const std::vector<Slab> slabs = tap_sharing_slabs(p);
  const auto shared =
      std::count_if(slabs.begin(), slabs.end(), [&](const Slab& slab) { return shares_x_loads(p, slab); });
  const Slab& first = slabs.front();
  return concat(first.origin[0], ',', first.origin[1], ',', first.origin[2], ' ', extent_text(first.extent),
                ", ", shared, " of ", slabs.size());
}

void test_shared_cuts() {
  const auto expect_cut = [](const Problem& p, const std::string& text) {
    expect(shared_text(p) == text, concat(shared_text(p), ", not ", text, ": ", describe(p)));
  };
  Problem p = headline();
  expect_cut(p, "2,1,1 30x32x32, 7 of 9");  // one row or column of each border; columns share along the depth
  expect(!shares_x_loads(p, border_slabs(p, 2).front()), "planes that end within tiles do not share");
  p.padding = {1, 1, 1};
  expect_cut(p, "1,0,0 30x32x32, 3 of 3");
  p.in = {32, 96, 96}, p.padding = {0, 0, 0};
  expect_cut(p, "2,1,1 30x96x48, 10 of 14");
  p.in = {64, 64, 64};
  expect_cut(p, "2,1,1 62x64x64, 7 of 9");
  p.in = {32, 32, 32}, p.stride = {2, 2, 2}, p.padding = p.output_padding = {1, 1, 1};
  expect_cut(p, "1,1,1 32x32x32, 4 of 8");  // of stride 2, phases that two taps along the height reach
  p.kernel = {4, 4, 4}, p.output_padding = {0, 0, 0};
  expect_cut(p, "0,0,0 32x32x32, 8 of 8");
  p.in = {8, 8, 8};
  expect_cut(p, "0,0,0 8x8x8, 8 of 8");  // along the depth
  p = headline();
  p.kernel[1] = 8;
  expect_cut(p, "2,4,1 30x32x16, 12 of 14");  // 7 rows more, of so few positions as there is room for
  p.kernel[1] = 1;
  expect_cut(p, "0,0,0 34x32x34, 0 of 1");  // nothing to share
}

void test_border_slabs() {
  Problem p = headline();
  expect(border_slabs(p, 0).size() == 1 && border_slabs(p, 3).size() == 13, "slabs of the headline shape");
  expect(border_slabs(p, 3).front().positions() == 27000, "the inside comes first");
  for (int axes = 0; axes <= 3; ++axes) {
    p = headline();
    p.in = {5, 4, 7};
    test_border_slabs_of(p, axes);
    p.padding = {1, 2, 0};
    test_border_slabs_of(p, axes);
    p.in = {1, 2, 9};  // shorter than the kernel
    p.kernel = {5, 3, 1};
    p.padding = {2, 1, 0};
    test_border_slabs_of(p, axes);
    p.in = {6, 6, 6};  // padding beyond the kernel
    p.kernel = {2, 2, 2};
    p.padding = {2, 3, 1};
    test_border_slabs_of(p, axes);
    p.in = {1, 2, 1};  // fewer outputs than the stride has phases
    p.kernel = {2, 3, 1};
    p.stride = {4, 5, 3};
    p.padding = {0, 3, 0};
    test_border_slabs_of(p, axes);
  }
}

/// However long: a step per position would take a second for each ten million.
void test_phases_without_taps() {
  Problem p = headline();
  p.in = {1, 1, std::int64_t{1} << 40}, p.kernel = {1, 1, 3}, p.stride = {1, 1, 8}, p.padding = {0, 0, 0};
  for (const int split_axes : {0, 3}) {
    std::int64_t positions = 0, untapped = 0;
    for (const Slab& slab : border_slabs(p, split_axes)) {
      positions += slab.positions();
      untapped += slab.tap_count() == 0 ? 1 : 0;
    }
    expect(positions == p.positions() && untapped == 5, "a phase without taps is one slab");
  }
}

/// However far apart, as many slabs, of as many taps, as of taps that lie near each other.
void test_distant_taps() {
  for (const std::int64_t stride : {1, 3}) {
    for (const std::int64_t padding : {0, 5, 90}) {
      std::vector<std::int64_t> taps[2];
      for (const bool far : {false, true}) {
        Problem p = headline();
        p.in = {1, 1, 16}, p.kernel = {1, 1, 3}, p.stride = {1, 1, stride}, p.padding = {0, 0, padding};
        p.dilation = {1, 1, far ? std::int64_t{3'000'000'000'000'000} : 300};  // of a stride of 3 one phase
        std::int64_t positions = 0;
        for (const Slab& slab : border_slabs(p, 3)) {
          positions += slab.positions();
          taps[far].push_back(slab.tap_count());
        }
        expect(positions == p.positions(), "slabs between distant taps: " + describe(p));
        if (!far) test_border_slabs_of(p, 3);
      }
      expect(taps[0] == taps[1], concat("stride ", stride, ", padding ", padding, ": distant taps"));
    }
  }
}

/// Strides and dilations, on axes of their own: phases with fewer taps, with none, with dilation that
/// remains.
void test_phases() {
  struct Axis {
    std::int64_t in, kernel, stride, padding, output_padding, dilation;
  };
  const Axis axes[] = {{5, 3, 2, 1, 1, 1}, {4, 2, 2, 0, 0, 1}, {3, 4, 2, 1, 0, 1}, {4, 1, 3, 0, 2, 1},
                       {5, 3, 1, 2, 0, 2}, {4, 3, 2, 1, 0, 2}, {3, 5, 3, 4, 2, 2}, {1, 3, 2, 1, 1, 1},
                       {6, 4, 4, 0, 0, 1}, {3, 5, 4, 3, 3, 6}, {2, 2, 2, 3, 1, 3}};
  int tested = 0;
  for (const Axis& depth : axes) {
    for (const Axis& height : axes) {
      const Axis& width = axes[static_cast<std::size_t>(tested % 11)];
      const Axis* const by_axis[] = {&depth, &height, &width};
      Problem p = headline();
      for (std::size_t axis = 0; axis < 3; ++axis) {
        p.in[axis] = by_axis[axis]->in, p.kernel[axis] = by_axis[axis]->kernel;
        p.stride[axis] = by_axis[axis]->stride, p.padding[axis] = by_axis[axis]->padding;
        p.output_padding[axis] = by_axis[axis]->output_padding, p.dilation[axis] = by_axis[axis]->dilation;
      }
      ++tested;
      const Extent3 out = p.out();
      if (out[0] < 1 || out[1] < 1 || out[2] < 1) continue;
      for (int split = 0; split <= 3; ++split) test_border_slabs_of(p, split);
      test_tap_sharing_of(p);
    }
  }
  Problem p = headline();
  p.stride = {2, 2, 2}, p.padding = {1, 1, 1}, p.output_padding = {1, 1, 1};
  std::vector<Slab> slabs = border_slabs(p, 0);
  expect(slabs.size() == 8 && slabs.front().tap_count() == 8 && slabs.back().tap_count() == 1,
         "kernel 3, stride 2: phases of 8 taps down to 1");
  p.kernel = {1, 1, 1}, p.padding = {0, 0, 0};
  slabs = border_slabs(p, 0);
  expect(slabs.size() == 8 && slabs.front().tap_count() == 1 && slabs[1].tap_count() == 0,
         "kernel 1, stride 2: seven phases without a tap");
}

/// Shares of slabs among launches: all of them, in order, no launch with more than it takes.
void test_slab_launches() {
  for (std::size_t count = 1; count <= static_cast<std::size_t>(kMaxPhases); ++count) {
    std::vector<Slab> slabs(count);
    for (std::size_t i = 0; i < count; ++i) slabs[i].origin[0] = static_cast<std::int64_t>(i);
    const int launches = slab_launches(count);
    std::size_t next = 0;
    for (int launch = 0; launch < launches; ++launch) {
      const std::vector<Slab> share = slabs_of_launch(slabs, launch, launches);
      expect(slabs_before(slabs, launch, launches).size() == next, "slabs before a launch");
      expect(!share.empty() && share.size() <= static_cast<std::size_t>(kMaxSlabs), "slabs of a launch");
      for (const Slab& slab : share)
        expect(slab.origin[0] == static_cast<std::int64_t>(next++), "their order");
    }
    expect(next == count, "all slabs are some launch's");
  }
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_border_slabs();
    upconv3d::test_phases();
    upconv3d::test_phases_without_taps();
    upconv3d::test_distant_taps();
    upconv3d::test_tap_sharing();
    upconv3d::test_shared_cuts();
    upconv3d::test_slab_launches();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "border slabs: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
