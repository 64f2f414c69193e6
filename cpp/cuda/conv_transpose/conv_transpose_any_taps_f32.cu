// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_any_taps of float32 tensors.
#include "cuda/conv_transpose/any_taps_launch.cuh"

namespace upconv3d::cuda {

template void launch_any_taps<float>(const ConvTransposeDirectParams&, const DirectTiling&, cudaStream_t);

}  // namespace upconv3d::cuda
