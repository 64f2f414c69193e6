// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_normalize: forward stage 4 of 4, where y wants the other layout than a has.
///
///   a     [rows, columns] per sample   columns contiguous: NDHWC is [positions, K] in rows of a_pitch
///                                      elements, NCDHW is [K, positions]
///   skip  as a                         or none
///   table [3,N,K]                      mean, scale, shift from finalize, or none
///   y     [columns, rows] per sample   rows contiguous; after((v - mean)*scale + shift), v = before(a + bias
///                                      + skip)
///
/// A block carries tiles of 128 rows x 128 bytes of columns (64 with AnyPending) through shared memory: it
/// reads a in 16-byte (8-byte) vectors along the columns, normalizes in registers, stores the elements column
/// by column, and writes y in 16-byte vectors along the rows. The next tile's loads are issued before this
/// tile's stores. A thread's channels are the same for all of the block's tiles, which follow each other
/// along the positions.
///
/// Shared memory is [columns][rows] with the 16-byte chunks of a column permuted: chunk' = chunk ^ (column
/// vector). A warp writes eight column vectors at four rows, into eight different groups of four banks; and
/// it reads eight consecutive chunks at a time, a permutation of all banks. Neither conflicts.
///
/// Launched beside the convolution, a block has the loads of four tiles on their way (TilesAhead).
#include <algorithm>
#include <cstdint>

#include "cuda/group_norm/normalize.cuh"

namespace upconv3d::cuda {
namespace {

/// Rows of a tile, contiguous in y: 256 bytes or more of each of y's rows.
constexpr int kRows = 128;

/// Vectors of a tile along the columns, contiguous in a.
constexpr int kColumnVectors = 8;

/// Bytes of such a vector, eight of which are a line or half of one. With AnyPending, a skip and activations
/// come on top, and what they need of 16 bytes of channels does not fit the registers of three blocks.
template <class Input>
constexpr int kVectorBytes = Input::kDecidesLater ? kAccessBytes / 2 : kAccessBytes;

/// Blocks per multiprocessor that registers are left for; from NCDHW, a thread's channels need more of them.
template <class Input, bool kChannelsLast>
constexpr int kBlocksPerMultiprocessor = Input::kDecidesLater && kChannelsLast ? 3 : 2;

/// Rows that the block's threads load at once, and vectors per thread that this makes.
constexpr int kRowSlots = kStreamThreads / kColumnVectors;
constexpr int kLoads = kRows / kRowSlots;
static_assert(kLoads == kLoadsInFlight, "TilesAhead holds as many of a tile");

/// Tiles per block: enough that the table's rows and the first, unhidden load cost little.
constexpr std::int64_t kTilesPerBlock = 4;

/// The same beside the convolution: twice what is asked for ahead.
constexpr std::int64_t kTilesPerEarlyBlock = 2 * kTilesAhead;

/// Tiles below which each gets a block of its own, so that small tensors use the whole card.
constexpr std::int64_t kTilesToShare = 4096;

/// One tile on its way through registers and shared memory.
///
/// Thread t holds kLoads vectors, all of column vector t % 8; its i-th one is of tile row row0() +
/// row_step(i). Both steps, along i and along a vector's elements j, move by constants in shared memory, so
/// one address serves them all.
template <class A, class Y, class Input, bool kVectorIn>
struct TransposeTile {
  static constexpr int kVector = kVectorBytes<Input> / sizeof(A);
  static constexpr int kVectorOut = kAccessBytes / sizeof(Y);
  static constexpr int kColumns = kColumnVectors * kVector;
  static constexpr int kChunks = kRows / kVectorOut;
  static constexpr int kElements = kColumns * kRows;

  Vector<A, kVector> in[kLoads];
  Vector<A, kVector> skip[kLoads];  // loaded with AnyPending alone

  /// Eight-row chunks leave the i-th row two of its bits: within the chunk, and above the eight chunks
  /// permuted.
  static __device__ __forceinline__ int row0() {
    const int slot = threadIdx.x / kColumnVectors;
    return kVectorOut == 8 ? slot % 4 + slot / 4 * 8 : slot;
  }
  static constexpr __device__ __forceinline__ int row_step(int i) {
    return kVectorOut == 8 ? i % 2 * 4 + i / 2 * 64 : i * kRowSlots;
  }

