// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_depthwise of float16 tensors.
#include "cuda/conv_transpose/depthwise_launch.cuh"

namespace upconv3d::cuda {

template void launch_depthwise<__half>(const ConvTransposeDirectParams&, const DirectTiling&, cudaStream_t);

}  // namespace upconv3d::cuda
