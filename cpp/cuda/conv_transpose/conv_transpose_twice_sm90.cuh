// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_twice_sm90: the forward pass after packing, for groups 1.
///
///   x     [N,D,H,W,C]                 operand  read through TMA im2col
///   w     [T*R*S,K,C]                 operand  packed by layout/pack; or, where a warpgroup's rows are one
///         [C,T*R*S,K]                          phase's, of that dtype, channels_last_3d as PyTorch keeps it
///   part  [N,K/granule,moments,2]     float    (mean, M2) of before(conv + bias), unrounded; -M2 of a tile
///                                              that the end of its phase cuts
///   merged [N,G,segments,4]           float    mean, rest of the mean, variance, count; of several segments
///   table [N,G,4]                     float    mean, rest of the mean, 1 / deviation, unused
///   y     [N,Z,P,Q,K] or [N,K,Z,P,Q]  output   written once
///
/// y = after(normalized before(conv + bias)): before() ReLU or nothing, after() any activation
/// (core/tail.hpp).
///
/// The convolution is computed for the moments of its values alone and, when these are known, once more: y is
/// normalized in registers and written, nothing is read back. That moves fewer bytes where the arithmetic is
/// small against the output (kernel = stride, few channels), and rounds but once.
///
/// Kernels of their own (LINEAR) compute it once: y = before(conv + bias), any activation, of a block without
/// normalization, with none of part, merged and table.
///
/// Rows of a tile are output channels, columns are positions of one phase of the stride
/// (core/twice_layout.hpp says which share a block). One block per multiprocessor, three warpgroups:
///   warp 0       deals tiles out (twice_tiles_sm90.cuh) and loads x through a ring (twice_loads_sm90.cuh)
///   warps 1-2    finish what warpgroups hand over (twice_helper_sm90.cuh)
///   warp 3       loads sets of weights, which stay
///   warps 4-11   two warpgroups take turns: one multiplies while the other has its epilogue
/// Blocks wait for each other twice, before moments are merged and before these are used (not LINEAR ones),
/// so the launch is cooperative. Where no launch packs anything, none has cleared the counters either: block
/// 0 does, and all others wait for it first.
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
enum TwiceBarrier : std::uint32_t { kTurn0, kTurn1, kConsumers, kHelpers };

/// One of the two warpgroups that multiply.
///
/// \tparam FragmentW (MMA,MMA_ROWS,BLK_C/16) descriptors of the first unit of w
/// \tparam FragmentX (MMA,MMA_POS,BLK_C/16) descriptors of the first slot of x
template <class Traits, class FragmentW, class FragmentX>
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
    if (tile.set != loaded_) take_weights(tile);
    int left_of_turn = begin_ >> 16;
    int unit = begin_ & 0xffff;
    std::uint32_t used_taps = used_taps_;
    int done = -1;
    typename Traits::TiledMma mma;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    take_turn();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int load = 0; load < loads_; ++load) {
      std::uint32_t const served = used_taps & ~(~0u << (served_ & 0xff));
      CUTLASS_PRAGMA_NO_UNROLL
      for (int c_block = 0; c_block < c_blocks_; ++c_block) {
        control_.x.wait_full(at_);
        int of_tap = unit + c_block;
        int x_from = at_.slot * (params_.x_slot_bytes / kDescriptorUnit);
        CUTLASS_PRAGMA_NO_UNROLL
        for (std::uint32_t taps = served; taps != 0; taps >>= 1, x_from += served_ >> 8) {
          if (!(taps & 1)) continue;
          multiply_k_block(mma, w_, of_tap * (Traits::W_BYTES / kDescriptorUnit), x_, x_from, acc);
          if (done >= 0 && done != at_.slot) release_x(done);
          done = at_.slot;
          of_tap += c_blocks_;
        }
        if (served == 0) {
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
      unit += __popc(served) * c_blocks_;
      used_taps >>= served_ & 0xff;
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
    loads_ = cls.loads[0] * cls.loads[1] * cls.loads[2];
    served_ = cls.shared_taps | cls.shared_rows * (Traits::ROW_BYTES / kDescriptorUnit) << 8;
    c_blocks_ = cls.c_blocks;
    int const first_unit = group_ == 0 ? 0 : cls.units[0].count;
    int const turn = group_ == 0 ? min(loads_ * c_blocks_, params_.x_slots - 1) : loads_ * c_blocks_;
    begin_ = first_unit | turn << 16;
    if (loaded_ >= 0 && threadIdx.x % 32 == 0) control_.w.arrive_empty(0);
    control_.w.wait_full(weights_);
    weights_.advance(1);
    loaded_ = tile.set;
    __syncwarp();
  }

  TwiceParams<Traits> const& params_;
  TwiceShared<Traits> const& shared_;
  TwiceControl<Traits>& control_;
  int group_;
  FragmentW w_;
  FragmentX x_;
  RingCursor at_, weights_;
  int loaded_ = -1;  // set
  // Of its class, two numbers in a register, of which there are none to spare.
  std::uint32_t used_taps_;
  int loads_, c_blocks_;
  int served_;  // taps that a load serves; << 8: from one to the next, in descriptors' units of 16 bytes
  int begin_;   // first unit of this warpgroup; << 16: loads before the other warpgroup's turn comes
};

template <class Traits>
CUTLASS_DEVICE auto make_twice_multiplier(TwiceParams<Traits> const& params,
                                          TwiceShared<Traits> const& shared, int group) {
  auto const thread_mma = typename Traits::TiledMma{}.get_thread_slice(threadIdx.x % 128);
  auto const w = Traits::descriptors_of_w(thread_mma, shared.w);  // (MMA,MMA_ROWS,BLK_C/16)
  auto const x = Traits::descriptors_of_x(thread_mma, shared.x);  // (MMA,MMA_POS,BLK_C/16)
  using FragmentW = cute::remove_cvref_t<decltype(w)>;
  using FragmentX = cute::remove_cvref_t<decltype(x)>;
  return TwiceMultiplier<Traits, FragmentW, FragmentX>(params, shared, group, w, x);
}

/// Of the two warps that help.
inline constexpr int kHelperThreads = 64;

/// Tells all blocks, by one thread: what it and the threads that it has waited for wrote, others may read.
CUTLASS_DEVICE void arrive_for_all_blocks(int* arrivals) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrivals) : "memory");
}

