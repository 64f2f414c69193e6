// SPDX-License-Identifier: Apache-2.0
#include "core/tail.hpp"

#include <array>
#include <stdexcept>

#include "core/errors.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

constexpr std::array kOrders = {Order::kActNorm, Order::kNormAct};
constexpr std::array kActivations = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                     Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                     Activation::kGeluTanh, Activation::kPrelu};

/// The value of `values` whose name is `text`.
template <class Values>
typename Values::value_type parse(const Values& values, const std::string& text, const char* argument) {
  std::string known;
  for (const auto value : values) {
    if (text == name(value)) return value;
    known += concat(known.empty() ? "" : ", ", name(value));
  }
  throw ValueViolation(
      concat("upconv3d: ", argument, " must be one of ", known, "; got ", argument, "=\"", text, "\"."));
}

}  // namespace

const char* name(Order order) {
  return order == Order::kActNorm ? "act_norm" : "norm_act";
}

const char* name(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kLeakyRelu:
      return "leaky_relu";
    case Activation::kElu:
      return "elu";
    case Activation::kSilu:
      return "silu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kPrelu:
      return "prelu";
  }
  throw std::logic_error("upconv3d: Activation out of range");
}

Order parse_order(const std::string& text) {
  return parse(kOrders, text, "order");
}

Activation parse_activation(const std::string& text) {
  return parse(kActivations, text, "activation");
}

Tail make_tail(const std::string& order, bool norm, const std::string& activation, double parameter,
               bool returns_conv) {
  Tail tail;
  tail.order = parse_order(order);
  tail.norm = norm;
  tail.activation = parse_activation(activation);
  tail.parameter = parameter;
  tail.returns_conv = returns_conv;
  return tail;
}

std::string describe(const Tail& tail) {
  const std::string activation = name(tail.activation);
  std::string text;
  if (!tail.norm) {
    text = activation;
  } else if (tail.activation == Activation::kNone) {
    text = "group norm";
  } else if (tail.order == Order::kActNorm) {
    text = activation + ", then group norm";
  } else {
    text = "group norm, then " + activation;
  }
  if (tail.has_skip) text = "a skip added, then " + text;
  return tail.returns_conv ? text + ", returning the convolution" : text;
}

}  // namespace upconv3d
