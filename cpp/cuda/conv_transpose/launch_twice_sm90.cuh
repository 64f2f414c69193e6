// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host's side of conv_transpose_twice_sm90: its parameters from a problem, and the launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/conv_transpose/conv_transpose_twice_sm90.cuh"

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/twice_layout.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/conv_transpose/fill_geometry_sm90.cuh"
#include "cuda/conv_transpose/remembered_launch_sm90.hpp"
#include "cuda/conv_transpose/tail_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

/// A window's first coordinates, counted in the steps from tap to tap. Windows that are compared differ by
/// whole steps.
inline void copy_window(const Slab& from, int (&to)[3]) {
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t first = from.window[axis], step = from.dilation[axis];
    to[axis] = static_cast<int>((first - (first % step + step) % step) / step);
  }
}

/// Where the views' positions lie, and the phases that they are made of.
template <class Traits>
void fill_views(const Problem& problem, const TwiceLayout& layout, DType output, void* y,
                TwiceParams<Traits>& to, TensorMaps& maps) {
  const Extent3 out = problem.out();
  copy_extent({out[0], out[1], out[2] / layout.fold}, to.view_out);
  to.fold = layout.fold;
  to.view_k = static_cast<int>(layout.view_rows);
  for (std::size_t i = 0; i < layout.views.size(); ++i) {
    const Slab& from = layout.views[i];
    TwiceView& view = to.views[i];
    if constexpr (!Traits::CHANNELS_FIRST) {
      maps.place(view.y, Mapped::kA,
                 encode_slab_output(problem, from, output, layout.view_rows, y, Traits::STAGE_POS,
                                    Traits::STAGE_CHANNELS, layout.fold));
    }
    fill_geometry(from, view);
  }
  std::int64_t moments = 0;
  // Of all phases the same.
  copy_extent(layout.phases[0].tap_step, to.tap_step);
  copy_extent(layout.phases[0].dilation, to.dilation);
  for (const Slab& from : layout.phases) {
    TwicePhase& phase = to.phases[to.num_phases++];
    copy_extent(from.tap, phase.tap);
    copy_extent(from.tap_count() > 0 ? from.taps : Extent3{}, phase.taps);
    copy_window(from, phase.window);
    phase.first_moment = static_cast<int>(moments);
    moments += ceil_div(from.positions(), Traits::BLK_POS);
  }
  to.moments = static_cast<int>(moments);
}

/// A class's sets.
template <class Traits>
void fill_sets(const TwiceClass& from, TwiceClassParams& cls, TwiceParams<Traits>& to) {
  cls.first_set = to.num_sets;
  cls.num_sets = static_cast<int>(from.sets.size());
  for (const TwiceSet& set : from.sets) {
    TwiceSetParams& params = to.sets[to.num_sets++];
    for (int group = 0; group < 2; ++group) {
      const TwiceRows& rows = set.rows[group];
      const std::int64_t number = rows.view * to.row_blocks.divisor + rows.row / Traits::ROWS;
      params.rows[group] = static_cast<std::int16_t>(rows.view < 0 ? -1 : number);
    }
  }
}

