// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_depthwise: a pass of conv_transpose_direct, one input channel to each output channel,
/// stride 2 and as many taps along each axis. Twice: for the moments, then from them to y.
///
///   x      [N,C,D,H,W] or [N,D,H,W,C]  T      read around cells of the output
///   w      [C,1,T,R,S]                 T      to shared memory as float; of k3 on to registers
///   part   [N,tiles,K,2]               float  moments pass: (mean, M2) of before(conv), as float, not
///   rounded counts [tiles]                     int32  positions of each tile table  [3,N,K] float  output
///   pass: mean, scale, shift y      [N,K,Z,P,Q] or [N,Z,P,Q,K]  T      output pass: written once
///
/// A thread owns one cell along depth and width (core/direct_tiling.hpp), whose 8 phases it keeps in
/// registers, and walks along the height: a cell reads inputs of kReach rows, all but one of which it has
/// from the cell before. Taps are multiplied in their order, one after the other, so both passes see the same
/// bits. No atomics: results repeat bit for bit.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/direct_pass.cuh"

namespace upconv3d::cuda {

inline constexpr int kPhases = 8;

/// 0 <= index < end.
__device__ __forceinline__ bool is_below(int index, int end) {
  return static_cast<unsigned>(index) < static_cast<unsigned>(end);
}

/// Blocks of a multiprocessor that registers are to allow. Of k3 a thread holds 27 weights per channel, of k5
/// 27 inputs, of k7 64; and activations other than ReLU take some.
template <int kTaps, int kChannels, bool kPlain>
inline constexpr int kDepthwiseBlocks = kTaps == 7   ? 2
                                        : kTaps == 5 ? 3
                                                     : (kChannels == 1 ? 5 : (kPlain ? 4 : 3));

/// The weights of a block's channels: [taps/kTogether][lanes_c][kTogether][kChannels] float, zero behind the
/// last tap.
template <int kTaps, int kChannels>
struct DepthwiseWeights {
  static constexpr int kVolume = kTaps * kTaps * kTaps;
  static constexpr int kTogether = 4 / kChannels;  // taps that 16 bytes hold
  static constexpr int kLoads = (kVolume + kTogether - 1) / kTogether;

  /// To shared memory. The caller synchronizes.
  template <class T>
  static __device__ __forceinline__ void stage(const DirectArgs<T>& args, int lane_begin, float* shared) {
    const int row = args.lanes_c * 4;
    for (int i = static_cast<int>(threadIdx.x); i < kLoads * row; i += kDirectThreads) {
      const int tap = i / row * kTogether + i % 4 / kChannels;
      const int channel = (lane_begin + i % row / 4) * kChannels + i % kChannels;
      const bool valid = tap < kVolume && channel < args.k;
      const std::int64_t at = channel * args.w_strides[0] + tap / (kTaps * kTaps) * args.w_strides[2] +
                              tap / kTaps % kTaps * args.w_strides[3] + tap % kTaps * args.w_strides[4];
      shared[i] = valid ? to_stat(args.w[at]) : 0.f;
    }
  }
};

/// The inputs of a cell: kReach rows of kReach columns of as many planes, the newest of each first.
template <class T, int kTaps, int kChannels>
struct InputWindow {
  static constexpr int kReach = (kTaps + 1) / 2;
  const T* row;                 // of the next input row, at the cell's own column and plane
  int next;                     // that row's index
  bool inside[kReach][kReach];  // [plane][column] whether inputs of any row exist there
  // The next row, on its way: as machine words, which are not touched before they are needed.
  using Waiting = Word<kChannels * sizeof(T)>;
  Waiting waiting[kReach][kReach];
  float x[kReach][kReach][kReach][kChannels] = {};  // [plane][row][column][channel]

