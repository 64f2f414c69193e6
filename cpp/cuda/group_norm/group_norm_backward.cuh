// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_backward: backward stage 1 of 3.
///
///   grad_y [N,K,Z,P,Q] or [N,Z,P,Q,K]  float, bf16, fp16
///   a      [N,Z,P,Q,a_pitch]           its dtype, or uint16 with steps
///   grad_c [N,Z,P,Q,grad_c_pitch]      its dtype, or fp16 * 2^-unscale
///
/// One persistent kernel: eight warps of a block stream, the ninth merges sums (backward_merge.cuh). Memory is
/// what this costs: 2 reads and 1 write of the tensors at least, 4 reads and 1 write where c1 and c2 would be
/// known only after a pass over everything. So samples follow each other closely (phase_at): when a sample's
/// apply phase reads grad_y and a, they still are in L2. Blocks wait for each other, so all of them must be on
/// the card: a cooperative launch.
///
/// Blocks own fixed shares of positions and channels, threads fixed channels; sums are merged in an order that
/// depends on the number of blocks alone.
#pragma once

#include <cstdint>

#include "cuda/group_norm/backward_merge.cuh"
#include "cuda/group_norm/backward_stages.cuh"

namespace upconv3d::cuda {

inline constexpr int kBackwardThreads = kStreamThreads + 32;

/// Two blocks: while one merges or waits, the other streams.
inline constexpr int kBackwardBlocksPerMultiprocessor = 2;

/// Shared memory in which a block merges its threads' sums: those of half its threads. In the apply phase it holds
/// a ChannelGrad for each of a unit's channels.
template <class Traits>
struct alignas(16) MergeMemory {
  /// Odd, so that a channel's fields and neighbouring channels lie in different banks.
  static constexpr int kPitch = kStreamThreads / 2 + 1;
  float sums[Traits::kFields * Traits::kVector * kPitch];
};

template <class Traits>
inline constexpr int kBackwardSharedBytes =
    Traits::kStages * Traits::kStageBytes + static_cast<int>(sizeof(MergeMemory<Traits>)) + 16;

/// A thread's sums of its channels over its positions of a unit.
template <class Traits>
struct ThreadSums {
  static constexpr int kVector = Traits::kVector;
  float at[Traits::kFields][kVector] = {};

  __device__ __forceinline__ void add(const float (&grad)[kVector], const float (&a)[kVector],
                                      const float (&mean)[kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float deviation = a[j] - mean[j];
      at[kSumGrad][j] += grad[j];
      at[kSumGradDeviation][j] += grad[j] * deviation;
      if (!(a[j] <= 0.f)) {
        at[kCountOpen][j] += 1.f;
        at[kSumGradOpen][j] += grad[j];
        at[kSumDeviationOpen][j] += deviation;
      }
      if constexpr (Traits::kScaled) {
        at[kMaxGrad][j] = fmaxf(at[kMaxGrad][j], fabsf(grad[j]));
        at[kMaxDeviation][j] = fmaxf(at[kMaxDeviation][j], fabsf(deviation));
      }
    }
  }