  /// Column of the tile that column `s` of shared memory stands for. Where a cannot take 16-byte loads, the
  /// eight threads of a row load neighbouring elements, and the j-th of thread v is column j*8 + v.
  static __device__ __forceinline__ int tile_column(int s) {
    return kVectorIn ? s : s % kVector * kColumnVectors + s / kVector;
  }

  /// Column of the tile of the j-th element of this thread.
  static __device__ __forceinline__ int column(int j) {
    return tile_column(threadIdx.x % kColumnVectors * kVector + j);
  }

  /// Where column s, row r lies in shared memory.
  static __device__ __forceinline__ int offset(int s, int r) {
    const int chunk = (r / kVectorOut) ^ (s / kVector % kColumnVectors);
    return s * kRows + chunk * kVectorOut + r % kVectorOut;
  }

  /// \param to in or skip
  /// \param a [rows,pitch] A of this sample, `columns` of each row valid; what lies behind them in a vector
  ///          is loaded and not stored
  static __device__ __forceinline__ void load(Vector<A, kVector> (&to)[kLoads], const A* a,
                                              std::int64_t pitch, std::int64_t tile_row,
                                              std::int64_t tile_column0, std::int64_t rows,
                                              std::int64_t columns) {
    const std::int64_t rows_left = rows - tile_row - row0(), columns_left = columns - tile_column0;
    const A* from = a + (tile_row + row0()) * pitch + tile_column0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to[i] = {};
      if (row_step(i) >= rows_left) continue;
      const A* row = from + row_step(i) * pitch;
      if constexpr (kVectorIn) {
        if (column(0) < columns_left) to[i] = load_once<kVector>(row + column(0));
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (column(j) < columns_left) to[i].at[j] = load_once<1>(row + column(j)).at[0];
        }
      }
    }
  }

  /// load of whole vectors into `in` by way of the ring, in two parts.
  static __device__ __forceinline__ void ask(TilesAhead& ahead, const A* a, std::int64_t pitch,
                                             std::int64_t tile_row, std::int64_t tile_column0,
                                             std::int64_t rows, std::int64_t columns) {
    const std::int64_t rows_left = rows - tile_row - row0();
    const A* const from = a + (tile_row + row0()) * pitch + tile_column0 + column(0);
    const bool inside = tile_column0 + column(0) < columns;
    ahead.ask(a, tile_row >= rows, [&](int i) {
      return inside && row_step(i) < rows_left ? from + row_step(i) * pitch : nullptr;
    });
  }
  __device__ __forceinline__ void take(TilesAhead& ahead) {
    ahead.await();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 words = ahead.vector(i);
      memcpy(&in[i], &words, sizeof(in[i]));
    }
    ahead.end_tile();
  }

  /// \param shared [kColumns,kRows] Y, chunks permuted
  /// \param map what normalizes element (i, j), through lane_of(i, j)
  /// \param channel_of the channel of element (i, j), below K
  template <class Map, class LaneOf, class ChannelOf>
  __device__ __forceinline__ void normalize(Y* shared, const NormalizeArgs<A, Y>& args, const Map& map,
                                            LaneOf lane_of, ChannelOf channel_of) const {
    Y* to = shared + offset(threadIdx.x % kColumnVectors * kVector, row0());
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const auto out = map.apply(
          args, in[i], skip[i], [&](int j) { return lane_of(i, j); },
          [&](int j) { return channel_of(i, j); });
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[j * kRows + row_step(i)] = out.at[j];
    }
  }

  /// \param shared [kColumns,kRows] Y, chunks permuted
  /// \param y [columns,rows] Y of this sample
  static __device__ __forceinline__ void store(const Y* shared, Y* y, std::int64_t tile_row,
                                               std::int64_t tile_column0, std::int64_t rows,
                                               std::int64_t columns) {
    const std::int64_t columns_left = columns - tile_column0;
    const int row = threadIdx.x % kChunks * kVectorOut;
    if (tile_row + row >= rows) return;
    Y* to = y + tile_column0 * rows + tile_row + row;
#pragma unroll 4
    for (int s = threadIdx.x / kChunks; s < kColumns; s += kStreamThreads / kChunks) {
      const int column = tile_column(s);
      if (column >= columns_left) continue;
      __stcs(reinterpret_cast<uint4*>(to + column * rows),
             *reinterpret_cast<const uint4*>(shared + offset(s, row)));
    }
  }

  /// store where y cannot take 16-byte accesses: neighbouring threads write neighbouring elements.
  static __device__ __forceinline__ void store_scalar(const Y* shared, Y* y, std::int64_t tile_row,
                                                      std::int64_t tile_column0, std::int64_t rows,
                                                      std::int64_t columns) {
    const std::int64_t columns_left = columns - tile_column0;
    const int row = threadIdx.x % kRows;
    if (tile_row + row >= rows) return;
    Y* to = y + tile_column0 * rows + tile_row + row;
#pragma unroll 4
    for (int s = threadIdx.x / kRows; s < kColumns; s += kStreamThreads / kRows) {
      const int column = tile_column(s);
      if (column < columns_left) to[column * rows] = shared[offset(s, row)];
    }
  }
};

