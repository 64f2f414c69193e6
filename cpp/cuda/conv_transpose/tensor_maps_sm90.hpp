// SPDX-License-Identifier: Apache-2.0
/// \file
/// TMA descriptors of the SM90 convolution, encoded on the host for every call (about a microsecond each).
///
/// The encoders are looked up in the driver through the runtime, so nothing links against libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

/// x [N,D,H,W,C] 16 bit, read by TMA im2col: `box_positions` output positions x `box_channels` channels.
///
/// At stride 1 a transposed convolution gathers x at z + padding - t. With the flipped tap t' = T-1-t that is
/// a plain convolution whose first pixel lies at padding - (T-1), the lower corner; the upper corner is
/// -padding, so that the bounding box holds Z*P*Q base pixels per sample.
CUtensorMap encode_x_im2col(const Problem& problem, DType operand, const void* x, int box_positions,
                            int box_channels);

/// w [T*R*S,K,C] 16 bit, read in tiles of one tap x `box_k` output channels x `box_channels`.
CUtensorMap encode_w(const Problem& problem, DType operand, const void* w, int box_k, int box_channels);

/// a [N,Z*P*Q,K], stored in tiles of one sample x `box_positions` x `box_k`: a tile that hangs over the end
/// of its sample is clipped, so it never writes into the next one.
CUtensorMap encode_a(const Problem& problem, DType activation, void* a, int box_positions, int box_k);

}  // namespace upconv3d::cuda
