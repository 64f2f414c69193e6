// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_depthwise of float32 tensors.
#include "cuda/conv_transpose/depthwise_launch.cuh"

namespace upconv3d::cuda {

template void launch_depthwise<float>(const ConvTransposeDirectParams&, const DirectTiling&, cudaStream_t);

}  // namespace upconv3d::cuda
