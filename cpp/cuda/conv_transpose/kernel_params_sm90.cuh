// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_relu_group_norm_sm90 is compiled for (traits), what a launch hands it (parameters),
/// and how it lays out shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

// kernel_hardware_info.hpp first: sm90 headers of CUTLASS 4.2 use it without including it.
#include "cutlass/kernel_hardware_info.hpp"

#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/collective/builders/sm90_common.inl"

#include "core/border_slabs.hpp"
#include "core/phase_pairs.hpp"
#include "core/plan.hpp"
#include "core/ring_shape.hpp"
#include "cuda/activation.hpp"
#include "cuda/conv_transpose/ring_sm90.cuh"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

/// before(conv) on its way to a float32 y at TF32's accuracy: value = (bits - zero point) * 2^step, with one
/// step per channel and partial moment. After ReLU the zero point is 0, and the error at most 2^-16 of the
/// channel's largest value there; else it is 2^15, and the error at most 2^-15 of the largest magnitude.
struct Stepped16 {
  std::uint16_t bits;
};

/// What a block may have on arch 90, and how much of it barriers and small exchanges take.
inline constexpr int kSharedMemoryBytes = 227 * 1024;
inline constexpr int kControlBytes = 3072;

/// Warps that multiply.
inline constexpr int kConsumerWarps = 8;

/// Warps that normalize at one time or another: warp 3, those that multiplied, and those that stored.
inline constexpr int kNormalizingWarps = 1 + kConsumerWarps + 2;

/// Rows of a k-block's channels in shared memory: of 128 bytes or, of half as many channels, 64.
template <class Operand, int BLK_C>
using SmemAtomOf = std::conditional_t<BLK_C == int(kBlockInputs), cute::GMMA::Layout_K_SW128_Atom<Operand>,
                                      cute::GMMA::Layout_K_SW64_Atom<Operand>>;

/// Tiles that the producer may be ahead of who stores them.
inline constexpr int kTileSlots = 4;

/// \tparam CURVED_ before() may be any activation, else ReLU or nothing: the code of the others, though no
///                 launch without one runs it, took every other launch 1 % longer
/// \tparam PAIRED_ each of the two warpgroups that multiply has a phase of its own (core/phase_pairs.hpp);
///                 asked at run time it took every other launch 1 % longer, too
template <class Operand_, int PRODUCTS_, class Stored_, int BLK_K_, int BLK_POS_,
          int BLK_C_ = int(kBlockInputs), bool CURVED_ = false, bool PAIRED_ = false>
struct ConvTransposeTraitsSm90 {
  static constexpr bool CURVED = CURVED_;
  static constexpr bool PAIRED = PAIRED_;
  using Operand = Operand_;
  using Stored = Stored_;  // before(conv) between the epilogue and the normalization
  static constexpr bool QUANTIZED = std::is_same_v<Stored, Stepped16>;
  using Output = std::conditional_t<QUANTIZED, float, Stored>;  // y, bias, gamma, beta
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int SPLITS = PRODUCTS == 3 ? 2 : 1;  // hi, or hi and lo
  static constexpr int BLK_K = BLK_K_;                  // output channels of a tile
  static constexpr int BLK_POS = BLK_POS_;              // output positions of a tile
  static constexpr int BLK_C = BLK_C_;                  // input channels of a k-block: a swizzled row
  static_assert(PRODUCTS == 1 || PRODUCTS == 3);
  static_assert(BLK_K == 64 || BLK_K == 128, "wgmma has 64 rows; two consumer warpgroups");
  static_assert(PRODUCTS == 1 || BLK_C == kBlockInputs, "rows of hi and lo alternate by whole k-blocks");

  // Two consumer warpgroups of 64 channels each; where a tile has but 64 channels they share the positions.
  static constexpr int WARPGROUPS_K = BLK_K / 64;
  static constexpr int WARPGROUPS_POS = 2 / WARPGROUPS_K;
  static constexpr int WG_POS = BLK_POS / WARPGROUPS_POS;

  /// Whether w may be [C,T,R,S,K] as PyTorch's channels_last_3d leaves it: where the operand is its own
  /// dtype.
  static constexpr bool READS_W_IN_PLACE = PRODUCTS == 1 && std::is_same_v<Stored, Operand>;