/// The classes' loads and tiles.
template <class Traits>
void fill_classes(const Problem& problem, const TwiceLayout& layout, DType operand, const void* x,
                  std::int64_t x_channels, TwiceParams<Traits>& to, TensorMaps& maps) {
  const int c_blocks = static_cast<int>(ceil_div(problem.c, Traits::BLK_C));
  to.row_blocks = cutlass::FastDivmod(static_cast<int>(ceil_div(to.view_k, Traits::ROWS)));
  for (const TwiceClass& from : layout.classes) {
    TwiceClassParams& cls = to.classes[to.num_classes++];
    Slab window = from.window;
    if (!from.reached) window.taps = {};
    cls.shared_axis = from.shared.axis;
    cls.shared_taps = static_cast<int>(from.shared.taps);
    cls.shared_rows = static_cast<int>(from.shared.rows);
    maps.place(cls.x, Mapped::kX,
               encode_slab_input(problem, window, operand, x, problem.n, {x_channels, x_channels},
                                 Traits::BLK_POS + (cls.shared_taps - 1) * cls.shared_rows, Traits::BLK_C,
                                 cls.shared_taps > 1));
    cls.width = cutlass::FastDivmod(static_cast<int>(window.extent[2]));
    cls.height = cutlass::FastDivmod(static_cast<int>(window.extent[1]));
    copy_extent(input_box(problem, window).lower, cls.corner);
    copy_window(window, cls.window);
    copy_extent(from.window.taps, cls.loads);
    cls.loads[cls.shared_axis] /= cls.shared_taps;
    // Where no tap reaches, the one k-block behind the last: x and w are zeros there.
    cls.c_begin = from.reached ? 0 : c_blocks;
    cls.c_blocks = from.reached ? c_blocks : 1;
    for (int group = 0; group < 2; ++group)
      cls.units[group] = {from.units[group].taps, from.units[group].count};
    to.w_units = std::max(to.w_units, cls.units[0].count + cls.units[1].count);
    const std::int64_t pos_tiles = ceil_div(window.positions(), Traits::BLK_POS);
    cls.pos_tiles = cutlass::FastDivmod(static_cast<int>(pos_tiles));
    cls.positions = static_cast<int>(window.positions());
    cls.tiles = static_cast<int>(pos_tiles * problem.n);
    cls.set_cost = cls.tiles * twice_tile_cycles(from, c_blocks, Traits::BLK_C, !Traits::CHANNELS_FIRST);
    cls.first_cost = to.total_cost;
    fill_sets(from, cls, to);
    to.total_cost += cls.num_sets * cls.set_cost;
  }
}

/// Which set each of `blocks` blocks begins with: as twice_home says, the one within whose share of the cost
/// of all tiles the block's share begins.
template <class Traits>
void place_blocks(int blocks, TwiceParams<Traits>& to) {
  if (to.sets[to.num_sets].first_block == blocks) return;
  for (int i = 0; i < to.num_classes; ++i) {
    const TwiceClassParams& cls = to.classes[i];
    for (int set = 0; set < cls.num_sets; ++set) {
      const std::int64_t cost_before = cls.first_cost + set * cls.set_cost;
      to.sets[cls.first_set + set].first_block =
          static_cast<std::int16_t>(ceil_div(cost_before * blocks, to.total_cost));
    }
  }
  to.sets[to.num_sets].first_block = static_cast<std::int16_t>(blocks);
}

/// Divides shared memory: what the weights leave goes to x first, then to staging, of which views that are
/// staged apart take the larger share at once.
/// \param shared_rows twice_shared_rows
template <class Traits>
void fill_shared_memory(std::int64_t shared_rows, TwiceParams<Traits>& to) {
  // Slots, and the weights behind them, begin on 1024 bytes.
  constexpr std::int64_t kAlignment = 1024;
  to.x_slot_bytes =
      static_cast<int>(ceil_div(Traits::X_BYTES + shared_rows * Traits::ROW_BYTES, kAlignment) * kAlignment);
  static_assert(
      kSharedMemoryBytes - kTwiceControlBytes - kMaxTwiceWeightBytes - 2 * kFewStagingBuffers * kStageBytes >=
          2 * Traits::X_BYTES,
      "warpgroups take turns after all but one of the slots");
  static_assert(!Traits::VIEWS_APART ||
                    kTwicePiledBufferBytes == 2 * (kManyStagingBuffers - kFewStagingBuffers) * kStageBytes,
                "weights leave as much to the buffers of piled views");
  const auto slots = [&](int buffers) {
    return (kSharedMemoryBytes - kTwiceControlBytes - to.w_units * Traits::W_BYTES -
            2 * buffers * kStageBytes) /
           to.x_slot_bytes;
  };
  const bool takes_many = Traits::VIEWS_APART || slots(kManyStagingBuffers) >= Traits::WANTED_X_SLOTS;
  to.staging_buffers = Traits::CHANNELS_FIRST ? 0 : takes_many ? kManyStagingBuffers : kFewStagingBuffers;
  to.x_slots = std::min(slots(to.staging_buffers), Traits::MAX_X_SLOTS);
}

