// SPDX-License-Identifier: Apache-2.0
/// \file
/// Kernels of group_norm_backward for bfloat16 and float16.
#include "cuda/group_norm/backward_launch.cuh"

namespace upconv3d::cuda {

template void launch_backward<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(const GroupNormBackwardParams&, cudaStream_t);
template void launch_backward<__half, __half, __half>(const GroupNormBackwardParams&, cudaStream_t);

}  // namespace upconv3d::cuda
