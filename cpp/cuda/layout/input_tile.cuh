// SPDX-License-Identifier: Apache-2.0
/// \file
/// x to [N,groups,D,H,W,operand_channels] in 16 bit, a tile of positions and channels per block of 256
/// threads. One path per layout of x, here that of [N,C,D,H,W]; both measure, on request, the largest |x| of
/// each (sample, channel) as it passes.
///
///   [N,C,D,H,W]: channels, which lie far apart, become innermost through shared memory. A warp reads 8
///                channels of 128 positions, 16 bytes a thread; 8 threads write the 128 bytes of a row.
///                Dense weights go the same way (weight_lines.cuh, scaled_weight_tile.cuh).
///   [N,D,H,W,C]: x streams by, 16 bytes a thread (ndhwc_tile.cuh).
///
/// Either has 128 bytes a thread in flight, float32 while it works on the tile before (awaited_tile.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "cuda/layout/operand_scale.cuh"

namespace upconv3d::cuda {

inline constexpr int kInputThreads = 256;
inline constexpr int kInputWarps = kInputThreads / 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct InputArgs {
  const void* x;                 // [N,C,D,H,W] or [N,D,H,W,C] float or 16 bit
  std::uint16_t* hi;             // [N,groups,D,H,W,pitch] 16 bit
  std::uint16_t* lo;             // [N,groups,D,H,W,pitch] 16 bit, three products only
  const std::int32_t* sample;    // [N] int32, Scaling::kChosen only
  const std::int32_t* channel;   // [C] int32, Scaling::kChosen only
  std::uint32_t* x_absmax;       // [N,C] uint32, Scaling::kAssumed only: raised
  std::uint32_t* suspect;        // [1] uint32, float only: 1 where a tile breaks the assumption
  std::int64_t channels;         // C
  std::int64_t positions;        // D*H*W
  std::uint32_t pitch;           // operand_channels: of a group, and zeros behind them
  std::uint32_t groups;          // of the convolution
  std::uint32_t group_channels;  // C/groups
  std::uint32_t position_tiles;
  std::uint32_t channel_tiles;  // [N,C,D,H,W]: those of the first group, then those of the next
  std::uint32_t lanes;  // [N,D,H,W,C] only: threads that share out the channels of a position, or a stretch
};

/// threadIdx.x, read anew: pack_scaled_operands calls the tile functions in a loop, and the compiler would
/// carry every address that depends on the thread alone through it, in three times the registers.
__device__ inline int thread_of_block() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

struct InputTile {
  std::int64_t n;
  std::int64_t position;  // index of the tile among those of the sample
  std::uint32_t channel;  // likewise
};

__device__ inline InputTile input_tile(const InputArgs& args, std::uint32_t index) {
  const std::uint32_t outer = index / args.position_tiles;
  return {outer / args.channel_tiles, index % args.position_tiles, outer % args.channel_tiles};
}

/// Four neighbouring elements in two words, or one in a word, where `is_there`, else zeros; past the caches,
/// since x is read once, and the operands should stay in L2. In PTX, since the compiler would put elements
/// into halves of registers, whose second load waits for the first.
__device__ inline void load_words_if(bool is_there, const std::uint16_t* source, std::uint32_t (&words)[2]) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\t"
      "@p ld.global.cs.v2.u32 {%0, %1}, [%2];\n\t}"
      : "=&r"(words[0]), "=&r"(words[1])
      : "l"(source), "r"(static_cast<unsigned>(is_there)));
}
__device__ inline void load_word_if(bool is_there, const std::uint16_t* source, std::uint32_t& word) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.u32 %0, 0;\n\t"
      "@p ld.global.cs.u16 %0, [%1];\n\t}"
      : "=&r"(word)
      : "l"(source), "r"(static_cast<unsigned>(is_there)));
}

/// Notes a tile's largest |x| of a channel: without such a note, all of x fits the assumption.
template <int kProducts>
__device__ inline void note_suspect(const InputArgs& args, std::uint32_t largest) {
  if (breaks_assumption<kProducts>(largest)) *args.suspect = 1;
}

template <int kProducts>
__device__ inline OneFactor assumed_scale() {
  return {static_cast<float>(1 << assumed_exponent(kProducts))};
}