  template <bool W_IN_PLACE>
  using MmaOp =
      decltype(cute::GMMA::ss_op_selector<Operand, Operand, float,
                                          cute::Shape<cute::_64, cute::Int<WG_POS>, cute::Int<BLK_C>>,
                                          W_IN_PLACE ? cute::GMMA::Major::MN : cute::GMMA::Major::K>());
  template <bool W_IN_PLACE>
  using TiledMmaOf = decltype(cute::make_tiled_mma(
      MmaOp<W_IN_PLACE>{},
      cute::Layout<cute::Shape<cute::Int<WARPGROUPS_K>, cute::Int<WARPGROUPS_POS>, cute::_1>>{}));
  using TiledMma = TiledMmaOf<false>;  // accumulators are the same of either

  using SmemAtom = SmemAtomOf<Operand, BLK_C>;
  using SmemLayoutX = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<BLK_POS>, cute::Int<BLK_C>>{}));  // (BLK_POS,BLK_C)
  using SmemLayoutW = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<BLK_K>, cute::Int<BLK_C>>{}));  // (BLK_K,BLK_C)

  // Boxes of 64 output channels, a swizzle row, of all of a k-block's input channels; box after box.
  static constexpr int W_BOX_K = 64;
  using SmemLayoutWInPlace = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Operand>{}, cute::Shape<cute::Int<BLK_K>, cute::Int<BLK_C>>{},
      cute::Step<cute::_2, cute::_1>{}));  // (BLK_K,BLK_C)

  static constexpr int ROW_BYTES = BLK_C * int(sizeof(Operand));
  static constexpr int W_BYTES = BLK_K * ROW_BYTES;
  /// A warpgroup stages its channels and this many of its positions at a time.
  static constexpr int STAGE_ROUNDS = stage_rounds(BLK_K, BLK_POS, 8 * int(sizeof(Stored)));
  static constexpr int STAGED_POS = WG_POS / STAGE_ROUNDS;
  static constexpr int STAGING_BYTES = BLK_K * BLK_POS * int(sizeof(Stored)) / STAGE_ROUNDS;
  static constexpr int WG_STAGING_BYTES = STAGING_BYTES / 2;

  /// Whether consumers can take moments, of all positions that they stage.
  static constexpr bool TAKES_ROW_MOMENTS = sizeof(Stored) == 2 && STAGE_ROUNDS == 1;

  static_assert(!PAIRED || pairs_phases(BLK_K, BLK_POS, BLK_C, PRODUCTS, 8 * int(sizeof(Stored))));

  /// Whether the loading thread tells the block's other warps all of a tile; else every warp finds a tile by
  /// its place, which takes up to 1.4 % longer. Told of pairs, the compiler does not see that loops over
  /// k-blocks are the same for a whole warp (see uniform_note); kernels that store float32 were not tried.
  static constexpr bool TELLS_TILES = TAKES_ROW_MOMENTS && !PAIRED;

  /// Normalization items: as many positions as an eighth of what is staged has, and its channels.
  static constexpr int ITEMS_PER_TILE = 8 * STAGE_ROUNDS;
  static constexpr int ITEM_POS = BLK_POS / ITEMS_PER_TILE;
  static constexpr int ITEM_BYTES = BLK_K * ITEM_POS * int(sizeof(Stored));
  /// Items on their way into shared memory while another is normalized.
  static constexpr int ITEM_BUFFERS = 2;

  /// Whether all of a tile is staged at once, so that a block can keep its last one there until the sample's
  /// moments are known: it is normalized from shared memory, and stored once instead of twice.
  static constexpr bool KEEPS_TILE = STAGE_ROUNDS == 1 && sizeof(Stored) == 2;
  static_assert(!KEEPS_TILE || ITEMS_PER_TILE == kConsumerWarps, "each warp normalizes an item of it");

  /// What is left for the rings of x and w.
  static constexpr int RING_BYTES =
      kSharedMemoryBytes - kControlBytes - STAGING_BYTES - ITEM_BUFFERS * ITEM_BYTES;
  static_assert(RING_BYTES == ring_bytes(BLK_K, BLK_POS, 8 * int(sizeof(Stored))),
                "the planner counts loads in flight by it");

  static constexpr int THREADS = 3 * 128;  // one warpgroup of helpers, two consumer warpgroups
  // A launch takes 168 registers for each of 384 threads, and what helpers give back consumers may take: they
  // need their accumulators (up to 128) and what converts them, helpers what they have in flight.
  static constexpr int HELPER_REGISTERS = 136;
  static constexpr int CONSUMER_REGISTERS = 184;
  static_assert(128 * HELPER_REGISTERS + 256 * CONSUMER_REGISTERS <= 168 * THREADS,
                "else the launch waits for registers forever");
};

