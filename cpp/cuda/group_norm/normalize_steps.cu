// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_normalize: forward stage 4 of 4, where before(conv) was stored in 16 bits with a step.
///
///   a         [N,Z,P,Q,pitch]    uint16  before(conv) = (a - zero) * 2^step
///   steps     [N,moments,pitch]  int8    -128: not finite
///   moment_of [Z*P*Q]            int32   whose steps a position has
///   table     [3,N,K]            float   mean, scale, shift
///   y         [N,K,Z,P,Q] or [N,Z,P,Q,K]  float   after((before(conv) - mean)*scale + shift)
///
/// y in a's layout takes a streaming kernel whose threads own fixed channels. To the other layout, a block
/// carries tiles of 8192 values through shared memory: positions x channels, 128 x 64, or longer ones where K
/// is small. It reads a in vectors of 8 channels and their 8 steps, normalizes in registers, stores the
/// values channel by channel, and writes y along the positions, 512 bytes or more at a time. The next tile's
/// loads are issued before this tile's stores. A thread's channels are the same for all of the block's tiles,
/// which follow each other along the positions; whose steps those positions have, the block reads once.
///
/// Shared memory is [channels][positions] with the 16-byte chunks of a channel permuted: chunk' = chunk ^
/// (channel/8 * 8/kVectors). A warp writes kVectors vectors of channels at 32/kVectors positions, into 32
/// different banks; and it reads eight consecutive chunks at a time, a permutation of all banks.
///
/// Launched beside the convolution, a block has the loads of four tiles on their way (TilesAhead).
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/group_norm/geometry.hpp"
#include "cuda/group_norm/normalize.cuh"
#include "cuda/group_norm/steps.cuh"

namespace upconv3d::cuda {
namespace {

/// Channels of a vector: 16 bytes of a, 8 of steps.
constexpr int kVector = 8;

/// Values of a tile: 32 KB of shared memory, so that three blocks or more share a multiprocessor.
constexpr int kTileValues = 8192;

/// Vectors of a thread: all loads of the next tile, in flight while this one is stored.
constexpr int kLoads = kTileValues / kVector / kStreamThreads;
static_assert(kLoads == kLoadsInFlight, "TilesAhead holds as many of a tile");

/// Blocks per multiprocessor that registers are left for: 24 warps with 64 bytes of loads per thread, or 16
/// where an activation needs some of its own.
template <bool kActivates>
constexpr int kBlocksPerMultiprocessor = kActivates ? 2 : 3;

/// Tiles per block: alone, a tile's load is hidden by nothing; of more, the last blocks leave more of the
/// card idle. On an H200, 9856 tiles took 146, 142 and 135 us by 8, 4 and 2; 2048 took 32.8 by 1 and 30.5
/// by 2.
constexpr int kTilesPerBlock = 2;

/// The same beside the convolution: twice what is asked for ahead.
constexpr int kTilesPerEarlyBlock = 2 * kTilesAhead;

/// Tiles below which each gets a block of its own, so that small tensors use the whole card.
constexpr std::int64_t kTilesToShare = 2048;

struct StepsArgs {
  NormalizeArgs<std::uint16_t, float> common;
  const std::int8_t* steps;       // [N,moments,a_pitch]
  const std::int32_t* moment_of;  // [Z*P*Q]
  float origin;                   // stored_origin()
};

/// y = after(v*scale + shift) of a thread's channels, the mean in the shift: 16 bits are rounded so much more
/// coarsely than mean*scale that one step will do.
/// \tparam kActivates else after is none
template <bool kActivates>
struct StepsMap {
  float scale[kVector], shift[kVector];
  std::int64_t channel0;

  __device__ __forceinline__ void load(const NormalizeArgs<std::uint16_t, float>& args, std::int64_t sample,
                                       std::int64_t channel) {
    ChannelMap<std::uint16_t, AsStored, kVector> map = {};
    if (channel < args.shape.k) map.load_consecutive(args, sample, channel);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      scale[j] = map.scale[j];
      shift[j] = map.shift[j] - map.mean[j] * map.scale[j];
    }
    channel0 = channel;
  }

