// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward_col2im.hpp"

#include <stdexcept>

#include "core/col2im_plan.hpp"
#include "cuda/conv_transpose/col2im.hpp"
#include "cuda/conv_transpose/conv_transpose_columns_sm80.hpp"
#include "cuda/stage_range.hpp"

namespace upconv3d::cuda {

std::int64_t columns_bytes(const Problem& problem) {
  return ColumnsLayout(problem).values() * static_cast<std::int64_t>(sizeof(float));
}

#ifdef UPCONV3D_HAS_SM80

void convolve_by_columns(const Problem& problem, const ForwardTensors& tensors, const ColumnsTail& tail,
                         cudaStream_t stream) {
  ConvTransposeColumnsParams product;
  product.problem = problem;
  product.x = tensors.x;
  product.w = tensors.w;
  for (int axis = 0; axis < 5; ++axis) product.w_strides[axis] = tensors.w_strides[axis];
  product.columns = tensors.workspace;
  {
    const StageRange range("upconv3d::conv_transpose_columns");
    launch_columns(product, stream);
  }

  Col2imParams gather;
  gather.problem = problem;
  gather.columns = tensors.workspace;
  gather.bias = tail.bias;
  gather.activation = tail.activation;
  gather.y = tail.y;
  const StageRange range("upconv3d::col2im");
  launch_col2im(gather, stream);
}

#else

void convolve_by_columns(const Problem&, const ForwardTensors&, const ColumnsTail&, cudaStream_t) {
  throw std::logic_error(
      "upconv3d: conv_transpose_columns_sm80 is not part of this build; an arch from 80 on is missing from "
      "UPCONV3D_CUDA_ARCHS");
}

#endif

}  // namespace upconv3d::cuda
