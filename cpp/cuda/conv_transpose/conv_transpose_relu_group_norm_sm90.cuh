// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_relu_group_norm_sm90: the forward pass after packing.
///
///   x     [N,D,H,W,C]                 operand  read through TMA im2col; or packed by layout/pack as
///         [N,groups,D,H,W,channels]            channels of a group, then zeros
///   w     [T*R*S,K,channels]          operand  packed by layout/pack; or, of that dtype,
///         [C,T*R*S,K]                          channels_last_3d as PyTorch keeps it: K contiguous, which
///                                              wgmma takes of 16 bits, and zeros beyond C and K are TMA's
///   a     [N,Z,P,Q,K]                 output   before(conv + bias), then y: in place, or beside it
///   part  [N,moments,K/granule,2]     float    (mean, M2) of before(conv + bias) as it is stored
///   table [N,G,4]                     float    mean, rest of the mean, 1/sqrt(var + eps)
///
/// before() is ReLU or nothing, in kernels of their own (CURVED) any activation; y = after(normalized a),
/// after() nothing, ReLU or a slope (core/tail.hpp).
///
/// Where y is to be [N,K,Z,P,Q], or its rows are no whole 16-byte chunks, a is scratch memory of rows that
/// are, and this kernel ends with the moments, as channel_table [3,N,K]; so it does where after() is another
/// activation. Normalizing and transposing is then group_norm_normalize's work, which finds the steps of 16
/// bits through moment_of [Z,P,Q].
///
/// One launch takes kMaxSlabs slabs. Where there are more, each of several launches takes a share of them, in
/// the same order, with the partial moments of its own; group_norm_finalize_slabs merges those.
///
/// Where the launch is linear, a is the result, [N,Z,P,Q,K] or [N,K,Z,P,Q], of a block without normalization;
/// of a plain convolution it is the gradient at the input of a transposed one (core/grad_x_plan.hpp).
///
/// An implicit GEMM whose rows are output channels (gemm_m = K) and whose columns are output positions of one
/// sample (gemm_n = Z*P*Q), reduced over taps and input channels (gemm_k = T*R*S*C); of each convolution
/// group, where there are several.
///
/// Tiles belong to slabs: boxes of positions of one phase of the stride, which the same taps reach
/// (core/border_slabs.hpp). Zeros that a stride inserts, and padding, are thus not multiplied. A tile never
/// straddles two samples: part needs no atomics, and results repeat bit for bit, whichever block has a tile.
/// Of up to 64 output channels a tile may be of a pair of slabs, one to each of the warpgroups that multiply
/// (core/phase_pairs.hpp): what is said of its second 64 channels is then said of the second slab's 64.
///
/// One block per multiprocessor, three warpgroups:
///   warp 0       hands out tiles and loads their operands by TMA (mainloop_sm90.cuh)
///   warps 4-11   two warpgroups multiply by wgmma; bias, before(), rounding (relu_epilogue_sm90.cuh); of
///                tiles of few k-blocks, or stored with a step, the moments
///   warps 1, 2   store the results of warpgroup 1, 2 and take the other tiles' moments
///                (drain_tiles_sm90.cuh)
///   warp 3       merges moments and normalizes finished samples; warps 1 and 2 normalize too, between two
///                tiles, and when no tile is left, so do the warps that multiplied, the block's last tile
///                from where it was staged (group_norm_sm90.cuh). Or a few blocks leave their
///                multiprocessors to group_norm_normalize, launched beside this kernel.
///
/// Where no launch packs anything, none has cleared the counters either: block 0 does, and all others wait
/// for it at a barrier of the cooperative launch.
///
/// With three products, operands come as v = hi + lo and every k-block accumulates hi*lo + lo*hi + hi*hi in
/// the tensor cores, then adds that into float registers: tensor cores truncate as they accumulate, and only
/// short sums may be left to them (Ootomo & Yokota, arXiv:2203.03341).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include <cooperative_groups.h>

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

#include "core/slab_launches.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/conv_transpose/drain_tiles_sm90.cuh"
#include "cuda/conv_transpose/fill_params_sm90.cuh"
#include "cuda/conv_transpose/finalize_sm90.cuh"
#include "cuda/conv_transpose/group_norm_sm90.cuh"
#include "cuda/conv_transpose/mainloop_sm90.cuh"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"
#include "cuda/conv_transpose/remembered_launch_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"
#include "cuda/conv_transpose/tiles_sm90.cuh"
#include "cuda/launch.cuh"

