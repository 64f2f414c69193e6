// SPDX-License-Identifier: Apache-2.0
/// \file
/// norm_backward between its two passes over memory: sums of tiles to what the second one multiplies by, and
/// to the parameters' gradients.
///
///   part    [N,K,tiles,8]  fp32
///   groups  [N,G,4]        fp32  mean, what it lost by rounding, rstd
///   map     [N,K,4]        fp32  written
///   shares  [N,K,4]        fp64  written, then summed over samples
///
/// All of this is in double, in an order that the launch alone decides.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/group_norm/norm_backward.cuh"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {
namespace {

/// Sum over the block, the same bits in every thread. `warps` [kStreamThreads/32], shared, used once.
__device__ __forceinline__ double block_sum(double value, double* warps) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kStreamThreads / 32; ++warp) value += warps[warp];
  return value;
}

template <class T>
__device__ __forceinline__ double gamma_of(const NormBackwardArgs<T>& args, std::int64_t channel) {
  return args.gamma != nullptr ? double(to_stat(args.gamma[channel])) : 1.0;
}

/// Sums of a channel's tiles, by `width` neighbouring lanes; right in each of them.
template <class T>
__device__ __forceinline__ NormChannelSums sum_tiles(const NormBackwardArgs<T>& args, std::int64_t row,
                                                     bool exists, int lane, int width) {
  NormChannelSums sums{};
  const auto* const from = reinterpret_cast<const float4*>(args.part) + row * args.shape.tiles * 2;
#pragma unroll 2
  for (std::int64_t tile = lane; exists && tile < args.shape.tiles; tile += width) {
    const float4 low = from[2 * tile], high = from[2 * tile + 1];
    const float both[kNormSums] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kNormSums; ++i) sums.at[i] += both[i];
  }
#pragma unroll
  for (int i = 0; i < kNormSums; ++i) {
    for (int other = width / 2; other > 0; other /= 2) {
      sums.at[i] += __shfl_xor_sync(0xffffffffu, sums.at[i], other);
    }
  }
  return sums;
}

/// One block per (sample, group). `width` lanes share a channel: a power of two, at most 32.
template <class T>
__global__ void __launch_bounds__(kStreamThreads)
    norm_backward_merge(const NormBackwardArgs<T> args, int width) {
  __shared__ double warps[2][kStreamThreads / 32];
  const std::int64_t sample = blockIdx.x / args.shape.num_groups;
  const std::int64_t channels = args.shape.k / args.shape.num_groups;
  const std::int64_t channel0 = (blockIdx.x - sample * args.shape.num_groups) * channels;
  const float4 group = args.groups[blockIdx.x];
  const double rest = group.y, rstd = group.z;
  const int slot = threadIdx.x / width, lane = threadIdx.x - slot * width, slots = kStreamThreads / width;

  double c1 = 0, c2 = 0;
  for (std::int64_t first = 0; first < channels; first += slots) {
    const bool exists = first + slot < channels;
    const std::int64_t channel = channel0 + (exists ? first + slot : 0);
    const std::int64_t row = sample * args.shape.k + channel;
    NormChannelSums sums = sum_tiles(args, row, exists, lane, width);
    if (!exists || lane != 0) continue;
    if (!args.activation_first) {
      sums.at[kNormSumOpen] = static_cast<double>(args.shape.positions);
      sums.at[kNormSumGradOpen] = sums.at[kNormSumGrad];
    }
    args.sums[row] = sums;
    const double gamma = gamma_of(args, channel);
    c1 += gamma * sums.at[kNormSumGrad];
    c2 += gamma * rstd * (sums.at[kNormSumGradDeviation] - rest * sums.at[kNormSumGrad]);
  }
  const double count = static_cast<double>(args.shape.positions) * static_cast<double>(channels);
  c1 = block_sum(c1, warps[0]) / count;  // its barrier also makes the block's sums visible to all its threads
  c2 = block_sum(c2, warps[1]) / count;

  const double from_deviation = -rstd * rstd * c2, constant = -rstd * c1 - from_deviation * rest;
  for (std::int64_t i = threadIdx.x; i < channels; i += kStreamThreads) {
    const std::int64_t row = sample * args.shape.k + channel0 + i;
    const double gamma = gamma_of(args, channel0 + i);
    args.map[row] = {group.x, float(rstd * gamma), float(from_deviation), float(constant)};
    const NormChannelSums s = args.sums[row];
    const auto xhat = [&](NormSum deviation, NormSum of) {
      return rstd * (s.at[deviation] - rest * s.at[of]);
    };
    NormShares shares;
    shares.gamma = xhat(kNormSumGradDeviation, kNormSumGrad);
    shares.beta = s.at[kNormSumGrad];
    shares.bias = rstd * (gamma * s.at[kNormSumGradOpen] - c1 * s.at[kNormSumOpen] -
                          c2 * xhat(kNormSumDeviationOpen, kNormSumOpen));
    shares.slope = args.activation_first ? rstd * (gamma * s.at[kNormSumSlope] - c1 * s.at[kNormSumClosed] -
                                                   c2 * xhat(kNormSumDeviationClosed, kNormSumClosed))
                                         : s.at[kNormSumSlope];
    args.shares[row] = shares;
  }
}

