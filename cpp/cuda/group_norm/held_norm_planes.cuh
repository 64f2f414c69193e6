// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_group_norm_held_planes: activation_group_norm_held (held_norm.cuh) of NCDHW.
///
///   c    [N,K,Z,P,Q]  dtype  PyTorch's convolution, without bias
///   part [N,G,tiles]  float2 (mean, M2) of before(c + bias), where a group is in several tiles
///   y    [N,K,Z,P,Q]  dtype  after(group_norm(before(c + bias))); may be c itself
///
/// A norm group of a sample is one stretch of memory, and a tile (core/held_norm.hpp) a part of one. A team
/// of threads holds it in shared memory and reads it there three times, as the other form does, which says
/// what makes the bits the same on every run, and when it reads once more. Where a channel's positions are no
/// whole vectors, channels and tiles begin and end within one: of a tile's first and last vector only its own
/// values are read and written.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "core/held_norm.hpp"
#include "cuda/group_norm/held_moments.cuh"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {

/// Counts are 32-bit: the values are few (core/held_norm.cpp).
template <class T>
struct HeldPlanesArgs {
  const T* c;      // [N,K,Z,P,Q] T
  const T* bias;   // [K] T, or null
  const T* gamma;  // [K] T, or null
  const T* beta;   // [K] T, or null
  T* y;            // as c
  float2* part;    // [N,G,tiles] mean, M2
  double eps;      // activation units squared
  TileCounts counts;
  ActivationParams activation;  // the only one
  float parameter;              // activation.parameter
  bool whole;                   // whether a channel's positions are whole vectors
  bool one_channel;             // whether a vector's are always of one channel: so, or a group has but one
  bool clusters;                // HeldPlanes::clusters
  int groups;                   // of all samples
  int num_groups;               // of a sample
  int work;                     // tiles, or with teams as many groups at a time
  int group_channels, group_values, positions;
  int tile_values;
  int teams, team_threads;
  int step_channels, step_positions;  // from a thread's vector to its next: team_threads*lanes positions
  int held_bytes, slots_bytes;
  int table_pitch;  // of shared memory's rows of a team's channels
};

/// What a block has in shared memory; the table is the team's.
struct HeldPlanesShared {
  uint4* held;                  // [loads,threads] vectors; each is written and read by its own thread
  float* slots;                 // [threads/32] sums
  float *scale, *shift, *bias;  // [channels of the tile] each; until tiles are merged gamma and beta
  float* slope;                 // [channels of the tile] of PReLU with a slope per channel

  template <class T>
  __device__ HeldPlanesShared(char* base, const HeldPlanesArgs<T>& args)
      : held(reinterpret_cast<uint4*>(base)),
        slots(reinterpret_cast<float*>(base + args.held_bytes)),
        scale(reinterpret_cast<float*>(base + args.held_bytes + args.slots_bytes) +
              threadIdx.x / args.team_threads * HeldPlanes::kTableRows * args.table_pitch),
        shift(scale + args.table_pitch),
        bias(shift + args.table_pitch),
        slope(bias + args.table_pitch) {}
};

/// A team's tile, and this thread's part of it.
struct HeldPlane {
  int group;          // of all samples; one behind the last for a team without work
  int tile;           // of the group
  int begin, end;     // elements of c
  int first, step;    // elements of c before this thread's first vector, and to its next
  int count;          // of its vectors
  int first_channel;  // of the sample, which the tile begins in
  int channels;       // that it touches
  int channel;        // of those, which the thread's first vector begins in
  int position;       // there; below 0 where the vector begins before the tile