/// Consumers wait for so many arrivals.
CUTLASS_DEVICE void wait_for_arrivals(int const* arrivals, int count) {
  if (threadIdx.x == 128) {
    while (load_acquire(arrivals) < count) {
    }
  }
  cutlass::arch::NamedBarrier::sync(256, kConsumers);
}

/// Values that a partial of a group covers whose tile is cut by the end of its phase.
template <class Traits>
CUTLASS_DEVICE float short_count(TwiceParams<Traits> const& params, TwiceControl<Traits> const& control,
                                 int index) {
  int const moment = index % params.moments;
  int phase = params.num_phases - 1;
  while (phase > 0 && moment < control.first_moment[phase]) --phase;
  return float(control.last_count[phase] << params.granule_shift);
}

/// A mean in two floats and a variance: what is kept of merged moments. (M2 of as many values would sooner be
/// infinite as a float than that of the tiles.)
struct MergedMoments {
  float mean, rest;
  double variance, count;
  CUTLASS_DEVICE explicit MergedMoments(MomentSums const& sums) : count(sums.count) {
    double const shift = sums.mean_shift(), exact = sums.pivot + shift;
    mean = float(exact);
    rest = float(exact - mean);
    variance = sums.m2(shift) / count;
  }
  CUTLASS_DEVICE float4 segment() const { return make_float4(mean, rest, float(variance), float(count)); }
  CUTLASS_DEVICE float4 row(double eps) const {
    return make_float4(mean, rest, rsqrtf(float(variance + eps)), 0.f);
  }
};

/// By one warp: writes the moments of a group's segment and, if all others are written, the group's row of
/// the table.
template <class Traits>
CUTLASS_DEVICE void write_segment(TwiceParams<Traits> const& params, int group, int segment,
                                  MomentSums sums) {
  bool const writes = threadIdx.x % 32 == 0;
  int const segments = params.segments.divisor;
  if (segments > 1) {
    float4* const of_group = params.merged + std::int64_t(group) * segments;
    int others = 0;
    if (writes) {
      of_group[segment] = MergedMoments(sums).segment();
      __threadfence();
      others = atomicAdd(params.merged_segments + group, 1);
      __threadfence();
    }
    __syncwarp();  // what others wrote before that lane has counted them, all lanes may read
    if (__shfl_sync(0xffffffffu, others, 0) + 1 < segments) return;
    sums = sum_segments(of_group, segments);
  }
  if (writes) params.table[group] = MergedMoments(sums).row(params.eps);
}

