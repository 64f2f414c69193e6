// SPDX-License-Identifier: Apache-2.0
/// \file
/// How group_norm_backward divides its work: arguments, phases, units, and which block has what.
///
/// A step is one sample or several. Its sums phase reads grad_y and a for s1, s2 and so on; its apply phase
/// reads them again and writes grad_c. A unit is a share of a sample's positions for one block of channels;
/// each block of the grid has one unit of a step as a rule, and the same one in both phases.
#pragma once

#include <cstdint>

#include "cuda/activation.hpp"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// Channel sums of one unit, in the order in which they lie in memory.
enum SumField {
  kSumGrad,           // of g, which is grad_y where nothing follows the normalization
  kSumGradDeviation,  // of g*(a - mean)
  kCountOpen,         // positions where !(a <= closed)
  kSumGradOpen,       // of g over those
  kSumDeviationOpen,  // of a - mean over those
  kSumFields,
  kSumSlope = kSumFields,  // of grad_y*u where !(u > 0); kernels of any tail alone
};

/// Floats of a channel's record in `part`: a sector of memory. Behind the sums, where grad_c is scaled, are
/// the largest |g| and the largest |a - mean|.
inline constexpr int kPartFields = 8;

/// An element of grad_c as two float16, whose sum it is. How they lie in a row: SplitRow in
/// core/channels.hpp.
struct SplitHalf {
  __half hi, lo;
};

/// A channel's sums over a sample.
struct ChannelSums {
  double grad, grad_xhat, count_open, grad_open, xhat_open;
  float max_grad, max_deviation;
};

/// Of a (sample, group): c1 and c2, and what they make of
/// grad_c = rstd*gamma*g + from_deviation*(a - mean) + constant.
struct GroupTerms {
  double c1, c2;
  double from_deviation, constant;
};

/// Channels of a thread. With eight, sums of eight channels would leave too few registers for two blocks per
/// multiprocessor. The steps of four are a word.
inline constexpr int kBackwardVector = 4;

/// Blocks per multiprocessor: while one waits at a barrier, the other goes on.
inline constexpr int kBackwardBlocksPerMultiprocessor = 2;

/// Channels of a unit where grad_y is NCDHW: of a wide tile, and of a narrow one.
inline constexpr int kPlaneTileChannels = 64, kNarrowTileChannels = 16;

/// Positions between whose multiples units begin: 16 bytes of any grad_y.
inline constexpr int kPositionGranule = 8;

/// Division by a number that the host knows, of dividends below 2^31.
struct Divisor {
  unsigned multiplier, shift;  // multiplier 0: by 1

