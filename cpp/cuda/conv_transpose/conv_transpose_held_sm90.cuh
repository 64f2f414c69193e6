// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_held_sm90: the forward pass after packing, of blocks whose result the multiprocessors'
/// shared memory holds, for groups 1.
///
///   x     [N,D,H,W,C]              operand  read through TMA im2col
///   w     [T*R*S,K,C]              operand  packed by layout/pack; or, of that dtype,
///         [C,T*R*S,K]                       channels_last_3d as PyTorch keeps it
///   part  [N,moments,K/granule,4]  float    (mean, M2, count) of before(conv + bias), as held
///   y     [N,Z,P,Q,K]              output
///
/// y = after(normalized before(conv + bias)): before() ReLU or nothing, after() piecewise linear
/// (core/tail.hpp).
///
/// Every block computes a few tiles, of 64 output channels x positions of one phase of the stride, and keeps
/// them as they will be normalized, rounded to y's dtype. When all blocks' partial moments are in memory,
/// each merges those of its tiles' norm groups, normalizes, and writes y: once, where it does not run out of
/// room. (Tiles that it has no room for wait in y.) So of small blocks, which are all waiting, little is
/// left: one launch, one barrier of all blocks.
///
///   warps 0-3  a warpgroup, multiplies
///   warp 4     loads w and x of a k-block at a time, through a ring
///
/// What counts here is the number of instructions that a block runs through once: they come cold from memory,
/// at 10 to 15 cycles each.
///
/// Blocks wait for each other, so the launch is cooperative; its barrier is cooperative groups' own, which
/// needs no counter that somebody had to clear. A tile's moments are its own, and merged in an order that the
/// problem and, of many norm groups, the number of blocks decide: results repeat bit for bit.
#pragma once

#include <cstdint>

#include <cooperative_groups.h>

#include "cuda/conv_transpose/held_params_sm90.cuh"

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"

#include "cuda/conv_transpose/held_epilogue_sm90.cuh"
#include "cuda/conv_transpose/held_normalize_sm90.cuh"

namespace upconv3d::cuda {

/// One thread: the operands of all k-blocks of the block's tiles.
template <class Traits>
CUTLASS_DEVICE void load_held_tiles(HeldParams<Traits> const& params, HeldShared<Traits> const& shared) {
  RingBarriers<kMaxHeldStages>& stages = shared.control->stages;
  RingCursor at;
  for_each_held_tile(params, [&](int, HeldTile const& tile, bool) {
    HeldSlab const& slab = params.slabs[tile.slab];
    CUtensorMap const* const map = &params.x[tile.slab];
    int3 const first = slab.coordinates(tile.position);
    int const d = first.x + slab.corner[0], h = first.y + slab.corner[1], v = first.z + slab.corner[2];
    int c_block = 0, s = 0, r = 0, t = 0;  // of the k-block; input channels are innermost, then the width
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_block = 0; k_block < slab.k_blocks; ++k_block) {
      int const c = (slab.c_begin + c_block) * Traits::BLK_C;
      int const tap_t = slab.tap[0] - t * slab.tap_step[0];
      int const tap_r = slab.tap[1] - r * slab.tap_step[1];
      int const tap_s = slab.tap[2] - s * slab.tap_step[2];
      int const tap = (tap_t * params.kernel[1] + tap_r) * params.kernel[2] + tap_s;
      stages.wait_empty(at);
      char* const to = shared.stages + at.slot * Traits::SHAPE.stage_bytes;
      std::uint64_t* const full = stages.expect(at.slot, Traits::SHAPE.stage_bytes);
      cute::SM90_TMA_LOAD_IM2COL_5D::copy(
          map, full, to + Traits::W_BYTES, c, v, h, d, tile.n, std::uint16_t(s * slab.dilation[2]),
          std::uint16_t(r * slab.dilation[1]), std::uint16_t(t * slab.dilation[0]));
      auto const hint = std::uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
      if constexpr (Traits::W_IN_PLACE) {
        cute::SM90_TMA_LOAD_3D::copy(&params.w, full, hint, to, tile.channel, tap, c);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&params.w, full, hint, to, c, tile.channel, tap);
      }
      at.advance(params.stages);
      if (++c_block < slab.c_blocks) continue;
      c_block = 0;
      if (++s < slab.taps_w) continue;
      s = 0;
      if (++r < slab.taps_h) continue;
      r = 0;
      ++t;
    }
  });
}

