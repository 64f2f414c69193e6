// SPDX-License-Identifier: Apache-2.0
#include "cuda/check.hpp"

#include <stdexcept>

namespace upconv3d::cuda {

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // said once, here: the next launch must not report it again
  throw std::runtime_error(std::string("upconv3d: ") + doing + " failed: " + cudaGetErrorString(status) +
                           " (" + cudaGetErrorName(status) + ")");
}

}  // namespace upconv3d::cuda
