// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which tiles a block of conv_transpose_twice_sm90 computes: they are handed out one by one, since blocks do
/// not get the same share of memory's bandwidth, and with equal shares of the tiles ended up to 60 us apart.
///
/// Every set of weights has a counter per pass. A block begins with a set of its own, so that sets go over
/// the same x at the same time, with a tile of its own (OWN_FIRST_TILE), and it moves on when that is done,
/// in the end to whichever has most left: weights are loaded a few times per pass. The second pass goes
/// backwards: what the first read last is still in L2.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

/// A set and its class.
struct TwiceSetOfClass {
  int set, cls;
};

/// The set of a block's first tiles.
template <class Traits>
CUTLASS_DEVICE TwiceSetOfClass twice_home(TwiceParams<Traits> const& params) {
  std::int64_t const cost = params.total_cost * blockIdx.x / gridDim.x;
  int cls = 0;
  while (cls + 1 < params.num_classes && cost >= params.classes[cls + 1].first_cost) ++cls;
  TwiceClassParams const& at = params.classes[cls];
  return {at.first_set + int((cost - at.first_cost) / at.set_cost), cls};
}

/// The number of the block's first tile in either pass among those of its set: its own number among the
/// blocks that begin with the set. There may be no such tile.
template <class Traits>
CUTLASS_DEVICE int twice_first_number(TwiceParams<Traits> const& params, TwiceSetOfClass const& home) {
  return int(blockIdx.x) - params.sets[home.set].first_block;
}

/// Whether there is, so that the set's weights are the first ones.
template <class Traits>
CUTLASS_DEVICE bool twice_begins_at(TwiceParams<Traits> const& params, TwiceSetOfClass const& home) {
  return Traits::OWN_FIRST_TILE && twice_first_number(params, home) < params.classes[home.cls].tiles;
}

/// The loading thread's side.
template <class Traits>
class TwiceDealer {
 public:
  CUTLASS_DEVICE TwiceDealer(TwiceParams<Traits> const& params, TwiceControl<Traits>& control)
      : params_(params), control_(control), home_(twice_home(params)) {}

  /// \returns the number of the pass's first tile
  CUTLASS_DEVICE int begin_pass(bool backwards) {
    backwards_ = backwards;
    counters_ = params_.dealt + (backwards ? kMaxTwiceSets : 0);
    enter(home_);
    return Traits::OWN_FIRST_TILE ? twice_first_number(params_, home_) : request();
  }

  CUTLASS_DEVICE TwiceSetOfClass const& home() const { return home_; }

  /// Asks for the next tile, whose number of its set arrives a while later.
  CUTLASS_DEVICE int request() const { return first_tiles_ + atomicAdd(counters_ + at_set_.set, 1); }

  /// The tile asked for, or another one where its set is done; of set -1 where all are.
  CUTLASS_DEVICE TwiceTile resolve(int number) {
    while (number >= tiles_) {
      if (!move_on()) return {-1, 0, 0, 0};
      number = request();
    }
    TwiceTile tile;
    tile.set = at_set_.set;
    tile.cls = at_set_.cls;
    tile.n = pos_tiles_.divmod(tile.pos_tile, backwards_ ? tiles_ - 1 - number : number);
    return tile;
  }

  /// Tells the block's warpgroups.
  CUTLASS_DEVICE void publish(TwiceTile const& tile) {
    control_.tile_ring.wait_empty(at_);
    control_.tiles[at_.slot] = make_int4(tile.set, tile.n, tile.pos_tile, tile.cls);
    control_.tile_ring.arrive_full(at_.slot);
    at_.advance(kTwiceTileSlots);
  }

 private:
  /// Of a set, tiles that blocks begin with: the first ones, before those that its counter counts.
  CUTLASS_DEVICE int first_tiles(int set) const {
    if constexpr (!Traits::OWN_FIRST_TILE) return 0;
    return params_.sets[set + 1].first_block - params_.sets[set].first_block;
  }

  /// Parameters with a run-time index come late from constant memory, and the next tile would wait for them.
  CUTLASS_DEVICE void enter(TwiceSetOfClass const& set) {
    at_set_ = set;
    tiles_ = params_.classes[set.cls].tiles;
    pos_tiles_ = params_.classes[set.cls].pos_tiles;
    first_tiles_ = first_tiles(set.set);
  }

  /// To the set behind, where no block begins with it. \returns whether that is so
  CUTLASS_DEVICE bool enter_next() {
    int const set = at_set_.set + 1;
    if (set >= params_.num_sets || params_.sets[set].first_block < params_.sets[set + 1].first_block) {
      return false;
    }
    TwiceClassParams const& cls = params_.classes[at_set_.cls];
    enter({set, at_set_.cls + (set < cls.first_set + cls.num_sets ? 0 : 1)});
    return true;
  }

  /// To the set with most tiles left, but where sets are more than blocks first to those behind the block's
  /// own: as many are left of many sets then, and all blocks would take the same. \returns whether one may
  /// have tiles left
  CUTLASS_DEVICE bool move_on() {
    if (params_.num_sets > int(gridDim.x) && enter_next()) return true;
    constexpr int kLoads = 8;  // in flight, none of which waits for another
    int most = 0;
    TwiceSetOfClass to = at_set_;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int cls = 0; cls < params_.num_classes; ++cls) {
      TwiceClassParams const& at = params_.classes[cls];
      int const tiles = at.tiles, end = at.first_set + at.num_sets;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int begin = at.first_set; begin < end; begin += kLoads) {
        int dealt[kLoads];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) dealt[i] = __ldcg(counters_ + min(begin + i, end - 1));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int const set = min(begin + i, end - 1), left = tiles - first_tiles(set) - dealt[i];
          if (left <= most) continue;
          most = left;
          to = {set, cls};
        }
      }
    }
    enter(to);
    return most > 0;
  }

  TwiceParams<Traits> const& params_;
  TwiceControl<Traits>& control_;
  RingCursor at_;
  TwiceSetOfClass const home_;  // of the first tiles of a pass
  TwiceSetOfClass at_set_;
  int tiles_, first_tiles_;  // of that set
  cutlass::FastDivmod pos_tiles_;
  bool backwards_;
  int* counters_;  // [num_sets] tiles handed out in this pass
};

/// A warpgroup's side.
template <class Traits>
class TwiceTileReader {
 public:
  CUTLASS_DEVICE explicit TwiceTileReader(TwiceControl<Traits>& control) : control_(control) {}

  /// The next tile; of set -1 at the end of a pass.
  CUTLASS_DEVICE TwiceTile next() {
    control_.tile_ring.wait_full(at_);
    int4 const tile = control_.tiles[at_.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control_.tile_ring.arrive_empty(at_.slot);
    at_.advance(kTwiceTileSlots);
    return {tile.x, tile.w, tile.y, tile.z};
  }

 private:
  TwiceControl<Traits>& control_;
  RingCursor at_;
};

}  // namespace upconv3d::cuda
