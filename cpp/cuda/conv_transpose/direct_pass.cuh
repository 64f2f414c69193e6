// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the kernels of conv_transpose_direct share: arguments, which outputs a thread owns, moments of what
/// it computes, and the way from the convolution to y.
#pragma once

#include <cstdint>

#include "core/direct_tiling.hpp"
#include "cuda/activation.cuh"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {

template <class T>
struct DirectArgs {
  const T* x;            // [N,C,D,H,W] or [N,D,H,W,C]
  const T* w;            // [C,K/groups,T,R,S]
  const T* bias;         // [K], or null
  const float* table;    // [3,N,K] mean, scale, shift; or null
  float2* part;          // [N,tiles,K] mean and M2
  std::int32_t* counts;  // [tiles]
  T* y;                  // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  // The only activation, and whether the normalization precedes it.
  ActivationParams activation;
  float parameter;  // activation.parameter
  bool norm_first;
  int n, k, group_inputs, group_outputs;
  int in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  std::int64_t x_sample, y_sample;  // elements from sample to sample
  int x_channel, x_axis[3];         // elements from one to the next
  int y_channel, y_axis[3];
  std::int64_t w_strides[5];
  bool channels_first;            // of y, and so of the threads: neighbours lie along the width
  int lanes_c, lanes_q, lanes_z;  // powers of two
  int lanes_c_shift, lanes_q_shift, lanes_z_shift;  // of what
  int first[3], end[3], tile[3], tiles[3];          // cells; end is behind the last
  int tile_count, channel_blocks;
};

/// The outputs of a thread: cells [run_begin, run_end) along the height of one cell along the depth, and of
/// one along the width, or of each lanes_q-th.
struct DirectShare {
  std::int64_t sample;
  int tile, lane, slot;  // lane: of the block's channel vectors; slot: of the threads that share a lane
  int lane_begin;        // the first lane's vector among all of K
  int cell_z, run_begin, run_end, cell_q;
};

/// The box of cells of a block and a thread's part of it. Neighbouring blocks store what lies side by side:
/// the channels of one position, or positions of one channel.
template <class T>
__device__ __forceinline__ DirectShare direct_share(const DirectArgs<T>& args) {
  DirectShare share;
  const unsigned tiles = static_cast<unsigned>(args.tile_count);
  const unsigned channel_blocks = static_cast<unsigned>(args.channel_blocks);
  const unsigned sample = blockIdx.x / (tiles * channel_blocks);
  const unsigned in_sample = blockIdx.x - sample * tiles * channel_blocks;
  share.sample = sample;
  const bool first = args.channels_first;
  const unsigned inner = first ? tiles : channel_blocks;
  const unsigned slow = in_sample / inner, quick = in_sample - slow * inner;
  share.tile = static_cast<int>(first ? quick : slow);
  share.lane_begin = static_cast<int>(first ? slow : quick) * args.lanes_c;

  const int thread = static_cast<int>(threadIdx.x);
  const int slot_shift = args.lanes_q_shift + args.lanes_z_shift;
  share.lane = first ? thread >> slot_shift : thread & (args.lanes_c - 1);
  share.slot = first ? thread & ((1 << slot_shift) - 1) : thread >> args.lanes_c_shift;
  const int tile_q = share.tile % args.tiles[2];
  const int tile_zp = share.tile / args.tiles[2];
  share.cell_q = args.first[2] + tile_q * args.tile[2] + (share.slot & (args.lanes_q - 1));
  share.cell_z = args.first[0] + tile_zp / args.tiles[1] * args.tile[0] + (share.slot >> args.lanes_q_shift);
  share.run_begin = args.first[1] + tile_zp % args.tiles[1] * args.tile[1];
  share.run_end = min(share.run_begin + args.tile[1], args.end[1]);
  return share;
}

/// Output positions of the cells [begin, begin + tile) of an axis.
template <class T>
__device__ __forceinline__ int positions_of_cells(const DirectArgs<T>& args, int axis, int begin) {
  const int cell_end = min(begin + args.tile[axis], args.end[axis]);
  const int from = max(begin * args.stride[axis], args.padding[axis]);
  return min(cell_end * args.stride[axis], args.out[axis] + args.padding[axis]) - from;
}

