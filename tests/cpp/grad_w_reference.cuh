// SPDX-License-Identifier: Apache-2.0
/// \file
/// What test_grad_w_sm90 compares with: the gradient of the weight in double, and random data on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/problem.hpp"
#include "cuda/check.hpp"

namespace upconv3d::tests {

template <class T>
__device__ double as_double(T v) {
  if constexpr (std::is_same_v<T, double>) {
    return v;
  } else {
    return static_cast<double>(static_cast<float>(v));
  }
}

/// grad_w [channels,K,T,R,S] of input channels from `first_c` on, a block for each: x [N,D,H,W,C], grad_c
/// [N,Z,P,Q,K]. \param block 1-dimensional, a power of two of at most 256 threads
template <class X, class G>
__global__ void reference_grad_w_kernel(const X* x, const G* grad_c, double* grad_w, Problem p, Extent3 out,
                                        std::int64_t first_c) {
  __shared__ double sums[256];
  std::int64_t rest = blockIdx.x;
  const std::int64_t s = rest % p.kernel[2];
  rest /= p.kernel[2];
  const std::int64_t r = rest % p.kernel[1];
  rest /= p.kernel[1];
  const std::int64_t t = rest % p.kernel[0];
  rest /= p.kernel[0];
  const std::int64_t k = rest % p.k, c = first_c + rest / p.k;
  const std::int64_t positions = p.in[0] * p.in[1] * p.in[2];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < p.n * positions; i += blockDim.x) {
    const std::int64_t w = i % p.in[2], h = i / p.in[2] % p.in[1], d = i / p.in[2] / p.in[1] % p.in[0];
    const std::int64_t n = i / positions;
    const std::int64_t q = w * p.stride[2] - p.padding[2] + s * p.dilation[2];
    const std::int64_t row = h * p.stride[1] - p.padding[1] + r * p.dilation[1];
    const std::int64_t z = d * p.stride[0] - p.padding[0] + t * p.dilation[0];
    if (q < 0 || q >= out[2] || row < 0 || row >= out[1] || z < 0 || z >= out[0]) continue;
    sum += as_double(x[i * p.c + c]) *
           as_double(grad_c[(((n * out[0] + z) * out[1] + row) * out[2] + q) * p.k + k]);
  }
  sums[threadIdx.x] = sum;
  for (unsigned width = blockDim.x / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
  }
  if (threadIdx.x == 0) grad_w[blockIdx.x] = sums[0];
}

template <class X, class G>
std::vector<double> launch_reference(const Problem& p, const X* x, const G* grad_c, std::int64_t first_c,
                                     std::int64_t channels, unsigned threads) {
  const std::int64_t count = channels * p.k * volume(p.kernel);
  DeviceBuffer<double> grad_w(count);
  reference_grad_w_kernel<<<unsigned(count), threads>>>(x, grad_c, grad_w.get(), p, p.out(), first_c);
  cuda::check_launch("reference_grad_w_kernel");
  return grad_w.download();
}

/// grad_w [C,K,T,R,S] of x [N,D,H,W,C] and grad_c [N,Z,P,Q,K] on the host.
inline std::vector<double> reference_grad_w(const Problem& p, const std::vector<double>& x,
                                            const std::vector<double>& grad_c) {
  DeviceBuffer<double> on_device(x.size()), grad_on_device(grad_c.size());
  on_device.upload(x), grad_on_device.upload(grad_c);
  return launch_reference(p, on_device.get(), grad_on_device.get(), 0, p.c, 32);
}

/// grad_w [K,T,R,S] of one input channel; x and grad_c on the device, K a multiple of 8.
template <class X, class G>
std::vector<double> reference_channel(const Problem& p, const X* x, const G* grad_c, std::int64_t c) {
  return launch_reference(p, x, grad_c, c, 1, 256);
}

/// What random data is like: normal, normal as float16 holds it, the same made positive.
enum class Noise { kNormal, kHalf, kPositiveHalf };
inline const char* name(Noise noise) {
  return noise == Noise::kNormal ? "normal" : noise == Noise::kHalf ? "normal float16" : "positive float16";
}

/// Normal by the sum of 12 uniform numbers, from a hash of the index.
template <class T>
__global__ void fill_kernel(T* data, std::int64_t count, std::uint32_t seed, Noise noise) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  std::uint32_t state = std::uint32_t(i) * 2654435761u ^ std::uint32_t(i >> 32) ^ seed * 0x9e3779b9u;
  float v = -6;
  for (int j = 0; j < 12; ++j) {
    state ^= state >> 16, state *= 0x7feb352du, state ^= state >> 15, state *= 0x846ca68bu,
        state ^= state >> 16;
    v += float(state >> 8) * 0x1p-24f;
    state += 0x6d2b79f5u;
  }
  if (noise != Noise::kNormal) v = __half2float(__float2half_rn(v));
  if (noise == Noise::kPositiveHalf) v = fabsf(v);
  if constexpr (std::is_same_v<T, float>) {
    data[i] = v;
  } else if constexpr (std::is_same_v<T, __half>) {
    data[i] = __float2half_rn(v);
  } else {
    data[i] = __float2bfloat16_rn(v);
  }
}

template <class T>
void fill(T* data, std::int64_t count, std::uint32_t seed, Noise noise) {
  fill_kernel<<<unsigned((count + 255) / 256), 256>>>(data, count, seed, noise);
  cuda::check_launch("fill_kernel");
}

}  // namespace upconv3d::tests