/// A thread per channel; the last block sums the gradient of a slope that all channels have.
template <class T>
__global__ void __launch_bounds__(kStreamThreads) norm_backward_parameters(const NormBackwardArgs<T> args) {
  __shared__ double warps[kStreamThreads / 32];
  const std::int64_t k = args.shape.k, n = args.shape.n;
  const bool one_slope = args.grad_slopes != nullptr && args.activation.slope_step == 0;
  if (one_slope && blockIdx.x == gridDim.x - 1) {
    double slope = 0;
    for (std::int64_t row = threadIdx.x; row < n * k; row += kStreamThreads) slope += args.shares[row].slope;
    slope = block_sum(slope, warps);
    if (threadIdx.x == 0) *args.grad_slopes = from_stat<T>(float(slope));
    return;
  }
  const std::int64_t channel = std::int64_t{blockIdx.x} * kStreamThreads + threadIdx.x;
  if (channel >= k) return;
  NormShares total{};
#pragma unroll 4
  for (std::int64_t sample = 0; sample < n; ++sample) {
    const NormShares shares = args.shares[sample * k + channel];
    total.gamma += shares.gamma;
    total.beta += shares.beta;
    total.bias += shares.bias;
    total.slope += shares.slope;
  }
  if (args.grad_gamma != nullptr) args.grad_gamma[channel] = from_stat<T>(float(total.gamma));
  if (args.grad_beta != nullptr) args.grad_beta[channel] = from_stat<T>(float(total.beta));
  if (args.grad_bias != nullptr) args.grad_bias[channel] = from_stat<T>(float(total.bias));
  if (args.grad_slopes != nullptr && !one_slope) {
    args.grad_slopes[channel] = from_stat<T>(float(total.slope));
  }
}

void require(bool holds, const std::string& rule_and_value) {
  if (!holds) throw std::invalid_argument("upconv3d: norm_backward " + rule_and_value);
}

}  // namespace

void launch_norm_backward_merge(const NormBackwardParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  const bool wants_parameters = params.grad_gamma != nullptr || params.grad_beta != nullptr ||
                                params.grad_bias != nullptr || params.grad_slopes != nullptr;
  const int width = static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(shape.tiles, 1, 32))));
  with_norm_element(params.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const NormBackwardArgs<T> args = norm_backward_args<T>(params);
    norm_backward_merge<T>
        <<<static_cast<unsigned>(shape.n * shape.num_groups), kStreamThreads, 0, stream>>>(args, width);
    check_launch("norm_backward_merge");
    if (!wants_parameters) return;
    const bool one_slope = params.grad_slopes != nullptr && args.activation.slope_step == 0;
    launch("norm_backward_parameters", norm_backward_parameters<T>,
           ceil_div(shape.k, kStreamThreads) + (one_slope ? 1 : 0), dim3(kStreamThreads), stream, args);
  });
}

std::int64_t norm_backward_scratch_bytes(const GroupNormShape& shape) {
  return NormBackwardScratch(shape, nullptr).bytes;
}

void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream) {
  require(params.dtype != DType::kFloat64,
          "takes float32, bfloat16 and float16; got float64. Use PyTorch's.");
  require(params.before.kind == Activation::kNone || params.after.kind == Activation::kNone,
          std::string("takes one activation, before the normalization or after it; got before=") +
              name(params.before.kind) + ", after=" + name(params.after.kind) + ". Use PyTorch's.");
  require_slopes(params.before);
  require_slopes(params.after);
  const bool rows = params.layout == Layout::kNDHWC;
  (rows ? launch_norm_backward_sums_rows : launch_norm_backward_sums_planes)(params, stream);
  launch_norm_backward_merge(params, stream);
  if (params.grad_c == nullptr) return;
  (rows ? launch_norm_backward_grad_c_rows : launch_norm_backward_grad_c_planes)(params, stream);
}

}  // namespace upconv3d::cuda
