// SPDX-License-Identifier: Apache-2.0
/// \file
/// The epilogue of conv_transpose_relu_moments_sm90: unscale, bias, activation, store, partial moments.
///
/// A consumer warpgroup holds 64 output channels x WG_POS output positions in wgmma's accumulator layout: a
/// thread owns two channels (rows lane/4 and lane/4 + 8 of its warp's 16) and, in each block of 8 positions,
/// the pair at 2*(lane%4). A channel's values are thus spread over the four lanes of a quad, and its moments
/// cost two shuffles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/fast_math.h"
#include "cutlass/numeric_conversion.h"

namespace upconv3d::cuda {

/// ReLU that lets NaN through, as torch.relu does.
struct ReluActivation {
  CUTLASS_DEVICE float operator()(float v) const { return cutlass::epilogue::thread::ReLu<float>{}(v); }
};

/// (count, mean, M2) of a set of values; merged by Chan, Golub & LeVeque (1979).
struct QuadMoments {
  float count;
  float mean;
  float m2;

  CUTLASS_DEVICE void merge(QuadMoments const& other) {
    // Lanes beyond the slab's end count nothing, but their mean is another sample's value, perhaps NaN.
    if (other.count == 0.f) return;
    float const total = count + other.count;
    float const delta = other.mean - mean;
    float const share = other.count / total;
    mean += delta * share;
    m2 += other.m2 + delta * delta * (count * share);
    count = total;
  }

  /// Merges the four lanes of a quad; lane 0 of the quad holds the result.
  CUTLASS_DEVICE void merge_quad() {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_mask = 1; lane_mask <= 2; lane_mask *= 2) {
      QuadMoments other;
      other.count = __shfl_down_sync(0xffffffffu, count, lane_mask, 4);
      other.mean = __shfl_down_sync(0xffffffffu, mean, lane_mask, 4);
      other.m2 = __shfl_down_sync(0xffffffffu, m2, lane_mask, 4);
      merge(other);
    }
  }
};

/// 2^e for e within float's normal range, the nearest end of it otherwise.
CUTLASS_DEVICE float clamped_power_of_two(int e) {
  return __int_as_float((max(-126, min(127, e)) + 127) << 23);
}

/// What the epilogue reads and writes besides the accumulators.
template <class Activation>
struct EpilogueParams {
  Activation* a;                       // [N,Z,P,Q,K]
  Activation const* bias;              // [K] Activation, or null
  std::int32_t const* unscale_sample;  // [N] exponents, or null
  std::int32_t const* unscale_column;  // [K] exponents, or null
  float2* part;                        // [N,tiles,K] (mean, M2)
  std::int32_t* counts;                // [tiles] positions behind each partial moment
  int out[3];                          // Z,P,Q
  int k;                               // output channels
  int tiles;                           // of a sample: WG_POS positions of one slab each
};

/// The slab that a tile belongs to.
struct EpilogueSlab {
  CUtensorMap a;                      // [N,slab positions,K] Activation, box kPanelChannels x kStagePositions
  cutlass::FastDivmod width, height;  // of the slab along Q and P
  int origin[3];                      // its first z,p,q
  int positions;                      // of the slab
  int first_tile;                     // of the slab's partial moments
};

/// Origin of one warpgroup's accumulators.
struct EpilogueCoord {
  int n;         // sample
  int channel;   // first of 64 output channels
  int position;  // first of WG_POS positions within the slab; may lie beyond it
};

template <class Activation_, int WG_POS_, class ActivationFn_ = ReluActivation>
struct ReluMomentsEpilogue {
  using Activation = Activation_;
  using ActivationFn = ActivationFn_;
  static constexpr int WG_POS = WG_POS_;
  static constexpr int kBlocks = WG_POS / 8;  // blocks of 8 positions, wgmma's column unit
  static constexpr bool kHalfWidth = sizeof(Activation) == 2;

  // A staging buffer is 8 KB: rows of 128 bytes (the widest TMA swizzle) of all 64 channels. Two of them let
  // a warpgroup fill one while TMA drains the other.
  static constexpr int kPanelChannels = 128 / int(sizeof(Activation));
  static constexpr int kPanels = 64 / kPanelChannels;
  static constexpr int kStageBytes = 8192;
  static constexpr int kStages = 2;
  static constexpr int kStagePositions = kStageBytes / 128 / kPanels;
  static constexpr int kBytes = kStageBytes * kStages;  // per warpgroup
  static_assert(WG_POS % (kStagePositions * kStages) == 0, "buffers must alternate from tile to tile too");

