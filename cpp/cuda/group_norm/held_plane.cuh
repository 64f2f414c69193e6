// SPDX-License-Identifier: Apache-2.0
/// \file
/// What activation_group_norm_held_planes (held_norm_planes.cuh) and activation_group_norm_kept_planes
/// (kept_norm_planes.cuh) are given, a block's shared memory, a thread's part of a tile, and what both do
/// with sums and channels.
#pragma once

#include <cstdint>
#include <type_traits>

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
  int teams, team_threads;            // of powers of two threads,
  int team_shift;                     // log2 of them
  int step_channels, step_positions;  // from a thread's vector to its next: team_threads*lanes positions
  int held_bytes, slots_bytes;
  int table_pitch;  // of shared memory's rows of a team's channels
};

/// What a block has in shared memory; the table is the team's.
struct HeldPlanesShared {
  uint4* held;                  // [loads,threads] vectors, each of its own thread; none where kept
  float* slots;                 // [threads/32] sums
  float *scale, *shift, *bias;  // [channels of the tile] each; until tiles are merged gamma and beta
  float* slope;                 // [channels of the tile] of PReLU with a slope per channel

  template <class T>
  __device__ HeldPlanesShared(char* base, const HeldPlanesArgs<T>& args)
      : held(reinterpret_cast<uint4*>(base)),
        slots(reinterpret_cast<float*>(base + args.held_bytes)),
        scale(reinterpret_cast<float*>(base + args.held_bytes + args.slots_bytes) +
              (threadIdx.x >> args.team_shift) * HeldPlanes::kTableRows * args.table_pitch),
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
    const int team = threadIdx.x >> args.team_shift, lane = threadIdx.x & (args.team_threads - 1);
    group = args.counts.tiles > 1 ? work / args.counts.tiles : work * args.teams + team;
    group = min(group, args.groups);
    tile = args.counts.tiles > 1 ? work - group * args.counts.tiles : 0;
    const int from = tile * args.tile_values, base = group * args.group_values;
    begin = base + from;
    end = group < args.groups ? base + min(from + args.tile_values, args.group_values) : begin;
    const int before = channel_of(from, args.positions);
    first_channel = group % args.num_groups * args.group_channels + before;
    channels = end > begin ? channel_of(end - base - 1, args.positions) - before + 1 : 0;
    first = begin / kLane * kLane + lane * kLane;
    step = args.team_threads * kLane;
    const int step_shift = args.team_shift + __ffs(kLane) - 1;
    count = begin < end && first < end ? ((end - first - 1) >> step_shift) + 1 : 0;
    position = first - base - before * args.positions;
    channel = channel_of(position, args.positions);
    position -= channel * args.positions;
  }

  /// Without a division where it is a group's first, as of groups of one channel.
  static __device__ __forceinline__ int channel_of(int position, int positions) {
    return position < positions ? 0 : position / positions;
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
  __device__ __forceinline__ bool has(int lane) const {
    return static_cast<unsigned>(first + lane - begin) < static_cast<unsigned>(end - begin);
  }
};

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

/// Writes a vector of y.
template <class T>
__device__ __forceinline__ void store_vector(T* to, const float (&v)[kLanes<T>]) {
  Vector<T, kLanes<T>> y;
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) y.at[j] = from_stat<T>(v[j]);
  uint4 word;
  memcpy(&word, &y, sizeof(word));
  *reinterpret_cast<uint4*>(to) = word;
}

/// The same, of a vector that is not all of the tile only its own values.
template <class T>
__device__ __forceinline__ void store_plane(const HeldPlanesArgs<T>& args, const HeldPlane& at,
                                            const float (&v)[kLanes<T>]) {
  if (at.is_inside(args)) return store_vector(args.y + at.first, v);
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) {
    if (at.has(j)) args.y[at.first + j] = from_stat<T>(v[j]);
  }
}

/// Adds up the lanes' sums of all the team's threads, which all get the result. All threads of the block take
/// part.
template <class T>
__device__ __forceinline__ float sum_of_team(const HeldPlanesArgs<T>& args, const HeldPlanesShared& shared,
                                             float (&sum)[kLanes<T>]) {
#pragma unroll
  for (int half = 1; half < kLanes<T>; half *= 2) {
#pragma unroll
    for (int j = 0; j < kLanes<T>; j += 2 * half) sum[j] += sum[j + half];
  }
  float total = lanes_sum(sum[0], 32);
  if (args.team_threads == 32) return total;
  if (threadIdx.x % 32 == 0) shared.slots[threadIdx.x / 32] = total;
  __syncthreads();
  const int warps = args.team_threads / 32, first = (threadIdx.x >> args.team_shift) * warps;
  total = 0;
#pragma unroll 1
  for (int i = 0; i < warps; ++i) total += shared.slots[first + i];
  __syncthreads();  // before the slots take the next sums
  return total;
}

/// The moments of the team's tile.
/// \param sum_of sum_of(squares, mean): the sum of the values' distances from mean, or of their squares
template <class T, class SumOf>
__device__ __forceinline__ GroupMoments moments_of_plane(const HeldPlanesArgs<T>& args,
                                                         const HeldPlane& plane, SumOf sum_of) {
  const float count = args.counts.count(plane.tile);
  const float mean = sum_of(std::false_type{}, 0.f) * args.counts.share(plane.tile);
  const float m2 = sum_of(std::true_type{}, mean);
  const bool alike = plane.begin < plane.end && are_alike(mean, m2, count);
  // A team's threads agree; several teams of more than a warp have to go the same way.
  const bool alone = args.teams == 1 || args.team_threads == 32;
  GroupMoments moments{mean, m2};
  if (alone ? alike : __syncthreads_or(alike)) [[unlikely]] {
    const float distances = sum_of(std::false_type{}, mean);
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

}  // namespace upconv3d::cuda