/// By lanes of the loading warp but the first: brings the block's share of x and w into L2, all at once,
/// which loads would wait for one after the other, and then what channels have, and the block wants in the
/// end.
template <class Traits>
CUTLASS_DEVICE void prefetch_held(HeldParams<Traits> const& params) {
  int const lane = threadIdx.x % 32;
  if (lane <= 2) {
    std::int64_t const first = std::int64_t(blockIdx.x) * params.prefetched_bytes[lane - 1];
    int const bytes =
        int(min(std::int64_t(params.prefetched_bytes[lane - 1]), params.operand_bytes[lane - 1] - first));
    if (bytes > 0) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(params.operands[lane - 1] + first),
                   "r"(bytes)
                   : "memory");
    }
    return;
  }
  constexpr int kLine = 128 / int(sizeof(typename Traits::Output));
  constexpr int kTensors = 3;  // lanes 3 to 29, in turn
  int const tensor = lane % kTensors;
  auto const* const first = tensor == 0 ? params.bias : tensor == 1 ? params.gamma : params.beta;
  if (first == nullptr || lane >= 30) return;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int line = lane / kTensors - 1; line * kLine < params.k; line += 9) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + line * kLine));
  }
}

/// By the warpgroup: multiplies the block's tiles, takes their moments, and keeps them.
template <class Traits>
CUTLASS_DEVICE void multiply_held_tiles(HeldParams<Traits> const& params, HeldShared<Traits> const& shared) {
  using namespace cute;
  typename Traits::TiledMma mma;
  auto const thread_mma = mma.get_thread_slice(0);
  auto const all_w = Traits::descriptors_of_w(thread_mma, shared.stages);  // (MMA,MMA_K,BLK_C/16)
  auto const all_x =
      Traits::descriptors_of_x(thread_mma, shared.stages + Traits::W_BYTES);  // (MMA,MMA_POS,BLK_C/16)
  Tensor acc =
      partition_fragment_C(mma, Shape<Int<Traits::BLK_K>, Int<Traits::BLK_POS>>{});  // ((2,2,BLK_POS/8),1,1)
  RingBarriers<kMaxHeldStages>& stages = shared.control->stages;
  auto const release = [&](int slot) {
    if (slot >= 0 && threadIdx.x % 32 == 0) stages.arrive_empty(slot);
  };
  RingCursor at;
  for_each_held_tile(params, [&](int round, HeldTile const& tile, bool is_last) {
    HeldSlab const& slab = params.slabs[tile.slab];
    int const k_blocks = __shfl_sync(0xffffffffu, slab.k_blocks, 0);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int done = -1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      stages.wait_full(at);
      int const from = at.slot * (Traits::SHAPE.stage_bytes / kDescriptorUnit);
      multiply_k_block(mma, all_w, from, all_x, from, acc);
      release(done);
      done = at.slot;
      at.advance(params.stages);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    release(done);

    char* const to = shared.tile(params, round);
    HeldEpilogue<Traits>::keep(params, slab, tile, acc, to);
    // Of the last slot, the last tile stays.
    if (round >= params.slots - 1 && !is_last) HeldRows<Traits>(params, slab, tile).move_to_y(to);
  });
}

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, Traits::SHAPE.blocks_per_sm)
    conv_transpose_held_sm90(__grid_constant__ const HeldParams<Traits> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Swizzled tiles of 128-byte rows must start on 1024-byte boundaries.
  extern __shared__ __align__(1024) char raw_shared[];
  HeldShared<Traits> const shared(raw_shared, params);
  if (threadIdx.x == 0) {
    shared.control->stages.init(1, Traits::CONSUMER_WARPS);
    cutlass::arch::fence_barrier_init();
  } else if (threadIdx.x == 32) {
    cute::prefetch_tma_descriptor(&params.w);
  } else if (threadIdx.x >= 64 && int(threadIdx.x) - 64 < params.num_slabs) {
    cute::prefetch_tma_descriptor(&params.x[threadIdx.x - 64]);
  }
  __syncthreads();
  bool const loads = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == Traits::CONSUMER_WARPS;
  if (!loads) {
    multiply_held_tiles(params, shared);
  } else if (threadIdx.x % 32 == 0) {
    load_held_tiles(params, shared);
  } else {
    prefetch_held(params);
  }
  __syncwarp();
  cooperative_groups::this_grid().sync();
  if (params.table != nullptr) {
    if (!loads) write_held_table(params, *shared.control);
    __syncwarp();
    cooperative_groups::this_grid().sync();
  }
  if (!loads) normalize_held_tiles(params, shared);
#endif
}

}  // namespace upconv3d::cuda
