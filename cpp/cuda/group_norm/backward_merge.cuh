// SPDX-License-Identifier: Apache-2.0
/// \file
/// What group_norm_backward does between the phases of a step: the warps of all blocks merge sums.
///
/// Once all blocks have written their part of a step, each warp merges a share of its channels over the
/// units, and computes c1, c2 and the largest |grad_c| of those groups whose last channel it merged: which
/// warp that is depends on timing, what it computes does not. In the end they sum up the parameters'
/// gradients. All of this is in double.
#pragma once

#include <cstdint>

#include "cuda/group_norm/backward_work.cuh"
#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

/// Polling a counter in L2 more often than this would take bandwidth from those who are being waited for.
inline constexpr unsigned kPollNanoseconds = 50;

/// Reach of scaled grad_c: below float16's largest value by a factor 2.
inline constexpr int kGradReach = 15;

__device__ __forceinline__ int acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

/// One more at `counter`, after all that the thread has written or seen.
__device__ __forceinline__ void release_one(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

/// Waits for `counter` in L2 to reach `target`. For a whole warp.
__device__ __forceinline__ void wait_counter(const int* counter, int target) {
  while (acquire(counter) < target) __nanosleep(kPollNanoseconds);
  __syncwarp();
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lane));
  return value;
}

template <class Traits>
class MergeWarp {
 public:
  using T = typename Traits::T;
  using Args = typename Traits::Args;

  __device__ __forceinline__ explicit MergeWarp(const Args& args)
      : args_(args),
        lane_(threadIdx.x % 32),
        warp_(blockIdx.x * (kStreamThreads / 32) + threadIdx.x / 32),
        warps_(gridDim.x * (kStreamThreads / 32)) {}

  /// Merges this warp's share of a step's channels, once all blocks have arrived there.
  __device__ __forceinline__ void merge_step(int step) const {
    const StepShape shape = step_shape(args_, step);
    const int channels = shape.samples * args_.k;
    if (warp_ < channels) wait_counter(args_.arrivals + step, gridDim.x);
#pragma unroll 1
    for (int i = warp_; i < channels; i += warps_) {
      const int sample = i / args_.k;
      merge_channel(step, shape, sample, i - sample * args_.k);
    }
  }

  /// Waits until c1 and c2 of a step's groups are known, and all that went before.
  __device__ __forceinline__ void wait_ready(int step) const {
    wait_counter(args_.ready + step, step_shape(args_, step).samples * args_.num_groups);
  }

  /// Writes what is left to write, once all steps are ready. For all threads of a block.
  ///
  /// \param shared [kStreamThreads / 32]
  __device__ __forceinline__ void finish(double* shared) const {
    if (Traits::kScaled && warp_ == 0 && lane_ == 0 && args_.unscale != nullptr) {
      *args_.unscale = -scale_exponent(args_);
    }
#pragma unroll 1
    for (int channel = warp_; channel < args_.k; channel += warps_) sum_samples(channel);
    if constexpr (Traits::kAnyTail) {
      // The last block has the fewest channels to sum.
      const bool one_slope = args_.grad_slopes != nullptr && args_.after.slope_step == 0;
      if (one_slope && blockIdx.x == gridDim.x - 1) sum_channels(shared);
    }
  }

  /// E of grad_c * 2^E; once all steps are ready.
  static __device__ __forceinline__ int scale_exponent(const Args& args) {
    const int biased = __ldcg(args.largest);
    return biased == 0 ? 0 : kGradReach - (biased - kReachBias);
  }

 private:
  __device__ __forceinline__ double gamma(int channel) const {
    return args_.gamma != nullptr ? double(to_stat(args_.gamma[channel])) : 1.0;
  }

