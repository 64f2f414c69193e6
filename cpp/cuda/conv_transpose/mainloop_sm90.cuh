// SPDX-License-Identifier: Apache-2.0
/// \file
/// The implicit GEMM of conv_transpose_relu_group_norm_sm90: a producer thread that loads, two warpgroups
/// that multiply.
///
/// Where rows are a multiple of 8 positions (a swizzle atom) long, position j's input for tap r is position j
/// + r*width's for tap 0, as long as tiles end with planes (core/border_slabs.hpp: SharedLoads). One load of
/// BLK_POS + (R-1)*width positions then serves all R taps, each with a descriptor that starts r*width rows
/// later: far less traffic from L2 and into shared memory, whose bandwidth is what bounds this loop
/// otherwise. The same along the depth, where planes are small. (Along the width it would need descriptors
/// that start between atoms; those read shared memory at half the rate.)
#pragma once

#include <climits>
#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"

#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/tiles_sm90.cuh"

namespace upconv3d::cuda {

/// Loads one tap of w, BLK_K output channels from `channel` on x BLK_C input channels from `c` on; of pairs
/// 64, those of one phase.
template <class Traits, int BOXES = Traits::WARPGROUPS_K>
CUTLASS_DEVICE void load_w(KernelParams<Traits> const& params, CUtensorMap const& map, std::uint64_t* barrier,
                           char* to, int c, int channel, int tap) {
  // Every tile reads these channels' rows of w for all taps: w is what must stay in L2.
  auto const hint = std::uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
  if constexpr (Traits::READS_W_IN_PLACE) {
    if (params.w_in_place) {
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < BOXES; ++box) {
        cute::SM90_TMA_LOAD_3D::copy(&map, barrier, hint, to + box * (Traits::W_BYTES / Traits::WARPGROUPS_K),
                                     channel + box * Traits::W_BOX_K, tap, c);
      }
      return;
    }
  }
  cute::SM90_TMA_LOAD_3D::copy(&map, barrier, hint, to, c, channel, tap);
}

/// Loads what the two phases of a pair multiply by the same x: each warpgroup's 64 channels, of the tap that
/// its own phase has there, if it has one.
///
/// \param slab  the pair's first
/// \param tap   along T,R,S, counted from the first that either phase has
/// \param outer the one along pair_axis
template <class Traits>
CUTLASS_DEVICE void load_paired_w(KernelParams<Traits> const& params, int slab,
                                  RingBarriers<kMaxWUnits>& ring, RingCursor const& at, char* to, int c,
                                  int channel, int const (&tap)[3], int outer) {
  bool has[2];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    KernelSlab<Traits> const& own = params.slabs[slab + i * params.tile_slabs];
    has[i] = outer >= own.lead && outer < own.lead + own.own_taps;
  }
  constexpr int kBytes = Traits::W_BYTES / 2;
  std::uint64_t* const barrier = ring.expect(at.slot, (int(has[0]) + int(has[1])) * kBytes);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    if (!has[i]) continue;
    KernelSlab<Traits> const& own = params.slabs[slab + i * params.tile_slabs];
    int const lead[2] = {params.pair_axis == 0 ? own.lead : 0, params.pair_axis == 1 ? own.lead : 0};
    int const t = own.tap[0] - (tap[0] - lead[0]) * own.tap_step[0];
    int const r = own.tap[1] - (tap[1] - lead[1]) * own.tap_step[1];
    int const s = own.tap[2] - tap[2] * own.tap_step[2];
    load_w<Traits, 1>(params, params.w[0], barrier, to + i * kBytes, c, channel,
                      (t * params.kernel[1] + r) * params.kernel[2] + s);
  }
}

