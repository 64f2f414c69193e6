// SPDX-License-Identifier: Apache-2.0
/// \file
/// Kernels of group_norm_backward for float32 with a in float32.
#include "cuda/group_norm/backward_launch.cuh"

namespace upconv3d::cuda {

template void launch_backward<float, float, float>(const GroupNormBackwardParams&, cudaStream_t);
template void launch_backward<float, float, __half>(const GroupNormBackwardParams&, cudaStream_t);
template void launch_backward<float, float, SplitHalf>(const GroupNormBackwardParams&, cudaStream_t);

}  // namespace upconv3d::cuda
