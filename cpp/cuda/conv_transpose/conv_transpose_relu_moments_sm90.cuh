// SPDX-License-Identifier: Apache-2.0
/// conv_transpose_relu_moments_sm90: forward stage 2 of 4, for stride 1, dilation 1, groups 1.
///
///   x    [N,D,H,W,C]    operand     read through TMA im2col
///   w    [T*R*S,K,C]    operand     packed by layout/pack
///   a    [N,Z,P,Q,K]    activation  relu(conv + bias), written once
///   part [N,tiles,K,2]  float       (mean, M2) of the *rounded* a, because that is what normalize reads
///
/// An implicit GEMM whose rows are output channels (gemm_m = K) and whose columns are output positions of one
/// sample (gemm_n = Z*P*Q), reduced over taps and input channels (gemm_k = T*R*S*C). Channels are the rows
/// because a channel's moments then lie in one quad's registers, whatever the number of norm groups.
///
/// Tiles belong to slabs: boxes of positions that the same taps reach (core/border_slabs.hpp). Taps that
/// would read only padding are thus not multiplied.
///
/// A tile never straddles two samples, so part needs no atomics and results repeat bit for bit.
///
/// One block per multiprocessor walks the tiles: a producer warp keeps kPipeStages k-blocks in flight through
/// TMA, two consumer warpgroups multiply by wgmma and run the epilogue. With three products, operands come as
/// v = hi + lo and every k-block accumulates hi*lo + lo*hi + hi*hi in the tensor cores, then adds that into
/// float registers: tensor cores truncate as they accumulate, and only short sums may be left to them (Ootomo
/// & Yokota, arXiv:2203.03341).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

// kernel_hardware_info.hpp first: sm90 pipeline headers of CUTLASS 4.2 use it without including it.
#include "cutlass/kernel_hardware_info.hpp"

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/pipeline/pipeline.hpp"

#include "core/border_slabs.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/relu_moments_epilogue_sm90.cuh"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

template <class Operand_, int PRODUCTS_, class Activation_, int BLK_K_, int BLK_POS_>
struct ConvTransposeTraitsSm90 {
  using Operand = Operand_;
  using Activation = Activation_;
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int SPLITS = PRODUCTS == 3 ? 2 : 1;  // hi, or hi and lo
  static constexpr int BLK_K = BLK_K_;                  // output channels of a tile
  static constexpr int BLK_POS = BLK_POS_;              // output positions of a tile
  static constexpr int BLK_C = 64;                      // input channels of a k-block: a 128-byte swizzle row
  static_assert(PRODUCTS == 1 || PRODUCTS == 3);
  static_assert(BLK_K == 64 || BLK_K == 128, "wgmma has 64 rows; two consumer warpgroups");

  // Two consumer warpgroups of 64 channels each; where a tile has but 64 channels they share the positions.
  static constexpr int WARPGROUPS_K = BLK_K / 64;
  static constexpr int WARPGROUPS_POS = 2 / WARPGROUPS_K;
  static constexpr int WG_POS = BLK_POS / WARPGROUPS_POS;

  using MmaOp =
      decltype(cute::GMMA::ss_op_selector<Operand, Operand, float,
                                          cute::Shape<cute::_64, cute::Int<WG_POS>, cute::Int<BLK_C>>>());
  using TiledMma = decltype(cute::make_tiled_mma(
      MmaOp{}, cute::Layout<cute::Shape<cute::Int<WARPGROUPS_K>, cute::Int<WARPGROUPS_POS>, cute::_1>>{}));

  using Epilogue = ReluMomentsEpilogue<Activation, WG_POS>;

  static constexpr int X_BYTES = BLK_POS * BLK_C * int(sizeof(Operand));
  static constexpr int W_BYTES = BLK_K * BLK_C * int(sizeof(Operand));
  static constexpr int STAGE_BYTES = SPLITS * (X_BYTES + W_BYTES);
  // 227 KB is what a block may have on arch 90; 2 KB are left for the barriers and for aligning the base.
  static constexpr int PIPE = (227 * 1024 - 2048 - 2 * Epilogue::kBytes) / STAGE_BYTES;
  static_assert(PIPE >= 2, "a pipeline needs two stages");

