// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the GPU test programs share: skipping, by exit code, where there is no GPU to run on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

namespace upconv3d::tests {

/// ctest's SKIP_RETURN_CODE for these programs.
inline constexpr int kSkipped = 77;

/// True, with a line that says so, where no CUDA device of at least `compute_capability` (major*10 + minor)
/// can be used.
inline bool no_gpu(int compute_capability) {
  int devices = 0;
  cudaDeviceProp properties{};
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
    std::puts("skipped: no CUDA device");
    return true;
  }
  if (properties.major * 10 + properties.minor < compute_capability) {
    std::printf("skipped: compute capability %d.%d\n", properties.major, properties.minor);
    return true;
  }
  return false;
}

}  // namespace upconv3d::tests
