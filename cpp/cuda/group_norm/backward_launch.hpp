// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the launcher of group_norm_backward shares with the files that hold its kernels.
#pragma once

#include <cstdint>

#include "cuda/group_norm/group_norm_backward.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {

/// How a unit's channels lie over a block of threads, and how many of those make up a row.
struct BackwardShape {
  int vectors = 0, slots = 0;  // vectors of channels, positions
  int block_channels = 0, channel_blocks = 0;
  int max_blocks = 0;  // of the grid
};
BackwardShape backward_shape(const GroupNormBackwardParams& params);

/// Scratch memory, the counters first.
struct BackwardScratch {
  Carver carver;
  void* counters;    // arrivals [N], ready [N], largest [1], tickets [N,G] int32
  void* part;        // [units,block_channels,8] float
  void* sums;        // [N,K] ChannelSums
  void* terms;       // [N,G] GroupTerms
  void* slope_sums;  // [N,K] double, where grad_slopes are wanted
  std::int64_t bytes;

  BackwardScratch(const GroupNormBackwardParams& params, void* base);
};

/// Whether the kernels for relu before the normalization and nothing behind it, the block of most calls, do.
inline bool is_relu_group_norm(const GroupNormBackwardParams& params) {
  return params.before == Activation::kRelu && params.after.kind == Activation::kNone && !params.signed_steps;
}

/// grad_y and gamma of T, a of A, grad_c of Out; `params` are right and not empty.
template <class T, class A, class Out>
void launch_backward(const GroupNormBackwardParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
