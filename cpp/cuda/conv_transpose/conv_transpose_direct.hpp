// SPDX-License-Identifier: Apache-2.0
/// \file
/// Convolutions of so little arithmetic per output that they are computed twice: once for the moments of
/// before(conv), and once more to be normalized and stored. (core/tail.hpp: before and after.)
///
/// The moments pass writes part and counts, group_norm_finalize makes the table of them, the output pass
/// reads it. That follows group_norm_finalize directly in the stream, and may begin while it runs
/// (cuda/launch.cuh). Without a normalization there is the output pass alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

struct ConvTransposeDirectParams {
  Problem problem;
  const void* x = nullptr;         // [N,C,D,H,W] or [N,D,H,W,C] problem.dtype, dense, problem.x_layout
  const void* w = nullptr;         // [C,K/groups,T,R,S] problem.dtype
  std::int64_t w_strides[5] = {};  // in elements
  const void* bias = nullptr;      // [K] problem.dtype, or null
  ActivationParams before = {}, after = {};
  const void* table = nullptr;  // output pass: [3,N,K] float, as group_norm_finalize writes it, or null
  float* part = nullptr;        // moments pass: [N,tiles,K,2] mean and M2, written; null in the output pass
  std::int32_t* counts = nullptr;  // moments pass: [tiles] positions of each tile, written
  void* y = nullptr;               // output pass: [N,K,Z,P,Q] or [N,Z,P,Q,K] problem.dtype, written;
                                   // null in the moments pass
};

/// conv_transpose_direct: forward on CUDA cores, for convolutions of few inputs per output.
/// Partial moments per sample and channel.
std::int64_t direct_tiles(const Problem& problem);
/// \throws std::runtime_error where CUDA refuses a launch.
void launch_direct(const ConvTransposeDirectParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