  __device__ __forceinline__ Vector<float, kVector> apply(const StepsArgs& args, const uint4& stored,
                                                          const uint2& steps) const {
    const unsigned words[4] = {stored.x, stored.y, stored.z, stored.w};
    StepValues halves[2];
    halves[0].set(steps.x);
    halves[1].set(steps.y);
    Vector<float, kVector> y;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float v = stored_bits(words[j / 2], j % 2, args.origin) * halves[j / 4].at(j % 4);
      y.at[j] = v * scale[j] + shift[j];
    }
    if constexpr (kActivates) {
      const auto& common = args.common;
      activate(common.activation, common.parameter, y.at, [&](int j) {
        return activation_parameter<float>(common.activation, min(channel0 + j, common.shape.k - 1));
      });
    }
    return y;
  }
};

/// One tile on its way through registers and shared memory: kVectors vectors of channels.
///
/// Thread t holds kLoads vectors, all of channel vector t % kVectors; its i-th one is of tile row row0() + i
/// * kRowStep. Both steps, along i and along a vector's channels j, move by constants in shared memory, so
/// one address serves them all.
template <int kVectors>
struct StepsTile {
  static constexpr int kChannels = kVectors * kVector;
  static constexpr int kRows = kTileValues / kChannels;  // positions
  static constexpr int kRowStep = kStreamThreads / kVectors;
  static constexpr int kChunk = kAccessBytes / int(sizeof(float));
  static constexpr int kChunks = kRows / kChunk;
  static_assert(kRowStep % (8 * kChunk) == 0, "the permutation of chunks must not depend on i");

  uint4 values[kLoads];
  uint2 steps[kLoads];

  static __device__ __forceinline__ int vector() { return threadIdx.x % kVectors; }
  static __device__ __forceinline__ int row0() { return threadIdx.x / kVectors; }

  /// Where chunk `chunk` of channel `channel` of the tile lies in shared memory.
  static __device__ __forceinline__ int offset(int channel, int chunk) {
    return channel * kRows + (chunk ^ (channel / kVector * (8 / kVectors))) * kChunk;
  }

  /// \param a     [rows,pitch] this thread's channels of the tile's first row and of those that follow
  /// \param rows  that there are; what lies beyond is 0
  __device__ __forceinline__ void load_values(const std::uint16_t* a, int pitch, int rows) {
    a += std::int64_t{row0()} * pitch;
#pragma unroll
    for (int i = 0; i < kLoads; ++i, a += std::int64_t{kRowStep} * pitch) {
      values[i] = {};
      if (row0() + i * kRowStep < rows) values[i] = __ldcs(reinterpret_cast<const uint4*>(a));
    }
  }

