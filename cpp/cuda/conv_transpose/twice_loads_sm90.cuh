// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_twice_sm90 loads: x for every tile, by the thread that deals tiles out, and a set's
/// weights by a warp that it asks, but for those of the first. Neither waits for the other: x of a set's
/// first tiles is on its way while its weights still wait until the last set's are no longer needed.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"

#include "cuda/conv_transpose/twice_helper_sm90.cuh"
#include "cuda/conv_transpose/twice_params_sm90.cuh"
#include "cuda/conv_transpose/twice_tiles_sm90.cuh"

namespace upconv3d::cuda {

/// One thread. Between two tiles of one k-block it has few instructions' time: what a class's tiles have in
/// common stays in registers.
template <class Traits>
class TwiceLoader {
 public:
  CUTLASS_DEVICE TwiceLoader(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared)
      : params_(params), shared_(shared), control_(*shared.control), dealer_(params, *shared.control) {}

  /// The block's first tile, before any counter may be asked, if there is room for all of its loads.
  CUTLASS_DEVICE void begin() {
    if (!twice_begins_at(params_, dealer_.home())) return;
    TwiceTile const tile = dealer_.resolve(dealer_.begin_pass(false));
    set_ = tile.set;  // whose weights are loaded unasked
    enter(tile.cls);
    if (loads_of_tile() > params_.x_slots) return;
    dealer_.publish(tile);
    load(tile.n, tile.pos_tile);
    begun_ = true;
  }

  /// Every other tile of both passes, or of the only one. Nothing here waits for the moments: the second
  /// pass's first operands are there when it begins.
  CUTLASS_DEVICE void run() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int pass = 0; pass < (Traits::LINEAR ? 1 : 2); ++pass) {
      TwiceTile tile = dealer_.resolve(begun_ ? dealer_.request() : dealer_.begin_pass(pass == 1));
      begun_ = false;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; tile.set >= 0;) {
        dealer_.publish(tile);
        int const number = dealer_.request();
        if (tile.set != set_) want_weights(tile.set, tile.cls);
        if (tile.cls != cls_) enter(tile.cls);
        load(tile.n, tile.pos_tile);
        tile = dealer_.resolve(number);
      }
      dealer_.publish(tile);
    }
    want_weights(-1, -1);
  }

 private:
  CUTLASS_DEVICE void want_weights(int set, int cls) {
    set_ = set;
    control_.wanted.wait_empty(wanted_);
    control_.w_wanted = make_int2(set, cls);
    control_.wanted.arrive_full(0);
    wanted_.advance(1);
  }

  /// Parameters with a run-time index come late from constant memory.
  CUTLASS_DEVICE void enter(int number) {
    TwiceClassParams const& cls = params_.classes[number];
    cls_ = number;
    map_ = &cls.x;
    width_ = cls.width;
    height_ = cls.height;
    CUTLASS_PRAGMA_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      corner_[axis] = cls.corner[axis];
      loads_[axis] = cls.loads[axis];
    }
    x_bytes_ = (Traits::BLK_POS + (cls.shared_taps - 1) * cls.shared_rows) * Traits::ROW_BYTES;
    c_begin_ = cls.c_begin * Traits::BLK_C;
    c_end_ = c_begin_ + cls.c_blocks * Traits::BLK_C;
  }

  CUTLASS_DEVICE int loads_of_tile() const {
    return loads_[0] * loads_[1] * loads_[2] * ((c_end_ - c_begin_) / Traits::BLK_C);
  }

  /// A tile's windows, every load and k-block of input channels.
  CUTLASS_DEVICE void load(int n, int pos_tile) {
    int q, p;
    int const z = height_.divmod(p, width_.divmod(q, pos_tile * Traits::BLK_POS));
    int const d = z + corner_[0], h = p + corner_[1], v = q + corner_[2];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int t = 0; t < loads_[0]; ++t) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int r = 0; r < loads_[1]; ++r) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int s = 0; s < loads_[2]; ++s) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int c = c_begin_; c < c_end_; c += Traits::BLK_C) {
            control_.x.wait_empty(x_);
            cute::SM90_TMA_LOAD_IM2COL_5D::copy(
                map_, control_.x.expect(x_.slot, x_bytes_), shared_.x + x_.slot * params_.x_slot_bytes, c, v,
                h, d, n, std::uint16_t(s * params_.dilation[2]), std::uint16_t(r * params_.dilation[1]),
                std::uint16_t(t * params_.dilation[0]));
            x_.advance(params_.x_slots);
          }
        }
      }
    }
  }

  TwiceParams<Traits> const& params_;
  TwiceShared<Traits> const& shared_;
  TwiceControl<Traits>& control_;
  TwiceDealer<Traits> dealer_;
  RingCursor x_, wanted_;
  bool begun_ = false;
  int set_ = -1;  // whose weights are on their way, or there
  // Of its class.
  int cls_ = -1;
  CUtensorMap const* map_;
  cutlass::FastDivmod width_, height_;
  int corner_[3], loads_[3];
  int x_bytes_;          // of a load
  int c_begin_, c_end_;  // input channels
};

