// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_group_norm_held: stages 2 to 4 of the library plan in one launch, for small convolutions.
///
///   c    [N,Z,P,Q,K]  dtype  PyTorch's convolution, without bias
///   part [N,G,tiles]  float2 (mean, M2) of before(c + bias), where a group is in several tiles
///   y    [N,Z,P,Q,K]  dtype  after(group_norm(before(c + bias))); may be c itself; or [N,K,Z,P,Q], and not c
///
/// A block copies its tile (core/held_norm.hpp) to shared memory, all loads on the way at once, and reads it
/// there three times: c crosses L2 once. A tile's sums are taken for its means, then for the squares about
/// them, and where a group is next to one value throughout for what its mean is off by; the (count, mean, M2)
/// of tiles are merged in double, about the first tile's mean. Each sum has an order that the tiles decide,
/// and tiles depend on the compute capability, not on the number of multiprocessors. Where one tile is all of
/// its groups no block waits; else those of a slab do, once, as a cluster, or all of them, for which the
/// launch is cooperative. A device that does not hold as many of these gets fewer, which then read their
/// tiles again instead of holding them. Code for compute capability 9.0 and later begins while the kernel
/// before ends, unless its launch is cooperative.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>
#include <type_traits>

#include "cuda/group_norm/held_tile.cuh"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {

/// Sends the thread's vectors on their way, all at once.
template <class T>
__device__ __forceinline__ void load_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                          const HeldShared& shared) {
  const T* from = args.c + tile.offset;
  uint4* to = shared.held + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < tile.count; ++i, from += tile.step, to += blockDim.x) {
    __pipeline_memcpy_async(to, from, kAccessBytes);
  }
  __pipeline_commit();
}

template <class T, class Input>
__device__ __forceinline__ void load_channels(const HeldArgs<T>& args, const HeldTile& tile,
                                              const HeldShared& shared) {
  const auto value = [](const T* from, int channel, float absent) {
    return from != nullptr ? to_stat(from[channel]) : absent;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < args.slab_channels; i += blockDim.x) {
    const int channel = tile.slab * args.slab_channels + i;
    shared.mean[i] = 0.f;
    shared.scale[i] = value(args.gamma, channel, 1.f);
    shared.shift[i] = value(args.beta, channel, 0.f);
    shared.bias[i] = value(args.bias, channel, 0.f);
    if (kMayHaveSlopes<Input> && args.activation.kind == Activation::kPrelu) {
      shared.slope[i] = activation_parameter<T>(args.activation, channel);
    }
  }
}

/// Calls body(j, channel of the slab, position of the row) for the lanes of a vector.
template <class T, class Body>
__device__ __forceinline__ void for_each_lane(const HeldArgs<T>& args, const HeldTile& tile, Body body) {
  int channel = tile.channel, folded = tile.folded;
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) {
    body(j, channel, folded);
    // Only with a fold do channels end within a vector.
    if (++channel == args.slab_channels) channel = 0, ++folded;
  }
}

/// What a thread knows of the channels of its vectors.
template <class T, class Input>
struct HeldChannels {
  float mean[kLanes<T>], scale[kLanes<T>], shift[kLanes<T>], bias[kLanes<T>];
  float slope[kMayHaveSlopes<Input> ? kLanes<T> : 1];

  __device__ __forceinline__ HeldChannels(const HeldArgs<T>& args, const HeldTile& tile,
                                          const HeldShared& shared) {
    // Threads behind the last column's have no vectors.
    if (tile.count == 0) return;
    read(args, tile, shared.mean, mean);
    read(args, tile, shared.scale, scale);
    read(args, tile, shared.shift, shift);
    read(args, tile, shared.bias, bias);
    if constexpr (kMayHaveSlopes<Input>) {
      if (args.activation.kind == Activation::kPrelu) read(args, tile, shared.slope, slope);
    }
  }

