// SPDX-License-Identifier: Apache-2.0
/// \file
/// A kernel that begins while the one before runs: what it does first, such as bringing weights to shared
/// memory, does not depend on that one. On devices from compute capability 9.0 on (programmatic dependent
/// launch); on others it begins afterwards, as kernels do.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

/// In the kernel before, by all blocks: from then on the next one may begin, if it is launched so.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Launches a kernel that calls wait_for_kernel_before (cuda/group_norm/element.cuh) where it reads what the
/// one before writes. What that one reads, the kernel before the two has written.
template <class Args>
void launch_beside(const char* name, void (*kernel)(Args), dim3 grid, dim3 threads, std::size_t shared_bytes,
                   cudaStream_t stream, const Args& args) {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), name);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), name);
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &programmatic;
  constexpr int kHopper = 9;
  config.numAttrs = major >= kHopper ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}

}  // namespace upconv3d::cuda
