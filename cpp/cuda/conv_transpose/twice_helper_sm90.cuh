// SPDX-License-Identifier: Apache-2.0
/// \file
/// What is left of a tile's epilogue in conv_transpose_twice_sm90 when its accumulators are no longer needed,
/// by a warp for each warpgroup that multiplies: from sums of rows to partial moments after the first time,
/// from staging buffers to y [N,Z,P,Q,K] after the second.
///
/// Both are chains of instructions that wait for each other, 600 to 900 cycles of a tile's 3500 to 4700 where
/// the warpgroup itself went through them: longer than what it had left to multiply meanwhile.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"

#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

/// Stores a staging buffer through an im2col map. Evict first: nobody reads it again, and x is to stay in L2.
CUTLASS_DEVICE void store_im2col_evict_first(CUtensorMap const* map, void const* from, int c, int q, int p,
                                             int z, int n) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.im2col_no_offs.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5, %6}], [%1], %7;"
      :
      : "l"(reinterpret_cast<std::uint64_t>(map)), "r"(cute::cast_smem_ptr_to_uint(from)), "r"(c), "r"(q),
        "r"(p), "r"(z), "r"(n), "l"(std::uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}

/// The channel of a row of a view, and its phase of those stacked.
template <class Traits>
CUTLASS_DEVICE int twice_phase_of(TwiceParams<Traits> const& params, int& channel, int row) {
  if constexpr (Traits::CHANNELS_FIRST) {
    constexpr int kRun = Traits::STACKED;
    channel = row / (2 * kRun) * kRun + row % kRun;
    return row / kRun % 2;
  } else {
    return params.k.divmod(channel, row);
  }
}

template <class Traits>
class TwiceHelper {
 public:
  using Output = typename Traits::Output;

  /// \param group the warpgroup that is helped
  CUTLASS_DEVICE TwiceHelper(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared, int group)
      : params_(params),
        control_(*shared.control),
        staging_(shared.staging + group * params.staging_buffers * kStageBytes),
        group_(group) {}

