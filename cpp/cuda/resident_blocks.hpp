// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many blocks of a kernel a device holds at once, which differs from GPU to GPU: asked for once per
/// device, since the driver works it out anew each time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

/// Of one kernel; static, beside its launch. Safe to use from several threads.
class ResidentBlocks {
 public:
  /// Blocks per multiprocessor of the current device. To follow the reservation of the shared memory.
  int per_multiprocessor(const void* kernel, int threads, std::size_t shared_bytes) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    const auto index = static_cast<std::size_t>(device);
    if (index < known_.size() && known_[index].load(std::memory_order_relaxed) > 0) {
      return known_[index].load(std::memory_order_relaxed);
    }
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
          "counting a multiprocessor's blocks");
    if (index < known_.size()) known_[index].store(blocks, std::memory_order_relaxed);
    return blocks;
  }

 private:
  std::array<std::atomic<int>, 64> known_{};  // of the first 64 devices; 0: not asked for
};

}  // namespace upconv3d::cuda