  /// Consumes acc ((2,2,WG_POS/8),1,1); `staging` is this warpgroup's kBytes, 1024-byte aligned; `barrier_id`
  /// names a barrier of this warpgroup's 128 threads.
  template <class Accumulator>
  CUTLASS_DEVICE static void run(EpilogueParams<Activation> const& params, EpilogueSlab const& slab,
                                 EpilogueCoord const& coord, Accumulator const& acc, char* staging,
                                 int barrier_id) {
    Pair values[2][kBlocks];
    activate(params, coord, acc, values);
    store(params, slab, coord, values, staging, barrier_id);
    int const tile = slab.first_tile + coord.position / WG_POS;
    int const valid = min(WG_POS, slab.positions - coord.position);
    if (valid == WG_POS) {
      write_moments<false>(params, coord, values, tile, valid);
    } else if (valid > 0) {
      write_moments<true>(params, coord, values, tile, valid);
    }
  }

 private:
  /// values[j][b][i]: channel row + 8*j, position 8*b + 2*(lane%4) + i; as stored, so that the moments
  /// describe what normalize will read.
  using Pair = cutlass::Array<Activation, 2>;
  using Values = Pair[2][kBlocks];

  CUTLASS_DEVICE static int row() { return (threadIdx.x / 32) % 4 * 16 + threadIdx.x % 32 / 4; }

