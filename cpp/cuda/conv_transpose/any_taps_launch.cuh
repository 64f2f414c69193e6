// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_any_taps of the channels that a tiling names.
#pragma once

#include "cuda/conv_transpose/conv_transpose_direct.cuh"
#include "cuda/conv_transpose/direct_launch.cuh"

namespace upconv3d::cuda {

template <class T, int kChannels>
void launch_any_taps_pass(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                          cudaStream_t stream) {
  const auto pass = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    const auto kernel = params.part != nullptr ? conv_transpose_any_taps<T, kChannels, kPlain, true>
                                               : conv_transpose_any_taps<T, kChannels, kPlain, false>;
    static DirectKernelFacts facts[2];  // of the output pass, of the moments'
    launch_direct_kernel<T>("conv_transpose_any_taps", kernel, params, tiling,
                            facts[params.part != nullptr ? 1 : 0], stream);
  };
  return is_plain(params) ? pass(std::true_type{}) : pass(std::false_type{});
}

template <class T>
void launch_any_taps(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                     cudaStream_t stream) {
  switch (tiling.vector) {
    case 1:
      return launch_any_taps_pass<T, 1>(params, tiling, stream);
    case 2:
      return launch_any_taps_pass<T, 2>(params, tiling, stream);
    case 4:
      return launch_any_taps_pass<T, 4>(params, tiling, stream);
    case 8:
      return launch_any_taps_pass<T, 8>(params, tiling, stream);
  }
  throw std::logic_error(
      "upconv3d: conv_transpose_any_taps has kernels of 1, 2, 4 and 8 channels a thread; "
      "got " +
      std::to_string(tiling.vector) + " for " + describe(params.problem) +
      ". direct_tiling must choose one of these.");
}

}  // namespace upconv3d::cuda
