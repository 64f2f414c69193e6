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
#include <stdexcept>
#include <string>
#include <utility>

#include <cooperative_groups.h>

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/slab_launches.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/conv_transpose/drain_tiles_sm90.cuh"
#include "cuda/conv_transpose/finalize_sm90.cuh"
#include "cuda/conv_transpose/group_norm_sm90.cuh"
#include "cuda/conv_transpose/mainloop_sm90.cuh"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"
#include "cuda/conv_transpose/remembered_launch_sm90.hpp"
#include "cuda/conv_transpose/tail_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"
#include "cuda/conv_transpose/tiles_sm90.cuh"
#include "cuda/group_norm/steps.cuh"

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
  auto rings = make_operand_rings<Traits, W_IN_PLACE>(params, shared);
  Tensor acc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::BLK_K>, Int<Traits::BLK_POS>>{});  // ((2,2,WG_POS/8),1,1)
  char* const staging = shared.staging + warpgroup * Traits::WG_STAGING_BYTES;
  RingCursor slot;
  RingCursor staged{warpgroup, 0};
  for (;;) {
    control.tiles.wait_full(slot);
    TileNote<Traits> const note = control.tile[slot.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.tiles.arrive_empty(slot.slot);
    slot.advance(kTileSlots);
    if (is_end(note)) break;
    TileWork const tile = noted_tile(params, note);
    int const channel = tile.channel + warpgroup % Traits::WARPGROUPS_K * 64;
    int const valid = tile.positions - warpgroup / Traits::WARPGROUPS_K * Traits::WG_POS;
    typename Epilogue::Terms terms;
    bool takes_moments;
    auto const look_up = [&] {
      terms = Epilogue::load_terms(params, tile.n, channel);
      takes_moments = consumers_take_moments(params, params.slabs[tile.slab], note, valid);
    };
    if constexpr (Traits::PRODUCTS == 1) {
      mma_one_product(rings, tile.x_loads, tile.shared_taps, tile.shared_rows, acc, [&] {
        look_up();
        // Here already, because ptxas would let the loads follow the wait for wgmma, but for a branch.
        control.staging.wait_empty(staged);
      });
    } else {
      mma_three_products(rings, tile.x_loads, tile.shared_taps, tile.shared_rows, acc);
    }
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
  if (params.normalized_beside) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

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

/// The slabs' descriptors and geometry.
template <class Traits>
void fill_slabs(const ConvTransposeParams& params, DType operand, DType output, KernelParams<Traits>& to,
                TensorMaps& maps) {
  const Problem& problem = params.problem;
  const std::vector<Slab> all = plan_slabs(problem, params.split_axes, params.share_taps);
  const std::vector<Slab> slabs = slabs_of_launch(all, params.launch, params.launches);
  if (slabs.size() > kMaxSlabs) {
    throw std::logic_error("upconv3d: the SM90 kernel takes at most " + std::to_string(kMaxSlabs) +
                           " slabs; got " + std::to_string(slabs.size()) + " for " + describe(problem) +
                           ". select_plan must cut fewer axes, or divide them among launches.");
  }
  const void* const x[2] = {params.x_hi, params.x_lo};
  const std::int64_t k_tiles = channel_tiles(problem, Traits::BLK_K);
  const std::int64_t x_samples = params.x_packed ? problem.n * problem.groups : problem.n;
  const std::int64_t x_pitch = params.x_pitch != 0 ? params.x_pitch : problem.c;
  const std::int64_t x_channels = params.x_packed ? operand_channels(problem) : x_pitch;
  const RowBox x_row = params.x_split ? row_box(SplitRow(x_pitch)) : RowBox{x_channels, x_channels};
  to.x_block_step = static_cast<int>(params.x_split ? SplitRow(x_pitch).block_step() : Traits::BLK_C);
  std::int64_t moments = slab_tiles(slabs_before(all, params.launch, params.launches), Traits::STAGED_POS);
  std::int64_t tiles = 0;
  int shared_rows = 0;
  for (const Slab& from : slabs) {
    SlabMaps<Traits>& slab_maps = to.maps[to.num_slabs];
    KernelSlab<Traits>& slab = to.slabs[to.num_slabs++];
    const SharedLoads shared = params.share_taps ? shared_loads(problem, from) : SharedLoads{};
    slab.shared[0] = slab.shared[1] = 1;
    slab.shared[shared.axis] = slab.shared_taps = static_cast<int>(shared.taps);
    slab.shared_rows = static_cast<int>(shared.rows);
    const int rows = (slab.shared_taps - 1) * slab.shared_rows;  // beyond BLK_POS
    shared_rows = std::max(shared_rows, rows);
    for (int split = 0; split < Traits::SPLITS; ++split) {
      maps.place(slab_maps.x[split], split == 0 ? Mapped::kX : Mapped::kXLo,
                 encode_slab_input(problem, from, operand, x[split], x_samples, x_row, Traits::BLK_POS + rows,
                                   Traits::BLK_C, slab.shared_taps > 1));
    }
    const DType element = Traits::QUANTIZED ? DType::kFloat16 : output;  // any of 16 bit
    using Stored = typename Traits::Stored;
    maps.place(slab_maps.a, Mapped::kA,
               params.channels_first
                   ? encode_slab_channels(problem, from, element, params.a, kPanelPositions<Stored>, 64)
                   : encode_slab_output(problem, from, element, to.pitch, params.a, kStagePositions<Stored>,
                                        kPanelChannels<Stored>));
    if ((Traits::QUANTIZED || Traits::KEEPS_TILE) && to.normalizes) {
      maps.place(slab_maps.item, Mapped::kA,
                 encode_slab_output(problem, from, element, to.pitch, params.a, Traits::ITEM_POS,
                                    kPanelChannels<Stored>));
    }
    slab.width = cutlass::FastDivmod(static_cast<int>(from.extent[2]));
    slab.height = cutlass::FastDivmod(static_cast<int>(from.extent[1]));
    slab.positions = static_cast<int>(from.positions());
    // Where no tap reaches, the one k-block behind the last of all groups: x and w are zeros there.
    const bool reached = from.tap_count() > 0;
    slab.c_begin = reached ? 0 : static_cast<int>(ceil_div(x_channels, Traits::BLK_C));
    slab.c_end =
        reached ? static_cast<int>(ceil_div(group_inputs(problem), Traits::BLK_C)) : slab.c_begin + 1;
    const InputBox box = input_box(problem, from);
    for (int axis = 0; axis < 3; ++axis) {
      slab.corner[axis] = static_cast<int>(box.lower[axis]);
      slab.origin[axis] = static_cast<int>(from.origin[axis]);
      slab.step[axis] = static_cast<int>(from.step[axis]);
      slab.stride[axis] = static_cast<int>(from.stride[axis]);
      slab.dilation[axis] = static_cast<int>(from.dilation[axis]);
      slab.tap[axis] = static_cast<int>(from.tap[axis]);
      slab.tap_step[axis] = static_cast<int>(from.tap_step[axis]);
      slab.taps[axis] = reached ? static_cast<int>(from.taps[axis]) : 1;
    }
    const int k_blocks = slab.taps[0] * slab.taps[1] * slab.taps[2] * (slab.c_end - slab.c_begin);
    slab.x_loads = k_blocks / slab.shared_taps;
    slab.row_moments = wants_row_moments<Traits>(k_blocks, problem.n) && !to.linear;
    const std::int64_t pos_tiles = ceil_div(from.positions(), Traits::BLK_POS);
    slab.first_tile = static_cast<int>(tiles);
    slab.first_moment = static_cast<int>(moments);
    tiles += pos_tiles * k_tiles;
    moments += ceil_div(from.positions(), Traits::STAGED_POS);
  }
  std::int64_t order = tiles;
  if (params.window_tiles > 0) {
    std::int64_t longest = 0;
    for (const Slab& slab : slabs) longest = std::max(longest, ceil_div(slab.positions(), Traits::BLK_POS));
    order = fill_windows(params.window_tiles, longest, k_tiles, to);
  }
  if (tiles * problem.n > kMaxSm90Tiles || order * problem.n > kMaxSm90Count ||
      problem.positions() > kMaxSm90Count) {
    throw std::logic_error("upconv3d: the SM90 kernel counts up to " + std::to_string(kMaxSm90Tiles) +
                           " tiles; got " + std::to_string(tiles * problem.n) + " tiles for " +
                           describe(problem) + ". select_plan must choose another plan.");
  }
  to.rings = ring_shape_of<Traits>(shared_rows);
  to.k_tiles = cutlass::FastDivmod(static_cast<int>(k_tiles));
  to.group_k_tiles = cutlass::FastDivmod(static_cast<int>(k_tiles / problem.groups));
  to.tiles_per_sample = cutlass::FastDivmod(static_cast<int>(tiles));
  to.order_per_sample = cutlass::FastDivmod(static_cast<int>(order));
  to.order_size = static_cast<int>(order * problem.n);
  to.moments = static_cast<int>(slab_tiles(all, Traits::STAGED_POS));
}

/// The descriptors of w.
template <class Traits>
void fill_w(const ConvTransposeParams& params, DType operand, KernelParams<Traits>& to, TensorMaps& maps) {
  const Problem& problem = params.problem;
  to.w_in_place = params.w_in_place;
  if (params.w_in_place) {
    if (!Traits::READS_W_IN_PLACE || problem.groups != 1) {
      throw std::logic_error(
          "upconv3d: this variant of the SM90 kernel takes a packed w; got one in place for " +
          describe(problem) + ". select_plan must pack it.");
    }
    maps.place(to.w[0], Mapped::kW,
               encode_w_in_place(problem, operand, params.w_hi, Traits::W_BOX_K, Traits::BLK_C));
    return;
  }
  const void* const w[2] = {params.w_hi, params.w_lo};
  for (int split = 0; split < Traits::SPLITS; ++split) {
    maps.place(to.w[split], split == 0 ? Mapped::kW : Mapped::kWLo,
               encode_w(problem, operand, w[split], Traits::BLK_K, Traits::BLK_C));
  }
}

/// KernelParams::first_kept: of the samples that the last tiles of all blocks may belong to the first.
template <class Traits>
int first_kept_sample(const ConvTransposeParams& params, const KernelParams<Traits>& of) {
  const std::int64_t samples = params.problem.n, blocks = params.sm_count;
  // What lies beside y is read by a gradient's pass, or by who asked for it: there all of it is stored.
  if (!Traits::KEEPS_TILE || !of.in_place || params.launches > 1 || blocks > kMaxKeepers) {
    return static_cast<int>(samples);
  }
  const std::int64_t tiles = of.tiles_per_sample.divisor;
  // Shares of tiles have every other row of a stride's phase, boxes all: rows narrower than two lines of L2
  // then cost as much as they save (K = 48: 280 -> 288 us), unless every tile is kept.
  constexpr std::int64_t kTwoLines = 256;
  // Nor can they be folded.
  const bool narrow = params.problem.k * std::int64_t{sizeof(typename Traits::Stored)} < kTwoLines;
  const bool prefers_boxes = (narrow && params.problem.stride[2] > 1) || of.item_fold > 1;
  if (!Traits::QUANTIZED && prefers_boxes && samples * tiles > blocks) return static_cast<int>(samples);
  return static_cast<int>(std::max<std::int64_t>(samples * tiles - blocks, 0) / tiles);
}

/// All parameters but those of point_to.
template <class Traits>
void fill_kernel_params(const ConvTransposeParams& params, DType operand, DType output,
                        KernelParams<Traits>& to, TensorMaps& maps) {
  const Problem& problem = params.problem;
  to.linear = params.linear;
  to.channels_first = params.channels_first;
  to.floor = activation_floor(checked_before(params));
  to.normalizes = params.channel_table == nullptr && !params.linear;
  to.normalized_beside = params.normalized_beside;
  to.in_place = to.normalizes && params.y == nullptr;
  to.drains_normalize = to.normalizes && problem.n > 1;
  // Stepped16 in y's memory has room for twice as many.
  const std::int64_t pitch = padded_channels(problem.k);
  to.pitch = static_cast<int>(to.in_place && Traits::QUANTIZED ? 2 * pitch : pitch);
  to.step_pitch = static_cast<int>(pitch);
  fill_slabs(params, operand, output, to, maps);
  fill_w(params, operand, to, maps);
  to.item_fold = item_fold<Traits>(problem);
  to.item_rows = static_cast<int>(problem.positions() / to.item_fold);
  to.first_kept = first_kept_sample(params, to);
  to.first_late = to.linear ? to.order_size : first_late_place(to);
  if constexpr (!Traits::QUANTIZED) {
    if (to.normalizes) {
      maps.place(to.item, Mapped::kA,
                 encode_output_rows(problem, output, params.a, Traits::ITEM_POS,
                                    kPanelChannels<typename Traits::Stored>, to.item_fold));
    }
  }
  const Extent3 out = problem.out();
  for (int axis = 0; axis < 3; ++axis) {
    to.kernel[axis] = static_cast<int>(problem.kernel[axis]);
    to.out[axis] = static_cast<int>(out[axis]);
  }
  to.num_counters = params.clears_counters ? static_cast<int>(counter_count(problem)) : 0;
  to.samples = static_cast<int>(problem.n);
  to.k = static_cast<int>(problem.k);
  to.x_groups = params.x_packed ? static_cast<int>(problem.groups) : 1;
  to.group_k = cutlass::FastDivmod(static_cast<int>(group_outputs(problem)));
  to.group_c = static_cast<int>(group_inputs(problem));
  to.unscale_step = params.one_unscale_sample ? 0 : 1;
  const bool is_signed = to.floor < 0.f;
  to.step_bits = is_signed ? 15 : 16;
  to.stepped_zero = stored_origin(is_signed);
  fill_group_norm(params.problem, to);
  if (params.launches > 1) to.merge_steps = 0;  // no launch has the moments of all slabs
}

/// Every address of a launch but those in descriptors.
template <class Traits>
void point_to(const ConvTransposeParams& params, KernelParams<Traits>& to) {
  using Output = typename Traits::Output;
  to.a = static_cast<Output*>(params.a);
  to.y = to.in_place ? to.a : static_cast<Output*>(params.y);
  to.bias = static_cast<const Output*>(params.bias);
  to.unscale_sample = params.unscale_sample;
  to.unscale_column = params.unscale_column;
  to.steps = params.steps;
  to.moment_of = params.moment_of;
  to.before = params.before;
  to.gamma = static_cast<const Output*>(params.gamma);
  to.beta = static_cast<const Output*>(params.beta);
  if (to.normalizes) to.after = checked_linear_after(params);
  to.part = reinterpret_cast<float2*>(params.part);
  to.table = reinterpret_cast<float4*>(params.table);
  to.channel_table = params.channel_table;
  to.next_tile = params.counters;
  to.next_item = params.counters + 1;
  to.arrivals = params.counters + kStoredCounters;
  to.finalized = params.counters + merged_counters(params.problem);
  to.kept = params.counters + kept_tiles(params.problem);
}

/// A launch of one persistent block per multiprocessor, all at once.
template <class Operand, int PRODUCTS, class Stored, int BLK_K, int BLK_POS, int BLK_C, bool CURVED>
class ConvTransposeLaunchSm90 : public RememberedLaunch {
 public:
  explicit ConvTransposeLaunchSm90(const ConvTransposeParams& params) : shown_(mapped_addresses(params)) {
    constexpr DType operand = std::is_same_v<Operand, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
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
  using Traits = ConvTransposeTraitsSm90<Operand, PRODUCTS, Stored, BLK_K, BLK_POS, BLK_C, CURVED>;
  static constexpr const char* kName = "conv_transpose_relu_group_norm_sm90";
  static inline const void* const kKernel =
      reinterpret_cast<const void*>(conv_transpose_relu_group_norm_sm90<Traits>);

  KernelParams<Traits> params_{};
  TensorMaps maps_;
  MappedAddresses shown_;
  int blocks_ = 0;
};

template <class Launch>
void launch_slabs(const ConvTransposeParams& params, cudaStream_t stream) {
  params.launches > 1 ? run_remembered<SlabLaunchesSm90<Launch>>(params, stream)
                      : run_remembered<Launch>(params, stream);
}

template <class Operand, int PRODUCTS, class Stored, int BLK_K, int BLK_POS, int BLK_C = int(kBlockInputs)>
void launch_conv_transpose_relu_group_norm_sm90(const ConvTransposeParams& params, cudaStream_t stream) {
  using Launch = ConvTransposeLaunchSm90<Operand, PRODUCTS, Stored, BLK_K, BLK_POS, BLK_C, false>;
  using Curved = ConvTransposeLaunchSm90<Operand, PRODUCTS, Stored, BLK_K, BLK_POS, BLK_C, true>;
  is_floor(params.before.kind) ? launch_slabs<Launch>(params, stream) : launch_slabs<Curved>(params, stream);
}

}  // namespace upconv3d::cuda