  /// The first pass.
  CUTLASS_DEVICE void write_moments() {
    constexpr int kLanes = 32, kHalves = int(kTwiceRows) / kLanes;
    int const lane = threadIdx.x % kLanes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (;; sums_.advance(1)) {
      control_.sums[group_].wait_full(sums_);
      int4 const tile = control_.sums_of[group_];
      if (tile.x < 0) return;
      // A lane has a row of either half of 64.
      float4 sums[kHalves];
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) sums[half] = control_.rows[group_][half * kLanes + lane];
      __syncwarp();
      if (lane == 0) control_.sums[group_].arrive_empty(0);
      if (tile.x != set_) enter(tile.x);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) write_row_moments(tile, half * kLanes + lane, sums[half]);
    }
  }

  /// The second pass, for y [N,Z,P,Q,K]. When it ends, all stores have read the block's shared memory.
  CUTLASS_DEVICE void store() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (;; staged_.advance(kStagingSets)) {
      control_.staged[group_].wait_full(staged_);
      int4 const set = control_.staged_of[group_][staged_.slot];
      if (set.x < 0) return;
      if (set.x != set_) enter(set.x);
      store_set(set.y, set.z);
      __syncwarp();
      cute::tma_store_wait<0>();  // of a thread that stored: its buffers have been read
      if (threadIdx.x % 32 == 0) control_.staged[group_].arrive_empty(staged_.slot);
    }
  }

 private:
  /// What all tiles of a set have in common: parameters with a run-time index come late from constant
  /// memory.
  CUTLASS_DEVICE void enter(int number) {
    set_ = number;
    rows_ = twice_rows(params_, number, group_);
    TwiceView const& view = params_.views[rows_.view];
    positions_ = view.positions;
    width_ = view.width;
    height_ = view.height;
  }

  /// \param tile set, sample, position tile
  /// \param sums sum, pivot, sum of squares and count of a row's values, sums around the pivot
  CUTLASS_DEVICE void write_row_moments(int4 const& tile, int row, float4 const& sums) {
    int const shift = params_.granule_shift;
    float count = sums.w;
    RunningMoments const own = shifted_moments(count, sums.y, sums.x, sums.z);
    float mean = own.mean, m2 = own.m2;
    // Of equal counts.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int level = 0; level < shift; ++level) {
      float const other_mean = __shfl_xor_sync(0xffffffffu, mean, 1 << level);
      float const delta = other_mean - mean;
      m2 += __shfl_xor_sync(0xffffffffu, m2, 1 << level) + delta * (0.5f * count) * delta;
      mean = 0.5f * mean + 0.5f * other_mean;
      count *= 2.f;
    }
    TwiceRowsParams const at = twice_rows_from<Traits>(rows_, row);
    if ((row & ((1 << shift) - 1)) != 0 || at.row >= params_.view_k) return;
    int channel;
    int const phase = at.view * params_.fold + twice_phase_of(params_, channel, at.row);
    std::int64_t const granule = std::int64_t(tile.y) * (params_.k.divisor >> shift) + (channel >> shift);
    // Who merges partials knows by the sign which have fewer positions than others.
    m2 = copysignf(m2, sums.w < float(Traits::BLK_POS) ? -1.f : 1.f);
    params_.part[granule * params_.moments + control_.first_moment[phase] + tile.z] = make_float2(mean, m2);
  }

  /// TMA stores of all whole buffers of a set; one that ends beyond the slab would reach the next sample, so
  /// its positions are stored by threads. \param begin first position
  CUTLASS_DEVICE void store_set(int n, int begin) const {
    int const buffers = params_.staging_buffers / kStagingSets;
    char const* const from = staging_ + staged_.slot * buffers * kStageBytes;
    int const rounds = Traits::VIEWS_APART ? buffers / 2 : buffers;
    int const valid = min(rounds * Traits::STAGE_POS, positions_ - begin);
    int const whole = max(valid, 0) / Traits::STAGE_POS;
    if (threadIdx.x % 32 == 0) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int round = 0; round < whole; ++round) {
        int q, p;
        int const z = height_.divmod(p, width_.divmod(q, begin + round * Traits::STAGE_POS));
        if constexpr (Traits::PILED) {
          char const* const first = from + (Traits::VIEWS_APART ? 2 * round : round) * kStageBytes;
          char const* const second = first + (Traits::VIEWS_APART ? kStageBytes : kStageBytes / 2);
          store_im2col_evict_first(&params_.views[rows_.view].y, first, 0, q, p, z, n);
          store_im2col_evict_first(&params_.views[rows_.view + 1].y, second, 0, q, p, z, n);
        } else {
          constexpr int kPanel = Traits::STAGE_CHANNELS;
          CUTLASS_PRAGMA_UNROLL
          for (int panel = 0; panel < Traits::ROWS / kPanel; ++panel) {
            int const row = rows_.row + panel * kPanel;
            if (row >= params_.view_k) continue;
            store_im2col_evict_first(&params_.views[rows_.view].y,
                                     from + round * kStageBytes + panel * (kStageBytes / 2), row, q, p, z, n);
          }
        }
      }
      cute::tma_store_arrive();
    }
    if (whole * Traits::STAGE_POS < valid) store_rest(n, begin, whole * Traits::STAGE_POS, valid, from);
  }

  /// Positions `first` to `end` - 1 behind `begin`.
  CUTLASS_DEVICE void store_rest(int n, int begin, int first, int end, char const* from) const {
    constexpr int kVector = 16 / int(sizeof(Output));
    constexpr int kChunks = Traits::ROWS / kVector;
    std::int64_t const sample =
        std::int64_t(n) * params_.view_out[0] * params_.view_out[1] * params_.view_out[2];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = first * kChunks + threadIdx.x % 32; i < end * kChunks; i += 32) {
      int const position = i / kChunks, chunk = i % kChunks;
      TwiceRowsParams const at = twice_rows_from<Traits>(rows_, chunk * kVector);
      if (at.row >= params_.view_k) continue;
      std::int64_t const pixel = sample + params_.views[at.view].pixel(params_.view_out, begin + position);
      int const offset = Traits::VIEWS_APART ? chunk / (kChunks / 2) * kStageBytes +
                                                   narrow_staged_chunk(position, chunk % (kChunks / 2))
                                             : staged_chunk<Output>(position, chunk);
      __stcs(reinterpret_cast<uint4*>(params_.y + pixel * params_.view_k + at.row),
             *reinterpret_cast<uint4 const*>(from + offset));
    }
  }

  TwiceParams<Traits> const& params_;
  TwiceControl<Traits>& control_;
  char const* const staging_;  // [staging_buffers] of 8 KB
  int const group_;
  RingCursor sums_, staged_;
  // Of the set whose tile was last.
  int set_ = -1;
  TwiceRowsParams rows_;
  int positions_;  // of each of its views
  cutlass::FastDivmod width_, height_;
};

}  // namespace upconv3d::cuda
