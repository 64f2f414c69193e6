// SPDX-License-Identifier: Apache-2.0
/// \file
/// What is still due of a stored convolution before it is normalized: bias, skip and activation. The moments
/// and the normalize kernels must see the same value, so both take it from here.
///
/// ReLU before a group norm and what needs no activation are types of their own, which cost nothing; so are
/// the activations behind a norm where a launch is so short that its code, which memory may have to bring, is
/// what takes time. All others are AnyPending, decided at run time. There, the switch on the activation
/// stands outside of a vector's elements.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// The convolution as the library left it: bias and an activation, with a parameter in held norms alone, are
/// still due.
/// \tparam Behind_ an activation behind the normalization, whose parameter is one for all channels, or
/// ChannelSlopes: of the kernels that held_norm.hpp launches alone
template <class Functor, class Behind_ = NoActivation>
struct AfterBias {
  using Behind = Behind_;
  static constexpr bool kReadsBias = true;
  static constexpr bool kDecidesLater = false;
  template <class S>
  __device__ __forceinline__ S operator()(S c, S bias, S parameter = S(0)) const {
    return Functor{}.value(c + bias, parameter);
  }
};

/// As `Behind`: PReLU with a slope per channel, which kernels find where they keep what a channel has.
struct ChannelSlopes {};

template <class Input>
constexpr bool kHasChannelSlopes = false;
template <class Functor>
constexpr bool kHasChannelSlopes<AfterBias<Functor, ChannelSlopes>> = true;

/// The convolution as our epilogue left it: nothing is due.
struct AsStored {
  static constexpr bool kReadsBias = false;
  static constexpr bool kDecidesLater = false;
  template <class S>
  __device__ __forceinline__ S operator()(S a, S) const {
    return a;
  }
};

/// The convolution without bias or skip, of whose sum the activation is all that is wanted. Of normalize
/// alone.
/// \tparam kStores_ whether the sum is stored too, and rounded before it is activated
template <class Activation_, bool kAddsSkip_, bool kStores_>
struct ActivatedSum {
  using Activation = Activation_;
  static constexpr bool kAddsSkip = kAddsSkip_;
  static constexpr bool kStores = kStores_;
  static constexpr bool kReadsBias = true;
  static constexpr bool kDecidesLater = false;
};

/// Whatever the launch says.
struct AnyPending {
  using Behind = NoActivation;  // activate() applies it
  static constexpr bool kReadsBias = true;
  static constexpr bool kDecidesLater = true;
};

/// Whether a held norm's launch of this type may be PReLU's with a slope per channel.
template <class Input>
constexpr bool kMayHaveSlopes = Input::kDecidesLater || kHasChannelSlopes<Input>;

/// v[j] = activation(v[j]) of a functor, with one parameter for all channels or, of PReLU, a slope of each.
/// \param parameter params.parameter
/// \param slopes as of activate
template <class Functor, class S, int kCount, class Slopes>
__device__ __forceinline__ void activate_as(const ActivationParams& params, S parameter, S (&v)[kCount],
                                            Slopes slopes) {
  if constexpr (std::is_same_v<Functor, SlopeActivation>) {
    if (params.kind == Activation::kPrelu) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = Functor{}.value(v[j], slopes(j));
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) v[j] = Functor{}.value(v[j], parameter);
}

/// v[j] = activation(v[j]).
/// \param parameter params.parameter
/// \param slopes slopes(j) is that of v[j]; called for kPrelu alone
template <class S, int kCount, class Slopes>
__device__ __forceinline__ void activate(const ActivationParams& params, S parameter, S (&v)[kCount],
                                         Slopes slopes) {
  if (params.kind == Activation::kPrelu) {
    if (params.slope_step != 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = SlopeActivation{}.value(v[j], slopes(j));
      return;
    }
    parameter = slopes(0);
  }
  with_activation(params.kind, [&](auto activation) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = activation.value(v[j], parameter);
  });
}

/// The parameter of a type's activation behind the normalization; 0 of other types.
/// \param parameter params.parameter
template <class T, class Input>
__device__ __forceinline__ float parameter_behind(const ActivationParams& params, float parameter) {
  using Behind = typename Input::Behind;
  if constexpr (std::is_same_v<Behind, NoActivation>) return 0.f;
  const bool is_slope = std::is_same_v<Behind, SlopeActivation> && params.kind == Activation::kPrelu;
  return is_slope ? activation_parameter<T>(params, 0) : parameter;
}

/// v[j] = activation(v[j]) of a type behind the normalization; nothing of other types.
/// \param parameter parameter_behind
/// \param slopes slopes(j) is v[j]'s; called where kHasChannelSlopes
template <class Input, int kCount, class Slopes>
__device__ __forceinline__ void activate_behind(float parameter, float (&v)[kCount], Slopes slopes) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if constexpr (kHasChannelSlopes<Input>) {
      v[j] = SlopeActivation{}.value(v[j], slopes(j));
    } else {
      v[j] = typename Input::Behind{}.value(v[j], parameter);
    }
  }
}

/// v[j] = c[j] + bias[lane_of(j)] (+ skip[j]).
/// \param has_skip else skip is not read
template <class T, int kCount, int kLanes, class LaneOf>
__device__ __forceinline__ void add_pending(const Vector<T, kCount>& c, const Stat<T> (&bias)[kLanes],
                                            bool has_skip, const Vector<T, kCount>& skip,
                                            Stat<T> (&v)[kCount], LaneOf lane_of) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) v[j] = to_stat(c.at[j]) + bias[lane_of(j)];
  if (!has_skip) return;
#pragma unroll
  for (int j = 0; j < kCount; ++j) v[j] += to_stat(skip.at[j]);
}

/// \throws std::invalid_argument where an activation's slopes are missing.
inline void require_slopes(const ActivationParams& activation) {
  if (activation.kind != Activation::kPrelu || activation.slopes != nullptr) return;
  throw std::invalid_argument(
      "upconv3d: prelu reads its slopes from a tensor of 1 or K elements; got slopes=null. Pass the "
      "tensor, or leaky_relu for a slope that is a number.");
}

}  // namespace upconv3d::cuda
