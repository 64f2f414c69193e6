// SPDX-License-Identifier: Apache-2.0
/// \file
/// The epilogue's second half, by one helper warp per consumer warpgroup: a staged half tile (64 channels x
/// STAGED_POS positions, see relu_epilogue_sm90.cuh) is stored in y's memory and its moments are taken,
/// unless the consumers took them, while those multiply the next tile.
///
/// Where the kernel itself normalizes, before(conv) lies where the result will lie, so that this takes no
/// memory of its own. Stepped16 takes half the room of the float32 it becomes; it lies at the beginning of
/// the memory of its position's channels of a tile, which one warp reads and then overwrites. In scratch
/// memory it lies densely, and a table says which partial moment, and so which steps, a position has.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"
#include "cuda/conv_transpose/running_moments_sm90.cuh"
#include "cuda/conv_transpose/tiles_sm90.cuh"

namespace upconv3d::cuda {

/// A stored value as a float: itself, or Stepped16's integer, exactly. \param zero KernelParams::stepped_zero
CUTLASS_DEVICE float stored_to_float(float v, float) {
  return v;
}
CUTLASS_DEVICE float stored_to_float(cutlass::bfloat16_t v, float) {
  return float(v);
}
CUTLASS_DEVICE float stored_to_float(cutlass::half_t v, float) {
  return float(v);
}
CUTLASS_DEVICE float stored_to_float(Stepped16 v, float zero) {
  return __uint_as_float(0x4b000000u | v.bits) - zero;
}

/// A half tile's place.
struct HalfTile {
  int n;         // sample
  int slab;      // that it is part of
  int channel;   // first of 64
  int stored;    // where that lies in its row, in Stored
  int end;       // of the tile's group's channels
  int position;  // first of STAGED_POS within the slab
  int valid;     // positions inside the slab, at most STAGED_POS; may be negative
  int moment;    // index of its partial moments
};

template <class Traits>
struct Drain {
  using Stored = typename Traits::Stored;
  static constexpr int STAGED_POS = Traits::STAGED_POS;
  static constexpr int kVector = 16 / int(sizeof(Stored));  // values of a chunk

  CUTLASS_DEVICE static HalfTile half_tile(KernelParams<Traits> const& params, TileCoord const& tile,
                                           int warpgroup, int round) {
    HalfTile half;
    half.n = tile.n;
    half.slab = slab_of_warpgroup(params, tile.slab, warpgroup);
    KernelSlab<Traits> const& slab = params.slabs[half.slab];
    half.channel = tile.channel + (Traits::PAIRED ? 0 : warpgroup % Traits::WARPGROUPS_K * 64);
    half.stored = stored_channel(params, tile.channel, half.channel);
    half.end = channel_end(params, tile.channel);
    half.position = tile.position + warpgroup / Traits::WARPGROUPS_K * Traits::WG_POS + round * STAGED_POS;
    half.valid = min(STAGED_POS, slab.positions - half.position);
    half.moment = slab.first_moment + half.position / STAGED_POS;
    return half;
  }

