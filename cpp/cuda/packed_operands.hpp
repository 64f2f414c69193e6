// SPDX-License-Identifier: Apache-2.0
/// \file
/// Forward stage 1 as the implicit GEMMs share it: where packed operands lie in a call's workspace, and how
/// they come there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/forward.hpp"
#include "cuda/layout/pack.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {

/// Memory that stage 1 clears for counters of later kernels; by default none.
struct ClearedMemory {
  void* data = nullptr;  // 16-byte aligned
  std::int64_t bytes = 0;
};

struct PackedOperands {
  void* x_hi;    // [N,groups,D,H,W,operand_channels] operand, where the plan packs x
  void* x_lo;    // the same, three products only
  void* w_hi;    // [T*R*S,K,operand_channels] operand, unless the plan reads w in place
  void* w_lo;    // the same, three products only
  void* scales;  // operand_scales_bytes

  /// Takes the operands' parts of the workspace.
  PackedOperands(const Problem& problem, const Plan& plan, Carver& carver);

  /// Packs the call's tensors, as launch_pack does; launches nothing, and clears nothing, where both are used
  /// as they lie. Returns the scales, null pointers for 16-bit dtypes.
  OperandScales pack(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                     ClearedMemory cleared, cudaStream_t stream) const;

  static bool packs_nothing(const Plan& plan) { return plan.w_in_place && !plan.pack_x; }

  /// What the convolution reads as w: the packed copy, or w as it lies.
  const void* w(const Plan& plan, const ForwardTensors& tensors) const {
    return plan.w_in_place ? tensors.w : w_hi;
  }
  /// What the convolution reads as x: the packed copy, or x as it lies.
  const void* x(const Plan& plan, const ForwardTensors& tensors) const {
    return plan.pack_x ? x_hi : tensors.x;
  }
};

}  // namespace upconv3d::cuda
