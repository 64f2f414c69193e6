// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_depthwise of the taps and channels that a tiling names.
#pragma once

#include "cuda/conv_transpose/conv_transpose_depthwise.cuh"
#include "cuda/conv_transpose/direct_launch.cuh"

namespace upconv3d::cuda {

template <class T, int kTaps, int kChannels>
void launch_depthwise_pass(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                           cudaStream_t stream) {
  const auto pass = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    const auto kernel = params.part != nullptr ? conv_transpose_depthwise<T, kTaps, kChannels, kPlain, true>
                                               : conv_transpose_depthwise<T, kTaps, kChannels, kPlain, false>;
    static DirectKernelFacts facts[2];  // of the output pass, of the moments'
    launch_direct_kernel<T>("conv_transpose_depthwise", kernel, params, tiling,
                            facts[params.part != nullptr ? 1 : 0], stream);
  };
  return is_plain(params) ? pass(std::true_type{}) : pass(std::false_type{});
}

template <class T, int kTaps>
void launch_depthwise_taps(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                           cudaStream_t stream) {
  if constexpr (kTaps == 3) {
    if (tiling.vector == 2) return launch_depthwise_pass<T, kTaps, 2>(params, tiling, stream);
  }
  return launch_depthwise_pass<T, kTaps, 1>(params, tiling, stream);
}

template <class T>
void launch_depthwise(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                      cudaStream_t stream) {
  if (tiling.lanes_c > kMaxDepthwiseLanes) {
    throw std::logic_error("upconv3d: conv_transpose_depthwise has at most " +
                           std::to_string(kMaxDepthwiseLanes) + " threads along the channels; got " +
                           std::to_string(tiling.lanes_c) + " for " + describe(params.problem) +
                           ". direct_tiling must give the others to the depth.");
  }
  switch (params.problem.kernel[0]) {
    case 3:
      return launch_depthwise_taps<T, 3>(params, tiling, stream);
    case 5:
      return launch_depthwise_taps<T, 5>(params, tiling, stream);
    case 7:
      return launch_depthwise_taps<T, 7>(params, tiling, stream);
  }
  throw std::logic_error("upconv3d: conv_transpose_depthwise has kernels of 3, 5 and 7 taps; got " +
                         describe(params.problem) + ". direct_tiling must choose the one for any taps.");
}

}  // namespace upconv3d::cuda
