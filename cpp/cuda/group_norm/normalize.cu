// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_normalize: forward stage 4 of 4, where a and y lie in the same layout.
///
///   a     [N,K,Z,P,Q] or [N,Z,P,Q,pitch]  the convolution, before(conv), or what is between them
///   skip  as a                            or none
///   table [3,N,K]                         mean, scale, shift from finalize, or none
///   y     [N,K,Z,P,Q] or [N,Z,P,Q,K]      after((v - mean)*scale + shift), v = before(a + bias + skip); may
///                                         be a itself where pitch is K
///
/// A copy with few operations per element, so all that counts is bandwidth: 16-byte accesses, several in
/// flight per thread, a thread's mean, scale and shift in registers, the last sample first. The mean is
/// subtracted before it is scaled: folded into the shift it would cancel where |mean| >> std. a and y may be
/// the same memory, which is safe because each thread reads an element before it writes it and no other
/// thread touches it.
#include "cuda/group_norm/normalize.cuh"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/group_norm/geometry.hpp"

namespace upconv3d::cuda {
namespace {

/// Vectors per thread and block at most: 64 KB of reads per block, so that the table's rows cost little and a
/// large tensor still makes several waves of blocks, which evens out their ends.
constexpr std::int64_t kVectorsPerThread = 16;

/// Blocks below which threads get fewer vectors: four blocks on each of the largest card's multiprocessors,
/// twice.
constexpr std::int64_t kBlocksWanted = 1024;

std::int64_t vectors_per_thread(std::int64_t total_vectors) {
  return std::clamp<std::int64_t>(total_vectors / (kBlocksWanted * kStreamThreads), kLoadsInFlight,
                                  kVectorsPerThread);
}

/// Vectors in flight of a thread. Of double, more do not fit the registers beside their map on arch 80; with
/// AnyPending, those of skip and the activations' code come on top.
template <class A, class Input>
constexpr int kVectorsInFlight = sizeof(A) == 8 || Input::kDecidesLater ? kLoadsInFlight / 2 : kLoadsInFlight;

/// Normalizes kLoads vectors that lie `from_step` and `to_step` elements apart, through lane_of(j) for the
/// j-th element of each.
/// \param from, to elements of a and y at which the first one begins
template <int kLoads, int kVector, class A, class Y, class Input, int kLanes, class LaneOf>
__device__ __forceinline__ void normalize_vectors(const NormalizeArgs<A, Y>& args,
                                                  const ChannelMap<A, Input, kLanes>& map, std::int64_t from,
                                                  std::int64_t from_step, std::int64_t to,
                                                  std::int64_t to_step, LaneOf lane_of) {
  Vector<A, kVector> in[kLoads], skip[kLoads] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) in[i] = load_once<kVector>(args.a + from + i * from_step);
  if (Input::kDecidesLater && args.skip != nullptr) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) skip[i] = load_once<kVector>(args.skip + from + i * from_step);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    store_once<kVector>(args.y + to + i * to_step, map.apply(args, in[i], skip[i], lane_of));
  }
}

/// A thread owns kVector channels and walks positions. Blocks: channel block fastest, then position block,
/// then sample.
template <class A, class Y, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads) group_norm_normalize_ndhwc(const NormalizeArgs<A, Y> args) {
  const std::int64_t k = args.shape.k;
  const std::int64_t block = reversed_block();
  const std::int64_t sample_rows = block / args.channel_blocks;
  const std::int64_t sample = sample_rows / args.position_blocks;
  const std::int64_t begin = (sample_rows - sample * args.position_blocks) * args.position_steps;
  const std::int64_t channel =
      ((block - sample_rows * args.channel_blocks) * blockDim.x + threadIdx.x) * kVector;
  if (channel >= k) return;

  ChannelMap<A, Input, kVector> map;
  map.load_consecutive(args, sample, channel);

  const auto lane_of = [](int j) { return j; };
  const std::int64_t end = min(begin + args.position_steps, args.shape.positions);
  const std::int64_t from_step = blockDim.y * args.a_pitch, to_step = blockDim.y * k;
  std::int64_t position = begin + threadIdx.y;
  std::int64_t from = (sample * args.shape.positions + position) * args.a_pitch + channel;
  std::int64_t to = (sample * args.shape.positions + position) * k + channel;
  constexpr int kLoads = kVectorsInFlight<A, Input>;
  for (; position + (kLoads - 1) * blockDim.y < end; position += kLoads * blockDim.y) {
    normalize_vectors<kLoads, kVector>(args, map, from, from_step, to, to_step, lane_of);
    from += kLoads * from_step;
    to += kLoads * to_step;
  }
  for (; position < end; position += blockDim.y, from += from_step, to += to_step) {
    normalize_vectors<1, kVector>(args, map, from, from_step, to, to_step, lane_of);
  }
}

