// SPDX-License-Identifier: Apache-2.0
/// \file
/// A tile that one warpgroup multiplies by itself: how its operands lie in shared memory, and what multiplies
/// them. For conv_transpose_twice_sm90 and conv_transpose_held_sm90; of conv_transpose_relu_group_norm_sm90
/// two warpgroups share a tile.
#pragma once

#include <type_traits>

#include "cuda/conv_transpose/kernel_params_sm90.cuh"

#include "cute/tensor.hpp"

namespace upconv3d::cuda {

/// \tparam kWInPlace w is [C,T,R,S,K], as PyTorch's channels_last_3d leaves it
/// \tparam ROWS      output channels, or those of several phases
/// \tparam BLK_POS   positions
/// \tparam BLK_C     input channels of a k-block: a swizzled row
template <class Operand, bool kWInPlace, int ROWS, int BLK_POS, int BLK_C>
struct WarpgroupTileSm90 {
  static constexpr auto W_MAJOR = kWInPlace ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  using MmaOp =
      decltype(cute::GMMA::ss_op_selector<Operand, Operand, float,
                                          cute::Shape<cute::Int<ROWS>, cute::Int<BLK_POS>, cute::Int<BLK_C>>,
                                          W_MAJOR>());
  using TiledMma = decltype(cute::make_tiled_mma(MmaOp{}));
  using SmemAtom = SmemAtomOf<Operand, BLK_C>;
  using SmemLayoutX = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<BLK_POS>, cute::Int<BLK_C>>{}));  // (BLK_POS,BLK_C)
  using SmemAtomW = std::conditional_t<kWInPlace, cute::GMMA::Layout_MN_SW128_Atom<Operand>, SmemAtom>;
  using SmemLayoutW = decltype(cute::tile_to_shape(
      SmemAtomW{}, cute::Shape<cute::Int<ROWS>, cute::Int<BLK_C>>{}));  // (ROWS,BLK_C)

  static constexpr int ROW_BYTES = BLK_C * int(sizeof(Operand));
  static constexpr int X_BYTES = BLK_POS * ROW_BYTES;  // of a k-block and one tap
  static constexpr int W_BYTES = ROWS * ROW_BYTES;     // likewise

  /// Descriptors (MMA,MMA_ROWS,BLK_C/16) of w (ROWS,BLK_C). \param w [W_BYTES] shared memory
  template <class ThreadMma>
  CUTLASS_DEVICE static auto descriptors_of_w(ThreadMma const& thread_mma, char* w) {
    using namespace cute;
    Tensor sW = make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(w)), SmemLayoutW{});  // (ROWS,BLK_C)
    return thread_mma.make_fragment_A(thread_mma.partition_A(sW));  // (MMA,MMA_ROWS,BLK_C/16)
  }

  /// Descriptors (MMA,MMA_POS,BLK_C/16) of x (BLK_POS,BLK_C). \param x [X_BYTES] shared memory
  template <class ThreadMma>
  CUTLASS_DEVICE static auto descriptors_of_x(ThreadMma const& thread_mma, char* x) {
    using namespace cute;
    Tensor sX = make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(x)), SmemLayoutX{});  // (BLK_POS,BLK_C)
    return thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (MMA,MMA_POS,BLK_C/16)
  }
};

/// Descriptors count in so many bytes.
inline constexpr int kDescriptorUnit = 16;

/// acc += w*x of a k-block and one tap, as a batch that may go on behind the call. The batch before it is
/// then done: what that read may be overwritten.
///
/// \param first_w (MMA,MMA_ROWS,BLK_C/16) descriptors, and how far behind them those of this k-block are
/// \param first_x (MMA,MMA_POS,BLK_C/16) likewise
/// \param acc ((2,2,BLK_POS/8),1,1)
template <class TiledMma, class FragmentW, class FragmentX, class Accumulator>
CUTLASS_DEVICE void multiply_k_block(TiledMma& mma, FragmentW const& first_w, int w_from,
                                     FragmentX const& first_x, int x_from, Accumulator& acc) {
  using namespace cute;
  Tensor w = make_tensor(first_w.data() + w_from, first_w.layout());  // (MMA,MMA_ROWS,BLK_C/16)
  Tensor x = make_tensor(first_x.data() + x_from, first_x.layout());  // (MMA,MMA_POS,BLK_C/16)
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  CUTLASS_PRAGMA_UNROLL
  for (int kb = 0; kb < size<2>(w); ++kb) {
    cute::gemm(mma, w(_, _, kb), x(_, _, kb), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_wait<1>();
}

}  // namespace upconv3d::cuda
