// SPDX-License-Identifier: Apache-2.0
/// \file
/// Copies of tensors in the other order, channels last, several by one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

/// A copy with two axes swapped: of x, [N,C,D*H*W] to [N,D*H*W,C]; of w, [C,K,T*R*S] to [C,T*R*S,K].
struct ChannelsLastCopy {
  std::int64_t batch = 0;      // 0: nothing is copied
  std::int64_t channels = 0;   // what comes to lie innermost
  std::int64_t positions = 0;  // what lay there
  const void* from = nullptr;  // [batch,channels,positions] dtype, dense
  void* to = nullptr;          // [batch,positions,channels] dtype, written
};

/// Asynchronous; one launch, or none where nothing is copied.
/// \throws std::invalid_argument for float64 or 2^31 tiles, std::runtime_error where CUDA refuses.
void launch_channels_last_copies(const std::array<ChannelsLastCopy, 2>& copies, DType dtype,
                                 cudaStream_t stream);

}  // namespace upconv3d::cuda
