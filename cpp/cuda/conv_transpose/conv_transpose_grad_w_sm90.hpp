// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launchers of conv_transpose_grad_w_sm90 and of grad_w_reduce, which follows it, free of CUTLASS so that
/// host code can include it. One launcher of the former per line of cpp/instances.cmake.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/grad_w_plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

struct GradWParams {
  Problem problem;
  GradWPlan plan;
  const void* x = nullptr;        // [N,D,H,W,plan.x_pitch] operand, 16-byte aligned, zeros behind C
  const void* grad_c = nullptr;   // [N,Z,P,Q,grad_c_pitch] operand, 16-byte aligned, zeros behind K
  std::int64_t grad_c_pitch = 0;  // channels of a row, a multiple of 8
  const void* x_lo = nullptr;     // as x, three products only: what rounding it to hi left
  // Three products only: grad_c is the first hi and this the first lo of rows that are SplitRows
  // (core/channels.hpp).
  const void* grad_c_lo = nullptr;
  float* partial = nullptr;  // [plan.partial_floats()] written, 256-byte aligned
  int sm_count = 0;          // blocks of the persistent grid
};

using GradWLauncher = void (*)(const GradWParams& params, cudaStream_t stream);

/// The launcher of an instance by its name; generated from instances.cmake.
/// \throws std::logic_error for a name that was not compiled.
GradWLauncher find_grad_w_launcher(const char* instance_name);

struct GradWReduceParams {
  Problem problem;
  GradWPlan plan;
  const float* partial = nullptr;  // [plan.partial_floats()]
  // float32 only, else null:
  const std::int32_t* scale_c = nullptr;         // [C] exponents that x was scaled by, or null
  const std::int32_t* unscale_grad_c = nullptr;  // [1] exponent that undoes grad_c's scale, or null
  void* grad_w = nullptr;                        // [C,K,T,R,S] dtype, written
  std::int64_t w_strides[5] = {};                // of grad_w, in elements
};

/// grad_w = sum of the splits, in their order, without the operands' scales.
void launch_grad_w_reduce(const GradWReduceParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