  __device__ __forceinline__ InputWindow(const DirectArgs<T>& args, const DirectShare& share, int channel,
                                         bool active) {
    next = share.run_begin - (kReach - 1);
    row = args.x + share.sample * args.x_sample +
          (static_cast<std::int64_t>(channel) * args.x_channel +
           static_cast<std::int64_t>(share.cell_z) * args.x_axis[0] +
           static_cast<std::int64_t>(next) * args.x_axis[1] +
           static_cast<std::int64_t>(share.cell_q) * args.x_axis[2]);
#pragma unroll
    for (int m = 0; m < kReach * kReach; ++m) {
      const int z = share.cell_z - m / kReach, q = share.cell_q - m % kReach;
      inside[m / kReach][m % kReach] = active && is_below(z, args.in[0]) && is_below(q, args.in[2]);
    }
    fetch(args);
#pragma unroll
    for (int m = 0; m < kReach - 1; ++m) advance(args);
  }

  /// Begins to load the row `next`.
  __device__ __forceinline__ void fetch(const DirectArgs<T>& args) {
    const bool exists = is_below(next, args.in[1]);
#pragma unroll
    for (int z = 0; z < kReach; ++z) {
#pragma unroll
      for (int q = 0; q < kReach; ++q) {
        const T* from = row - (z * args.x_axis[0] + q * args.x_axis[2]);
        waiting[z][q] = exists && inside[z][q] ? *reinterpret_cast<const Waiting*>(from) : Waiting{};
      }
    }
  }

  /// Takes in the row that was fetched, and fetches the one after it.
  __device__ __forceinline__ void advance(const DirectArgs<T>& args) {
#pragma unroll
    for (int z = 0; z < kReach; ++z) {
#pragma unroll
      for (int q = 0; q < kReach; ++q) {
        float arrived[kChannels];
        unpack(waiting[z][q], arrived);
#pragma unroll
        for (int l = 0; l < kChannels; ++l) {
#pragma unroll
          for (int m = kReach - 1; m > 0; --m) x[z][m][q][l] = x[z][m - 1][q][l];
          x[z][0][q][l] = arrived[l];
        }
      }
    }
    ++next;
    row += args.x_axis[1];
    fetch(args);
  }

 private:
  static __device__ __forceinline__ void unpack(const Waiting& from, float (&to)[kChannels]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kChannels == 2) {
      // One instruction each: a bfloat16 is a float's upper half.
      to[0] = __uint_as_float(from << 16);
      to[1] = __uint_as_float(from & 0xffff0000u);
    } else {
      Vector<T, kChannels> values;
      memcpy(&values, &from, sizeof(values));
#pragma unroll
      for (int l = 0; l < kChannels; ++l) to[l] = to_stat(values.at[l]);
    }
  }
};

/// The phases of a cell, v[phase*kChannels + channel], by weights in registers or, as they are needed, from
/// shared memory.
template <class T, int kTaps, int kChannels>
struct CellProducts {
  using Weights = DepthwiseWeights<kTaps, kChannels>;
  static constexpr bool kInRegisters = kTaps == 3;
  float4 held[kInRegisters ? Weights::kLoads : 1];
  const float4* shared;  // of this thread's lane
  int step;              // from one load to the next

  __device__ __forceinline__ CellProducts(const float4* weights, int lanes_c, int lane)
      : shared(weights + lane), step(lanes_c) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < Weights::kLoads; ++i) held[i] = shared[i * step];
    }
  }

  __device__ __forceinline__ void add(const InputWindow<T, kTaps, kChannels>& window,
                                      float (&v)[kPhases * kChannels]) const {
    int begin = 0;
    // Hidden from the compiler, which else loads all weights once and has no registers for them.
    if constexpr (!kInRegisters) asm volatile("" : "+r"(begin));
#pragma unroll
    for (int i = 0; i < Weights::kLoads; ++i) {
      const float4 loaded = kInRegisters ? held[i] : shared[begin + i * step];
      const float weight[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int tap = i * Weights::kTogether + j / kChannels, l = j % kChannels;
        if (tap >= Weights::kVolume) break;
        const int t = tap / (kTaps * kTaps), r = tap / kTaps % kTaps, s = tap % kTaps;
        const int phase = (t % 2 * 2 + r % 2) * 2 + s % 2;
        v[phase * kChannels + l] =
            fmaf(window.x[t / 2][r / 2][s / 2][l], weight[j], v[phase * kChannels + l]);
      }
    }
  }
};

