// SPDX-License-Identifier: Apache-2.0
/// \file
/// What architecture the code of a kernel was compiled for: of code that a GPU runs from PTX, less than the
/// GPU's own. Asked for once per device, since it takes the host a microsecond.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

/// Of one kernel; static, beside its launch. Safe to use from several threads.
class CompiledArch {
 public:
  /// __CUDA_ARCH__ / 10 of the code that the current device runs.
  int of(const void* kernel) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    const auto index = static_cast<std::size_t>(device);
    const int known = index < known_.size() ? known_[index].load(std::memory_order_relaxed) : 0;
    if (known != 0) return known;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "asking what a kernel was compiled for");
    if (index < known_.size()) known_[index].store(attributes.ptxVersion, std::memory_order_relaxed);
    return attributes.ptxVersion;
  }

 private:
  std::array<std::atomic<int>, 64> known_{};  // of the first 64 devices; 0: not asked for
};

}  // namespace upconv3d::cuda
