// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_moments: stage 2 of the library plan, for convolutions whose epilogue is not ours.
///
///   c    [N,K,Z,P,Q] or [N,Z,P,Q,K]  dtype  PyTorch's convolution, without bias
///   skip as c                        dtype  or none
///   part [N,tiles,K,2]               stat   (mean, M2) of before(c + bias + skip), written once
///
/// One read of c and skip at copy bandwidth. A block never straddles two tiles and each value of part has one
/// writer, so there are no atomics. NDHWC: a thread owns as many channels as fit 16 bytes and walks the
/// tile's positions. NCDHW: the threads share one channel's positions, 16 bytes each, and join at the end.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/geometry.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {
namespace {

template <class T>
struct MomentsArgs {
  GroupNormShape shape;
  const T* c;                   // [N,K,Z,P,Q] or [N,Z,P,Q,K] T
  const T* bias;                // [K] T, or null
  const T* skip;                // as c lies, or null; read with AnyPending alone
  Stat<T>* part;                // [N,tiles,K,2] stat
  std::int64_t channel_blocks;  // blocks along K, NDHWC only
  ActivationParams before;      // with AnyPending alone
  Stat<T> parameter;            // before.parameter
  bool slopes_are_stat;         // before.slopes are Stat<T>, else T
};

/// Loads in flight of a thread with AnyPending: half as many bytes as elsewhere, because those of skip come
/// on top.
template <class T, class Input, int kVector>
constexpr int kLoads =
    Input::kDecidesLater
        ? std::min<int>(kLoadsInFlight, kLoadsInFlight* kAccessBytes / 2 / (kVector * sizeof(T)))
        : kLoadsInFlight;

/// What turns elements of c into the values of which moments are taken, for kLanes channels.
template <class T, class Input, int kLanes>
struct ChannelInput {
  using S = Stat<T>;
  S bias[kLanes] = {};

  __device__ __forceinline__ void load(const MomentsArgs<T>& args, std::int64_t channel, int lane) {
    if (args.bias != nullptr) bias[lane] = to_stat(args.bias[channel]);
  }

  /// Values of kRows vectors, `step` elements apart, whose j-th element is of channel channel_of(j) in lane
  /// lane_of(j).
  /// \param from in args.c
  template <int kRows, int kCount, class LaneOf, class ChannelOf>
  __device__ __forceinline__ void read(const MomentsArgs<T>& args, const T* from, std::int64_t step,
                                       S (&value)[kRows][kCount], LaneOf lane_of,
                                       ChannelOf channel_of) const {
    Vector<T, kCount> raw[kRows], skip[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) raw[i] = load_once<kCount>(from + i * step);
    if (Input::kDecidesLater && args.skip != nullptr) {
      const T* const with = args.skip + (from - args.c);
#pragma unroll
      for (int i = 0; i < kRows; ++i) skip[i] = load_once<kCount>(with + i * step);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (Input::kDecidesLater) {
        add_pending(raw[i], bias, args.skip != nullptr, skip[i], value[i], lane_of);
        activate(args.before, args.parameter, value[i], [&](int j) {
          return args.slopes_are_stat ? activation_parameter<S>(args.before, channel_of(j))
                                      : activation_parameter<T>(args.before, channel_of(j));
        });
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) value[i][j] = Input{}(to_stat(raw[i].at[j]), bias[lane_of(j)]);
      }
    }
  }
};

