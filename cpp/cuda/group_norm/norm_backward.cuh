// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the kernels of norm_backward share: scratch memory, and the arithmetic of one element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/group_norm/backward_passes.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/norm_backward.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {

/// Sums over a tile of a channel, in the order in which they lie in memory: 32 bytes, a sector. b is
/// before'(v). Where the normalization comes first, b is 1 everywhere and only what differs is summed.
enum NormSum {
  kNormSumGrad,             // of g
  kNormSumGradDeviation,    // of g*(a - mean)
  kNormSumOpen,             // of b
  kNormSumGradOpen,         // of g*b
  kNormSumDeviationOpen,    // of (a - mean)*b
  kNormSumSlope,            // before: of g*v where !(v > 0); after: of grad_y*u where !(u > 0)
  kNormSumClosed,           // before: of v there
  kNormSumDeviationClosed,  // before: of (a - mean)*v there
  kNormSums,
};

/// The same over a sample.
struct NormChannelSums {
  double at[kNormSums];
};

/// What a (sample, channel) adds to its parameters' gradients.
struct NormShares {
  double gamma, beta, bias, slope;
};

struct NormBackwardScratch {
  float* part;            // [N,K,tiles,kNormSums]
  NormChannelSums* sums;  // [N,K]
  NormShares* shares;     // [N,K]
  float4* map;            // [N,K] mean, from_grad, from_deviation, constant:
                          // grad_a = from_grad*g + (from_deviation*(a - mean) + constant)
  std::int64_t bytes;

  NormBackwardScratch(const GroupNormShape& shape, void* base) {
    Carver carver(base);
    const std::int64_t rows = shape.n * shape.k;
    part = carver.take<float>(rows * shape.tiles * kNormSums);
    sums = carver.take<NormChannelSums>(rows);
    shares = carver.take<NormShares>(rows);
    map = carver.take<float4>(rows);
    bytes = carver.used();
  }
};

template <class T>
struct NormBackwardArgs {
  GroupNormShape shape;
  const T* c;            // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  const T* grad_y;       // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  const T* bias;         // [K], or null
  const T* gamma;        // [K], or null
  const float* table;    // [3,N,K]
  const float4* groups;  // [N,G]
  T* grad_c;             // as c, may be c
  T* grad_gamma;         // [K], or null; the next three likewise
  T* grad_beta;
  T* grad_bias;
  T* grad_slopes;
  ActivationParams activation;  // the only one
  bool activation_first;        // whether the normalization follows it
  float* part;
  NormChannelSums* sums;
  NormShares* shares;
  float4* map;
};

/// Which activation a kernel knows of when it is compiled, and whether it precedes the norm: ReLU before the
/// norm, all of those behind it, and none, have kernels of their own. The code of all in one is several times
/// as long as what runs of it, and of small blocks it takes longer to come than to run.
template <bool kFirst_, class Functor>
struct OneActivation {
  static constexpr bool kFirst = kFirst_;
  template <class Visit>
  static __device__ __forceinline__ void with(Activation, Visit&& visit) {
    visit(Functor{});
  }
};
using ReluBefore = OneActivation<true, ReluActivation>;
struct AnyBefore {
  static constexpr bool kFirst = true;
  template <class Visit>
  static __device__ __forceinline__ void with(Activation kind, Visit&& visit) {
    with_activation(kind, visit);
  }
};

/// Of one (sample, channel), in registers.
template <class Tail>
struct NormChannel {
  float bias, mean, parameter;
  float scale, shift;  // of u, where the activation is last

  template <class T>
  __device__ __forceinline__ void load(const NormBackwardArgs<T>& args, std::int64_t sample,
                                       std::int64_t channel) {
    const std::int64_t row = sample * args.shape.k + channel, plane = args.shape.n * args.shape.k;
    bias = args.bias != nullptr ? to_stat(args.bias[channel]) : 0.f;
    mean = args.table[row];
    scale = args.table[plane + row];
    shift = args.table[2 * plane + row];
    parameter = activation_parameter<T>(args.activation, channel);
  }

  /// g of an element whose a - mean is `deviation`.
  /// \param u set to what the last activation is applied to
  template <class Functor>
  __device__ __forceinline__ float gradient(Functor functor, float deviation, float grad_y, float& u) const {
    u = deviation * scale + shift;
    return through_activation(functor, u, parameter, grad_y);
  }
};

/// Sums of one thread.
struct NormSums {
  float at[kNormSums] = {};

