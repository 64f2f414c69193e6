// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launcher of conv_transpose_relu_group_norm_sm90, conv_transpose_twice_sm90 or conv_transpose_held_sm90,
/// everything after packing, free of CUTLASS so that host code can include it. One launcher per line of
/// cpp/instances.cmake.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/launch_memo.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/twice_layout.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

/// conv_transpose_twice_sm90 takes no channel_table, steps, moment_of, split_axes, share_taps, pair_phases,
/// launches and window_tiles; its part is [N,granules,moments,2] of unrounded values, by granules of
/// twice_granule_shift, M2 of fewer positions than others have with a minus, its table [twice_table_floats]
/// (core/twice_layout.hpp).
///
/// conv_transpose_held_sm90 takes no more than conv_transpose_twice_sm90, nor counters; its part is
/// [N,moments,granules,4] by held_granule_shift (core/held_tiles.hpp), its table [N,G,4].
///
/// a is before(conv + bias).
struct ConvTransposeParams {
  Problem problem;
  const void* x_hi = nullptr;  // [N,D,H,W,C] operand, 16-byte aligned, or packed:
  bool x_packed = false;       // [N,groups,D,H,W,operand_channels] operand
  std::int64_t x_pitch = 0;    // channels of a row of x that is not packed; 0: C
  const void* x_lo = nullptr;  // as x_hi, three products only
  bool x_split = false;        // x_hi and x_lo are the same SplitRows, x_pitch channels each
  bool w_in_place = false;     // w_hi is w as it lies (reads_w_in_place), 16-byte aligned
  bool piles_views = false;    // computed twice: TwiceLayout::pile is 2
  const void* w_hi = nullptr;  // [T*R*S,K,operand_channels] operand; in place: [C,T*R*S,K]
  const void* w_lo = nullptr;  // the same, three products only
  const void* bias = nullptr;  // [K] dtype, or null
  const std::int32_t* unscale_sample = nullptr;  // [N] exponents, or null where operands are unscaled
  const std::int32_t* unscale_column = nullptr;  // [K] exponents, or null
  bool one_unscale_sample = false;               // unscale_sample is [1]: the same exponent for every sample
  // a is all that there is: no moments or normalization, and none of the memory that these take. Not for
  // instances that store fewer bits than dtype has.
  bool linear = false;
  // Linear only: a is [N,K,Z,P,Q] dtype, rows of Z*P*Q in whole 16-byte chunks. Slabs must be whole planes
  // and begin at such a chunk.
  bool channels_first = false;
  const void* gamma = nullptr;  // [K] dtype, or null for 1
  const void* beta = nullptr;   // [K] dtype, or null for 0
  // problem.tail.before(); in conv_transpose_twice_sm90 ReLU or nothing, unless linear.
  ActivationParams before;
  // problem.tail.after(), where this kernel normalizes; piecewise linear except in conv_transpose_twice_sm90
  ActivationParams after;
  // before(conv + bias), written: [N,Z,P,Q,padded_channels(K)] of as many bits as the instance stores; where
  // y is null, in y's memory, [N,Z,P,Q,K] dtype, and normalized in place.
  void* a = nullptr;
  void* y = nullptr;  // [N,Z,P,Q,K] dtype, written where a is to be kept; null where channel_table is given
  // Scratch memory, 256-byte aligned; moments, granules: see Plan.
  float* part = nullptr;           // [N,moments,granules,2]: (mean, M2) of a as stored
  float* table = nullptr;          // [N,G,4]: mean, rest of the mean, 1/sqrt(var + eps), unused; may be null
                                   // where channel_table is given
  float* channel_table = nullptr;  // [3,N,K] written: mean, scale, shift; null: this kernel normalizes
  // Instances that store fewer bits than dtype has, else null: a is bits * 2^step after ReLU, else
  // (bits - 32768) * 2^step; or not finite where the step is -128. [N,moments,padded_channels(K)] written.
  std::int8_t* steps = nullptr;
  // [Z*P*Q] written: the partial moment, and so the steps, of a position; null: not wanted.
  std::int32_t* moment_of = nullptr;
  std::int32_t* counters = nullptr;  // [counter_count(problem)], zero unless this launch clears them
  int split_axes = 0;                // axes along which borders are cut off, see border_slabs
  bool share_taps = false;       // loads of x serve several taps: tap_sharing_slabs instead of border_slabs
  bool pair_phases = false;      // two phases share tiles and loads of x (core/phase_pairs.hpp); one launch
  bool clears_counters = false;  // where no earlier kernel of the call can: blocks wait for that, about 1 us
  // Launches among which slabs are divided (core/slab_launches.hpp): of several, moments are not merged, and
  // channel_table, which must be given unless linear, is not written, nor is table.
  int launches = 1;
  int launch = 0;                 // which of them: set by the launcher, which makes all of them
  std::int64_t window_tiles = 0;  // position tiles of a window of the launch order, 0: slab by slab
  int sm_count = 0;               // blocks of the persistent grid
  // The kernel launched behind this one, which is group_norm_normalize, may begin once all blocks of this one
  // have begun; `leaving_blocks` of them, fewer than sm_count, end after the first sample to make room for
  // it.
  bool normalized_beside = false;
  int leaving_blocks = 0;
  // Of launches on one device that differ in nothing above but addresses, and in none that is null; or null.
  LaunchMemo* memo = nullptr;
};

/// Where conv_transpose_twice_sm90 counts the tiles it hands out, [2,kMaxTwiceSets], among its counters: in
/// lines of memory of their own, apart from those that blocks look at while they wait.
inline constexpr std::int64_t kTwiceDealt = 32;

/// Where the counters [N] of what is stored of each sample begin, behind those of tiles and items handed out.
inline constexpr std::int64_t kStoredCounters = 2;

/// Where those of what is merged of each sample begin.
inline std::int64_t merged_counters(const Problem& problem) {
  return kStoredCounters + problem.n;
}

/// The latter are at least this once the sample's moments are in channel_table.
inline constexpr std::int32_t kSampleMerged = 1 << 30;

/// Blocks that may keep their last tile in shared memory until it can be normalized, the first ones: more
/// than multiprocessors of any arch 90 card.
inline constexpr std::int64_t kMaxKeepers = 160;

/// Where the tiles that are kept, [kMaxKeepers], lie among the counters.
inline std::int64_t kept_tiles(const Problem& problem) {
  return merged_counters(problem) + problem.n;
}

/// Counters that a launch needs.
inline std::int64_t counter_count(const Problem& problem) {
  return std::max(kept_tiles(problem) + kMaxKeepers, kTwiceDealt + 2 * kMaxTwiceSets);
}

using ConvTransposeLauncher = void (*)(const ConvTransposeParams& params, cudaStream_t stream);

/// The launcher of an instance by its name; generated from instances.cmake.
/// \throws std::logic_error for a name that was not compiled.
ConvTransposeLauncher find_conv_transpose_launcher(const char* instance_name);

}  // namespace upconv3d::cuda
