// SPDX-License-Identifier: Apache-2.0
/// \file
/// What follows the convolution in a block, as data:
///
///   c = conv_transpose3d(x, w, bias) (+ skip)
///   act_norm:  y = norm(activation(c))      (with ReLU and group norm the block of the README)
///   norm_act:  y = activation(norm(c))
///
/// Instance norm is group norm with as many groups as channels.
#pragma once

#include <cstdint>
#include <string>

namespace upconv3d {

enum class Order : std::uint8_t { kActNorm, kNormAct };

/// As PyTorch's modules of these names. kGelu is the one with erf, kGeluTanh approximate="tanh".
enum class Activation : std::uint8_t {
  kNone,
  kRelu,
  kLeakyRelu,  // parameter: negative_slope
  kElu,        // parameter: alpha
  kSilu,
  kGelu,
  kGeluTanh,
  kPrelu,  // slopes: a tensor of 1 or K
};

const char* name(Order order);
const char* name(Activation activation);

/// The inverses of name(), for "act_norm", "relu", "leaky_relu", "gelu_tanh" and so on; "none" is kNone.
/// \throws ValueViolation (core/errors.hpp): the names that there are, and the one that it got.
Order parse_order(const std::string& text);
Activation parse_activation(const std::string& text);

struct Tail {
  Order order = Order::kActNorm;
  bool norm = true;  // else only the activation follows, and problem.num_groups is 1
  Activation activation = Activation::kRelu;
  double parameter = 0.0;     // of kLeakyRelu and kElu
  std::int64_t slopes = 0;    // of kPrelu: elements of their tensor, 1 or K
  bool has_skip = false;      // c has the convolution's sizes added to it, before what follows
  bool returns_conv = false;  // c is wanted too

  /// What is applied to c before the normalization, and what after it; kNone without an activation there.
  /// Without a normalization everything counts as before.
  Activation before() const { return order == Order::kActNorm || !norm ? activation : Activation::kNone; }
  Activation after() const { return before() == activation ? Activation::kNone : activation; }

  /// relu, then group norm, and nothing else.
  bool is_relu_group_norm() const {
    return order == Order::kActNorm && norm && activation == Activation::kRelu && !has_skip && !returns_conv;
  }
};

/// A tail of the names that parse_order and parse_activation know.
Tail make_tail(const std::string& order, bool norm, const std::string& activation, double parameter,
               bool returns_conv);

/// Whether an activation is v where v > 0 and slope*v elsewhere, which costs next to nothing wherever v is in
/// a register.
inline bool is_piecewise_linear(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu ||
         activation == Activation::kLeakyRelu || activation == Activation::kPrelu;
}

/// Whether an activation is max(v, a constant): ReLU, or nothing.
inline bool is_floor(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu;
}

/// "relu, then group norm", "group norm, then silu, returning the convolution" and so on.
std::string describe(const Tail& tail);

}  // namespace upconv3d
