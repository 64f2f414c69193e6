// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the backward pass runs after a forward pass that kept before(conv): the gradient at the convolution's
/// output, grad_c, from group_norm_backward; grad_x and grad_w from it by our kernels, or by the library. And
/// after one of the library plan that kept the convolution: grad_c from norm_backward, or without a norm from
/// activation_backward, the rest by the library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/grad_w_plan.hpp"
#include "core/grad_x_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Which gradients a caller asks for.
struct GradientMask {
  bool x = false, w = false, bias = false, gamma = false, beta = false, slopes = false;

  bool any() const { return x || w || bias || gamma || beta || slopes; }
  bool convolution() const { return x || w; }
};

struct BackwardPlan {
  std::string reason;               // why the library computes grad_x and grad_w, or ""
  std::optional<GradXPlan> grad_x;  // where it is wanted and ours to compute
  std::optional<GradWPlan> grad_w;
  bool library = false;  // grad_c is for PyTorch's convolution_backward, in its own dtype
  bool scaled = false;   // grad_c is float16 with one power of two for all
  bool split = false;    // the same in two float16 of each value: rows of grad_c are SplitRows
  std::int64_t grad_c_pitch =
      0;  // channels of a row of grad_c [N,Z,P,Q,pitch], zeros behind K; 0: not wanted
  std::vector<std::string> stages;  // kernels in launch order, by name
};

/// Chooses how the wanted gradients are computed: both of the convolution's by our kernels, or both by the
/// library, since they read grad_c in different forms. A pure function of its arguments.
BackwardPlan select_backward_plan(const Problem& problem, const Device& device, const GradientMask& wanted,
                                  const std::vector<ConvInstance>& instances = conv_instances(),
                                  const std::vector<GradWInstance>& grad_w_variants = grad_w_instances());

/// Whether the backward of a tail without a norm begins with the result, which is ReLU's, or reads no more
/// than its gradient, as there is no activation; else it begins with the convolution.
bool begins_with_result(const Tail& tail);

/// The same after a forward pass of the library plan, or of any without a norm. \see Plan::keeps_conv
BackwardPlan library_backward_plan(const Problem& problem, const GradientMask& wanted);

/// Several lines for people.
std::string describe(const BackwardPlan& plan);

}  // namespace upconv3d