namespace upconv3d::cuda {

/// Consumers: two warpgroups multiply what load_tiles brings and stage the results.
///
/// \tparam W_IN_PLACE of params. Known here, not where it is needed: between two ways to multiply into the
/// same registers ptxas would wait for each instruction (C7515).
template <class Traits, bool W_IN_PLACE>
CUTLASS_DEVICE void multiply_tiles(KernelParams<Traits> const& params, char* shared_memory) {
  using namespace cute;
  SharedMemory<Traits> const shared(uniform_shared(shared_memory), params.rings);
  using Epilogue = ReluEpilogue<Traits>;
  ControlStorage<Traits>& control = *shared.control;
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
  auto rings = make_operand_rings<Traits, W_IN_PLACE>(params, shared, warpgroup);
  Tensor acc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::BLK_K>, Int<Traits::BLK_POS>>{});  // ((2,2,WG_POS/8),1,1)
  char* const staging = shared.staging + warpgroup * Traits::WG_STAGING_BYTES;
  RingCursor slot;
  RingCursor staged{warpgroup, 0};
  for (;;) {
    control.tiles.wait_full(slot);
    TileNote<Traits> const note = uniform_note(control.tile[slot.slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.tiles.arrive_empty(slot.slot);
    slot.advance(kTileSlots);
    if (is_end(note)) break;
    TileWork const tile = noted_tile(params, note);
    KernelSlab<Traits> const& slab = params.slabs[slab_of_warpgroup(params, tile.slab, warpgroup)];
    int const channel = tile.channel + (Traits::PAIRED ? 0 : warpgroup % Traits::WARPGROUPS_K * 64);
    int const valid = Traits::PAIRED ? slab.positions - tile.position
                                     : tile.positions - warpgroup / Traits::WARPGROUPS_K * Traits::WG_POS;
    int const x_loads = Traits::PAIRED ? slab.own_loads : tile.x_loads;
    typename Epilogue::Terms terms;
    bool takes_moments;
    auto const look_up = [&] {
      terms = Epilogue::load_terms(params, tile.n, channel);
      takes_moments = consumers_take_moments(params, slab, tile.place, valid);
    };
    if constexpr (Traits::PAIRED) rings.pass(slab.first_load, tile.shared_taps);
    if constexpr (Traits::PRODUCTS == 1) {
      mma_one_product(rings, x_loads, tile.shared_taps, tile.shared_rows, acc, [&] {
        look_up();
        // Here already, because ptxas would let the loads follow the wait for wgmma, but for a branch. Not in
        // a pair, whose other warpgroup waits for the operands that this one holds.
        if constexpr (!Traits::PAIRED) control.staging.wait_empty(staged);
      });
    } else {
      mma_three_products(rings, x_loads, tile.shared_taps, tile.shared_rows, acc);
    }
    if constexpr (Traits::PAIRED) rings.pass(slab.later_loads, tile.shared_taps);
    auto const hand_over = [&] {
      cute::tma_store_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) control.staging.arrive_full(warpgroup);
      staged.phase ^= 1;
    };
    control.staging.wait_empty(staged);  // of one product again, or ptxas releases the rings' last slots late
    if constexpr (Traits::PRODUCTS != 1) look_up();
    int step[2];
    float2* const rows = takes_moments ? control.row[warpgroup] : nullptr;
    Epilogue::prepare(params, terms, channel, valid, acc, step, rows);
    Epilogue::stage(params, valid, acc, step, rows, staging, control.step[warpgroup]);
    hand_over();
    if constexpr (Traits::STAGE_ROUNDS == 2) {
      control.staging.wait_empty(staged);
      Epilogue::template stage_round<1>(params, acc, staging);
      hand_over();
    }
  }
  // All done long ago; said for the compiler, which else waits inside the branches that follow.
  cute::warpgroup_wait<0>();
}

/// By all threads of one block. \see counter_count
template <class Traits>
CUTLASS_DEVICE void clear_counters(KernelParams<Traits> const& params) {
  for (int i = threadIdx.x; i < params.num_counters; i += Traits::THREADS) params.next_tile[i] = 0;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1)
    conv_transpose_relu_group_norm_sm90(__grid_constant__ const KernelParams<Traits> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Swizzled tiles of 128-byte rows must start on 1024-byte boundaries.
  extern __shared__ __align__(1024) char raw_shared[];
  SharedMemory<Traits> const shared(raw_shared, params.rings);
  ControlStorage<Traits>& control = *shared.control;
  cooperative_groups::grid_group const grid = cooperative_groups::this_grid();
  cooperative_groups::grid_group::arrival_token cleared{};
  if (params.num_counters > 0) {
    if (blockIdx.x == 0) clear_counters(params);
    cleared = grid.barrier_arrive();
  }
  constexpr int kDrainWarps = 2;
  if (threadIdx.x == 0) {
    control.tile_sample = 0;
    control.x.init(1, kConsumerWarps);
    control.w.init(1, kConsumerWarps);
    control.tiles.init(1, kConsumerWarps + kDrainWarps);
    control.staging.init(kConsumerWarps / 2, 1);
    for (auto& items : control.items) items.init(1, 1);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < params.num_slabs) {
    KernelSlab<Traits> const& slab = params.slabs[threadIdx.x];
    control.first_tile[threadIdx.x] = slab.first_tile;
    control.first_moment[threadIdx.x] = slab.first_moment;
    control.last_count[threadIdx.x] = (slab.positions - 1) % Traits::STAGED_POS + 1;
  }
  if (params.num_counters > 0) {
    grid.barrier_wait(std::move(cleared));  // for the block's own threads too
  } else {
    __syncthreads();
  }
  // What is launched beside this kernel looks at counters, which are clear now.
  if (params.normalized_beside) let_next_begin();

  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= 4) {
    cutlass::arch::warpgroup_reg_alloc<Traits::CONSUMER_REGISTERS>();
    if constexpr (Traits::READS_W_IN_PLACE) {
      params.w_in_place ? multiply_tiles<Traits, true>(params, raw_shared)
                        : multiply_tiles<Traits, false>(params, raw_shared);
    } else {
      multiply_tiles<Traits, false>(params, raw_shared);
    }
    if (params.normalizes) {
      // Both warpgroups are done with the operands' memory: now items come there. What the other one staged
      // can be seen, too.
      bool const keeps = may_keep(params, control.last_tile);
      keeps ? KeptTileBarrier::sync() : cutlass::arch::NamedBarrier::sync(32 * kConsumerWarps, 1);
      static_assert(kConsumerWarps * Traits::ITEM_BUFFERS * Traits::ITEM_BYTES <= Traits::RING_BYTES);
      GroupNormWorker<Traits, false> worker(params, control, control.items[warp - 3]);
      if (keeps && (warp == 4 || warp == 8)) worker.begin_with(control.handed_item[warp / 8]);
      worker.run(shared.x + (warp - 4) * Traits::ITEM_BUFFERS * Traits::ITEM_BYTES,
                 keeps ? shared.staging : nullptr);
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::HELPER_REGISTERS>();
    if (threadIdx.x == 0) load_tiles(params, shared);
    if (warp == 1 || warp == 2) drain_tiles(params, shared, warp - 1);
    if (warp == 3 && !params.linear) {
      if (params.normalizes) {
        GroupNormWorker<Traits, true>(params, control, control.items[0]).run(shared.items);
      } else {
        GroupFinalizer<Traits>(params, control).run();
      }
    }
  }
#endif
}

/// A launch of one persistent block per multiprocessor, all at once.
template <class Traits>
class ConvTransposeLaunchSm90 : public RememberedLaunch {
 public:
  explicit ConvTransposeLaunchSm90(const ConvTransposeParams& params) : shown_(mapped_addresses(params)) {
    constexpr bool is_half = std::is_same_v<typename Traits::Operand, cutlass::half_t>;
    constexpr DType operand = is_half ? DType::kFloat16 : DType::kBFloat16;
    constexpr DType output = std::is_same_v<typename Traits::Output, float> ? DType::kFloat32 : operand;
    fill_kernel_params(params, operand, output, params_, maps_);
    blocks_ = std::min(params_.order_size, params.sm_count);
    reserve_shared_memory(kName, kKernel, kSharedMemoryBytes);
  }