  /// Four channels at a time, but where they end within a vector.
  /// \param from [slab_channels]
  static __device__ __forceinline__ void read(const HeldArgs<T>& args, const HeldTile& tile,
                                              const float* from, float (&to)[kLanes<T>]) {
    if (args.fold > 1) {
      for_each_lane(args, tile, [&](int j, int channel, int) { to[j] = from[channel]; });
      return;
    }
#pragma unroll
    for (int j = 0; j < kLanes<T>; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + tile.channel + j);
      to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
    }
  }

  __device__ __forceinline__ void activate_here(const HeldArgs<T>& args, float (&v)[kLanes<T>]) const {
    activate(args.activation, args.parameter, v, [&](int j) { return slope[j]; });
  }

  /// before(c + bias).
  __device__ __forceinline__ void pending(const HeldArgs<T>& args, uint4 word, float (&v)[kLanes<T>]) const {
    Vector<T, kLanes<T>> c;
    memcpy(&c, &word, sizeof(c));
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      if constexpr (Input::kDecidesLater) {
        v[j] = to_stat(c.at[j]) + bias[j];
      } else {
        v[j] = Input{}(to_stat(c.at[j]), bias[j], args.parameter);
      }
    }
    if constexpr (Input::kDecidesLater) activate_here(args, v);
  }

  /// \param parameter parameter_behind
  __device__ __forceinline__ void normalize(const HeldArgs<T>& args, float parameter,
                                            float (&v)[kLanes<T>]) const {
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[j] = (v[j] - mean[j]) * scale[j] + shift[j];
    activate_behind<Input>(parameter, v, [&](int j) { return slope[j]; });
  }

  __device__ __forceinline__ uint4 normalized(const HeldArgs<T>& args, float parameter,
                                              float (&v)[kLanes<T>]) const {
    normalize(args, parameter, v);
    Vector<T, kLanes<T>> y;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) y.at[j] = from_stat<T>(v[j]);
    uint4 word;
    memcpy(&word, &y, sizeof(word));
    return word;
  }
};

/// Sums of the thread's values' distances from the tile's means, lane by lane, or of their squares.
/// \param squares a bool, or its type where each is to have a loop of its own
template <class T, class Input, class Squares>
__device__ __forceinline__ void add_up(const HeldArgs<T>& args, const HeldTile& tile,
                                       const HeldShared& shared, Squares squares, float (&sum)[kLanes<T>]) {
  const HeldChannels<T, Input> channels(args, tile, shared);
  const uint4* held = shared.held + threadIdx.x;
#pragma unroll 2
  for (int i = 0; i < tile.count; ++i, held += blockDim.x) {
    // In registers first: a reference would become 16 loads of a byte each.
    const uint4 word = *held;
    float v[kLanes<T>];
    channels.pending(args, word, v);
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const float distance = v[j] - channels.mean[j];  // the mean is 0 at first
      sum[j] += distance * (squares ? distance : 1.f);
    }
  }
}

/// Adds up neighbouring lanes of one group and the rows of a warp, and leaves the sums in their slots.
template <class T>
__device__ __forceinline__ void leave_in_slots(const HeldArgs<T>& args, const HeldTile& tile,
                                               float (&sum)[kLanes<T>], float* slots) {
  const int slot_mask = (1 << args.slot_shift) - 1;
#pragma unroll
  for (int half = 1; half < kLanes<T>; half *= 2) {
    if (half > slot_mask) continue;
#pragma unroll
    for (int j = 0; j < kLanes<T>; j += 2 * half) sum[j] += sum[j + half];
  }
  int row = tile.row;
  bool leaves = row < args.row_lanes;
  if (args.shares_warps) {
    if (slot_mask + 1 == kLanes<T>) {
#pragma unroll 1
      for (int other = 16; other >= args.columns; other /= 2) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], other);
      }
    } else {
      // Of all lanes, also where several share a slot: a branch would wait for each before the next.
#pragma unroll 1
      for (int other = 16; other >= args.columns; other /= 2) {
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], other);
      }
    }
    row = threadIdx.x / 32;
    leaves = threadIdx.x % 32 < static_cast<unsigned>(args.columns);
  }
  if (!leaves) return;
  for_each_lane(args, tile, [&](int j, int channel, int folded) {
    if ((j & slot_mask) == 0) {
      slots[(channel >> args.slot_shift) * (args.slot_rows * args.fold) + row * args.fold + folded] = sum[j];
    }
  });
}