/// All parameters but those of point_to.
template <class Traits>
void fill_twice_params(const ConvTransposeParams& params, DType operand, DType output,
                       TwiceParams<Traits>& to, TensorMaps& maps) {
  const Problem& problem = params.problem;
  const TwiceLayout layout = twice_layout(problem);
  if (layout.classes.empty()) {
    throw std::logic_error(
        "upconv3d: conv_transpose_twice_sm90 keeps a block's weights in shared memory, and stacks two phases "
        "along the width for y NCDHW; got " +
        describe(problem) + ". select_plan must choose the stored plan.");
  }
  if (twice_block_inputs(problem) != Traits::BLK_C) {
    throw std::logic_error("upconv3d: conv_transpose_twice_sm90 is to have k-blocks of " +
                           std::to_string(twice_block_inputs(problem)) + " input channels; got " +
                           std::to_string(Traits::BLK_C) + " for " + describe(problem) +
                           ". select_plan must choose the other variant.");
  }
  if ((layout.pile > 1) != Traits::PILED) {
    throw std::logic_error("upconv3d: conv_transpose_twice_sm90 is to have piles of " +
                           std::to_string(layout.pile) + " views; got the other variant for " +
                           describe(problem) + ". piles_views must be the plan's.");
  }
  fill_views(problem, layout, output, params.a, to, maps);
  fill_classes(problem, layout, operand, params.x_hi, params.x_packed ? operand_channels(problem) : problem.c,
               to, maps);
  fill_shared_memory(twice_shared_rows(layout), to);
  to.w_rows = static_cast<int>(layout.box);
  // The warp that loads weights gives each of its lanes a box, or more than one.
  if (to.w_rows < 8) {
    throw std::logic_error(
        "upconv3d: conv_transpose_twice_sm90 loads weights by 8 output channels or more; got " +
        std::to_string(to.w_rows) + " for " + describe(problem) +
        ". select_plan must choose the stored plan.");
  }
  if (params.w_in_place && !(Traits::W_IN_PLACE && twice_reads_w_in_place(layout))) {
    throw std::logic_error(
        "upconv3d: conv_transpose_twice_sm90 takes a packed w where it stacks phases, and for float32 or "
        "NCDHW results; got one in place for " +
        describe(problem) + ". select_plan must pack it.");
  }
  maps.place(to.w, Mapped::kW,
             params.w_in_place ? encode_w_in_place(problem, operand, params.w_hi, to.w_rows, Traits::BLK_C)
                               : encode_w(problem, operand, params.w_hi, to.w_rows, Traits::BLK_C));
  to.num_counters = params.clears_counters ? static_cast<int>(kTwiceDealt + kMaxTwiceSets) + to.num_sets : 0;
  copy_extent(problem.kernel, to.kernel);
  to.k = cutlass::FastDivmod(static_cast<int>(problem.k));
  to.eps = problem.eps;
  to.eps_float = static_cast<float>(problem.eps);
  if (!Traits::LINEAR) to.floor = checked_floor(params);
  to.granule_shift = twice_granule_shift(problem);
  to.groups = static_cast<int>(problem.num_groups);
  const std::int64_t group_channels = problem.k / problem.num_groups;
  to.group_channels = cutlass::FastDivmod(static_cast<int>(group_channels));
  const TwiceMerging merging = Traits::LINEAR ? TwiceMerging{0, 0, 1} : twice_merging(problem, to.moments);
  to.group_partials = static_cast<int>(merging.partials);
  to.groups_of_all = static_cast<int>(merging.groups);
  to.segments = cutlass::FastDivmod(static_cast<int>(merging.segments));
}

/// Every address of a launch but those in descriptors.
template <class Traits>
void point_to(const ConvTransposeParams& params, TwiceParams<Traits>& to) {
  using Output = typename Traits::Output;
  to.y = static_cast<Output*>(params.a);
  to.bias = static_cast<const Output*>(params.bias);
  to.unscale_sample = params.unscale_sample;
  to.unscale_column = params.unscale_column;
  to.gamma = static_cast<const Output*>(params.gamma);
  to.beta = static_cast<const Output*>(params.beta);
  to.after = Traits::LINEAR ? checked_before(params) : checked_after(params);
  to.part = reinterpret_cast<float2*>(params.part);
  to.table = reinterpret_cast<float4*>(params.table);
  to.merged = to.table + to.groups_of_all;
  to.merged_segments =
      reinterpret_cast<int*>(to.merged + std::int64_t{to.groups_of_all} * to.segments.divisor);
  to.arrivals = params.counters;
  to.dealt = params.counters + kTwiceDealt;
}