  template <class Tail, class Functor>
  __device__ __forceinline__ void add(const NormChannel<Tail>& channel, Functor functor, float c,
                                      float grad_y) {
    const float v = c + channel.bias;
    if constexpr (Tail::kFirst) {
      const float deviation = functor.value(v, channel.parameter) - channel.mean;
      const float b = functor.derivative(v, channel.parameter);
      at[kNormSumGrad] += grad_y;
      at[kNormSumGradDeviation] += grad_y * deviation;
      at[kNormSumOpen] += b;
      at[kNormSumGradOpen] += through_activation(functor, v, channel.parameter, grad_y);
      at[kNormSumDeviationOpen] += deviation * b;
      if constexpr (std::is_same_v<Functor, SlopeActivation>) {
        const float below = v > 0.f ? 0.f : v;
        at[kNormSumSlope] += grad_y * below;
        at[kNormSumClosed] += below;
        at[kNormSumDeviationClosed] += deviation * below;
      }
    } else {
      const float deviation = v - channel.mean;
      float u;
      const float g = channel.gradient(functor, deviation, grad_y, u);
      at[kNormSumGrad] += g;
      at[kNormSumGradDeviation] += g * deviation;
      at[kNormSumDeviationOpen] += deviation;
      if constexpr (std::is_same_v<Functor, SlopeActivation>) at[kNormSumSlope] += u > 0.f ? 0.f : grad_y * u;
    }
  }

  __device__ __forceinline__ void join(const NormSums& other) {
#pragma unroll
    for (int i = 0; i < kNormSums; ++i) at[i] += other.at[i];
  }
};

/// grad_c of an element.
/// \param map as in NormBackwardScratch
template <class Tail, class Functor>
__device__ __forceinline__ float conv_gradient(const NormChannel<Tail>& channel, const float4& map,
                                               Functor functor, float c, float grad_y) {
  const float v = c + channel.bias;
  const float a = Tail::kFirst ? functor.value(v, channel.parameter) : v;
  const float deviation = a - channel.mean;
  float u;
  const float g = Tail::kFirst ? grad_y : channel.gradient(functor, deviation, grad_y, u);
  const float grad_a = map.y * g + (map.z * deviation + map.w);
  return Tail::kFirst ? through_activation(functor, v, channel.parameter, grad_a) : grad_a;
}

/// Calls visit(std::type_identity<T>{}) with the element type of a dtype that norm_backward takes.
template <class Visit>
void with_norm_element(DType dtype, Visit&& visit) {
  if (dtype == DType::kFloat32) return visit(std::type_identity<float>{});
  if (dtype == DType::kBFloat16) return visit(std::type_identity<__nv_bfloat16>{});
  visit(std::type_identity<__half>{});
}

/// Calls visit(T tag, Tail tag) for what `params` name.
template <class Visit>
void with_norm_types(const NormBackwardParams& params, Visit&& visit) {
  with_norm_element(params.dtype, [&](auto element) {
    if (params.before.kind == Activation::kNone) {
      return with_activation(params.after.kind, [&](auto activation) {
        visit(element, OneActivation<false, decltype(activation)>{});
      });
    }
    if (params.before.kind == Activation::kRelu) return visit(element, ReluBefore{});
    visit(element, AnyBefore{});
  });
}

/// The launches, in their order, the first and the last for either layout; `params` are right.
void launch_norm_backward_sums_planes(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_backward_sums_rows(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_backward_merge(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_backward_grad_c_planes(const NormBackwardParams& params, cudaStream_t stream);
void launch_norm_backward_grad_c_rows(const NormBackwardParams& params, cudaStream_t stream);

template <class T>
NormBackwardArgs<T> norm_backward_args(const NormBackwardParams& params) {
  const NormBackwardScratch scratch(params.shape, params.scratch);
  NormBackwardArgs<T> args{};
  args.shape = params.shape;
  args.c = static_cast<const T*>(params.c);
  args.grad_y = static_cast<const T*>(params.grad_y);
  args.bias = static_cast<const T*>(params.bias);
  args.gamma = static_cast<const T*>(params.gamma);
  args.table = params.table;
  args.groups = reinterpret_cast<const float4*>(params.groups);
  args.grad_c = static_cast<T*>(params.grad_c);
  args.grad_gamma = static_cast<T*>(params.grad_gamma);
  args.grad_beta = static_cast<T*>(params.grad_beta);
  args.grad_bias = static_cast<T*>(params.grad_bias);
  args.grad_slopes = static_cast<T*>(params.grad_slopes);
  args.activation_first = params.before.kind != Activation::kNone;
  args.activation = args.activation_first ? params.before : params.after;
  args.part = scratch.part;
  args.sums = scratch.sums;
  args.shares = scratch.shares;
  args.map = scratch.map;
  return args;
}

}  // namespace upconv3d::cuda