  void set(std::int64_t divisor) {
    shift = 0;
    while ((std::int64_t{1} << shift) < divisor) ++shift;
    multiplier = divisor == 1
                     ? 0u
                     : static_cast<unsigned>(((std::int64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    shift = divisor == 1 ? 0u : shift - 1;
  }
  __device__ __forceinline__ int divide(int dividend) const {
    if (multiplier == 0) return dividend;
    return static_cast<int>(__umulhi(static_cast<unsigned>(dividend), multiplier) >> shift);
  }
};

template <class T, class A, class Out>
struct BackwardArgs {
  int n, k, positions, num_groups;
  const T* grad_y;                // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  const A* a;                     // [N,Z,P,Q,a_pitch]
  const std::int8_t* steps;       // [N,moments,a_pitch], or null
  const std::int32_t* moment_of;  // [Z*P*Q], or null
  const float4* table;            // [N,G] mean, what it lost by rounding, rstd
  const T* gamma;                 // [K], or null
  Out* grad_c;                    // [N,Z,P,Q,grad_c_pitch], or null
  std::int32_t* unscale;          // [1], or null
  T* grad_gamma;                  // [K], or null; the next two likewise
  T* grad_beta;
  T* grad_bias;
  int a_pitch, grad_c_pitch, moments;
  int lo_step;             // of grad_c's SplitRows, else 0
  Divisor group_channels;  // K/G
  // Scratch. The first four are 0 when the kernel begins.
  int* arrivals;      // [steps] blocks that have written their part of a step
  int* ready;         // [steps] groups of a step whose terms are written
  int* largest;       // [1] biased reach of the largest |grad_c|, 0: none
  int* tickets;       // [N,G] channels of a group that are merged
  float* part;        // [units,block_channels,8] of the current step
  ChannelSums* sums;  // [N,K]
  GroupTerms* terms;  // [N,G]
  // Of kernels of any tail alone.
  ActivationParams after;
  const T* beta;        // [K], or null
  T* grad_slopes;       // [1] or [K], as after.slope_step says, or null
  double* slope_sums;   // [N,K] scratch; with grad_slopes
  float closed;         // grad_c is 0 where a <= closed: 0, or NaN for nowhere
  float stored_origin;  // of stored_bits(); with steps
  // Division of the work.
  int vectors, slots;  // of a block: vectors of channels x positions that are loaded side by side
  int block_channels;  // of a unit
  int channel_blocks;  // that make up a row
  int step_samples, num_steps;
  int step_shares, last_shares;  // units of a sample's channel block, in whole steps and in the last one
};

struct Phase {
  bool apply;
  int step;
};

/// Phases of a block's work: each step's sums and, where grad_c is wanted, its apply phase.
template <class Args>
__device__ __forceinline__ int phase_count(const Args& args) {
  return args.num_steps * (args.grad_c != nullptr ? 2 : 1);
}

/// Step by step; or, with kLast, the sums of all steps first, where a scale for all of grad_c must be known
/// before the first store. Apply then begins with the last step, whose end is still in L2.
template <bool kLast, class Args>
__device__ __forceinline__ Phase phase_at(const Args& args, int index) {
  if (args.grad_c == nullptr) return {false, index};
  if (!kLast) return {index % 2 == 1, index / 2};
  return index < args.num_steps ? Phase{false, index} : Phase{true, 2 * args.num_steps - 1 - index};
}

/// Samples of a step, units of a sample's channel block, units of a step.
struct StepShape {
  int samples, shares, units;
};

template <class Args>
__device__ __forceinline__ StepShape step_shape(const Args& args, int step) {
  const bool whole = step < args.num_steps - 1;
  StepShape shape;
  shape.samples = whole ? args.step_samples : args.n - (args.num_steps - 1) * args.step_samples;
  shape.shares = whole ? args.step_shares : args.last_shares;
  shape.units = shape.samples * args.channel_blocks * shape.shares;
  return shape;
}

struct Unit {
  int sample;
  int channel;     // first
  int begin, end;  // positions
};

/// The `index`-th unit of a step; `sample` counts from the step's first.
template <class Args>
__device__ __forceinline__ Unit unit_at(const Args& args, const StepShape& shape, int index) {
  const int row = index / shape.shares, share = index - row * shape.shares;
  const int granules = (args.positions + kPositionGranule - 1) / kPositionGranule;
  const int each = granules / shape.shares, more = granules - each * shape.shares;
  Unit unit;
  unit.sample = row / args.channel_blocks;
  unit.channel = (row - unit.sample * args.channel_blocks) * args.block_channels;
  unit.begin = (share * each + min(share, more)) * kPositionGranule;
  unit.end = min(args.positions, unit.begin + (each + (share < more ? 1 : 0)) * kPositionGranule);
  return unit;
}

/// A block's first unit of a whole step and of the last one, in shared memory: as a rule all that it has.
/// Finding a unit takes as long as a small unit itself, in divisions.
struct FirstUnits {
  Unit whole, last;
};

template <class Args>
__device__ __forceinline__ Unit find_unit(const Args& args, const FirstUnits& first, int step,
                                          const StepShape& shape, int index) {
  Unit unit;
  if (index == static_cast<int>(blockIdx.x)) {
    unit = step < args.num_steps - 1 ? first.whole : first.last;
  } else {
    unit = unit_at(args, shape, index);
  }
  unit.sample += step * args.step_samples;
  return unit;
}

/// First position of a unit's last stage of `stage` positions.
__device__ __forceinline__ int last_stage(const Unit& unit, int stage) {
  return unit.begin + (unit.end - unit.begin - 1) / stage * stage;
}

/// Goes through all stages of a block's work in their order: a stage is as many positions of a unit as the
/// block's threads load at once. The apply phase goes backwards: it begins with what was read last.
template <class Args, bool kLast>
class StageCursor {
 public:
  __device__ __forceinline__ StageCursor(const Args& args, const FirstUnits& first, int stage_positions)
      : args_(args), first_(first), stage_positions_(stage_positions) {
    phase_ = -1;
    unit_index_ = 0;
    units_ = 0;
    next_unit();
  }

  __device__ __forceinline__ bool done() const { return phase_ >= phase_count(args_); }
  __device__ __forceinline__ const Unit& unit() const { return unit_; }
  __device__ __forceinline__ int position() const { return position_; }

  __device__ __forceinline__ void advance() {
    position_ += apply_ ? -stage_positions_ : stage_positions_;
    if (position_ >= unit_.end || position_ < unit_.begin) next_unit();
  }

 private:
  __device__ __forceinline__ void next_unit() {
    unit_index_ += gridDim.x;
    while (unit_index_ >= units_) {
      if (++phase_ >= phase_count(args_)) return;
      units_ = step_shape(args_, phase_at<kLast>(args_, phase_).step).units;
      unit_index_ = blockIdx.x;
    }
    const Phase phase = phase_at<kLast>(args_, phase_);
    unit_ = find_unit(args_, first_, phase.step, step_shape(args_, phase.step), unit_index_);
    position_ = phase.apply ? last_stage(unit_, stage_positions_) : unit_.begin;
    apply_ = phase.apply;
  }

  const Args& args_;
  const FirstUnits& first_;
  const int stage_positions_;
  int phase_, unit_index_, units_, position_;
  bool apply_;
  Unit unit_;
};

}  // namespace upconv3d::cuda
