// SPDX-License-Identifier: Apache-2.0
/// \file
/// More shared memory for a kernel than kernels get unasked: asked for once per device, since it takes an
/// H200's host 1 us.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

/// Of one kernel; static, beside its launch. Safe to use from several threads.
class ReservedSharedMemory {
 public:
  /// To precede a launch of `kernel` with `bytes` on the current device, always the same two.
  void ensure(const char* name, const void* kernel, int bytes) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((devices_.load(std::memory_order_relaxed) & bit) != 0) return;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) check(status, std::string("reserving shared memory for ") + name);
    devices_.fetch_or(bit, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> devices_{0};  // bit i: device i; of the first 64
};

}  // namespace upconv3d::cuda
