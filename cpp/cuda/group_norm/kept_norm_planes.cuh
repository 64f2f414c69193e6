// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_group_norm_kept_planes: activation_group_norm_held_planes (held_norm_planes.cuh) where a thread
/// has so few vectors that its registers keep before(c + bias) from the first sum to the result, and where a
/// vector is of one channel. The same bits: held, each value is converted, added to its bias and activated
/// three times, which is most of what such a launch does (perf/NOTES.md, "Values kept in registers").
#pragma once

#include <cstdint>

#include "cuda/group_norm/held_plane.cuh"

namespace upconv3d::cuda {

/// Blocks of most threads on a multiprocessor: of 80 registers each.
inline constexpr int kKeptBlocks = 3;

/// Calls body(i, plane at the thread's vector i) for its vectors.
template <class T, class Body>
__device__ __forceinline__ void for_each_kept(const HeldPlanesArgs<T>& args, HeldPlane at, Body body) {
#pragma unroll
  for (int i = 0; i < kKeptVectors<T>; ++i) {
    if (i < at.count) body(i, at);
    at.advance(args);
  }
}

/// The thread's vectors of c, all on their way at once. Of a vector that is not all of the tile, the rest is
/// 0: another block may be writing it.
template <class T>
__device__ __forceinline__ void load_kept(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                          uint4 (&words)[kKeptVectors<T>]) {
  for_each_kept(args, plane, [&](int i, const HeldPlane& at) {
    if (at.is_inside(args)) words[i] = *reinterpret_cast<const uint4*>(args.c + at.first);
  });
  if (args.whole) return;
  for_each_kept(args, plane, [&](int i, const HeldPlane& at) {
    if (at.is_inside(args)) return;
    Vector<T, kLanes<T>> own;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) own.at[j] = at.has(j) ? args.c[at.first + j] : from_stat<T>(0.f);
    memcpy(&words[i], &own, sizeof(own));
  });
}

/// v = before(c + bias) of the thread's vectors.
template <class T, class Input>
__device__ __forceinline__ void keep_pending(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                             const HeldPlanesShared& shared,
                                             const uint4 (&words)[kKeptVectors<T>],
                                             float (&v)[kKeptVectors<T>][kLanes<T>]) {
  for_each_kept(args, plane, [&](int i, const HeldPlane& at) {
    Vector<T, kLanes<T>> c;
    memcpy(&c, &words[i], sizeof(c));
    const float bias = shared.bias[at.channel];
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[i][j] = Input{}(to_stat(c.at[j]), bias, args.parameter);
  });
}

/// As sum_of_plane.
template <bool kSquares, class T>
__device__ __forceinline__ float sum_of_kept(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                             const HeldPlanesShared& shared, float mean,
                                             float (&v)[kKeptVectors<T>][kLanes<T>]) {
  float sum[kLanes<T>] = {};
  for_each_kept(args, plane, [&](int i, const HeldPlane& at) {
    if (!at.is_inside(args)) {  // what is not the tile's lies at no distance
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) v[i][j] = at.has(j) ? v[i][j] : mean;
    }
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const float distance = v[i][j] - mean;
      sum[j] += kSquares ? distance * distance : distance;
    }
  });
  return sum_of_team(args, shared, sum);
}

/// \param parameter parameter_behind
template <class T, class Input>
__device__ __forceinline__ void normalize_kept(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                               const HeldPlanesShared& shared, float mean, float parameter,
                                               float (&v)[kKeptVectors<T>][kLanes<T>]) {
  for_each_kept(args, plane, [&](int i, const HeldPlane& at) {
    const float scale = shared.scale[at.channel], shift = shared.shift[at.channel];
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[i][j] = (v[i][j] - mean) * scale + shift;
    float slope = 0.f;
    if constexpr (kHasChannelSlopes<Input>) slope = shared.slope[at.channel];
    activate_behind<Input>(parameter, v[i], [&](int) { return slope; });
    store_plane(args, at, v[i]);
  });
}

/// A block for each tile, or for as many groups as it has teams; blocks of a group are a cluster.
template <class T, class Input>
__global__ void __launch_bounds__(HeldPlanes::kKeptThreads, kKeptBlocks)
    activation_group_norm_kept_planes(const HeldPlanesArgs<T> args) {
  extern __shared__ __align__(kAccessBytes) char raw_shared[];
  const HeldPlanesShared shared(raw_shared, args);
  const HeldPlane plane(args, blockIdx.x);
  wait_for_kernel_before();
  const float parameter = parameter_behind<T, Input>(args.activation, args.parameter);
  uint4 words[kKeptVectors<T>];
  load_kept(args, plane, words);
  load_plane_channels<T, Input>(args, plane, shared);
  __syncthreads();
  float v[kKeptVectors<T>][kLanes<T>];
  keep_pending<T, Input>(args, plane, shared, words, v);
  GroupMoments moments = moments_of_plane(args, plane, [&](auto squares, float mean) {
    return sum_of_kept<squares.value>(args, plane, shared, mean, v);
  });
  if (args.counts.tiles > 1) {
    if (threadIdx.x == 0) {
      args.part[blockIdx.x] = {static_cast<float>(moments.mean), static_cast<float>(moments.m2)};
    }
    wait_for_tiles(true);
    moments = merge_tiles(args.part + plane.group * args.counts.tiles, args.counts,
                          static_cast<int>(threadIdx.x % 32), 32);
  }
  const float mean = fill_plane_table(args, plane, shared, moments);
  normalize_kept<T, Input>(args, plane, shared, mean, parameter, v);
}

}  // namespace upconv3d::cuda