/// Calls body(group, lane) for every group of the slab, whole warps at a time: threads for which there is no
/// group left get the number of one behind the last.
template <class T, class Body>
__device__ __forceinline__ void for_each_group(const HeldArgs<T>& args, Body body) {
  const int shift = __ffs(args.group_lanes) - 1;
#pragma unroll 1
  for (int first = 0; first < args.slab_groups; first += blockDim.x >> shift) {
    body(min(first + static_cast<int>(threadIdx.x >> shift), args.slab_groups),
         static_cast<int>(threadIdx.x) & (args.group_lanes - 1));
  }
}

/// From a group's moments to y = (v - mean)*scale + shift of its channels, as group_norm_finalize has it.
template <class T>
__device__ __forceinline__ void fill_table(const HeldArgs<T>& args, const HeldShared& shared, int group,
                                           int lane, double mean, double m2) {
  if (group == args.slab_groups) return;
  const double rstd = inverse_deviation(m2, args.counts, args.eps);
  const float rounded = static_cast<float>(mean);
  const int begin = group * args.group_channels;
#pragma unroll 1
  for (int i = begin + lane; i < begin + args.group_channels; i += args.group_lanes) {
    shared.mean[i] = rounded;
    finish_channel(mean, rounded, rstd, shared.scale[i], shared.shift[i]);
  }
}

template <class T>
__device__ __forceinline__ float2* parts_of(const HeldArgs<T>& args, const HeldTile& tile, int group) {
  return args.part +
         (tile.sample * args.num_groups + tile.slab * args.slab_groups + group) * args.counts.tiles;
}

/// A group's sum over its slots, which all its lanes get; 0 behind the last group.
template <class T>
__device__ __forceinline__ float sum_of_slots(const HeldArgs<T>& args, const HeldShared& shared, int group,
                                              int lane) {
  const int parts = (args.group_channels >> args.slot_shift) * args.slot_rows * args.fold;
  float sum = 0;
  if (group < args.slab_groups) {
    for (int i = lane; i < parts; i += args.group_lanes) sum += shared.slots[group * parts + i];
  }
  return lanes_sum(sum, args.group_lanes);
}

/// A group's moments in this tile: for its table where the tile is all of the group, else to be merged.
template <class T>
__device__ __forceinline__ void take_moments(const HeldArgs<T>& args, const HeldTile& tile,
                                             const HeldShared& shared, int group, int lane,
                                             const GroupMoments& moments) {
  if (args.counts.tiles == 1) {
    fill_table(args, shared, group, lane, moments.mean, moments.m2);
  } else if (lane == 0) {
    parts_of(args, tile, group)[tile.tile] = {static_cast<float>(moments.mean),
                                              static_cast<float>(moments.m2)};
  }
}

/// Adds up the slots of each group: its mean, for the next round; then M2, which with the mean is what is
/// taken of it, but where these are to be corrected.
/// \return whether one of the thread's groups is left for that
template <class T>
__device__ __forceinline__ bool merge_slots_of_groups(const HeldArgs<T>& args, const HeldTile& tile,
                                                      const HeldShared& shared, bool squares) {
  bool left = false;
  for_each_group(args, [&](int group, int lane) {
    const float sum = sum_of_slots(args, shared, group, lane);
    const int begin = group * args.group_channels;
    const float mean_before = squares && group < args.slab_groups ? shared.mean[begin] : 0.f;
    __syncwarp();  // before a lane writes the next
    if (group == args.slab_groups) return;
    if (!squares) {
      const float mean = sum * args.counts.share(tile.tile);
#pragma unroll 1
      for (int i = begin + lane; i < begin + args.group_channels; i += args.group_lanes)
        shared.mean[i] = mean;
      return;
    }
    const bool alike = are_alike(mean_before, sum, args.counts.count(tile.tile));
    shared.m2[group] = alike ? sum : -1.f;
    left = left || alike;
    if (!alike) take_moments(args, tile, shared, group, lane, {mean_before, sum});
  });
  return left;
}

