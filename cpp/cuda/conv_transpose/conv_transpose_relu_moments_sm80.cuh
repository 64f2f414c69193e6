// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_relu_moments_sm80: forward stage 2 of 4 on any GPU from compute capability 8.0 on, for
/// groups 1 and output channels in eights; C is operand_channels, with zeros behind the block's own.
///
///   x      [N,D,H,W,C]    operand  gathered by cp.async
///   w      [T*R*S,K,C]    operand  packed by layout/pack
///   a      [N,Z,P,Q,K]    stored   relu(conv + bias), written once
///   part   [N,tiles,K,2]  float    (mean, M2) of the *rounded* a, because that is what normalize reads
///   counts [tiles]        int32    positions of each tile
///
/// An implicit GEMM whose rows are output positions of one sample (gemm_m = Z*P*Q) and whose columns are
/// output channels (gemm_n = K), reduced over taps and input channels (gemm_k = T*R*S*C). One tile per block.
///
/// Tiles belong to slabs: boxes of positions of one phase of the stride, which the same taps reach
/// (core/border_slabs.hpp). A tile never straddles two samples or slabs, so part needs no atomics and results
/// repeat bit for bit.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/border_slabs.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm80.hpp"
#include "cuda/conv_transpose/kernel_params_sm80.cuh"
#include "cuda/conv_transpose/mainloop_sm80.cuh"
#include "cuda/conv_transpose/relu_moments_epilogue_sm80.cuh"

namespace upconv3d::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, Traits::BLOCKS_PER_SM)
    conv_transpose_relu_moments_sm80(__grid_constant__ const KernelParamsSm80<Traits> params) {
  extern __shared__ __align__(128) char shared[];
  // For the epilogue: in registers, its coordinates would be in the way of the main loop's.
  __shared__ TileSm80 kept_tile;
  const TileSm80 tile = tile_of_block(params);
  if (threadIdx.x == 0) kept_tile = tile;
  AccumulatorsSm80<Traits> acc;
  OperandLoader<Traits> loader(params, tile, shared);
  OperandRing<Traits> ring(loader, shared);
  if constexpr (Traits::PRODUCTS == 1) {
    multiply_one_product(ring, acc);
  } else {
    multiply_three_products(ring, acc);
  }
  ring.close();
  ReluMomentsSm80<Traits>(params, kept_tile, shared).finish(acc);
}

/// The slab's geometry in 32 bits; select_plan has seen that it fits.
inline KernelSlabSm80 kernel_slab_sm80(const Problem& problem, const Slab& from) {
  KernelSlabSm80 slab{};
  slab.positions = static_cast<int>(from.positions());
  slab.height = cutlass::FastDivmod(static_cast<int>(from.extent[1]));
  slab.width = cutlass::FastDivmod(static_cast<int>(from.extent[2]));
  const std::int64_t tap_stride[3] = {problem.kernel[1] * problem.kernel[2], problem.kernel[2], 1};
  for (int axis = 0; axis < 3; ++axis) {
    slab.origin[axis] = static_cast<int>(from.origin[axis]);
    slab.step[axis] = static_cast<int>(from.step[axis]);
    slab.window[axis] = static_cast<int>(from.window[axis]);
    slab.dilation[axis] = static_cast<int>(from.dilation[axis]);
    slab.taps[axis] = static_cast<int>(from.taps[axis]);
    slab.tap += static_cast<int>(from.tap[axis] * tap_stride[axis]);
    slab.tap_step[axis] = static_cast<int>(from.tap_step[axis] * tap_stride[axis]);
  }
  return slab;
}

template <class Traits>
void fill_slabs(const ConvTransposeSm80Params& params, KernelParamsSm80<Traits>& to) {
  const std::vector<Slab> slabs = border_slabs(params.problem, params.split_axes);
  if (slabs.size() > kMaxSlabs) {
    throw std::logic_error("upconv3d: the SM80 kernel takes at most " + std::to_string(kMaxSlabs) +
                           " slabs; got " + std::to_string(slabs.size()) + " for " +
                           describe(params.problem) + ". select_plan must cut fewer axes.");
  }
  std::int64_t tiles = 0;
  for (const Slab& from : slabs) {
    KernelSlabSm80& slab = to.slabs[to.num_slabs++];
    slab = kernel_slab_sm80(params.problem, from);
    slab.first_tile = static_cast<int>(tiles);
    tiles += ceil_div(from.positions(), Traits::BLK_POS);
  }
  to.tiles = cutlass::FastDivmod(static_cast<int>(tiles));
}

template <class Traits>
KernelParamsSm80<Traits> make_kernel_params(const ConvTransposeSm80Params& params) {
  using Stored = typename Traits::Stored;
  const Problem& problem = params.problem;
  KernelParamsSm80<Traits> to{};
  fill_slabs(params, to);
  const void* const x[2] = {params.x_hi, params.x_lo};
  const void* const w[2] = {params.w_hi, params.w_lo};
  for (int split = 0; split < Traits::SPLITS; ++split) {
    to.x[split] = static_cast<const uint4*>(x[split]);
    to.w[split] = static_cast<const uint4*>(w[split]);
  }
  to.bias = static_cast<const Stored*>(params.bias);
  to.unscale_sample = params.unscale_sample;
  to.unscale_column = params.unscale_column;
  to.a = static_cast<Stored*>(params.a);
  to.part = reinterpret_cast<float2*>(params.part);
  to.counts = params.counts;
  const Extent3 out = problem.out();
  for (int axis = 0; axis < 3; ++axis) {
    to.in[axis] = static_cast<int>(problem.in[axis]);
    to.out[axis] = static_cast<int>(out[axis]);
  }
  to.k = static_cast<int>(problem.k);
  to.vectors = static_cast<int>(problem.c / 8);
  to.k_tiles = cutlass::FastDivmod(static_cast<int>(ceil_div(problem.k, Traits::BLK_K)));
  return to;
}

/// Launches one block per tile.
template <class Operand, int PRODUCTS, class Stored, int BLK_K, int BLK_POS>
void launch_conv_transpose_relu_moments_sm80(const ConvTransposeSm80Params& params, cudaStream_t stream) {
  using Traits = ConvTransposeTraitsSm80<Operand, PRODUCTS, Stored, BLK_K, BLK_POS>;
  const auto kernel_params = make_kernel_params<Traits>(params);
  const auto kernel = conv_transpose_relu_moments_sm80<Traits>;
  const std::int64_t blocks = params.problem.n * kernel_params.tiles.divisor * kernel_params.k_tiles.divisor;
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw std::logic_error("upconv3d: the SM80 kernel runs at most 2147483647 tiles; got " +
                           std::to_string(blocks) + " for " + describe(params.problem) +
                           ". select_plan must choose another plan.");
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::SHARED_BYTES),
        "reserving shared memory for conv_transpose_relu_moments_sm80");
  kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(Traits::THREADS), Traits::SHARED_BYTES, stream>>>(
      kernel_params);
  check_launch("conv_transpose_relu_moments_sm80");
}

}  // namespace upconv3d::cuda