/// Who merges: blocks' consumers together, or each of their warps by itself where a segment's partials are
/// on their way to it all at once.
template <class Traits>
struct MergingTeam {
  static constexpr int kWarps = 8;
  static constexpr int kLoads = Traits::CHANNELS_FIRST ? 4 : 8;  // as registers last beside the accumulators

  CUTLASS_DEVICE explicit MergingTeam(TwiceParams<Traits> const& params)
      : length((params.group_partials + params.segments.divisor - 1) / params.segments.divisor),
        is_warp(length <= 32 * kLoads),
        teams((is_warp ? kWarps : 1) * gridDim.x),
        jobs(params.groups_of_all * params.segments.divisor) {}

  int length;    // partials of a segment
  bool is_warp;  // or a block
  int teams;
  int jobs;  // segments of all groups
};

/// Merges part into table, and arrives for each team that has merged what is its own.
template <class Traits>
CUTLASS_DEVICE void merge_segments(TwiceParams<Traits> const& params, TwiceControl<Traits>& control,
                                   MergingTeam<Traits> const& team) {
  constexpr int kWarps = MergingTeam<Traits>::kWarps;
  int const warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  int const threads = team.is_warp ? 32 : 32 * kWarps, thread = (team.is_warp ? 0 : 32 * warp) + lane;
  int const first = blockIdx.x + (team.is_warp ? warp * gridDim.x : 0);
  float const full_count = float(Traits::BLK_POS << params.granule_shift);
  // [warps] count, sum, sum of squares. The helpers, who arrived, have read what lay there.
  auto const warp_sums = reinterpret_cast<double (*)[3]>(control.rows);
  static_assert(sizeof(control.rows) >= kWarps * sizeof(*warp_sums));
  CUTLASS_PRAGMA_NO_UNROLL
  for (int job = first; job < team.jobs; job += team.teams) {
    int segment;
    int const group = params.segments.divmod(segment, job);
    float2 const* const part = params.part + std::int64_t(group) * params.group_partials;
    int const begin = segment * team.length, end = min(begin + team.length, params.group_partials);
    MomentSums sums = sum_partials<MergingTeam<Traits>::kLoads>(
        part, begin, end, thread, threads, full_count,
        [&](int index) { return short_count(params, control, index); });
    if (!team.is_warp) {
      double (&own)[3] = warp_sums[warp];
      cutlass::arch::NamedBarrier::sync(256, kConsumers);  // the last segment's sums have been read
      if (lane == 0) own[0] = sums.count, own[1] = sums.sum, own[2] = sums.sum_squares;
      cutlass::arch::NamedBarrier::sync(256, kConsumers);
      if (warp != 0) continue;
      sums = {sums.pivot};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kWarps; ++i) {
        sums.count += warp_sums[i][0];
        sums.sum += warp_sums[i][1];
        sums.sum_squares += warp_sums[i][2];
      }
    }
    write_segment(params, group, segment, sums);
  }
  bool const arrives = lane == 0 && (team.is_warp || warp == 0) && first < team.jobs;
  if (arrives) arrive_for_all_blocks(params.arrivals + 1);
}

/// From all blocks' partial moments to the table that all of them read.
template <class Traits>
CUTLASS_DEVICE void merge_moments(TwiceParams<Traits> const& params, TwiceControl<Traits>& control) {
  wait_for_arrivals(params.arrivals, gridDim.x);
  MergingTeam<Traits> const team(params);
  merge_segments(params, control, team);
  wait_for_arrivals(params.arrivals + 1, min(team.teams, team.jobs));
}

