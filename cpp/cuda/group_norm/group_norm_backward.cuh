// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_backward: backward stage 1 of 3.
///
///   grad_y [N,K,Z,P,Q] or [N,Z,P,Q,K]  float, bf16, fp16
///   a      [N,Z,P,Q,a_pitch]           its dtype, or uint16 with steps
///   grad_c [N,Z,P,Q,grad_c_pitch]      its dtype, or fp16 * 2^-unscale, or two of those
///
/// One persistent kernel of phases: sums of a step, merging (backward_merge.cuh), grad_c of the step. Blocks
/// wait for each other between them, so all must be on the card: a cooperative launch. While they wait, the
/// ring's loads of the next phase are on their way.
///
/// Blocks own fixed shares of positions and channels, threads fixed channels; sums are merged in an order
/// that depends on the number of blocks alone.
#pragma once

#include <cstdint>

#include "core/channels.hpp"
#include "cuda/group_norm/backward_after.cuh"
#include "cuda/group_norm/backward_merge.cuh"
#include "cuda/group_norm/backward_stages.cuh"

namespace upconv3d::cuda {

/// Shared memory in which threads put sums aside, and a block then merges those of half its threads at a
/// time. In the apply phase it holds a ChannelGrad for each of a unit's channels.
template <class Traits>
struct alignas(16) MergeMemory {
  /// Odd, so that a channel's fields and neighbouring channels lie in different banks.
  static constexpr int kPitch = kStreamThreads / 2 + 1;
  static constexpr int kMerged = Traits::kFields * Traits::kVector * kPitch;
  static constexpr int kSettled = (Traits::kSums - 1) * Traits::kVector * kStreamThreads;
  float sums[kMerged > kSettled ? kMerged : kSettled];
};

template <class Traits>
inline constexpr int kBackwardSharedBytes =
    Traits::kStages * Traits::kStageBytes +
    static_cast<int>(sizeof(MergeMemory<Traits>) + sizeof(FirstUnits));

/// grad_c is 0 where a <= this.
template <class Traits>
__device__ __forceinline__ float closed(const typename Traits::Args& args) {
  return Traits::kAnyTail ? args.closed : 0.f;
}

/// A thread's sums of its channels over its positions of a unit, hundreds of them as a rule. Added up one
/// after the other in float, they would come out with more than PyTorch's error: so it is sums of a few that
/// are added up.
template <class Traits>
struct ThreadSums {
  static constexpr int kVector = Traits::kVector;
  /// Stages between two calls of settle(). Of 250 positions, sums of 16 each have 0.35 times the error.
  static constexpr int kSettleStages = 16 / Traits::kRows;
  float at[Traits::kFields][kVector] = {};

  /// Adds what `at` has been given since the last time to what this thread has put aside: of every field but
  /// the count, which is exact.
  ///
  /// \param first whether nothing has been put aside yet
  template <bool kLast>
  __device__ __forceinline__ void settle(MergeMemory<Traits>& memory, bool first) {
    float* settled = memory.sums + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Traits::kSums * kVector; ++i) {
      if (i / kVector == kCountOpen) continue;
      float& recent = at[i / kVector][i % kVector];
      const float sum = first ? recent : *settled + recent;
      if (!kLast) *settled = sum;
      recent = kLast ? sum : 0.f;
      settled += kStreamThreads;
    }
  }

  /// \param grad g
  __device__ __forceinline__ void add(const typename Traits::Args& args, const float (&grad)[kVector],
                                      const float (&a)[kVector], const float (&mean)[kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float deviation = a[j] - mean[j];
      at[kSumGrad][j] += grad[j];
      at[kSumGradDeviation][j] += grad[j] * deviation;
      if (!(a[j] <= closed<Traits>(args))) {
        at[kCountOpen][j] += 1.f;
        at[kSumGradOpen][j] += grad[j];
        at[kSumDeviationOpen][j] += deviation;
      }
      if constexpr (Traits::kScaled) {
        at[Traits::kMaxGrad][j] = fmaxf(at[Traits::kMaxGrad][j], fabsf(grad[j]));
        at[Traits::kMaxDeviation][j] = fmaxf(at[Traits::kMaxDeviation][j], fabsf(deviation));
      }
    }
  }

