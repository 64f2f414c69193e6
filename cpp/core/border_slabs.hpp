// SPDX-License-Identifier: Apache-2.0
/// \file
/// Output positions sorted by the taps that reach them.
///
/// A transposed convolution of stride s is s^3 dense convolutions of stride 1, one per phase: output
/// positions of equal remainder modulo s are reached by the same taps, every (s/gcd(s,dilation))-th of the
/// kernel, and neighbours among them read neighbouring inputs. Near a border, some taps read nothing but
/// padding. A slab is a box of positions of one phase that all use the same taps along the axes that were
/// split, so that the others need not be multiplied at all.
///
/// A plain convolution has one phase, of all positions; they read inputs that lie the stride apart.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/problem.hpp"

namespace upconv3d {

/// A box of output positions of one sample and the taps it needs. Along each axis, position i of the slab is
/// output origin + i*step, and its m-th tap multiplies input window + i*stride + m*dilation by w's
/// tap - m*tap_step: of a transposed convolution, taps come flipped, as inputs rise, and stride is 1.
struct Slab {
  Extent3 origin{};           // first z,p,q
  Extent3 extent{};           // positions along z,p,q
  Extent3 step{1, 1, 1};      // from one position to the next: the stride of a transposed convolution
  Extent3 stride{1, 1, 1};    // from one position's input to the next's: the stride of a plain convolution
  Extent3 window{};           // input that position 0's first tap reads; may lie outside the volume
  Extent3 dilation{1, 1, 1};  // from one tap's input to the next's
  Extent3 tap{};              // the first tap, an index into the kernel
  Extent3 tap_step{1, 1, 1};  // from one tap to the next, which is smaller; -1 in a plain convolution
  Extent3 taps{};             // taps along each axis; 0 where no tap reaches any position

  std::int64_t positions() const { return volume(extent); }
  std::int64_t tap_count() const { return volume(taps); }
};

/// The slabs of a problem; together they cover every output position once.
///
/// Each phase is a slab, or several: borders are cut off along the first `split_axes` axes (0 to 3: none,
/// depth, height, width), each from what the axis before left over: depth slabs span the whole height and
/// width, height slabs the whole width. A tap that reads only padding for all positions of a slab is left
/// out. Sorted by falling tap count, so that tiles handed out in this order end with the cheap ones.
std::vector<Slab> border_slabs(const Problem& problem, int split_axes);

/// Windows and taps of `a` and `b` taken together, at the positions of `a`; nothing where the grids of their
/// taps differ.
std::optional<Slab> united_windows(const Slab& a, const Slab& b);

/// Loads of x that serve several taps of a slab: position j's input for tap m is position j + m*rows' for tap
/// 0, in the order of the slab's positions.
///
/// Along the height, that is so by itself within a plane. Planes either end where tiles do, and loads go on
/// below a plane's last position (input_box); or, across their ends, both inputs lie outside the volume, as
/// where the slab has the whole height of a transposed convolution of stride 1 without padding along it.
/// Along the depth, the last axis, loads can always go on, but a plane has to be small.
struct SharedLoads {
  int axis = 1;           // 0 depth, 1 height
  std::int64_t taps = 1;  // that each load serves: all along the axis, or 1
  std::int64_t rows = 0;  // positions from one tap to the next
};
inline constexpr std::int64_t kSharedPlaneUnit = 256;  // positions of the largest tile
inline constexpr std::int64_t kSharedRowUnit = 8;
inline constexpr std::int64_t kMaxSharedRows = 128;  // two x tiles of the largest kind and three of w fit
SharedLoads shared_loads(const Problem& problem, const Slab& slab);
inline bool shares_x_loads(const Problem& problem, const Slab& slab) {
  return shared_loads(problem, slab).taps > 1;
}

/// Slabs for loads of x that serve several taps: phases that are so already, and of each other one, an inside
/// that shares along the height, in one part or several along the width, with what that leaves over above,
/// below, left and right of it, cut so that the fewest products are wasted; at stride 1, the inside's borders
/// are cut off along the depth too. Phases that no cut lets share remain whole. Sorted as border_slabs' are.
std::vector<Slab> tap_sharing_slabs(const Problem& problem);

/// The part of x that a slab reads, and where its windows lie relative to that: what an im2col descriptor
/// needs. A slab without taps gets some box of x that has as many windows.
struct InputBox {
  Extent3 origin{};  // first input coordinate inside the volume
  Extent3 extent{};  // inputs inside the volume
  Extent3 lower{};   // first position's window, relative to the box; at most 0
  Extent3 upper{};   // last position's window, relative to the box's last input
};

/// \param shares_taps of loads that serve all taps along the height: where planes end with tiles, their
/// windows go on below the last position's, down to that one's last tap.
InputBox input_box(const Problem& problem, const Slab& slab, bool shares_taps = false);

/// The SM90 kernel's counters of tiles and positions are 32-bit; the margin is room for one step beyond the
/// last tile.
inline constexpr std::int64_t kMaxSm90Count =
    std::numeric_limits<std::int32_t>::max() - (std::int64_t{1} << 16);

/// Tiles of one launch: each is normalized in 8 or 16 items, which are counted too. Where items are shares of
/// tiles they are 8, also of places without a tile, of which window by window there are a quarter as many as
/// tiles at most (core/tile_order.hpp).
inline constexpr std::int64_t kMaxSm90Tiles = kMaxSm90Count / 16;

/// Slabs that one launch of the SM90 kernel takes, 15 to 21 KB of parameters: stride 3 uncut, kernel 5 of
/// stride 1 cut along all axes, kernel 7 along two.
inline constexpr int kMaxSlabs = 27;

/// Tiles of `block_positions` that the slabs of one sample are cut into.
std::int64_t slab_tiles(const std::vector<Slab>& slabs, std::int64_t block_positions);

}  // namespace upconv3d
