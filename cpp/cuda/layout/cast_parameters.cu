// SPDX-License-Identifier: Apache-2.0
/// \file
/// cast_parameters: the float32 parameters of a call, mostly so few that it takes as long as a launch.

#include "cuda/layout/cast_parameters.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/index_math.hpp"
#include "cuda/check.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // values of a thread: 16 bytes written

__device__ void convert(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}
__device__ void convert(float from, __half& to) {
  to = __float2half_rn(from);
}

/// Block (x, y): values kThreads * kVector * x and following of tensor y.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cast_parameters(const __grid_constant__ CastParametersParams params) {
  CastParametersParams::Tensor tensor;
  // Indices known to the compiler: for others it copies the parameters to local memory.
#pragma unroll
  for (int i = 0; i < CastParametersParams::kMost; ++i) {
    if (i == static_cast<int>(blockIdx.y)) tensor = params.tensors[i];
  }
  const std::int64_t at = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (at >= tensor.count) return;
  const float* const from = tensor.from + at;
  T* const to = static_cast<T*>(tensor.to) + at;
  // A parameter can be a view that begins anywhere.
  const bool whole = at + kVector <= tensor.count && reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
  if (!whole) {
    const int count = int(min(std::int64_t(kVector), tensor.count - at));
    for (int i = 0; i < count; ++i) convert(from[i], to[i]);
    return;
  }
  const float4 low = reinterpret_cast<const float4*>(from)[0],
               high = reinterpret_cast<const float4*>(from)[1];
  alignas(16) T values[kVector];
  convert(low.x, values[0]);
  convert(low.y, values[1]);
  convert(low.z, values[2]);
  convert(low.w, values[3]);
  convert(high.x, values[4]);
  convert(high.y, values[5]);
  convert(high.z, values[6]);
  convert(high.w, values[7]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
}

}  // namespace

void launch_cast_parameters(const CastParametersParams& params, cudaStream_t stream) {
  std::int64_t longest = 0;
  for (int i = 0; i < params.num_tensors; ++i) longest = std::max(longest, params.tensors[i].count);
  if (longest == 0) return;
  const std::int64_t blocks = ceil_div(longest, kThreads * kVector);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.num_tensors));
  if (params.dtype == DType::kBFloat16) {
    cast_parameters<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(params);
  } else if (params.dtype == DType::kFloat16) {
    cast_parameters<__half><<<grid, kThreads, 0, stream>>>(params);
  } else {
    throw std::invalid_argument(std::string("upconv3d: cast_parameters writes 16-bit values; got ") +
                                name(params.dtype) + ". Leave float32 parameters as they are.");
  }
  check_launch("cast_parameters");
}

}  // namespace upconv3d::cuda
