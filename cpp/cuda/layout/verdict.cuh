// SPDX-License-Identifier: Apache-2.0
/// \file
/// Whether float32 x lies where assumed scales hold (pack.hpp), out of the largest |x| of each (sample,
/// channel), and the scales that do hold.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/operand_scale.cuh"
#include "cuda/layout/pack.hpp"

namespace upconv3d::cuda {

constexpr std::uint32_t bits_of_power(int exponent) {
  return static_cast<std::uint32_t>(exponent + 127) << 23;
}

/// What the verdict reads and writes; see OperandScales.
struct VerdictArgs {
  std::uint32_t* x_absmax;       // [N,C] uint32
  std::uint32_t* channel_reach;  // [C] uint32
  std::uint32_t* sample_done;    // [N] uint32
  std::uint32_t* samples_done;   // [1] uint32
  std::uint32_t* rejected;       // [1] uint32
  std::int32_t* sample;          // [N] int32
  std::int32_t* channel;         // [C] int32
  std::int32_t* unscale_sample;  // [N] int32
  std::int64_t samples;          // N
  std::int64_t channels;         // C
  bool shared_samples;           // sample[n] = 0
};

inline VerdictArgs verdict_args(const PackParams& params) {
  return {
      .x_absmax = params.scales.x_absmax,
      .channel_reach = params.scales.channel_reach,
      .sample_done = params.scales.sample_done,
      .samples_done = params.scales.verdict,
      .rejected = params.scales.verdict + 1,
      .sample = params.scales.sample,
      .channel = params.scales.channel,
      .unscale_sample = params.scales.unscale_sample,
      .samples = params.problem.n,
      .channels = params.problem.c,
      .shared_samples = params.shared_samples,
  };
}

/// Whether a largest |x| that is not zero lies outside of what the assumed scales fit.
template <int kProducts>
__device__ inline bool breaks_assumption(std::uint32_t largest) {
  constexpr std::uint32_t kSmallest = bits_of_power(smallest_reach(kProducts) - assumed_exponent(kProducts));
  constexpr std::uint32_t kTooLarge = bits_of_power(kInputExponent - assumed_exponent(kProducts));
  return largest != 0 && (largest < kSmallest || largest >= kTooLarge);
}

/// Whether sample n breaks the assumption; its own exponent and its part in the channels', should any sample
/// do so. Reads past L1, which does not see other blocks' atomics.
template <int kProducts>
__device__ inline void judge_sample(const VerdictArgs& args, std::int64_t n) {
  __shared__ std::uint32_t sample_largest;
  const std::uint32_t* const row = args.x_absmax + n * args.channels;
  if (threadIdx.x == 0) sample_largest = 0;
  __syncthreads();

  std::uint32_t largest = 0;
  bool outside = false;
#pragma unroll 4
  for (std::int64_t c = threadIdx.x; c < args.channels; c += kInputThreads) {
    const std::uint32_t own = __ldcg(row + c);
    largest = max(largest, own);
    outside = outside || breaks_assumption<kProducts>(own);
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&sample_largest, largest);
  outside = __syncthreads_or(outside) != 0;

  const bool has_own = sample_largest != 0 && !args.shared_samples;
  const int exponent = has_own ? kOperandExponent - reach(sample_largest) : 0;
#pragma unroll 4
  for (std::int64_t c = threadIdx.x; c < args.channels; c += kInputThreads) {
    const std::uint32_t own = __ldcg(row + c);
    if (own != 0) atomicMax(args.channel_reach + c, biased_reach(own, exponent));
  }
  if (threadIdx.x == 0) {
    args.sample[n] = exponent;
    if (outside) atomicMax(args.rejected, 1u);
  }
}

/// The scales that hold for x: assumed ones, or where any sample broke the assumption chosen ones.
template <int kProducts>
__device__ inline void write_scales(const VerdictArgs& args) {
  const bool rejected = __ldcg(args.rejected) != 0;
  for (std::int64_t c = threadIdx.x; c < args.channels; c += kInputThreads) {
    const int chosen_reach = static_cast<int>(__ldcg(args.channel_reach + c)) - kReachBias;
    args.channel[c] =
        rejected ? kOperandExponent - max(kSmallestScaledReach, chosen_reach) : assumed_exponent(kProducts);
  }
  for (std::int64_t n = threadIdx.x; n < args.samples; n += kInputThreads) {
    const int exponent = rejected ? __ldcg(args.sample + n) : 0;
    args.sample[n] = exponent;
    args.unscale_sample[n] = -exponent;
  }
}

}  // namespace upconv3d::cuda
