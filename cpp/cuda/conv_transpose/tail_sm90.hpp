// SPDX-License-Identifier: Apache-2.0
/// \file
/// What both SM90 kernels take of a block's tail (core/tail.hpp), checked.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "core/tail.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"

namespace upconv3d::cuda {

/// problem.tail.before() as what conv + bias is raised to: 0 for ReLU, -infinity for none. Where the launch
/// is linear, who reads a applies what is neither.
/// \throws std::logic_error elsewhere, and for a skip input, which the kernels do not read.
inline float activation_floor(const ConvTransposeParams& params) {
  const Tail& tail = params.problem.tail;
  const Activation before = tail.before();
  const bool left_to_others = before != Activation::kNone && before != Activation::kRelu;
  if (tail.has_skip || (left_to_others && !params.linear)) {
    throw std::logic_error("upconv3d: the SM90 kernels add no skip input and apply relu or nothing to the " +
                           std::string("convolution; got ") + describe(tail) +
                           ". select_plan must choose another plan.");
  }
  return before == Activation::kRelu ? 0.f : -std::numeric_limits<float>::infinity();
}

/// params.after, for a launch that normalizes.
/// \throws std::logic_error where that is not problem.tail.after().
inline const ActivationParams& checked_after(const ConvTransposeParams& params) {
  if (params.after.kind != params.problem.tail.after()) {
    throw std::logic_error("upconv3d: an SM90 kernel that normalizes applies its tail's activation; got " +
                           std::string(name(params.after.kind)) + " for " + describe(params.problem.tail) +
                           ". Set `after`.");
  }
  return params.after;
}

/// The same where it must be piecewise linear.
/// \throws std::logic_error elsewhere.
inline const ActivationParams& checked_linear_after(const ConvTransposeParams& params) {
  if (!is_piecewise_linear(params.problem.tail.after())) {
    throw std::logic_error(
        "upconv3d: this SM90 kernel applies piecewise linear activations after the normalization; got " +
        describe(params.problem.tail) + ". Let group_norm_normalize apply the others.");
  }
  return checked_after(params);
}

}  // namespace upconv3d::cuda