/// The larger of both; NaN if v is.
__device__ __forceinline__ float at_least(float v, float low) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(low));
  return result;
#else
  return v < low ? low : v;
#endif
}

/// Moments of a thread's values, taken in chunks: as sums of a chunk's distances to the mean of all before
/// it, or, of the first chunk, to that of its first values. What cancels when a chunk's sums become moments
/// is then no more than what the merge adds: its mean's distance to the others'.
template <int kChannels>
struct ChunkedMoments {
  float count = 0.f;
  float mean[kChannels] = {}, m2[kChannels] = {};

  /// Into the chunk.
  /// \param v kRows values of each channel, that of row and channel at [row*kChannels + channel]
  /// \param mask bit of each row that counts
  template <int kRows>
  __device__ __forceinline__ void take(float (&v)[kRows * kChannels], unsigned mask) {
    if (count == 0.f && chunk == 0.f) begin<kRows>(v, mask);
#pragma unroll
    for (int j = 0; j < kRows * kChannels; ++j) v[j] -= mean[j % kChannels];
    take_distances<kRows>(v, mask);
  }

  /// \param v what take's values are, less the mean
  template <int kRows>
  __device__ __forceinline__ void take_distances(const float (&v)[kRows * kChannels], unsigned mask) {
    if (mask == (1u << kRows) - 1) {
      chunk += static_cast<float>(kRows);
#pragma unroll
      for (int j = 0; j < kRows * kChannels; ++j) add(j % kChannels, v[j]);
      return;
    }
    chunk += static_cast<float>(__popc(mask));
#pragma unroll
    for (int j = 0; j < kRows * kChannels; ++j) {
      if ((mask >> (j / kChannels) & 1) != 0) add(j % kChannels, v[j]);
    }
  }

  /// Ends the chunk: merges it with what was before, by Chan, Golub & LeVeque (1979).
  __device__ __forceinline__ void fold() {
    if (chunk == 0.f) return;
    // A division exact to its last bit calls a function, which costs registers.
    const float total = count + chunk, each = __fdividef(1.f, chunk), share = __fdividef(chunk, total);
    const float weight = count * share;
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      const float delta = sum[channel] * each;
      // In this order a weight of 0 silences a delta whose square would overflow.
      m2[channel] += (square[channel] - sum[channel] * delta) + (delta * weight) * delta;
      mean[channel] += delta * share;
      sum[channel] = square[channel] = 0.f;
    }
    count = total;
    chunk = 0.f;
  }

  __device__ __forceinline__ Moments<float, kChannels> moments() const {
    Moments<float, kChannels> result;
    result.count = count;
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      result.mean[channel] = mean[channel];
      result.m2[channel] = m2[channel] < 0.f ? 0.f : m2[channel];
    }
    return result;
  }

 private:
  float chunk = 0.f;
  float sum[kChannels] = {}, square[kChannels] = {};

  __device__ __forceinline__ void add(int channel, float distance) {
    sum[channel] += distance;
    square[channel] = fmaf(distance, distance, square[channel]);
  }

  template <int kRows>
  __device__ __forceinline__ void begin(const float (&v)[kRows * kChannels], unsigned mask) {
    if (mask == 0) return;
    const float share = __fdividef(1.f, static_cast<float>(__popc(mask)));
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      float total = 0.f;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if ((mask >> row & 1) != 0) total += v[row * kChannels + channel] * share;
      }
      mean[channel] = total;
    }
  }
};

/// The channels of a thread: what their sums begin with, and what becomes of these.
/// \tparam kPlain there is no activation but ReLU. The code of all others costs registers where it does not
/// run. Without it, sums begin with bias - origin, which spares subtracting the mean.
template <class T, int kChannels, bool kPlain>
struct DirectChannels {
  int channel;  // the first one; all of them are below K, or none
  float bias[kChannels];
  float origin[kChannels];  // the mean; not kPlain: 0
  float mean[kChannels];    // not kPlain
  float scale[kChannels], shift[kChannels];