  /// \param sample of the step
  __device__ __forceinline__ void merge_channel(int step, const StepShape& shape, int sample,
                                                int channel) const {
    constexpr int kLoads = 5;  // records in flight per lane: half of what a block per share makes on an H200
    const int block = channel / args_.block_channels;
    const std::int64_t first_unit = (sample * args_.channel_blocks + block) * shape.shares;
    const float* const part =
        args_.part +
        (first_unit * args_.block_channels + channel - block * args_.block_channels) * kPartFields;
    const std::int64_t pitch = std::int64_t{args_.block_channels} * kPartFields;
    using High =
        std::conditional_t<Traits::kScaled, float4, std::conditional_t<Traits::kAnyTail, float2, float1>>;
    double sums[Traits::kSums] = {};
    float maxima[2] = {};
    for (int first = lane_; first < shape.shares; first += 32 * kLoads) {
      float4 low[kLoads];
      High high[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float* const from = part + min(first + 32 * i, shape.shares - 1) * pitch;
        low[i] = __ldcg(reinterpret_cast<const float4*>(from));
        if constexpr (sizeof(High) > sizeof(float)) {
          high[i] = __ldcg(reinterpret_cast<const High*>(from + 4));
        } else {
          high[i].x = __ldcg(from + 4);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + 32 * i >= shape.shares) continue;
        sums[kSumGrad] += low[i].x;
        sums[kSumGradDeviation] += low[i].y;
        sums[kCountOpen] += low[i].z;
        sums[kSumGradOpen] += low[i].w;
        sums[kSumDeviationOpen] += high[i].x;
        if constexpr (Traits::kAnyTail) sums[kSumSlope] += high[i].y;
        if constexpr (Traits::kScaled) {
          maxima[0] = fmaxf(maxima[0], Traits::kAnyTail ? high[i].z : high[i].y);
          maxima[1] = fmaxf(maxima[1], Traits::kAnyTail ? high[i].w : high[i].z);
        }
      }
    }
#pragma unroll
    for (double& sum : sums) sum = warp_sum(sum);
    if constexpr (Traits::kScaled) {
      for (float& maximum : maxima) maximum = warp_max(maximum);
    }
    sample += step * args_.step_samples;
    const int group = args_.group_channels.divide(channel);
    if (lane_ == 0) {
      const float4 table = __ldg(args_.table + sample * args_.num_groups + group);
      const double rest = table.y, rstd = table.z;
      args_.sums[std::int64_t{sample} * args_.k + channel] = {
          sums[kSumGrad],     rstd * (sums[kSumGradDeviation] - rest * sums[kSumGrad]),   sums[kCountOpen],
          sums[kSumGradOpen], rstd * (sums[kSumDeviationOpen] - rest * sums[kCountOpen]), maxima[0],
          maxima[1]};
      if constexpr (Traits::kAnyTail) {
        if (args_.slope_sums != nullptr) {
          args_.slope_sums[std::int64_t{sample} * args_.k + channel] = sums[kSumSlope];
        }
      }
    }
    take_ticket(step, sample, group);
  }

