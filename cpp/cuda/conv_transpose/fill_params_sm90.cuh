// SPDX-License-Identifier: Apache-2.0
/// \file
/// KernelParams of conv_transpose_relu_group_norm_sm90, on the host: slabs, descriptors, and how tiles and
/// partial moments are counted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/cut.hpp"
#include "core/index_math.hpp"
#include "core/phase_pairs.hpp"
#include "core/slab_launches.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/fill_geometry_sm90.cuh"
#include "cuda/conv_transpose/finalize_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/tail_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"
#include "cuda/conv_transpose/tiles_sm90.cuh"
#include "cuda/group_norm/steps.cuh"

namespace upconv3d::cuda {

/// A launch's slabs, and what their tiles load.
struct LaunchSlabs {
  std::vector<Slab> slabs;         // of pairs the first ones, then the second ones
  std::vector<Slab> reads;         // of each slab by which tiles are counted
  std::vector<SharedLoads> loads;  // likewise
  PhasePairs paired;
};

/// \param all slabs of all launches
inline LaunchSlabs slabs_and_loads(const ConvTransposeParams& params, const std::vector<Slab>& all) {
  LaunchSlabs of{slabs_of_launch(all, params.launch, params.launches), {}, {}, {}};
  const Problem& problem = params.problem;
  if (!params.pair_phases) {
    of.reads = of.slabs;
    for (const Slab& slab : of.slabs)
      of.loads.push_back(params.share_taps ? shared_loads(problem, slab) : SharedLoads{});
    return of;
  }
  of.paired = pair_phases(problem);
  of.reads = reads_of_pairs(of.paired);
  for (const PhasePair& pair : of.paired.pairs) {
    of.loads.push_back(params.share_taps ? shared_loads_of_pair(problem, of.paired, pair) : SharedLoads{});
  }
  return of;
}

/// How x lies.
struct InputRows {
  std::int64_t samples, channels;
  RowBox row;
};
inline InputRows input_rows(const ConvTransposeParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t samples = params.x_packed ? problem.n * problem.groups : problem.n;
  const std::int64_t pitch = params.x_pitch != 0 ? params.x_pitch : problem.c;
  const std::int64_t channels = params.x_packed ? operand_channels(problem) : pitch;
  return {samples, channels, params.x_split ? row_box(SplitRow(pitch)) : RowBox{channels, channels}};
}

/// What a slab's tiles load of x: descriptors, taps and k-blocks.
///
/// \param reads the slab, or its pair taken together
template <class Traits>
void fill_loads(const ConvTransposeParams& params, DType operand, const Slab& reads,
                const SharedLoads& shared, KernelSlab<Traits>& slab, SlabMaps<Traits>& slab_maps,
                TensorMaps& maps) {
  const Problem& problem = params.problem;
  const InputRows input = input_rows(params);
  const void* const x[2] = {params.x_hi, params.x_lo};
  slab.shared[0] = slab.shared[1] = 1;
  slab.shared[shared.axis] = slab.shared_taps = static_cast<int>(shared.taps);
  slab.shared_rows = static_cast<int>(shared.rows);
  const int rows = Traits::BLK_POS + (slab.shared_taps - 1) * slab.shared_rows;
  for (int split = 0; split < Traits::SPLITS; ++split) {
    maps.place(slab_maps.x[split], split == 0 ? Mapped::kX : Mapped::kXLo,
               encode_slab_input(problem, reads, operand, x[split], input.samples, input.row, rows,
                                 Traits::BLK_C, slab.shared_taps > 1));
  }
  // Where no tap reaches, the one k-block behind the last of all groups: x and w are zeros there.
  const bool reached = reads.tap_count() > 0;
  slab.c_begin = reached ? 0 : static_cast<int>(ceil_div(input.channels, Traits::BLK_C));
  slab.c_end = reached ? static_cast<int>(ceil_div(group_inputs(problem), Traits::BLK_C)) : slab.c_begin + 1;
  copy_extent(input_box(problem, reads).lower, slab.corner);
  copy_extent(reads.stride, slab.stride);
  copy_extent(reads.dilation, slab.dilation);
  copy_extent(reached ? reads.taps : Extent3{1, 1, 1}, slab.taps);
  const int taps = slab.taps[0] * slab.taps[1] * slab.taps[2];
  slab.x_loads = taps * (slab.c_end - slab.c_begin) / slab.shared_taps;
}

/// Where a slab's positions lie, its own taps of w, and who takes its moments.
template <class Traits>
void fill_place(const ConvTransposeParams& params, DType output, const Slab& from,
                const KernelParams<Traits>& to, KernelSlab<Traits>& slab, SlabMaps<Traits>& slab_maps,
                TensorMaps& maps) {
  using Stored = typename Traits::Stored;
  const Problem& problem = params.problem;
  const DType element = Traits::QUANTIZED ? DType::kFloat16 : output;  // any of 16 bit
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
  fill_geometry(from, slab);
  copy_extent(from.tap, slab.tap);
  copy_extent(from.tap_step, slab.tap_step);
  const std::int64_t c_blocks = ceil_div(group_inputs(problem), Traits::BLK_C);
  const std::int64_t k_blocks = std::max<std::int64_t>(from.tap_count() * c_blocks, 1);
  slab.row_moments = wants_row_moments<Traits>(static_cast<int>(k_blocks), problem.n) && !to.linear;
}

/// Which loads of a tile each of a pair's slabs multiplies; after its first slab's loads are counted.
///
/// \param index of the pair
template <class Traits>
void fill_pair(const PhasePairs& paired, int index, KernelParams<Traits>& to) {
  const PhasePair& pair = paired.pairs[static_cast<std::size_t>(index)];
  const int loads_of_tap = to.slabs[index].x_loads / to.slabs[index].taps[paired.axis];
  for (int i = 0; i < 2; ++i) {
    KernelSlab<Traits>& slab = to.slabs[index + i * to.tile_slabs];
    slab.lead = static_cast<int>(pair.lead[i]);
    slab.own_taps = static_cast<int>(pair.phases[i].taps[paired.axis]);
    slab.first_load = slab.lead * loads_of_tap;
    slab.own_loads = slab.own_taps * loads_of_tap;
    slab.later_loads = to.slabs[index].x_loads - slab.first_load - slab.own_loads;
  }
}

template <class Traits>
void check_slabs(const ConvTransposeParams& params, const LaunchSlabs& of) {
  if (of.slabs.size() > kMaxSlabs) {
    throw std::logic_error("upconv3d: the SM90 kernel takes at most " + std::to_string(kMaxSlabs) +
                           " slabs; got " + std::to_string(of.slabs.size()) + " for " +
                           describe(params.problem) +
                           ". select_plan must cut fewer axes, or divide them among launches.");
  }
  if (params.pair_phases != Traits::PAIRED || (Traits::PAIRED && (of.slabs.empty() || params.launches > 1))) {
    throw std::logic_error(
        "upconv3d: this variant of the SM90 kernel, or one of several launches, does not "
        "take pairs of phases; got " +
        describe(params.problem) + ". select_plan must leave them apart.");
  }
}

/// The slabs' descriptors and geometry, and how tiles and partial moments are counted.
template <class Traits>
void fill_slabs(const ConvTransposeParams& params, DType operand, DType output, KernelParams<Traits>& to,
                TensorMaps& maps) {
  const Problem& problem = params.problem;
  const std::vector<Slab> all =
      plan_slabs(problem, {params.split_axes, params.share_taps, params.pair_phases});
  const LaunchSlabs of = slabs_and_loads(params, all);
  check_slabs<Traits>(params, of);
  const Extent3 out = problem.out();
  const std::int64_t x_pitch = params.x_pitch != 0 ? params.x_pitch : problem.c;
  to.num_slabs = static_cast<int>(of.slabs.size());
  to.tile_slabs = static_cast<int>(of.reads.size());
  to.pair_axis = of.paired.axis;
  to.pair_pixels = static_cast<int>(to.pair_axis == 0 ? out[1] * out[2] : out[2]);
  to.x_block_step = static_cast<int>(params.x_split ? SplitRow(x_pitch).block_step() : Traits::BLK_C);
  const std::int64_t k_tiles = channel_tiles(problem, Traits::BLK_K);
  std::int64_t moments = slab_tiles(slabs_before(all, params.launch, params.launches), Traits::STAGED_POS);
  std::int64_t tiles = 0, longest = 0;
  int shared_rows = 0;
  for (std::size_t index = 0; index < of.slabs.size(); ++index) {
    KernelSlab<Traits>& slab = to.slabs[index];
    const std::int64_t positions = of.slabs[index].positions();
    fill_place(params, output, of.slabs[index], to, slab, to.maps[index], maps);
    slab.first_tile = static_cast<int>(tiles);
    slab.first_moment = static_cast<int>(moments);
    moments += ceil_div(positions, Traits::STAGED_POS);
    if (index >= of.reads.size()) continue;  // the second of a pair has its first one's tiles
    fill_loads(params, operand, of.reads[index], of.loads[index], slab, to.maps[index], maps);
    shared_rows = std::max(shared_rows, (slab.shared_taps - 1) * slab.shared_rows);
    const std::int64_t own = ceil_div(positions, Traits::BLK_POS);
    longest = std::max(longest, own);
    tiles += own * k_tiles;
  }
  if (Traits::PAIRED) {
    for (int index = 0; index < to.tile_slabs; ++index) fill_pair(of.paired, index, to);
  }
  const std::int64_t order =
      params.window_tiles > 0 ? fill_windows(params.window_tiles, longest, k_tiles, to) : tiles;
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
               encode_w(problem, operand, w[split], Traits::PAIRED ? int(kPairedChannels) : Traits::BLK_K,
                        Traits::BLK_C));
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
  copy_extent(problem.kernel, to.kernel);
  copy_extent(problem.out(), to.out);
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

}  // namespace upconv3d::cuda
