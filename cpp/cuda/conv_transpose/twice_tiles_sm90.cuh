// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which tiles a block of conv_transpose_twice_sm90 computes: they are handed out one by one, since blocks do
/// not get the same share of memory's bandwidth, and with equal shares of the tiles ended up to 60 us apart.
///
/// Every class has a counter per pass. A block begins with a class of its own, so that classes go over the
/// same x at the same time, and it moves on, to whichever has most left, when that is done: weights are
/// loaded once or twice per pass. The second pass goes backwards: what the first read last is still in L2.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

/// The loading thread's side.
template <class Traits>
class TwiceDealer {
 public:
  CUTLASS_DEVICE TwiceDealer(TwiceParams<Traits> const& params, TwiceControl& control)
      : params_(params), control_(control) {
    std::int64_t const cost = params.total_cost * blockIdx.x / gridDim.x;
    while (home_ + 1 < params.num_classes && cost >= params.classes[home_ + 1].first_cost) ++home_;
  }

  CUTLASS_DEVICE void begin_pass(bool backwards) {
    backwards_ = backwards;
    counters_ = params_.dealt + (backwards ? kMaxTwiceClasses : 0);
    cls_ = home_;
  }

  /// Asks for the next tile, whose number of its class arrives a while later.
  CUTLASS_DEVICE int request() const { return atomicAdd(counters_ + cls_, 1); }

  /// The tile asked for, or another one where its class is done; of class -1 where all are.
  CUTLASS_DEVICE TwiceTile resolve(int number) {
    while (number >= params_.classes[cls_].tiles) {
      int most = 0;
      for (int cls = 0; cls < params_.num_classes; ++cls) {
        int const left = params_.classes[cls].tiles - __ldcg(counters_ + cls);
        if (left > most) {
          most = left;
          cls_ = cls;
        }
      }
      if (most == 0) return {-1, 0, 0};
      number = request();
    }
    TwiceClassParams const& at = params_.classes[cls_];
    TwiceTile tile;
    tile.cls = cls_;
    tile.n = at.pos_tiles.divmod(tile.pos_tile, backwards_ ? at.tiles - 1 - number : number);
    return tile;
  }

  /// Tells the block's warpgroups.
  CUTLASS_DEVICE void publish(TwiceTile const& tile) {
    control_.tile_ring.wait_empty(at_);
    control_.tiles[at_.slot] = make_int4(tile.cls, tile.n, tile.pos_tile, 0);
    control_.tile_ring.arrive_full(at_.slot);
    at_.advance(kTwiceTileSlots);
  }

 private:
  TwiceParams<Traits> const& params_;
  TwiceControl& control_;
  RingCursor at_;
  int home_ = 0;  // class of the first tiles of a pass
  int cls_;
  bool backwards_;
  int* counters_;  // [num_classes] tiles handed out in this pass
};

/// A warpgroup's side.
class TwiceTileReader {
 public:
  CUTLASS_DEVICE explicit TwiceTileReader(TwiceControl& control) : control_(control) {}

  /// The next tile; of class -1 at the end of a pass.
  CUTLASS_DEVICE TwiceTile next() {
    control_.tile_ring.wait_full(at_);
    int4 const tile = control_.tiles[at_.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control_.tile_ring.arrive_empty(at_.slot);
    at_.advance(kTwiceTileSlots);
    return {tile.x, tile.y, tile.z};
  }

 private:
  TwiceControl& control_;
  RingCursor at_;
};

}  // namespace upconv3d::cuda