/// Producer: one thread hands out tiles and issues the loads of every k-block. Tiles are taken from a
/// counter, since their costs differ; where a tile is computed changes no bit of it.
template <class Traits>
CUTLASS_DEVICE void load_tiles(KernelParams<Traits> const& params, SharedMemory<Traits> const& shared) {
  ControlStorage<Traits>& control = *shared.control;
  RingShape const& rings = params.rings;
  RingCursor x, w, slot;
  TileCoord last_tile{.n = -1};
  for (int tile = blockIdx.x;;) {
    TileCoord const coord = tile_of_launch(params, tile);
    bool const more = tile < params.order_size;
    if (more && coord.position >= params.slabs[coord.slab].positions) {  // an empty place of the order
      tile = int(gridDim.x) + atomicAdd(params.next_tile, 1);
      continue;
    }
    control.tiles.wait_empty(slot);
    control.tile[slot.slot] = more ? note_tile(params, coord, tile) : note_end<Traits>();
    *static_cast<int volatile*>(&control.tile_sample) = more ? coord.n : INT_MAX;
    if (!more) control.last_tile = last_tile;
    control.tiles.arrive_full(slot.slot);
    slot.advance(kTileSlots);
    if (!more) break;
    last_tile = coord;
    // A few blocks leave, for group_norm_normalize, as soon as there is a sample to normalize.
    bool const last = int(blockIdx.x) >= params.tile_blocks && coord.n > 0;
    int next_tile = params.order_size;
    KernelSlab<Traits> const& slab = params.slabs[coord.slab];
    int const group = group_of(params, coord.channel);
    int const x_channel = params.x_groups > 1 ? 0 : group * params.group_c;
    int const x_sample = params.x_groups > 1 ? coord.n * params.x_groups + group : coord.n;
    int q, p;
    int const z = slab.height.divmod(p, slab.width.divmod(q, coord.position));
    int const d = z * slab.stride[0] + slab.corner[0];
    int const h = p * slab.stride[1] + slab.corner[1];
    int const v = q * slab.stride[2] + slab.corner[2];
    int const x_bytes = (Traits::BLK_POS + (slab.shared_taps - 1) * slab.shared_rows) * Traits::ROW_BYTES;
    for (int t_begin = 0; t_begin < slab.taps[0]; t_begin += slab.shared[0]) {
      for (int r_begin = 0; r_begin < slab.taps[1]; r_begin += slab.shared[1]) {
        // Asked for while the last loads are made, which hide the answer's way. Who asked before them would
        // keep a tile waiting that a block which is done could begin: a launch of few waves ends the later.
        if (!last && t_begin + slab.shared[0] >= slab.taps[0] && r_begin + slab.shared[1] >= slab.taps[1]) {
          next_tile = int(gridDim.x) + atomicAdd(params.next_tile, 1);
        }
        for (int s = 0; s < slab.taps[2]; ++s) {
          for (int c_block = slab.c_begin; c_block < slab.c_end; ++c_block) {
            int const c = c_block * Traits::BLK_C;
            CUTLASS_PRAGMA_UNROLL
            for (int split = 0; split < Traits::SPLITS; ++split) {
              control.x.wait_empty(x);
              cute::SM90_TMA_LOAD_IM2COL_5D::copy(
                  &params.maps[coord.slab].x[split], control.x.expect(x.slot, x_bytes),
                  shared.x + x.slot * rings.x_unit_bytes, x_channel + c_block * params.x_block_step, v, h, d,
                  x_sample, std::uint16_t(s * slab.dilation[2]), std::uint16_t(r_begin * slab.dilation[1]),
                  std::uint16_t(t_begin * slab.dilation[0]));
              x.advance(rings.x_units);
            }
            for (int shared_tap = 0; shared_tap < slab.shared_taps; ++shared_tap) {
              int const t = t_begin + (slab.shared[0] > 1 ? shared_tap : 0);
              int const r = r_begin + (slab.shared[0] > 1 ? 0 : shared_tap);
              if constexpr (Traits::PAIRED) {
                control.w.wait_empty(w);
                load_paired_w(params, coord.slab, control.w, w, shared.w + w.slot * Traits::W_BYTES, c,
                              coord.channel, {t, r, s}, params.pair_axis == 0 ? t : r);
                w.advance(rings.w_units);
              } else {
                // Inputs rise, taps of w fall; in a plain convolution they rise by a tap_step of -1.
                int const tap_t = slab.tap[0] - t * slab.tap_step[0];
                int const tap_r = slab.tap[1] - r * slab.tap_step[1];
                int const tap_s = slab.tap[2] - s * slab.tap_step[2];
                int const tap = (tap_t * params.kernel[1] + tap_r) * params.kernel[2] + tap_s;
                CUTLASS_PRAGMA_UNROLL
                for (int split = 0; split < Traits::SPLITS; ++split) {
                  control.w.wait_empty(w);
                  load_w(params, params.w[split], control.w.expect(w.slot, Traits::W_BYTES),
                         shared.w + w.slot * Traits::W_BYTES, c, coord.channel, tap);
                  w.advance(rings.w_units);
                }
              }
            }
          }
        }
      }
    }
    tile = next_tile;
  }
}

