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

/// Vectors of 16 values, whose way from shared memory is then less than what is due of them.
template <class T>
inline constexpr int kVectorsAtOnce = 16 / kLanes<T>;

/// Calls body(vector, its channel of the tile, its first element of c) for the thread's vectors, each of
/// which is all of the tile and of one channel. What else a vector costs would be several times what its
/// values do.
/// \tparam kAtOnce vectors that are read before the body has the first of them
template <int kAtOnce, class T, class Body>
__device__ __forceinline__ void for_each_whole(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                               const HeldPlanesShared& shared, Body body) {
  const uint4* held = shared.held + threadIdx.x;
  const int threads = blockDim.x, positions = args.positions;
  int first = plane.first, channel = plane.channel, position = plane.position;
#pragma unroll kAtOnce
  for (int i = 0; i < plane.count; ++i, held += threads) {
    body(*held, channel, first);
    first += plane.step;
    channel += args.step_channels;
    position += args.step_positions;
    if (position >= positions) position -= positions, ++channel;
  }
}

/// Sends the thread's vectors on their way, all at once.
template <class T>
__device__ __forceinline__ void load_plane(const HeldPlanesArgs<T>& args, HeldPlane at,
                                           const HeldPlanesShared& shared) {
  uint4* to = shared.held + threadIdx.x;
  if (args.whole) {
    const T* from = args.c + at.first;
#pragma unroll 4
    for (int i = 0; i < at.count; ++i, from += at.step, to += blockDim.x) {
      __pipeline_memcpy_async(to, from, kAccessBytes);
    }
    __pipeline_commit();
    return;
  }
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
      v[j] = Input{}(to_stat(c.at[j]), bias[j], args.parameter);
    }
  }
  if constexpr (Input::kDecidesLater) activate_plane(args, at, shared, v);
}

/// The same of a whole vector.
template <class T, class Input>
__device__ __forceinline__ void whole_pending(const HeldPlanesArgs<T>& args, uint4 word, float bias,
                                              float (&v)[kLanes<T>]) {
  Vector<T, kLanes<T>> c;
  memcpy(&c, &word, sizeof(c));
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) v[j] = Input{}(to_stat(c.at[j]), bias, args.parameter);
}

/// Adds the thread's values' distances from `mean`, or their squares, to sum[lane].
template <class T, class Input>
__device__ __forceinline__ void add_up_plane(const HeldPlanesArgs<T>& args, HeldPlane at,
                                             const HeldPlanesShared& shared, bool squares, float mean,
                                             float (&sum)[kLanes<T>]) {
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
}

/// The same where args.whole.
template <class T, class Input>
__device__ __forceinline__ void add_up_whole(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                             const HeldPlanesShared& shared, bool squares, float mean,
                                             float (&sum)[kLanes<T>]) {
  for_each_whole<kVectorsAtOnce<T>>(args, plane, shared, [&](uint4 word, int channel, int) {
    float v[kLanes<T>];
    whole_pending<T, Input>(args, word, shared.bias[channel], v);
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const float distance = v[j] - mean;
      sum[j] += distance * (squares ? distance : 1.f);
    }
  });
}

/// Sum of the team's values' distances from `mean`, or of their squares, which all its threads get. All
/// threads of the block take part.
template <class T, class Input>
__device__ __forceinline__ float sum_of_plane(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                              const HeldPlanesShared& shared, bool squares, float mean) {
  float sum[kLanes<T>] = {};
  if constexpr (Input::kDecidesLater) {
    add_up_plane<T, Input>(args, plane, shared, squares, mean, sum);
  } else if (args.whole) {
    add_up_whole<T, Input>(args, plane, shared, squares, mean, sum);
  } else {
    add_up_plane<T, Input>(args, plane, shared, squares, mean, sum);
  }
  return sum_of_team(args, shared, sum);
}

/// \param parameter parameter_behind
template <class T, class Input>
__device__ __forceinline__ void normalize_vectors(const HeldPlanesArgs<T>& args, HeldPlane at,
                                                  const HeldPlanesShared& shared, float mean,
                                                  float parameter) {
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

/// The same where args.whole.
template <class T, class Input>
__device__ __forceinline__ void normalize_whole(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                                const HeldPlanesShared& shared, float mean, float parameter) {
  for_each_whole<2>(args, plane, shared, [&](uint4 word, int channel, int first) {
    float v[kLanes<T>];
    whole_pending<T, Input>(args, word, shared.bias[channel], v);
    const float scale = shared.scale[channel], shift = shared.shift[channel];
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[j] = (v[j] - mean) * scale + shift;
    float slope = 0.f;
    if constexpr (kHasChannelSlopes<Input>) slope = shared.slope[channel];
    activate_behind<Input>(parameter, v, [&](int) { return slope; });
    store_vector(args.y + first, v);
  });
}

template <class T, class Input>
__device__ __forceinline__ void normalize_plane(const HeldPlanesArgs<T>& args, const HeldPlane& plane,
                                                const HeldPlanesShared& shared, float mean, float parameter) {
  if constexpr (!Input::kDecidesLater) {
    if (args.whole) return normalize_whole<T, Input>(args, plane, shared, mean, parameter);
  }
  normalize_vectors<T, Input>(args, plane, shared, mean, parameter);
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