/// \param shared_rows rows that the longest load of x has beyond BLK_POS; 0 where each load serves one tap
template <class Traits>
RingShape ring_shape_of(int shared_rows) {
  return ring_shape({.bytes = Traits::RING_BYTES,
                     .x_rows = Traits::BLK_POS + shared_rows,
                     .shares_taps = shared_rows > 0,
                     .row_bytes = Traits::ROW_BYTES,
                     .w_bytes = Traits::W_BYTES,
                     .splits = Traits::SPLITS});
}

/// A tile's place.
struct TileCoord {
  int n;         // sample
  int slab;      // of a pair the first
  int channel;   // first output channel
  int position;  // first position within the slab
};

/// A tile, and what it takes to multiply it.
struct alignas(16) TileWork : TileCoord {
  int place;        // in launch order
  int positions;    // from the first one to the slab's end
  int x_loads;      // loads of x
  int shared_taps;  // that each serves
  int shared_rows;  // of x, from one of those taps to the next
};

/// What the loading thread tells of a tile: all, or its place in launch order. A negative place or sample
/// means that there are no more.
template <class Traits>
using TileNote = std::conditional_t<Traits::TELLS_TILES, TileWork, int>;

CUTLASS_DEVICE bool is_end(int place) {
  return place < 0;
}
CUTLASS_DEVICE bool is_end(TileWork const& work) {
  return work.n < 0;
}

/// Barriers and small exchanges; at the end of shared memory.
template <class Traits>
struct ControlStorage {
  RingBarriers<kMaxXUnits> x;
  RingBarriers<kMaxWUnits> w;
  RingBarriers<kTileSlots> tiles;
  RingBarriers<2> staging;  // slot: consumer warpgroup
  RingBarriers<Traits::ITEM_BUFFERS> items[kNormalizingWarps];
  TileNote<Traits> tile[kTileSlots];
  int tile_sample;      // of the last tile handed out, or INT_MAX
  TileCoord last_tile;  // once there are no more; its sample is -1 where there was none
  int handed_item[2];   // by each drain warp to consumers, where the last tile is kept; -1 for none
  // Of the slabs, for lanes that each look at another one: constant memory answers those one after the other.
  int first_tile[kMaxSlabs];
  int first_moment[kMaxSlabs];
  int last_count[kMaxSlabs];      // positions behind the slab's last partial moment
  std::int8_t step[2][64];        // Stepped16: exponents of the staged channels
  alignas(16) float2 row[2][64];  // (mean, M2) of the staged channels, where consumers_take_moments
};

/// Where a slab's positions lie in the output.
struct SlabGeometry {
  cutlass::FastDivmod width, height;  // of the slab along Q and P
  int origin[3];                      // its first z,p,q
  int step[3];                        // from one position to the next along z,p,q
  int positions;                      // of the slab

  /// z,p,q within the slab.
  CUTLASS_DEVICE int3 coordinates(int position) const {
    int q, p;
    int const z = height.divmod(p, width.divmod(q, position));
    return make_int3(z, p, q);
  }
  /// Index in [Z,P,Q] of a position. \param out Z,P,Q
  CUTLASS_DEVICE int pixel(int const (&out)[3], int position) const {
    int3 const at = coordinates(position);
    return ((at.x * step[0] + origin[0]) * out[1] + at.y * step[1] + origin[1]) * out[2] + at.z * step[2] +
           origin[2];
  }
};

/// A slab's descriptors. They begin on 128 bytes, by CUDA 13's headers: apart from the rest, which they would
/// pad to that, so that a launch's parameters are 16 KB, not 18: some 0.5 us of a kernel that does nothing.
template <class Traits>
struct SlabMaps {
  CUtensorMap x[Traits::SPLITS];  // hi, lo; just the input that the slab reads
  CUtensorMap a;     // the slab in a: boxes that are stored; tiled where channels_first, else im2col
  CUtensorMap item;  // the same, boxes that are normalized
};

