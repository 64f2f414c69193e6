// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launcher of conv_transpose_relu_moments_sm80, forward stage 2 of 4, free of device code so that host code
/// can include it. One launcher per sm80 line of cpp/instances.cmake.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

struct ConvTransposeSm80Params {
  Problem problem;
  const void* x_hi = nullptr;                    // [N,D,H,W,C] operand, 16-byte aligned
  const void* x_lo = nullptr;                    // the same, three products only
  const void* w_hi = nullptr;                    // [T*R*S,K,C] operand, 16-byte aligned
  const void* w_lo = nullptr;                    // the same, three products only
  const void* bias = nullptr;                    // [K] dtype, or null
  const std::int32_t* unscale_sample = nullptr;  // [N] exponents; float32 only
  const std::int32_t* unscale_column = nullptr;  // [K] exponents; float32 only
  void* a = nullptr;                             // [N,Z,P,Q,K] dtype, written: relu(conv + bias)
  float* part = nullptr;                         // [N,tiles,K,2], written: (mean, M2) of a, rounded
  std::int32_t* counts = nullptr;                // [tiles], written: positions of each tile
  int split_axes = 0;                            // axes along which borders are cut off, see border_slabs
};

using ConvTransposeSm80Launcher = void (*)(const ConvTransposeSm80Params& params, cudaStream_t stream);

/// The launcher of an instance by its name; generated from instances.cmake.
/// \throws std::logic_error for a name that was not compiled.
ConvTransposeSm80Launcher find_conv_transpose_sm80_launcher(const char* instance_name);

}  // namespace upconv3d::cuda
