// SPDX-License-Identifier: Apache-2.0
/// \file
/// A module's float32 parameters in 16 bit, as autocast wants them: all of a call's by one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

struct CastParametersParams {
  struct Tensor {
    const float* from = nullptr;  // [count]
    void* to = nullptr;           // [count] dtype, 16-byte aligned, written
    std::int64_t count = 0;
  };
  static constexpr int kMost = 5;  // weight, bias, norm_weight, norm_bias, slopes
  std::array<Tensor, kMost> tensors{};
  int num_tensors = 0;
  DType dtype = DType::kBFloat16;  // of 16 bit
};

/// cast_parameters: every value rounded to the nearest, ties to even, as Tensor.to does.
/// \throws std::invalid_argument for a dtype of other than 16 bit.
void launch_cast_parameters(const CastParametersParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
