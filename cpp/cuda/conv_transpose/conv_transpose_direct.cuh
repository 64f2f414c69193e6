// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_any_taps: a pass of conv_transpose_direct for every stride, kernel, dilation and ratio of
/// channels. Twice: for the moments, then from them to y.
///
///   x      [N,C,D,H,W] or [N,D,H,W,C]  T      read once per tap and channel of the group
///   w      [C,K/groups,T,R,S]          T      to shared memory as float
///   part   [N,tiles,K,2]               float  moments pass: (mean, M2) of before(conv), as float, not
///   rounded counts [tiles]                     int32  positions of each tile table  [3,N,K] float  output
///   pass: mean, scale, shift y      [N,K,Z,P,Q] or [N,Z,P,Q,K]  T      output pass: written once
///
/// A thread computes kChannels channels of kDirectColumns cells along the width, one phase of the stride
/// after the other: cells of a phase are reached by the same taps (core/direct_tiling.hpp), which shared
/// memory lists. Products are added in the order of taps and channels; no atomics: results repeat bit for
/// bit.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/direct_pass.cuh"

namespace upconv3d::cuda {

/// Blocks of a multiprocessor that registers are to allow: for sums of 8 channels by 4 columns, and
/// addresses.
inline constexpr int kAnyTapsBlocks = 3;

/// The taps that reach a phase of an axis: tap begin + i*tap_step reads input cell + input + i*input_step,
/// i < count. The steps are the axis's alone.
struct PhaseTaps {
  int begin, count, input, unused;
};

__device__ __forceinline__ int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// Taps by axis and phase, in shared memory.
template <class T>
struct TapLists {
  PhaseTaps* of_axis[3];
  int tap_step[3], input_step[3];

  __device__ __forceinline__ TapLists(const DirectArgs<T>& args, PhaseTaps* shared) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      of_axis[axis] = shared;
      shared += args.stride[axis];
      const int divisor = greatest_common_divisor(args.stride[axis], args.dilation[axis]);
      tap_step[axis] = args.stride[axis] / divisor;
      input_step[axis] = -(args.dilation[axis] / divisor);
    }
  }

  /// Fills the lists. The caller synchronizes.
  __device__ __forceinline__ void fill(const DirectArgs<T>& args) const {
    for (int axis = 0; axis < 3; ++axis) {
      const int stride = args.stride[axis], dilation = args.dilation[axis];
      for (int phase = static_cast<int>(threadIdx.x); phase < stride; phase += kDirectThreads) {
        PhaseTaps taps = {0, 0, 0, 0};
        for (int tap = 0; tap < min(tap_step[axis], args.kernel[axis]); ++tap) {
          const int distance = phase - tap * dilation;
          if (distance % stride != 0) continue;
          taps = {tap, (args.kernel[axis] - 1 - tap) / tap_step[axis] + 1, distance / stride, 0};
          break;
        }
        of_axis[axis][phase] = taps;
      }
    }
  }
};

/// The weights of a block's channels to [group_inputs][taps][lanes_c][kChannels] float. The caller
/// synchronizes.
template <class T, int kChannels>
__device__ __forceinline__ void stage_weights(const DirectArgs<T>& args, int lane_begin, float* shared) {
  const int taps = args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int row = args.lanes_c * kChannels;
  for (int i = static_cast<int>(threadIdx.x); i < args.group_inputs * taps * row; i += kDirectThreads) {
    const int channel = lane_begin * kChannels + i % row;
    const int tap = i / row % taps, c = i / row / taps;
    if (channel >= args.k) {
      shared[i] = 0.f;
      continue;
    }
    const int group = channel / args.group_outputs;
    const std::int64_t at = (static_cast<std::int64_t>(group) * args.group_inputs + c) * args.w_strides[0] +
                            (channel - group * args.group_outputs) * args.w_strides[1] +
                            tap / (args.kernel[1] * args.kernel[2]) * args.w_strides[2] +
                            tap / args.kernel[2] % args.kernel[1] * args.w_strides[3] +
                            tap % args.kernel[2] * args.w_strides[4];
    shared[i] = to_stat(args.w[at]);
  }
}

/// What a thread multiplies.
template <class T, int kChannels>
struct PhaseProducts {
  const T* x;            // of the sample, at the first input channel of the thread's group
  const float* weights;  // of the thread's lane
  const TapLists<T>& lists;
  int row;  // floats from a tap to the next

  /// Adds to v[column*kChannels + channel] what reaches the phase `phase` of the cells `cell`.
  __device__ __forceinline__ void add(const DirectArgs<T>& args, const int (&cell)[3], const int (&phase)[3],
                                      float (&v)[kDirectColumns * kChannels]) const {
    const PhaseTaps depth = lists.of_axis[0][phase[0]], height = lists.of_axis[1][phase[1]],
                    width = lists.of_axis[2][phase[2]];
    for (int a = 0; a < depth.count; ++a) {
      const int z = cell[0] + depth.input + a * lists.input_step[0];
      if (z < 0 || z >= args.in[0]) continue;
      for (int b = 0; b < height.count; ++b) {
        const int p = cell[1] + height.input + b * lists.input_step[1];
        if (p < 0 || p >= args.in[1]) continue;
        const int first =
            ((depth.begin + a * lists.tap_step[0]) * args.kernel[1] + height.begin + b * lists.tap_step[1]) *
                args.kernel[2] +
            width.begin;
        const T* const line = x + z * args.x_axis[0] + p * args.x_axis[1];
        for (int e = 0; e < width.count; ++e) {
          const int q = cell[2] + width.input + e * lists.input_step[2];
          add_tap(args, line, q, weights + (first + e * lists.tap_step[2]) * row, v);
        }
      }
    }
  }

