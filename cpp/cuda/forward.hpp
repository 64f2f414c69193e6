// SPDX-License-Identifier: Apache-2.0
/// \file
/// Runs a plan on a stream. No torch: pointers, extents and a cudaStream_t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/launch_memo.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

struct ForwardTensors {
  const void* x = nullptr;  // SM90 and SM80 plan: [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, problem.x_layout
  const void* w = nullptr;  // SM90 and SM80 plan: [C,K/groups,T,R,S] dtype
  std::int64_t w_strides[5] = {};  // in elements
  const void* conv = nullptr;      // library plan: PyTorch's convolution, plan.conv_layout
  const void* bias = nullptr;      // [K] dtype, or null; library plan: null too where conv has it already
  const void* gamma = nullptr;     // [K] dtype, or null
  const void* beta = nullptr;      // [K] dtype, or null
  const void* slopes = nullptr;    // [tail.slopes] dtype, or null
  const void* skip = nullptr;      // library plan: as conv, or null
  void* sum = nullptr;             // library plan, where a sum is stored: as conv, may be conv; written
  void* y = nullptr;               // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, problem.y_layout
  void* c = nullptr;               // SM90 plan, where tail.returns_conv: conv + bias as y, written
  void* workspace = nullptr;       // plan.workspace_bytes, 256-byte aligned
  void* saved = nullptr;  // saved_bytes(problem, plan), 256-byte aligned, written (activation_memory.hpp)
};

/// Launches every stage of a completed plan. Asynchronous; N = 0 launches nothing.
/// \param memo of calls of this plan on this device whose tensors are null where these are; or null
/// \throws std::runtime_error that names problem and plan where CUDA refuses a launch.
void run_forward(const Problem& problem, const Plan& plan, const Device& device,
                 const ForwardTensors& tensors, cudaStream_t stream, LaunchMemo* memo = nullptr);

/// Where the library plan copies its operands (core/library_plan.hpp): x [N,C,D,H,W] dtype to x_to
/// [N,D,H,W,C], and w [C,K/groups,T,R,S] dtype to w_to [C,T,R,S,K/groups] unless that is null. Asynchronous.
void copy_operands(const Problem& problem, const void* x, void* x_to, const void* w, void* w_to,
                   cudaStream_t stream);

/// Fills in what depends on the CUDA kernels: tile_positions and tiles of the library and the col2im
/// plan, and workspace_bytes. To be called on every plan of select_plan for a CUDA device, before
/// run_forward.
void complete_plan(const Problem& problem, const Device& device, Plan& plan);

/// Compute capability and multiprocessors of CUDA device `index`, cached.
/// \throws std::runtime_error with driver and runtime versions where the driver is missing or too old.
Device query_device(int index);

}  // namespace upconv3d::cuda