  /// load_values by way of the ring, in two parts.
  static __device__ __forceinline__ void ask_values(TilesAhead& ahead, const std::uint16_t* a, int pitch,
                                                    int rows) {
    const std::uint16_t* const first = a + std::int64_t{row0()} * pitch;
    ahead.ask(a, rows <= 0, [&](int i) {
      const int row = i * kRowStep;
      return row0() + row < rows ? first + std::int64_t{row} * pitch : nullptr;
    });
  }
  __device__ __forceinline__ void take_values(TilesAhead& ahead) {
    ahead.await();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) values[i] = ahead.vector(i);
    ahead.end_tile();
  }

  /// \param from   [moments,pitch] steps of this thread's channels
  /// \param moment [rows] of the tile's positions, in shared memory
  __device__ __forceinline__ void load_steps(const std::int8_t* from, int pitch, const int* moment,
                                             int rows) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = row0() + i * kRowStep;
      steps[i] = {};
      if (row < rows) steps[i] = *reinterpret_cast<const uint2*>(from + std::int64_t{moment[row]} * pitch);
    }
  }

  /// \param shared [kChannels,kRows], chunks permuted
  template <class Map>
  __device__ __forceinline__ void normalize(float* shared, const StepsArgs& args, const Map& map) const {
    float* to = shared + offset(vector() * kVector, row0() / kChunk) + row0() % kChunk;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const Vector<float, kVector> y = map.apply(args, values[i], steps[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[j * kRows + i * kRowStep] = y.at[j];
    }
  }

  /// \param shared [kChannels,kRows], chunks permuted
  /// \param y      [channels,positions], from the tile's first channel and position on; 16-byte aligned, and
  ///               so are its rows
  static __device__ __forceinline__ void store(const float* shared, float* y, std::int64_t positions,
                                               int channels, int rows) {
    constexpr int kChannelStep = kChannels / kVector;
    const int chunk = threadIdx.x % kChunks, channel0 = threadIdx.x / kChunks;
    if (chunk * kChunk >= rows) return;
    y += channel0 * positions + chunk * kChunk;
#pragma unroll 4
    for (int i = 0; i < kVector; ++i, y += kChannelStep * positions) {
      const int channel = channel0 + i * kChannelStep;
      if (channel >= channels) return;
      __stcs(reinterpret_cast<float4*>(y), *reinterpret_cast<const float4*>(shared + offset(channel, chunk)));
    }
  }

  /// store where y cannot take 16-byte accesses: neighbouring threads write neighbouring elements.
  static __device__ __forceinline__ void store_scalar(const float* shared, float* y, std::int64_t positions,
                                                      int channels, int rows) {
    constexpr int kThreads = kRows < kStreamThreads ? kRows : kStreamThreads;  // that share a channel
    constexpr int kChannelStep = kStreamThreads / kThreads;
    const int channel0 = threadIdx.x / kThreads;
    for (int row = threadIdx.x % kThreads; row < min(rows, kRows); row += kThreads) {
      float* to = y + channel0 * positions + row;
#pragma unroll 4
      for (int channel = channel0; channel < channels; channel += kChannelStep) {
        *to = shared[offset(channel, row / kChunk) + row % kChunk];
        to += kChannelStep * positions;
      }
    }
  }
};

/// kVectorOut: y takes 16-byte stores. kBeside: launched beside the convolution.
template <int kVectors, bool kVectorOut, bool kActivates, bool kBeside>
__global__ void __launch_bounds__(kStreamThreads,
                                  kBeside ? kAheadBlocks : kBlocksPerMultiprocessor<kActivates>)
    group_norm_normalize_steps(const StepsArgs args) {
  using Tile = StepsTile<kVectors>;
  alignas(kAccessBytes) __shared__ float shared[kTileValues];  // [kChannels,kRows], chunks permuted
  __shared__ int moment[kTilesPerEarlyBlock * Tile::kRows];    // of the block's positions

  const auto& common = args.common;
  const std::int64_t k = common.shape.k, positions = common.shape.positions;
  const int pitch = static_cast<int>(common.a_pitch);
  const BlockWork work = work_of_block(common);
  const std::int64_t sample = work.sample, channel0 = work.channel_block * Tile::kChannels;
  const std::int64_t begin = work.first_step * Tile::kRows;
  const int count = static_cast<int>(min(work.steps * Tile::kRows, positions - begin));
  const std::int64_t channel = channel0 + Tile::vector() * kVector;
  const int loaded = channel < k ? count : 0;  // positions that this thread loads
  const std::uint16_t* a = common.a + (sample * positions + begin) * pitch + channel;
  const std::int8_t* steps = args.steps + sample * common.shape.tiles * pitch + channel;
  float* y = common.y + (sample * k + channel0) * positions + begin;
  const int channels = static_cast<int>(min(k - channel0, std::int64_t{Tile::kChannels}));

  extern __shared__ __align__(kAccessBytes) unsigned char ring[];
  TilesAhead ahead(ring);
  const auto ask = [&](int first) {
    Tile::ask_values(ahead, a + std::int64_t{first} * pitch, pitch, loaded - first);
  };
  Tile tile;
  if constexpr (kBeside) {
    await_sample(common, sample);
#pragma unroll
    for (int i = 0; i < kTilesAhead; ++i) ask(i * Tile::kRows);
  } else {
    tile.load_values(a, pitch, loaded);
  }
  for (int i = threadIdx.x; i < count; i += kStreamThreads) moment[i] = args.moment_of[begin + i];
  StepsMap<kActivates> map;
  map.load(common, sample, channel);
  __syncthreads();
  tile.load_steps(steps, pitch, moment, loaded);
  for (int first = 0; first < count; first += Tile::kRows) {
    if constexpr (kBeside) tile.take_values(ahead);
    tile.normalize(shared, args, map);
    __syncthreads();
    const int next = first + Tile::kRows;
    if constexpr (kBeside) {
      ask(first + kTilesAhead * Tile::kRows);
    } else if (next < count) {
      tile.load_values(a + std::int64_t{next} * pitch, pitch, loaded - next);
    }
    if (next < count) tile.load_steps(steps, pitch, moment + next, loaded - next);
    if constexpr (kVectorOut) {
      Tile::store(shared, y + first, positions, channels, count - first);
    } else {
      Tile::store_scalar(shared, y + first, positions, channels, count - first);
    }
    __syncthreads();
  }
}