  using SmemAtom = cute::GMMA::Layout_K_SW128_Atom<Operand>;
  using SmemLayoutX = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<BLK_POS>, cute::Int<BLK_C>, cute::Int<SPLITS * PIPE>>{}));
  using SmemLayoutW = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<BLK_K>, cute::Int<BLK_C>, cute::Int<SPLITS * PIPE>>{}));

  using Pipeline = cutlass::PipelineTmaAsync<PIPE>;

  struct SharedStorage {
    alignas(1024) Operand x[cute::cosize_v<SmemLayoutX>];
    alignas(1024) Operand w[cute::cosize_v<SmemLayoutW>];
    alignas(1024) char staging[2 * Epilogue::kBytes];
    typename Pipeline::SharedStorage pipeline;
  };
  static constexpr int SMEM_BYTES = int(sizeof(SharedStorage)) + 1024;  // the base is aligned by hand
  static_assert(SMEM_BYTES <= 227 * 1024);

  static constexpr int THREADS = 3 * 128;  // producer warpgroup, two consumer warpgroups
  static constexpr int CONSUMERS = 2 * 128;
  // 65536 registers over 384 threads: the producer needs few, a consumer its accumulators (up to 128).
  static constexpr int PRODUCER_REGISTERS = 40;
  static constexpr int CONSUMER_REGISTERS = 232;
};

template <class Traits>
struct KernelSlab {
  CUtensorMap x[Traits::SPLITS];  // hi, lo; just the input that the slab reads
  EpilogueSlab output;
  int corner[3];     // first window's coordinates in x
  int tap_begin[3];  // first flipped tap along T,R,S
  int taps[3];       // flipped taps along T,R,S
  int pos_tiles;     // ceil(positions / BLK_POS)
  int first_tile;    // of the launch's tiles
};

template <class Traits>
struct ConvTransposeKernelParams {
  KernelSlab<Traits> slabs[kMaxSlabs];
  CUtensorMap w[Traits::SPLITS];
  EpilogueParams<typename Traits::Activation> epilogue;
  int num_slabs;
  int kernel[3];  // T,R,S
  int c_blocks;   // ceil(C / BLK_C)
  int k_tiles;    // ceil(K / BLK_K)
  int num_tiles;  // N * k_tiles * pos_tiles of all slabs
};

/// The tiles of one block, in launch order: slab by slab, then by sample, positions, and channels innermost,
/// so that neighbours share x in L2. Slabs come with the costliest first, so that the last wave is short.
template <class Traits>
class TileWalk {
 public:
  using Params = ConvTransposeKernelParams<Traits>;
  using Slab = KernelSlab<Traits>;

  CUTLASS_DEVICE explicit TileWalk(Params const& params) : params_(params), tile_(blockIdx.x) { find_slab(); }

  CUTLASS_DEVICE bool valid() const { return tile_ < params_.num_tiles; }
  CUTLASS_DEVICE void next() {
    tile_ += gridDim.x;
    find_slab();
  }

  CUTLASS_DEVICE Slab const& slab() const { return params_.slabs[slab_]; }
  /// First position within the slab, first channel, and sample of the tile.
  CUTLASS_DEVICE EpilogueCoord coord() const {
    int const local = tile_ - slab().first_tile;
    int const pos_tile = local / params_.k_tiles;
    return {pos_tile / slab().pos_tiles, local % params_.k_tiles * Traits::BLK_K,
            pos_tile % slab().pos_tiles * Traits::BLK_POS};
  }

 private:
  CUTLASS_DEVICE void find_slab() {
    while (slab_ + 1 < params_.num_slabs && tile_ >= params_.slabs[slab_ + 1].first_tile) ++slab_;
  }

  Params const& params_;
  int tile_;
  int slab_ = 0;
};

