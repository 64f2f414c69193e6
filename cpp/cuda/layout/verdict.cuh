// SPDX-License-Identifier: Apache-2.0
/// \file
/// The scales of float32 x (pack.hpp), out of the largest |x| of each (sample, channel): assumed ones, or
/// such as fit. By a whole grid, with barriers where the comments say so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/operand_scale.cuh"
#include "cuda/layout/pack.hpp"

namespace upconv3d::cuda {

/// What the verdict reads and writes; see OperandScales.
struct VerdictArgs {
  std::uint32_t* x_absmax;       // [N,C] uint32
  std::uint32_t* channel_reach;  // [C] uint32
  std::uint32_t* suspect;        // [1] uint32
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
      .suspect = params.scales.suspect,
      .sample = params.scales.sample,
      .channel = params.scales.channel,
      .unscale_sample = params.scales.unscale_sample,
      .samples = params.problem.n,
      .channels = params.problem.c,
      .shared_samples = params.shared_samples,
  };
}

/// Whether any sample and channel breaks the assumption. To follow a barrier of the grid behind the maxima;
/// all threads of a block call it, and all blocks get the same answer.
template <int kProducts>
__device__ inline bool is_rejected(const VerdictArgs& args) {
  if (__ldcg(args.suspect) == 0) return false;
  bool outside = false;
  for (std::int64_t i = threadIdx.x; i < args.samples * args.channels; i += kInputThreads) {
    outside = outside || breaks_assumption<kProducts>(__ldcg(args.x_absmax + i));
  }
  return __syncthreads_or(outside) != 0;
}

/// The exponent that fits sample n, and its part in those of the channels. A block per sample. Reads past L1,
/// which does not see other blocks' atomics.
__device__ inline void choose_sample(const VerdictArgs& args, std::int64_t n) {
  __shared__ std::uint32_t sample_largest;
  const std::uint32_t* const row = args.x_absmax + n * args.channels;
  if (threadIdx.x == 0) sample_largest = 0;
  __syncthreads();

  std::uint32_t largest = 0;
  for (std::int64_t c = threadIdx.x; c < args.channels; c += kInputThreads) {
    largest = max(largest, __ldcg(row + c));
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&sample_largest, largest);
  __syncthreads();

  const bool has_own = sample_largest != 0 && !args.shared_samples;
  const int exponent = has_own ? kOperandExponent - reach(sample_largest) : 0;
  for (std::int64_t c = threadIdx.x; c < args.channels; c += kInputThreads) {
    const std::uint32_t own = __ldcg(row + c);
    if (own != 0) atomicMax(args.channel_reach + c, biased_reach(own, exponent));
  }
  if (threadIdx.x == 0) {
    args.sample[n] = exponent;
    args.unscale_sample[n] = -exponent;
  }
  __syncthreads();  // the next sample uses the same shared memory
}

/// Chosen exponents of the channels. To follow a barrier of the grid behind choose_sample of all samples.
__device__ inline void choose_channels(const VerdictArgs& args, std::int64_t thread, std::int64_t threads) {
  for (std::int64_t c = thread; c < args.channels; c += threads) {
    const int chosen_reach = static_cast<int>(__ldcg(args.channel_reach + c)) - kReachBias;
    args.channel[c] = kOperandExponent - max(kSmallestScaledReach, chosen_reach);
  }
}

/// The assumed exponents, which x turned out to fit.
template <int kProducts>
__device__ inline void write_assumed_scales(const VerdictArgs& args, std::int64_t thread,
                                            std::int64_t threads) {
  for (std::int64_t c = thread; c < args.channels; c += threads)
    args.channel[c] = assumed_exponent(kProducts);
  for (std::int64_t n = thread; n < args.samples; n += threads) {
    args.sample[n] = 0;
    args.unscale_sample[n] = 0;
  }
}

}  // namespace upconv3d::cuda
