// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many blocks of a kernel a device holds at once, which differs from GPU to GPU and with the shared
/// memory of a block: asked for where that changes alone, since the driver takes the host 3 us.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

/// Of one kernel; static, beside its launch. Safe to use from several threads.
class ResidentBlocks {
 public:
  /// Blocks per multiprocessor of the current device. To follow the reservation of the shared memory.
  /// \param threads always the same
  int per_multiprocessor(const void* kernel, int threads, std::size_t shared_bytes) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    const auto index = static_cast<std::size_t>(device);
    const std::uint64_t known = index < known_.size() ? known_[index].load(std::memory_order_relaxed) : 0;
    if (known != 0 && known >> kBlockBits == shared_bytes) {
      return static_cast<int>(known & ((std::uint64_t{1} << kBlockBits) - 1));
    }
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
          "counting a multiprocessor's blocks");
    if (index < known_.size()) {
      known_[index].store(shared_bytes << kBlockBits | static_cast<unsigned>(blocks),
                          std::memory_order_relaxed);
    }
    return blocks;
  }

 private:
  static constexpr int kBlockBits = 16;  // of known_; the others are the shared memory's bytes

  // What was asked for last on each of the first 64 devices; 0: nothing, as a block of no shared memory of
  // which none fits.
  std::array<std::atomic<std::uint64_t>, 64> known_{};
};

}  // namespace upconv3d::cuda
