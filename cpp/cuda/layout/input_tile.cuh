// SPDX-License-Identifier: Apache-2.0
/// \file
/// x to [N,groups,D,H,W,operand_channels] in 16 bit, a tile of positions and channels per block of 256
/// threads. One path per layout of x; both measure, on request, the largest |x| of each (sample, channel) as
/// it passes.
///
///   [N,C,D,H,W]: channels, which lie far apart, become innermost through shared memory. A warp reads 8
///                channels of 128 positions, 16 bytes a thread; 8 threads write the 128 bytes of a row.
///                weight_lines.cuh takes dense weights the same way.
///   [N,D,H,W,C]: x streams by, 16 bytes a thread.
///
/// Either has 128 bytes a thread in flight, enough to hide the latency of memory at four blocks per SM.
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
  std::int64_t channels;         // C
  std::int64_t positions;        // D*H*W
  std::uint32_t pitch;           // operand_channels: of a group, and zeros behind them
  std::uint32_t groups;          // of the convolution
  std::uint32_t group_channels;  // C/groups
  std::uint32_t position_tiles;
  std::uint32_t channel_tiles;  // [N,C,D,H,W]: those of the first group, then those of the next
  std::uint32_t lanes;  // [N,D,H,W,C] only: threads that share out the channels of a position, or a stretch
};

/// threadIdx.x, read anew: repack calls the tile functions in a loop, and the compiler would carry every
/// address that depends on the thread alone through it, in three times the registers.
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

template <Scaling kScaling>
using InputElement = std::conditional_t<kScaling == Scaling::kNone, std::uint16_t, float>;

/// kCount neighbouring elements past the caches: x is read once, and the operands should stay in L2.
template <int kCount>
__device__ inline void load_once(const float* source, float (&v)[kCount]) {
  if constexpr (kCount == 4) {
    const float4 q = __ldcs(reinterpret_cast<const float4*>(source));
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    v[0] = __ldcs(source);
  }
}
template <int kCount>
__device__ inline void load_once(const std::uint16_t* source, std::uint16_t (&v)[kCount]) {
  if constexpr (kCount == 4) {
    const ushort4 q = __ldcs(reinterpret_cast<const ushort4*>(source));
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    v[0] = __ldcs(source);
  }
}

template <int kProducts>
__device__ inline OneFactor assumed_scale() {
  return {static_cast<float>(1 << assumed_exponent(kProducts))};
}

/// The chosen power of two of a sample and channel; past C that of the last channel again.
__device__ inline PowerOfTwo chosen_power(const InputArgs& args, std::int64_t n, std::int64_t channel) {
  return power_of_two(args.sample[n] + args.channel[min(channel, args.channels - 1)]);
}

// ---- [N,C,D,H,W] ----

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
/// \param absmax of the warp's first channel
/// \param seen   lane j: that of the j-th channel at any time before, of no channel the largest number. Where
///               it is no less, there is nothing to raise. Thus most tiles spare the atomics, which would
///               queue up at the few addresses of a sample.
__device__ inline void record_warp_absmax(std::uint32_t* absmax, std::uint32_t seen,
                                          const float (&values)[8][4]) {
  std::uint32_t own = warp_absmax<false>(values);
  if (__any_sync(kAllLanes, own >= kInfinityBits)) own = warp_absmax<true>(values);  // seldom
  if (own > seen) atomicMax(absmax + threadIdx.x % 32, own);
}

/// Scales before the values are gathered by position, which spares registers for 8 channels' powers. What
/// would become zero becomes the smallest float instead, for encode to see that it was none; that changes no
/// result.
__device__ inline void scale_in_place(const InputArgs& args, std::int64_t n, std::int64_t channel,
                                      float (&values)[8][4]) {
  const float smallest = __uint_as_float(1u);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const PowerOfTwo power = chosen_power(args, n, channel + j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = power.times(values[j][i]);
      values[j][i] = scaled == 0.0f && values[j][i] != 0.0f ? copysignf(smallest, values[j][i]) : scaled;
    }
  }
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

/// For tile functions whose caller has nothing to do between the maxima and the stores.
struct Nothing {
  __device__ void operator()() const {}
};