/// A warp. A set may come in a hundred boxes, of 8 output channels each where phases are stacked for y
/// [N,K,Z,P,Q]: lanes divide them, and what a box's phase asks for is found once for all taps.
template <class Traits>
class TwiceWeightLoader {
 public:
  CUTLASS_DEVICE TwiceWeightLoader(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared)
      : params_(params), shared_(shared) {}

  /// The set that the block begins with, for which nobody asks.
  CUTLASS_DEVICE void load_home() {
    TwiceSetOfClass const home = twice_home(params_);
    if (twice_begins_at(params_, home)) load(home.set, params_.classes[home.cls]);
  }

  /// Every set that is asked for.
  CUTLASS_DEVICE void run() {
    RingBarriers<1> const& wanted = shared_.control->wanted;
    CUTLASS_PRAGMA_NO_UNROLL
    for (RingCursor at;; at.advance(1)) {
      wanted.wait_full(at);
      int2 const set = shared_.control->w_wanted;
      __syncwarp();
      if (set.x < 0) return;
      if (threadIdx.x % 32 == 0) wanted.arrive_empty(0);
      load(set.x, params_.classes[set.y]);
    }
  }

 private:
  CUTLASS_DEVICE void load(int set, TwiceClassParams const& cls) {
    RingBarriers<1>& barriers = shared_.control->w;
    barriers.wait_empty(at_);
    at_.advance(1);
    int const units[2] = {cls.units[0].count, cls.units[1].count};
    if (threadIdx.x % 32 == 0) barriers.expect(0, (units[0] + units[1]) * Traits::W_BYTES);
    __syncwarp();
    load_rows(cls, cls.units[0].taps, twice_rows(params_, set, 0), shared_.w);
    if (units[1] == 0) return;
    load_rows(cls, cls.units[1].taps, twice_rows(params_, set, 1), shared_.w + units[0] * Traits::W_BYTES);
  }

  /// 64 rows for each tap that `used` names, a unit per k-block of input channels, in boxes that lie in one
  /// phase each; zeros, which lie beyond w, where that phase has no such tap or there are no more rows.
  CUTLASS_DEVICE void load_rows(TwiceClassParams const& cls, std::uint32_t used, TwiceRowsParams const& rows,
                                char* to) const {
    int const lane = threadIdx.x % 32;
    int const boxes = Traits::ROWS / params_.w_rows;  // of a unit, at most 8
    int const row = lane % boxes * params_.w_rows, c_first = lane / boxes, c_step = 32 / boxes;
    TwiceRowsParams const at = twice_rows_from<Traits>(rows, row);
    bool const is_row = at.row < params_.view_k;
    int channel;
    int const stacked = twice_phase_of(params_, channel, at.row);
    TwicePhase const& phase = params_.phases[at.view * params_.fold + min(stacked, params_.fold - 1)];
    // Of the class's taps the first that is the phase's, the number of those, and the one of w that is read
    // by the class's tap 0, if only in theory.
    int first[3], taps[3], origin = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = phase.window[axis] - cls.window[axis];
      taps[axis] = phase.taps[axis];
      origin = origin * params_.kernel[axis] + phase.tap[axis] + first[axis] * params_.tap_step[axis];
    }
    int const c_blocks = cls.c_blocks, shared_taps = cls.shared_taps, per_plane = cls.loads[1] * cls.loads[2];
    bool const along_depth = cls.shared_axis == 0;
    to += row * Traits::ROW_BYTES;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int load_t = 0; load_t < cls.loads[0]; ++load_t) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int load_rs = 0; load_rs < per_plane; ++load_rs) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int served = 0; served < shared_taps; ++served, used >>= 1) {
          if (!(used & 1)) continue;
          int const t = load_t + (along_depth ? served : 0);
          int const s = load_rs % cls.loads[2], r = load_rs / cls.loads[2] + (along_depth ? 0 : served);
          bool const has = is_row && unsigned(t - first[0]) < unsigned(taps[0]) &&
                           unsigned(r - first[1]) < unsigned(taps[1]) &&
                           unsigned(s - first[2]) < unsigned(taps[2]);
          int const step =
              (t * params_.tap_step[0] * params_.kernel[1] + r * params_.tap_step[1]) * params_.kernel[2] +
              s * params_.tap_step[2];
          int const tap = has ? origin - step : -1;
          CUTLASS_PRAGMA_NO_UNROLL
          for (int c_block = c_first; c_block < c_blocks; c_block += c_step) {
            load_box(to + c_block * Traits::W_BYTES, (cls.c_begin + c_block) * Traits::BLK_C, channel, tap);
          }
          to += c_blocks * Traits::W_BYTES;
        }
      }
    }
    __syncwarp();
  }

  /// w_rows output channels from `channel` on x BLK_C input channels from `c` on.
  CUTLASS_DEVICE void load_box(char* to, int c, int channel, int tap) const {
    auto const hint = std::uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    std::uint64_t* const full = &shared_.control->w.full[0];
    if constexpr (Traits::W_IN_PLACE) {
      cute::SM90_TMA_LOAD_3D::copy(&params_.w, full, hint, to, channel, tap, c);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&params_.w, full, hint, to, c, channel, tap);
    }
  }

  TwiceParams<Traits> const& params_;
  TwiceShared<Traits> const& shared_;
  RingCursor at_;
};

}  // namespace upconv3d::cuda