/// Positions of a thread where y has a's layout: enough that the table's rows cost little.
constexpr int kThreadPositions = 16;

/// y [N,Z,P,Q,K]. Blocks: channel block fastest, then position block, then sample; x: vectors of channels,
/// y: positions. kVectorOut: y takes 16-byte stores.
template <bool kVectorOut, bool kActivates>
__global__ void __launch_bounds__(kStreamThreads, kBlocksPerMultiprocessor<kActivates>)
    group_norm_normalize_steps_rows(const StepsArgs args) {
  const auto& common = args.common;
  const std::int64_t k = common.shape.k, positions = common.shape.positions, pitch = common.a_pitch;
  const BlockWork work = work_of_block(common);
  const std::int64_t sample = work.sample, begin = work.first_step;
  const std::int64_t end = min(begin + work.steps, positions);
  const std::int64_t channel = (work.channel_block * blockDim.x + threadIdx.x) * kVector;
  await_sample(common, sample);
  if (channel >= k) return;
  StepsMap<kActivates> map;
  map.load(common, sample, channel);
  const std::int8_t* const steps = args.steps + sample * common.shape.tiles * pitch + channel;
  for (std::int64_t first = begin + threadIdx.y; first < end; first += kLoads * blockDim.y) {
    uint4 values[kLoads];
    uint2 exponents[kLoads];
    int moment[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t position = min(first + i * blockDim.y, end - 1);
      values[i] = __ldcs(
          reinterpret_cast<const uint4*>(common.a + (sample * positions + position) * pitch + channel));
      moment[i] = args.moment_of[position];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      exponents[i] = *reinterpret_cast<const uint2*>(steps + moment[i] * pitch);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t position = first + i * blockDim.y;
      if (position >= end) return;
      float* const to = common.y + (sample * positions + position) * k + channel;
      const Vector<float, kVector> y = map.apply(args, values[i], exponents[i]);
      if constexpr (kVectorOut) {
        store_once<kVector>(to, y);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (channel + j < k) to[j] = y.at[j];
        }
      }
    }
  }
}

void require_steps_form(const NormalizeParams& params) {
  const bool right = params.a_layout == Layout::kNDHWC && params.y_dtype == DType::kFloat32 &&
                     params.before.kind == Activation::kNone && params.bias == nullptr &&
                     params.skip == nullptr && params.table != nullptr && is_aligned(params.a) &&
                     row_pitch(params) % kVector == 0 && params.moment_of != nullptr;
  if (right) return;
  throw std::invalid_argument(
      "upconv3d: values with steps are normalized from aligned NDHWC in rows of multiples of 8 to "
      "float32, with no bias, skip or activation due before; got " +
      std::string(name(params.a_layout)) + " in rows of " + std::to_string(row_pitch(params)) + " to " +
      name(params.y_layout) + ' ' + name(params.y_dtype) + ", before=" + name(params.before.kind) +
      (params.bias == nullptr ? "" : ", a bias") + (params.skip == nullptr ? "" : ", a skip") +
      (params.table != nullptr ? "" : ", no table") +
      (is_aligned(params.a) ? "" : ", a not 16-byte aligned") +
      (params.moment_of != nullptr ? "" : ", no moment_of") + ". Store the activation as float32.");
}