/// Blocks are ordered channel block fastest, then tile, then sample.
template <class T, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) activation_moments_ndhwc(const MomentsArgs<T> args) {
  using S = Stat<T>;
  const std::int64_t k = args.shape.k, tiles = args.shape.tiles;
  const std::int64_t sample_tile = blockIdx.x / args.channel_blocks;
  const std::int64_t channel_block = blockIdx.x - sample_tile * args.channel_blocks;
  const std::int64_t sample = sample_tile / tiles, tile = sample_tile - sample * tiles;
  const std::int64_t channel = (channel_block * blockDim.x + threadIdx.x) * kVector;

  ChannelInput<T, Input, kVector> input;
  std::int64_t rows_left = 0;  // of this thread, blockDim.y apart
  if (channel < k) {
    const std::int64_t begin = tile * args.shape.tile_positions;
    const std::int64_t rows = min(args.shape.tile_positions, args.shape.positions - begin);
    rows_left = (rows - threadIdx.y + blockDim.y - 1) / static_cast<std::int64_t>(blockDim.y);
#pragma unroll
    for (int j = 0; j < kVector; ++j) input.load(args, channel + j, j);
  }

  const std::int64_t step = blockDim.y * k;
  const T* from =
      args.c + (sample * args.shape.positions + tile * args.shape.tile_positions + threadIdx.y) * k + channel;
  constexpr int kRows = kLoads<T, Input, kVector>;
  const auto lane_of = [](int j) { return j; };
  const auto channel_of = [&](int j) { return channel + j; };
  Moments<S, kVector> moments;
  for (; rows_left >= kRows; rows_left -= kRows, from += kRows * step) {
    S value[kRows][kVector];
    input.read(args, from, step, value, lane_of, channel_of);
    moments.absorb(value);
  }
  for (; rows_left > 0; --rows_left, from += step) {
    S value[1][kVector];
    input.read(args, from, step, value, lane_of, channel_of);
    moments.absorb(value);
  }

  merge_slots(moments, threadIdx.y * blockDim.x + threadIdx.x, threadIdx.y, blockDim.y, blockDim.x);
  if (threadIdx.y != 0 || channel >= k) return;
  S* to = args.part + part_offset(sample, tile, channel, tiles, k);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    to[2 * j] = moments.mean[j];
    to[2 * j + 1] = moments.m2[j];
  }
}

/// Blocks are ordered tile fastest, then blockDim.y rows of [N*K, positions] at a time.
template <class T, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) activation_moments_ncdhw(const MomentsArgs<T> args) {
  using S = Stat<T>;
  const std::int64_t k = args.shape.k, tiles = args.shape.tiles;
  const std::int64_t row_block = blockIdx.x / tiles, tile = blockIdx.x - row_block * tiles;
  const std::int64_t row = row_block * blockDim.y + threadIdx.y;
  const std::int64_t sample = row / k, channel = row - sample * k;
  const bool has_row = row < args.shape.n * k;

  // Element offsets in c. Rows start anywhere; the vectors between `first` and `last` are 16-byte aligned.
  const std::int64_t begin = row * args.shape.positions + tile * args.shape.tile_positions;
  const std::int64_t end =
      has_row ? min(begin + args.shape.tile_positions, (row + 1) * args.shape.positions) : begin;
  const std::int64_t first = min((begin + kVector - 1) / kVector * kVector, end);
  const std::int64_t last = max(end / kVector * kVector, first);
  ChannelInput<T, Input, 1> input;
  if (has_row) input.load(args, channel, 0);

  Moments<S, kVector> lanes;
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kVector;
  std::int64_t at = first + static_cast<std::int64_t>(threadIdx.x) * kVector;
  constexpr int kRows = kLoads<T, Input, kVector>;
  const auto lane_of = [](int) { return 0; };
  const auto channel_of = [&](int) { return channel; };
  for (; at + (kRows - 1) * step < last; at += kRows * step) {
    S value[kRows][kVector];
    input.read(args, args.c + at, step, value, lane_of, channel_of);
    lanes.absorb(value);
  }
  for (; at < last; at += step) {
    S value[1][kVector];
    input.read(args, args.c + at, step, value, lane_of, channel_of);
    lanes.absorb(value);
  }

  Moments<S, 1> moments = lanes.join_lanes();
  const auto absorb_one = [&](std::int64_t offset) {
    S value[1][1];
    input.read(args, args.c + offset, 1, value, lane_of, channel_of);
    moments.absorb(value);
  };
  for (std::int64_t i = begin + threadIdx.x; i < first; i += blockDim.x) absorb_one(i);
  for (std::int64_t i = last + threadIdx.x; i < end; i += blockDim.x) absorb_one(i);

  merge_slots(moments, threadIdx.y * blockDim.x + threadIdx.x, threadIdx.x, blockDim.x, 1);
  if (threadIdx.x != 0 || !has_row) return;
  S* to = args.part + part_offset(sample, tile, channel, tiles, k);
  to[0] = moments.mean[0];
  to[1] = moments.m2[0];
}

template <class T>
MomentsArgs<T> moments_args(const ActivationMomentsParams& params) {
  MomentsArgs<T> args{};
  args.shape = params.shape;
  args.c = static_cast<const T*>(params.c);
  args.bias = static_cast<const T*>(params.bias);
  args.skip = static_cast<const T*>(params.skip);
  args.part = static_cast<Stat<T>*>(params.part);
  args.before = params.before;
  args.parameter = static_cast<Stat<T>>(params.before.parameter);
  args.slopes_are_stat = params.y_dtype != params.dtype;
  return args;
}