  /// TMA stores of all whole buffers. One that ends beyond the slab would reach the next sample, and one of
  /// channels that end amid a panel the next convolution group; those are stored by threads.
  CUTLASS_DEVICE static void store(KernelParams<Traits> const& params, HalfTile const& half,
                                   char const* staging) {
    if (params.channels_first) {
      store_channels_first(params, half, staging);
      return;
    }
    KernelSlab<Traits> const& slab = params.slabs[half.slab];
    constexpr int kPositions = kStagePositions<Stored>;
    constexpr int kChannels = kPanelChannels<Stored>;
    bool const amid_panel = half.end < params.k && (half.end - half.channel) % kChannels != 0;
    int const whole = amid_panel ? 0 : half.valid / kPositions;
    if (threadIdx.x % 32 == 0) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stage = 0; stage < whole; ++stage) {
        int q, p;
        int const z = slab.height.divmod(p, slab.width.divmod(q, half.position + stage * kPositions));
        CUTLASS_PRAGMA_UNROLL
        for (int panel = 0; panel < 64 / kChannels; ++panel) {
          int const channel = half.channel + panel * kChannels;
          if (channel >= half.end) continue;
          cute::SM90_TMA_STORE_IM2COL_5D::copy(&params.maps[half.slab].a,
                                               staging + stage * kStageBytes + panel * (kStageBytes / 2),
                                               half.stored + panel * kChannels, q, p, z, half.n);
        }
      }
    }
    constexpr int kChunks = 64 / kVector;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = whole * kPositions * kChunks + threadIdx.x % 32; i < half.valid * kChunks; i += 32) {
      int const position = i / kChunks, chunk = i % kChunks;
      int const channel = half.channel + chunk * kVector;
      if (channel >= half.end) continue;
      std::int64_t const pixel =
          half.n * std::int64_t(pixels(params)) + pixel_of(params, slab, half.position + position);
      Stored* const row = reinterpret_cast<Stored*>(params.a) + pixel * params.pitch;
      *reinterpret_cast<uint4*>(row + half.stored + chunk * kVector) =
          *reinterpret_cast<uint4 const*>(staging + staged_chunk<Stored>(position, chunk));
    }
  }

  /// Where a channel of the tile that begins with channel `tile` lies in its row of a, in Stored.
  CUTLASS_DEVICE static int stored_channel(KernelParams<Traits> const& params, int tile, int channel) {
    return Traits::QUANTIZED && params.in_place ? tile + channel : channel;
  }

  CUTLASS_DEVICE static int pixels(KernelParams<Traits> const& params) {
    return params.out[0] * params.out[1] * params.out[2];
  }

  /// Positions whose mean is the pivot that sums of squares are shifted by. Of few values above 0 among many
  /// zeros, a single position may be one; its square then swamps the variance by 2^7, which float32 can lose
  /// no more than 2^3 of. 16 bits are rounded too coarsely to tell.
  static constexpr int kPivotSamples = sizeof(Stored) == 4 ? 8 : 1;

  /// Takes the moments: a lane has one chunk of channels, and every 2nd or 4th position.
  CUTLASS_DEVICE static void moments(KernelParams<Traits> const& params, HalfTile const& half,
                                     char const* staging, std::int8_t const* steps) {
    constexpr int kChunks = 64 / kVector;
    constexpr int kRows = 32 / kChunks;
    int const lane = threadIdx.x % 32;
    int const chunk = lane % kChunks;
    auto const to_float = [&](Stored v) { return stored_to_float(v, params.stepped_zero); };
    cutlass::Array<Stored, kVector> values;
    float pivot[kVector], sum[kVector], sum_squares[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) pivot[i] = sum[i] = sum_squares[i] = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int sample = 0; sample < kPivotSamples; ++sample) {
      int const position = half.valid * sample / kPivotSamples;
      values = load_chunk(staging + staged_chunk<Stored>(position, chunk));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) pivot[i] += to_float(values[i]) * (1.f / kPivotSamples);
    }