  /// Merges the block's sums into its record of the unit, [block_channels,8].
  __device__ __forceinline__ void merge(const typename Traits::Args& args, const Place<Traits>& place,
                                        MergeMemory<Traits>& memory, int channels, float* part) const {
    constexpr int kPitch = MergeMemory<Traits>::kPitch;
    const int half = args.slots / 2, lower = place.slot % half;
    __syncthreads();  // others may still read what they have put aside
    float* const own = memory.sums + lower * args.vectors + place.vector;
    if (place.used && place.slot >= half) {
#pragma unroll
      for (int i = 0; i < Traits::kFields * kVector; ++i) own[i * kPitch] = at[i / kVector][i % kVector];
    }
    __syncthreads();
    if (place.slot < half) {
#pragma unroll
      for (int i = 0; i < Traits::kFields * kVector; ++i) {
        const float mine = at[i / kVector][i % kVector], other = own[i * kPitch];
        own[i * kPitch] = i / kVector < Traits::kSums ? mine + other : fmaxf(mine, other);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < channels * kPartFields; i += kStreamThreads) {
      const int channel = i / kPartFields, field = i % kPartFields;
      if (field >= Traits::kFields) continue;
      const float* const from =
          memory.sums + (field * kVector + channel % kVector) * kPitch + channel / kVector;
      float sum = from[0];
      if (field < Traits::kSums) {
        double total = sum;
        for (int slot = 1; slot < half; ++slot) total += from[slot * args.vectors];
        sum = static_cast<float>(total);
      } else {
        for (int slot = 1; slot < half; ++slot) sum = fmaxf(sum, from[slot * args.vectors]);
      }
      part[i] = sum;
    }
    __syncthreads();
  }
};

/// What makes grad_c of a channel's g and a: from_grad*g + (from_deviation*(a - mean) + constant).
struct ChannelGrad {
  float mean, from_grad, from_deviation, constant;
};

/// grad_c of a thread's channels.
template <class Traits>
struct GradMap {
  static constexpr int kVector = Traits::kVector;
  ChannelGrad at[kVector];
  float prescale;  // of g

  /// The block's threads find a channel each, and then read their own.
  ///
  /// \param exponent of the power of two that grad_c is multiplied by
  /// \param memory   [block_channels]
  __device__ __forceinline__ void load(const typename Traits::Args& args, const Place<Traits>& place,
                                       const Unit& unit, int exponent, ChannelGrad* memory) {
    // Where from_grad would leave float's range, g takes a part of the power: it is as far on the other
    // side.
    const int grad_exponent = exponent > 96 ? 48 : exponent < -96 ? -48 : 0;
    prescale = __int_as_float((127 + grad_exponent) << 23);
    __syncthreads();  // the last map may still be read
    for (int i = threadIdx.x; i < args.block_channels; i += kStreamThreads) {
      const int channel = unit.channel + i;
      memory[i] =
          channel < args.k ? find(args, unit.sample, channel, exponent, grad_exponent) : ChannelGrad{};
    }
    __syncthreads();
    if (!place.used) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const auto four = *reinterpret_cast<const float4*>(memory + place.vector * kVector + j);
      at[j] = {four.x, four.y, four.z, four.w};
    }
  }

  __device__ __forceinline__ void store(const typename Traits::Args& args, const float (&grad)[kVector],
                                        const float (&a)[kVector], int channel,
                                        typename Traits::Stored* to) const {
    using Stored = typename Traits::Stored;
    float values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float own = Traits::kScaled ? grad[j] * prescale : grad[j];
      const float value =
          at[j].from_grad * own + (at[j].from_deviation * (a[j] - at[j].mean) + at[j].constant);
      values[j] = a[j] <= closed<Traits>(args) ? 0.f : value;
    }
    if (channel + kVector > args.k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (channel + j >= args.k) values[j] = 0.f;
      }
    }
    Vector<Stored, kVector> out;
    // What float16 rounds to zero may be zero: its smallest value would be many times a small gradient.