/// A consumer warpgroup's view of the rings.
///
/// \tparam TiledMma  that multiplies them
/// \tparam FragmentW (MMA,MMA_K,BLK_C/16) descriptors of the first unit of w
/// \tparam FragmentX (MMA,MMA_POS,BLK_C/16) descriptors of the first unit of x
template <class Traits, class TiledMma, class FragmentW, class FragmentX>
class OperandRings {
 public:
  CUTLASS_DEVICE OperandRings(ControlStorage<Traits>& control, RingShape const& rings, FragmentW const& w,
                              FragmentX const& x)
      : control_(control), rings_(rings), w_(w), x_(x) {}

  /// acc += w*x of one tap and k-block: units `w_slot` and `x_slot`, x from row `row` on, a multiple of 8.
  template <class Accumulator>
  CUTLASS_DEVICE void multiply(int w_slot, int x_slot, int row, Accumulator& acc) {
    using namespace cute;
    // Descriptors count in 16 bytes. Of what is not negative, as the compiler does not know of x_unit_bytes,
    // a division is a shift, not three instructions between the wait for operands and the first wgmma.
    constexpr int kUnit = 16;
    Tensor w = make_tensor(w_.data() + w_slot * (Traits::W_BYTES / kUnit), w_.layout());
    Tensor x = make_tensor(
        x_.data() + (x_slot * (unsigned(rings_.x_unit_bytes) / kUnit) + row * (Traits::ROW_BYTES / kUnit)),
        x_.layout());
    CUTLASS_PRAGMA_UNROLL
    for (int kb = 0; kb < size<2>(w); ++kb) {
      cute::gemm(mma_, w(_, _, kb), x(_, _, kb), acc);
      mma_.accumulate_ = GMMA::ScaleOut::One;
    }
  }
  CUTLASS_DEVICE void clear_accumulator() { mma_.accumulate_ = cute::GMMA::ScaleOut::Zero; }

  /// Waits for the splits of the next k-block's x or w; returns their slots.
  CUTLASS_DEVICE void wait_x(int (&slots)[Traits::SPLITS]) { wait(control_.x, x_at_, rings_.x_units, slots); }
  CUTLASS_DEVICE void wait_w(int (&slots)[Traits::SPLITS]) { wait(control_.w, w_at_, rings_.w_units, slots); }

  /// Passes over loads of x, and the taps that each serves, that only the other warpgroup multiplies. Waits
  /// for them all the same: of a slot that comes again, a barrier tells just two phases apart.
  CUTLASS_DEVICE void pass(int x_loads, int shared_taps) {
    int slot[Traits::SPLITS];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int load = 0; load < x_loads; ++load) {
      wait_x(slot);
      __syncwarp();
      release_x(slot);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tap = 0; tap < shared_taps; ++tap) {
        wait_w(slot);
        __syncwarp();
        release_w(slot);
      }
    }
  }

  /// This warp no longer reads the slots.
  CUTLASS_DEVICE void release_x(int const (&slots)[Traits::SPLITS]) const { release(control_.x, slots); }
  CUTLASS_DEVICE void release_w(int const (&slots)[Traits::SPLITS]) const { release(control_.w, slots); }

 private:
  template <class Barriers>
  CUTLASS_DEVICE static void wait(Barriers const& barriers, RingCursor& at, int units,
                                  int (&slots)[Traits::SPLITS]) {
    CUTLASS_PRAGMA_UNROLL
    for (int split = 0; split < Traits::SPLITS; ++split) {
      barriers.wait_full(at);
      slots[split] = at.slot;
      at.advance(units);
    }
  }
  template <class Barriers>
  CUTLASS_DEVICE static void release(Barriers const& barriers, int const (&slots)[Traits::SPLITS]) {
    if (threadIdx.x % 32 != 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int split = 0; split < Traits::SPLITS; ++split) barriers.arrive_empty(slots[split]);
  }

  TiledMma mma_;
  ControlStorage<Traits>& control_;
  RingShape const& rings_;
  FragmentW w_;
  FragmentX x_;
  RingCursor x_at_, w_at_;
};

