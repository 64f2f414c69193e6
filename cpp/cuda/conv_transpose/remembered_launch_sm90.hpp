// SPDX-License-Identifier: Apache-2.0
/// \file
/// What both SM90 kernels' launches do with the launch before them.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/launch_memo.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

/// What the descriptors of a launch show, in Mapped's order.
inline MappedAddresses mapped_addresses(const ConvTransposeParams& params) {
  return {params.x_hi, params.x_lo, params.w_hi, params.w_lo, params.a};
}

/// Runs the Launch that params.memo holds, or one made for `params`.
template <class Launch>
void run_remembered(const ConvTransposeParams& params, cudaStream_t stream) {
  LaunchMemo::run<Launch>(
      params.memo, [&] { return std::make_unique<Launch>(params); },
      [&](Launch& launch) { launch.run(params, stream); });
}

}  // namespace upconv3d::cuda
