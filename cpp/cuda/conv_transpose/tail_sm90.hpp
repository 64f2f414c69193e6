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

/// params.before.
/// \throws std::logic_error where that is not problem.tail.before(), and for a skip input, which the kernels
/// do not read.
inline const ActivationParams& checked_before(const ConvTransposeParams& params) {
  const Tail& tail = params.problem.tail;
  if (tail.has_skip || params.before.kind != tail.before()) {
    throw std::logic_error("upconv3d: the SM90 kernels add no skip input and apply their tail's activation " +
                           std::string("to the convolution; got ") + name(params.before.kind) + " for " +
                           describe(tail) + ". Set `before`, or choose another plan.");
  }
  return params.before;
}

/// What conv + bias is raised to before anything else: by ReLU to 0, else to -infinity.
inline float activation_floor(const ActivationParams& before) {
  return before.kind == Activation::kRelu ? 0.f : -std::numeric_limits<float>::infinity();
}

/// The same where activation_floor is all that is applied.
/// \throws std::logic_error elsewhere.
inline float checked_floor(const ConvTransposeParams& params) {
  const ActivationParams& before = checked_before(params);
  if (!is_floor(before.kind)) {
    throw std::logic_error("upconv3d: this SM90 kernel applies relu or nothing to the convolution; got " +
                           describe(params.problem.tail) + ". select_plan must choose another plan.");
  }
  return activation_floor(before);
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
