// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_backward's kernels.
///
///   c, grad_y  [N,K,Z,P,Q] or [N,Z,P,Q,K]  T
///   bias       [K]                         T     or none
///   grad_c     as c                        T     may be c: a thread reads an element before it writes it
///   part       [N,K,tiles,2]               fp32  sums of a tile of a channel, written once
///   slopes     [K]                         fp64  sums of a channel, where one slope is all channels'
///
/// Merging is in double, in an order that the launch alone decides.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/activation.cuh"
#include "cuda/group_norm/activation_backward.hpp"
#include "cuda/group_norm/backward_passes.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/pending.cuh"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {
namespace {

/// Sums over a tile of a channel, in the order in which they lie in memory.
enum PartSum {
  kPartGrad,   // of grad_c
  kPartSlope,  // of grad_y*v where !(v > 0)
  kPartSums,
};

struct Scratch {
  float* part;     // [N,K,tiles,kPartSums]
  double* slopes;  // [K]
  std::int64_t bytes;

  Scratch(const GroupNormShape& shape, void* base) {
    Carver carver(base);
    part = carver.take<float>(shape.n * shape.k * shape.tiles * kPartSums);
    slopes = carver.take<double>(shape.k);
    bytes = carver.used();
  }
};

template <class T>
struct PassArgs {
  GroupNormShape shape;
  const T* c;       // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  const T* grad_y;  // as c
  const T* bias;    // [K], or null
  T* grad_c;        // as c, or null
  ActivationParams activation;
  float* part;                  // [N,K,tiles,kPartSums], or null where no sum is wanted
  std::int64_t channel_blocks;  // along K, of rows only
};

/// What an element's gradient takes of its channel.
struct Channel {
  float bias = 0.f, parameter = 0.f;

  template <class T>
  __device__ __forceinline__ void load(const PassArgs<T>& args, std::int64_t channel) {
    if (args.bias != nullptr) bias = to_stat(args.bias[channel]);
    parameter = activation_parameter<T>(args.activation, channel);
  }
};

/// A channel's sums of one thread.
struct ThreadSums {
  float at[kPartSums] = {};

  /// Adds an element. \return its grad_c
  template <class Functor>
  __device__ __forceinline__ float add(Functor functor, float v, float parameter, float grad_y) {
    const float grad_c = through_activation(functor, v, parameter, grad_y);
    at[kPartGrad] += grad_c;
    if constexpr (std::is_same_v<Functor, SlopeActivation>) at[kPartSlope] += v > 0.f ? 0.f : grad_y * v;
    return grad_c;
  }

  __device__ __forceinline__ void join(const ThreadSums& other) {
#pragma unroll
    for (int i = 0; i < kPartSums; ++i) at[i] += other.at[i];
  }

  /// \param row sample*K + channel
  template <class T>
  __device__ __forceinline__ void store(const PassArgs<T>& args, std::int64_t row, std::int64_t tile) const {
    reinterpret_cast<float2*>(args.part)[row * args.shape.tiles + tile] = {at[kPartGrad], at[kPartSlope]};
  }
};

/// kCount vectors of c and of grad_y, `step` elements apart, from element `at` on.
template <class T, class Functor, int kCount, int kVector>
struct Vectors {
  static constexpr bool kReadsC = !std::is_same_v<Functor, NoActivation>;
  Vector<T, kVector> c[kCount], grad[kCount];

  __device__ __forceinline__ Vectors(const PassArgs<T>& args, std::int64_t at, std::int64_t step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kReadsC) c[i] = load_once<kVector>(args.c + at + i * step);
      // Of no activation grad_y is grad_c, which the convolution's gradients read next.
      grad[i] = load_vector<kVector, kReadsC>(args.grad_y + at + i * step);
    }
  }

  /// Makes grad_c of the j-th element of the i-th vector's grad_y.
  __device__ __forceinline__ void pass(int i, int j, const Channel& channel, ThreadSums& sums) {
    const float v = kReadsC ? to_stat(c[i].at[j]) + channel.bias : 0.f;
    grad[i].at[j] = from_stat<T>(sums.add(Functor{}, v, channel.parameter, to_stat(grad[i].at[j])));
  }

  __device__ __forceinline__ void store(const PassArgs<T>& args, std::int64_t at, std::int64_t step) const {
    if constexpr (kReadsC) {
      if (args.grad_c == nullptr) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) store_vector<kVector>(args.grad_c + at + i * step, grad[i]);
    }
  }
};

