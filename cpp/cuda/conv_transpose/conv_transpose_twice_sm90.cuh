// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_twice_sm90: the forward pass after packing, for groups 1.
///
///   x     [N,D,H,W,C]                 operand  read through TMA im2col
///   w     [T*R*S,K,C]                 operand  packed by layout/pack; or, where a warpgroup's rows are one
///         [C,T*R*S,K]                          phase's, of that dtype, channels_last_3d as PyTorch keeps it
///   part  [N,moments,K/granule,2]     float    (mean, M2) of before(conv + bias), unrounded
///   table [N,G,segments,4]            float    mean, rest of the mean, M2, count
///   y     [N,Z,P,Q,K] or [N,K,Z,P,Q]  output   written once
///
/// y = after(normalized before(conv + bias)): before() ReLU or nothing, after() any activation
/// (core/tail.hpp).
///
/// The convolution is computed for the moments of its values alone and, when these are known, once more: y is
/// normalized in registers and written, nothing is read back. That moves fewer bytes where the arithmetic is
/// small against the output (kernel = stride, few channels), and rounds but once.
///
/// Rows of a tile are output channels, columns are positions of one phase of the stride
/// (core/twice_layout.hpp says which share a block). One block per multiprocessor, three warpgroups:
///   warp 0       loads x through a ring (twice_loads_sm90.cuh)
///   warps 1-2    finish what warpgroups hand over (twice_helper_sm90.cuh)
///   warp 3       deals tiles out (twice_tiles_sm90.cuh) and loads sets of weights, which stay
///   warps 4-11   two warpgroups take turns: one multiplies while the other has its epilogue
/// Blocks wait for each other twice, before moments are merged and before these are used, so the launch is
/// cooperative. Where no launch packs anything, none has cleared the counters either: block 0 does, and all
/// others wait for it first.
///
/// A tile's moments are its own, and merged in an order that the problem decides: results repeat bit for bit,
/// whatever the number of blocks and whichever block computes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <cooperative_groups.h>

#include "cuda/conv_transpose/twice_params_sm90.cuh"

#include "cutlass/arch/reg_reconfig.h"

#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/group_norm_sm90.cuh"
#include "cuda/conv_transpose/merge_moments_sm90.cuh"
#include "cuda/conv_transpose/twice_epilogue_sm90.cuh"
#include "cuda/conv_transpose/twice_helper_sm90.cuh"
#include "cuda/conv_transpose/twice_loads_sm90.cuh"
#include "cuda/conv_transpose/twice_tiles_sm90.cuh"

namespace upconv3d::cuda {

/// Named barriers of a block, see cutlass::arch::NamedBarrier.
enum TwiceBarrier : std::uint32_t { kTurn0, kTurn1, kGroup0, kGroup1, kConsumers };

/// One of the two warpgroups that multiply.
///
/// \tparam TiledMma  that multiplies w as it lies in shared memory
/// \tparam FragmentW (MMA,MMA_ROWS,BLK_C/16) descriptors of the first unit of w
/// \tparam FragmentX (MMA,MMA_POS,BLK_C/16) descriptors of the first slot of x
template <class Traits, class TiledMma, class FragmentW, class FragmentX>
class TwiceMultiplier {
 public:
  CUTLASS_DEVICE TwiceMultiplier(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared,
                                 int group, FragmentW const& w, FragmentX const& x)
      : params_(params), shared_(shared), control_(*shared.control), group_(group), w_(w), x_(x) {
    // Warpgroup 0 begins.
    if (group == 1) pass_turn();
  }

