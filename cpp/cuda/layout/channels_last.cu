// SPDX-License-Identifier: Apache-2.0
/// \file
/// channels_last_copies: x and w in the order in which cuDNN's convolutions need no copies of their own,
/// which take a launch each.
///
///   from [batch,channels,positions]  dtype
///   to   [batch,positions,channels]  dtype
///
/// A block takes one tile through shared memory, all its loads on the way at once. Where channels and
/// addresses are whole vectors of 16 bytes, a tile is a stretch (core/copy_tiles.hpp), read and written in
/// vectors: of few positions, as a weight's are, contiguous, of more those of some rows. Else it is read and
/// written value by value, at most 128 bytes of positions wide, and as many channels as fill kTileValues. A
/// larger x of 16 bit goes by the tiles of input_tile.cuh.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/copy_tiles.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/layout/channels_last.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/pack_stages.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kThreads = 256;
/// Values of a tile: eight loads of a thread on the way, and a small block's operands fill the card.
constexpr int kTileValues = 2048;
constexpr int kRounds = kTileValues / kThreads;
/// Of a row of positions that one warp reads.
constexpr std::int64_t kRowBytes = 128;
/// Channels of a tile are a multiple, so that what a warp writes is contiguous.
constexpr std::int64_t kChannelUnit = 32;

/// Of a stretch, four vectors of a thread on the way.
constexpr int kStretchRounds = int{kStretchBytes / kVectorBytes} / kThreads;
/// Stretches that fill an H200's multiprocessors twice; of fewer channels each there are more.
constexpr std::int64_t kStretchesWanted = 264;

/// Of one tensor. Extents are 32-bit, offsets are not.
template <class T>
struct CopyArgs {
  const T* from;  // [batch,channels,positions] T
  T* to;          // [batch,positions,channels] T, written
  unsigned channels, positions;
  bool stretches;  // else tile by tile, value by value
  unsigned tile_channels, tile_positions;
  unsigned per_position, per_channel;  // inverses of the tile's extents (quotient)
  unsigned across, down;               // tiles along positions and along channels
  unsigned first, tiles;               // blocks
  // Of stretches:
  bool contiguous;
  unsigned row_shift, column_shift;  // log2 of a channel's vectors, where not contiguous, and of a position's
  unsigned pad;                      // vectors behind as many as positions of the tile
};

template <class T>
struct CopiesArgs {
  CopyArgs<T> of[2];
};

/// Shared memory of a tile. Of a stretch: one vector more per vector of channels, of two positions half of
/// what it holds. Else one value more per row, so that a column's lie in different banks, at most as many as
/// there are.
template <class T>
union Staged {
  uint4 vectors[kStretchBytes / kVectorBytes * 3 / 2];
  T values[sizeof(vectors) / sizeof(T)];
  static_assert(2 * kTileValues <= sizeof(vectors) / sizeof(T));
};

/// i / extent for i < kTileValues by the extent's inverse, rounded up. That makes it too large by less than
/// 1/1024, which shows with no extent up to 1024.
constexpr int kInverseBits = 21;
constexpr std::int64_t kMostExtent = 1024;
__device__ __forceinline__ unsigned quotient(unsigned i, unsigned inverse) {
  return i * inverse >> kInverseBits;
}