  template <class T>
  __device__ HeldPlane(const HeldPlanesArgs<T>& args, int work) {
    constexpr int kLane = kLanes<T>;
    const int team = threadIdx.x / args.team_threads, lane = threadIdx.x - team * args.team_threads;
    group = args.counts.tiles > 1 ? work / args.counts.tiles : work * args.teams + team;
    group = min(group, args.groups);
    tile = args.counts.tiles > 1 ? work - group * args.counts.tiles : 0;
    const int from = tile * args.tile_values, base = group * args.group_values;
    begin = base + from;
    end = group < args.groups ? base + min(from + args.tile_values, args.group_values) : begin;
    const int before = from / args.positions;
    first_channel = group % args.num_groups * args.group_channels + before;
    channels = end > begin ? (end - base - 1) / args.positions - before + 1 : 0;
    first = begin / kLane * kLane + lane * kLane;
    step = args.team_threads * kLane;
    count = begin < end && first < end ? static_cast<unsigned>(end - first - 1) / step + 1 : 0;
    position = first - base - before * args.positions;
    channel = position < 0 ? 0 : position / args.positions;
    position -= channel * args.positions;
  }

  /// To the thread's next vector.
  template <class T>
  __device__ __forceinline__ void advance(const HeldPlanesArgs<T>& args) {
    first += step;
    channel += args.step_channels;
    position += args.step_positions;
    if (position >= args.positions) position -= args.positions, ++channel;
    // A vector that began before the tile is followed by one that may begin in the channel before.
    while (!args.whole && position < 0 && channel > 0) position += args.positions, --channel;
  }
  template <class T>
  __device__ __forceinline__ bool is_inside(const HeldPlanesArgs<T>& args) const {
    return args.whole || (first >= begin && first + kLanes<T> <= end);
  }
  __device__ __forceinline__ bool has(int lane) const { return first + lane >= begin && first + lane < end; }
};

/// Sends the thread's vectors on their way, all at once.
template <class T>
__device__ __forceinline__ void load_plane(const HeldPlanesArgs<T>& args, HeldPlane at,
                                           const HeldPlanesShared& shared) {
  uint4* to = shared.held + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < at.count; ++i, at.first += at.step, to += blockDim.x) {
    if (at.is_inside(args)) {
      __pipeline_memcpy_async(to, args.c + at.first, kAccessBytes);
      continue;
    }
    Vector<T, kLanes<T>> own;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) own.at[j] = at.has(j) ? args.c[at.first + j] : from_stat<T>(0.f);
    memcpy(to, &own, sizeof(own));
  }
  __pipeline_commit();
}

template <class T, class Input>
__device__ __forceinline__ void load_plane_channels(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                                    const HeldPlanesShared& shared) {
  const auto value = [](const T* from, int channel, float absent) {
    return from != nullptr ? to_stat(from[channel]) : absent;
  };
#pragma unroll 1
  for (int i = threadIdx.x & (args.team_threads - 1); i < plane.channels; i += args.team_threads) {
    const int channel = plane.first_channel + i;
    shared.scale[i] = value(args.gamma, channel, 1.f);
    shared.shift[i] = value(args.beta, channel, 0.f);
    shared.bias[i] = value(args.bias, channel, 0.f);
    if (kMayHaveSlopes<Input> && args.activation.kind == Activation::kPrelu) {
      shared.slope[i] = activation_parameter<T>(args.activation, channel);
    }
  }
}

/// Calls body(j, channel of the tile) for the lanes of a vector, also for those that are not the tile's.
template <class T, class Body>
__device__ __forceinline__ void for_each_plane_lane(const HeldPlanesArgs<T>& args, const HeldPlane& at,
                                                    Body body) {
  int channel = at.channel, position = at.position;
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) {
    body(j, min(channel, at.channels - 1));
    if (!args.whole && ++position == args.positions) position = 0, ++channel;
  }
}

/// What each lane's channel has in a row of the table.
template <class T>
__device__ __forceinline__ void read_row(const HeldPlanesArgs<T>& args, const HeldPlane& at, const float* row,
                                         float (&to)[kLanes<T>]) {
  if (args.one_channel) {
    const float all = row[at.channel];
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) to[j] = all;
  } else {
    for_each_plane_lane(args, at, [&](int j, int channel) { to[j] = row[channel]; });
  }
}