  /// acc (64 x 256) = rows of the tile's set, in this warpgroup's turn. The other's turn comes once it
  /// could not get ahead anyway, for want of room for x, or this one has nothing left to issue.
  /// \param meanwhile called once when all is issued, and may not touch acc
  template <class Accumulator, class Meanwhile>
  CUTLASS_DEVICE void multiply(TwiceTile const& tile, Accumulator& acc, Meanwhile const& meanwhile) {
    using namespace cute;
    constexpr int kUnit = 16;  // descriptors count in 16 bytes
    if (tile.set != loaded_) take_weights(tile);
    int left_of_turn = turn_;
    int unit = first_unit_;
    int done = -1;
    TiledMma mma;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    take_turn();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tap = 0; tap < taps_; ++tap) {
      bool const used = used_taps_ >> tap & 1;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int c_block = 0; c_block < c_blocks_; ++c_block) {
        control_.x.wait_full(at_);
        if (used) {
          Tensor w = make_tensor(w_.data() + unit * (Traits::W_BYTES / kUnit), w_.layout());
          Tensor x = make_tensor(x_.data() + at_.slot * (Traits::X_BYTES / kUnit), x_.layout());
          warpgroup_fence_operand(acc);
          warpgroup_arrive();
          CUTLASS_PRAGMA_UNROLL
          for (int kb = 0; kb < size<2>(w); ++kb) {
            cute::gemm(mma, w(_, _, kb), x(_, _, kb), acc);
            mma.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
          warpgroup_wait<1>();  // the batch before this one is done: what it read may be overwritten
          if (done >= 0) release_x(done);
          done = at_.slot;
          ++unit;
        } else {
          // What is held meanwhile may be the slot that the next one used has to come to.
          warpgroup_wait<0>();
          if (done >= 0) release_x(done);
          done = -1;
          __syncwarp();
          release_x(at_.slot);
        }
        at_.advance(params_.x_slots);
        if (--left_of_turn == 0) pass_turn();
      }
    }
    meanwhile();
    __syncwarp();  // lanes may have parted, and wgmma's wait wants them together
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    if (done >= 0) release_x(done);
  }

  /// Lets the other warpgroup's last turn end.
  CUTLASS_DEVICE void finish() {
    if (group_ == 0) take_turn();
  }

 private:
  CUTLASS_DEVICE void take_turn() { cutlass::arch::NamedBarrier::sync(256, kTurn0 + group_); }
  CUTLASS_DEVICE void pass_turn() { cutlass::arch::NamedBarrier::arrive(256, kTurn0 + 1 - group_); }
  CUTLASS_DEVICE void release_x(int slot) {
    if (threadIdx.x % 32 == 0) control_.x.arrive_empty(slot);
  }
  /// Waits for the weights of a set, when those of another are no longer needed.
  CUTLASS_DEVICE void take_weights(TwiceTile const& tile) {
    TwiceClassParams const& cls = params_.classes[tile.cls];
    used_taps_ = cls.units[group_].taps;
    taps_ = cls.taps[0] * cls.taps[1] * cls.taps[2];
    c_blocks_ = cls.c_blocks;
    first_unit_ = group_ == 0 ? 0 : cls.units[0].count;
    turn_ = group_ == 0 ? min(taps_ * c_blocks_, params_.x_slots - 1) : taps_ * c_blocks_;
    if (loaded_ >= 0 && threadIdx.x % 32 == 0) control_.w.arrive_empty(0);
    control_.w.wait_full(weights_);
    weights_.advance(1);
    loaded_ = tile.set;
    __syncwarp();
  }

  TwiceParams<Traits> const& params_;
  TwiceShared<Traits> const& shared_;
  TwiceControl& control_;
  int group_;
  FragmentW w_;
  FragmentX x_;
  RingCursor at_, weights_;
  int loaded_ = -1;  // set
  // Of its class.
  std::uint32_t used_taps_;
  int taps_, c_blocks_;
  int first_unit_;  // of this warpgroup
  int turn_;        // k-blocks before the other warpgroup's turn comes
};

template <class Traits, bool W_IN_PLACE>
CUTLASS_DEVICE auto make_twice_multiplier(TwiceParams<Traits> const& params,
                                          TwiceShared<Traits> const& shared, int group) {
  using namespace cute;
  using Operand = typename Traits::Operand;
  using TiledMma = typename Traits::template TiledMmaOf<W_IN_PLACE>;
  using SmemLayoutW =
      std::conditional_t<W_IN_PLACE, typename Traits::SmemLayoutWInPlace, typename Traits::SmemLayoutW>;
  auto thread_mma = TiledMma{}.get_thread_slice(threadIdx.x % 128);
  Tensor sW =
      make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(shared.w)), SmemLayoutW{});  // (ROWS,BLK_C)
  Tensor sX = make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(shared.x)),
                          typename Traits::SmemLayoutX{});                // (BLK_POS,BLK_C)
  auto const w = thread_mma.make_fragment_A(thread_mma.partition_A(sW));  // (MMA,MMA_ROWS,BLK_C/16)
  auto const x = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (MMA,MMA_POS,BLK_C/16)
  using FragmentW = cute::remove_cvref_t<decltype(w)>;
  using FragmentX = cute::remove_cvref_t<decltype(x)>;
  return TwiceMultiplier<Traits, TiledMma, FragmentW, FragmentX>(params, shared, group, w, x);
}

