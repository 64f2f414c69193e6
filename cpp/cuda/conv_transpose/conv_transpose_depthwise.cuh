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

/// How conv_transpose_depthwise divides its work, by taps along an axis and channels of a thread.
template <class T, int kTaps_, int kChannels_, bool kPlain>
struct DepthwiseTraits {
  static constexpr int kTaps = kTaps_, kChannels = kChannels_;
  static constexpr int kVolume = kTaps * kTaps * kTaps;
  static constexpr int kReach = (kTaps + 1) / 2;    // inputs along an axis that reach a cell
  static constexpr bool kWeightsHeld = kTaps == 3;  // in registers
  // Cells along the height at a time. Of weights in shared memory, whose bandwidth is a quarter of what the
  // multipliers take, each is to be multiplied four times; those held are not read, but two rows on their way
  // hide more of memory's latency than one.
  static constexpr int kStep = kWeightsHeld ? 2 : 4;
  static constexpr int kRows = kReach - 1 + kStep;
  // Where there are registers to do so.
  static constexpr bool kFetchesAhead = kTaps == 3 || (kTaps == 5 && sizeof(T) == 2);
  static constexpr int kTogether = 4 / kChannels;  // taps that 16 bytes hold
  static constexpr int kLoads = (kVolume + kTogether - 1) / kTogether;
  // Blocks of a multiprocessor that registers are to allow.
  static constexpr int kHeldBlocks = kChannels == 1 ? (kPlain ? 5 : 4) : (kPlain && sizeof(T) == 2 ? 4 : 3);
  static constexpr int kBlocks = kWeightsHeld ? kHeldBlocks : kTaps == 5 ? 3 : 2;
};

/// 0 <= index < end.
__device__ __forceinline__ bool is_below(int index, int end) {
  return static_cast<unsigned>(index) < static_cast<unsigned>(end);
}

/// The weights of a block's channels to shared memory, [kLoads][lanes_c][kTogether][kChannels] float, zero
/// behind the last tap. The caller synchronizes.
template <class Traits, class T>
__device__ __forceinline__ void stage_depthwise_weights(const DirectArgs<T>& args, int lane_begin,
                                                        float* shared) {
  constexpr int kTaps = Traits::kTaps, kChannels = Traits::kChannels, kLast = Traits::kVolume - 1;
  // Rows are parts of the block's threads, so that a thread stays with its channel: no row is longer, and
  // `loads` at least 1, since lanes_c is at most kMaxDepthwiseLanes, which the launch checks.
  const int row_shift = args.lanes_c_shift + 2, thread = static_cast<int>(threadIdx.x);
  const int lane = (thread & ((1 << row_shift) - 1)) >> 2;
  const int channel = (lane_begin + lane) * kChannels + thread % kChannels;
  const T* const from = args.w + min(channel, args.k - 1) * args.w_strides[0];
  const int loads = kDirectThreads >> row_shift;  // at a time
  constexpr int kInFlight = 8;
  for (int begin = thread >> row_shift; begin < Traits::kLoads; begin += kInFlight * loads) {
    T values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      // Behind the last one it is read again, which waits for nothing.
      const int tap = min((begin + i * loads) * Traits::kTogether + thread % 4 / kChannels, kLast);
      values[i] = from[tap / (kTaps * kTaps) * args.w_strides[2] + tap / kTaps % kTaps * args.w_strides[3] +
                       tap % kTaps * args.w_strides[4]];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int load = begin + i * loads;
      const bool valid = load * Traits::kTogether + thread % 4 / kChannels <= kLast && channel < args.k;
      if (load < Traits::kLoads) {
        shared[(load << row_shift) + (thread & ((1 << row_shift) - 1))] = valid ? to_stat(values[i]) : 0.f;
      }
    }
  }
}