StepsArgs steps_args(const NormalizeParams& params) {
  StepsArgs args{};
  args.common = normalize_args<std::uint16_t, float>(params);
  args.common.table_vectors = params.shape.k % kVector == 0 && is_aligned(params.table);
  args.steps = params.steps;
  args.moment_of = params.moment_of;
  args.origin = stored_origin(params.signed_steps);
  return args;
}

template <bool kActivates>
void launch_rows(const NormalizeParams& params, cudaStream_t stream) {
  StepsArgs args = steps_args(params);
  const BlockShape block = channel_block_shape(params.shape.k, kVector, kStreamThreads);
  args.common.channel_blocks = block.blocks;
  const std::int64_t steps = std::int64_t{block.y} * kThreadPositions;
  const std::int64_t blocks = divide_positions(params.shape.positions, steps, steps, args.common);
  const bool vector_out = is_aligned(params.y) && params.shape.k % kVector == 0;
  launch("group_norm_normalize_steps_rows",
         vector_out ? group_norm_normalize_steps_rows<true, kActivates>
                    : group_norm_normalize_steps_rows<false, kActivates>,
         blocks, dim3(block.x, block.y), stream, args, params.merged != nullptr);
}

template <int kVectors, bool kActivates>
void launch_vectors(const NormalizeParams& params, cudaStream_t stream) {
  using Tile = StepsTile<kVectors>;
  const GroupNormShape& shape = params.shape;
  const std::int64_t tiles = ceil_div(shape.positions, Tile::kRows);
  StepsArgs args = steps_args(params);
  args.common.channel_blocks = ceil_div(shape.k, Tile::kChannels);
  const int steps = shape.n * args.common.channel_blocks * tiles < kTilesToShare ? 1 : kTilesPerBlock;
  const std::int64_t blocks = divide_positions(tiles, steps, kTilesPerEarlyBlock, args.common);
  const bool vector_out = is_aligned(params.y) && shape.positions % Tile::kChunk == 0;
  constexpr const char* kName = "group_norm_normalize_steps";
  if (params.merged != nullptr) {
    static ReservedSharedMemory reserved[2];
    return launch_ahead(kName,
                        vector_out ? group_norm_normalize_steps<kVectors, true, kActivates, true>
                                   : group_norm_normalize_steps<kVectors, false, kActivates, true>,
                        reserved[vector_out ? 1 : 0], blocks, stream, args);
  }
  launch(kName,
         vector_out ? group_norm_normalize_steps<kVectors, true, kActivates, false>
                    : group_norm_normalize_steps<kVectors, false, kActivates, false>,
         blocks, dim3(kStreamThreads), stream, args);
}

template <bool kActivates>
void launch_steps(const NormalizeParams& params, cudaStream_t stream) {
  if (params.y_layout == Layout::kNDHWC) return launch_rows<kActivates>(params, stream);
  // Threads of channels beyond K would have nothing to do.
  if (params.shape.k > 32) {
    launch_vectors<8, kActivates>(params, stream);
  } else if (params.shape.k > 16) {
    launch_vectors<4, kActivates>(params, stream);
  } else {
    launch_vectors<2, kActivates>(params, stream);
  }
}

}  // namespace

void launch_normalize_steps(const NormalizeParams& params, cudaStream_t stream) {
  require_steps_form(params);
  if (params.after.kind == Activation::kNone) {
    launch_steps<false>(params, stream);
  } else {
    launch_steps<true>(params, stream);
  }
}

}  // namespace upconv3d::cuda