inline constexpr int kTilePositions = 128;  // 4 for each thread of a warp: 512 bytes of a channel
inline constexpr int kTileChannels = 64;    // 128 bytes of a destination row: one cache line
inline constexpr int kTileVectors = kTileChannels / 8;
static_assert(kTileVectors == kInputWarps, "a warp gathers one vector of 8 channels");

/// Position of a thread's i-th element in the tile. Without 16-byte loads, neighbours take neighbours.
template <int kVector>
__device__ inline int tile_position(int lane, int i) {
  return kVector == 4 ? lane * 4 + i : i * 32 + lane;
}

/// Where vector v of a row lies in the tile: both the 8 rows that neighbouring threads write at once and the
/// 8 vectors of a row, read at once, then touch every bank once.
template <int kVector>
__device__ inline int tile_slot(int row, int vector) {
  return vector ^ ((kVector == 4 ? row / 4 : row) % kTileVectors);
}

/// Lane j of a warp: bits of the largest |x| of its j-th channel that is no NaN, and no Inf either if
/// kFinite.
template <bool kFinite>
__device__ inline std::uint32_t warp_absmax(const float (&values)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t own = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    std::uint32_t largest = 0;
    if constexpr (kFinite) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, finite_magnitude(values[j][i]));
    } else {
      float of_numbers = 0.0f;  // fmaxf passes NaN over, and takes |x| as it comes
#pragma unroll
      for (int i = 0; i < 4; ++i) of_numbers = fmaxf(of_numbers, fabsf(values[j][i]));
      largest = __float_as_uint(of_numbers);
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane == j) own = largest;
  }
  return own;
}

/// Largest finite |x| of a warp's 8 channels, to x_absmax.
///
/// \param channel the warp's first channel's place in x_absmax
/// \param seen    lane j: that of the j-th channel at any time before, of no channel the largest number. If
///                it is no less, nothing is to raise: most tiles spare the atomics, which would queue up at
///                the few addresses of a sample.
template <int kProducts>
__device__ inline void record_warp_absmax(const InputArgs& args, std::int64_t channel, std::uint32_t seen,
                                          const float (&values)[8][4]) {
  std::uint32_t own = warp_absmax<false>(values);
  if (__any_sync(kAllLanes, own >= kInfinityBits)) own = warp_absmax<true>(values);  // seldom
  if (own > seen) atomicMax(args.x_absmax + channel + threadIdx.x % 32, own);
  note_suspect<kProducts>(args, own);
}

template <int kProducts>
struct TransposeTile {
  uint4 hi[kTilePositions][kTileVectors];
  uint4 lo[kProducts == 3 ? kTilePositions : 1][kTileVectors];
};

/// The block's tile, the same for all users of it in a kernel.
template <int kProducts>
__device__ inline TransposeTile<kProducts>& staged_tile() {
  __shared__ TransposeTile<kProducts> staged;
  return staged;
}

/// Where a position of a sample and group goes in packed x [N,groups,D*H*W,pitch].
struct InputRows {
  __device__ std::int64_t operator()(const InputArgs& args, std::int64_t n, std::uint32_t group,
                                     std::int64_t first_position, int row) const {
    return (n * args.groups + group) * args.positions + first_position + row;
  }
};

/// Where a tile of [N,C,D,H,W] begins, and the 8 channels of a warp in it.
struct ChannelTile {
  std::int64_t first_position;
  std::uint32_t group;
  std::uint32_t first_in_group;  // the tile's first channel, within its group
  std::uint32_t in_group;        // the warp's, likewise
  std::int64_t channel;          // the warp's, among all

  __device__ ChannelTile(const InputArgs& args, const InputTile& tile, int warp)
      : first_position(tile.position * kTilePositions) {
    group = 0;
    first_in_group = tile.channel * kTileChannels;
    if (args.groups > 1) {  // divisions are dear
      const std::uint32_t group_tiles = args.channel_tiles / args.groups;
      group = tile.channel / group_tiles;
      first_in_group = tile.channel % group_tiles * kTileChannels;
    }
    in_group = first_in_group + warp * 8;
    channel = static_cast<std::int64_t>(group) * args.group_channels + in_group;
  }
};