/// \param at number of the tile
template <class T>
__device__ __forceinline__ void copy_tile(const CopyArgs<T>& copy, unsigned at, Staged<T>& staged) {
  T* const tile = staged.values;
  const unsigned above = at / copy.across, batch = above / copy.down;
  const unsigned position = (at - above * copy.across) * copy.tile_positions;
  const unsigned channel = (above - batch * copy.down) * copy.tile_channels;
  const unsigned rows = min(copy.tile_channels, copy.channels - channel);
  const unsigned columns = min(copy.tile_positions, copy.positions - position);
  const unsigned pitch = copy.tile_positions | 1;
  const std::uint64_t base = std::uint64_t{batch} * copy.channels * copy.positions;

  const T* const from = copy.from + base + std::uint64_t{channel} * copy.positions + position;
  T loaded[kRounds] = {};
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    const unsigned row = quotient(i, copy.per_position), column = i - row * copy.tile_positions;
    if (row < rows && column < columns) loaded[round] = from[std::uint64_t{row} * copy.positions + column];
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    const unsigned row = quotient(i, copy.per_position), column = i - row * copy.tile_positions;
    if (row < rows && column < columns) tile[row * pitch + column] = loaded[round];
  }
  __syncthreads();
  T* const to = copy.to + base + std::uint64_t{position} * copy.channels + channel;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    const unsigned column = quotient(i, copy.per_channel), row = i - column * copy.tile_channels;
    if (row < rows && column < columns) {
      to[std::uint64_t{column} * copy.channels + row] = tile[row * pitch + column];
    }
  }
}

/// The stretch's vectors as they lie, then as they are to lie. As many neighbouring channels as a vector has
/// values are as many vectors as there are positions; behind them lies another where that is even: of
/// eight neighbouring vectors of a position, the values of a channel then lie in different banks.
///
/// \param at number of the stretch
template <class T>
__device__ __forceinline__ void copy_stretch(const CopyArgs<T>& copy, unsigned at, Staged<T>& staged) {
  constexpr unsigned kLanes = kVectorBytes / sizeof(T);
  const unsigned above = at / copy.across, batch = above / copy.down;
  const unsigned position = (at - above * copy.across) * copy.tile_positions;
  const unsigned channel = (above - batch * copy.down) * copy.tile_channels;
  const unsigned rows = min(copy.tile_channels, copy.channels - channel);
  const unsigned columns = min(copy.tile_positions, copy.positions - position);
  const std::uint64_t base = std::uint64_t{batch} * copy.channels * copy.positions;

  const T* const from = copy.from + base + std::uint64_t{channel} * copy.positions + position;
  const unsigned vectors = copy.contiguous ? rows * columns / kLanes : rows << copy.row_shift;
  uint4 loaded[kStretchRounds] = {};
#pragma unroll
  for (int round = 0; round < kStretchRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    const unsigned row = copy.contiguous ? 0 : i >> copy.row_shift;
    const unsigned column = (i - (row << copy.row_shift)) * kLanes;
    if (i < vectors && (copy.contiguous || column < columns)) {
      loaded[round] =
          __ldcs(reinterpret_cast<const uint4*>(from + std::uint64_t{row} * copy.positions + column));
    }
  }
#pragma unroll
  for (int round = 0; round < kStretchRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    if (i < vectors) staged.vectors[i + copy.pad * quotient(i, copy.per_position)] = loaded[round];
  }
  __syncthreads();
  T* const to = copy.to + base + std::uint64_t{position} * copy.channels + channel;
  const unsigned pitch = (copy.tile_positions + copy.pad) * kLanes;
#pragma unroll
  for (int round = 0; round < kStretchRounds; ++round) {
    const unsigned i = threadIdx.x + round * kThreads;
    const unsigned column = i >> copy.column_shift, row = i - (column << copy.column_shift);  // a vector's
    if (column >= columns || row * kLanes >= rows) continue;
    const T* value = staged.values + row * pitch + column;
    T own[kLanes];
#pragma unroll
    for (unsigned j = 0; j < kLanes; ++j, value += copy.tile_positions) own[j] = *value;
    uint4 vector;
    memcpy(&vector, own, sizeof(vector));
    *reinterpret_cast<uint4*>(to + std::uint64_t{column} * copy.channels + row * kLanes) = vector;
  }
}