template <class T>
__device__ __forceinline__ void activate_plane(const HeldPlanesArgs<T>& args, const HeldPlane& at,
                                               const HeldPlanesShared& shared, float (&v)[kLanes<T>]) {
  float slope[kLanes<T>];
  if (args.activation.kind == Activation::kPrelu) read_row(args, at, shared.slope, slope);
  activate(args.activation, args.parameter, v, [&](int j) { return slope[j]; });
}

/// v = before(c + bias) of a vector in shared memory.
template <class T, class Input>
__device__ __forceinline__ void plane_pending(const HeldPlanesArgs<T>& args, const HeldPlane& at,
                                              const HeldPlanesShared& shared, uint4 word,
                                              float (&v)[kLanes<T>]) {
  Vector<T, kLanes<T>> c;
  memcpy(&c, &word, sizeof(c));
  float bias[kLanes<T>];
  read_row(args, at, shared.bias, bias);
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) {
    if constexpr (Input::kDecidesLater) {
      v[j] = to_stat(c.at[j]) + bias[j];
    } else {
      v[j] = Input{}(to_stat(c.at[j]), bias[j]);
    }
  }
  if constexpr (Input::kDecidesLater) activate_plane(args, at, shared, v);
}

/// Sum of the team's values, or of their squared distances from `mean`, which all its threads get. All
/// threads of the block take part.
template <class T, class Input>
__device__ __forceinline__ float sum_of_plane(const HeldPlanesArgs<T>& args, HeldPlane at,
                                              const HeldPlanesShared& shared, bool squares, float mean) {
  float sum[kLanes<T>] = {};
  const uint4* held = shared.held + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < at.count; ++i, held += blockDim.x) {
    const uint4 word = *held;
    float v[kLanes<T>];
    plane_pending<T, Input>(args, at, shared, word, v);
    if (!at.is_inside(args)) {  // what is not the tile's lies at no distance
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) v[j] = at.has(j) ? v[j] : mean;
    }
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const float distance = v[j] - mean;  // the mean is 0 at first
      sum[j] += distance * (squares ? distance : 1.f);
    }
    at.advance(args);
  }
#pragma unroll
  for (int half = 1; half < kLanes<T>; half *= 2) {
#pragma unroll
    for (int j = 0; j < kLanes<T>; j += 2 * half) sum[j] += sum[j + half];
  }
  float total = lanes_sum(sum[0], 32);
  if (args.team_threads == 32) return total;
  if (threadIdx.x % 32 == 0) shared.slots[threadIdx.x / 32] = total;
  __syncthreads();
  const int warps = args.team_threads / 32, first = threadIdx.x / args.team_threads * warps;
  total = 0;
#pragma unroll 1
  for (int i = 0; i < warps; ++i) total += shared.slots[first + i];
  __syncthreads();  // before the slots take the next sums
  return total;
}

/// The moments of the team's tile.
template <class T, class Input>
__device__ __forceinline__ GroupMoments moments_of_plane(const HeldPlanesArgs<T>& args,
                                                         const HeldPlane& plane,
                                                         const HeldPlanesShared& shared) {
  const float count = args.counts.count(plane.tile);
  const float mean = sum_of_plane<T, Input>(args, plane, shared, false, 0.f) * args.counts.share(plane.tile);
  const float m2 = sum_of_plane<T, Input>(args, plane, shared, true, mean);
  const bool alike = plane.begin < plane.end && are_alike(mean, m2, count);
  // A team's threads agree; several teams of more than a warp have to go the same way.
  const bool alone = args.teams == 1 || args.team_threads == 32;
  GroupMoments moments{mean, m2};
  if (alone ? alike : __syncthreads_or(alike)) [[unlikely]] {
    const float distances = sum_of_plane<T, Input>(args, plane, shared, false, mean);
    if (alike) moments = corrected(mean, m2, distances, count);
  }
  return moments;
}