template <class Traits>
struct KernelSlab : SlabGeometry {
  // What is loaded; of pairs, whose first slab has the tiles, what both read.
  int corner[3];       // first window's coordinates in x
  int stride[3];       // of x's coordinates, from one position to the next
  int dilation[3];     // of x's coordinates, from one tap to the next
  int tap[3];          // the slab's own first tap along T,R,S: the largest
  int tap_step[3];     // from one tap to the next, downwards
  int taps[3];         // taps along T,R,S
  int c_begin, c_end;  // k-blocks of input channels
  int shared[2];       // taps along T,R that one load of x serves: all of one of the two, or 1
  int shared_taps;     // their product
  int shared_rows;     // of x, from one of those taps to the next
  int x_loads;         // of a tile
  int lead;            // in pairs: taps along pair_axis before the slab's own,
  int own_taps;        // and those;
  int first_load;      // loads of x before those that serve them,
  int own_loads;       // those,
  int later_loads;     // and behind them
  int first_tile;      // of a sample's tiles
  int first_moment;    // of a sample's partial moments
  bool row_moments;    // consumers take the moments
};

/// In tiles of at most this many k-blocks, or twice as many half ones, the consumers take the moments, which
/// costs them 900 cycles: a drain warp takes 12000, in which 11 k-blocks are multiplied. Of several samples
/// the drain warps have to normalize as well, so the consumers do it in longer tiles too (27 k-blocks: 2 % of
/// a block of 16 samples gained, 1 % of one sample lost; 64 k-blocks: half a percent of 16 samples lost).
inline constexpr int kRowMomentBlocks = 16;
inline constexpr int kRowMomentBlocksOfSeveral = 32;

/// Whether consumers take the moments of all tiles of a slab, of so many k-blocks. Of 16 bits with a step
/// always: the values in steps that they sum are at hand.
template <class Traits>
bool wants_row_moments(int k_blocks, std::int64_t samples) {
  const int most = samples > 1 ? kRowMomentBlocksOfSeveral : kRowMomentBlocks;
  return Traits::TAKES_ROW_MOMENTS && (Traits::QUANTIZED || k_blocks * Traits::BLK_C <= most * kBlockInputs);
}

template <class Traits>
struct KernelParams {
  using Output = typename Traits::Output;
  SlabMaps<Traits> maps[kMaxSlabs];
  KernelSlab<Traits> slabs[kMaxSlabs];
  CUtensorMap w[Traits::SPLITS];
  CUtensorMap item;  // a as [N,Z*P*Q/fold,fold*K]: boxes that are normalized; not for Stepped16
  int num_slabs;
  int tile_slabs;                     // by which tiles are counted: all of them, or the first of each pair
  int pair_axis;                      // PAIRED: along which the slabs of a pair differ, 0 or 1
  int pair_pixels;                    // in [Z,P,Q], from a position of a pair's first slab to the second's
  bool w_in_place;                    // w is [C,T*R*S,K], not packed
  int num_counters;                   // that the launch clears, 0: they are zero before
  int kernel[3];                      // T,R,S
  int out[3];                         // Z,P,Q
  int samples;                        // N
  int k;                              // output channels K
  int pitch;                          // Stored of a row of a: of K channels, or more in y's memory or padded
  int step_pitch;                     // channels of a row of steps, K in whole units of 8
  int x_groups;                       // groups that x holds apart, as samples; else they share its rows
  int x_block_step;                   // elements of a row of x from one k-block to the next
  cutlass::FastDivmod group_k;        // output channels of a convolution group
  int group_c;                        // input channels of one
  cutlass::FastDivmod group_k_tiles;  // ceil(group_k / BLK_K): a tile's channels are one group's
  cutlass::FastDivmod k_tiles;        // of all groups
  cutlass::FastDivmod tiles_per_sample;  // k_tiles * pos_tiles of all slabs
  cutlass::FastDivmod order_per_sample;  // places in the launch order, of which tiles_per_sample hold a tile
  cutlass::FastDivmod order_per_window;  // the same per window, where the order has windows
  cutlass::FastDivmod order_per_slab;    // the same per window and slab
  cutlass::FastDivmod order_per_end_slab;  // the same where the launch's last windows are taken as one
  int first_end_window;                    // of the last sample, the first of those windows
  int first_late;                          // place from which on consumers take all moments
  int window_tiles;                        // position tiles of a window, 0: the order has no windows
  int order_size;                          // places of all samples
  int tile_blocks;                         // blocks that compute tiles to the end, and merge moments
  RingShape rings;
  Output* a;                           // [N,Z,P,Q,pitch] Stored: before(conv)
  Output* y;                           // [N,Z,P,Q,K], which may be a's memory, if this kernel normalizes
  bool normalizes;                     // else group_norm_normalize does, from channel_table, or nobody
  bool normalized_beside;              // by a launch that may begin when all blocks of this one have
  bool in_place;                       // a lies in y
  int first_kept;                      // sample from which on blocks keep their last tile; samples: none do
  bool linear;                         // a is the result: no moments either
  bool channels_first;                 // linear only: a is [N,K,Z*P*Q]
  float floor;                         // of a: 0 for ReLU, else -infinity
  ActivationParams before;             // of a, of CURVED kernels
  Output const* bias;                  // [K], or null
  std::int32_t const* unscale_sample;  // [N] exponents, or [1] with a step of 0; float32 output only
  int unscale_step;                    // from one sample's exponent to the next's
  std::int32_t const* unscale_column;  // [K] exponents, float32 output only
  std::int8_t* steps;                  // [N,moments,step_pitch] exponents, Stepped16 only
  std::int32_t* moment_of;             // [Z*P*Q] partial moment of a position, or null; Stepped16 only
  int step_bits;                       // of the largest magnitude in steps: 16, or signed 15; Stepped16 only
  float stepped_zero;                  // 2^23 + zero point (stored_origin); Stepped16 only
  // GroupNorm
  Output const* gamma;                 // [K], or null for 1
  Output const* beta;                  // [K], or null for 0
  double eps;                          // activation units squared
  ActivationParams after;              // the normalization, piecewise linear
  float2* part;                        // [N,moments,K/granule] (mean, M2)
  int moments;                         // partial moments of a sample along its positions, STAGED_POS each
  int granule_shift;                   // granule = 2^shift neighbouring channels of one group share a moment
  int groups;                          // G
  cutlass::FastDivmod group_channels;  // K/G
  cutlass::FastDivmod group_granules;  // K/G/granule
  int item_fold;                       // positions of a row of item
  int item_rows;                       // Z*P*Q/fold
  bool drains_normalize;               // between two tiles; only where consumers take the moments
  int merge_lanes;                     // that merge one group's partial moments, 1 or 32
  int merge_parts;                     // that a group's partial moments are merged in; if several, then those
  int merge_steps;                     // of a warp for a sample: 32 / merge_lanes groups or one part each
  float4* table;                       // [N,G] (mean, rest of the mean, 1/sqrt(var+eps), unused), or null
  float* channel_table;                // [3,N,K] mean, scale, shift, where this kernel does not normalize
  // Counters, one after the other; zero before the launch or cleared by it.
  int* next_tile;  // tiles handed out beyond each block's first
  int* next_item;  // normalization items handed out
  int* arrivals;   // [N] stored parts of half tiles, 2 * STAGE_ROUNDS per tile
  int* finalized;  // [N] steps whose groups are in table; of all steps kSampleMerged more
  int* kept;       // [kMaxKeepers] 1 + tile of all samples that a block keeps, or 0
};