  /// With the addresses of `params`, which differs from the constructor's in nothing else.
  void run(const ConvTransposeParams& params, cudaStream_t stream) {
    const MappedAddresses to = mapped_addresses(params);
    maps_.move(shown_, to);
    shown_ = to;
    point_to(params, params_);
    launch_cooperative(kName, kKernel, &params_, {blocks_, Traits::THREADS, kSharedMemoryBytes}, stream,
                       [&](int blocks) {
                         const int leaving = blocks * params.leaving_blocks / blocks_;
                         params_.tile_blocks = std::max(blocks - leaving, 1);
                       });
  }

 private:
  static constexpr const char* kName = "conv_transpose_relu_group_norm_sm90";
  static inline const void* const kKernel =
      reinterpret_cast<const void*>(conv_transpose_relu_group_norm_sm90<Traits>);

  KernelParams<Traits> params_{};
  TensorMaps maps_;
  MappedAddresses shown_;
  int blocks_ = 0;
};

template <class Traits>
void launch_slabs(const ConvTransposeParams& params, cudaStream_t stream) {
  using Launch = ConvTransposeLaunchSm90<Traits>;
  params.launches > 1 ? run_remembered<SlabLaunchesSm90<Launch>>(params, stream)
                      : run_remembered<Launch>(params, stream);
}

template <class Operand, int PRODUCTS, class Stored, int BLK_K, int BLK_POS, int BLK_C = int(kBlockInputs)>
void launch_conv_transpose_relu_group_norm_sm90(const ConvTransposeParams& params, cudaStream_t stream) {
  const auto launch = [&]<bool PAIRED>() {
    using Floor = ConvTransposeTraitsSm90<Operand, PRODUCTS, Stored, BLK_K, BLK_POS, BLK_C, false, PAIRED>;
    using Curved = ConvTransposeTraitsSm90<Operand, PRODUCTS, Stored, BLK_K, BLK_POS, BLK_C, true, PAIRED>;
    is_floor(params.before.kind) ? launch_slabs<Floor>(params, stream) : launch_slabs<Curved>(params, stream);
  };
  if constexpr (pairs_phases(BLK_K, BLK_POS, BLK_C, PRODUCTS, 8 * int(sizeof(Stored)))) {
    if (params.pair_phases) return launch.template operator()<true>();
  }
  launch.template operator()<false>();
}

}  // namespace upconv3d::cuda
