// SPDX-License-Identifier: Apache-2.0
/// \file
/// The two epilogues of conv_transpose_twice_sm90, in the registers of the warpgroup that multiplied: moments
/// after the first time, normalization and the way to memory after the second.
///
/// A thread holds two rows (accumulator_row and 8 further) and, in each block of 8 positions, the pair at
/// 2*(lane%4). While wgmma runs, its accumulators take much of the registers' bandwidth, so what counts here
/// is the number of instructions: relu(v + bias) - m is taken as max(v + (bias - m), -m), and with a floor of
/// -infinity in the place of ReLU's 0 it is v + bias - m.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/merge_moments_sm90.cuh"
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

template <class Traits>
class TwiceEpilogue {
 public:
  using Output = typename Traits::Output;
  static constexpr int kBlocks = Traits::BLK_POS / 8;  // blocks of 8 positions, wgmma's column unit

  /// \param barrier named barrier of the warpgroup's 128 threads
  CUTLASS_DEVICE TwiceEpilogue(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared,
                               int group, std::uint32_t barrier)
      : params_(params),
        control_(*shared.control),
        staging_(shared.staging + group * params.staging_buffers * kStageBytes),
        group_(group),
        barrier_(barrier) {}

  /// Writes the tile's partial moments.
  template <class Accumulator>
  CUTLASS_DEVICE void take_moments(TwiceTile const& tile, Accumulator const& acc) {
    if (tile.cls != rows_class_) enter(tile.cls);
    if (view_ < 0) return;
    load_scales(tile.n);
    int const valid = min(Traits::BLK_POS, positions_ - tile.pos_tile * Traits::BLK_POS);
    // One of the values of the granule, whose rows are those of neighbouring lanes.
    int const shift = params_.granule_shift;
    int const granule_lane = shift >= 3 ? 0 : threadIdx.x % 32 >> (2 + shift) << (2 + shift);
    float pivot[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      pivot[j] =
          __shfl_sync(0xffffffffu, shifted_before(acc(2 * j), j, bias_[j], params_.floor), granule_lane);
    }
    if (shift == 4) pivot[1] = pivot[0];
    float sum[2] = {0.f, 0.f}, sum_squares[2] = {0.f, 0.f};
    if (valid == Traits::BLK_POS) {
      add_values<false>(acc, pivot, valid, sum, sum_squares);
    } else {
      add_values<true>(acc, pivot, valid, sum, sum_squares);
    }
    write_moments(tile, valid, pivot, sum, sum_squares);
  }

