// SPDX-License-Identifier: Apache-2.0
/// \file
/// How partial sums of the gradient of the weight lie in scratch memory: as the accumulators of wgmma hold
/// them, so that a warp stores and reads 512 bytes at once.
///
/// A float4 has two neighbouring columns of a row and of the row 8 below; a warp, 16 rows and 8 columns.
#pragma once

#include <cstdint>

namespace upconv3d::cuda {

inline constexpr int kGradWBlockColumns = 8;  // of the accumulators that a warp's float4 belong to
inline constexpr int kGradWWarpRows = 16;

/// Index of a thread's float4.
///
/// \param unit    split * tiles + tile
/// \param blocks  of 8 columns that a warpgroup has
/// \param block   of those
/// \param thread  of the warpgroup
__host__ __device__ inline std::int64_t grad_w_partial(std::int64_t unit, int warpgroup, int blocks,
                                                       int block, int thread) {
  return ((unit * 2 + warpgroup) * blocks + block) * 128 + thread;
}

/// Row among the warp's 16 and column among the 8 of element `i` of a lane's float4.
__host__ __device__ inline int grad_w_row(int lane, int i) {
  return lane / 4 + i / 2 * 8;
}
__host__ __device__ inline int grad_w_column(int lane, int i) {
  return lane % 4 * 2 + i % 2;
}

}  // namespace upconv3d::cuda