  /// values = activation(unscaled acc + bias), rounded to the activation dtype.
  template <class Accumulator>
  CUTLASS_DEVICE static void activate(EpilogueParams<Activation> const& params, EpilogueCoord const& coord,
                                      Accumulator const& acc, Values& values) {
    ActivationFn activation;
    cutlass::NumericArrayConverter<Activation, float, 2> round;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const channel = coord.channel + row() + 8 * j;
      bool const in_range = channel < params.k;
      float const bias = params.bias && in_range ? float(params.bias[channel]) : 0.f;
      // Two factors, since 2^e of a product of scales may leave float's range where the value does not.
      float scale[2] = {1.f, 1.f};
      if (!kHalfWidth && params.unscale_sample) {
        int const e = params.unscale_sample[coord.n] + (in_range ? params.unscale_column[channel] : 0);
        scale[0] = clamped_power_of_two(e / 2);
        scale[1] = clamped_power_of_two(e - e / 2);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        cutlass::Array<float, 2> v;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          v[i] = acc(i + 2 * j + 4 * block);
          if constexpr (!kHalfWidth) v[i] = v[i] * scale[0] * scale[1];
          v[i] = activation(v[i] + bias);
        }
        values[j][block] = round(v);
      }
    }
  }

  /// Transposes through shared memory to rows of channels and stores them by TMA. What hangs over the end of
  /// the slab would reach the next sample, so the last positions are stored by threads.
  CUTLASS_DEVICE static void store(EpilogueParams<Activation> const& params, EpilogueSlab const& slab,
                                   EpilogueCoord const& coord, Values const& values, char* staging,
                                   int barrier_id) {
    bool const leader = threadIdx.x % 128 == 0;
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < WG_POS / kStagePositions; ++stage) {
      char* const buffer = staging + (stage % kStages) * kStageBytes;
      if (leader) cute::tma_store_wait<kStages - 1>();
      cutlass::arch::NamedBarrier::sync(128, barrier_id);
      if constexpr (kHalfWidth) {
        stage_half_width(values, stage, buffer);
      } else {
        stage_full_width(values, stage, buffer);
      }
      cute::tma_store_fence();
      cutlass::arch::NamedBarrier::sync(128, barrier_id);
      int const position = coord.position + stage * kStagePositions;
      if (position + kStagePositions > slab.positions) {
        store_tail(params, slab, coord, position, buffer);
      } else if (leader) {
        int w, h;
        int const d = slab.height.divmod(h, slab.width.divmod(w, position));
        CUTLASS_PRAGMA_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          int const channel = coord.channel + panel * kPanelChannels;
          if (channel < params.k) {
            cute::SM90_TMA_STORE_IM2COL_5D::copy(&slab.a, buffer + panel * (kStageBytes / kPanels), channel,
                                                 w, h, d, coord.n);
          }
        }
      }
      if (leader) cute::tma_store_arrive();  // a group per stage, empty or not: the wait above counts them
    }
  }

  /// Stores the positions of a staging buffer that lie within the slab, 16 bytes of channels at a time.
  CUTLASS_DEVICE static void store_tail(EpilogueParams<Activation> const& params, EpilogueSlab const& slab,
                                        EpilogueCoord const& coord, int first_position, char const* buffer) {
    constexpr int kVectorChannels = 16 / int(sizeof(Activation));
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x % 128; i < kStageBytes / 16; i += 128) {
      int const line = i / 8;  // of 128 bytes: one position of one panel
      int const row = line % kStagePositions;
      int const channel = coord.channel + line / kStagePositions * kPanelChannels + i % 8 * kVectorChannels;
      if (first_position + row >= slab.positions || channel >= params.k) continue;
      int q, p;
      int const z = slab.height.divmod(p, slab.width.divmod(q, first_position + row)) + slab.origin[0];
      std::int64_t const plane =
          (std::int64_t(coord.n) * params.out[0] + z) * params.out[1] + p + slab.origin[1];
      std::int64_t const pixel = plane * params.out[2] + q + slab.origin[2];
      *reinterpret_cast<uint4*>(params.a + pixel * params.k + channel) =
          *reinterpret_cast<uint4 const*>(buffer + line * 128 + ((i % 8) ^ (row % 8)) * 16);
    }
  }

  /// 64 positions x 64 channels of 16 bit, by transposing stmatrix: four 8x8 blocks at a time.
  CUTLASS_DEVICE static void stage_half_width(Values const& values, int stage, char* buffer) {
    int const lane = threadIdx.x % 32;
    int const matrix = lane / 8;
    int const chunk = (threadIdx.x / 32) % 4 * 2 + matrix % 2;  // 16-byte column of 8 channels
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kStagePositions / 8; b += 2) {
      std::uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < 4; ++m) {
        packed[m] =
            reinterpret_cast<std::uint32_t const&>(values[m % 2][stage * (kStagePositions / 8) + b + m / 2]);
      }
      int const position = (b + matrix / 2) * 8 + lane % 8;
      char* const address = buffer + position * 128 + ((chunk ^ (position % 8)) * 16);
      cute::SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3],
                                    *reinterpret_cast<cute::uint128_t*>(address));
    }
  }

  /// 32 positions x 64 channels of float in two panels of 32 channels; the swizzle makes the scalar stores
  /// free of bank conflicts.
  CUTLASS_DEVICE static void stage_full_width(Values const& values, int stage, char* buffer) {
    int const lane = threadIdx.x % 32;
    int const warp = (threadIdx.x / 32) % 4;
    char* const panel = buffer + (warp / 2) * (kStageBytes / kPanels);
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kStagePositions / 8; ++b) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const position = 8 * b + 2 * (lane % 4) + i;
          int const channel = (warp % 2) * 16 + lane / 4 + 8 * j;
          float* const row_start = reinterpret_cast<float*>(panel + position * 128);
          row_start[((channel / 4) ^ (position % 8)) * 4 + channel % 4] =
              values[j][stage * (kStagePositions / 8) + b][i];
        }
      }
    }
  }

  /// One pass, shifted by the thread's first value p: sum of (v-p) and of (v-p)^2. As p is one of the values,
  /// n*(mean-p)^2 <= n*M2, so the subtraction loses at most log2(n+1) = 6 of 24 bits, and nothing in
  /// practice.
  template <bool kMasked>
  CUTLASS_DEVICE static void write_moments(EpilogueParams<Activation> const& params,
                                           EpilogueCoord const& coord, Values const& values, int tile,
                                           int valid) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const pivot = float(values[j][0][0]);
      float sum = 0.f, sum_squares = 0.f;
      int count = kMasked ? 0 : 2 * kBlocks;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float const shifted = float(values[j][block][i]) - pivot;
          if (!kMasked || 8 * block + 2 * (lane % 4) + i < valid) {
            sum += shifted;
            sum_squares += shifted * shifted;
            if constexpr (kMasked) ++count;
          }
        }
      }
      float const mean_shift = count ? sum / float(count) : 0.f;
      // Squares that overflow are a variance of Inf, not Inf - Inf.
      float const m2 = isinf(sum_squares) ? sum_squares : sum_squares - sum * mean_shift;
      // A comparison, not fmaxf: NaN must reach the variance.
      QuadMoments moments{float(count), pivot + mean_shift, m2 < 0.f ? 0.f : m2};
      moments.merge_quad();
      int const channel = coord.channel + row() + 8 * j;
      if (lane % 4 == 0 && channel < params.k) {
        std::int64_t const row_of_part = std::int64_t(coord.n) * params.tiles + tile;
        params.part[row_of_part * params.k + channel] = make_float2(moments.mean, moments.m2);
        // The same in every sample and channel: one thread of the first ones says it.
        if (coord.n == 0 && channel == 0) params.counts[tile] = valid;
      }
    }
  }
};

}  // namespace upconv3d::cuda