/// Producer: one thread issues the loads of every k-block of every tile.
template <class Traits>
CUTLASS_DEVICE void load_tiles(ConvTransposeKernelParams<Traits> const& params,
                               typename Traits::SharedStorage& shared, typename Traits::Pipeline& pipeline) {
  auto write = cutlass::make_producer_start_state<typename Traits::Pipeline>();
  for (TileWalk<Traits> walk(params); walk.valid(); walk.next()) {
    EpilogueCoord const coord = walk.coord();
    KernelSlab<Traits> const& slab = walk.slab();
    int q, p;
    int const z = slab.output.height.divmod(p, slab.output.width.divmod(q, coord.position));
    int const d = z + slab.corner[0], h = p + slab.corner[1], w = q + slab.corner[2];
    for (int t = 0; t < slab.taps[0]; ++t) {
      for (int r = 0; r < slab.taps[1]; ++r) {
        for (int s = 0; s < slab.taps[2]; ++s) {
          // w is not flipped in memory: tap T-1-t'
          int const tap_t = params.kernel[0] - 1 - slab.tap_begin[0] - t;
          int const tap_r = params.kernel[1] - 1 - slab.tap_begin[1] - r;
          int const tap_s = params.kernel[2] - 1 - slab.tap_begin[2] - s;
          int const tap = (tap_t * params.kernel[1] + tap_r) * params.kernel[2] + tap_s;
          for (int c_block = 0; c_block < params.c_blocks; ++c_block) {
            pipeline.producer_acquire(write);
            std::uint64_t* const barrier = pipeline.producer_get_barrier(write);
            int const c = c_block * Traits::BLK_C;
            CUTLASS_PRAGMA_UNROLL
            for (int split = 0; split < Traits::SPLITS; ++split) {
              int const slot = write.index() * Traits::SPLITS + split;
              cute::SM90_TMA_LOAD_IM2COL_5D::copy(
                  &slab.x[split], barrier, shared.x + slot * (Traits::BLK_POS * Traits::BLK_C), c, w, h, d,
                  coord.n, std::uint16_t(s), std::uint16_t(r), std::uint16_t(t));
              // Every tile reads these channels' rows of w for all taps: w is what must stay in L2.
              cute::SM90_TMA_LOAD_3D::copy(
                  &params.w[split], barrier, std::uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                  shared.w + slot * (Traits::BLK_K * Traits::BLK_C), c, coord.channel, tap);
            }
            ++write;
          }
        }
      }
    }
  }
  pipeline.producer_tail(write);
}

/// acc = sum over k-blocks of w*x, accumulated by the tensor cores throughout.
template <class Pipeline, class TiledMma, class FragmentW, class FragmentX, class Accumulator>
CUTLASS_DEVICE void mma_one_product(Pipeline& pipeline,
                                    typename cutlass::PipelineState<Pipeline::Stages>& read, int k_blocks,
                                    TiledMma& mma, FragmentW const& w, FragmentX const& x, Accumulator& acc) {
  auto release = read;
  mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
  auto const multiply = [&] {
    pipeline.consumer_wait(read);
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int kb = 0; kb < cute::size<2>(w); ++kb) {
      cute::gemm(mma, w(cute::_, cute::_, kb, read.index()), x(cute::_, cute::_, kb, read.index()), acc);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    ++read;
  };
  multiply();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int k_block = 1; k_block < k_blocks; ++k_block) {
    multiply();
    cute::warpgroup_wait<1>();  // the batch before this one is done: its stage may be refilled
    pipeline.consumer_release(release);
    ++release;
  }
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(acc);
  pipeline.consumer_release(release);
}

/// acc = sum over k-blocks of (w_hi*x_lo + w_lo*x_hi + w_hi*x_hi), the small products first; each k-block's
/// 192 terms are summed by the tensor cores and promoted into acc by float additions.
template <class Pipeline, class TiledMma, class FragmentW, class FragmentX, class Accumulator>
CUTLASS_DEVICE void mma_three_products(Pipeline& pipeline,
                                       typename cutlass::PipelineState<Pipeline::Stages>& read, int k_blocks,
                                       TiledMma& mma, FragmentW const& w, FragmentX const& x,
                                       Accumulator& acc) {
  constexpr int kSplitOfW[3] = {0, 1, 0};
  constexpr int kSplitOfX[3] = {1, 0, 0};
  auto partial = cute::make_fragment_like(acc);
  cute::clear(acc);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    pipeline.consumer_wait(read);
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(partial);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int product = 0; product < 3; ++product) {
      int const w_slot = 2 * read.index() + kSplitOfW[product];
      int const x_slot = 2 * read.index() + kSplitOfX[product];
      CUTLASS_PRAGMA_UNROLL
      for (int kb = 0; kb < cute::size<2>(w); ++kb) {
        cute::gemm(mma, w(cute::_, cute::_, kb, w_slot), x(cute::_, cute::_, kb, x_slot), partial);
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(partial);
    pipeline.consumer_release(read);
    ++read;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) acc(i) += partial(i);
  }
}