  /// Consumes acc: y of the tile.
  template <class Accumulator>
  CUTLASS_DEVICE void normalize(TwiceTile const& tile, Accumulator& acc) {
    if (tile.cls != rows_class_) enter(tile.cls);
    if (view_ < 0) return;
    load_scales(tile.n);
    if (tile.n != maps_sample_) load_maps(tile.n);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      int const j = i / 2 % 2;
      acc(i) = shifted_before(acc(i), j, offset_[j], floor_[j]) * scale_[j] + shift_[j];
    }
    if (params_.after.kind != Activation::kNone) activate(acc);
    store_rounds<0>(tile, acc);
  }

  /// Before the block's shared memory goes: all stores have read it.
  CUTLASS_DEVICE void finish() { cute::tma_store_wait<0>(); }

 private:
  /// acc = after(acc).
  template <class Accumulator>
  CUTLASS_DEVICE void activate(Accumulator& acc) const {
    if (params_.after.kind == Activation::kRelu) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = FloorActivation{0.f}(acc(i));
      return;
    }
    float slope[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) slope[j] = activation_parameter<Output>(params_.after, channel_[j]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = SlopeActivation{}.value(acc(i), slope[i / 2 % 2]);
  }

  /// before(v + bias) - m of an accumulator, unscaled; NaN stays NaN. \param j which of the thread's rows
  /// \param offset bias - m
  /// \param floor  params.floor - m
  CUTLASS_DEVICE float shifted_before(float v, int j, float offset, float floor) const {
    if constexpr (Traits::SCALED) v = v * unscale_[j][0] * unscale_[j][1];
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v + offset), "f"(floor));
    return result;
  }

  /// What all tiles of a class have in common: parameters with a run-time index come late from constant
  /// memory.
  CUTLASS_DEVICE void enter(int number) {
    TwiceClassParams const& cls = params_.classes[number];
    rows_class_ = number;
    scales_sample_ = maps_sample_ = -1;
    view_ = cls.rows[group_].view;
    row_ = cls.rows[group_].row;
    positions_ = cls.positions;
    width_ = cls.width;
    height_ = cls.height;
    if (view_ < 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const row = min(row_ + accumulator_row() + 8 * j, params_.view_k - 1);
      int const phase = view_ * params_.fold + params_.k.divmod(channel_[j], row);
      first_moment_[j] = params_.phases[phase].first_moment;
      bias_[j] = params_.bias ? float(params_.bias[channel_[j]]) : 0.f;
    }
  }

  CUTLASS_DEVICE void load_scales(int sample) {
    if constexpr (Traits::SCALED) {
      if (sample == scales_sample_) return;
      scales_sample_ = sample;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        // Two factors, since 2^e of a product of scales may leave float's range where the value does not.
        int const exponent = params_.unscale_sample[sample] + params_.unscale_column[channel_[j]];
        unscale_[j][0] = clamped_power_of_two(exponent / 2);
        unscale_[j][1] = clamped_power_of_two(exponent - exponent / 2);
      }
    }
  }

  template <bool kTail, class Accumulator>
  CUTLASS_DEVICE void add_values(Accumulator const& acc, float const (&pivot)[2], int valid, float (&sum)[2],
                                 float (&sum_squares)[2]) const {
    float const offset[2] = {bias_[0] - pivot[0], bias_[1] - pivot[1]};
    float const floor[2] = {params_.floor - pivot[0], params_.floor - pivot[1]};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      int const j = i / 2 % 2;
      int const position = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      float shifted = shifted_before(acc(i), j, offset[j], floor[j]);
      // Beyond the slab lies the next sample.
      if (kTail && position >= valid) shifted = 0.f;
      sum[j] += shifted;
      sum_squares[j] += shifted * shifted;
    }
  }

  CUTLASS_DEVICE void write_moments(TwiceTile const& tile, int valid, float const (&pivot)[2],
                                    float (&sum)[2], float (&sum_squares)[2]) const {
    int const shift = params_.granule_shift, lane = threadIdx.x % 32;
    if (shift == 4) {
      sum[0] += sum[1];
      sum_squares[0] += sum_squares[1];
    }
    // The four lanes of a row divide the four sums among them: bit 0 is the row, bit 1 the kind.
    bool const second = lane & 1, squares = lane & 2;
    float const kept_sum = second ? sum[1] : sum[0];
    float const kept_squares = second ? sum_squares[1] : sum_squares[0];
    float const row_sum = kept_sum + __shfl_xor_sync(0xffffffffu, second ? sum[0] : sum[1], 1);
    float const row_squares =
        kept_squares + __shfl_xor_sync(0xffffffffu, second ? sum_squares[0] : sum_squares[1], 1);
    float own =
        (squares ? row_squares : row_sum) + __shfl_xor_sync(0xffffffffu, squares ? row_sum : row_squares, 2);
    int const lanes = 4 << min(shift, 3);  // of a granule
    for (int mask = 4; mask < lanes; mask *= 2) own += __shfl_xor_sync(0xffffffffu, own, mask);
    float const granule_squares = __shfl_xor_sync(0xffffffffu, own, 2);
    int const j = lane & 1;
    bool const inside = row_ + accumulator_row() + 8 * j < params_.view_k;
    if (lane % lanes > 1 || (shift == 4 && j == 1) || !inside) return;
    std::int64_t const moment = std::int64_t(tile.n) * params_.moments +
                                (second ? first_moment_[1] : first_moment_[0]) + tile.pos_tile;
    RunningMoments const moments =
        shifted_moments(float(valid << shift), second ? pivot[1] : pivot[0], own, granule_squares);
    params_.part[moment * (params_.k.divisor >> shift) + ((second ? channel_[1] : channel_[0]) >> shift)] =
        make_float2(moments.mean, moments.m2);
  }

  /// The maps of the thread's rows: as a rule the same as for the last tile. Two threads merge a row's group.
  CUTLASS_DEVICE void load_maps(int sample) {
    maps_sample_ = sample;
    int const row = threadIdx.x % 128 / 2;
    int channel;
    params_.k.divmod(channel, min(row_ + row, params_.view_k - 1));
    float4 const map = merge_row(sample, channel);
    cutlass::arch::NamedBarrier::sync(128, barrier_);  // the last maps have been read
    if (threadIdx.x % 2 == 0) control_.maps[group_][row] = map;
    cutlass::arch::NamedBarrier::sync(128, barrier_);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float4 const own = control_.maps[group_][accumulator_row() + 8 * j];
      offset_[j] = bias_[j] - own.x;
      floor_[j] = params_.floor - own.x;
      scale_[j] = own.y;
      shift_[j] = own.z;
    }
  }

  /// mean, scale and shift of a channel, y = (v - mean)*scale + shift, by two neighbouring threads.
  CUTLASS_DEVICE float4 merge_row(int sample, int channel) const {
    int unused;
    int const group = params_.group_channels.divmod(unused, channel);
    int const segments = params_.segments.divisor;
    float4 const* const from = params_.table + (std::int64_t(sample) * params_.groups + group) * segments;
    MomentSums sums;
    sums.pivot = __ldcg(from).x;
#pragma unroll 8
    for (int i = threadIdx.x % 2; i < segments; i += 2) {
      float4 const segment = __ldcg(from + i);
      sums.add(segment.w, segment.x - sums.pivot + segment.y, segment.z);
    }
    sums.add_lanes<1>();
    double const mean_shift = sums.mean_shift();
    double const mean = sums.pivot + mean_shift;
    float const rounded = float(mean);
    float const gamma = params_.gamma ? float(params_.gamma[channel]) : 1.f;
    float const beta = params_.beta ? float(params_.beta[channel]) : 0.f;
    float const scale = gamma * float(1.0 / sqrt(sums.m2(mean_shift) / sums.count + params_.eps));
    return make_float4(rounded, scale, beta - float(mean - rounded) * scale, 0.f);
  }

  /// Stages and stores round after round of STAGE_POS positions, `staging_buffers` of them at a time.
  template <int kRound, class Accumulator>
  CUTLASS_DEVICE void store_rounds(TwiceTile const& tile, Accumulator const& acc) {
    if constexpr (kRound < Traits::ROUNDS) {
      int const buffer = kRound & (params_.staging_buffers - 1);
      if (buffer == 0) {
        cute::tma_store_wait<0>();  // of a thread that stored: its buffers have been read
        cutlass::arch::NamedBarrier::sync(128, barrier_);
      }
      constexpr int kStageBlocks = Traits::STAGE_POS / 8;
      StagedTile<Output>::template stage<kRound * kStageBlocks, kStageBlocks>(
          acc, staging_ + buffer * kStageBytes);
      if (buffer == params_.staging_buffers - 1) {
        cute::tma_store_fence();
        cutlass::arch::NamedBarrier::sync(128, barrier_);
        store_buffers(tile, tile.pos_tile * Traits::BLK_POS + (kRound - buffer) * Traits::STAGE_POS);
      }
      store_rounds<kRound + 1>(tile, acc);
    }
  }

  /// TMA stores of all whole buffers, by one thread of each warp; a buffer that ends beyond the slab would
  /// reach the next sample, so its positions are stored by threads. \param begin first position
  CUTLASS_DEVICE void store_buffers(TwiceTile const& tile, int begin) const {
    int const valid = min(params_.staging_buffers * Traits::STAGE_POS, positions_ - begin);
    int const whole = max(valid, 0) / Traits::STAGE_POS;
    int const warp = threadIdx.x / 32 % 4;
    constexpr int kPanel = kPanelChannels<Output>;
    if (threadIdx.x % 32 == 0) {
      for (int buffer = warp; buffer < whole; buffer += 4) {
        int q, p;
        int const z = height_.divmod(p, width_.divmod(q, begin + buffer * Traits::STAGE_POS));
        char const* const from = staging_ + buffer * kStageBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int panel = 0; panel < Traits::ROWS / kPanel; ++panel) {
          int const row = row_ + panel * kPanel;
          if (row >= params_.view_k) continue;
          store_im2col_evict_first(&params_.views[view_].y, from + panel * (kStageBytes / 2), row, q, p, z,
                                   tile.n);
        }
      }
      cute::tma_store_arrive();
    }
    if (whole * Traits::STAGE_POS < valid) store_rest(tile, begin, whole * Traits::STAGE_POS, valid);
  }

  /// Positions `first` to `end` - 1 behind `begin`.
  CUTLASS_DEVICE void store_rest(TwiceTile const& tile, int begin, int first, int end) const {
    constexpr int kVector = 16 / int(sizeof(Output));
    constexpr int kChunks = Traits::ROWS / kVector;
    TwiceView const& view = params_.views[view_];
    std::int64_t const sample =
        std::int64_t(tile.n) * params_.view_out[0] * params_.view_out[1] * params_.view_out[2];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = first * kChunks + threadIdx.x % 128; i < end * kChunks; i += 128) {
      int const position = i / kChunks, chunk = i % kChunks;
      int const row = row_ + chunk * kVector;
      if (row >= params_.view_k) continue;
      std::int64_t const pixel = sample + view.pixel(params_.view_out, begin + position);
      __stcs(reinterpret_cast<uint4*>(params_.y + pixel * params_.view_k + row),
             *reinterpret_cast<uint4 const*>(staging_ + staged_chunk<Output>(position, chunk)));
    }
  }

  TwiceParams<Traits> const& params_;
  TwiceControl& control_;
  char* const staging_;  // [staging_buffers] of 8 KB
  int const group_;
  std::uint32_t const barrier_;
  // Of the class whose tile was last.
  int rows_class_ = -1;
  int view_, row_, positions_;
  cutlass::FastDivmod width_, height_;
  // Of the thread's two rows in that class, and for the sample last seen.
  int channel_[2], first_moment_[2];
  float bias_[2], unscale_[2][2];
  float offset_[2], floor_[2], scale_[2], shift_[2];
  int scales_sample_ = -1, maps_sample_ = -1;
};

}  // namespace upconv3d::cuda
