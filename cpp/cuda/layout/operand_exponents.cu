// SPDX-License-Identifier: Apache-2.0
/// \file
/// How large x and w are, and the powers of two that follow. float32 only; see pack.hpp for the formulas.
///
/// Every maximum is a maximum of unsigned integers, so neither the order of atomics nor the grid changes a
/// bit.

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/operand_scale.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/weight_rows.cuh"

namespace upconv3d::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <int kVector>
__device__ inline std::uint32_t largest_magnitude(const float (&v)[kVector]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = max(largest, finite_magnitude(v[i]));
  return largest;
}

/// kVector floats of an address aligned to them, or zeros.
///
/// \param source [kVector] float
template <int kVector>
__device__ inline void load_or_zero(const float* source, bool inside, float (&v)[kVector]) {
  if constexpr (kVector == 4) {
    const float4 q = inside ? *reinterpret_cast<const float4*>(source) : float4{};
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    v[0] = inside ? *source : 0.0f;
  }
}

/// Floats that a warp of absmax_input_ncdhw reads: 128 bytes a lane, all in flight at once, for one atomic.
constexpr int kWarpFloats = 1024;

/// absmax_input_ncdhw: a warp reads up to 1024 positions of one (sample, channel).
///
/// \param x         [N*C,D*H*W] float
/// \param x_absmax  [N*C] uint32, zero before
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    absmax_input_ncdhw(const float* x, std::int64_t rows, std::int64_t positions, std::uint32_t* x_absmax) {
  constexpr int kLoads = kWarpFloats / 32 / kVector;
  const int lane = threadIdx.x % 32;
  const std::int64_t warps_per_row = (positions + kWarpFloats - 1) / kWarpFloats;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t row = warp / warps_per_row;
  if (row >= rows) return;
  const std::int64_t first = warp % warps_per_row * kWarpFloats;

  float values[kLoads][kVector];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const std::int64_t p = first + (i * 32 + lane) * kVector;
    load_or_zero<kVector>(x + row * positions + p, p < positions, values[i]);
  }
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) largest = max(largest, largest_magnitude<kVector>(values[i]));
  largest = __reduce_max_sync(kAllLanes, largest);
  if (lane == 0) atomicMax(x_absmax + row, largest);
}

constexpr int kPositionsPerThread = 8;  // 128 bytes in flight per thread, as above

/// absmax_input_ndhwc: a block reads a stretch of positions for `lanes` vectors of channels, lanes a power of
/// two.
///
/// \param x         [N,D*H*W,C] float
/// \param x_absmax  [N,C] uint32, zero before
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    absmax_input_ndhwc(const float* x, std::int64_t channels, std::int64_t positions,
                       std::int64_t blocks_per_sample, int lanes, std::uint32_t* x_absmax) {
  __shared__ std::uint32_t block_largest[32 * kVector];
  for (int i = threadIdx.x; i < 32 * kVector; i += kThreads) block_largest[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % lanes;
  const int rows = kThreads / lanes;  // positions read side by side
  const std::int64_t n = blockIdx.x / blocks_per_sample;
  const std::int64_t first =
      blockIdx.x % blocks_per_sample * (rows * kPositionsPerThread) + threadIdx.x / lanes;
  const std::int64_t channel = (static_cast<std::int64_t>(blockIdx.y) * lanes + lane) * kVector;

  float values[kPositionsPerThread][kVector];
#pragma unroll
  for (int i = 0; i < kPositionsPerThread; ++i) {
    const std::int64_t p = first + i * rows;
    load_or_zero<kVector>(x + (n * positions + p) * channels + channel, p < positions && channel < channels,
                          values[i]);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPositionsPerThread; ++i) largest = max(largest, finite_magnitude(values[i][j]));
    for (int distance = lanes; distance < 32; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    if (threadIdx.x % 32 < lanes) atomicMax(&block_largest[lane * kVector + j], largest);
  }
  __syncthreads();

  const std::int64_t block_channel = static_cast<std::int64_t>(blockIdx.y) * lanes * kVector;
  for (int i = threadIdx.x; i < lanes * kVector; i += kThreads) {
    if (block_channel + i < channels)
      atomicMax(x_absmax + n * channels + block_channel + i, block_largest[i]);
  }
}

constexpr int kExponentWarps = 32;  // samples looked at side by side

/// choose_input_exponents: a block chooses for 32 channels, one warp per sample in turn. Every block finds
/// the sample exponents for itself (N*C values out of L2), which spares a launch; block 0 writes them down.
///
/// \param x_absmax        [N,C] uint32
/// \param sample          [N] int32, written
/// \param unscale_sample  [N] int32, written
/// \param channel         [C] int32, written
__global__ void __launch_bounds__(kExponentWarps * 32)
    choose_input_exponents(const std::uint32_t* x_absmax, std::int64_t samples, std::int64_t channels,
                           std::int32_t* sample, std::int32_t* unscale_sample, std::int32_t* channel) {
  __shared__ int warp_reach[kExponentWarps][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;

  int channel_reach = kSmallestScaledReach;
  for (std::int64_t n = warp; n < samples; n += kExponentWarps) {
    const std::uint32_t* const row = x_absmax + n * channels;
    std::uint32_t largest = 0;
#pragma unroll 8
    for (std::int64_t i = lane; i < channels; i += 32) largest = max(largest, row[i]);
    largest = __reduce_max_sync(kAllLanes, largest);
    const int exponent = largest != 0 ? kOperandExponent - reach(largest) : 0;
    const std::uint32_t own = c < channels ? row[c] : 0;
    if (own != 0) channel_reach = max(channel_reach, reach(own) + exponent);
    if (blockIdx.x == 0 && lane == 0) {
      sample[n] = exponent;
      unscale_sample[n] = -exponent;
    }
  }
  warp_reach[warp][lane] = channel_reach;
  __syncthreads();

  if (warp != 0 || c >= channels) return;
  for (int i = 1; i < kExponentWarps; ++i) channel_reach = max(channel_reach, warp_reach[i][lane]);
  channel[c] = kOperandExponent - channel_reach;
}

constexpr int kChannelsPerThread =
    16;  // loads in flight per thread, and rows of a small weight still fill the card

/// weight_reach: the reach of w * 2^-channel[c] over an output channel, in integers, where it cannot
/// underflow.
///
/// \param w        [C,K,T,R,S] float, strides in order, channel_stride for C
/// \param channel  [C] int32
/// \param w_reach  [K] uint32, zero before
__global__ void __launch_bounds__(kThreads)
    weight_reach(const float* w, const WeightOrder order, std::int64_t channel_stride, std::int64_t channels,
                 const std::int32_t* channel, std::uint32_t* w_reach) {
  const std::int64_t rows = order.k * order.taps;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first_channel = static_cast<std::int64_t>(blockIdx.y) * kChannelsPerThread;
  const bool inside = row < rows;
  const std::int64_t k = inside ? order.k_of(row) : -1;
  const float* const source = inside ? w + order.offset(row) + first_channel * channel_stride : nullptr;

  std::uint32_t magnitude[kChannelsPerThread];
#pragma unroll
  for (int i = 0; i < kChannelsPerThread; ++i) {
    const bool valid = inside && first_channel + i < channels;
    magnitude[i] = valid ? finite_magnitude(source[i * channel_stride]) : 0;
  }
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChannelsPerThread; ++i) {
    if (magnitude[i] == 0) continue;
    largest = max(largest,
                  static_cast<std::uint32_t>(reach(magnitude[i]) - channel[first_channel + i] + kReachBias));
  }
  // Taps of one output channel are neighbours in a contiguous weight: one atomic for all of them.
  const unsigned same_k = __match_any_sync(kAllLanes, k);
  largest = __reduce_max_sync(same_k, largest);
  const bool is_leader = static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(same_k)) - 1;
  if (inside && is_leader && largest != 0) atomicMax(w_reach + k, largest);
}