/// Consumers: two warpgroups multiply the tiles that load_tiles brings, and run the epilogue.
template <class Traits>
CUTLASS_DEVICE void multiply_tiles(ConvTransposeKernelParams<Traits> const& params,
                                   typename Traits::SharedStorage& shared,
                                   typename Traits::Pipeline& pipeline) {
  using namespace cute;
  int const thread = threadIdx.x - 128;
  int const warpgroup = thread / 128;
  Tensor sX =
      make_tensor(make_smem_ptr(shared.x), typename Traits::SmemLayoutX{});  // (BLK_POS,BLK_C,SPLITS*PIPE)
  Tensor sW =
      make_tensor(make_smem_ptr(shared.w), typename Traits::SmemLayoutW{});  // (BLK_K,BLK_C,SPLITS*PIPE)
  typename Traits::TiledMma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  Tensor tCrW = thread_mma.make_fragment_A(thread_mma.partition_A(sW));  // (MMA,MMA_K,BLK_C/16,SPLITS*PIPE)
  Tensor tCrX = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (MMA,MMA_POS,BLK_C/16,SPLITS*PIPE)
  Tensor acc =
      partition_fragment_C(mma, Shape<Int<Traits::BLK_K>, Int<Traits::BLK_POS>>{});  // ((2,2,WG_POS/8),1,1)

  char* const staging = shared.staging + warpgroup * Traits::Epilogue::kBytes;
  cutlass::PipelineState<Traits::PIPE> read;
  for (TileWalk<Traits> walk(params); walk.valid(); walk.next()) {
    KernelSlab<Traits> const& slab = walk.slab();
    int const k_blocks = slab.taps[0] * slab.taps[1] * slab.taps[2] * params.c_blocks;
    if constexpr (Traits::PRODUCTS == 1) {
      mma_one_product(pipeline, read, k_blocks, mma, tCrW, tCrX, acc);
    } else {
      mma_three_products(pipeline, read, k_blocks, mma, tCrW, tCrX, acc);
    }
    EpilogueCoord coord = walk.coord();
    coord.channel += warpgroup % Traits::WARPGROUPS_K * 64;
    coord.position += warpgroup / Traits::WARPGROUPS_K * Traits::WG_POS;
    Traits::Epilogue::run(params.epilogue, slab.output, coord, acc, staging, 1 + warpgroup);
  }
  cute::tma_store_wait<0>();  // shared memory must outlive the stores that read it
}

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, 1)
    conv_transpose_relu_moments_sm90(__grid_constant__ const ConvTransposeKernelParams<Traits> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw_shared[];
  // 128-byte swizzled tiles must start on 1024-byte boundaries.
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(
      (reinterpret_cast<std::uintptr_t>(raw_shared) + 1023) / 1024 * 1024);
  using Pipeline = typename Traits::Pipeline;
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

  typename Pipeline::Params pipeline_params;
  pipeline_params.role =
      warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  pipeline_params.is_leader = threadIdx.x == 0;
  pipeline_params.num_consumers = Traits::CONSUMERS;
  pipeline_params.transaction_bytes = Traits::STAGE_BYTES;
  Pipeline pipeline(shared.pipeline, pipeline_params, cute::Shape<cute::_1, cute::_1, cute::_1>{});
  __syncthreads();

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load_tiles<Traits>(params, shared, pipeline);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::CONSUMER_REGISTERS>();
    multiply_tiles<Traits>(params, shared, pipeline);
  }
#endif
}