/// Two warps that help.
inline constexpr int kHelperThreads = 64;

/// All consumers of all blocks: what any of them wrote before is seen by each after it.
/// \param threads consumers of a block, and those of its threads that arrive (arrive_for_all_blocks)
CUTLASS_DEVICE void wait_for_all_blocks(int* arrivals, int threads) {
  __threadfence();
  cutlass::arch::NamedBarrier::sync(threads, kConsumers);
  if (threadIdx.x == 128) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrivals) : "memory");
    while (load_acquire(arrivals) < int(gridDim.x)) {
    }
  }
  cutlass::arch::NamedBarrier::sync(256, kConsumers);
}

/// The same for threads that do not wait.
CUTLASS_DEVICE void arrive_for_all_blocks(int threads) {
  __threadfence();
  cutlass::arch::NamedBarrier::arrive(threads, kConsumers);
}

/// Merges part into table, a segment per warp of any block.
template <class Traits>
CUTLASS_DEVICE void merge_segments(TwiceParams<Traits> const& params, TwiceControl const& control) {
  int const per_moment = params.group_granules.divisor;
  int const row = params.k.divisor >> params.granule_shift;
  int const total = params.moments * per_moment;
  int const jobs = params.samples * params.groups * params.segments.divisor;
  for (int job = blockIdx.x + (threadIdx.x / 32 - 4) * gridDim.x; job < jobs; job += 8 * gridDim.x) {
    int segment;
    int const group_of_all = params.segments.divmod(segment, job);
    int const sample = group_of_all / params.groups, group = group_of_all - sample * params.groups;
    GroupPartials const partials{
        params.part + std::int64_t(sample) * params.moments * row + group * per_moment, row,
        params.group_granules, float(1 << params.granule_shift)};
    int const begin = segment * params.segment_length;
    int phase = 0;
    auto const positions = [&](int moment) {
      while (phase + 1 < params.num_phases && moment >= control.first_moment[phase + 1]) ++phase;
      int const end = phase + 1 < params.num_phases ? control.first_moment[phase + 1] : params.moments;
      return moment + 1 < end ? Traits::BLK_POS : control.last_count[phase];
    };
    MomentSums const sums =
        sum_partials(partials, begin, min(begin + params.segment_length, total), positions);
    double const mean_shift = sums.mean_shift();
    double const mean = sums.pivot + mean_shift;
    float const rounded = float(mean);
    if (threadIdx.x % 32 == 0) {
      params.table[job] =
          make_float4(rounded, float(mean - rounded), float(sums.m2(mean_shift)), float(sums.count));
    }
  }
}

/// \tparam W_IN_PLACE of params. Known here, not where it is needed: between two ways to multiply into the
/// same registers ptxas would wait for each instruction (C7515).
template <class Traits, bool W_IN_PLACE>
CUTLASS_DEVICE void multiply_twice(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared) {
  using namespace cute;
  int const group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
  TwiceTileReader tiles(*shared.control, params.tile_slots);
  auto multiplier = make_twice_multiplier<Traits, W_IN_PLACE>(params, shared, group);
  TwiceEpilogue<Traits> epilogue(params, shared, group, kGroup0 + group);
  Tensor acc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::ROWS>, Int<Traits::BLK_POS>>{});  // ((2,2,BLK_POS/8),1,1)
  TwiceTile tile = tiles.next(), next;
  CUTLASS_PRAGMA_NO_UNROLL
  for (; tile.set >= 0; tile = next) {
    multiplier.multiply(tile, acc, [&] {
      epilogue.hand_over_sums();
      next = tiles.next();
    });
    epilogue.add_moments(tile, acc);
  }
  epilogue.hand_over_sums();
  epilogue.end_sums();
  wait_for_all_blocks(params.arrivals, 256 + kHelperThreads);
  merge_segments(params, *shared.control);
  wait_for_all_blocks(params.arrivals + 1, 256);
  CUTLASS_PRAGMA_NO_UNROLL
  for (tile = tiles.next(); tile.set >= 0; tile = next) {
    multiplier.multiply(tile, acc, [&] { next = tiles.next(); });
    epilogue.normalize(tile, acc);
  }
  multiplier.finish();
  epilogue.end_stores();
}

