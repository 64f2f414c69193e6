// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tails (core/tail.hpp) that the SM90 kernels run, and what they do to a value, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/tail.hpp"

namespace upconv3d::tests {

inline Tail tail_of(Order order, Activation activation, double parameter = 0.0, std::int64_t slopes = 0) {
  Tail tail;
  tail.order = order;
  tail.activation = activation;
  tail.parameter = parameter;
  tail.slopes = slopes;
  return tail;
}

/// Beside ReLU before the norm: nothing but the normalization, and every activation that may follow it in
/// registers. \param k output channels
inline std::vector<Tail> piecewise_linear_tails(std::int64_t k) {
  return {tail_of(Order::kActNorm, Activation::kNone), tail_of(Order::kNormAct, Activation::kRelu),
          tail_of(Order::kNormAct, Activation::kLeakyRelu, 0.25),
          tail_of(Order::kNormAct, Activation::kPrelu, 0.0, 1),
          tail_of(Order::kNormAct, Activation::kPrelu, 0.0, k)};
}

/// Every activation with exponentials, as a rule after the normalization.
inline std::vector<Tail> smooth_tails(Order order = Order::kNormAct) {
  return {tail_of(order, Activation::kElu, 0.75), tail_of(order, Activation::kSilu),
          tail_of(order, Activation::kGelu), tail_of(order, Activation::kGeluTanh)};
}

/// Slopes before the normalization, whose products are exact in float.
inline std::vector<Tail> slope_tails(std::int64_t k) {
  return {tail_of(Order::kActNorm, Activation::kLeakyRelu, 0.25),
          tail_of(Order::kActNorm, Activation::kPrelu, 0.0, k)};
}

/// Every activation other than ReLU, without normalization.
inline std::vector<Tail> linear_tails(std::int64_t k) {
  std::vector<Tail> tails = smooth_tails(Order::kActNorm);
  for (const Tail& tail : slope_tails(k)) tails.push_back(tail);
  tails.push_back(tail_of(Order::kActNorm, Activation::kPrelu, 0.0, 1));
  tails.push_back(tail_of(Order::kActNorm, Activation::kNone));
  for (Tail& tail : tails) tail.norm = false;
  return tails;
}

/// PReLU's slope of a channel: exact in 16 bits, of either sign or 0, none larger than 1.
inline double prelu_slope(std::int64_t channel) {
  return double(3 - channel % 7) / 4;
}
inline std::vector<double> prelu_slopes(std::int64_t k) {
  std::vector<double> slopes(k);
  for (std::int64_t i = 0; i < k; ++i) slopes[i] = prelu_slope(i);
  return slopes;
}

/// An activation of v; NaN stays NaN.
inline double activated(const Tail& tail, Activation activation, double v, std::int64_t channel) {
  if (activation == Activation::kElu) return v > 0 ? v : tail.parameter * std::expm1(v);
  if (activation == Activation::kSilu) return v / (1 + std::exp(-v));
  if (activation == Activation::kGelu) return 0.5 * v * (1 + std::erf(v * std::sqrt(0.5)));
  if (activation == Activation::kGeluTanh)
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
  double slope = 1.0;
  if (activation == Activation::kRelu) slope = 0.0;
  if (activation == Activation::kLeakyRelu) slope = tail.parameter;
  if (activation == Activation::kPrelu) slope = prelu_slope(tail.slopes == 1 ? 0 : channel);
  return v < 0 ? v * slope : v;
}

}  // namespace upconv3d::tests
