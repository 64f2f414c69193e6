// SPDX-License-Identifier: Apache-2.0
/// \file
/// The weight as rows of channels: a row is one tap of one output channel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

/// Rows are numbered in the order in which memory holds them, so that neighbouring threads read neighbouring
/// addresses: k outermost for PyTorch's contiguous [C,K,T,R,S], k innermost for its channels_last_3d
/// [C,T,R,S,K]. Other strides are read correctly through the order that is nearer.
struct WeightOrder {
  std::int64_t stride_k = 0;
  std::int64_t stride_t = 0;
  std::int64_t stride_r = 0;
  std::int64_t stride_s = 0;
  std::int64_t k = 0;     // output channels
  std::int64_t taps = 0;  // T*R*S
  std::int64_t r = 0;
  std::int64_t s = 0;
  bool k_innermost = false;

  __device__ std::int64_t k_of(std::int64_t j) const { return k_innermost ? j % k : j / taps; }
  __device__ std::int64_t tap_of(std::int64_t j) const { return k_innermost ? j / k : j % taps; }

  /// Elements from w to row j's channel 0.
  __device__ std::int64_t offset(std::int64_t j) const {
    const std::int64_t tap = tap_of(j);
    const std::int64_t plane = tap / s;
    return k_of(j) * stride_k + plane / r * stride_t + plane % r * stride_r + tap % s * stride_s;
  }
};

/// The order of `params.w`.
inline WeightOrder weight_order(const PackParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t* const stride = params.w_strides;
  std::int64_t tap_stride = 0;  // of the innermost tap axis that has an extent; 0: there is a single tap
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t candidate = stride[2 + axis];
    if (problem.kernel[axis] > 1 && (tap_stride == 0 || candidate < tap_stride)) tap_stride = candidate;
  }
  return {
      .stride_k = stride[1],
      .stride_t = stride[2],
      .stride_r = stride[3],
      .stride_s = stride[4],
      .k = problem.k,
      .taps = volume(problem.kernel),
      .r = problem.kernel[1],
      .s = problem.kernel[2],
      .k_innermost = stride[1] < tap_stride,
  };
}

}  // namespace upconv3d::cuda