/// Where a thread's cell lies in y.
template <class T, int kChannels>
struct CellOutputs {
  unsigned columns = 0;  // bit of each phase whose depth and width lie in y
  T* cell;               // y at phase 0 of cell 0 along the height, which may lie outside

  __device__ __forceinline__ CellOutputs(const DirectArgs<T>& args, const DirectShare& share, int channel,
                                         bool active) {
    const int z = 2 * share.cell_z - args.padding[0], q = 2 * share.cell_q - args.padding[2];
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      const int at_z = z + phase / 4, at_q = q + phase % 2;
      const bool valid = at_z >= 0 && at_z < args.out[0] && at_q >= 0 && at_q < args.out[2];
      if (active && valid) columns |= 1u << phase;
    }
    cell = args.y + share.sample * args.y_sample +
           (static_cast<std::int64_t>(channel) * args.y_channel +
            static_cast<std::int64_t>(z) * args.y_axis[0] + static_cast<std::int64_t>(q) * args.y_axis[2]);
  }

  /// Bit of each phase that lies in y.
  __device__ __forceinline__ unsigned mask(const DirectArgs<T>& args, int cell_p) const {
    constexpr unsigned kFirstRow = 0x33, kSecondRow = 0xcc;
    const int p = 2 * cell_p - args.padding[1];
    if (is_below(p, args.out[1] - 1)) return columns;
    return columns & (is_below(p, args.out[1]) ? kFirstRow : is_below(p + 1, args.out[1]) ? kSecondRow : 0);
  }

  /// Rows of channels.
  __device__ __forceinline__ void store_channels(const DirectArgs<T>& args, int cell_p, unsigned bits,
                                                 const float (&v)[kPhases * kChannels]) const {
    T* const at = cell + static_cast<std::int64_t>(2 * cell_p - args.padding[1]) * args.y_axis[1];
    const auto store = [&](int phase) {
      Vector<T, kChannels> values;
#pragma unroll
      for (int l = 0; l < kChannels; ++l) values.at[l] = from_stat<T>(v[phase * kChannels + l]);
      store_once(
          at + phase / 4 * args.y_axis[0] + phase / 2 % 2 * args.y_axis[1] + phase % 2 * args.y_axis[2],
          values);
    };
    if (bits == (1u << kPhases) - 1) {
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) store(phase);
      return;
    }
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      if ((bits >> phase & 1) != 0) store(phase);
    }
  }

  /// Rows of positions: neighbouring lanes hold neighbouring pairs. Where a pair would lie across words, a
  /// lane stores its second value with the next lane's first. Every thread of the warp must call this.
  __device__ __forceinline__ void store_pairs(const DirectArgs<T>& args, const DirectShare& share, int cell_p,
                                              unsigned bits, const float (&v)[kPhases]) const {
    T* const at = cell + static_cast<std::int64_t>(2 * cell_p - args.padding[1]) * args.y_axis[1];
    const int column = share.slot % args.lanes_q, lane = static_cast<int>(threadIdx.x) % 32;
    const bool has_next = column != args.lanes_q - 1 && lane != 31;
    const bool has_last = column != 0 && lane != 0;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      T* const to = at + pair / 2 * args.y_axis[0] + pair % 2 * args.y_axis[1];
      const bool shifted = reinterpret_cast<std::uintptr_t>(to) % (2 * sizeof(T)) != 0;
      const unsigned mine = bits >> (2 * pair) & 3;
      const float next = __shfl_down_sync(0xffffffffu, v[2 * pair], 1);
      const unsigned next_mine = __shfl_down_sync(0xffffffffu, mine, 1);
      const bool low = (mine & 1) != 0, high = (mine & 2) != 0;
      const bool with_next = shifted && high && has_next && (next_mine & 1) != 0;
      if (with_next || (!shifted && low && high)) {
        Vector<T, 2> values;
        values.at[0] = from_stat<T>(shifted ? v[2 * pair + 1] : v[2 * pair]);
        values.at[1] = from_stat<T>(shifted ? next : v[2 * pair + 1]);
        store_once(to + (shifted ? 1 : 0), values);
      } else if (high) {
        to[1] = from_stat<T>(v[2 * pair + 1]);
      }
      // A shifted first value is stored by the lane before, where that has its second value in y.
      const bool taken = shifted ? has_last && column_before_is_whole(args, share) : high;
      if (low && !taken) to[0] = from_stat<T>(v[2 * pair]);
    }
  }

 private:
  /// Whether the second value of the cell before along the width lies in y.
  __device__ __forceinline__ bool column_before_is_whole(const DirectArgs<T>& args,
                                                         const DirectShare& share) const {
    const int q = 2 * share.cell_q - 1 - args.padding[2];
    return share.cell_q > args.first[2] && q >= 0;
  }
};

