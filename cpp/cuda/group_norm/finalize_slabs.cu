// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_finalize_slabs: forward stage 3 of 4, where the SM90 plan's convolution takes several launches.
///
///   part          [N,moments,K/granule,2]  float  (mean, M2) per sample, partial moment and granule
///   channel_table [3,N,K]                  float  mean, scale, shift: y = (v - mean)*scale + shift
///   table         [N,G,4]                  float  mean, rest of the mean, 1/sqrt(var + eps), unused
///
/// A block merges the moments*(K/G/granule) partials of a group of a sample as the convolution's kernel does
/// where one launch has them all: sums of count, count*mean and M2 + count*mean^2, means shifted by the first
/// one, in double, which has 29 bits more than what it sums. Each order is fixed.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/index_math.hpp"
#include "core/slab_launches.hpp"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/finalize_slabs.hpp"

namespace upconv3d::cuda {
namespace {

/// Threads of a block.
constexpr int kThreadsLarge = 512;

/// The same where a group has few partials, as with one group per channel: small blocks share a
/// multiprocessor.
constexpr int kThreadsSmall = 128;

/// Partials that a thread loads before it uses the first.
constexpr int kLoads = 8;

template <class T>
struct FinalizeSlabsArgs {
  std::int64_t n, k, num_groups;
  std::int64_t channels;         // of a group, K/G
  std::int64_t group_granules;   // channels/granule
  std::int64_t moments;          // of a sample
  int granule;                   // channels that share a moment
  int moment_positions;          // but of a slab's last moment
  int slabs;                     // there are
  int first_moment[kMaxPhases];  // of each slab
  int last_count[kMaxPhases];    // positions behind its last moment
  const float2* part;            // [N,moments,K/granule]
  const T* gamma;                // [K], or null
  const T* beta;                 // [K], or null
  double eps;                    // activation units squared
  float* channel_table;          // [3,N,K]
  float4* table;                 // [N,G], or null
};

/// What moments are made of; means are relative to a pivot.
struct MomentSums {
  double count = 0, sum = 0, sum_squares = 0;
};

/// The slabs, where lanes that each look at another one get their answers at once.
struct SharedSlabs {
  int first_moment[kMaxPhases + 1];  // the last one: of all slabs
  int last_count[kMaxPhases];
};

/// This thread's share of a group's partials, numbered moment*granules + granule.
///
/// \param part [moments,K/granule] from the group's first granule on
template <int kThreads, class T>
__device__ MomentSums sum_partials(const FinalizeSlabsArgs<T>& args, const SharedSlabs& slabs,
                                   const float2* part, double pivot) {
  const std::int64_t row = args.k / args.granule, total = args.moments * args.group_granules;
  MomentSums sums;
  int slab = 0;
  for (std::int64_t first = threadIdx.x; first < total; first += kThreads * kLoads) {
    float2 pair[kLoads];
    int count[kLoads];  // values
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t index = min(first + kThreads * i, total - 1);
      const std::int64_t moment = index / args.group_granules;
      pair[i] = part[moment * row + index - moment * args.group_granules];
      while (moment >= slabs.first_moment[slab + 1]) ++slab;
      const bool last = moment + 1 == slabs.first_moment[slab + 1];
      const int positions = last ? slabs.last_count[slab] : args.moment_positions;
      count[i] = first + kThreads * i < total ? args.granule * positions : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (count[i] == 0) continue;
      const double delta = pair[i].x - pivot;
      sums.count += count[i];
      sums.sum += count[i] * delta;
      sums.sum_squares += pair[i].y + count[i] * delta * delta;
    }
  }
  return sums;
}

/// Sum over the block; thread 0 gets it. \param warp_sums [kThreads/32], shared, used once
template <int kThreads>
__device__ double block_sum(double value, double* warp_sums) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < kThreads / 32 ? warp_sums[threadIdx.x] : 0.0;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

/// Blocks: group fastest, then sample.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads) group_norm_finalize_slabs(const FinalizeSlabsArgs<T> args) {
  __shared__ SharedSlabs slabs;
  __shared__ double warp_sums[3][kThreads / 32];
  __shared__ float4 shared_row;
  if (threadIdx.x < args.slabs) {
    slabs.first_moment[threadIdx.x] = args.first_moment[threadIdx.x];
    slabs.last_count[threadIdx.x] = args.last_count[threadIdx.x];
  }
  if (threadIdx.x == args.slabs) slabs.first_moment[threadIdx.x] = static_cast<int>(args.moments);
  __syncthreads();
  const std::int64_t sample = blockIdx.x / args.num_groups, group = blockIdx.x - sample * args.num_groups;
  const float2* const part =
      args.part + sample * args.moments * (args.k / args.granule) + group * args.group_granules;
  const double pivot = part[0].x;
  const MomentSums own = sum_partials<kThreads>(args, slabs, part, pivot);
  const double count = block_sum<kThreads>(own.count, warp_sums[0]);
  const double sum = block_sum<kThreads>(own.sum, warp_sums[1]);
  const double sum_squares = block_sum<kThreads>(own.sum_squares, warp_sums[2]);
  if (threadIdx.x == 0) {
    const double mean_shift = sum / count, mean = pivot + mean_shift;
    const double m2 = sum_squares - sum * mean_shift;
    const double variance = m2 < 0 ? 0.0 : m2 / count;  // NaN stays NaN
    const float mean_float = static_cast<float>(mean);
    shared_row = make_float4(mean_float, static_cast<float>(mean - mean_float),
                             static_cast<float>(1.0 / sqrt(variance + args.eps)), 0.f);
    if (args.table != nullptr) args.table[blockIdx.x] = shared_row;
  }
  __syncthreads();
  const float4 row = shared_row;
  const std::int64_t plane = args.n * args.k;
  for (std::int64_t i = threadIdx.x; i < args.channels; i += kThreads) {
    const std::int64_t channel = group * args.channels + i;
    const float scale = (args.gamma != nullptr ? to_stat(args.gamma[channel]) : 1.f) * row.z;
    float* const to = args.channel_table + sample * args.k + channel;
    to[0] = row.x;
    to[plane] = scale;
    to[2 * plane] = (args.beta != nullptr ? to_stat(args.beta[channel]) : 0.f) - row.y * scale;
  }
}