/// A tile of 128 positions x 64 channels. kVector is 4 where D*H*W is a multiple of 4 and x is aligned to 4
/// elements, else 1.
///
/// \param rows     (args, n, group, first_position, row) yields the packed row of a position
/// \param measured called by all threads once their maxima are recorded and a barrier has passed, before
///                 anything is stored: a fence then need not wait for the tile's stores
template <Scaling kScaling, int kVector, int kProducts, class Rows, class Measured>
__device__ inline void pack_ncdhw_tile(const InputArgs& args, const InputTile& tile, const Rows& rows,
                                       const Measured& measured) {
  using T = InputElement<kScaling>;
  TransposeTile<kProducts>& staged = staged_tile<kProducts>();
  const int thread = thread_of_block();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const std::int64_t first_position = tile.position * kTilePositions;
  const std::uint32_t group_tiles = args.channel_tiles / args.groups;
  const std::uint32_t group = tile.channel / group_tiles;
  const std::uint32_t first_in_group = tile.channel % group_tiles * kTileChannels;
  const std::uint32_t in_group = first_in_group + warp * 8;
  const std::int64_t channel = static_cast<std::int64_t>(group) * args.group_channels + in_group;

  if (in_group < args.pitch) {
    const T* const source =
        static_cast<const T*>(args.x) + (tile.n * args.channels + channel) * args.positions + first_position;
    std::uint32_t* const absmax = args.x_absmax + tile.n * args.channels + channel;
    std::uint32_t seen = kInfinityBits;
    if constexpr (kScaling == Scaling::kAssumed) {
      // Past L1, which would keep the first value.
      if (lane < 8 && in_group + lane < args.group_channels) seen = __ldcg(absmax + lane);
    }
    T values[8][4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; i += kVector) {
        const int p = tile_position<kVector>(lane, i);
        T part[kVector];
        if (in_group + j >= args.group_channels || first_position + p >= args.positions) continue;
        load_once(source + j * args.positions + p, part);
#pragma unroll
        for (int q = 0; q < kVector; ++q) values[j][i + q] = part[q];
      }
    }
    if constexpr (kScaling == Scaling::kAssumed) record_warp_absmax(absmax, seen, values);
    if constexpr (kScaling == Scaling::kChosen) scale_in_place(args, tile.n, channel, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = values[j][i];
      SplitWords<8> words;
      if constexpr (kScaling == Scaling::kNone) {
        words = encode(eight);
      } else if constexpr (kScaling == Scaling::kAssumed) {
        words = encode<kProducts>(eight, assumed_scale<kProducts>());
      } else {
        words = encode<kProducts>(eight, OneFactor{1.0f});
      }
      const int row = tile_position<kVector>(lane, i);
      const int slot = tile_slot<kVector>(row, warp);
      staged.hi[row][slot] = vector_of(words.hi);
      if constexpr (kProducts == 3) staged.lo[row][slot] = vector_of(words.lo);
    }
  }
  __syncthreads();
  measured();

#pragma unroll
  for (int i = 0; i < kTilePositions * kTileVectors / kInputThreads; ++i) {
    const int item = i * kInputThreads + thread;
    const int row = item / kTileVectors;
    const int vector = item % kTileVectors;
    const std::uint32_t out_channel = first_in_group + vector * 8;
    if (first_position + row >= args.positions || out_channel >= args.pitch) continue;
    const std::int64_t out_row = rows(args, tile.n, group, first_position, row);
    const int slot = tile_slot<kVector>(row, vector);
    store_eight(args.hi, out_row, out_channel, args.pitch, staged.hi[row][slot]);
    if constexpr (kProducts == 3) {
      store_eight(args.lo, out_row, out_channel, args.pitch, staged.lo[row][slot]);
    }
  }
}

// ---- [N,D,H,W,C], float32 ----

/// Where channel `packed` of all groups' rows side by side, zeros included, comes from.
struct PackedChannel {
  std::uint32_t group;
  std::uint32_t within;  // the group; of zeros no less than group_channels

  __device__ PackedChannel(const InputArgs& args, std::uint32_t packed)
      : group(packed / args.pitch), within(packed - group * args.pitch) {}
  __device__ bool is_zero(const InputArgs& args) const { return within >= args.group_channels; }
  __device__ std::int64_t channel(const InputArgs& args) const {
    return static_cast<std::int64_t>(group) * args.group_channels + within;
  }
};

/// Positions that a thread packs: 128 bytes with 16-byte loads, 64 where x only allows single floats.
template <int kVector>
inline constexpr int kThreadPositions = kVector == 4 ? 8 : 16;

/// Positions of a tile.
template <int kVector>
__host__ __device__ inline std::uint32_t ndhwc_tile_positions(std::uint32_t lanes) {
  return kInputThreads / lanes * kThreadPositions<kVector>;
}

/// Largest finite |x| of the tile's channels, to x_absmax. All threads of the block call it.
template <int kVector, int kCount>
__device__ inline void record_block_absmax(const InputArgs& args, const InputTile& tile,
                                           const float (&values)[kCount][kVector]) {
  __shared__ std::uint32_t block_largest[kVector][kInputThreads];
  const std::uint32_t lane = threadIdx.x % args.lanes;
#pragma unroll
  for (int j = 0; j < kVector; ++j) block_largest[j][threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, magnitude(values[i][j]));
    if (largest >= kInfinityBits) {  // seldom: leave non-finite values out
      largest = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest = max(largest, finite_magnitude(values[i][j]));
    }
    if (largest != 0) atomicMax(&block_largest[j][lane], largest);
  }
  __syncthreads();
  const std::uint32_t first = tile.channel * args.lanes * kVector;
  const std::uint32_t count = min(args.lanes * kVector, args.groups * args.pitch - first);
  for (std::uint32_t i = threadIdx.x; i < count; i += kInputThreads) {
    const std::uint32_t largest = block_largest[i % kVector][i / kVector];
    if (largest == 0) continue;  // as zeros behind a group are
    const std::int64_t channel = PackedChannel(args, first + i).channel(args);
    atomicMax(args.x_absmax + tile.n * args.channels + channel, largest);
  }
}

