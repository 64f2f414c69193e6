// SPDX-License-Identifier: Apache-2.0
/// \file
/// Every CUDA status becomes an exception that says what was being done.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace upconv3d::cuda {

/// Throws std::runtime_error naming `doing` unless `status` is cudaSuccess.
void check(cudaError_t status, const char* doing);
inline void check(cudaError_t status, const std::string& doing) {
  check(status, doing.c_str());
}

/// To follow a kernel launch: throws if the launch was refused.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

}  // namespace upconv3d::cuda
