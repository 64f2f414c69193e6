// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the gradient at x is computed on the SM90 kernel: as a plain convolution.
///
///   grad_x[n,c,i] = sum over k and taps of grad_c[n,k,i*stride - padding + tap*dilation] * w[c,k,tap]
///
/// grad_c [N,K,Z,P,Q] is the gradient at the transposed convolution's output. In the kernel's terms, K are
/// the input channels and C the output channels; nothing is added, activated or normalized.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/channels.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/sm90_schedule.hpp"

namespace upconv3d {

/// The plain convolution that computes grad_x of the block: c, k, in and out() are its K, C, Z,P,Q and D,H,W.
/// y_layout is that of grad_x, x's.
Problem grad_x_problem(const Problem& block);

/// Channels of a row of grad_c [N,Z,P,Q,pitch], zeros behind K. In operand form whole sectors, see
/// operand_channels; a SplitRow of float32's accuracy has as many as before(conv), so that it may take its
/// place.
inline std::int64_t grad_c_pitch(const Problem& block) {
  const bool split = block.is_ieee();
  return split ? padded_channels(block.k) : ceil_div(block.k, kSectorChannels) * kSectorChannels;
}

struct GradXPlan {
  Problem problem;          // grad_x_problem of the block
  ConvInstance instance{};  // operand is the dtype of grad_c, which is scaled where that is not x's dtype
  std::int64_t grad_c_pitch = 0;  // see there
  Cut cut;
  bool in_place = false;               // the kernel stores grad_x itself, else rows that are then unpacked
  double estimated_multiply_ms = 0.0;  // of the convolution, without packing and unpacking
  std::vector<std::string> stages;     // kernels in launch order, by name

  // Of float32's accuracy: rows of grad_c are SplitRows.
  bool split_grad_c() const { return instance.products == 3; }
};

/// Sets the cut and what follows from it: whether the kernel can store grad_x where it belongs, in rows of
/// whole 16-byte chunks of channels, or of positions that no cut parts but between planes.
void cut_output(GradXPlan& plan, const Cut& cut);

/// Why the SM90 kernel cannot compute grad_x of the block, or "" with `plan` set.
std::string grad_x_obstacle(const Problem& block, const Device& device,
                            const std::vector<ConvInstance>& instances, std::optional<GradXPlan>& plan);

/// Several lines for people: kernel, stages, cut.
std::string describe(const GradXPlan& plan);

}  // namespace upconv3d
