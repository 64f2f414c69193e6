// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_group_norm_kept: activation_group_norm_held (held_norm.cuh) where a thread has so few vectors
/// that its registers keep before(c + bias) from the first sum to the result. The same bits, as
/// activation_group_norm_kept_planes has those of the other form (kept_norm_planes.cuh). A transposed result
/// is written by other threads than brought its values, so that those lie in shared memory, too.
#pragma once

#include <cstdint>

#include "cuda/group_norm/held_norm.cuh"

namespace upconv3d::cuda {

/// v = before(c + bias) of the thread's vectors, all of which are on their way at once.
template <class T, class Input>
__device__ __forceinline__ void keep_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                          const HeldShared& shared, float (&v)[kKeptVectors<T>][kLanes<T>]) {
  uint4 words[kKeptVectors<T>];
#pragma unroll
  for (int i = 0; i < kKeptVectors<T>; ++i) {
    if (i < tile.count) words[i] = *reinterpret_cast<const uint4*>(args.c + tile.offset + i * tile.step);
  }
  if (args.y_planes) {
#pragma unroll
    for (int i = 0; i < kKeptVectors<T>; ++i) {
      if (i < tile.count) shared.held[i * blockDim.x + threadIdx.x] = words[i];
    }
  }
  load_channels<T, Input>(args, tile, shared);
  __syncthreads();
  const HeldChannels<T, Input> channels(args, tile, shared);
#pragma unroll
  for (int i = 0; i < kKeptVectors<T>; ++i) {
    if (i < tile.count) channels.pending(args, words[i], v[i]);
  }
}

/// As add_up.
template <class T, class Input>
__device__ __forceinline__ void add_up_kept(const HeldArgs<T>& args, const HeldTile& tile,
                                            const HeldShared& shared, bool squares,
                                            const float (&v)[kKeptVectors<T>][kLanes<T>],
                                            float (&sum)[kLanes<T>]) {
  const HeldChannels<T, Input> channels(args, tile, shared);
#pragma unroll
  for (int i = 0; i < kKeptVectors<T>; ++i) {
    if (i >= tile.count) break;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const float distance = v[i][j] - channels.mean[j];  // the mean is 0 at first
      sum[j] += distance * (squares ? distance : 1.f);
    }
  }
}

/// A block for each tile; blocks of a slab are a cluster.
template <class T, class Input>
__global__ void __launch_bounds__(kMaxHeldThreads, 1) activation_group_norm_kept(const HeldArgs<T> args) {
  extern __shared__ __align__(kAccessBytes) char raw_shared[];
  const HeldShared shared(raw_shared, args);
  const HeldTile tile(args, blockIdx.x);
  wait_for_kernel_before();
  const float parameter = parameter_behind<T, Input>(args.activation, args.parameter);
  float v[kKeptVectors<T>][kLanes<T>];
  keep_tile<T, Input>(args, tile, shared, v);
  take_tile_moments(args, tile, shared, [&](bool squares, float (&sum)[kLanes<T>]) {
    add_up_kept<T, Input>(args, tile, shared, squares, v, sum);
  });
  if (args.counts.tiles > 1) {
    wait_for_tiles(true);
    merge_tiles_of_groups(args, tile, shared);
    __syncthreads();
  }
  if (args.y_planes) {
    normalize_tile_to_planes<T, Input>(args, tile, shared, parameter);
    return;
  }
  const HeldChannels<T, Input> channels(args, tile, shared);
#pragma unroll
  for (int i = 0; i < kKeptVectors<T>; ++i) {
    if (i >= tile.count) break;
    *reinterpret_cast<uint4*>(args.y + tile.offset + i * tile.step) =
        channels.normalized(args, parameter, v[i]);
  }
}

}  // namespace upconv3d::cuda