/// \param args all of them; table and y, or part and counts
/// \tparam kPlain as of DirectChannels
template <class T, int kTaps, int kChannels, bool kPlain, bool kMoments>
__global__ void __launch_bounds__(kDirectThreads, kDepthwiseBlocks<kTaps, kChannels, kPlain>)
    conv_transpose_depthwise(const __grid_constant__ DirectArgs<T> args) {
  extern __shared__ float4 weights[];
  const DirectShare share = direct_share(args);
  const int channel = (share.lane_begin + share.lane) * kChannels;
  const bool active = channel < args.k && share.cell_z < args.end[0] && share.cell_q < args.end[2];
  DepthwiseWeights<kTaps, kChannels>::stage(args, share.lane_begin, reinterpret_cast<float*>(weights));
  __syncthreads();

  DirectChannels<T, kChannels, kPlain> channels(args, share.sample, channel, !kMoments);
  const CellProducts<T, kTaps, kChannels> products(weights, args.lanes_c, share.lane);
  const CellOutputs<T, kChannels> outputs(args, share, channel, active);
  InputWindow<T, kTaps, kChannels> window(args, share, channel, active);
  const auto convolve = [&](float (&v)[kPhases* kChannels]) {
    window.advance(args);
    channels.begin(v);
    products.add(window, v);
  };
  // Unrolled, the window's rows need not be moved.
  constexpr int kUnrolled = kTaps == 3 && kPlain ? 2 : 1;
  if constexpr (kMoments) {
    PivotMoments<kChannels> moments;
    if (active) {
      float v[kPhases * kChannels];
      convolve(v);
      channels.before(args, v);
      moments.template take<kPhases>(v, outputs.mask(args, share.run_begin));
      if constexpr (kPlain) channels.move_origin(moments.pivot);
#pragma unroll kUnrolled
      for (int cell_p = share.run_begin + 1; cell_p < share.run_end; ++cell_p) {
        convolve(v);
        channels.before(args, v);
        if constexpr (kPlain) {
          moments.template take_distances<kPhases>(v, outputs.mask(args, cell_p));
        } else {
          moments.template take<kPhases>(v, outputs.mask(args, cell_p));
        }
      }
    }
    write_moments(args, share, channel, moments);
  } else {
#pragma unroll kUnrolled
    for (int cell_p = share.run_begin; cell_p < share.run_end; ++cell_p) {
      float v[kPhases * kChannels];
      convolve(v);
      channels.finish(args, v);
      if constexpr (kChannels == 1) {
        outputs.store_pairs(args, share, cell_p, outputs.mask(args, cell_p), v);
      } else {
        outputs.store_channels(args, cell_p, outputs.mask(args, cell_p), v);
      }
    }
  }
}

}  // namespace upconv3d::cuda