template <class Traits>
CUTLASS_DEVICE void multiply_twice(TwiceParams<Traits> const& params, TwiceShared<Traits> const& shared) {
  using namespace cute;
  int const group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
  TwiceTileReader<Traits> tiles(*shared.control);
  auto multiplier = make_twice_multiplier(params, shared, group);
  TwiceEpilogue<Traits> epilogue(params, shared, group);
  Tensor acc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::ROWS>, Int<Traits::BLK_POS>>{});  // ((2,2,BLK_POS/8),1,1)
  TwiceTile tile = tiles.next(), next;
  [[maybe_unused]] bool merged = false;
  if constexpr (!Traits::LINEAR) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (; tile.set >= 0; tile = next) {
      multiplier.multiply(tile, acc, [&] {
        epilogue.hand_over_sums();
        next = tiles.next();
      });
      epilogue.add_moments(tile, acc);
    }
    epilogue.hand_over_sums();
    epilogue.end_sums();  // the helpers arrive at the first wait
    tile = tiles.next();
    // The second pass's first tile is multiplied while other blocks have not arrived; beside scales there are
    // no registers for both.
    merged = Traits::SCALED || tile.set < 0;
    if (merged) merge_moments(params, *shared.control);
  }
  CUTLASS_PRAGMA_NO_UNROLL
  for (; tile.set >= 0; tile = next) {
    multiplier.multiply(tile, acc, [&] { next = tiles.next(); });
    if constexpr (!Traits::SCALED && !Traits::LINEAR) {
      if (!merged) merge_moments(params, *shared.control);
      merged = true;
    }
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
  if constexpr (!Traits::LINEAR) {
    helper.write_moments();
    __threadfence();
    cutlass::arch::NamedBarrier::sync(kHelperThreads, kHelpers);
    if (threadIdx.x == 32) arrive_for_all_blocks(params.arrivals);
  }
  if constexpr (!Traits::CHANNELS_FIRST) helper.store();
}

/// By all threads of one block. \see counter_count
template <class Traits>
CUTLASS_DEVICE void clear_counters(TwiceParams<Traits> const& params) {
  for (int i = threadIdx.x; i < params.num_counters; i += Traits::THREADS) params.arrivals[i] = 0;
}

/// By all threads of all blocks, before the block's partials are said to be written: no segment is merged.
template <class Traits>
CUTLASS_DEVICE void clear_merged_segments(TwiceParams<Traits> const& params) {
  if (params.segments.divisor == 1) return;
  for (int i = blockIdx.x * Traits::THREADS + threadIdx.x; i < params.groups_of_all;
       i += gridDim.x * Traits::THREADS) {
    params.merged_segments[i] = 0;
  }
}

/// By all threads: descriptors come from memory, and the first loads would wait for them.
template <class Traits>
CUTLASS_DEVICE void prefetch_descriptors(TwiceParams<Traits> const& params) {
  int const thread = threadIdx.x;
  if (thread == 0) cute::prefetch_tma_descriptor(&params.w);
  if (thread >= 32 && thread - 32 < params.num_classes) {
    cute::prefetch_tma_descriptor(&params.classes[thread - 32].x);
  }
  int const views = Traits::CHANNELS_FIRST ? 0 : params.num_phases / params.fold;
  if (thread >= 64 && thread - 64 < views) cute::prefetch_tma_descriptor(&params.views[thread - 64].y);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1)
    conv_transpose_twice_sm90(__grid_constant__ const TwiceParams<Traits> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Swizzled tiles of 128-byte rows must start on 1024-byte boundaries.
  extern __shared__ __align__(1024) char raw_shared[];
  TwiceShared<Traits> const shared(raw_shared, params);
  TwiceControl<Traits>& control = *shared.control;
  constexpr int kConsumerWarps = 8;
  if (threadIdx.x == 0) {
    control.x.init(1, kConsumerWarps);
    control.w.init(1, kConsumerWarps);
    control.tile_ring.init(1, kConsumerWarps);
    control.wanted.init(1, 1);
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
  prefetch_descriptors(params);
  clear_merged_segments(params);
  cooperative_groups::grid_group const grid = cooperative_groups::this_grid();
  cooperative_groups::grid_group::arrival_token cleared{};
  if (params.num_counters > 0) {
    if (blockIdx.x == 0) clear_counters(params);
    cleared = grid.barrier_arrive();  // for the block's own threads, too
  } else {
    __syncthreads();
  }
  // By whole warps, each once: what is loaded first does not wait for it.
  auto const wait_for_counters = [&] {
    __syncwarp();
    if (params.num_counters > 0) grid.barrier_wait(std::move(cleared));
  };
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= 4) {
    cutlass::arch::warpgroup_reg_alloc<Traits::CONSUMER_REGISTERS>();
    wait_for_counters();
    multiply_twice(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::HELPER_REGISTERS>();
    if (warp == 0) {
      TwiceLoader<Traits> loader(params, shared);
      if (threadIdx.x == 0) loader.begin();
      wait_for_counters();
      if (threadIdx.x == 0) loader.run();
    } else if (warp == 3) {
      TwiceWeightLoader<Traits> loader(params, shared);
      loader.load_home();
      wait_for_counters();
      loader.run();
    } else {
      wait_for_counters();
      help_twice(params, shared, warp - 1);
    }
  }
#endif
}

}  // namespace upconv3d::cuda
