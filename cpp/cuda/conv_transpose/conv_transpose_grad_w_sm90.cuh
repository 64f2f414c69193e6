// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_grad_w_sm90: the gradient of the weight, but for its final sum.
///
///   x       [N,D,H,W,x_pitch]       operand  read through TMA im2col, zeros behind C
///   grad_c  [N,Z,P,Q,grad_c_pitch]  operand  gradient at the convolution's output, likewise, zeros behind K;
///                                            with three products SplitRows
///   partial [splits,tiles,...]      float    accumulators as they lie (grad_w_partials.cuh)
///
/// An implicit GEMM that is reduced over positions of all samples; its rows and columns are taps and channels
/// of the two operands (core/grad_w_plan.hpp). Few tiles and many positions: so positions are split, evenly
/// and by plan alone, and grad_w_reduce adds the splits in their order, which repeats bit for bit.
///
/// With three products, operands come as v = hi + lo and every k-block accumulates hi*lo + lo*hi + hi*hi in
/// the tensor cores, then adds that into float registers.
///
/// One block per multiprocessor, three warpgroups:
///   warp 0      loads chunks of 64 positions x 64 channels by TMA (grad_w_mainloop_sm90.cuh)
///   warps 4-11  two warpgroups multiply by wgmma, both operands MN-major, and store their sums
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/conv_transpose/grad_w_params_sm90.cuh"

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_grad_w_sm90.hpp"
#include "cuda/conv_transpose/grad_w_mainloop_sm90.cuh"

namespace upconv3d::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1)
    conv_transpose_grad_w_sm90(__grid_constant__ const GradWKernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // 128-byte swizzled tiles must start on 1024-byte boundaries.
  extern __shared__ __align__(1024) char shared[];
  static_assert(sizeof(GradWControl<Traits>) <= Traits::kControlBytes);
  auto& control = *reinterpret_cast<GradWControl<Traits>*>(shared + Traits::STAGES * Traits::STAGE_BYTES);
  if (threadIdx.x == 0) {
    control.stages.init(1, kGradWConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= 128) {
    cutlass::arch::warpgroup_reg_alloc<Traits::CONSUMER_REGISTERS>();
    multiply_units<Traits>(params, shared, control);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::LOADER_REGISTERS>();
    if (threadIdx.x == 0) load_units<Traits>(params, shared, control);
  }
#endif
}

inline GradWOperandParams grad_w_operand_params(const GradWParams& params, DType element, bool is_x) {
  const Problem& problem = params.problem;
  const GradWOperand walk = grad_w_operand(problem, params.plan.moves_x, is_x);
  GradWOperandParams to{};
  const void* const x[2] = {params.x, params.x_lo};
  const void* const grad_c[2] = {params.grad_c, params.grad_c_lo};
  const bool three = params.plan.instance->products == 3;
  const std::int64_t pitch = is_x ? params.plan.x_pitch : params.grad_c_pitch;
  const SplitRow split_row(pitch);
  const RowBox row = three && !is_x ? row_box(split_row) : RowBox{pitch, pitch};
  to.chunk_step = static_cast<int>(three && !is_x ? split_row.block_step() : kGradWChunk);
  static_assert(kGradWChunk == kBlockInputs, "a SplitRow's blocks are read as chunks");
  for (int split = 0; split < (three ? 2 : 1); ++split) {
    to.map[split] = encode_grad_w_operand(is_x ? "x" : "grad_c", problem, element,
                                          is_x ? x[split] : grad_c[split], walk, row);
  }
  for (int axis = 0; axis < 3; ++axis) {
    to.step[axis] = static_cast<int>(walk.step[axis]);
    to.lower[axis] = static_cast<int>(walk.lower[axis]);
    to.dilation[axis] = walk.taps[axis] == 1 ? 0 : static_cast<int>(problem.dilation[axis]);
  }
  to.taps_s = cutlass::FastDivmod(static_cast<int>(walk.taps[2]));
  to.taps_r = cutlass::FastDivmod(static_cast<int>(walk.taps[1]));
  to.channel_chunks = cutlass::FastDivmod(static_cast<int>(ceil_div(walk.channels, kGradWChunk)));
  to.chunks = static_cast<int>(walk.chunks());
  return to;
}

/// Launches one persistent block per multiprocessor; none waits for another.
template <class Operand, int PRODUCTS, int ROW_CHUNKS, int COLUMN_CHUNKS>
void launch_conv_transpose_grad_w_sm90(const GradWParams& params, cudaStream_t stream) {
  using Traits = GradWTraitsSm90<Operand, PRODUCTS, ROW_CHUNKS, COLUMN_CHUNKS>;
  constexpr DType element = std::is_same_v<Operand, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
  const GradWPlan& plan = params.plan;
  GradWKernelParams to{};
  to.rows = grad_w_operand_params(params, element, plan.rows_are_x);
  to.columns = grad_w_operand_params(params, element, !plan.rows_are_x);
  to.width = cutlass::FastDivmod(static_cast<int>(plan.positions[2]));
  to.height = cutlass::FastDivmod(static_cast<int>(plan.positions[1]));
  to.depth = cutlass::FastDivmod(static_cast<int>(plan.positions[0]));
  to.k_blocks = static_cast<int>(plan.k_blocks);
  to.splits = static_cast<int>(plan.splits);
  to.column_tiles = cutlass::FastDivmod(static_cast<int>(plan.column_tiles));
  to.tiles = cutlass::FastDivmod(static_cast<int>(plan.tiles()));
  to.units = static_cast<int>(plan.splits * plan.tiles());
  to.partial = reinterpret_cast<float4*>(params.partial);
  check(cudaFuncSetAttribute(conv_transpose_grad_w_sm90<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Traits::SHARED_BYTES),
        "reserving shared memory for conv_transpose_grad_w_sm90");
  const unsigned blocks = static_cast<unsigned>(std::min(to.units, params.sm_count));
  conv_transpose_grad_w_sm90<Traits><<<blocks, Traits::THREADS, Traits::SHARED_BYTES, stream>>>(to);
  check_launch("conv_transpose_grad_w_sm90");
}

}  // namespace upconv3d::cuda