/// The inputs of kStep cells along the height.
template <class T, class Traits>
struct InputWindow {
  static constexpr int kReach = Traits::kReach, kChannels = Traits::kChannels;
  // As machine words, which are not touched before they are needed.
  using Waiting = Word<kChannels * sizeof(T)>;
  const T* row;                 // of the input row `next`, at the cell's own column and plane
  int next;                     // the first row that is not in x
  bool inside[kReach][kReach];  // [plane][column] whether inputs of any row exist there
  Waiting waiting[Traits::kStep][kReach][kReach];          // the next rows, on their way
  float x[kReach][Traits::kRows][kReach][kChannels] = {};  // plane and column less m, rows upwards

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
    fetch<kReach - 1>(args);
    take<kReach - 1>();
    if constexpr (Traits::kFetchesAhead) fetch<Traits::kStep>(args);
  }

  /// To the next kStep cells.
  __device__ __forceinline__ void advance(const DirectArgs<T>& args) {
    if constexpr (!Traits::kFetchesAhead) fetch<Traits::kStep>(args);
    take<Traits::kStep>();
    if constexpr (Traits::kFetchesAhead) fetch<Traits::kStep>(args);
  }

 private:
  /// Begins to load the next kCount rows.
  template <int kCount>
  __device__ __forceinline__ void fetch(const DirectArgs<T>& args) {
#pragma unroll
    for (int i = 0; i < kCount; ++i, ++next, row += args.x_axis[1]) {
      const bool exists = is_below(next, args.in[1]);
#pragma unroll
      for (int z = 0; z < kReach; ++z) {
#pragma unroll
        for (int q = 0; q < kReach; ++q) {
          const T* from = row - (z * args.x_axis[0] + q * args.x_axis[2]);
          waiting[i][z][q] = exists && inside[z][q] ? *reinterpret_cast<const Waiting*>(from) : Waiting{};
        }
      }
    }
  }

  /// Moves the last kReach - 1 rows to the front, and those fetched behind them; the rows before the first
  /// cell to where the next time finds the last ones.
  template <int kCount>
  __device__ __forceinline__ void take() {
    constexpr bool kMoves = kCount == Traits::kStep;
    constexpr int kTo = kMoves ? kReach - 1 : Traits::kStep;
#pragma unroll
    for (int z = 0; z < kReach; ++z) {
#pragma unroll
      for (int q = 0; q < kReach; ++q) {
#pragma unroll
        for (int i = 0; kMoves && i < kReach - 1; ++i) {
#pragma unroll
          for (int l = 0; l < kChannels; ++l) x[z][i][q][l] = x[z][i + Traits::kStep][q][l];
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) unpack(waiting[i][z][q], x[z][kTo + i][q]);
      }
    }
  }

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

/// Adds up the phases of kStep cells, v[cell][phase*kChannels + channel], by weights in registers or, as they
/// are needed, from shared memory.
template <class T, class Traits>
struct CellProducts {
  static constexpr int kChannels = Traits::kChannels, kTaps = Traits::kTaps;
  float4 held[Traits::kWeightsHeld ? Traits::kLoads : 1];
  const float4* shared;  // of this thread's lane
  int step;              // from one load to the next

  __device__ __forceinline__ CellProducts(const float4* weights, int lanes_c, int lane)
      : shared(weights + lane), step(lanes_c) {
    if constexpr (Traits::kWeightsHeld) {
#pragma unroll
      for (int i = 0; i < Traits::kLoads; ++i) held[i] = shared[i * step];
    }
  }

  __device__ __forceinline__ void add(const InputWindow<T, Traits>& window,
                                      float (&v)[Traits::kStep][kPhases * kChannels]) const {
    int begin = 0;
    // Hidden from the compiler, which else loads all weights once and has no registers for them.
    if constexpr (!Traits::kWeightsHeld) asm volatile("" : "+r"(begin));
#pragma unroll
    for (int i = 0; i < Traits::kLoads; ++i) {
      const float4 loaded = Traits::kWeightsHeld ? held[i] : shared[begin + i * step];
      const float weight[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int tap = i * Traits::kTogether + j / kChannels, l = j % kChannels;
        if (tap >= Traits::kVolume) break;
        const int t = tap / (kTaps * kTaps), r = tap / kTaps % kTaps, s = tap % kTaps;
        const int at = ((t % 2 * 2 + r % 2) * 2 + s % 2) * kChannels + l;
#pragma unroll
        for (int cell = 0; cell < Traits::kStep; ++cell) {
          const int row = Traits::kReach - 1 + cell - r / 2;
          v[cell][at] = fmaf(window.x[t / 2][row][s / 2][l], weight[j], v[cell][at]);
        }
      }
    }
  }
};