/// One of the warps that help (twice_helper_sm90.cuh).
template <class Traits>
CUTLASS_DEVICE void help_twice(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared,
                               int group) {
  TwiceHelper<Traits> helper(params, shared, group);
  helper.write_moments();
  arrive_for_all_blocks(256 + kHelperThreads);
  if constexpr (!Traits::CHANNELS_FIRST) helper.store();
}

/// The warp that deals tiles out, and loads weights when a tile needs others than the one before. Nothing
/// here waits for the moments: the second pass's first operands are there when it begins.
template <class Traits>
CUTLASS_DEVICE void deal_twice(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared) {
  TwiceDealer<Traits> dealer(params, *shared.control);
  TwiceWeightLoader<Traits> weights(params, shared);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int pass = 0; pass < 2; ++pass) {
    dealer.begin_pass(pass == 1);
    for (;;) {
      TwiceTile const tile = dealer.next();
      dealer.publish(tile);
      if (tile.set < 0) break;
      weights.load(tile);
    }
  }
}

/// By all threads of one block. \see counter_count
template <class Traits>
CUTLASS_DEVICE void clear_counters(TwiceParams<Traits> const& params) {
  for (int i = threadIdx.x; i < params.num_counters; i += Traits::THREADS) params.arrivals[i] = 0;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1)
    conv_transpose_twice_sm90(__grid_constant__ const TwiceParams<Traits> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // 128-byte swizzled tiles must start on 1024-byte boundaries.
  extern __shared__ __align__(1024) char raw_shared[];
  TwiceShared<Traits> const shared(raw_shared, params);
  TwiceControl& control = *shared.control;
  cooperative_groups::grid_group const grid = cooperative_groups::this_grid();
  cooperative_groups::grid_group::arrival_token cleared{};
  if (params.num_counters > 0) {
    if (blockIdx.x == 0) clear_counters(params);
    cleared = grid.barrier_arrive();
  }
  constexpr int kConsumerWarps = 8;
  if (threadIdx.x == 0) {
    control.x.init(1, kConsumerWarps);
    control.w.init(1, kConsumerWarps);
    control.tile_ring.init(1, kConsumerWarps + 1);
    for (int group = 0; group < 2; ++group) {
      control.sums[group].init(kConsumerWarps / 2, 1);
      control.staged[group].init(kConsumerWarps / 2, 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < params.num_phases) {
    control.first_moment[threadIdx.x] = params.phases[threadIdx.x].first_moment;
    int const positions = params.views[threadIdx.x / params.fold].positions;
    control.last_count[threadIdx.x] = (positions - 1) % Traits::BLK_POS + 1;
  }
  if (params.num_counters > 0) {
    grid.barrier_wait(std::move(cleared));  // for the block's own threads too
  } else {
    __syncthreads();
  }
  if (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0) > 0) {
    cutlass::arch::warpgroup_reg_alloc<Traits::CONSUMER_REGISTERS>();
    if constexpr (Traits::READS_W_IN_PLACE) {
      params.w_in_place ? multiply_twice<Traits, true>(params, shared)
                        : multiply_twice<Traits, false>(params, shared);
    } else {
      multiply_twice<Traits, false>(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::HELPER_REGISTERS>();
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 1 || warp == 2) help_twice(params, shared, warp - 1);
    if (threadIdx.x == 0) TwiceInputLoader<Traits>(params, shared).run();
    if (warp == 3) deal_twice(params, shared);
  }
#endif
}

}  // namespace upconv3d::cuda