#pragma unroll 4
    for (int position = lane / kChunks; position < half.valid; position += kRows) {
      values = load_chunk(staging + staged_chunk<Stored>(position, chunk));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        float const shifted = to_float(values[i]) - pivot[i];
        sum[i] += shifted;
        sum_squares[i] += shifted * shifted;
      }
    }
    RunningMoments moments[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_mask = kChunks; lane_mask < 32; lane_mask *= 2) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], lane_mask);
        sum_squares[i] += __shfl_xor_sync(0xffffffffu, sum_squares[i], lane_mask);
      }
      moments[i] = shifted_moments(float(half.valid), pivot[i], sum[i], sum_squares[i]);
      if constexpr (Traits::QUANTIZED) scale_by_step(moments[i], steps[chunk * kVector + i]);
    }
    write_chunk_moments(params, half, half.channel + chunk * kVector, moments, lane < kChunks);
  }

  /// Writes the moments that the consumers took: a lane has two neighbouring channels. All counts are equal.
  ///
  /// \param rows [64] (mean, M2) of the channels
  CUTLASS_DEVICE static void write_row_moments(KernelParams<Traits> const& params, HalfTile const& half,
                                               float2 const* rows) {
    int const granule = 1 << params.granule_shift;
    int const channel = half.channel + 2 * int(threadIdx.x % 32);
    float4 const pair = *reinterpret_cast<float4 const*>(rows + 2 * (threadIdx.x % 32));
    float mean = pair.x, m2 = pair.y, half_count = 0.5f * float(half.valid);
    auto const merge = [&](float other_mean, float other_m2) {
      float const delta = other_mean - mean;
      m2 += other_m2 + delta * half_count * delta;
      mean = 0.5f * mean + 0.5f * other_mean;
      half_count *= 2.f;
    };
    if (granule > 1) {
      merge(pair.z, pair.w);
      for (int width = 2; width < granule; width *= 2) {
        float const other_mean = __shfl_xor_sync(0xffffffffu, mean, width / 2);
        merge(other_mean, __shfl_xor_sync(0xffffffffu, m2, width / 2));
      }
    } else if (channel + 1 < half.end) {
      write_moments(params, half, channel + 1, {float(half.valid), pair.z, pair.w});
    }
    if (channel % granule == 0 && channel < half.end) {
      write_moments(params, half, channel, {float(half.valid), mean, m2});
    }
  }

  /// Writes the exponents of the channels, for who normalizes.
  CUTLASS_DEVICE static void write_steps(KernelParams<Traits> const& params, HalfTile const& half,
                                         std::int8_t const* steps) {
    std::int64_t const row = std::int64_t(half.n) * params.moments + half.moment;
    // Channels behind K fill a unit of 8, which is read whole.
    int const end = half.end == params.k ? params.step_pitch : half.end;
    CUTLASS_PRAGMA_UNROLL
    for (int c = threadIdx.x % 32; c < 64; c += 32) {
      if (half.channel + c < end) params.steps[row * params.step_pitch + half.channel + c] = steps[c];
    }
  }

  /// Writes which partial moment the positions have. The first channels of sample 0 do so for all: geometry
  /// alone decides it.
  CUTLASS_DEVICE static void write_moment_of(KernelParams<Traits> const& params, HalfTile const& half) {
    if (params.moment_of == nullptr || half.n != 0 || half.channel != 0) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x % 32; i < half.valid; i += 32) {
      params.moment_of[pixel_of(params, params.slabs[half.slab], half.position + i)] = half.moment;
    }
  }

 private:
  /// TMA stores of all buffers that begin inside the slab; TMA leaves out what lies beyond it, or beyond K.
  /// It would not leave out the next convolution group: of channels that end amid the 64, threads store.
  CUTLASS_DEVICE static void store_channels_first(KernelParams<Traits> const& params, HalfTile const& half,
                                                  char const* staging) {
    if (half.channel >= half.end) return;
    if (half.end < params.k && half.end - half.channel < 64) {
      store_group_end(params, half, staging);
      return;
    }
    if (threadIdx.x % 32 != 0) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < half.valid; first += kPanelPositions<Stored>) {
      cute::SM90_TMA_STORE_3D::copy(&params.maps[half.slab].a,
                                    staging + first / kPanelPositions<Stored> * kStageBytes,
                                    half.position + first, half.channel, half.n);
    }
  }

  /// Channels up to half.end, in chunks of positions: slabs begin and end with whole ones.
  CUTLASS_DEVICE static void store_group_end(KernelParams<Traits> const& params, HalfTile const& half,
                                             char const* staging) {
    int const chunks = half.valid / kVector, channels = half.end - half.channel;
    int const first = pixel_of(params, params.slabs[half.slab], half.position);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x % 32; i < channels * chunks; i += 32) {
      int const channel = i / chunks, chunk = i % chunks;
      std::int64_t const row =
          (std::int64_t(half.n) * params.k + half.channel + channel) * pixels(params) + first;
      *reinterpret_cast<uint4*>(reinterpret_cast<Stored*>(params.a) + row + chunk * kVector) =
          *reinterpret_cast<uint4 const*>(staging + chunk / 8 * kStageBytes + channel * 128 +
                                          ((chunk % 8) ^ (channel % 8)) * 16);
    }
  }

  CUTLASS_DEVICE static cutlass::Array<Stored, kVector> load_chunk(char const* address) {
    uint4 const word = *reinterpret_cast<uint4 const*>(address);
    return reinterpret_cast<cutlass::Array<Stored, kVector> const&>(word);
  }

  /// Merges kVector neighbouring channels, whose counts are equal, into granules, and those of neighbouring
  /// chunks where a granule is wider.
  CUTLASS_DEVICE static void write_chunk_moments(KernelParams<Traits> const& params, HalfTile const& half,
                                                 int channel, RunningMoments (&moments)[kVector],
                                                 bool first_row) {
    int const granule = 1 << params.granule_shift;
    CUTLASS_PRAGMA_UNROLL
    for (int width = 1; width < kVector; width *= 2) {
      if (granule <= width) break;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; i += 2 * width) moments[i].merge(moments[i + width]);
    }
    for (int width = kVector; width < granule; width *= 2) {
      moments[0].merge(moments[0].from_lane(width / kVector));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (first_row && (channel + i) % granule == 0 && channel + i < half.end) {
        write_moments(params, half, channel + i, moments[i]);
      }
    }
  }

  CUTLASS_DEVICE static void write_moments(KernelParams<Traits> const& params, HalfTile const& half,
                                           int channel, RunningMoments const& moments) {
    std::int64_t const row = std::int64_t(half.n) * params.moments + half.moment;
    params.part[row * (params.k >> params.granule_shift) + (channel >> params.granule_shift)] =
        make_float2(moments.mean, moments.m2);
  }
};

}  // namespace upconv3d::cuda
