// SPDX-License-Identifier: Apache-2.0
/// \file
/// The two epilogues of conv_transpose_twice_sm90, in the registers of the warpgroup that multiplied: moments
/// after the first time, normalization and the way to memory after the second. (Of LINEAR kernels the second
/// alone, whose scale is 1 and whose shift is the bias.)
///
/// A thread holds two rows (accumulator_row and 8 further) and, in each block of 8 positions, the pair at
/// 2*(lane%4). Beside the other warpgroup's wgmma an instruction takes several cycles, so what counts here is
/// their number: relu(v + bias) is taken as max(v, -bias) + bias, whose sum is left to what follows anyway,
/// and with a floor of -infinity in the place of ReLU's 0 it is v + bias. The powers of two that operands
/// were scaled by go into that floor, into the sums and into the normalization, which changes no bit of the
/// result, and need no instruction of their own unless one of them is far from 1. What does not need the
/// accumulators is left to a helper (twice_helper_sm90.cuh): moments from sums, and stores of what is staged.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/accumulator_activation_sm90.cuh"
#include "cuda/conv_transpose/merge_moments_sm90.cuh"
#include "cuda/conv_transpose/twice_channels_first_sm90.cuh"
#include "cuda/conv_transpose/twice_helper_sm90.cuh"
#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

template <class Traits>
class TwiceEpilogue {
 public:
  using Output = typename Traits::Output;
  static constexpr int kBlocks = Traits::BLK_POS / 8;  // blocks of 8 positions, wgmma's column unit
  // Powers of two up to which scales, biases and the normalization's factors are multiplied with each other:
  // no product leaves float's normal range.
  static constexpr int kFoldedExponent = 60;
  static constexpr float kFoldedMagnitude = 0x1p60f;

  CUTLASS_DEVICE TwiceEpilogue(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared,
                               int group)
      : params_(params),
        control_(*shared.control),
        staging_(shared.staging + group * params.staging_buffers * kStageBytes),
        group_(group) {}

  /// Consumes acc: adds up the tile's values, which hand_over_sums hands to the helper.
  template <class Accumulator>
  CUTLASS_DEVICE void add_moments(TwiceTile const& tile, Accumulator& acc) {
    if (tile.set != rows_set_) enter(tile.set);
    if (rows_.view < 0) return;
    if (tile.n != scales_sample_) load_scales(tile.n);
    pending_ = true;
    pending_n_ = tile.n;
    pending_pos_tile_ = tile.pos_tile;
    pending_valid_ = min(Traits::BLK_POS, positions_ - tile.pos_tile * Traits::BLK_POS);
    bool const folded = !Traits::SCALED || folded_;
    if (folded && pending_valid_ == Traits::BLK_POS && add_around_bias(acc)) return;
    add_around_value(acc);
  }

  /// Hands over the sums of the tile last added, if it has not been done: to be called while wgmma computes
  /// the next, and in the end.
  CUTLASS_DEVICE void hand_over_sums() {
    if (!pending_) return;
    pending_ = false;
    int const lane = threadIdx.x % 32;
    // The four lanes of a row divide the four sums among them: bit 0 is the row, bit 1 the kind.
    bool const second = lane & 1, squares = lane & 2;
    float const kept_sum = second ? sum_[1] : sum_[0];
    float const kept_squares = second ? sum_squares_[1] : sum_squares_[0];
    float const row_sum = kept_sum + __shfl_xor_sync(0xffffffffu, second ? sum_[0] : sum_[1], 1);
    float const row_squares =
        kept_squares + __shfl_xor_sync(0xffffffffu, second ? sum_squares_[0] : sum_squares_[1], 1);
    float const own =
        (squares ? row_squares : row_sum) + __shfl_xor_sync(0xffffffffu, squares ? row_sum : row_squares, 2);
    float const beside = squares ? float(pending_valid_) : second ? pivot_[1] : pivot_[0];
    control_.sums[group_].wait_empty(sums_at_);
    float2* const row =
        reinterpret_cast<float2*>(&control_.rows[group_][accumulator_row() + (second ? 8 : 0)]);
    row[squares] = make_float2(own, beside);
    announce_sums(make_int4(rows_set_, pending_n_, pending_pos_tile_, 0));
  }

  /// Nothing is handed over any more.
  CUTLASS_DEVICE void end_sums() {
    control_.sums[group_].wait_empty(sums_at_);
    announce_sums(make_int4(-1, 0, 0, 0));
  }
  CUTLASS_DEVICE void end_stores() {
    if constexpr (!Traits::CHANNELS_FIRST) {
      control_.staged[group_].wait_empty(staged_);
      announce_set(make_int4(-1, 0, 0, 0));
    }
  }

