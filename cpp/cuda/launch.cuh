// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launches, and kernels that begin while the one before runs: what they do first, such as bringing weights
/// to shared memory, does not depend on that one. On devices from compute capability 9.0 on (programmatic
/// dependent launch); on others they begin afterwards, as kernels do.
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

/// In a kernel that begins so: until the one before has ended and what it wrote can be read. What that one
/// reads, the kernel before the two has written.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The blocks of a launch.
struct LaunchShape {
  dim3 grid;
  dim3 threads;
  std::size_t shared_bytes;
  unsigned cluster_blocks = 1;  // along the grid's x
};

/// Launches a kernel, and says what CUDA says.
/// \param beside whether it may begin when the one before says so or its blocks have ended, and not only once
/// what that one wrote has been written, too: it calls wait_for_kernel_before where it reads that. On devices
/// that know such launches
template <class Args>
cudaError_t launch_status(void (*kernel)(Args), const LaunchShape& shape, cudaStream_t stream,
                          const Args& args, bool beside) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (beside) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape.cluster_blocks, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, args);
}

/// Launches a kernel.
/// \param beside as for launch_status, and ignored where the device does not know such launches
/// \throws std::runtime_error where CUDA refuses
template <class Args>
void launch_kernel(const char* name, void (*kernel)(Args), const LaunchShape& shape, cudaStream_t stream,
                   const Args& args, bool beside) {
  if (beside) {
    constexpr int kHopper = 9;
    int device = 0, major = 0;
    check(cudaGetDevice(&device), name);
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), name);
    beside = major >= kHopper;
  }
  check(launch_status(kernel, shape, stream, args, beside), name);
}

}  // namespace upconv3d::cuda
