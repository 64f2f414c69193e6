// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_depthwise of bfloat16 tensors.
#include "cuda/conv_transpose/depthwise_launch.cuh"

namespace upconv3d::cuda {

template void launch_depthwise<__nv_bfloat16>(const ConvTransposeDirectParams&, const DirectTiling&,
                                              cudaStream_t);

}  // namespace upconv3d::cuda