/// Where a thread's cells lie in y.
template <class T, int kChannels>
struct CellOutputs {
  static constexpr unsigned kAll = (1u << kPhases) - 1;
  unsigned columns = 0;  // bit of each phase whose depth and width lie in y
  T* cell;               // y at phase 0 of cell 0 along the height, which may lie outside
  // Of NCDHW, four bits each for the four rows of a cell: two values of a lane make a word where that lies on
  // its boundary, else, "shifted", the second one and the next lane's first do.
  static constexpr int kPairs = 4, kLows = 8, kHighs = 12;  // first bits of pairs and single values to store
  unsigned stores = 0;                                      // and of shifted, 0

  __device__ __forceinline__ CellOutputs(const DirectArgs<T>& args, const DirectShare& share, int channel,
                                         bool active) {
    const int z = 2 * share.cell_z - args.padding[0], q = 2 * share.cell_q - args.padding[2];
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      const bool valid = is_below(z + phase / 4, args.out[0]) && is_below(q + phase % 2, args.out[2]);
      if (active && valid) columns |= 1u << phase;
    }
    cell = args.y + share.sample * args.y_sample +
           (static_cast<std::int64_t>(channel) * args.y_channel +
            static_cast<std::int64_t>(z) * args.y_axis[0] + static_cast<std::int64_t>(q) * args.y_axis[2]) -
           static_cast<std::int64_t>(args.padding[1]) * args.y_axis[1];
    if (kChannels == 1 && args.channels_first) pair_up(args, share);
  }

  /// Bit of each phase that lies in y.
  __device__ __forceinline__ unsigned mask(const DirectArgs<T>& args, int cell_p) const {
    constexpr unsigned kFirstRow = 0x33, kSecondRow = 0xcc;
    const int p = 2 * cell_p - args.padding[1];
    if (is_below(p, args.out[1] - 1)) return columns;
    return columns & (is_below(p, args.out[1]) ? kFirstRow : is_below(p + 1, args.out[1]) ? kSecondRow : 0);
  }

  /// Rows of channels.
  __device__ __forceinline__ void store_channels(const DirectArgs<T>& args, int cell_p,
                                                 const float (&v)[kPhases * kChannels]) const {
    T* const at = cell + static_cast<std::int64_t>(2 * cell_p) * args.y_axis[1];
    const auto store = [&](int phase) {
      Vector<T, kChannels> values;
#pragma unroll
      for (int l = 0; l < kChannels; ++l) values.at[l] = from_stat<T>(v[phase * kChannels + l]);
      store_once(
          at + phase / 4 * args.y_axis[0] + phase / 2 % 2 * args.y_axis[1] + phase % 2 * args.y_axis[2],
          values);
    };
    const unsigned bits = mask(args, cell_p);
    if (bits == kAll) {
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) store(phase);
      return;
    }
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      if ((bits >> phase & 1) != 0) store(phase);
    }
  }

  /// Rows of positions. Every thread of the warp must call this.
  __device__ __forceinline__ void store_pairs(const DirectArgs<T>& args, int cell_p,
                                              const float (&v)[kPhases]) const {
    T* const at = cell + static_cast<std::int64_t>(2 * cell_p) * args.y_axis[1];
    const int p = 2 * cell_p - args.padding[1];
    constexpr unsigned kFirstRow = 0x5550, kSecondRow = 0xaaa0;
    const unsigned due = stores & ((is_below(p, args.out[1]) ? kFirstRow : 0) |
                                   (is_below(p + 1, args.out[1]) ? kSecondRow : 0));
#pragma unroll
    for (int row = 0; row < kPhases / 2; ++row) {
      T* const to = at + row / 2 * args.y_axis[0] + row % 2 * args.y_axis[1];
      const float low = v[2 * row], high = v[2 * row + 1];
      const float next = __shfl_down_sync(0xffffffffu, low, 1);
      const bool moves = (stores >> row & 1) != 0;
      if (due >> (kPairs + row) & 1) {
        Vector<T, 2> values;
        values.at[0] = from_stat<T>(moves ? high : low);
        values.at[1] = from_stat<T>(moves ? next : high);
        store_once(to + (moves ? 1 : 0), values);
      }
      if ((due >> (kLows + row) & 0x11) != 0) {
        if (due >> (kLows + row) & 1) to[0] = from_stat<T>(low);
        if (due >> (kHighs + row) & 1) to[1] = from_stat<T>(high);
      }
    }
  }

 private:
  /// Finds who stores what. Two rows on along the height, or a cell, nothing has changed.
  __device__ __forceinline__ void pair_up(const DirectArgs<T>& args, const DirectShare& share) {
    const unsigned before = __shfl_up_sync(0xffffffffu, columns, 1);
    const unsigned behind = __shfl_down_sync(0xffffffffu, columns, 1);
    const int column = share.slot & (args.lanes_q - 1), lane = static_cast<int>(threadIdx.x) % 32;
    const bool has_last = column != 0 && lane != 0;
    const bool has_next = column != args.lanes_q - 1 && lane != 31;
#pragma unroll
    for (int row = 0; row < kPhases / 2; ++row) {
      const T* to = cell + row / 2 * args.y_axis[0] + row % 2 * args.y_axis[1];
      const bool moves = reinterpret_cast<std::uintptr_t>(to) % (2 * sizeof(T)) != 0;
      const bool low = (columns >> (2 * row) & 1) != 0, high = (columns >> (2 * row + 1) & 1) != 0;
      const bool taken = has_last && (before >> (2 * row + 1) & 1) != 0;
      const bool takes = has_next && (behind >> (2 * row) & 1) != 0;
      const bool pair = high && (moves ? takes : low);
      if (moves) stores |= 1u << row;
      if (pair) stores |= 1u << (kPairs + row);
      if (low && (moves ? !taken : !pair)) stores |= 1u << (kLows + row);
      if (high && !pair) stores |= 1u << (kHighs + row);
    }
  }
};