/// From a group's moments to what becomes of its channels in this tile. \return the mean to subtract
template <class T>
__device__ __forceinline__ float fill_plane_table(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                                  const HeldPlanesShared& shared,
                                                  const GroupMoments& moments) {
  const double rstd = inverse_deviation(moments.m2, args.counts, args.eps);
  const float rounded = static_cast<float>(moments.mean);
#pragma unroll 1
  for (int i = threadIdx.x & (args.team_threads - 1); i < plane.channels; i += args.team_threads) {
    finish_channel(moments.mean, rounded, rstd, shared.scale[i], shared.shift[i]);
  }
  __syncthreads();
  return rounded;
}

/// \param parameter parameter_behind
template <class T, class Input>
__device__ __forceinline__ void normalize_plane(const HeldPlanesArgs<T>& args, HeldPlane at,
                                                const HeldPlanesShared& shared, float mean, float parameter) {
  const uint4* held = shared.held + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < at.count; ++i, held += blockDim.x) {
    const uint4 word = *held;
    float v[kLanes<T>], scale[kLanes<T>], shift[kLanes<T>];
    plane_pending<T, Input>(args, at, shared, word, v);
    read_row(args, at, shared.scale, scale);
    read_row(args, at, shared.shift, shift);
    Vector<T, kLanes<T>> y;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[j] = (v[j] - mean) * scale[j] + shift[j];
    float slope[kLanes<T>] = {};
    if constexpr (kHasChannelSlopes<Input>) read_row(args, at, shared.slope, slope);
    activate_behind<Input>(parameter, v, [&](int j) { return slope[j]; });
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) y.at[j] = from_stat<T>(v[j]);
    if (at.is_inside(args)) {
      uint4 out;
      memcpy(&out, &y, sizeof(out));
      *reinterpret_cast<uint4*>(args.y + at.first) = out;
    } else {
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) {
        if (at.has(j)) args.y[at.first + j] = y.at[j];
      }
    }
    at.advance(args);
  }
}

template <class T, class Input>
__device__ __forceinline__ void bring_plane(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                            const HeldPlanesShared& shared) {
  __syncthreads();  // before this tile takes the last one's shared memory
  load_plane(args, plane, shared);
  load_plane_channels<T, Input>(args, plane, shared);
  __pipeline_wait_prior(0);
  __syncthreads();
}

template <class T, class Input>
__global__ void __launch_bounds__(kMaxHeldThreads, 1)
    activation_group_norm_held_planes(const HeldPlanesArgs<T> args) {
  extern __shared__ __align__(kAccessBytes) char raw_shared[];
  const HeldPlanesShared shared(raw_shared, args);
  const bool waits = args.counts.tiles > 1, holds = gridDim.x == static_cast<unsigned>(args.work);
  wait_for_kernel_before();
  const float parameter = parameter_behind<T, Input>(args.activation, args.parameter);
#pragma unroll 1
  for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
    const HeldPlane plane(args, work);
    bring_plane<T, Input>(args, plane, shared);
    const GroupMoments moments = moments_of_plane<T, Input>(args, plane, shared);
    if (!waits) {
      const float mean = fill_plane_table(args, plane, shared, moments);
      normalize_plane<T, Input>(args, plane, shared, mean, parameter);
    } else if (threadIdx.x == 0) {
      args.part[work] = {static_cast<float>(moments.mean), static_cast<float>(moments.m2)};
    }
  }
  if (!waits) return;
  wait_for_tiles(args.clusters);
#pragma unroll 1
  for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
    const HeldPlane plane(args, work);
    if (!holds) bring_plane<T, Input>(args, plane, shared);
    const GroupMoments moments = merge_tiles(args.part + plane.group * args.counts.tiles, args.counts,
                                             static_cast<int>(threadIdx.x % 32), 32);
    const float mean = fill_plane_table(args, plane, shared, moments);
    normalize_plane<T, Input>(args, plane, shared, mean, parameter);
  }
}

}  // namespace upconv3d::cuda