/// An address in shared memory that the compiler knows to be the same for a whole warp. Barriers and
/// descriptors are then found in uniform registers; else it may take others, and move them at every k-block
/// between the wait for operands and the first wgmma: 30 cycles of 500 to 1000.
CUTLASS_DEVICE char* uniform_shared(char* address) {
  auto const offset = static_cast<unsigned>(__cvta_generic_to_shared(address));
  return static_cast<char*>(__cvta_shared_to_generic(__shfl_sync(0xffffffffu, offset, 0)));
}

/// The lane, which looks at a slab. In pairs it is read anew: of threadIdx.x ptxas would make the address
/// that a lane looks at once for the whole kernel, and spill it.
template <class Traits>
CUTLASS_DEVICE int slab_lane() {
  int lane = threadIdx.x % 32;
  if constexpr (Traits::PAIRED) asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// The parts of shared memory.
template <class Traits>
struct SharedMemory {
  char* x;        // [x_units] x tiles, (BLK_POS + shared rows,BLK_C) swizzled each
  char* w;        // [w_units] w tiles, (BLK_K,BLK_C) swizzled each, either operand layout
  char* staging;  // [2] half tiles of Stored on their way to memory
  char* items;    // [ITEM_BUFFERS] items on their way to be normalized
  ControlStorage<Traits>* control;

  CUTLASS_DEVICE SharedMemory(char* base, RingShape const& rings) {
    static_assert(sizeof(ControlStorage<Traits>) <= kControlBytes);
    x = base;
    w = x + rings.x_units * rings.x_unit_bytes;
    staging = base + Traits::RING_BYTES;
    items = staging + Traits::STAGING_BYTES;
    control = reinterpret_cast<ControlStorage<Traits>*>(base + kSharedMemoryBytes - kControlBytes);
  }
};

}  // namespace upconv3d::cuda