/// \param args all of them; table and y, or part and counts
/// \tparam kPlain as of DirectChannels
template <class T, int kTaps, int kChannels, bool kPlain, bool kMoments>
__global__ void __launch_bounds__(kDirectThreads, (DepthwiseTraits<T, kTaps, kChannels, kPlain>::kBlocks))
    conv_transpose_depthwise(const __grid_constant__ DirectArgs<T> args) {
  using Traits = DepthwiseTraits<T, kTaps, kChannels, kPlain>;
  extern __shared__ float4 weights[];
  const DirectShare share = direct_share(args);
  const int channel = (share.lane_begin + share.lane) * kChannels;
  const bool active = channel < args.k && share.cell_z < args.end[0] && share.cell_q < args.end[2];
  stage_depthwise_weights<Traits>(args, share.lane_begin, reinterpret_cast<float*>(weights));
  __syncthreads();
  if constexpr (!kMoments) wait_for_kernel_before();  // for the table

  DirectChannels<T, kChannels, kPlain> channels(args, share.sample, channel, !kMoments);
  const CellProducts<T, Traits> products(weights, args.lanes_c, share.lane);
  const CellOutputs<T, kChannels> outputs(args, share, channel, active);
  InputWindow<T, Traits> window(args, share, channel, active);
  ChunkedMoments<kChannels> moments;
  for (int begin = share.run_begin; begin < share.run_end; begin += Traits::kStep) {
    window.advance(args);
    float v[Traits::kStep][kPhases * kChannels];
#pragma unroll
    for (int i = 0; i < Traits::kStep; ++i) channels.begin(v[i]);
    products.add(window, v);
#pragma unroll
    for (int i = 0; i < Traits::kStep; ++i) {
      const int cell_p = begin + i;
      if (cell_p >= share.run_end) break;
      if constexpr (kMoments) {
        channels.before(args, v[i]);
        const unsigned mask = outputs.mask(args, cell_p);
        if (!kPlain || begin == share.run_begin) {
          moments.template take<kPhases>(v[i], mask);
        } else {
          moments.template take_distances<kPhases>(v[i], mask);
        }
      } else {
        channels.finish(args, v[i]);
        if (kChannels == 1 && args.channels_first) {
          if constexpr (kChannels == 1) outputs.store_pairs(args, cell_p, v[i]);
        } else {
          outputs.store_channels(args, cell_p, v[i]);
        }
      }
    }
    if constexpr (kMoments) {
      moments.fold();
      if constexpr (kPlain) channels.move_origin(moments.mean);
    }
  }
  if constexpr (kMoments) write_moments(args, share, channel, moments);
}

}  // namespace upconv3d::cuda
