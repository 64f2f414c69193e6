// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launches of persistent kernels whose blocks wait for each other.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/check.hpp"

namespace upconv3d::cuda {

struct CooperativeShape {
  int blocks;
  int threads;
  int shared_bytes;
};

/// To precede the first launch of `kernel` on a device: that many bytes are more than kernels get unasked.
inline void reserve_shared_memory(const char* name, const void* kernel, int bytes) {
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) check(status, std::string("reserving shared memory for ") + name);
}

/// Launches `kernel`, whose shared memory is reserved and whose one parameter `params` points to, with all
/// blocks on the card at once; with fewer where that many do not fit, so any number of blocks must do.
///
/// \param prepare (blocks) called before every attempt, for parameters that depend on their number
template <class Prepare>
void launch_cooperative(const char* name, const void* kernel, void* params, const CooperativeShape& shape,
                        cudaStream_t stream, Prepare prepare) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {params};
  const auto launch = [&] {
    prepare(static_cast<int>(config.gridDim.x));
    return cudaLaunchKernelExC(&config, kernel, arguments);
  };
  cudaError_t status = launch();
  // A context may be granted fewer multiprocessors than the device has (green contexts, MPS).
  while (status == cudaErrorCooperativeLaunchTooLarge && config.gridDim.x > 1) {
    cudaGetLastError();
    config.gridDim.x = (config.gridDim.x + 1) / 2;
    status = launch();
  }
  check(status, name);
}

}  // namespace upconv3d::cuda