/// The threads of a row share one channel. Blocks: position block fastest, then blockDim.y rows of [N*K,
/// positions]. Rows start anywhere, at the same place in a and in y; the vectors between `first` and `last`
/// are aligned.
template <class A, class Y, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads) group_norm_normalize_ncdhw(const NormalizeArgs<A, Y> args) {
  const std::int64_t block = reversed_block();
  const std::int64_t row_block = block / args.position_blocks;
  const std::int64_t row = row_block * blockDim.y + threadIdx.y;
  if (row >= args.shape.n * args.shape.k) return;
  const std::int64_t sample = row / args.shape.k;

  ChannelMap<A, Input, 1> map;
  map.load(args, sample, row - sample * args.shape.k, 0);

  const std::int64_t begin =
      row * args.shape.positions + (block - row_block * args.position_blocks) * args.position_steps;
  const std::int64_t end = min(begin + args.position_steps, (row + 1) * args.shape.positions);
  const std::int64_t first = min((begin + kVector - 1) / kVector * kVector, end);
  const std::int64_t last = max(end / kVector * kVector, first);
  const auto lane_of = [](int) { return 0; };

  for (std::int64_t i = begin + threadIdx.x; i < first; i += blockDim.x) {
    normalize_vectors<1, 1>(args, map, i, 1, i, 1, lane_of);
  }
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kVector;
  std::int64_t at = first + static_cast<std::int64_t>(threadIdx.x) * kVector;
  constexpr int kLoads = Input::kDecidesLater ? kVectorsInFlight<A, Input> : kLoadsInFlight;
  for (; at + (kLoads - 1) * step < last; at += kLoads * step) {
    normalize_vectors<kLoads, kVector>(args, map, at, step, at, step, lane_of);
  }
  for (; at < last; at += step) {
    normalize_vectors<1, kVector>(args, map, at, step, at, step, lane_of);
  }
  for (std::int64_t i = last + threadIdx.x; i < end; i += blockDim.x) {
    normalize_vectors<1, 1>(args, map, i, 1, i, 1, lane_of);
  }
}

template <class A, class Y, class Input, int kVector>
void launch_vectorized(const NormalizeParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  NormalizeArgs<A, Y> args = normalize_args<A, Y>(params);
  args.table_vectors = shape.k % kVector == 0 && is_aligned(params.table);
  const std::int64_t per_thread = vectors_per_thread(shape.n * shape.k * shape.positions / kVector);
  if (params.a_layout == Layout::kNDHWC) {
    const BlockShape block = channel_block_shape(shape.k, kVector, kStreamThreads);
    args.channel_blocks = block.blocks;
    args.position_steps = block.y * per_thread;
    args.position_blocks = ceil_div(shape.positions, args.position_steps);
    launch("group_norm_normalize_ndhwc", group_norm_normalize_ndhwc<A, Y, Input, kVector>,
           shape.n * args.position_blocks * args.channel_blocks, dim3(block.x, block.y), stream, args);
  } else {
    const BlockShape block = row_block_shape(shape.positions, kVector, kStreamThreads);
    args.position_steps = block.x * per_thread * kVector;
    args.position_blocks = ceil_div(shape.positions, args.position_steps);
    launch("group_norm_normalize_ncdhw", group_norm_normalize_ncdhw<A, Y, Input, kVector>,
           args.position_blocks * ceil_div(shape.n * shape.k, block.y), dim3(block.x, block.y), stream, args);
  }
}

}  // namespace

void launch_normalize_in_layout(const NormalizeParams& params, cudaStream_t stream) {
  with_normalize_types(params, [&](auto a, auto y, auto input) {
    using A = typename decltype(a)::type;
    using Y = typename decltype(y)::type;
    using Input = typename decltype(input)::type;
    // 16 bytes of the narrower type, a's; y takes two stores where it is float32.
    constexpr int kVector = kAccessBytes / sizeof(A);
    constexpr int kFewer = std::min(kVector, 4);  // 8 bytes of 16 bit: rows of 12, 20 or 100 channels
    const auto whole = [&](int vector) {
      return params.a_layout == Layout::kNCDHW ||
             (params.shape.k % vector == 0 && row_pitch(params) % vector == 0);
    };
    const bool aligned =
        is_aligned(params.a) && is_aligned(params.y) && is_aligned(params.table) && is_aligned(params.skip);
    if (aligned && whole(kVector)) {
      launch_vectorized<A, Y, Input, kVector>(params, stream);
    } else if (aligned && whole(kFewer)) {
      launch_vectorized<A, Y, Input, kFewer>(params, stream);
    } else {
      launch_vectorized<A, Y, Input, 1>(params, stream);
    }
  });
}

namespace {

void require_one_activation(const NormalizeParams& params) {
  require_slopes(params.before);
  require_slopes(params.after);
  if (params.before.kind == Activation::kNone || params.after.kind == Activation::kNone) return;
  throw std::invalid_argument(
      std::string(
          "upconv3d: normalize applies one activation, before the normalization or after it; got before=") +
      name(params.before.kind) + ", after=" + name(params.after.kind) + ". Apply one of them elsewhere.");
}

}  // namespace

void launch_group_norm_normalize(const NormalizeParams& params, cudaStream_t stream) {
  if (params.shape.n == 0) return;
  require_one_activation(params);
  if (params.steps != nullptr) {
    launch_normalize_steps(params, stream);
  } else if (params.a_layout == params.y_layout) {
    launch_normalize_in_layout(params, stream);
  } else {
    launch_normalize_transpose(params, stream);
  }
}

}  // namespace upconv3d::cuda