/// kChannelsLast says how a lies. kBeside: launched beside the convolution.
template <class A, class Y, class Input, bool kChannelsLast, bool kVectorIn, bool kBeside>
__global__ void __launch_bounds__(kStreamThreads, kBlocksPerMultiprocessor<Input, kChannelsLast>)
    group_norm_normalize_transpose(const NormalizeArgs<A, Y> args) {
  using Tile = TransposeTile<A, Y, Input, kVectorIn>;
  constexpr int kTilePositions = kChannelsLast ? kRows : Tile::kColumns;
  constexpr int kTileChannels = kChannelsLast ? Tile::kColumns : kRows;
  constexpr int kLanes = kChannelsLast ? Tile::kVector : kLoads;
  alignas(kAccessBytes) __shared__ unsigned char memory[Tile::kElements * sizeof(Y)];
  Y* shared = reinterpret_cast<Y*>(memory);  // [kColumns,kRows] Y, chunks permuted

  const std::int64_t k = args.shape.k, positions = args.shape.positions;
  const BlockWork work = work_of_block(args);
  const std::int64_t sample = work.sample, channel0 = work.channel_block * kTileChannels;
  const std::int64_t begin = work.first_step * kTilePositions;
  const std::int64_t end = min(begin + work.steps * kTilePositions, positions);
  const std::int64_t rows = kChannelsLast ? positions : k, columns = kChannelsLast ? k : positions;
  const std::int64_t pitch = kChannelsLast ? args.a_pitch : columns;
  const std::int64_t sample_offset = sample * rows * pitch;
  Y* y = args.y + sample * k * positions;

  await_sample(args, sample);
  ChannelMap<A, Input, kLanes> map = {};
  if constexpr (kChannelsLast && kVectorIn) {
    const std::int64_t channel = channel0 + Tile::column(0);
    if (channel < k) map.load_consecutive(args, sample, channel);
  } else {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::int64_t channel =
          channel0 + (kChannelsLast ? Tile::column(lane) : Tile::row0() + Tile::row_step(lane));
      if (channel < k) map.load(args, sample, channel, lane);
    }
  }

  const auto lane_of = [](int i, int j) { return kChannelsLast ? j : i; };
  const auto channel_of = [&](int i, int j) {
    return min(channel0 + (kChannelsLast ? Tile::column(j) : Tile::row0() + Tile::row_step(i)), k - 1);
  };
  Tile tile = {};
  const auto load_tile = [&](std::int64_t position) {
    const std::int64_t row = kChannelsLast ? position : channel0;
    const std::int64_t column0 = kChannelsLast ? channel0 : position;
    Tile::load(tile.in, args.a + sample_offset, pitch, row, column0, rows, columns);
    if (Input::kDecidesLater && args.skip != nullptr) {
      Tile::load(tile.skip, args.skip + sample_offset, pitch, row, column0, rows, columns);
    }
  };
  extern __shared__ __align__(kAccessBytes) unsigned char ring[];
  TilesAhead ahead(ring);
  // What the block does not take is beyond `end`, but may be inside the sample.
  const auto ask = [&](std::int64_t position) {
    Tile::ask(ahead, args.a + sample_offset, pitch, position, channel0, min(end, rows), columns);
  };
  if constexpr (kBeside) {
#pragma unroll
    for (int i = 0; i < kTilesAhead; ++i) ask(begin + i * kTilePositions);
  } else {
    load_tile(begin);
  }
  for (std::int64_t position = begin; position < end; position += kTilePositions) {
    if constexpr (kBeside) tile.take(ahead);
    tile.normalize(shared, args, map, lane_of, channel_of);
    __syncthreads();
    const std::int64_t next = position + kTilePositions;
    if constexpr (kBeside) {
      ask(position + kTilesAhead * kTilePositions);
    } else if (next < end) {
      load_tile(next);
    }
    const std::int64_t tile_row = kChannelsLast ? position : channel0;
    const std::int64_t tile_column0 = kChannelsLast ? channel0 : position;
    if (args.vector_out) {
      Tile::store(shared, y, tile_row, tile_column0, rows, columns);
    } else {
      Tile::store_scalar(shared, y, tile_row, tile_column0, rows, columns);
    }
    __syncthreads();
  }
}

