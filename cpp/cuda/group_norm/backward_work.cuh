// SPDX-License-Identifier: Apache-2.0
/// \file
/// How group_norm_backward divides its work: arguments, phases, units, and which block has what.
///
/// A step is one sample, or several where samples are small. Its sums phase reads grad_y and a for s1, s2 and
/// so on; its apply phase reads them again, from L2 where the phases lie close together, and writes grad_c. A
/// unit is a share of a sample's positions for one block of channels; each block of the grid has one unit of a
/// step as a rule, and the same one in both phases.
#pragma once

#include <cstdint>

#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// Channel sums of one unit, in the order in which they lie in memory.
enum SumField {
  kSumGrad,          // of grad_y
  kSumGradDeviation,  // of grad_y*(a - mean)
  kCountOpen,        // positions where !(a <= 0)
  kSumGradOpen,      // of grad_y over those
  kSumDeviationOpen,  // of a - mean over those
  kSumFields,
  kMaxGrad = kSumFields,  // largest |grad_y|
  kMaxDeviation,          // largest |a - mean|
  kAllFields,
};

/// Floats of a channel's record in `part`: a sector of memory.
inline constexpr int kPartFields = 8;

/// A channel's sums over a sample.
struct ChannelSums {
  double grad, grad_xhat, count_open, grad_open, xhat_open;
  float max_grad, max_deviation;
};

/// Of a (sample, group): c1 and c2, and what they make of grad_c = rstd*gamma*grad_y + from_deviation*(a - mean)
/// + constant.
struct GroupTerms {
  double c1, c2;
  double from_deviation, constant;
};

/// Channels of a thread. With eight, sums of eight channels would leave too few registers for two blocks per
/// multiprocessor. The steps of four are a word.
inline constexpr int kBackwardVector = 4;

/// Positions between whose multiples units begin: 16 bytes of any grad_y.
inline constexpr int kPositionGranule = 8;

template <class T, class A, class Out>
struct BackwardArgs {
  int n, k, positions, num_groups;
  const T* grad_y;              // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  const A* a;                   // [N,Z,P,Q,a_pitch]
  const std::int8_t* steps;     // [N,moments,a_pitch], or null
  const std::int32_t* moment_of;  // [Z*P*Q], or null
  const float4* table;          // [N,G] mean, what it lost by rounding, rstd
  const T* gamma;               // [K], or null
  Out* grad_c;                  // [N,Z,P,Q,grad_c_pitch], or null
  std::int32_t* unscale;        // [1], or null
  T* grad_gamma;                // [K], or null; the next two likewise
  T* grad_beta;
  T* grad_bias;
  int a_pitch, grad_c_pitch, moments;
  // Scratch. The first four are 0 when the kernel begins.
  int* arrivals;         // [steps] blocks that have written their part of a step
  int* ready;            // [steps] groups of a step whose terms are written
  int* tickets;          // [N,G] channels of a group that are merged
  int* largest;          // [1] biased reach of the largest |grad_c|, 0: none
  float* part;           // [2,part_units,block_channels,8] step s in half s % 2
  ChannelSums* sums;     // [N,K]
  GroupTerms* terms;     // [N,G]
  // Division of the work.
  int vectors, slots;    // of a block: vectors of channels x positions that are loaded side by side
  int block_channels;    // of a unit
  int channel_blocks;    // that make up a row
  int step_samples, num_steps;
  int part_units;        // units of a step, at most
  int lag;               // sums phases that run ahead of the apply phase
};

struct Phase {
  bool apply;
  int step;
};

/// Position of a step's sums and apply phases in a block's work.
///
/// Interleaved, lag = 1: S0 S1 A0 S2 A1 ... With kLast, the sums of all steps come first, and apply begins
/// with the last step, which is still in L2: a scale for all of grad_c must be known before the first store.
template <bool kLast>
__device__ __forceinline__ Phase phase_at(int index, int num_steps, int max_lag) {
  if (kLast) {
    return index < num_steps ? Phase{false, index} : Phase{true, 2 * num_steps - 1 - index};
  }
  const int lag = min(max_lag, num_steps - 1);
  if (index <= lag) return {false, index};
  if (index >= 2 * num_steps - 1 - lag) return {true, index - num_steps};
  const int pair = index - lag - 1;
  return pair % 2 == 0 ? Phase{true, pair / 2} : Phase{false, lag + 1 + pair / 2};
}

/// Samples of a step, units of a sample's channel block, units of a step.
struct StepShape {
  int samples, shares, units;
};

template <class Args>
__device__ __forceinline__ StepShape step_shape(const Args& args, int step) {
  StepShape shape;
  shape.samples = min(args.step_samples, args.n - step * args.step_samples);
  const int rows = shape.samples * args.channel_blocks;
  const int granules = (args.positions + kPositionGranule - 1) / kPositionGranule;
  shape.shares = min(granules, max(1, static_cast<int>(gridDim.x) / rows));
  shape.units = rows * shape.shares;
  return shape;
}

struct Unit {
  int sample;
  int channel;     // first
  int begin, end;  // positions
};

template <class Args>
__device__ __forceinline__ Unit unit_at(const Args& args, int step, const StepShape& shape, int index) {
  const int row = index / shape.shares, share = index - row * shape.shares;
  const int sample = row / args.channel_blocks;
  const std::int64_t granules = (args.positions + kPositionGranule - 1) / kPositionGranule;
  Unit unit;
  unit.sample = step * args.step_samples + sample;
  unit.channel = (row - sample * args.channel_blocks) * args.block_channels;
  unit.begin = static_cast<int>(granules * share / shape.shares) * kPositionGranule;
  unit.end = min(args.positions, static_cast<int>(granules * (share + 1) / shape.shares) * kPositionGranule);
  return unit;
}

/// Goes through all stages of a block's work in their order: a stage is as many positions of a unit as the
/// block's threads load at once.
template <class Args, bool kLast>
class StageCursor {
 public:
  __device__ __forceinline__ StageCursor(const Args& args, int stage_positions)
      : args_(args), stage_positions_(stage_positions) {
    phase_ = -1;
    unit_index_ = 0;
    units_ = 0;
    next_unit();
  }

  __device__ __forceinline__ bool done() const { return phase_ >= phases(); }
  __device__ __forceinline__ const Unit& unit() const { return unit_; }
  __device__ __forceinline__ int position() const { return position_; }

  __device__ __forceinline__ void advance() {
    position_ += stage_positions_;
    if (position_ >= unit_.end) next_unit();
  }

 private:
  __device__ __forceinline__ int phases() const { return args_.num_steps * (args_.grad_c != nullptr ? 2 : 1); }

  __device__ __forceinline__ int lag() const { return args_.grad_c != nullptr ? args_.lag : args_.num_steps; }

  /// Not inlined into the loop over stages: it is rarely called, and its divisions are long.
  __device__ __forceinline__ void next_unit() {
    unit_index_ += gridDim.x;
    Phase phase = phase_at<kLast>(phase_, args_.num_steps, lag());
    while (unit_index_ >= units_) {
      if (++phase_ >= phases()) return;
      phase = phase_at<kLast>(phase_, args_.num_steps, lag());
      units_ = step_shape(args_, phase.step).units;
      unit_index_ = blockIdx.x;
    }
    unit_ = unit_at(args_, phase.step, step_shape(args_, phase.step), unit_index_);
    position_ = unit_.begin;
  }

  const Args& args_;
  int stage_positions_;
  int phase_, unit_index_, units_, position_;
  Unit unit_;
};

}  // namespace upconv3d::cuda