template <class T>
__device__ __forceinline__ void merge_tiles_of_groups(const HeldArgs<T>& args, const HeldTile& tile,
                                                      const HeldShared& shared) {
  for_each_group(args, [&](int group, int lane) {
    const float2* const from = group < args.slab_groups ? parts_of(args, tile, group) : nullptr;
    const GroupMoments moments = merge_tiles(from, args.counts, lane, args.group_lanes);
    fill_table(args, shared, group, lane, moments.mean, moments.m2);
  });
}

/// Takes the moments of the groups that are left, about means that their values' distances correct.
/// \param add_up as of take_tile_moments
template <class T, class AddUp>
__device__ __forceinline__ void correct_moments(const HeldArgs<T>& args, const HeldTile& tile,
                                                const HeldShared& shared, AddUp add_up) {
  float sum[kLanes<T>] = {};
  add_up(false, sum);
  leave_in_slots(args, tile, sum, shared.slots);
  __syncthreads();
  for_each_group(args, [&](int group, int lane) {
    const bool is_left = group < args.slab_groups && shared.m2[group] >= 0;
    const float mean = is_left ? shared.mean[group * args.group_channels] : 0.f;
    const float distances = sum_of_slots(args, shared, group, lane);
    __syncwarp();  // before a lane writes the next
    if (!is_left) return;
    const float count = args.counts.count(tile.tile);
    take_moments(args, tile, shared, group, lane, corrected(mean, shared.m2[group], distances, count));
  });
  __syncthreads();
}

/// \param add_up add_up(squares, sum): adds the thread's values' distances from the tile's means, or their
/// squares, to sum[lane]
template <class T, class AddUp>
__device__ __forceinline__ void take_tile_moments(const HeldArgs<T>& args, const HeldTile& tile,
                                                  const HeldShared& shared, AddUp add_up) {
  bool left = false;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    float sum[kLanes<T>] = {};
    add_up(round == 1, sum);
    leave_in_slots(args, tile, sum, shared.slots);
    __syncthreads();
    left = __syncthreads_or(merge_slots_of_groups(args, tile, shared, round == 1));
  }
  if (left) [[unlikely]]
    correct_moments(args, tile, shared, add_up);
}

template <class T, class Input>
__device__ __forceinline__ void bring_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                           const HeldShared& shared) {
  load_tile(args, tile, shared);
  load_channels<T, Input>(args, tile, shared);
  __pipeline_wait_prior(0);
  __syncthreads();
}

/// \param parameter parameter_behind
template <class T, class Input>
__device__ __forceinline__ void normalize_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                               const HeldShared& shared, float parameter) {
  const HeldChannels<T, Input> channels(args, tile, shared);
  const uint4* held = shared.held + threadIdx.x;
  T* to = args.y + tile.offset;
#pragma unroll 2
  for (int i = 0; i < tile.count; ++i, to += tile.step, held += blockDim.x) {
    const uint4 word = *held;
    float v[kLanes<T>];
    channels.pending(args, word, v);
    *reinterpret_cast<uint4*>(to) = channels.normalized(args, parameter, v);
  }
}

/// Writes neighbouring values, two of them at once.
template <class T, int kRows>
__device__ __forceinline__ void store_run(T* to, const Vector<T, kRows>& run) {
  static_assert(kRows <= 2);
  if constexpr (kRows == 1) {
    *to = run.at[0];
  } else {
    using Word = std::conditional_t<sizeof(T) == 4, uint2, std::uint32_t>;
    Word word;
    memcpy(&word, &run, sizeof(word));
    *reinterpret_cast<Word*>(to) = word;
  }
}

