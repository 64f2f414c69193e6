// SPDX-License-Identifier: Apache-2.0
/// \file
/// The implicit GEMM of conv_transpose_grad_w_sm90: a thread that loads, two warpgroups that multiply and
/// store what they summed up.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"

#include "cuda/conv_transpose/grad_w_params_sm90.cuh"

namespace upconv3d::cuda {

/// What distinguishes a chunk's loads: its channels and its tap's offsets.
struct GradWChunk {
  int channel;            // element of a row, the first; -1: there is no such chunk
  std::uint16_t w, h, d;  // offsets

  CUTLASS_DEVICE static GradWChunk make(GradWOperandParams const& operand, int index) {
    if (index >= operand.chunks) return {-1, 0, 0, 0};
    int channel_chunk, s, r;
    int const tap = operand.channel_chunks.divmod(channel_chunk, index);
    int const t = operand.taps_r.divmod(r, operand.taps_s.divmod(s, tap));
    return {channel_chunk * operand.chunk_step, std::uint16_t(s * operand.dilation[2]),
            std::uint16_t(r * operand.dilation[1]), std::uint16_t(t * operand.dilation[0])};
  }
};

/// Where an operand's k-block begins.
struct GradWCorner {
  int w, h, d;
  CUTLASS_DEVICE GradWCorner(GradWOperandParams const& operand, int d_, int h_, int w_)
      : w(w_ * operand.step[2] + operand.lower[2]),
        h(h_ * operand.step[1] + operand.lower[1]),
        d(d_ * operand.step[0] + operand.lower[0]) {}
};

/// Loads a chunk, hi and where there is one lo.
template <class Traits>
CUTLASS_DEVICE void load_chunk(GradWOperandParams const& operand, GradWChunk const& chunk,
                               GradWCorner const& at, int n, std::uint64_t* barrier, char* to) {
  if (chunk.channel < 0) return;
  CUTLASS_PRAGMA_UNROLL
  for (int split = 0; split < Traits::SPLITS; ++split) {
    cute::SM90_TMA_LOAD_IM2COL_5D::copy(&operand.map[split], barrier, to + split * Traits::SPLIT_BYTES,
                                        chunk.channel, at.w, at.h, at.d, n, chunk.w, chunk.h, chunk.d);
  }
}

/// One thread: the chunks of every k-block of this block's units. Positions run across the ends of samples;
/// what lies past the last sample is zeros.
template <class Traits>
CUTLASS_DEVICE void load_units(GradWKernelParams const& params, char* shared, GradWControl<Traits>& control) {
  RingCursor at;
  for (int index = blockIdx.x; index < params.units; index += gridDim.x) {
    GradWUnit const unit = GradWUnit::make<Traits>(params, index);
    GradWChunk rows[Traits::ROW_CHUNKS], columns[Traits::COLUMN_CHUNKS];
    int bytes = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::ROW_CHUNKS; ++i) {
      rows[i] = GradWChunk::make(params.rows, unit.row_chunk + i);
      bytes += rows[i].channel < 0 ? 0 : Traits::SPLITS * Traits::CHUNK_BYTES;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::COLUMN_CHUNKS; ++i) {
      columns[i] = GradWChunk::make(params.columns, unit.column_chunk + i);
      bytes += columns[i].channel < 0 ? 0 : Traits::SPLITS * Traits::CHUNK_BYTES;
    }
    for (int block = unit.begin; block < unit.end; ++block) {
      int w, h, d;
      int const n =
          params.depth.divmod(d, params.height.divmod(h, params.width.divmod(w, block * Traits::BLK_POS)));
      control.stages.wait_empty(at);
      std::uint64_t* const barrier = control.stages.expect(at.slot, bytes);
      char* const to = shared + at.slot * Traits::STAGE_BYTES;
      GradWCorner const row_corner(params.rows, d, h, w), column_corner(params.columns, d, h, w);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::ROW_CHUNKS; ++i) {
        load_chunk<Traits>(params.rows, rows[i], row_corner, n, barrier, to + i * Traits::CHUNK_BYTES);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::COLUMN_CHUNKS; ++i) {
        load_chunk<Traits>(params.columns, columns[i], column_corner, n, barrier,
                           to + (Traits::ROW_CHUNKS + i) * Traits::CHUNK_BYTES);
      }
      at.advance(Traits::STAGES);
    }
  }
}

