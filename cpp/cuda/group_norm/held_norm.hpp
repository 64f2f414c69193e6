// SPDX-License-Identifier: Apache-2.0
/// \file
/// Activation and GroupNorm in one launch, where the multiprocessors together hold all values.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/held_norm.hpp"
#include "core/problem.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

/// y = after(group_norm(before(c + bias))), one of before and after being none at least.
struct HeldNormParams {
  HeldCut cut;                    // held_cut of the layout of c
  std::int64_t n = 0;             // samples
  std::int64_t k = 0;             // channels
  std::int64_t positions = 0;     // Z*P*Q
  std::int64_t num_groups = 1;    // divides k
  DType dtype = DType::kFloat32;  // of all tensors; not float64
  double eps = 0.0;               // activation units squared
  ActivationParams before = {}, after = {};
  bool y_planes = false;    // HeldTiles: y lies [N,K,Z,P,Q]
  const void* c = nullptr;  // HeldTiles: [N,Z,P,Q,K], HeldPlanes: [N,K,Z,P,Q] dtype, dense, 16-byte aligned
  const void* bias = nullptr;   // [K] dtype, or null
  const void* gamma = nullptr;  // [K] dtype, or null for 1
  const void* beta = nullptr;   // [K] dtype, or null for 0
  void* y = nullptr;            // as c, or c itself unless it lies in another order
  void* part = nullptr;         // held_part_bytes, 16-byte aligned
  int max_blocks = 0;  // of a launch whose blocks all wait, as on a device that holds no more; 0: its own
};

/// Partial moments, [N,G,tiles,2] float, where blocks wait for each other.
std::int64_t held_part_bytes(std::int64_t n, std::int64_t num_groups, const HeldCut& cut);

/// Asynchronous. The same bits whatever the number of multiprocessors.
/// \throws std::invalid_argument for a dtype or an activation that has no kernel, std::runtime_error where
/// CUDA refuses.
void launch_held_norm(const HeldNormParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