/// normalize_tile's values into y [N,K,Z,P,Q]. A warp takes `wide` columns of as many runs of rows as it has
/// lanes left: of its stores, one per channel, neighbouring lanes fill a sector, and it reads what other
/// threads brought. Warps have equal shares of these, down the rows first, so that what a thread knows of its
/// channels serves for several.
/// \tparam kRows rows of a thread's store
template <int kRows, class T, class Input>
__device__ __forceinline__ void normalize_rows_to_planes(const HeldArgs<T>& args, const HeldTile& tile,
                                                         const HeldShared& shared, float parameter) {
  const int wide = args.wide, lane = threadIdx.x % 32, runs = 32 / wide * kRows;
  const int rows = min(args.tile_rows, args.sample_rows - tile.tile * args.tile_rows);
  const int down = (rows + runs - 1) / runs, work = args.columns / wide * down;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int end = work * (warp + 1) / warps;
  HeldTile mine = tile;
  mine.count = 1;
#pragma unroll 1
  for (int at = work * warp / warps; at < end;) {
    const int across = at / down, column = across * wide + lane % wide;
    const int until = min((across + 1) * down, end);
    mine.channel = column * kLanes<T>;
    const HeldChannels<T, Input> channels(args, mine, shared);
    T* const to =
        args.y +
        ((tile.sample * args.slabs + tile.slab) * args.slab_channels + mine.channel) * args.sample_rows +
        tile.tile * args.tile_rows;
#pragma unroll 1
    for (int row = (at - across * down) * runs + lane / wide * kRows; at < until; ++at, row += runs) {
      if (row >= rows) continue;
      const int load = row / args.row_lanes;
      const uint4* const from =
          shared.held + load * blockDim.x + (row - load * args.row_lanes) * args.columns + column;
      float v[kRows][kLanes<T>];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint4 word = from[i * args.columns];
        channels.pending(args, word, v[i]);
        channels.normalize(args, parameter, v[i]);
      }
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) {
        Vector<T, kRows> run;
#pragma unroll
        for (int i = 0; i < kRows; ++i) run.at[i] = from_stat<T>(v[i][j]);
        store_run(to + j * args.sample_rows + row, run);
      }
    }
  }
}

template <class T, class Input>
__device__ __forceinline__ void normalize_tile_to_planes(const HeldArgs<T>& args, const HeldTile& tile,
                                                         const HeldShared& shared, float parameter) {
  if constexpr (!Input::kDecidesLater) {
    if (args.stores_runs) {
      return normalize_rows_to_planes<kRunRows, T, Input>(args, tile, shared, parameter);
    }
  }
  normalize_rows_to_planes<1, T, Input>(args, tile, shared, parameter);
}

template <class T, class Input>
__global__ void __launch_bounds__(kMaxHeldThreads, 1) activation_group_norm_held(const HeldArgs<T> args) {
  extern __shared__ __align__(kAccessBytes) char raw_shared[];
  const HeldShared shared(raw_shared, args);
  const unsigned work = args.work;
  const bool holds = gridDim.x == work;
  wait_for_kernel_before();
  const float parameter = parameter_behind<T, Input>(args.activation, args.parameter);
#pragma unroll 1
  for (unsigned at = blockIdx.x; at < work; at += gridDim.x) {
    const HeldTile tile(args, at);
    bring_tile<T, Input>(args, tile, shared);
    take_tile_moments(args, tile, shared, [&](bool squares, float (&sum)[kLanes<T>]) {
      if constexpr (Input::kDecidesLater) {
        add_up<T, Input>(args, tile, shared, squares, sum);
      } else if (squares) {
        add_up<T, Input>(args, tile, shared, std::true_type{}, sum);
      } else {
        add_up<T, Input>(args, tile, shared, std::false_type{}, sum);
      }
    });
  }
  if (args.counts.tiles > 1) wait_for_tiles(args.clusters);
#pragma unroll 1
  for (unsigned at = blockIdx.x; at < work; at += gridDim.x) {
    const HeldTile tile(args, at);
    if (!holds) {
      __syncthreads();  // before this tile takes the last one's shared memory
      bring_tile<T, Input>(args, tile, shared);
    }
    if (args.counts.tiles > 1) {
      merge_tiles_of_groups(args, tile, shared);
      __syncthreads();
    }
    if (args.y_planes) {
      normalize_tile_to_planes<T, Input>(args, tile, shared, parameter);
    } else {
      normalize_tile<T, Input>(args, tile, shared, parameter);
    }
  }
}

}  // namespace upconv3d::cuda
