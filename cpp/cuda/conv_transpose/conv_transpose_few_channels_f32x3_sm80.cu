// SPDX-License-Identifier: Apache-2.0
#include "cuda/conv_transpose/conv_transpose_few_channels_sm80.cuh"
#include "cuda/conv_transpose/few_channels_variants_sm80.hpp"

namespace upconv3d::cuda {

void launch_few_channels_f32x3(const FewParams& params, const FewChannelsLayout& layout, bool output,
                               cudaStream_t stream) {
  if (output) return launch_few_columns<float, true, 3>(params, layout, stream);
  launch_few_columns<float, false, 3>(params, layout, stream);
}

}  // namespace upconv3d::cuda
