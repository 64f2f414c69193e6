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
  bool slopes_are_stat;         // before.slopes are Stat<T>, else T
};

/// Vectors in flight of a thread: with AnyPending, those of skip come on top.
template <class Input>
constexpr int kVectorsInFlight = Input::kDecidesLater ? kLoadsInFlight / 2 : kLoadsInFlight;

/// What turns elements of c into the values of which moments are taken, for kLanes channels.
template <class T, class Input, int kLanes>
struct ChannelInput {
  using S = Stat<T>;
  S bias[kLanes] = {};
  S parameter[kLanes] = {};  // of the activation; with AnyPending alone

  __device__ __forceinline__ void load(const MomentsArgs<T>& args, std::int64_t channel, int lane) {
    if (args.bias != nullptr) bias[lane] = to_stat(args.bias[channel]);
    if constexpr (Input::kDecidesLater) {
      parameter[lane] = args.slopes_are_stat ? activation_parameter<S>(args.before, channel)
                                             : activation_parameter<T>(args.before, channel);
    }
  }

  /// Values of kRows vectors, `step` elements apart. lane_of(j): of the j-th element of each.
  /// \param from element of c at which the first vector begins
  template <int kRows, int kCount, class LaneOf>
  __device__ __forceinline__ void read(const MomentsArgs<T>& args, std::int64_t from, std::int64_t step,
                                       S (&value)[kRows][kCount], LaneOf lane_of) const {
    Vector<T, kCount> raw[kRows], skip[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) raw[i] = load_once<kCount>(args.c + from + i * step);
    if (Input::kDecidesLater && args.skip != nullptr) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) skip[i] = load_once<kCount>(args.skip + from + i * step);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (Input::kDecidesLater) {
        add_pending(raw[i], bias, args.skip != nullptr, skip[i], value[i], lane_of);
        activate(args.before.kind, value[i], parameter, lane_of);
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
  std::int64_t from =
      (sample * args.shape.positions + tile * args.shape.tile_positions + threadIdx.y) * k + channel;
  constexpr int kRows = kVectorsInFlight<Input>;
  const auto lane_of = [](int j) { return j; };
  Moments<S, kVector> moments;
  for (; rows_left >= kRows; rows_left -= kRows, from += kRows * step) {
    S value[kRows][kVector];
    input.read(args, from, step, value, lane_of);
    moments.absorb(value);
  }
  for (; rows_left > 0; --rows_left, from += step) {
    S value[1][kVector];
    input.read(args, from, step, value, lane_of);
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
  constexpr int kRows = kVectorsInFlight<Input>;
  const auto lane_of = [](int) { return 0; };
  for (; at + (kRows - 1) * step < last; at += kRows * step) {
    S value[kRows][kVector];
    input.read(args, at, step, value, lane_of);
    lanes.absorb(value);
  }
  for (; at < last; at += step) {
    S value[1][kVector];
    input.read(args, at, step, value, lane_of);
    lanes.absorb(value);
  }

  Moments<S, 1> moments = lanes.join_lanes();
  const auto absorb_one = [&](std::int64_t offset) {
    S value[1][1];
    input.read(args, offset, 1, value, lane_of);
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

template <class T, class Input, int kVector>
void launch_vectorized(const ActivationMomentsParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  MomentsArgs<T> args{};
  args.shape = shape;
  args.c = static_cast<const T*>(params.c);
  args.bias = static_cast<const T*>(params.bias);
  args.skip = static_cast<const T*>(params.skip);
  args.part = static_cast<Stat<T>*>(params.part);
  args.before = params.before;
  args.slopes_are_stat = params.y_dtype != params.dtype;
  if (params.layout == Layout::kNDHWC) {
    const BlockShape block = channel_block_shape(shape.k, kVector, kStreamThreads);
    args.channel_blocks = block.blocks;
    launch("activation_moments_ndhwc", activation_moments_ndhwc<T, Input, kVector>,
           shape.n * shape.tiles * block.blocks, dim3(block.x, block.y), stream, args);
  } else {
    const BlockShape block =
        row_block_shape(std::min(shape.tile_positions, shape.positions), kVector, kStreamThreads);
    launch("activation_moments_ncdhw", activation_moments_ncdhw<T, Input, kVector>,
           shape.tiles * ceil_div(shape.n * shape.k, block.y), dim3(block.x, block.y), stream, args);
  }
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
    constexpr int kVector = kAccessBytes / sizeof(T);
    // NCDHW peels what is not aligned off either end of a row; NDHWC needs whole vectors of channels.
    const bool whole = params.layout == Layout::kNCDHW || params.shape.k % kVector == 0;
    const auto with_input = [&](auto input) {
      using Input = typename decltype(input)::type;
      if (whole && is_aligned(params.c) && is_aligned(params.skip)) {
        launch_vectorized<T, Input, kVector>(params, stream);
      } else {
        launch_vectorized<T, Input, 1>(params, stream);
      }
    };
    if (params.before.kind == Activation::kRelu && params.skip == nullptr) {
      with_input(std::type_identity<ReluAfterBias>{});
    } else {
      with_input(std::type_identity<AnyPending>{});
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
