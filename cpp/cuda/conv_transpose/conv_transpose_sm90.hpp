// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launcher of conv_transpose_relu_moments_sm90, forward stage 2 of 4, free of CUTLASS so that host code can
/// include it. One launcher per line of cpp/instances.cmake.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

struct ConvTransposeParams {
  Problem problem;
  const void* x_hi = nullptr;                    // [N,D,H,W,C] operand, 16-byte aligned
  const void* x_lo = nullptr;                    // the same, three products only
  const void* w_hi = nullptr;                    // [T*R*S,K,C] operand
  const void* w_lo = nullptr;                    // the same, three products only
  const void* bias = nullptr;                    // [K] activation dtype, or null
  const std::int32_t* unscale_sample = nullptr;  // [N] exponents, or null where operands are unscaled
  const std::int32_t* unscale_column = nullptr;  // [K] exponents, or null
  void* a = nullptr;                             // [N,Z,P,Q,K] activation dtype, written: relu(conv + bias)
  float* part = nullptr;                         // [N,tiles,K,2] written: (mean, M2) of a as stored
  std::int32_t* counts = nullptr;                // [tiles] written: positions behind each partial moment
  int split_axes = 0;                            // axes along which borders are cut off, see border_slabs
  int sm_count = 0;                              // blocks of the persistent grid
};

using ConvTransposeLauncher = void (*)(const ConvTransposeParams& params, cudaStream_t stream);

/// The launcher of an instance by its name; generated from instances.cmake.
/// \throws std::logic_error for a name that was not compiled.
ConvTransposeLauncher find_conv_transpose_launcher(const char* instance_name);

}  // namespace upconv3d::cuda