/// A tile of ndhwc_tile_positions x (lanes * kVector) channels, zeros behind a group among them. kVector is 4
/// where C/groups is a multiple of 4 and x is 16-byte aligned, else 1.
///
/// \param measured as for pack_ncdhw_tile
template <Scaling kScaling, int kVector, int kProducts, class Measured>
__device__ inline void pack_ndhwc_tile(const InputArgs& args, const InputTile& tile,
                                       const Measured& measured) {
  constexpr int kPositions = kThreadPositions<kVector>;
  const std::uint32_t lane = threadIdx.x % args.lanes;
  const std::uint32_t row = threadIdx.x / args.lanes;
  const std::uint32_t rows = kInputThreads / args.lanes;  // positions side by side; the last threads may idle
  const std::uint32_t packed = (tile.channel * args.lanes + lane) * kVector;
  const PackedChannel from(args, packed);
  const std::int64_t channel = from.channel(args);
  const std::int64_t first_position = tile.position * (rows * kPositions) + row;
  const bool in_channels = row < rows && from.group < args.groups;
  const bool has_values = in_channels && !from.is_zero(args);
  const std::int64_t first = (tile.n * args.positions + first_position) * args.channels + channel;
  const std::int64_t step = rows * args.channels;
  const float* const x = static_cast<const float*>(args.x);

  float values[kPositions][kVector] = {};
#pragma unroll
  for (int i = 0; i < kPositions; ++i) {
    const bool inside = has_values && first_position + i * rows < args.positions;
    if (inside) load_once(x + first + i * step, values[i]);
  }
  if constexpr (kScaling == Scaling::kAssumed) {
    record_block_absmax(args, tile, values);
    __syncthreads();
    measured();
  }
  if (!in_channels) return;

  const auto scale = [&] {
    if constexpr (kScaling == Scaling::kAssumed) {
      return assumed_scale<kProducts>();
    } else {
      PowerEach<kVector == 4 ? 4 : 2> chosen;  // encode takes pairs
#pragma unroll
      for (int j = 0; j < (kVector == 4 ? 4 : 2); ++j) {
        chosen.power[j] = chosen_power(args, tile.n, channel + j);
      }
      return chosen;
    }
  }();
  const std::int64_t out_row = (tile.n * args.groups + from.group) * args.positions + first_position;
#pragma unroll
  for (int i = 0; i < kPositions; ++i) {
    if (first_position + i * rows >= args.positions) break;
    const std::int64_t out = (out_row + i * rows) * args.pitch + from.within;
    if constexpr (kVector == 4) {
      const SplitWords<4> words = encode<kProducts>(values[i], scale);
      *reinterpret_cast<uint2*>(args.hi + out) = {words.hi[0], words.hi[1]};
      if constexpr (kProducts == 3) *reinterpret_cast<uint2*>(args.lo + out) = {words.lo[0], words.lo[1]};
    } else {
      const float pair[2] = {values[i][0], 0.0f};
      const SplitWords<2> words = encode<kProducts>(pair, scale);
      args.hi[out] = static_cast<std::uint16_t>(words.hi[0]);
      if constexpr (kProducts == 3) args.lo[out] = static_cast<std::uint16_t>(words.lo[0]);
    }
  }
}

/// Either layout.
template <bool kChannelsFirst, Scaling kScaling, int kVector, int kProducts, class Measured>
__device__ inline void pack_input_tile(const InputArgs& args, const InputTile& tile,
                                       const Measured& measured) {
  if constexpr (kChannelsFirst) {
    pack_ncdhw_tile<kScaling, kVector, kProducts>(args, tile, InputRows{}, measured);
  } else {
    pack_ndhwc_tile<kScaling, kVector, kProducts>(args, tile, measured);
  }
}

/// 4 where x can be read four elements at a time, else 1.
inline int input_vector(const PackParams& params) {
  const Problem& problem = params.problem;
  const std::int64_t innermost =
      problem.x_layout == Layout::kNCDHW ? volume(problem.in) : group_inputs(problem);
  const auto bytes = static_cast<std::uintptr_t>(4 * size_of(problem.dtype));
  return innermost % 4 == 0 && reinterpret_cast<std::uintptr_t>(params.x) % bytes == 0 ? 4 : 1;
}

/// \throws std::invalid_argument where the tiles are more than a grid takes.
InputArgs input_args(const PackParams& params, int vector);

inline std::uint32_t input_tiles(const InputArgs& args, const Problem& problem) {
  return static_cast<std::uint32_t>(problem.n) * args.channel_tiles * args.position_tiles;
}

}  // namespace upconv3d::cuda