 private:
  /// \param line x at the tap's row
  __device__ __forceinline__ void add_tap(const DirectArgs<T>& args, const T* line, int q,
                                          const float* weight, float (&v)[kDirectColumns * kChannels]) const {
    const T* from[kDirectColumns];
    bool valid[kDirectColumns];
#pragma unroll
    for (int j = 0; j < kDirectColumns; ++j) {
      const int column = q + j * args.lanes_q;
      valid[j] = column >= 0 && column < args.in[2];
      from[j] = line + (valid[j] ? column : 0) * args.x_axis[2];
    }
    const int channel_step = args.kernel[0] * args.kernel[1] * args.kernel[2] * row;
    for (int c = 0; c < args.group_inputs; ++c, weight += channel_step) {
      const auto w = load_vector<kChannels, false>(weight);
      float values[kDirectColumns];
#pragma unroll
      for (int j = 0; j < kDirectColumns; ++j) {
        values[j] = valid[j] ? to_stat(from[j][c * args.x_channel]) : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kDirectColumns; ++j) {
        // Not by zero, of which an infinite weight would make NaN.
        if (!valid[j]) continue;
#pragma unroll
        for (int l = 0; l < kChannels; ++l)
          v[j * kChannels + l] = fmaf(values[j], w.at[l], v[j * kChannels + l]);
      }
    }
  }
};

/// y at kDirectColumns positions, from `to` on by `step` elements.
/// \param mask bit of each position that there is
template <class T, int kChannels>
__device__ __forceinline__ void store_columns(T* to, int step, int channel_step, unsigned mask,
                                              const float (&v)[kDirectColumns * kChannels]) {
#pragma unroll
  for (int j = 0; j < kDirectColumns; ++j) {
    if ((mask >> j & 1) == 0) continue;
    T* const at = to + j * step;
    Vector<T, kChannels> values;
#pragma unroll
    for (int l = 0; l < kChannels; ++l) values.at[l] = from_stat<T>(v[j * kChannels + l]);
    if (channel_step == 1) {
      store_once(at, values);
      continue;
    }
#pragma unroll
    for (int l = 0; l < kChannels; ++l) at[l * channel_step] = values.at[l];
  }
}

/// \param args all of them; table and y, or part and counts
/// \tparam kPlain as of DirectChannels
template <class T, int kChannels, bool kPlain, bool kMoments>
__global__ void __launch_bounds__(kDirectThreads, kAnyTapsBlocks)
    conv_transpose_any_taps(const __grid_constant__ DirectArgs<T> args) {
  extern __shared__ float4 shared[];
  const DirectShare share = direct_share(args);
  const int channel = (share.lane_begin + share.lane) * kChannels;
  const TapLists<T> lists(args, reinterpret_cast<PhaseTaps*>(shared));
  lists.fill(args);
  float* const weights =
      reinterpret_cast<float*>(lists.of_axis[0] + args.stride[0] + args.stride[1] + args.stride[2]);
  stage_weights<T, kChannels>(args, share.lane_begin, weights);
  __syncthreads();
  if constexpr (!kMoments) wait_for_kernel_before();  // for the table

  const bool active = channel < args.k && share.cell_z < args.end[0];
  const DirectChannels<T, kChannels, kPlain> channels(args, share.sample, channel, !kMoments);
  const std::int64_t input = static_cast<std::int64_t>(channel / args.group_outputs) * args.group_inputs;
  const PhaseProducts<T, kChannels> products = {
      args.x + share.sample * args.x_sample + input * args.x_channel, weights + share.lane * kChannels, lists,
      args.lanes_c * kChannels};
  T* const y = args.y + share.sample * args.y_sample + static_cast<std::int64_t>(channel) * args.y_channel;
  ChunkedMoments<kChannels> moments;
  const int phases = args.stride[0] * args.stride[1] * args.stride[2];
  for (int cell_p = share.run_begin; active && cell_p < share.run_end; ++cell_p) {
    const int cell[3] = {share.cell_z, cell_p, share.cell_q};
    for (int i = 0; i < phases; ++i) {
      const int zp = i / args.stride[2];
      const int phase[3] = {zp / args.stride[1], zp % args.stride[1], i % args.stride[2]};
      int at[3];
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        at[axis] = cell[axis] * args.stride[axis] + phase[axis] - args.padding[axis];
      }
      if (at[0] < 0 || at[0] >= args.out[0] || at[1] < 0 || at[1] >= args.out[1]) continue;
      const int step = args.lanes_q * args.stride[2];
      unsigned mask = 0;
#pragma unroll
      for (int j = 0; j < kDirectColumns; ++j) {
        const int column = at[2] + j * step;
        if (column >= 0 && column < args.out[2] && cell[2] + j * args.lanes_q < args.end[2]) mask |= 1u << j;
      }
      float v[kDirectColumns * kChannels];
      channels.begin(v);
      products.add(args, cell, phase, v);
      if constexpr (kMoments) {
        channels.before(args, v);
        moments.template take<kDirectColumns>(v, mask);
        moments.fold();
      } else {
        channels.finish(args, v);
        store_columns<T, kChannels>(
            y + (at[0] * args.y_axis[0] + at[1] * args.y_axis[1] + at[2] * args.y_axis[2]),
            step * args.y_axis[2], args.y_channel, mask, v);
      }
    }
  }
  if constexpr (kMoments) write_moments(args, share, channel, moments);
}

}  // namespace upconv3d::cuda