/// \param warpgroup known as the same for a whole warp, as threadIdx.x is not: descriptors are then found in
///                  uniform registers (see uniform_shared)
template <class Traits, bool W_IN_PLACE>
CUTLASS_DEVICE auto make_operand_rings(KernelParams<Traits> const& params, SharedMemory<Traits> const& shared,
                                       int warpgroup) {
  using namespace cute;
  using Operand = typename Traits::Operand;
  using TiledMma = typename Traits::template TiledMmaOf<W_IN_PLACE>;
  using SmemLayoutW =
      std::conditional_t<W_IN_PLACE, typename Traits::SmemLayoutWInPlace, typename Traits::SmemLayoutW>;
  auto thread_mma = TiledMma{}.get_thread_slice(128 * warpgroup);
  Tensor sW =
      make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(shared.w)), SmemLayoutW{});  // (BLK_K,BLK_C)
  Tensor sX = make_tensor(make_smem_ptr(reinterpret_cast<Operand*>(shared.x)),
                          typename Traits::SmemLayoutX{});                // (BLK_POS,BLK_C)
  auto const w = thread_mma.make_fragment_A(thread_mma.partition_A(sW));  // (MMA,MMA_K,BLK_C/16)
  auto const x = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (MMA,MMA_POS,BLK_C/16)
  using FragmentW = cute::remove_cvref_t<decltype(w)>;
  using FragmentX = cute::remove_cvref_t<decltype(x)>;
  return OperandRings<Traits, TiledMma, FragmentW, FragmentX>(*shared.control, params.rings, w, x);
}

/// acc = sum over k-blocks of w*x, taps that share a load of x lying `shared_rows` rows apart in it;
/// accumulated by the tensor cores throughout.
///
/// \param beside () called once all multiplications are issued: for loads that take as long as the last ones
template <class Rings, class Accumulator, class Beside>
CUTLASS_DEVICE void mma_one_product(Rings& rings, int x_loads, int shared_taps, int shared_rows,
                                    Accumulator& acc, Beside const& beside) {
  int x_slot[1], w_slot[1], x_done[1] = {-1}, w_done[1] = {-1};
  rings.clear_accumulator();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int load = 0; load < x_loads; ++load) {
    rings.wait_x(x_slot);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tap = 0; tap < shared_taps; ++tap) {
      rings.wait_w(w_slot);
      cute::warpgroup_fence_operand(acc);
      cute::warpgroup_arrive();
      rings.multiply(w_slot[0], x_slot[0], tap * shared_rows, acc);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // the batch before this one is done: what it read may be overwritten
      if (w_done[0] >= 0) rings.release_w(w_done);
      if (tap == 0 && x_done[0] >= 0) rings.release_x(x_done);
      w_done[0] = w_slot[0];
    }
    x_done[0] = x_slot[0];
  }
  beside();
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(acc);
  rings.release_w(w_done);
  rings.release_x(x_done);
}

/// acc = sum over k-blocks of (w_hi*x_lo + w_lo*x_hi + w_hi*x_hi), the small products first; each k-block's
/// sum leaves the tensor cores, which truncate, for float registers, which round.
template <class Rings, class Accumulator>
CUTLASS_DEVICE void mma_three_products(Rings& rings, int x_loads, int shared_taps, int shared_rows,
                                       Accumulator& acc) {
  cute::clear(acc);
  auto partial = cute::make_fragment_like(acc);
  int x_slot[2], w_slot[2];
  CUTLASS_PRAGMA_NO_UNROLL
  for (int load = 0; load < x_loads; ++load) {
    rings.wait_x(x_slot);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tap = 0; tap < shared_taps; ++tap) {
      rings.wait_w(w_slot);
      rings.clear_accumulator();
      cute::warpgroup_fence_operand(partial);
      cute::warpgroup_arrive();
      rings.multiply(w_slot[0], x_slot[1], tap * shared_rows, partial);
      rings.multiply(w_slot[1], x_slot[0], tap * shared_rows, partial);
      rings.multiply(w_slot[0], x_slot[0], tap * shared_rows, partial);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(partial);
      rings.release_w(w_slot);
      if (tap + 1 == shared_taps) rings.release_x(x_slot);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(acc); ++i) acc(i) += partial(i);
    }
  }
}

}  // namespace upconv3d::cuda
