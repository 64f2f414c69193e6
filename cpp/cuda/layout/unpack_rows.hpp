// SPDX-License-Identifier: Apache-2.0
/// \file
/// Rows of padded channels, as tensor-core kernels store them, to a dense tensor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

struct UnpackRowsParams {
  std::int64_t n = 0;
  std::int64_t positions = 0;      // of a sample
  std::int64_t channels = 0;       // C
  std::int64_t pitch = 0;          // elements of a row, a multiple of 8
  DType dtype = DType::kFloat32;   // 16 or 32 bit
  Layout layout = Layout::kNCDHW;  // of `dense`
  const void* rows = nullptr;      // [N,positions,pitch] dtype, 16-byte aligned
  void* dense = nullptr;           // [N,C,positions] or [N,positions,C] dtype, written
};

/// unpack_rows: the channels of every row, bit for bit.
/// \throws std::invalid_argument for a dtype of other than 16 or 32 bit.
void launch_unpack_rows(const UnpackRowsParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