  /// Merges the block's sums into its record of the unit, [block_channels,8].
  __device__ __forceinline__ void merge(const typename Traits::Args& args, const Place<Traits>& place,
                                        MergeMemory<Traits>& memory, int channels, float* part) const {
    constexpr int kPitch = MergeMemory<Traits>::kPitch;
    const int half = args.slots / 2, lower = place.slot % half;
    float* const own = memory.sums + lower * args.vectors + place.vector;
    if (place.used && place.slot >= half) {
#pragma unroll
      for (int i = 0; i < Traits::kFields * kVector; ++i) own[i * kPitch] = at[i / kVector][i % kVector];
    }
    StageRing<Traits>::stream_barrier();
    if (place.slot < half) {
#pragma unroll
      for (int i = 0; i < Traits::kFields * kVector; ++i) {
        const float mine = at[i / kVector][i % kVector], other = own[i * kPitch];
        own[i * kPitch] = i / kVector < kSumFields ? mine + other : fmaxf(mine, other);
      }
    }
    StageRing<Traits>::stream_barrier();
    for (int i = threadIdx.x; i < channels * kPartFields; i += kStreamThreads) {
      const int channel = i / kPartFields, field = i % kPartFields;
      if (field >= Traits::kFields) continue;
      const float* const from = memory.sums + (field * kVector + channel % kVector) * kPitch + channel / kVector;
      float sum = from[0];
      if (field < kSumFields) {
        double total = sum;
        for (int slot = 1; slot < half; ++slot) total += from[slot * args.vectors];
        sum = static_cast<float>(total);
      } else {
        for (int slot = 1; slot < half; ++slot) sum = fmaxf(sum, from[slot * args.vectors]);
      }
      part[i] = sum;
    }
    StageRing<Traits>::stream_barrier();
  }
};

/// What makes grad_c of a channel's grad_y and a: from_grad*grad_y + (from_deviation*(a - mean) + constant).
struct ChannelGrad {
  float mean, from_grad, from_deviation, constant;
};

/// grad_c of a thread's channels.
template <class Traits>
struct GradMap {
  static constexpr int kVector = Traits::kVector;
  ChannelGrad at[kVector];
  float prescale;  // of grad_y

  /// The block's threads find a channel each, and then read their own.
  ///
  /// \param exponent of the power of two that grad_c is multiplied by
  /// \param memory   [block_channels]
  __device__ __forceinline__ void load(const typename Traits::Args& args, const Place<Traits>& place,
                                       const Unit& unit, int exponent, ChannelGrad* memory) {
    // Where from_grad would leave float's range, grad_y takes a part of the power: it is as far on the other side.
    const int grad_exponent = exponent > 96 ? 48 : exponent < -96 ? -48 : 0;
    prescale = __int_as_float((127 + grad_exponent) << 23);
    StageRing<Traits>::stream_barrier();  // the last map may still be read
    for (int i = threadIdx.x; i < args.block_channels; i += kStreamThreads) {
      const int channel = unit.channel + i;
      memory[i] = channel < args.k ? find(args, unit.sample, channel, exponent, grad_exponent) : ChannelGrad{};
    }
    StageRing<Traits>::stream_barrier();
    if (!place.used) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const auto four = *reinterpret_cast<const float4*>(memory + place.vector * kVector + j);
      at[j] = {four.x, four.y, four.z, four.w};
    }
  }

