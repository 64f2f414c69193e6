// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which tiles a block of conv_transpose_twice_sm90 computes: they are handed out one by one, short ones two
/// by two, since blocks do not get the same share of memory's bandwidth, and with equal shares of the tiles
/// ended up to 60 us apart.
///
/// Every set of weights has a counter per pass. A block begins with a set of its own, so that sets go over
/// the same x at the same time, and it moves on, to whichever has most left, when that is done: weights are
/// loaded a few times per pass. The second pass goes backwards: what the first read last is still in L2.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

/// A set and its class.
struct TwiceSetOfClass {
  int set, cls;
};

/// The set of a block's first tiles, if others leave it any.
template <class Traits>
CUTLASS_DEVICE TwiceSetOfClass twice_home(TwiceParams<Traits> const& params) {
  std::int64_t const cost = params.total_cost * blockIdx.x / gridDim.x;
  int cls = 0;
  while (cls + 1 < params.num_classes && cost >= params.classes[cls + 1].first_cost) ++cls;
  TwiceClassParams const& at = params.classes[cls];
  return {at.first_set + int((cost - at.first_cost) / at.set_cost), cls};
}

/// The side of the warp that deals: all its lanes call, and know the same.
template <class Traits>
class TwiceDealer {
 public:
  CUTLASS_DEVICE TwiceDealer(TwiceParams<Traits> const& params, TwiceControl& control)
      : params_(params), control_(control) {}

  CUTLASS_DEVICE void begin_pass(bool backwards) {
    backwards_ = backwards;
    counters_ = params_.dealt + (backwards ? kMaxTwiceSets : 0);
    numbers_ = end_ = 0;
    enter(twice_home(params_));
    request();
  }

  /// The next tile; of set -1 where all are dealt out.
  CUTLASS_DEVICE TwiceTile next() {
    if (numbers_ == end_) {
      numbers_ = answer();
      while (numbers_ >= tiles_) {
        if (!move_on()) return {-1, 0, 0, 0};
        request();
        numbers_ = answer();
      }
      end_ = min(numbers_ + at_once_, tiles_);
      request();
    }
    int const number = numbers_++;
    TwiceTile tile;
    tile.set = at_set_.set;
    tile.cls = at_set_.cls;
    tile.n = pos_tiles_.divmod(tile.pos_tile, backwards_ ? tiles_ - 1 - number : number);
    return tile;
  }

  /// Tells the block's warpgroups, and who loads x.
  CUTLASS_DEVICE void publish(TwiceTile const& tile) {
    control_.tile_ring.wait_empty(at_);
    if (threadIdx.x % 32 == 0) {
      control_.tiles[at_.slot] = make_int4(tile.set, tile.n, tile.pos_tile, tile.cls);
      control_.tile_ring.arrive_full(at_.slot);
    }
    __syncwarp();
    at_.advance(params_.tile_slots);
  }

 private:
  /// Asks for the next tiles of the set, whose first number arrives a while later, in lane 0.
  CUTLASS_DEVICE void request() {
    if (threadIdx.x % 32 == 0) requested_ = atomicAdd(counters_ + at_set_.set, at_once_);
  }
  CUTLASS_DEVICE int answer() const { return __shfl_sync(0xffffffffu, requested_, 0); }

  /// Parameters with a run-time index come late from constant memory, and the next tile would wait for them.
  CUTLASS_DEVICE void enter(TwiceSetOfClass const& set) {
    at_set_ = set;
    TwiceClassParams const& cls = params_.classes[set.cls];
    tiles_ = cls.tiles;
    at_once_ = cls.tiles_at_once;
    pos_tiles_ = cls.pos_tiles;
  }

  /// To the set with most tiles left. \returns whether there is one
  CUTLASS_DEVICE bool move_on() {
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
          if (tiles - dealt[i] <= most) continue;
          most = tiles - dealt[i];
          to = {min(begin + i, end - 1), cls};
        }
      }
    }
    // Lanes may have seen different counts.
    most = __shfl_sync(0xffffffffu, most, 0);
    enter({__shfl_sync(0xffffffffu, to.set, 0), __shfl_sync(0xffffffffu, to.cls, 0)});
    return most > 0;
  }

  TwiceParams<Traits> const& params_;
  TwiceControl& control_;
  RingCursor at_;
  bool backwards_;
  int* counters_;      // [num_sets] tiles handed out in this pass
  int requested_;      // the answer to the last request
  int numbers_, end_;  // of the set's tiles, those that have been dealt to this block and not been returned
  TwiceSetOfClass at_set_;
  // Of that set.
  int tiles_, at_once_;
  cutlass::FastDivmod pos_tiles_;
};

/// A warpgroup's side.
class TwiceTileReader {
 public:
  CUTLASS_DEVICE TwiceTileReader(TwiceControl& control, int slots) : control_(control), slots_(slots) {}

  /// The next tile; of set -1 at the end of a pass.
  CUTLASS_DEVICE TwiceTile next() {
    control_.tile_ring.wait_full(at_);
    int4 const tile = control_.tiles[at_.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control_.tile_ring.arrive_empty(at_.slot);
    at_.advance(slots_);
    return {tile.x, tile.w, tile.y, tile.z};
  }

 private:
  TwiceControl& control_;
  int const slots_;
  RingCursor at_;
};

}  // namespace upconv3d::cuda