template <class A, class Y, class Input, bool kChannelsLast>
void launch_from_layout(const NormalizeParams& params, cudaStream_t stream) {
  using Tile = TransposeTile<A, Y, Input, true>;
  const GroupNormShape& shape = params.shape;
  const std::int64_t rows = kChannelsLast ? shape.positions : shape.k;
  const std::int64_t columns = kChannelsLast ? shape.k : shape.positions;
  const std::int64_t tiles = ceil_div(shape.positions, kChannelsLast ? kRows : Tile::kColumns);

  NormalizeArgs<A, Y> args = normalize_args<A, Y>(params);
  args.channel_blocks = ceil_div(shape.k, kChannelsLast ? Tile::kColumns : kRows);
  const std::int64_t steps = shape.n * args.channel_blocks * tiles < kTilesToShare ? 1 : kTilesPerBlock;
  const std::int64_t blocks = divide_positions(tiles, steps, kTilesPerEarlyBlock, args);
  args.table_vectors = shape.k % Tile::kVector == 0;
  args.vector_out = is_aligned(params.y) && rows % Tile::kVectorOut == 0;

  const bool vector_in = is_aligned(params.a) && is_aligned(params.skip) && is_aligned(params.table) &&
                         (kChannelsLast ? args.a_pitch : columns) % Tile::kVector == 0;
  constexpr const char* kName = "group_norm_normalize_transpose";
  if constexpr (kChannelsLast && !Input::kDecidesLater) {
    if (params.merged != nullptr && vector_in) {
      static ReservedSharedMemory reserved;
      return launch_ahead(kName, group_norm_normalize_transpose<A, Y, Input, true, true, true>, reserved,
                          blocks, stream, args);
    }
  }
  launch(kName,
         vector_in ? group_norm_normalize_transpose<A, Y, Input, kChannelsLast, true, false>
                   : group_norm_normalize_transpose<A, Y, Input, kChannelsLast, false, false>,
         blocks, dim3(kStreamThreads), stream, args, params.merged != nullptr);
}

}  // namespace

void launch_normalize_transpose(const NormalizeParams& params, cudaStream_t stream) {
  with_normalize_types(params, [&](auto a, auto y, auto input) {
    using A = typename decltype(a)::type;
    using Y = typename decltype(y)::type;
    using Input = typename decltype(input)::type;
    if (params.a_layout == Layout::kNDHWC) {
      launch_from_layout<A, Y, Input, true>(params, stream);
    } else {
      launch_from_layout<A, Y, Input, false>(params, stream);
    }
  });
}

}  // namespace upconv3d::cuda