  __device__ __forceinline__ void store(const typename Traits::Args& args, const float (&grad)[kVector],
                                        const float (&a)[kVector], int channel, typename Traits::Out* to) const {
    using Out = typename Traits::Out;
    Vector<Out, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float own = Traits::kScaled ? grad[j] * prescale : grad[j];
      const float value = at[j].from_grad * own + (at[j].from_deviation * (a[j] - at[j].mean) + at[j].constant);
      // What float16 rounds to zero may be zero: its smallest value would be many times a small gradient.
      out.at[j] = from_stat<Out>(a[j] <= 0.f ? 0.f : value);
    }
    if (channel + kVector > args.k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (channel + j >= args.k) out.at[j] = from_stat<Out>(0.f);
      }
    }
    store_once<kVector>(to, out);
  }

 private:
  static __device__ __forceinline__ ChannelGrad find(const typename Traits::Args& args, int sample, int channel,
                                                     int exponent, int grad_exponent) {
    const int row = sample * args.num_groups + channel / (args.k / args.num_groups);
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

/// The streaming warps of a block.
template <class Traits>
class StreamWarps {
 public:
  using Args = typename Traits::Args;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kRows = Traits::kRows;

  __device__ __forceinline__ StreamWarps(const Args& args, char* memory, MergeMemory<Traits>& merge,
                                         const int* ready_steps)
      : args_(args), place_(args), ring_(args, place_, memory), merge_(merge), ready_steps_(ready_steps) {}

  __device__ __forceinline__ void run() {
    const int phases = args_.num_steps * (args_.grad_c != nullptr ? 2 : 1);
    const int lag = args_.grad_c != nullptr ? args_.lag : args_.num_steps;
#pragma unroll 1
    for (int i = 0; i < phases; ++i) {
      const Phase phase = phase_at<Traits::kScaled>(i, args_.num_steps, lag);
      const StepShape shape = step_shape(args_, phase.step);
      if (phase.apply) {
        wait_ready(ready_steps_, Traits::kScaled ? args_.num_steps : phase.step + 1);
      }
#pragma unroll 1
      for (int index = blockIdx.x; index < shape.units; index += gridDim.x) {
        const Unit unit = unit_at(args_, phase.step, shape, index);
        if (phase.apply) {
          apply(unit);
        } else {
          sum(unit, phase.step, index);
        }
      }
      if (!phase.apply && threadIdx.x == 0) {
        // The merge ended with a barrier: this thread's release covers what the others wrote.
        release_one(args_.arrivals + phase.step);
      }
    }
  }

 private:
  __device__ __forceinline__ void sum(const Unit& unit, int step, int index) {
    const int channel = unit.channel + place_.vector * kVector;
    float mean[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int group = min(channel + j, args_.k - 1) / (args_.k / args_.num_groups);
      mean[j] = __ldg(&args_.table[unit.sample * args_.num_groups + group].x);
    }
    ThreadSums<Traits> sums;
#pragma unroll 1
    for (int first = unit.begin; first < unit.end; first += Place<Traits>::stage_positions(args_)) {
      ring_.next();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + place_.position(args_, i) >= unit.end) continue;
        float grad[kVector], a[kVector];
        ring_.read_grad(i, grad);
        ring_.read_a(i, a);
        sums.add(grad, a, mean);
      }
    }
    // Before its half of `part` is written again, the step before last must have been merged.
    if (step >= 2) wait_ready(ready_steps_, step - 1);
    const std::int64_t record = std::int64_t{step % 2} * args_.part_units + index;
    sums.merge(args_, place_, merge_, min(args_.block_channels, args_.k - unit.channel),
               args_.part + record * args_.block_channels * kPartFields);
  }

  __device__ __forceinline__ void apply(const Unit& unit) {
    const int channel = unit.channel + place_.vector * kVector;
    GradMap<Traits> map;
    map.load(args_, place_, unit, Traits::kScaled ? MergeWarp<Traits>::scale_exponent(args_) : 0,
             reinterpret_cast<ChannelGrad*>(merge_.sums));
    typename Traits::Out* const to =
        args_.grad_c + std::int64_t{unit.sample} * args_.positions * args_.grad_c_pitch + channel;
    const bool stored = place_.used && channel < args_.grad_c_pitch;
#pragma unroll 1
    for (int first = unit.begin; first < unit.end; first += Place<Traits>::stage_positions(args_)) {
      ring_.next();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int position = first + place_.position(args_, i);
        if (!stored || position >= unit.end) continue;
        float grad[kVector], a[kVector];
        ring_.read_grad(i, grad);
        ring_.read_a(i, a);
        map.store(args_, grad, a, channel, to + std::int64_t{position} * args_.grad_c_pitch);
      }
    }
  }

  const Args& args_;
  const Place<Traits> place_;
  StageRing<Traits> ring_;
  MergeMemory<Traits>& merge_;
  const int* ready_steps_;
};

template <class Traits>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocksPerMultiprocessor)
    group_norm_backward(const __grid_constant__ typename Traits::Args args) {
  extern __shared__ __align__(16) char memory[];  // ring, MergeMemory, ready_steps
  auto& merge = *reinterpret_cast<MergeMemory<Traits>*>(memory + Traits::kStages * Traits::kStageBytes);
  int* const ready_steps = reinterpret_cast<int*>(memory + kBackwardSharedBytes<Traits> - 16);
  if (threadIdx.x == 0) *ready_steps = 0;
  __syncthreads();
  if (threadIdx.x < kStreamThreads) {
    StreamWarps<Traits>(args, memory, merge, ready_steps).run();
  } else {
    MergeWarp<Traits>(args, ready_steps).run();
  }
}

}  // namespace upconv3d::cuda