/// A warpgroup whose rows or columns lie beyond the last chunk: passes the k-blocks on.
template <class Traits>
CUTLASS_DEVICE void skip_unit(GradWUnit const& unit, RingCursor& at, GradWControl<Traits>& control) {
  for (int block = unit.begin; block < unit.end; ++block) {
    control.stages.wait_full(at);
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.stages.arrive_empty(at.slot);
    at.advance(Traits::STAGES);
  }
}

/// A consumer warpgroup's operands in shared memory.
///
/// \tparam Rows    (MMA,MMA_M,BLK_POS/16) descriptors of this warpgroup's rows in the first stage
/// \tparam Columns (MMA,MMA_N,BLK_POS/16) likewise
template <class Traits, class Rows, class Columns>
class GradWFragments {
 public:
  CUTLASS_DEVICE GradWFragments(Rows const& rows, Columns const& columns) : rows_(rows), columns_(columns) {}

  CUTLASS_DEVICE void clear_accumulator() { mma_.accumulate_ = cute::GMMA::ScaleOut::Zero; }

  /// acc += rows * columns of a stage, split 0 (hi) or 1 (lo) of each.
  template <class Accumulator>
  CUTLASS_DEVICE void multiply(int stage, int row_split, int column_split, Accumulator& acc) {
    using namespace cute;
    constexpr int kUnit = 16;  // descriptors count in 16 bytes
    int const at = stage * (Traits::STAGE_BYTES / kUnit);
    Tensor a = make_tensor(rows_.data() + (at + row_split * (Traits::SPLIT_BYTES / kUnit)), rows_.layout());
    Tensor b =
        make_tensor(columns_.data() + (at + column_split * (Traits::SPLIT_BYTES / kUnit)), columns_.layout());
    CUTLASS_PRAGMA_UNROLL
    for (int kb = 0; kb < size<2>(a); ++kb) {
      cute::gemm(mma_, a(_, _, kb), b(_, _, kb), acc);
      mma_.accumulate_ = GMMA::ScaleOut::One;
    }
  }

 private:
  typename Traits::TiledMma mma_;
  Rows rows_;
  Columns columns_;
};

/// acc = sum over the unit's k-blocks of rows * columns, accumulated by the tensor cores throughout.
template <class Traits, class Fragments, class Accumulator>
CUTLASS_DEVICE void multiply_one_product(GradWUnit const& unit, RingCursor& at, GradWControl<Traits>& control,
                                         Fragments& fragments, Accumulator& acc) {
  fragments.clear_accumulator();
  int done = -1;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int block = unit.begin; block < unit.end; ++block) {
    control.stages.wait_full(at);
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_arrive();
    fragments.multiply(at.slot, 0, 0, acc);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();  // the batch before this one is done: what it read may be overwritten
    if (done >= 0 && threadIdx.x % 32 == 0) control.stages.arrive_empty(done);
    done = at.slot;
    at.advance(Traits::STAGES);
  }
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(acc);
  if (done >= 0 && threadIdx.x % 32 == 0) control.stages.arrive_empty(done);
}

