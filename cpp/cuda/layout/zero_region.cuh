// SPDX-License-Identifier: Apache-2.0
/// \file
/// Memory that a kernel clears beside its own work, which spares a memset node.
#pragma once

#include <cstdint>

namespace upconv3d::cuda {

struct ZeroRegion {
  void* begin = nullptr;   // 16-byte aligned
  std::int64_t bytes = 0;  // 0: nothing to clear
};

/// The whole grid (one-dimensional) clears the region. Later kernels of the stream may rely on it, other
/// blocks of this one not.
__device__ inline void clear(const ZeroRegion& region) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t vectors = region.bytes / 16;
  for (std::int64_t i = thread; i < vectors; i += threads) static_cast<uint4*>(region.begin)[i] = uint4{};
  if (thread < region.bytes % 16) static_cast<std::uint8_t*>(region.begin)[vectors * 16 + thread] = 0;
}

}  // namespace upconv3d::cuda