  __device__ __forceinline__ DirectChannels(const DirectArgs<T>& args, std::int64_t sample, int first,
                                            bool normalized)
      : channel(first) {
    const std::int64_t plane = static_cast<std::int64_t>(args.n) * args.k;
#pragma unroll
    for (int l = 0; l < kChannels; ++l) {
      const bool valid = first + l < args.k;
      const bool has_table = valid && normalized && args.table != nullptr;
      const float* row = args.table + sample * args.k + first + l;
      mean[l] = has_table ? row[0] : 0.f;
      scale[l] = has_table ? row[plane] : 1.f;
      shift[l] = has_table ? row[2 * plane] : 0.f;
      origin[l] = kPlain ? mean[l] : 0.f;
      bias[l] = valid && args.bias != nullptr ? to_stat(args.bias[first + l]) : 0.f;
    }
  }

  __device__ __forceinline__ void move_origin(const float (&to)[kChannels]) {
#pragma unroll
    for (int l = 0; l < kChannels; ++l) origin[l] = to[l];
  }

  template <int kCount>
  __device__ __forceinline__ void begin(float (&v)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = bias[j % kChannels] - origin[j % kChannels];
  }

  /// From sums to what the moments are taken of, less the origin.
  template <int kCount>
  __device__ __forceinline__ void before(const DirectArgs<T>& args, float (&v)[kCount]) const {
    if (!args.norm_first) apply(args, v, true);
  }

  /// From sums to y.
  template <int kCount>
  __device__ __forceinline__ void finish(const DirectArgs<T>& args, float (&v)[kCount]) const {
    if (!kPlain && args.norm_first) normalize(v);
    if (!kPlain || !args.norm_first) apply(args, v, true);
    if (kPlain || !args.norm_first) normalize(v);
    if (kPlain && args.norm_first) apply(args, v, false);
  }

 private:
  /// \param from_origin whether v is what it stands for less the origin
  template <int kCount>
  __device__ __forceinline__ void apply(const DirectArgs<T>& args, float (&v)[kCount],
                                        bool from_origin) const {
    if (args.activation.kind == Activation::kNone) return;
    if constexpr (kPlain) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        v[j] = at_least(v[j], from_origin ? -origin[j % kChannels] : 0.f);
      }
    } else {
      activate(args.activation, args.parameter, v,
               [&](int j) { return activation_parameter<T>(args.activation, channel + j % kChannels); });
    }
  }

  template <int kCount>
  __device__ __forceinline__ void normalize(float (&v)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float distance = kPlain ? v[j] : v[j] - mean[j % kChannels];
      v[j] = fmaf(distance, scale[j % kChannels], shift[j % kChannels]);
    }
  }
};

/// The partial moments of a block, written by the first thread of each lane; and how many positions they are
/// of. Every thread of the block must call this.
template <class T, int kChannels>
__device__ __forceinline__ void write_moments(const DirectArgs<T>& args, const DirectShare& share,
                                              int channel, const ChunkedMoments<kChannels>& own) {
  Moments<float, kChannels> merged = own.moments();
  const int thread = static_cast<int>(threadIdx.x);
  merge_slots(merged, thread, share.slot, args.lanes_q * args.lanes_z,
              args.channels_first ? 1 : args.lanes_c);
  if (share.slot != 0) return;
#pragma unroll
  for (int l = 0; l < kChannels; ++l) {
    if (channel + l >= args.k) break;
    args.part[(share.sample * args.tile_count + share.tile) * args.k + channel + l] =
        make_float2(merged.mean[l], merged.m2[l]);
  }
  if (share.sample == 0 && share.lane_begin == 0 && share.lane == 0) {
    // The thread with slot 0 owns the tile's first cells.
    args.counts[share.tile] = positions_of_cells(args, 0, share.cell_z) *
                              positions_of_cells(args, 1, share.run_begin) *
                              positions_of_cells(args, 2, share.cell_q);
  }
}

}  // namespace upconv3d::cuda