template <int kCount, class Functor, int kVector, class T>
__device__ __forceinline__ void pass_rows(const PassArgs<T>& args, const Channel (&channels)[kVector],
                                          std::int64_t at, std::int64_t step, ThreadSums (&sums)[kVector]) {
  Vectors<T, Functor, kCount, kVector> vectors(args, at, step);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    ThreadSums recent;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vectors.pass(i, j, channels[j], recent);
    sums[j].join(recent);
  }
  vectors.store(args, at, step);
}

template <class T, class Functor, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) activation_backward_rows(const PassArgs<T> args) {
  const RowTile<kVector> tile(args.shape, args.channel_blocks, blockIdx.x);
  Channel channels[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) channels[j].load(args, tile.channel + j);
  ThreadSums sums[kVector];
  tile.each([&](std::int64_t at) { pass_rows<kRowPositions, Functor>(args, channels, at, tile.step, sums); },
            [&](std::int64_t at) { pass_rows<1, Functor>(args, channels, at, 0, sums); });
  if (args.part == nullptr) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum_slots(sums[j].at);
  if (threadIdx.y != 0 || !tile.exists) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    sums[j].store(args, tile.sample * args.shape.k + tile.channel + j, tile.tile);
  }
}

template <int kCount, class Functor, int kVector, class T>
__device__ __forceinline__ void pass_plane(const PassArgs<T>& args, const Channel& channel, std::int64_t at,
                                           std::int64_t step, ThreadSums& sums) {
  Vectors<T, Functor, kCount, kVector> vectors(args, at, step);
  ThreadSums recent;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) vectors.pass(i, j, channel, recent);
  }
  sums.join(recent);
  vectors.store(args, at, step);
}

/// Blocks are ordered tile fastest, then blockDim.y planes at a time.
template <class T, class Functor, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) activation_backward_planes(const PassArgs<T> args) {
  const PlaneTile<kVector> tile(args.shape, blockIdx.x);
  Channel channel;
  channel.load(args, tile.channel);
  ThreadSums sums;
  tile.each(
      [&](std::int64_t at, std::int64_t step) {
        pass_plane<kPlanePairs, Functor, kVector>(args, channel, at, step, sums);
      },
      [&](std::int64_t at) { pass_plane<1, Functor, kVector>(args, channel, at, 0, sums); },
      [&](std::int64_t at) { pass_plane<1, Functor, 1>(args, channel, at, 0, sums); });
  if (args.part == nullptr) return;
  sum_row(sums.at);
  if (threadIdx.x == 0 && tile.exists) sums.store(args, tile.row, tile.tile);
}

template <class T>
struct MergeArgs {
  GroupNormShape shape;
  const float* part;  // [N,K,tiles,kPartSums]
  T* grad_bias;       // [K], or null
  T* grad_slopes;     // [1] or [K], or null
  double* slopes;     // [K] written, where one slope is all channels'; else null
};

