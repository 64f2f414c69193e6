// SPDX-License-Identifier: Apache-2.0
/// \file
/// A block's next tile of float32, on its way to shared memory while the block works on the one before.
///
/// Each thread copies what itself will take, 128 bytes or less: no barrier is needed, and the tile costs no
/// registers while it is awaited.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/input_tile.cuh"

namespace upconv3d::cuda {

inline constexpr int kAwaitedFloats = 32;  // of a thread
inline constexpr int kAwaitedBytes = kInputThreads * kAwaitedFloats * static_cast<int>(sizeof(float));

/// \tparam kVector floats of a copy: 4 or 1
template <int kVector>
struct AwaitedTile {
  float*
      own;  // the thread's first 4 floats; with any kVector it has the same places, 16 bytes here and there

  __device__ AwaitedTile(float* memory, int thread) : own(memory + thread * 4) {}

  __device__ float* element(int index) const {
    return own + index * kVector / 4 * (kInputThreads * 4) + index * kVector % 4;
  }

  /// Requests the thread's element `index`; zeros where it is not `inside`.
  ///
  /// \param policy of L2, see streaming_policy and staying_policy
  __device__ void request(int index, const float* source, bool inside, std::uint64_t policy) const {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(element(index)));
    if constexpr (kVector == 4) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(source),
                   "r"(inside ? 16 : 0), "l"(policy)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2, %3;" ::"r"(to), "l"(source),
                   "r"(inside ? 4 : 0), "l"(policy)
                   : "memory");
    }
  }

  /// Waits for all that the thread requested.
  __device__ static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  __device__ void take(int index, float (&v)[kVector]) const {
    const float* const from = element(index);
    if constexpr (kVector == 4) {
      const float4 q = *reinterpret_cast<const float4*>(from);
      v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    } else {
      v[0] = *from;
    }
  }
};

/// Of what is read once.
__device__ inline std::uint64_t streaming_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Of what may be read again soon.
__device__ inline std::uint64_t staying_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Requests a tile of float [N,C,D,H,W]; kVector as for pack_ncdhw_tile.
template <int kVector>
__device__ inline void request_ncdhw_tile(const InputArgs& args, const InputTile& tile, float* memory,
                                          std::uint64_t policy) {
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const ChannelTile at(args, tile, thread / 32);
  const AwaitedTile<kVector> awaited(memory, thread);
  const float* const source = static_cast<const float*>(args.x) +
                              (tile.n * args.channels + at.channel) * args.positions + at.first_position;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; i += kVector) {
      const int p = tile_position<kVector>(lane, i);
      const bool inside = at.in_group + j < args.group_channels && at.first_position + p < args.positions;
      awaited.request((j * 4 + i) / kVector, source + j * args.positions + p, inside, policy);
    }
  }
}

template <int kVector>
__device__ inline void take_ncdhw_tile(float* memory, float (&values)[8][4]) {
  const AwaitedTile<kVector> awaited(memory, thread_of_block());
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; i += kVector) {
      float part[kVector];
      awaited.take((j * 4 + i) / kVector, part);
#pragma unroll
      for (int q = 0; q < kVector; ++q) values[j][i + q] = part[q];
    }
  }
}

}  // namespace upconv3d::cuda