template <class T>
__device__ __forceinline__ void copy_part(const CopyArgs<T>& copy, unsigned at, Staged<T>& staged) {
  if (copy.stretches) {
    copy_stretch(copy, at, staged);
  } else {
    copy_tile(copy, at, staged);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) channels_last_copies(const CopiesArgs<T> args) {
  __shared__ Staged<T> staged;
  // A copy, not a reference: indexed parameters would go through local memory.
  const CopyArgs<T> copy = blockIdx.x >= args.of[1].first ? args.of[1] : args.of[0];
  copy_part(copy, blockIdx.x - copy.first, staged);
}

/// x by the tiles that pack operands, which read four values at a time and write eight; then w.
///
/// Blocks that share a multiprocessor are as of pack_operands.cu, for the registers of the loads.
///
/// \tparam kVector values of a load: 4 where positions are a multiple of 4 and x is 8-byte aligned, else 1
template <int kVector>
__global__ void __launch_bounds__(kInputThreads, kVector == 4 ? 5 : 4)
    channels_last_tiles(const InputArgs x, const std::uint32_t x_blocks, const CopyArgs<std::uint16_t> w) {
  static_assert(kInputThreads == kThreads, "copy_part counts threads");
  __shared__ Staged<std::uint16_t> staged;
  if (blockIdx.x < x_blocks) {
    pack_ncdhw_tile<kVector>(x, input_tile(x, blockIdx.x), InputRows{});
  } else {
    copy_part(w, blockIdx.x - x_blocks, staged);
  }
}

bool is_aligned_to(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

bool has_stretches(const ChannelsLastCopy& copy, std::int64_t element_bytes) {
  return is_copied_in_stretches(copy.channels, copy.positions, element_bytes) &&
         is_aligned_to(copy.from, kVectorBytes) && is_aligned_to(copy.to, kVectorBytes);
}

/// Channels of a stretch: as many as fill it, but not so many that there are fewer stretches than wanted.
///
/// \param positions of a stretch
std::int64_t stretch_channels(const ChannelsLastCopy& copy, std::int64_t positions,
                              std::int64_t element_bytes) {
  const std::int64_t across = ceil_div(copy.positions, positions);
  std::int64_t channels = kLeastStretchColumnBytes / element_bytes;
  while (2 * channels * positions * element_bytes <= kStretchBytes && channels < copy.channels &&
         copy.batch * across * ceil_div(copy.channels, 2 * channels) >= kStretchesWanted) {
    channels *= 2;
  }
  return channels;
}

template <class T>
CopyArgs<T> copy_args(const ChannelsLastCopy& copy, std::int64_t first) {
  const auto inverse = [](std::int64_t extent) {
    return static_cast<unsigned>(ceil_div(std::int64_t{1} << kInverseBits, extent));
  };
  CopyArgs<T> args{};
  args.first = static_cast<unsigned>(first);
  args.from = static_cast<const T*>(copy.from);
  args.to = static_cast<T*>(copy.to);
  args.channels = static_cast<unsigned>(copy.channels);
  args.positions = static_cast<unsigned>(copy.positions);
  constexpr std::int64_t kBytes = sizeof(T);
  args.stretches = has_stretches(copy, kBytes);
  args.contiguous = args.stretches && has_contiguous_stretches(copy.positions);
  const std::int64_t row_values = kRowBytes / kBytes;
  const std::int64_t wide = args.contiguous ? copy.positions : std::min(copy.positions, row_values);
  const std::int64_t most = std::min(kTileValues / wide / kChannelUnit * kChannelUnit, kMostExtent);
  const std::int64_t of_tile = std::min(ceil_div(copy.channels, kChannelUnit) * kChannelUnit, most);
  const std::int64_t deep = args.stretches ? stretch_channels(copy, wide, kBytes) : of_tile;
  const auto log_of_vectors = [](std::int64_t values) {
    return static_cast<unsigned>(
        std::countr_zero(static_cast<std::uint64_t>(values * kBytes / kVectorBytes)));
  };
  args.row_shift = args.contiguous ? 0 : log_of_vectors(row_values);
  args.column_shift = log_of_vectors(deep);
  args.pad = wide % 2 == 0 ? 1 : 0;
  args.tile_positions = static_cast<unsigned>(wide);
  args.tile_channels = static_cast<unsigned>(deep);
  args.per_position = inverse(wide);
  args.per_channel = inverse(deep);
  const std::int64_t across = ceil_div(copy.positions, wide), down = ceil_div(copy.channels, deep);
  const std::int64_t tiles = copy.batch * across * down;
  if (std::max({first + tiles, copy.channels, copy.positions}) > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument(
        "upconv3d: a kernel runs at most 2147483647 blocks, and these extents are no larger either; got " +
        std::to_string(first + tiles) + " blocks for " + std::to_string(copy.channels) + " channels of " +
        std::to_string(copy.positions) + " positions. Split the batch.");
  }
  args.across = static_cast<unsigned>(across);
  args.down = static_cast<unsigned>(down);
  args.tiles = static_cast<unsigned>(tiles);
  return args;
}

template <class T>
void launch_copies(const std::array<ChannelsLastCopy, 2>& copies, cudaStream_t stream) {
  CopiesArgs<T> args{};
  std::int64_t blocks = 0;
  for (int i = 0; i < 2; ++i) {
    args.of[i].first = static_cast<unsigned>(blocks);
    if (copies[i].batch == 0) continue;
    args.of[i] = copy_args<T>(copies[i], blocks);
    blocks += args.of[i].tiles;
  }
  if (blocks == 0) return;
  channels_last_copies<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  check_launch("channels_last_copies");
}

/// `copy` of 16-bit values as those tiles take it, or nothing where it goes value by value.
std::optional<InputArgs> tiles_of(const ChannelsLastCopy& copy) {
  static_assert(CopyTiles::kPositions == kTilePositions && CopyTiles::kChannels == kTileChannels);
  if (!is_copied_by_tiles(copy.batch, copy.channels, copy.positions, sizeof(std::uint16_t)) ||
      !is_aligned_to(copy.to, 16)) {
    return std::nullopt;
  }
  const CopyTiles tiles(copy.batch, copy.channels, copy.positions);
  InputArgs args{};
  args.x = copy.from;
  args.hi = static_cast<std::uint16_t*>(copy.to);
  args.channels = copy.channels;
  args.positions = copy.positions;
  args.pitch = args.group_channels = static_cast<std::uint32_t>(copy.channels);
  args.groups = 1;
  args.position_tiles = static_cast<std::uint32_t>(tiles.across);
  args.channel_tiles = static_cast<std::uint32_t>(tiles.down);
  return args;
}

/// \param x tiles_of(copies[0])
void launch_tiles(const std::array<ChannelsLastCopy, 2>& copies, const InputArgs& x, cudaStream_t stream) {
  const std::int64_t x_blocks = copies[0].batch * x.position_tiles * x.channel_tiles;
  CopyArgs<std::uint16_t> w{};
  if (copies[1].batch > 0) w = copy_args<std::uint16_t>(copies[1], 0);
  const unsigned grid = grid_of(x_blocks + w.tiles, "channels_last_copies");
  const bool by_fours = copies[0].positions % 4 == 0 && is_aligned_to(copies[0].from, 8);
  const auto kernel = by_fours ? channels_last_tiles<4> : channels_last_tiles<1>;
  kernel<<<grid, kInputThreads, 0, stream>>>(x, static_cast<std::uint32_t>(x_blocks), w);
  check_launch("channels_last_copies");
}

}  // namespace

void launch_channels_last_copies(const std::array<ChannelsLastCopy, 2>& copies, DType dtype,
                                 cudaStream_t stream) {
  switch (size_of(dtype)) {
    case 4:
      return launch_copies<std::uint32_t>(copies, stream);
    case 2:
      if (const std::optional<InputArgs> x = tiles_of(copies[0])) return launch_tiles(copies, *x, stream);
      return launch_copies<std::uint16_t>(copies, stream);
    default:
      throw std::invalid_argument(
          std::string("upconv3d: operands are copied channels last in 32 or 16 bits; got ") + name(dtype) +
          ". Give them to PyTorch's convolution as they lie.");
  }
}

}  // namespace upconv3d::cuda
