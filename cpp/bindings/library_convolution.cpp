// SPDX-License-Identifier: Apache-2.0
#include "bindings/library_convolution.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arguments.hpp"
#include "core/idle_taps.hpp"
#include "core/one_voxel.hpp"

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;

/// w [C,K,T,R,S] as it lies, or a copy where it lies in neither order.
Tensor dense_weight(const Tensor& w, Layout otherwise) {
  const bool is_dense = is_dense_in(w, Layout::kNCDHW) || is_dense_in(w, Layout::kNDHWC);
  return is_dense ? w : contiguous_in(w, otherwise);
}

}  // namespace

LibraryConvolution::LibraryConvolution(const Problem& given, const Tensor& all_taps, bool adds_bias)
    : problem(given), w(all_taps) {
  if (const std::optional<CroppedTaps> cropped = without_idle_taps(given)) {
    problem = cropped->problem;
    Ints sizes = sizes_of(w);
    const Ints strides = strides_of(w);
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis < 3; ++axis) {
      sizes[2 + axis] = problem.kernel[axis];
      offset += cropped->first[axis] * strides[2 + axis];
    }
    // One dense copy, in the format that PyTorch takes the given one for.
    const bool is_last = suggests_channels_last_3d(sizes_of(all_taps), strides);
    const Layout layout = is_last ? Layout::kNDHWC : Layout::kNCDHW;
    w = contiguous_in(reinterpret(w, sizes, strides, offset), layout);
  }
  if (!adds_bias) product_ = product_of_one_voxel(problem);
  if (!product_) return;
  // On the CPU float32 is float32, whatever PyTorch's setting of matrix products says. On a GPU, kernels of
  // pointwise convolutions may read 16 bytes at a time.
  const bool multiplies =
      w.is_cuda() ? describe_tensor(w).data_ptr_mod16 == 0 : problem.dtype != DType::kFloat32;
  if (!multiplies) product_.reset();
}

Tensor LibraryConvolution::run(const Tensor& x, const Tensor& operand, const std::optional<Tensor>& bias,
                               const std::optional<CudnnFlags>& flags) const {
  return product_ ? run_product(x, operand, flags) : conv_transpose3d(x, operand, bias, problem, flags);
}

Tensor LibraryConvolution::run_product(const Tensor& x, const Tensor& operand,
                                       const std::optional<CudnnFlags>& flags) const {
  const Tensor weight = dense_weight(operand, problem.y_layout);
  // Of one tap, w lies in both orders, and so does y.
  const Layout layout = is_dense_in(weight, Layout::kNCDHW) ? Layout::kNCDHW : Layout::kNDHWC;
  const std::int64_t outputs = product_->k;
  const auto as_product = [&] {
    if (x.is_cuda()) {
      const Tensor taps = reinterpret(weight, {problem.c, outputs, 1, 1, 1}, {outputs, 1, 1, 1, 1});
      return contiguous_in(conv_transpose3d(x, taps, std::nullopt, *product_, flags), Layout::kNCDHW);
    }
    // oneDNN's pointwise convolutions take up to 14 times as long as this, in float64 PyTorch's too.
    return matrix_product(reinterpret(x, {problem.n, problem.c}, {x.stride(0), x.stride(1)}),
                          reinterpret(weight, {problem.c, outputs}, {outputs, 1}));
  };
  const Extent3 out = problem.out();
  const Ints sizes = {problem.n, problem.k, out[0], out[1], out[2]};
  return reinterpret(as_product(), sizes, dense_strides(sizes, layout));
}

}  // namespace upconv3d::bindings
