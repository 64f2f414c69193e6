// SPDX-License-Identifier: Apache-2.0
/// \file
/// ReLU + GroupNorm on the host, fused and multi-threaded, for the output of PyTorch's convolution.
#pragma once

#include <cstdint>
#include <functional>

#include "core/problem.hpp"

namespace upconv3d::cpu {

/// Runs body(begin, end) over a partition of [0, end). The caller brings its thread pool.
using ParallelFor =
    std::function<void(std::int64_t end, const std::function<void(std::int64_t, std::int64_t)>& body)>;

struct ReluGroupNormParams {
  std::int64_t n = 0;           // samples
  std::int64_t k = 0;           // channels
  std::int64_t positions = 0;   // Z*P*Q
  std::int64_t num_groups = 1;  // divides k
  double eps = 0.0;             // activation units squared
  DType dtype = DType::kFloat32;
  Layout c_layout = Layout::kNCDHW;
  Layout y_layout = Layout::kNCDHW;
  const void* c = nullptr;      // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, dense: the convolution
  const void* bias = nullptr;   // [K] dtype, or null: added to c before the ReLU
  const void* gamma = nullptr;  // [K] dtype, or null for 1
  const void* beta = nullptr;   // [K] dtype, or null for 0
  void* y = nullptr;            // y_layout dtype; may be c where the layouts are equal
};

/// y = group_norm(relu(c + bias)). The result does not depend on how parallel_for splits the work.
void relu_group_norm(const ReluGroupNormParams& params, const ParallelFor& parallel_for);

}  // namespace upconv3d::cpu
