// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_backward: the backward pass where nothing is normalized, y = activation(v), up to the gradient
/// at the convolution's output.
///
///   v = c + bias
///   grad_c = grad_y*activation'(v)
///   grad_bias = sum of grad_c per channel
///   grad_slopes = sum of grad_y*v where !(v > 0), per channel or over all
///
/// Of ReLU, c may be its result, without a bias: of that it makes nothing else, and the same gates are open.
///
/// Up to three launches: grad_c with partial sums per (sample, channel, tile); their merge; the sum over all
/// channels. Every value has one writer and every sum a fixed order: the same bits on every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"
#include "cuda/group_norm/group_norm.hpp"

namespace upconv3d::cuda {

struct ActivationBackwardParams {
  GroupNormShape shape;           // tiles as activation_moments has them; num_groups is not read
  DType dtype = DType::kFloat32;  // of all tensors; not float64
  Layout layout = Layout::kNCDHW;
  ActivationParams activation = {};
  const void* c = nullptr;       // [N,K,Z,P,Q] or [N,Z,P,Q,K], dense; of no activation not read
  const void* grad_y = nullptr;  // as c
  const void* bias = nullptr;    // [K], or null; added to c

  void* grad_c = nullptr;       // as c, written; may be c; or null. Of no activation null: it is grad_y
  void* grad_bias = nullptr;    // [K], or null
  void* grad_slopes = nullptr;  // [1] or [K], as slope_step says, or null; with prelu
  void* scratch = nullptr;      // activation_backward_scratch_bytes, 256-byte aligned
};

std::int64_t activation_backward_scratch_bytes(const GroupNormShape& shape);

/// N is at least 1.
/// \throws std::invalid_argument for float64, for slopes that are missing, and for a grad_c of no activation.
void launch_activation_backward(const ActivationBackwardParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