/// acc = sum over the unit's k-blocks of (hi*lo + lo*hi + hi*hi), the small products first; each k-block's
/// sum leaves the tensor cores, which truncate, for float registers, which round.
template <class Traits, class Fragments, class Accumulator>
CUTLASS_DEVICE void multiply_three_products(GradWUnit const& unit, RingCursor& at,
                                            GradWControl<Traits>& control, Fragments& fragments,
                                            Accumulator& acc) {
  cute::clear(acc);
  auto partial = cute::make_fragment_like(acc);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int block = unit.begin; block < unit.end; ++block) {
    control.stages.wait_full(at);
    fragments.clear_accumulator();
    cute::warpgroup_fence_operand(partial);
    cute::warpgroup_arrive();
    fragments.multiply(at.slot, 0, 1, partial);
    fragments.multiply(at.slot, 1, 0, partial);
    fragments.multiply(at.slot, 0, 0, partial);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(partial);
    if (threadIdx.x % 32 == 0) control.stages.arrive_empty(at.slot);
    at.advance(Traits::STAGES);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) acc(i) += partial(i);
  }
}

/// Stores a warpgroup's accumulators as they lie.
template <class Traits, class Accumulator>
CUTLASS_DEVICE void store_partial(GradWKernelParams const& params, int unit, int warpgroup,
                                  Accumulator const& acc) {
  constexpr int kBlocks = Traits::WG_COLUMNS / kGradWBlockColumns;
  static_assert(decltype(cute::size(acc))::value == 4 * kBlocks);
  float4* const to = params.partial + grad_w_partial(unit, warpgroup, kBlocks, 0, threadIdx.x % 128);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    to[i * 128] = make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3));
  }
}

/// Consumers: two warpgroups with 64 rows each and the same columns, or the same rows and half of the columns
/// each.
template <class Traits>
CUTLASS_DEVICE void multiply_units(GradWKernelParams const& params, char* shared,
                                   GradWControl<Traits>& control) {
  using namespace cute;
  using Operand = typename Traits::Operand;
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
  constexpr bool kOwnRows = Traits::ROW_CHUNKS == 2;
  int const row_chunk = kOwnRows ? warpgroup : 0;
  int const column_chunk = kOwnRows ? 0 : warpgroup * Traits::WG_COLUMN_CHUNKS;
  char* const columns_at = shared + (Traits::ROW_CHUNKS + column_chunk) * Traits::CHUNK_BYTES;
  auto thread_mma = typename Traits::TiledMma{}.get_thread_slice(threadIdx.x % 128);
  Tensor sRows =
      make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(shared + row_chunk * Traits::CHUNK_BYTES)),
                  typename Traits::SmemLayoutRows{});  // (CHUNK,BLK_POS)
  Tensor sColumns = make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(columns_at)),
                                typename Traits::SmemLayoutColumns{});          // (WG_COLUMNS,BLK_POS)
  auto const rows = thread_mma.make_fragment_A(thread_mma.partition_A(sRows));  // (MMA,MMA_M,BLK_POS/16)
  auto const columns =
      thread_mma.make_fragment_B(thread_mma.partition_B(sColumns));  // (MMA,MMA_N,BLK_POS/16)
  Tensor acc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<Int<Traits::CHUNK>, Int<Traits::WG_COLUMNS>>{});  // ((2,2,WG_COLUMNS/8),1,1)
  GradWFragments<Traits, cute::remove_cvref_t<decltype(rows)>, cute::remove_cvref_t<decltype(columns)>>
      fragments(rows, columns);
  RingCursor at;
  for (int index = blockIdx.x; index < params.units; index += gridDim.x) {
    GradWUnit const unit = GradWUnit::make<Traits>(params, index);
    if (unit.row_chunk + row_chunk >= params.rows.chunks ||
        unit.column_chunk + column_chunk >= params.columns.chunks) {
      skip_unit<Traits>(unit, at, control);
      continue;
    }
    if constexpr (Traits::PRODUCTS == 1) {
      multiply_one_product<Traits>(unit, at, control, fragments, acc);
    } else {
      multiply_three_products<Traits>(unit, at, control, fragments, acc);
    }
    store_partial<Traits>(params, index, warpgroup, acc);
  }
}

}  // namespace upconv3d::cuda