  /// Consumes acc: y of the tile, stored, or staged for the helper to store.
  template <class Accumulator>
  CUTLASS_DEVICE void normalize(TwiceTile const& tile, Accumulator& acc) {
    if (tile.set != rows_set_) enter(tile.set);
    if (rows_.view < 0) return;
    if (tile.n != scales_sample_) load_scales(tile.n);
    if (tile.n != maps_sample_) load_maps(tile.n);
    if (!folded_) unscale(acc);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      int const j = i / 2 % 2;
      acc(i) = (Traits::LINEAR ? acc(i) : floored(acc(i), low_[j])) * scale_[j] + shift_[j];
    }
    if constexpr (Traits::CHANNELS_FIRST) {
      // As store_channels_first takes them. Both rows are of one channel: what follows tells them not apart.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < 4 * kBlocks; i += 4) {
        float const second = acc(i);
        acc(i) = acc(i + 1);
        acc(i + 1) = second;
      }
    }
    if (params_.after.kind != Activation::kNone) activate(acc);
    if constexpr (Traits::CHANNELS_FIRST) {
      store_channels_first(tile, acc);
    } else {
      if constexpr (Traits::VIEWS_APART) {
        stage_views(tile, acc);
      } else if (params_.staging_buffers == kManyStagingBuffers) {
        stage_sets<kManyStagingBuffers / kStagingSets>(tile, acc);
      } else {
        stage_sets<kFewStagingBuffers / kStagingSets>(tile, acc);
      }
    }
  }

 private:
  /// acc = after(acc).
  template <class Accumulator>
  CUTLASS_DEVICE void activate(Accumulator& acc) const {
    if constexpr (Traits::LINEAR) {
      activate_accumulator<Output, false, 32>(params_.after, channel_, acc);
    } else if (params_.after.kind == Activation::kRelu) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = FloorActivation{0.f}(acc(i));
    } else {
      float parameter[2];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) parameter[j] = activation_parameter<Output>(params_.after, channel_[j]);
      with_activation(params_.after.kind, [&](auto after) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = after.value(acc(i), parameter[i / 2 % 2]);
      });
    }
  }

  /// max(v, low); NaN stays NaN.
  CUTLASS_DEVICE static float floored(float v, float low) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(low));
    return result;
  }

  /// Whether the thread's row j is one of fold*K.
  CUTLASS_DEVICE bool is_channel(int j) const { return row_ + accumulator_row() + 8 * j < params_.view_k; }

  /// What all tiles of a set have in common: parameters with a run-time index come late from constant
  /// memory.
  CUTLASS_DEVICE void enter(int set) {
    rows_set_ = set;
    scales_sample_ = maps_sample_ = -1;
    rows_ = twice_rows(params_, set, group_);
    if (rows_.view < 0) return;
    int const first = threadIdx.x / 32 % 4 * 16;
    row_ = Traits::PILED ? twice_rows_from<Traits>(rows_, first).row - first : rows_.row;
    positions_ = params_.views[rows_.view].positions;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const row = min(row_ + accumulator_row() + 8 * j, params_.view_k - 1);
      twice_phase_of(params_, channel_[j], row);
      bias_[j] = params_.bias ? float(params_.bias[channel_[j]]) : 0.f;
    }
  }

  /// The scales of the thread's rows, and whether they are folded into what values are compared with and
  /// multiplied by: the same for a warp.
  CUTLASS_DEVICE void load_scales(int sample) {
    scales_sample_ = sample;
    if constexpr (Traits::SCALED) {
      bool folds = true;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        // Two factors, since 2^e of a product of scales may leave float's range where the value does not.
        int const exponent = params_.unscale_sample[sample] + params_.unscale_column[channel_[j]];
        unscale_[j][0] = clamped_power_of_two(exponent / 2);
        unscale_[j][1] = clamped_power_of_two(exponent - exponent / 2);
        folds = folds && abs(exponent) <= kFoldedExponent && fabsf(bias_[j]) <= kFoldedMagnitude;
      }
      folded_ = __all_sync(0xffffffffu, folds);
    }
    set_floors();
  }

  /// acc is max(acc, low) + bias, in units of `unit`, after that.
  CUTLASS_DEVICE void set_floors() {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) low_[j] = (params_.floor - bias_[j]) / unit(j);
  }

  /// What acc's values are counted in, where its scales are folded.
  CUTLASS_DEVICE float unit(int j) const {
    if constexpr (Traits::SCALED) return folded_ ? unscale_[j][0] * unscale_[j][1] : 1.f;
    return 1.f;
  }

  /// acc without its operands' scales.
  template <class Accumulator>
  CUTLASS_DEVICE void unscale(Accumulator& acc) const {
    if constexpr (Traits::SCALED) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = acc(i) * unscale_[i / 2 % 2][0] * unscale_[i / 2 % 2][1];
    }
  }

  /// Sums of a whole tile's before(v + bias) - bias = max(v, floor - bias).
  /// \returns whether that was near enough to their mean, in all of the warp's rows
  template <class Accumulator>
  CUTLASS_DEVICE bool add_around_bias(Accumulator const& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      pivot_[j] = bias_[j];
      sum_[j] = sum_squares_[j] = 0.f;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      int const j = i / 2 % 2;
      float const v = floored(acc(i), low_[j]);
      sum_[j] += v;
      sum_squares_[j] += v * v;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      sum_[j] *= unit(j);
      sum_squares_[j] *= unit(j) * unit(j);
    }
    // Of the 24 bits of a sum of squares ten may cancel, which leaves an inverse deviation 13, two more than
    // operands of 16 bits leave a value; what is small beside eps does not matter. Six for float32 sent a
    // channel that ReLU closes the slow way at biases of 8 sqrt(eps), which a network's often have.
    constexpr float kLoss = 0x1p-10f;
    constexpr float kValues = 2 * kBlocks;  // of a row
    bool near = true;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const m2 = sum_squares_[j] - sum_[j] * sum_[j] * (1.f / kValues);
      // NaN is not near. Rows that are no channels may hold anything.
      near = near && (m2 + kValues * params_.eps_float >= kLoss * sum_squares_[j] || !is_channel(j));
    }
    return __all_sync(0xffffffffu, near);
  }

  /// The same around a value of each row, and of any number of positions.
  template <class Accumulator>
  CUTLASS_DEVICE void add_around_value(Accumulator& acc) {
    unscale(acc);
    float offset[2], low[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const first = floored(acc(2 * j) + bias_[j], params_.floor);
      pivot_[j] = __shfl_sync(0xffffffffu, first, 0, 4);
      offset[j] = bias_[j] - pivot_[j];
      low[j] = params_.floor - pivot_[j];
      sum_[j] = sum_squares_[j] = 0.f;
    }
    // Of the thread's positions, each block's first being 0. Compared with constants: indices of 64 positions
    // are kept in 41 registers throughout the loop over tiles, by ptxas' choice, which others may need.
    int const end = pending_valid_ - int(threadIdx.x % 4) * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      int const j = i / 2 % 2;
      float shifted = floored(acc(i) + offset[j], low[j]);
      // Beyond the slab lies the next sample.
      if (i / 4 * 8 + i % 2 >= end) shifted = 0.f;
      sum_[j] += shifted;
      sum_squares_[j] += shifted * shifted;
    }
  }

  /// The maps of the thread's rows, y = (max(v, low) + bias - mean) * scale + shift: as a rule the same as
  /// for the last tile.
  CUTLASS_DEVICE void load_maps(int sample) {
    maps_sample_ = sample;
    if constexpr (Traits::LINEAR) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        scale_[j] = unit(j);
        shift_[j] = bias_[j];
      }
    } else {
      load_norm_maps(sample);
    }
  }
  CUTLASS_DEVICE void load_norm_maps(int sample) {
    float4 merged[2];
    float gamma[2], beta[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int unused;
      int const group = params_.group_channels.divmod(unused, channel_[j]);
      merged[j] = __ldcg(params_.table + std::int64_t(sample) * params_.groups + group);
      gamma[j] = params_.gamma ? float(params_.gamma[channel_[j]]) : 1.f;
      beta[j] = params_.beta ? float(params_.beta[channel_[j]]) : 0.f;
    }
    bool folds = true;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      scale_[j] = gamma[j] * merged[j].z;
      float const shift = beta[j] - merged[j].y * scale_[j];
      shift_[j] = (bias_[j] - merged[j].x) * scale_[j] + shift;
      float const magnitude = fabsf(scale_[j]);
      folds = folds &&
              ((magnitude >= 1.f / kFoldedMagnitude && magnitude <= kFoldedMagnitude) || scale_[j] == 0.f);
    }
    if (Traits::SCALED && folded_ && !__all_sync(0xffffffffu, folds)) {
      folded_ = false;
      set_floors();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) scale_[j] *= unit(j);
  }

  /// acc to y [N,K,Z,P,Q].
  template <class Accumulator>
  CUTLASS_DEVICE void store_channels_first(TwiceTile const& tile, Accumulator const& acc) const {
    if (!is_channel(0)) return;  // none of the warp's, whose 8 are all of K or none
    TwicePlane const plane{std::int64_t(tile.n) * params_.k.divisor + channel_[0],
                           tile.pos_tile * Traits::BLK_POS, positions_};
    int const view = twice_rows_from<Traits>(rows_, threadIdx.x / 32 % 4 * 16).view;
    cuda::store_channels_first(params_, params_.views[view], plane, acc);
  }

  /// Stages the tile in sets of kBuffers rounds of STAGE_POS positions.
  template <int kBuffers, int kRound = 0, class Accumulator>
  CUTLASS_DEVICE void stage_sets(TwiceTile const& tile, Accumulator const& acc) {
    control_.staged[group_].wait_empty(staged_);
    stage_buffers<kRound, kBuffers>(acc, staging_ + staged_.slot * kBuffers * kStageBytes);
    cute::tma_store_fence();
    int const begin = tile.pos_tile * Traits::BLK_POS + kRound * Traits::STAGE_POS;
    announce_set(make_int4(tile.set, tile.n, begin, 0));
    if constexpr (kRound + kBuffers < Traits::ROUNDS) stage_sets<kBuffers, kRound + kBuffers>(tile, acc);
  }

  /// Stages piled views, each in a buffer of its own, a round at a time.
  template <int kRound = 0, class Accumulator>
  CUTLASS_DEVICE void stage_views(TwiceTile const& tile, Accumulator const& acc) {
    constexpr int kBlocksOfRound = Traits::STAGE_POS / 8;
    control_.staged[group_].wait_empty(staged_);
    int const view = threadIdx.x / 64 % 2;
    StagedTile<Output>::template stage_narrow<kRound * kBlocksOfRound, kBlocksOfRound>(
        acc, staging_ + (staged_.slot * 2 + view) * kStageBytes);
    cute::tma_store_fence();
    int const begin = tile.pos_tile * Traits::BLK_POS + kRound * Traits::STAGE_POS;
    announce_set(make_int4(tile.set, tile.n, begin, 0));
    if constexpr (kRound + 1 < Traits::ROUNDS) stage_views<kRound + 1>(tile, acc);
  }

  /// Tell the helper what lies there for it.
  CUTLASS_DEVICE void announce_sums(int4 const& tile) {
    if (threadIdx.x % 128 == 0) control_.sums_of[group_] = tile;
    __syncwarp();
    if (threadIdx.x % 32 == 0) control_.sums[group_].arrive_full(0);
    sums_at_.advance(1);
  }
  CUTLASS_DEVICE void announce_set(int4 const& set) {
    if (threadIdx.x % 128 == 0) control_.staged_of[group_][staged_.slot] = set;
    __syncwarp();
    if (threadIdx.x % 32 == 0) control_.staged[group_].arrive_full(staged_.slot);
    staged_.advance(kStagingSets);
  }

  /// Rounds kRound to kRound + kBuffers - 1, one by one: else addresses take more registers than there are.
  template <int kRound, int kBuffers, int kBuffer = 0, class Accumulator>
  CUTLASS_DEVICE void stage_buffers(Accumulator const& acc, char* to) const {
    constexpr int kBlocksOfRound = Traits::STAGE_POS / 8;
    StagedTile<Output>::template stage<(kRound + kBuffer) * kBlocksOfRound, kBlocksOfRound>(
        acc, to + kBuffer * kStageBytes);
    if constexpr (kBuffer + 1 < kBuffers) stage_buffers<kRound, kBuffers, kBuffer + 1>(acc, to);
  }

  TwiceParams<Traits> const& params_;
  TwiceControl<Traits>& control_;
  char* const staging_;  // [staging_buffers] of 8 KB
  int const group_;
  // Of the set whose tile was last.
  int rows_set_ = -1;
  TwiceRowsParams rows_;
  int positions_;  // of each of their views
  int row_;        // of the warp's view the number that the warpgroup's first row would have there
  // Of the thread's two rows in that set, and for the sample last seen.
  int channel_[2];
  float bias_[2], low_[2], unscale_[2][2];
  float scale_[2], shift_[2];
  bool folded_ = false;  // scales: their product is in low_ and scale_
  int scales_sample_ = -1, maps_sample_ = -1;
  // Of the tile whose sums have not been handed over.
  bool pending_ = false;
  int pending_n_, pending_pos_tile_;
  int pending_valid_;  // positions
  float pivot_[2], sum_[2], sum_squares_[2];
  RingCursor sums_at_, staged_;
};

}  // namespace upconv3d::cuda