template <class T, class Input, int kVector>
void launch_ndhwc(const ActivationMomentsParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  MomentsArgs<T> args = moments_args<T>(params);
  const BlockShape block = channel_block_shape(shape.k, kVector, kStreamThreads);
  args.channel_blocks = block.blocks;
  launch("activation_moments_ndhwc", activation_moments_ndhwc<T, Input, kVector>,
         shape.n * shape.tiles * block.blocks, dim3(block.x, block.y), stream, args);
}

template <class T, class Input, int kVector>
void launch_ncdhw(const ActivationMomentsParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  const BlockShape block =
      row_block_shape(std::min(shape.tile_positions, shape.positions), kVector, kStreamThreads);
  launch("activation_moments_ncdhw", activation_moments_ncdhw<T, Input, kVector>,
         shape.tiles * ceil_div(shape.n * shape.k, block.y), dim3(block.x, block.y), stream,
         moments_args<T>(params));
}

template <class T, class Input>
void launch_in_layout(const ActivationMomentsParams& params, cudaStream_t stream) {
  // As in normalize: what AnyPending may need of eight channels takes too many registers.
  constexpr int kWidest = kAccessBytes / sizeof(T);
  constexpr int kVector = Input::kDecidesLater ? std::min(kWidest, 4) : kWidest;
  const bool aligned = is_aligned(params.c) && is_aligned(params.skip);
  if (params.layout == Layout::kNCDHW) {
    // Peels what is not aligned off either end of a row.
    if (aligned) return launch_ncdhw<T, Input, kWidest>(params, stream);
    return launch_ncdhw<T, Input, 1>(params, stream);
  }
  if (aligned && params.shape.k % kVector == 0) return launch_ndhwc<T, Input, kVector>(params, stream);
  launch_ndhwc<T, Input, 1>(params, stream);
}

void require_y_dtype(const ActivationMomentsParams& params) {
  if (params.y_dtype == params.dtype) return;
  if (size_of(params.dtype) == 2 && params.y_dtype == DType::kFloat32) return;
  throw std::invalid_argument(
      "upconv3d: slopes have the dtype of the convolution, or float32 beside 16 bit; got dtype=" +
      std::string(name(params.dtype)) + ", y_dtype=" + name(params.y_dtype) + ". Convert the slopes.");
}

}  // namespace

void launch_activation_moments(const ActivationMomentsParams& params, cudaStream_t stream) {
  if (params.shape.n == 0) return;
  require_slopes(params.before);
  require_y_dtype(params);
  with_element(params.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    if (params.before.kind == Activation::kRelu && params.skip == nullptr) {
      launch_in_layout<T, AfterBias<ReluActivation>>(params, stream);
    } else if (params.before.kind == Activation::kNone && params.skip == nullptr) {
      launch_in_layout<T, AfterBias<NoActivation>>(params, stream);
    } else {
      launch_in_layout<T, AnyPending>(params, stream);
    }
  });
}

std::int64_t activation_moments_tile_positions(std::int64_t n, std::int64_t k, std::int64_t positions,
                                               Layout layout, int sm_count) {
  // Sixteen 16-bit vectors, four rounds of loads, for each thread of a block.
  constexpr std::int64_t kBlockElements = std::int64_t{kStreamThreads} * 8 * 16;
  // A partial is 8 bytes: over 256 positions of two bytes each it adds 1.6 % to the traffic.
  constexpr std::int64_t kTileLeast = 256;
  // Where even so the card is not full, the whole tensor is small and filling the card counts for more.
  constexpr std::int64_t kTileLeastSmall = 32;
  // Two blocks per multiprocessor begin to hide each other's latency.
  const std::int64_t blocks_wanted = 2 * std::int64_t{std::max(sm_count, 1)};

  const std::int64_t channels_per_block = layout == Layout::kNDHWC ? std::max<std::int64_t>(k, 1) : 1;
  const std::int64_t rows = layout == Layout::kNDHWC ? n : n * k;
  std::int64_t tile = std::max(kBlockElements / channels_per_block, kTileLeast);
  while (tile > kTileLeastSmall && rows * ceil_div(positions, tile) < blocks_wanted) tile /= 2;
  return std::max<std::int64_t>(std::min(tile, positions), 1);
}

}  // namespace upconv3d::cuda