/// Encodes the descriptors of all slabs.
template <class Traits>
ConvTransposeKernelParams<Traits> make_kernel_params(const ConvTransposeParams& params, DType operand,
                                                     DType activation) {
  using Epilogue = typename Traits::Epilogue;
  const Problem& problem = params.problem;
  const std::vector<Slab> slabs = border_slabs(problem, params.split_axes);
  if (slabs.size() > kMaxSlabs) {
    throw std::logic_error("upconv3d: the SM90 kernel takes at most " + std::to_string(kMaxSlabs) +
                           " slabs; got " + std::to_string(slabs.size()) + " for " + describe(problem) +
                           ". select_plan must cut fewer axes.");
  }
  ConvTransposeKernelParams<Traits> kernel_params{};
  const void* const x[2] = {params.x_hi, params.x_lo};
  const void* const w[2] = {params.w_hi, params.w_lo};
  for (int split = 0; split < Traits::SPLITS; ++split) {
    kernel_params.w[split] = encode_w(problem, operand, w[split], Traits::BLK_K, Traits::BLK_C);
  }
  const std::int64_t k_tiles = ceil_div(problem.k, Traits::BLK_K);
  std::int64_t num_tiles = 0, moment_tiles = 0;
  for (const Slab& slab : slabs) {
    KernelSlab<Traits>& to = kernel_params.slabs[kernel_params.num_slabs++];
    for (int split = 0; split < Traits::SPLITS; ++split) {
      const SlabInput input =
          encode_slab_input(problem, slab, operand, x[split], Traits::BLK_POS, Traits::BLK_C);
      to.x[split] = input.x;
      std::copy_n(input.corner, 3, to.corner);
    }
    to.output.a = encode_slab_output(problem, slab, activation, params.a, Epilogue::kStagePositions,
                                     Epilogue::kPanelChannels);
    to.output.width = cutlass::FastDivmod(static_cast<int>(slab.extent[2]));
    to.output.height = cutlass::FastDivmod(static_cast<int>(slab.extent[1]));
    to.output.positions = static_cast<int>(slab.positions());
    to.output.first_tile = static_cast<int>(moment_tiles);
    for (int axis = 0; axis < 3; ++axis) {
      to.output.origin[axis] = static_cast<int>(slab.origin[axis]);
      to.tap_begin[axis] = static_cast<int>(slab.tap_begin[axis]);
      to.taps[axis] = static_cast<int>(slab.taps[axis]);
      kernel_params.kernel[axis] = static_cast<int>(problem.kernel[axis]);
    }
    const std::int64_t pos_tiles = ceil_div(slab.positions(), Traits::BLK_POS);
    to.pos_tiles = static_cast<int>(pos_tiles);
    to.first_tile = static_cast<int>(num_tiles);
    num_tiles += problem.n * pos_tiles * k_tiles;
    moment_tiles += ceil_div(slab.positions(), Traits::WG_POS);
  }
  if (std::max(num_tiles, problem.positions()) > kMaxSm90Count) {
    throw std::logic_error("upconv3d: the SM90 kernel counts up to " + std::to_string(kMaxSm90Count) +
                           " tiles or positions; got " + std::to_string(num_tiles) + " tiles for " +
                           describe(problem) + ". select_plan must choose another plan.");
  }
  const Extent3 out = problem.out();
  kernel_params.epilogue = {static_cast<typename Traits::Activation*>(params.a),
                            static_cast<const typename Traits::Activation*>(params.bias),
                            params.unscale_sample,
                            params.unscale_column,
                            reinterpret_cast<float2*>(params.part),
                            params.counts,
                            {static_cast<int>(out[0]), static_cast<int>(out[1]), static_cast<int>(out[2])},
                            static_cast<int>(problem.k),
                            static_cast<int>(moment_tiles)};
  kernel_params.c_blocks = static_cast<int>(ceil_div(problem.c, Traits::BLK_C));
  kernel_params.k_tiles = static_cast<int>(k_tiles);
  kernel_params.num_tiles = static_cast<int>(num_tiles);
  return kernel_params;
}

/// Launches one persistent block per multiprocessor.
template <class Operand, int PRODUCTS, class Activation, int BLK_K, int BLK_POS>
void launch_conv_transpose_relu_moments_sm90(const ConvTransposeParams& params, cudaStream_t stream) {
  using Traits = ConvTransposeTraitsSm90<Operand, PRODUCTS, Activation, BLK_K, BLK_POS>;
  const DType operand = std::is_same_v<Operand, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
  const DType activation = std::is_same_v<Activation, float> ? DType::kFloat32 : operand;
  const auto kernel_params = make_kernel_params<Traits>(params, operand, activation);
  const auto kernel = conv_transpose_relu_moments_sm90<Traits>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::SMEM_BYTES),
        "reserving shared memory for conv_transpose_relu_moments_sm90");
  const int blocks = std::min(kernel_params.num_tiles, params.sm_count);
  kernel<<<blocks, Traits::THREADS, Traits::SMEM_BYTES, stream>>>(kernel_params);
  check_launch("conv_transpose_relu_moments_sm90");
}

}  // namespace upconv3d::cuda
