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

#include "cuda/group_norm/held_plane.cuh"

namespace upconv3d::cuda {

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

/// Sum of the team's values' distances from `mean`, or of their squares, which all its threads get. All
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
  return sum_of_team(args, shared, sum);
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
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[j] = (v[j] - mean) * scale[j] + shift[j];
    float slope[kLanes<T>] = {};
    if constexpr (kHasChannelSlopes<Input>) read_row(args, at, shared.slope, slope);
    activate_behind<Input>(parameter, v, [&](int j) { return slope[j]; });
    store_plane(args, at, v);
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
    const GroupMoments moments = moments_of_plane(args, plane, [&](auto squares, float mean) {
      return sum_of_plane<T, Input>(args, plane, shared, squares, mean);
    });
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
