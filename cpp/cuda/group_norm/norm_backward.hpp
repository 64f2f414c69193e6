// SPDX-License-Identifier: Apache-2.0
/// \file
/// norm_backward: backward stage 3 of 4 of the library plan, from the convolution that the forward pass kept.
///
///   v = c + bias, a = before(v), u = gamma*xhat(a) + beta, y = after(u); one of before and after is none
///   g = grad_y*after'(u)
///   grad_a = rstd*(gamma*g - c1 - xhat*c2), c1 and c2 the group's means of gamma*g and gamma*g*xhat
///   grad_c = grad_a*before'(v)
///   grad_beta = sum of g, grad_gamma = sum of g*xhat, grad_bias = sum of grad_c, per channel
///   grad_slopes = sum of grad_a*v where !(v > 0), or of grad_y*u where !(u > 0), per channel or over all
///
/// Beside group_norm_backward, which reads what the SM90 plan keeps (a in padded rows, its moments beside
/// it), this reads whatever PyTorch's convolution returned, with any activation before the normalization.
///
/// Four launches: partial sums per (sample, channel, tile); their merge per (sample, group); the parameters'
/// gradients; grad_c. Every value has one writer and every sum a fixed order: the same bits on every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"
#include "cuda/group_norm/group_norm.hpp"

namespace upconv3d::cuda {

struct NormBackwardParams {
  GroupNormShape shape;           // tiles as activation_moments has them
  DType dtype = DType::kFloat32;  // of all tensors that name none; not float64
  Layout layout = Layout::kNCDHW;
  ActivationParams before = {}, after = {};
  const void* c = nullptr;        // [N,K,Z,P,Q] or [N,Z,P,Q,K], dense
  const void* grad_y = nullptr;   // [N,K,Z,P,Q] or [N,Z,P,Q,K], dense
  const void* bias = nullptr;     // [K], or null
  const void* gamma = nullptr;    // [K], or null for 1
  const float* table = nullptr;   // [3,N,K] mean, scale, shift, as the forward pass had them from finalize
  const float* groups = nullptr;  // [N,G,4] mean, what the mean lost by rounding, rstd, unused

  void* grad_c = nullptr;       // as c, written; may be c; or null
  void* grad_gamma = nullptr;   // [K], or null; likewise the next three
  void* grad_beta = nullptr;    // [K]
  void* grad_bias = nullptr;    // [K]
  void* grad_slopes = nullptr;  // [1] or [K], as slope_step says; with prelu
  void* scratch = nullptr;      // norm_backward_scratch_bytes, 256-byte aligned
};

std::int64_t norm_backward_scratch_bytes(const GroupNormShape& shape);

/// N is at least 1.
/// \throws std::invalid_argument for float64, two activations, or slopes that are missing.
void launch_norm_backward(const NormBackwardParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