  /// For each merged channel of a group; the last one finishes the group.
  __device__ __forceinline__ void take_ticket(int step, int sample, int group) const {
    int* const tickets = args_.tickets + sample * args_.num_groups + group;
    int last = 0;
    if (lane_ == 0) {
      int before;
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(tickets) : "memory");
      last = before == args_.k / args_.num_groups - 1;
    }
    if (__shfl_sync(0xffffffffu, last, 0) != 0) finish_group(step, sample, group);
  }

  /// c1 and c2 of a group all of whose channels are merged, and how large its grad_c can be.
  __device__ __forceinline__ void finish_group(int step, int sample, int group) const {
    const int channels = args_.k / args_.num_groups;
    const ChannelSums* const sums = args_.sums + std::int64_t{sample} * args_.k;
    const int begin = group * channels, end = begin + channels;
    double c1 = 0, c2 = 0;
    for (int channel = begin + lane_; channel < end; channel += 32) {
      c1 += gamma(channel) * __ldcg(&sums[channel].grad);
      c2 += gamma(channel) * __ldcg(&sums[channel].grad_xhat);
    }
    const double count = double(args_.positions) * channels;
    c1 = warp_sum(c1) / count;
    c2 = warp_sum(c2) / count;
    const int row = sample * args_.num_groups + group;
    const float4 table = __ldg(args_.table + row);
    if constexpr (Traits::kScaled) {
      for (int channel = begin + lane_; channel < end; channel += 32) {
        const double xhat = (double(__ldcg(&sums[channel].max_deviation)) + fabs(double(table.y))) * table.z;
        const double direct = fabs(gamma(channel)) * __ldcg(&sums[channel].max_grad);
        // The factor covers the roundings of what the bound is made from, and of what it bounds.
        raise(table.z * (direct + fabs(c1) + xhat * fabs(c2)) * (1 + 0x1p-18));
      }
    }
    if (lane_ == 0) {
      const double rstd = table.z;
      GroupTerms terms{c1, c2, -rstd * rstd * c2, 0};
      terms.constant = -rstd * c1 - terms.from_deviation * table.y;
      args_.terms[row] = terms;
    }
    __syncwarp();  // orders what the other lanes did before lane 0's release, which thus covers it
    if (lane_ == 0) release_one(args_.ready + step);
  }

  /// Takes a bound into the largest one. A group with Inf or NaN in grad_y or in a has nothing finite to be
  /// scaled: its c1 or its rstd is not finite, nor then is the bound.
  __device__ __forceinline__ void raise(double bound) const {
    if (!(bound > 0) || isinf(bound)) return;
    int exponent;
    frexp(bound, &exponent);
    atomicMax(args_.largest, max(kSmallestReach, min(kLargestReach, exponent)) + kReachBias);
  }

  /// Gradients of a channel's parameters.
  __device__ __forceinline__ void sum_samples(int channel) const {
    const int group = args_.group_channels.divide(channel);
    double grad_gamma = 0, grad_beta = 0, grad_bias = 0, grad_slope = 0;
    const bool slopes = Traits::kAnyTail && args_.grad_slopes != nullptr && args_.after.slope_step != 0;
    for (int sample = lane_; sample < args_.n; sample += 32) {
      const ChannelSums* const sums = args_.sums + std::int64_t{sample} * args_.k + channel;
      grad_beta += __ldcg(&sums->grad);
      grad_gamma += __ldcg(&sums->grad_xhat);
      if (slopes) grad_slope += __ldcg(args_.slope_sums + std::int64_t{sample} * args_.k + channel);
      if (args_.grad_bias != nullptr) {
        const int row = sample * args_.num_groups + group;
        const GroupTerms* const terms = args_.terms + row;
        grad_bias += args_.table[row].z * (gamma(channel) * __ldcg(&sums->grad_open) -
                                           __ldcg(&terms->c1) * __ldcg(&sums->count_open) -
                                           __ldcg(&terms->c2) * __ldcg(&sums->xhat_open));
      }
    }
    grad_gamma = warp_sum(grad_gamma);
    grad_beta = warp_sum(grad_beta);
    grad_bias = warp_sum(grad_bias);
    if (slopes) grad_slope = warp_sum(grad_slope);
    if (lane_ != 0) return;
    if (args_.grad_gamma != nullptr) args_.grad_gamma[channel] = from_stat<T>(float(grad_gamma));
    if (args_.grad_beta != nullptr) args_.grad_beta[channel] = from_stat<T>(float(grad_beta));
    if (args_.grad_bias != nullptr) args_.grad_bias[channel] = from_stat<T>(float(grad_bias));
    if (slopes) args_.grad_slopes[channel] = from_stat<T>(float(grad_slope));
  }

  /// Gradient of a slope that all channels have. For all threads of one block.
  __device__ __forceinline__ void sum_channels(double* shared) const {
    const std::int64_t count = std::int64_t{args_.n} * args_.k;
    double grad_slope = 0;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < count; i += kStreamThreads) {
      grad_slope += __ldcg(args_.slope_sums + i);
    }
    grad_slope = warp_sum(grad_slope);
    __syncthreads();  // what else lies in this memory may still be read
    if (lane_ == 0) shared[threadIdx.x / 32] = grad_slope;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < kStreamThreads / 32; ++warp) grad_slope += shared[warp];
    *args_.grad_slopes = from_stat<T>(float(grad_slope));
  }

  const Args& args_;
  const int lane_;
  const int warp_, warps_;  // of all blocks
};

}  // namespace upconv3d::cuda
