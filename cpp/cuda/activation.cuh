// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the activations compute, and their derivatives: functors of a value and of the parameter that its
/// channel has (negative_slope, alpha, slope; unused by the others). All kernels take them from here.
///
/// As in PyTorch: NaN stays NaN, and at 0 the derivative is that of the side at or below 0.
/// Sources: ELU, Clevert et al., arXiv:1511.07289; SiLU and GELU, Hendrycks & Gimpel, arXiv:1606.08415;
/// PReLU, He et al., arXiv:1502.01852.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/activation.hpp"

namespace upconv3d::cuda {

/// Sigmoid, without overflow of either sign.
__device__ __forceinline__ float sigmoid(float v) {
  return __fdividef(1.f, 1.f + __expf(-v));
}
__device__ __forceinline__ double sigmoid(double v) {
  return 1.0 / (1.0 + exp(-v));
}

/// a*b, rounded whatever is done with it. A value that several kernels compute must not be fused into what
/// one of them adds to it.
__device__ __forceinline__ float rounded_product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double rounded_product(double a, double b) {
  return __dmul_rn(a, b);
}

/// exp(v) - 1 of v <= 0 or NaN. Of float, at a third of what expm1 costs: by Taylor's series to v^8 where exp
/// would cancel, and elsewhere as close as exp's last two bits.
__device__ __forceinline__ float expm1_below(float v) {
  constexpr float kInverseFactorials[] = {1.f / 40320, 1.f / 5040, 1.f / 720, 1.f / 120,
                                          1.f / 24,    1.f / 6,    1.f / 2,   1.f};
  float series = 0.f;
#pragma unroll
  for (const float factor : kInverseFactorials) series = series * v + factor;
  return v > -0.5f ? series * v : __expf(v) - 1.f;
}
__device__ __forceinline__ double expm1_below(double v) {
  return expm1(v);
}

/// The same to 17 bits, at half of what that costs: exp cancels no more than seven of its own, and v^4 is
/// left out of the series.
__device__ __forceinline__ float coarse_expm1_below(float v) {
  return v > -0x1p-6f ? v * (1.f + v * (0.5f + v * (1.f / 6))) : __expf(v) - 1.f;
}

struct NoActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S) const {
    return v;
  }
  template <class S>
  __device__ __forceinline__ S derivative(S, S) const {
    return S(1);
  }
};

struct ReluActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S) const {
    return v < S(0) ? S(0) : v;
  }
  template <class S>
  __device__ __forceinline__ S derivative(S v, S) const {
    return v <= S(0) ? S(0) : S(1);
  }
};

/// LeakyReLU and PReLU.
struct SlopeActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S slope) const {
    return v > S(0) ? v : rounded_product(v, slope);
  }
  template <class S>
  __device__ __forceinline__ S derivative(S v, S slope) const {
    return v > S(0) ? S(1) : slope;
  }
};

struct EluActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S alpha) const {
    return v > S(0) ? v : rounded_product(expm1_below(v), alpha);
  }
  template <class S>
  __device__ __forceinline__ S derivative(S v, S alpha) const {
    return v > S(0) ? S(1) : exp(v) * alpha;
  }
};

/// Of what operands of 11 bits were multiplied to.
struct CoarseEluActivation {
  __device__ __forceinline__ float value(float v, float alpha) const {
    return v > 0.f ? v : rounded_product(coarse_expm1_below(v), alpha);
  }
};

struct SiluActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S) const {
    return rounded_product(v, sigmoid(v));
  }
  template <class S>
  __device__ __forceinline__ S derivative(S v, S) const {
    const S s = sigmoid(v);
    return s * (S(1) + v * (S(1) - s));
  }
};

/// v * Phi(v), Phi the normal distribution.
struct GeluActivation {
  __device__ __forceinline__ double value(double v, double) const { return rounded_product(v, phi(v)); }
  __device__ __forceinline__ float value(float v, float) const {
    return rounded_product(v, phi(v, __expf(-0.5f * v * v)));
  }
  __device__ __forceinline__ double derivative(double v, double) const {
    return phi(v) + v * kDensityAtZero * exp(-0.5 * v * v);
  }
  __device__ __forceinline__ float derivative(float v, float) const {
    const float power = __expf(-0.5f * v * v);
    return phi(v, power) + v * float(kDensityAtZero) * power;
  }

 private:
  static constexpr double kDensityAtZero = 0.39894228040143267794;  // 1/sqrt(2 pi)
  static constexpr double kSqrtHalf = 0.70710678118654752440;

  static __device__ __forceinline__ double phi(double v) { return 0.5 * (1.0 + erf(v * kSqrtHalf)); }

  /// Phi where exp(-v*v/2) is known: half of what erf costs and, in float, as close to Phi as erf's last bit.
  /// Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26; off by at most 7.5e-8.
  static __device__ __forceinline__ float phi(float v, float power) {
    constexpr float kP = float(0.3275911 * kSqrtHalf);
    constexpr float kHalves[] = {0.5f * 0.254829592f, 0.5f * -0.284496736f, 0.5f * 1.421413741f,
                                 0.5f * -1.453152027f, 0.5f * 1.061405429f};
    const float t = __fdividef(1.f, 1.f + kP * fabsf(v));
    float tail = kHalves[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) tail = tail * t + kHalves[i];
    tail *= t * power;
    return v < 0.f ? tail : 1.f - tail;
  }
};

/// The same with PyTorch's approximation: 0.5*v*(1 + tanh(sqrt(2/pi)*(v + 0.044715*v^3))), which is
/// v*sigmoid(2*sqrt(2/pi)*(v + 0.044715*v^3)).
struct GeluTanhActivation {
  template <class S>
  __device__ __forceinline__ S value(S v, S) const {
    return rounded_product(v, sigmoid(S(kTwice) * (v + S(kCubic) * v * v * v)));
  }
  template <class S>
  __device__ __forceinline__ S derivative(S v, S) const {
    const S square = v * v;
    const S s = sigmoid(v * (S(kTwice) + S(kTwice * kCubic) * square));
    return s + v * s * (S(1) - s) * (S(kTwice) + S(3 * kTwice * kCubic) * square);
  }

 private:
  static constexpr double kTwice = 1.59576912160573071176;  // 2*sqrt(2/pi)
  static constexpr double kCubic = 0.044715;
};

/// Calls visit(functor) with that of `kind`. Uniform for a launch, so best outside of a thread's loops.
template <class Visit>
__host__ __device__ __forceinline__ void with_activation(Activation kind, Visit&& visit) {
  switch (kind) {
    case Activation::kNone:
      return visit(NoActivation{});
    case Activation::kRelu:
      return visit(ReluActivation{});
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return visit(SlopeActivation{});
    case Activation::kElu:
      return visit(EluActivation{});
    case Activation::kSilu:
      return visit(SiluActivation{});
    case Activation::kGelu:
      return visit(GeluActivation{});
    case Activation::kGeluTanh:
      return visit(GeluTanhActivation{});
  }
}

/// The parameter of a channel's activation, in the type that T is computed in: double of double, else float.
/// \param T what slopes are stored as
template <class T>
__device__ __forceinline__ auto activation_parameter(const ActivationParams& params, std::int64_t channel) {
  using S = std::conditional_t<std::is_same_v<T, double>, double, float>;
  if (params.kind != Activation::kPrelu) return static_cast<S>(params.parameter);
  return static_cast<S>(static_cast<const T*>(params.slopes)[channel * params.slope_step]);
}

}  // namespace upconv3d::cuda