template <int kVector>
void launch_absmax_ncdhw(const PackParams& params, cudaStream_t stream) {
  const std::int64_t positions = volume(params.problem.in);
  const std::int64_t rows = params.problem.n * params.problem.c;
  const std::int64_t warps = rows * ceil_div(positions, kWarpFloats);
  const dim3 grid = grid_of(ceil_div(warps, kWarps), 1, "absmax_input_ncdhw");
  absmax_input_ncdhw<kVector><<<grid, kThreads, 0, stream>>>(static_cast<const float*>(params.x), rows,
                                                             positions, params.scales.x_absmax);
  check_launch("absmax_input_ncdhw");
}

template <int kVector>
void launch_absmax_ndhwc(const PackParams& params, cudaStream_t stream) {
  const std::int64_t positions = volume(params.problem.in);
  const std::int64_t vectors = params.problem.c / kVector;
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  const std::int64_t blocks_per_sample = ceil_div(positions, kThreads / lanes * kPositionsPerThread);
  const dim3 grid =
      grid_of(params.problem.n * blocks_per_sample, ceil_div(vectors, lanes), "absmax_input_ndhwc");
  absmax_input_ndhwc<kVector><<<grid, kThreads, 0, stream>>>(static_cast<const float*>(params.x),
                                                             params.problem.c, positions, blocks_per_sample,
                                                             lanes, params.scales.x_absmax);
  check_launch("absmax_input_ndhwc");
}

}  // namespace

void launch_absmax_input(const PackParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const bool is_ncdhw = problem.x_layout == Layout::kNCDHW;
  const std::int64_t innermost = is_ncdhw ? volume(problem.in) : problem.c;
  const bool is_aligned =
      innermost % 4 == 0 && reinterpret_cast<std::uintptr_t>(params.x) % sizeof(float4) == 0;
  if (is_ncdhw) {
    is_aligned ? launch_absmax_ncdhw<4>(params, stream) : launch_absmax_ncdhw<1>(params, stream);
  } else {
    is_aligned ? launch_absmax_ndhwc<4>(params, stream) : launch_absmax_ndhwc<1>(params, stream);
  }
}

void launch_choose_input_exponents(const PackParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const OperandScales& scales = params.scales;
  const dim3 grid = grid_of(ceil_div(problem.c, 32), 1, "choose_input_exponents");
  choose_input_exponents<<<grid, kExponentWarps * 32, 0, stream>>>(
      scales.x_absmax, problem.n, problem.c, scales.sample, scales.unscale_sample, scales.channel);
  check_launch("choose_input_exponents");
}

void launch_weight_reach(const PackParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const WeightOrder order = weight_order(params);
  const dim3 grid = grid_of(ceil_div(order.k * order.taps, kThreads), ceil_div(problem.c, kChannelsPerThread),
                            "weight_reach");
  weight_reach<<<grid, kThreads, 0, stream>>>(static_cast<const float*>(params.w), order, params.w_strides[0],
                                              problem.c, params.scales.channel, params.scales.w_reach);
  check_launch("weight_reach");
}

}  // namespace upconv3d::cuda
