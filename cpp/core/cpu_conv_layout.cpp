// SPDX-License-Identifier: Apache-2.0
#include "core/cpu_conv_layout.hpp"

#include <cstdint>

namespace upconv3d {
namespace {

/// PyTorch 2.13's own rule (ConvParams::use_mkldnn) for float32 and bfloat16: whether oneDNN computes the
/// convolution. Otherwise im2col and BLAS do, in NCDHW only.
bool onednn_takes(const Problem& p, int max_threads) {
  for (int axis = 0; axis < 3; ++axis) {
    if (p.output_padding[axis] >= p.stride[axis]) return false;
  }
  if (p.dtype == DType::kBFloat16) return true;
  const bool unit_steps = p.stride == Extent3{1, 1, 1} && p.dilation == Extent3{1, 1, 1};
  const bool pointwise = p.kernel[1] == 1 && p.kernel[2] == 1;
  if (unit_steps && p.n < 16 && pointwise && max_threads <= 1) return false;
  const bool wide_kernel = p.kernel[1] > 3 && p.kernel[2] > 3;
  return p.groups > 1 || wide_kernel || p.n > 1 || p.c * p.in[0] * p.in[1] > 20480;
}

}  // namespace

// Measured with PyTorch 2.13 on an AVX-512 host: time in NDHWC over time in NCDHW, copying x included.
//
// - Dense, 12^3 positions and more, from 3 -> 16 to 128 -> 128 channels: 0.3-0.9.
// - 64 -> 16 channels with kernel = stride = 2: 1.0. 32 -> 2 channels with kernel 3: 1.0-1.2. Copying x costs
// the gain.
// - float32 up to 8^3 positions: 1.0-1.07. Reordering the weights is most of the work.
// - Depthwise: 1.2-1.9. Other groups: 0.5-1.4, without a pattern.
//
// Where x is NDHWC already it stays so: that is what PyTorch's own call would compute in.
Layout cpu_conv_layout(const Problem& problem, int max_threads) {
  // oneDNN computes neither float64 nor, on most machines, float16.
  if (problem.dtype == DType::kFloat64) return Layout::kNCDHW;
  if (problem.dtype == DType::kFloat16) return problem.x_layout;
  if (!onednn_takes(problem, max_threads)) return Layout::kNCDHW;
  if (problem.x_layout == Layout::kNDHWC || problem.groups > 1) return problem.x_layout;

  // Multiplications that each copied element of x takes part in.
  constexpr std::int64_t kWorthCopying = 256;
  // Input positions per sample from which float32 gained.
  constexpr std::int64_t kEnoughPositions = 1024;
  const bool worth = problem.k * volume(problem.kernel) >= kWorthCopying;
  const bool enough = problem.dtype == DType::kBFloat16 || volume(problem.in) >= kEnoughPositions;
  return worth && enough ? Layout::kNDHWC : Layout::kNCDHW;
}

}  // namespace upconv3d
