// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_twice_sm90 is compiled for (traits), what a launch hands it (parameters), and how
/// it lays out shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

#include "core/twice_layout.hpp"
#include "cuda/activation.hpp"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"
#include "cuda/conv_transpose/warpgroup_tile_sm90.cuh"

namespace upconv3d::cuda {

/// \tparam kChannelsFirst y is [N,K,Z,P,Q], not [N,Z,P,Q,K]
/// \tparam kWInPlace w is [C,T,R,S,K], as PyTorch's channels_last_3d leaves it: of the operand's dtype, and a
/// warpgroup's rows are output channels as they follow each other
/// \tparam kPiled two views of 32 rows lie below each other in a warpgroup's 64
/// \tparam BLK_C_ input channels of a k-block
/// \tparam kLinear there is no normalization, and no first pass. Asked at run time it took others 1 to 3 %.
template <class Operand_, class Output_, bool kChannelsFirst, bool kWInPlace, bool kPiled, int BLK_C_,
          bool kLinear>
struct TwiceTraitsSm90
    : WarpgroupTileSm90<Operand_, kWInPlace, int(kTwiceRows), int(kTwicePositions), BLK_C_> {
  static constexpr bool LINEAR = kLinear;
  using Operand = Operand_;
  using Output = Output_;  // y, bias, gamma, beta
  static constexpr bool CHANNELS_FIRST = kChannelsFirst;
  static constexpr bool W_IN_PLACE = kWInPlace;
  static constexpr bool PILED = kPiled;
  static_assert(!W_IN_PLACE || (std::is_same_v<Operand, Output> && !CHANNELS_FIRST && !PILED));
  /// Piled views of 16 bit are staged in a buffer each, of rows of 64 bytes: rows of 128 would begin with the
  /// first one's channels and end with the other's, and TMA stores but the beginnings of rows. Of float32
  /// that is as many channels as a view has.
  static constexpr bool VIEWS_APART = PILED && !CHANNELS_FIRST && sizeof(Output) == 2;
  static constexpr int ROWS = int(kTwiceRows);          // of a warpgroup: output channels of its phases
  static constexpr int BLK_POS = int(kTwicePositions);  // positions of a tile
  static constexpr int BLK_C = BLK_C_;                  // input channels of a k-block: a swizzled row
  static constexpr bool SCALED = sizeof(Output) == 4;   // operands carry powers of two
  /// A block's first tile is its own, for which no counter is asked. Not for y [N,K,Z,P,Q], which took 1 %
  /// longer so in float32, whose counters another launch clears (perf/results/h200_twice_lab.txt).
  static constexpr bool OWN_FIRST_TILE = !CHANNELS_FIRST;

  /// Slots of x are for bytes on their way: of half k-blocks as many as there is room for barriers.
  static constexpr int MAX_X_SLOTS = BLK_C == int(kBlockInputs) ? 6 : 9;
  static constexpr int WANTED_X_SLOTS = BLK_C == int(kBlockInputs) ? 4 : 8;

  /// A staging buffer holds 64 channels of this many positions, or 32 of twice as many.
  static constexpr int STAGE_POS = kStagePositions<Output> * (VIEWS_APART ? 2 : 1);
  /// Channels that a store takes.
  static constexpr int STAGE_CHANNELS = VIEWS_APART ? ROWS / 2 : kPanelChannels<Output>;
  static constexpr int ROUNDS = BLK_POS / STAGE_POS;

  /// Channels of one phase, then of the other, where two are stacked for y [N,K,Z,P,Q].
  static constexpr int STACKED = int(kTwiceStackedChannels);

  static constexpr int THREADS = 3 * 128;  // one warpgroup that loads and helps, two that multiply
  // Consumers need 128 accumulators and what an epilogue has in flight; the loading thread more than 40.
  static constexpr int HELPER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = 224;
  static_assert(128 * HELPER_REGISTERS + 256 * CONSUMER_REGISTERS <= 168 * THREADS,
                "else the launch waits for registers forever");
};

/// Tiles that the loading thread may be ahead.
inline constexpr int kTwiceTileSlots = 4;
/// Staging buffers of a warpgroup: one or the other.
inline constexpr int kManyStagingBuffers = 4, kFewStagingBuffers = 2;
/// Their halves: one is staged while the other is stored.
inline constexpr int kStagingSets = 2;
/// Small enough that beside max_twice_weight_bytes and the staging buffers two slots of x fit.
inline constexpr int kTwiceControlBytes = 3072;

/// One phase of the stride.
struct TwicePhase {
  int tap[3];        // the tap that reads the lowest input
  int taps[3];       // along T,R,S; 0: none reaches the phase
  int window[3];     // where tap 0 reads for position 0, in taps: the volume's coordinate / dilation
  int first_moment;  // of a sample's partial moments
};

/// One phase, or `fold` of them side by side, in y as [N,Z,P,Q/fold,fold*K] or [N,K,Z,P,Q/fold,fold].
struct TwiceView : SlabGeometry {
  CUtensorMap y;  // boxes of STAGE_POS positions x STAGE_CHANNELS; not for y [N,K,Z,P,Q]
};

/// core's TwiceSet: weights that a block keeps.
struct TwiceSetParams {
  std::int16_t rows[2];      // of either warpgroup, in blocks of 64, row_blocks of each view; -1: none
  std::int16_t first_block;  // that begins with this set, or with a later one
};

/// core's TwiceUnits.
struct TwiceUnitsParams {
  std::uint32_t taps;  // mask of the class's taps
  int count;           // k-blocks of weights
};

/// Sets whose tiles use the same loads of x.
struct TwiceClassParams {
  CUtensorMap x;                      // the class's windows
  cutlass::FastDivmod width, height;  // of its views along Q/fold and P
  int corner[3];                      // first window's coordinates in x
  int window[3];                      // the same as phases have it, to compare them
  int loads[3];                       // of x along T,R,S: taps, but for those that are shared
  int shared_axis;                    // along which a load serves several taps
  int shared_taps;                    // that each serves
  int shared_rows;                    // of x, from one of those taps to the next
  int c_begin, c_blocks;              // k-blocks of input channels; beyond the last one where no tap reaches
  TwiceUnitsParams units[2];
  cutlass::FastDivmod pos_tiles;  // of a sample
  int positions;                  // of a sample
  int first_set, num_sets;
  int tiles;                // of all samples, for each set
  std::int64_t set_cost;    // of a set's tiles, relative to other classes'
  std::int64_t first_cost;  // sum over the sets before this class's
};

template <class Traits>
struct TwiceParams {
  using Output = typename Traits::Output;
  TwiceClassParams classes[kMaxTwiceClasses];
  TwiceView views[kMaxTwiceViews];
  TwicePhase phases[kMaxTwicePhases];
  TwiceSetParams sets[kMaxTwiceSets + 1];  // behind the last one only its first_block, the number of blocks
  CUtensorMap w;                           // boxes of one tap x w_rows output channels x BLK_C
  int w_rows;                              // of a unit's 64 that one box holds
  int num_counters;                        // that the launch clears, 0: they are zero before
  int num_classes, num_sets, num_phases;
  int tap_step[3];  // from one tap of a phase to the next, downwards
  int dilation[3];  // of x's coordinates, from one tap of a phase to the next
  int fold;
  cutlass::FastDivmod row_blocks;  // blocks of 64 rows in a view
  int view_out[3];                 // Z,P,Q/fold
  int view_k;                      // fold*K
  int kernel[3];                   // T,R,S
  cutlass::FastDivmod k;           // output channels
  std::int64_t total_cost;
  int w_units;  // room for weights
  int x_slots;
  int x_slot_bytes;                    // of the longest load
  int staging_buffers;                 // of each warpgroup; none for y [N,K,Z,P,Q]
  Output* y;                           // [N,Z,P,Q,K] or [N,K,Z,P,Q]
  Output const* bias;                  // [K], or null
  std::int32_t const* unscale_sample;  // [N] exponents, float32 output only
  std::int32_t const* unscale_column;  // [K] exponents, float32 output only
  Output const* gamma;                 // [K], or null for 1
  Output const* beta;                  // [K], or null for 0
  double eps;                          // activation units squared
  float eps_float;                     // the same
  float floor;                         // of conv + bias: 0 for ReLU, -infinity for none
  ActivationParams after;              // the normalization; of LINEAR kernels before()
  float2* part;                        // [N,K/granule,moments] (mean, M2; -M2 of fewer positions)
  int moments;                         // partial moments of a sample along its positions
  int granule_shift;
  int groups;                          // G
  cutlass::FastDivmod group_channels;  // K/G
  int group_partials;                  // K/G/granule*moments
  int groups_of_all;                   // N*G
  cutlass::FastDivmod segments;        // of a group's partials, merged each by itself
  float4* table;                       // [N,G] (mean, rest of the mean, 1 / deviation, -)
  // Of several segments:
  float4* merged;        // [N,G,segments] (mean, rest of the mean, variance, count)
  int* merged_segments;  // [N,G] how many are merged, cleared by the launch
  // Counters, zero before the launch or cleared by it.
  int* arrivals;  // [2] blocks whose partial moments are written, and teams that have merged theirs
  int* dealt;     // [2,kMaxTwiceSets] tiles handed out in either pass
};

/// A warpgroup's rows of a set, or some of them.
struct TwiceRowsParams {
  int view;  // of the first of them; -1: nothing to compute
  int row;   // that one, of fold*K
};
template <class Traits>
CUTLASS_DEVICE TwiceRowsParams twice_rows(TwiceParams<Traits> const& params, int set, int group) {
  int const number = params.sets[set].rows[group];
  if (number < 0) return {-1, 0};
  TwiceRowsParams rows;
  rows.view = params.row_blocks.divmod(rows.row, number);
  rows.row *= Traits::ROWS;
  return rows;
}

/// Where of a warpgroup's 64 rows those from `row` on begin: of a warp's 16 all are of one view.
template <class Traits>
CUTLASS_DEVICE TwiceRowsParams twice_rows_from(TwiceRowsParams const& rows, int row) {
  constexpr int kHalf = Traits::ROWS / 2;
  if (Traits::PILED && row >= kHalf) return {rows.view + 1, row - kHalf};
  return {rows.view, rows.row + row};
}

/// A tile's place.
struct TwiceTile {
  int set;       // -1: none
  int cls;       // its class
  int n;         // sample
  int pos_tile;  // BLK_POS positions each, within the set's views
};

/// Barriers and small exchanges; at the end of shared memory.
template <class Traits>
struct TwiceControl {
  RingBarriers<Traits::MAX_X_SLOTS> x;
  RingBarriers<1> w;
  RingBarriers<kTwiceTileSlots> tile_ring;
  RingBarriers<1> wanted;  // w_wanted
  // Of a warpgroup and its helper:
  RingBarriers<1> sums[2];               // rows, in the first pass
  RingBarriers<kStagingSets> staged[2];  // sets of staging buffers
  int4 sums_of[2];                       // set, or -1 at the end, sample, position tile
  int4 staged_of[2][kStagingSets];       // set, or -1 at the end, sample, first position
  int4 tiles[kTwiceTileSlots];           // set, sample, position tile, class
  int2 w_wanted;                         // set and class whose weights are to be loaded, or -1 at the end
  // Of a warpgroup's rows: a tile's sum, pivot, sum of squares and count; later moments of a norm group.
  float4 rows[2][kTwiceRows];
  int first_moment[kMaxTwicePhases];
  int last_count[kMaxTwicePhases];  // positions behind a phase's last partial moment
};

/// The parts of shared memory.
template <class Traits>
struct TwiceShared {
  char* x;        // [x_slots] (BLK_POS + shared rows,BLK_C) swizzled
  char* w;        // [w_units] (ROWS,BLK_C) swizzled, either operand layout: warpgroup 0's, then 1's
  char* staging;  // [2][staging_buffers] of 8 KB
  TwiceControl<Traits>* control;

  CUTLASS_DEVICE TwiceShared(char* base, TwiceParams<Traits> const& params) {
    static_assert(sizeof(TwiceControl<Traits>) <= kTwiceControlBytes);
    x = base;
    w = x + params.x_slots * params.x_slot_bytes;
    staging = w + params.w_units * Traits::W_BYTES;
    control = reinterpret_cast<TwiceControl<Traits>*>(base + kSharedMemoryBytes - kTwiceControlBytes);
  }
};

}  // namespace upconv3d::cuda