/// A launch of one persistent block per multiprocessor, all at once.
template <class Operand, class Output, bool kChannelsFirst, bool kWInPlace, bool kPiled, int BLK_C,
          bool kLinear>
class ConvTransposeTwiceLaunchSm90 : public RememberedLaunch {
 public:
  explicit ConvTransposeTwiceLaunchSm90(const ConvTransposeParams& params)
      : shown_(mapped_addresses(params)) {
    constexpr DType operand = std::is_same_v<Operand, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
    constexpr DType output = std::is_same_v<Output, float> ? DType::kFloat32 : operand;
    fill_twice_params(params, operand, output, params_, maps_);
    std::int64_t tiles = 0;
    for (int i = 0; i < params_.num_classes; ++i) {
      tiles += std::int64_t{params_.classes[i].num_sets} * params_.classes[i].tiles;
    }
    blocks_ = static_cast<int>(std::min<std::int64_t>(tiles, params.sm_count));
    reserve_shared_memory(kName, kKernel, kSharedMemoryBytes);
  }

  /// With the addresses of `params`, which differs from the constructor's in nothing else.
  void run(const ConvTransposeParams& params, cudaStream_t stream) {
    const MappedAddresses to = mapped_addresses(params);
    maps_.move(shown_, to);
    shown_ = to;
    point_to(params, params_);
    launch_cooperative(kName, kKernel, &params_, {blocks_, Traits::THREADS, kSharedMemoryBytes}, stream,
                       [&](int blocks) { place_blocks(blocks, params_); });
  }

 private:
  using Traits = TwiceTraitsSm90<Operand, Output, kChannelsFirst, kWInPlace, kPiled, BLK_C, kLinear>;
  static constexpr const char* kName = "conv_transpose_twice_sm90";
  static inline const void* const kKernel = reinterpret_cast<const void*>(conv_transpose_twice_sm90<Traits>);

  TwiceParams<Traits> params_{};
  TensorMaps maps_;
  MappedAddresses shown_;
  int blocks_ = 0;
};

/// The kernel of such views that stores y in the problem's layout and takes w as it lies or packed.
/// \tparam kPiled, kLinear as TwiceTraitsSm90's
template <class Operand, class Output, bool kPiled, int BLK_C, bool kLinear>
void launch_twice_of_views(const ConvTransposeParams& params, cudaStream_t stream) {
  if (params.problem.y_layout == Layout::kNCDHW) {
    run_remembered<ConvTransposeTwiceLaunchSm90<Operand, Output, true, false, kPiled, BLK_C, kLinear>>(
        params, stream);
    return;
  }
  if constexpr (std::is_same_v<Operand, Output> && !kPiled) {
    if (params.w_in_place) {
      run_remembered<ConvTransposeTwiceLaunchSm90<Operand, Output, false, true, false, BLK_C, kLinear>>(
          params, stream);
      return;
    }
  }
  run_remembered<ConvTransposeTwiceLaunchSm90<Operand, Output, false, false, kPiled, BLK_C, kLinear>>(params,
                                                                                                      stream);
}

/// That of the block's tail.
template <class Operand, class Output, bool kPiled, int BLK_C>
void launch_twice_of_tail(const ConvTransposeParams& params, cudaStream_t stream) {
  params.linear ? launch_twice_of_views<Operand, Output, kPiled, BLK_C, true>(params, stream)
                : launch_twice_of_views<Operand, Output, kPiled, BLK_C, false>(params, stream);
}

/// The kernel that the plan chose.
template <class Operand, class Output, int BLK_C = int(kBlockInputs)>
void launch_conv_transpose_twice_sm90(const ConvTransposeParams& params, cudaStream_t stream) {
  params.piles_views ? launch_twice_of_tail<Operand, Output, true, BLK_C>(params, stream)
                     : launch_twice_of_tail<Operand, Output, false, BLK_C>(params, stream);
}

}  // namespace upconv3d::cuda