/// A warp per channel.
template <class T>
__global__ void __launch_bounds__(kStreamThreads) activation_backward_merge(const MergeArgs<T> args) {
  const std::int64_t channel = (std::int64_t{blockIdx.x} * kStreamThreads + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (channel >= args.shape.k) return;
  const std::int64_t tiles = args.shape.tiles, count = args.shape.n * tiles;
  double grad = 0, slope = 0;
#pragma unroll 4
  for (std::int64_t i = lane; i < count; i += 32) {
    const std::int64_t sample = i / tiles, row = sample * args.shape.k + channel;
    const float2 sums = reinterpret_cast<const float2*>(args.part)[row * tiles + (i - sample * tiles)];
    grad += sums.x;
    slope += sums.y;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    grad += __shfl_xor_sync(0xffffffffu, grad, other);
    slope += __shfl_xor_sync(0xffffffffu, slope, other);
  }
  if (lane != 0) return;
  if (args.grad_bias != nullptr) args.grad_bias[channel] = from_stat<T>(float(grad));
  if (args.slopes != nullptr) {
    args.slopes[channel] = slope;
  } else if (args.grad_slopes != nullptr) {
    args.grad_slopes[channel] = from_stat<T>(float(slope));
  }
}

/// One warp, over all channels.
template <class T>
__global__ void activation_backward_one_slope(const MergeArgs<T> args) {
  double slope = 0;
  for (std::int64_t channel = threadIdx.x; channel < args.shape.k; channel += 32) {
    slope += args.slopes[channel];
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) slope += __shfl_xor_sync(0xffffffffu, slope, other);
  if (threadIdx.x == 0) *args.grad_slopes = from_stat<T>(float(slope));
}

/// Channels of a thread of rows, where K is a multiple: 8 or 16 bytes.
constexpr int kRowVector = 4;

template <class T>
void launch_pass(const ActivationBackwardParams& params, const PassArgs<T>& args, cudaStream_t stream) {
  const bool aligned = is_aligned(params.c) && is_aligned(params.grad_y) && is_aligned(params.grad_c);
  with_activation(params.activation.kind, [&](auto functor) {
    using Functor = decltype(functor);
    if (params.layout == Layout::kNDHWC) {
      const auto rows = [&](auto vector) {
        launch_rows("activation_backward_rows", activation_backward_rows<T, Functor, vector()>, params.shape,
                    vector(), args, stream);
      };
      if (aligned && params.shape.k % kRowVector == 0) return rows(std::integral_constant<int, kRowVector>{});
      return rows(std::integral_constant<int, 1>{});
    }
    const auto planes = [&](auto vector) {
      launch_planes("activation_backward_planes", activation_backward_planes<T, Functor, vector()>,
                    params.shape, vector(), args, stream);
    };
    if (aligned) return planes(std::integral_constant<int, int{kAccessBytes / sizeof(T)}>{});
    planes(std::integral_constant<int, 1>{});
  });
}

template <class T>
void launch_typed(const ActivationBackwardParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  const Scratch scratch(shape, params.scratch);
  const bool sums = params.grad_bias != nullptr || params.grad_slopes != nullptr;
  if (!sums && params.grad_c == nullptr) return;
  launch_pass<T>(params,
                 {shape, static_cast<const T*>(params.c), static_cast<const T*>(params.grad_y),
                  static_cast<const T*>(params.bias), static_cast<T*>(params.grad_c), params.activation,
                  sums ? scratch.part : nullptr, 0},
                 stream);
  if (!sums) return;
  const bool one_slope = params.grad_slopes != nullptr && params.activation.slope_step == 0;
  const MergeArgs<T> merge = {shape, scratch.part, static_cast<T*>(params.grad_bias),
                              static_cast<T*>(params.grad_slopes), one_slope ? scratch.slopes : nullptr};
  launch("activation_backward_merge", activation_backward_merge<T>, ceil_div(shape.k, kStreamThreads / 32),
         dim3(kStreamThreads), stream, merge);
  if (one_slope) {
    launch("activation_backward_one_slope", activation_backward_one_slope<T>, 1, dim3(32), stream, merge);
  }
}

void require(bool holds, const char* rule_and_value) {
  if (!holds) throw std::invalid_argument(std::string("upconv3d: activation_backward ") + rule_and_value);
}

}  // namespace

std::int64_t activation_backward_scratch_bytes(const GroupNormShape& shape) {
  return Scratch(shape, nullptr).bytes;
}

void launch_activation_backward(const ActivationBackwardParams& params, cudaStream_t stream) {
  require(params.activation.kind != Activation::kNone || params.grad_c == nullptr,
          "writes grad_c of an activation; got none, of which it is grad_y. Pass null.");
  require_slopes(params.activation);
  switch (params.dtype) {
    case DType::kFloat32:
      return launch_typed<float>(params, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return launch_typed<__half>(params, stream);
    case DType::kFloat64:
      break;
  }
  require(false, "takes float32, bfloat16 and float16; got float64. Use PyTorch's.");
}

}  // namespace upconv3d::cuda