template <class T>
FinalizeSlabsArgs<T> finalize_slabs_args(const FinalizeSlabsParams& params) {
  const Problem& problem = params.problem;
  FinalizeSlabsArgs<T> args{};
  args.n = problem.n;
  args.k = problem.k;
  args.num_groups = problem.num_groups;
  args.channels = problem.k / problem.num_groups;
  args.granule = 1 << params.granule_shift;
  args.group_granules = args.channels >> params.granule_shift;
  args.moment_positions = static_cast<int>(params.moment_positions);
  for (const Slab& slab : params.slabs) {
    args.first_moment[args.slabs] = static_cast<int>(args.moments);
    args.last_count[args.slabs] = static_cast<int>((slab.positions() - 1) % params.moment_positions + 1);
    args.moments += ceil_div(slab.positions(), params.moment_positions);
    ++args.slabs;
  }
  args.part = reinterpret_cast<const float2*>(params.part);
  args.gamma = static_cast<const T*>(params.gamma);
  args.beta = static_cast<const T*>(params.beta);
  args.eps = problem.eps;
  args.channel_table = params.channel_table;
  args.table = reinterpret_cast<float4*>(params.table);
  return args;
}

template <class T>
void launch_of(const FinalizeSlabsParams& params, cudaStream_t stream) {
  const FinalizeSlabsArgs<T> args = finalize_slabs_args<T>(params);
  const bool small = args.moments * args.group_granules <= kThreadsSmall * kLoads;
  launch("group_norm_finalize_slabs",
         small ? group_norm_finalize_slabs<T, kThreadsSmall> : group_norm_finalize_slabs<T, kThreadsLarge>,
         args.n * args.num_groups, dim3(small ? kThreadsSmall : kThreadsLarge), stream, args);
}

}  // namespace

void launch_group_norm_finalize_slabs(const FinalizeSlabsParams& params, cudaStream_t stream) {
  const bool fits = params.slabs.size() <= static_cast<std::size_t>(kMaxPhases);
  if (!fits || params.problem.dtype == DType::kFloat64) {
    throw std::logic_error("upconv3d: group_norm_finalize_slabs merges moments in float32 of at most " +
                           std::to_string(kMaxPhases) + " slabs; got " + std::to_string(params.slabs.size()) +
                           " for " + describe(params.problem) + ". select_plan must choose another plan.");
  }
  switch (params.problem.dtype) {
    case DType::kBFloat16:
      return launch_of<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return launch_of<__half>(params, stream);
    default:
      return launch_of<float>(params, stream);
  }
}

}  // namespace upconv3d::cuda