/// Rows of a staged tile to where they belong. All threads call it, behind a barrier.
template <int kVector, int kProducts, class Rows>
__device__ inline void store_staged_rows(const InputArgs& args, std::int64_t n, const ChannelTile& at,
                                         int thread, const Rows& rows) {
  const TransposeTile<kProducts>& staged = staged_tile<kProducts>();
#pragma unroll
  for (int i = 0; i < kTilePositions * kTileVectors / kInputThreads; ++i) {
    const int item = i * kInputThreads + thread;
    const int row = item / kTileVectors;
    const int vector = item % kTileVectors;
    const std::uint32_t out_channel = at.first_in_group + vector * 8;
    if (at.first_position + row >= args.positions || out_channel >= args.pitch) continue;
    const std::int64_t out_row = rows(args, n, at.group, at.first_position, row);
    const int slot = tile_slot<kVector>(row, vector);
    store_eight(args.hi, out_row, out_channel, args.pitch, staged.hi[row][slot]);
    if constexpr (kProducts == 3) {
      store_eight(args.lo, out_row, out_channel, args.pitch, staged.lo[row][slot]);
    }
  }
}

/// 16 bit: a tile of 128 positions x 64 channels. kVector is 4 where D*H*W is a multiple of 4 and x is
/// aligned to 4 elements, else 1.
///
/// \param rows (args, n, group, first_position, row) yields the packed row of a position
template <int kVector, class Rows>
__device__ inline void pack_ncdhw_tile(const InputArgs& args, const InputTile& tile, const Rows& rows) {
  TransposeTile<1>& staged = staged_tile<1>();
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const ChannelTile at(args, tile, warp);
  if (at.in_group < args.pitch) {
    const std::uint16_t* const source = static_cast<const std::uint16_t*>(args.x) +
                                        (tile.n * args.channels + at.channel) * args.positions +
                                        at.first_position;
    const int channels =
        static_cast<int>(args.group_channels - at.in_group);  // below 0 where only zeros are due
    const int positions =
        static_cast<int>(min(args.positions - at.first_position, std::int64_t{kTilePositions}));
    std::uint32_t words[8][kVector == 4 ? 2 : 4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint16_t* const line = source + j * args.positions;
#pragma unroll
      for (int i = 0; i < 4; i += kVector) {
        const int p = tile_position<kVector>(lane, i);
        const bool is_there = j < channels && p < positions;
        if constexpr (kVector == 4) {
          load_words_if(is_there, line + p, words[j]);
        } else {
          load_word_if(is_there, line + p, words[j][i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint16_t eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t element = kVector == 4 ? words[j][i / 2] >> (i % 2 * 16) : words[j][i];
        eight[j] = static_cast<std::uint16_t>(element);
      }
      const int row = tile_position<kVector>(lane, i);
      staged.hi[row][tile_slot<kVector>(row, warp)] = vector_of(encode(eight).hi);
    }
  }
  __syncthreads();
  store_staged_rows<kVector, 1>(args, tile.n, at, thread, rows);
}

/// float32: such a tile by assumed scales, out of the values that its threads have taken, and its maxima.
template <int kVector, int kProducts>
__device__ inline void pack_ncdhw_values(const InputArgs& args, const InputTile& tile,
                                         const float (&values)[8][4]) {
  TransposeTile<kProducts>& staged = staged_tile<kProducts>();
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const ChannelTile at(args, tile, warp);
  if (at.in_group < args.pitch) {
    const std::int64_t absmax = tile.n * args.channels + at.channel;
    std::uint32_t seen = kInfinityBits;
    // Past L1, which would keep the first value.
    if (lane < 8 && at.in_group + lane < args.group_channels) seen = __ldcg(args.x_absmax + absmax + lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = values[j][i];
      const SplitWords<8> words = encode<kProducts>(eight, assumed_scale<kProducts>());
      const int row = tile_position<kVector>(lane, i);
      const int slot = tile_slot<kVector>(row, warp);
      staged.hi[row][slot] = vector_of(words.hi);
      if constexpr (kProducts == 3) staged.lo[row][slot] = vector_of(words.lo);
    }
    record_warp_absmax<kProducts>(args, absmax, seen, values);
  }
  __syncthreads();
  store_staged_rows<kVector, kProducts>(args, tile.n, at, thread, InputRows{});
}

}  // namespace upconv3d::cuda