#pragma unroll
    for (int j = 0; j < kVector; ++j) out.at[j] = from_stat<Stored>(values[j]);
    if constexpr (Traits::kSplit) {
      Vector<Stored, kVector> lo;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        // Of what is not finite, one of the three products must carry it alone.
        if (!isfinite(values[j])) out.at[j] = from_stat<Stored>(0.f);
        lo.at[j] = from_stat<Stored>(values[j] - to_stat(out.at[j]));
      }
      store_once<kVector>(to + args.lo_step, lo);
    }
    store_once<kVector>(to, out);
  }

 private:
  static __device__ __forceinline__ ChannelGrad find(const typename Traits::Args& args, int sample,
                                                     int channel, int exponent, int grad_exponent) {
    const int row = sample * args.num_groups + args.group_channels.divide(channel);
    const float4 table = __ldg(args.table + row);
    const float gamma = args.gamma != nullptr ? to_stat(args.gamma[channel]) : 1.f;
    const GroupTerms* const terms = args.terms + row;
    return {table.x, float(double(table.z) * gamma * double_power(exponent - grad_exponent)),
            float(__ldcg(&terms->from_deviation) * double_power(exponent)),
            float(__ldcg(&terms->constant) * double_power(exponent))};
  }

  /// 2^exponent, at most 2^1000 either way.
  static __device__ __forceinline__ double double_power(int exponent) {
    return __hiloint2double((1023 + exponent) << 20, 0);
  }
};

/// A block's work.
template <class Traits>
class BackwardBlock {
 public:
  using Args = typename Traits::Args;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kSettleStages = ThreadSums<Traits>::kSettleStages;

  __device__ __forceinline__ BackwardBlock(const Args& args, char* memory, MergeMemory<Traits>& merge,
                                           const FirstUnits& first)
      : args_(args), place_(args), ring_(args, place_, first, memory), merge_(merge), first_(first) {}

  __device__ __forceinline__ void run() {
    const MergeWarp<Traits> merge_warp(args_);
#pragma unroll 1
    for (int i = 0; i < phase_count(args_); ++i) {
      const Phase phase = phase_at<Traits::kScaled>(args_, i);
      const StepShape shape = step_shape(args_, phase.step);
#pragma unroll 1
      for (int index = blockIdx.x; index < shape.units; index += gridDim.x) {
        const Unit unit = find_unit(args_, first_, phase.step, shape, index);
        if (phase.apply) {
          apply(unit);
        } else {
          sum(unit, index);
        }
      }
      if (phase.apply) continue;
      // sum() ended with a barrier: this thread's release covers what the others wrote.
      if (threadIdx.x == 0) release_one(args_.arrivals + phase.step);
      __syncwarp();
      merge_warp.merge_step(phase.step);
      // From then on `part` may be written again.
      merge_warp.wait_ready(phase.step);
    }
    merge_warp.finish(reinterpret_cast<double*>(merge_.sums));
  }

 private:
  __device__ __forceinline__ void sum(const Unit& unit, int index) {
    const int channel = unit.channel + place_.vector * kVector;
    float mean[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int group = args_.group_channels.divide(min(channel + j, args_.k - 1));
      mean[j] = __ldg(&args_.table[unit.sample * args_.num_groups + group].x);
    }
    AfterGradient<Traits> after;
    after.load(args_, unit.sample, channel);
    ThreadSums<Traits> sums;
    int stages = 0;
    __syncthreads();  // the map of the apply phase before, in the memory of the sums, may still be read
#pragma unroll 1
    for (int first = unit.begin; first < unit.end; first += Place<Traits>::stage_positions(args_)) {
      ring_.next();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + place_.position(args_, i) >= unit.end) continue;
        float grad[kVector], a[kVector];
        ring_.read_grad(i, grad);
        ring_.read_a(i, a);
        if constexpr (Traits::kAnyTail) {
          float deviation[kVector];
#pragma unroll
          for (int j = 0; j < kVector; ++j) deviation[j] = a[j] - mean[j];
          after.multiply(args_, deviation, grad, sums.at[kSumSlope]);
        }
        sums.add(args_, grad, a, mean);
      }
      if (++stages % kSettleStages == 0) sums.template settle<false>(merge_, stages == kSettleStages);
    }
    sums.template settle<true>(merge_, stages < kSettleStages);
    sums.merge(args_, place_, merge_, min(args_.block_channels, args_.k - unit.channel),
               args_.part + std::int64_t{index} * args_.block_channels * kPartFields);
  }

  __device__ __forceinline__ void apply(const Unit& unit) {
    const int channel = unit.channel + place_.vector * kVector;
    AfterGradient<Traits> after;
    after.load(args_, unit.sample, channel);
    GradMap<Traits> map;
    map.load(args_, place_, unit, Traits::kScaled ? MergeWarp<Traits>::scale_exponent(args_) : 0,
             reinterpret_cast<ChannelGrad*>(merge_.sums));
    // Behind whole k-blocks of a SplitRow lie as many lo as hi.
    const int blocks_before = args_.lo_step == int(kBlockInputs) ? channel & -int(kBlockInputs) : 0;
    auto* const to = reinterpret_cast<typename Traits::Stored*>(
                         args_.grad_c + std::int64_t{unit.sample} * args_.positions * args_.grad_c_pitch) +
                     channel + (Traits::kSplit ? blocks_before : 0);
    const bool stored = place_.used && channel < args_.grad_c_pitch;
    const int stage = Place<Traits>::stage_positions(args_);
#pragma unroll 1
    for (int first = last_stage(unit, stage); first >= unit.begin; first -= stage) {
      ring_.next();
      // Hi and lo of a channel may lie where other channels' a did: that must have been read.
      if constexpr (Traits::kSplit && !Traits::kPlanes) __syncthreads();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int position = first + place_.position(args_, i);
        if (!stored || position >= unit.end) continue;
        float grad[kVector], a[kVector];
        ring_.read_grad(i, grad);
        ring_.read_a(i, a);
        if constexpr (Traits::kAnyTail) {
          float deviation[kVector];
#pragma unroll
          for (int j = 0; j < kVector; ++j) deviation[j] = a[j] - map.at[j].mean;
          after.multiply(args_, deviation, grad, nullptr);
        }
        map.store(args_, grad, a, channel,
                  to + std::int64_t{position} * args_.grad_c_pitch * Traits::kOutElements);
      }
    }
  }

  const Args& args_;
  const Place<Traits> place_;
  StageRing<Traits> ring_;
  MergeMemory<Traits>& merge_;
  const FirstUnits& first_;
};

template <class Traits>
__global__ void __launch_bounds__(kStreamThreads, kBackwardBlocksPerMultiprocessor)
    group_norm_backward(const __grid_constant__ typename Traits::Args args) {
  extern __shared__ __align__(16) char memory[];  // ring, MergeMemory, FirstUnits
  auto& merge = *reinterpret_cast<MergeMemory<Traits>*>(memory + Traits::kStages * Traits::kStageBytes);
  auto& first = *reinterpret_cast<FirstUnits*>(memory + kBackwardSharedBytes<Traits> - sizeof(FirstUnits));
  if (threadIdx.x == 0) {
    first.whole = unit_at(args, step_shape(args, 0), blockIdx.x);
    first.last = unit_at(args, step_shape(args, args.num_steps - 1), blockIdx.x);
  }
  __syncthreads();
  BackwardBlock<Traits>(args, memory, merge, first).run();
}

}  // namespace upconv3d::cuda
