// SPDX-License-Identifier: Apache-2.0
/// \file
/// torch.ops.upconv3d.fused_backward: gradients of the block by our CUDA kernels, from what
/// conv_transpose3d_relu_group_norm_for_training kept. The backward operator, in Python, calls it.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/plan_query.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/torch_calls.hpp"
#include "core/arguments.hpp"
#include "core/backward_plan.hpp"
#include "core/errors.hpp"
#include "core/text.hpp"
#include "cuda/backward.hpp"

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// Which gradients are wanted: bits 0 to 4 for x, weight, bias, norm_weight and norm_bias.
GradientMask mask_of(std::int64_t bits, bool has_bias, bool has_gamma) {
  return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0 && has_bias, (bits & 8) != 0 && has_gamma,
          (bits & 16) != 0};
}

void require_matching(const PreparedCall& call, const Tensor& grad_y, const Tensor& input,
                      const Tensor& saved) {
  if (sizes_of(grad_y) != call.y_sizes || kind_of(grad_y).dtype != kind_of(input).dtype) {
    throw RuleViolation(
        concat("upconv3d: grad_y must have the sizes and the dtype of the block's result; got ",
               list_text(sizes_of(grad_y)), " for a result of ", list_text(call.y_sizes),
               ". Pass the gradient of that result."));
  }
  if (saved.numel() != call.saved_bytes) {
    throw RuleViolation(
        concat("upconv3d: what the forward kept must be of the same call; got ", saved.numel(),
               " bytes where this call keeps ", call.saved_bytes,
               ". Do not change the memory format of saved tensors between forward and backward, "
               "or use recompute=True."));
  }
}

/// Uninitialized, in the sizes of `like` and in its memory format where that is dense, else contiguous.
Tensor empty_gradient(const Tensor& like) {
  const Ints sizes = sizes_of(like);
  const bool channels_last = !is_dense_in(like, Layout::kNCDHW) && is_dense_in(like, Layout::kNDHWC);
  return empty_strided_like(like, sizes,
                            dense_strides(sizes, channels_last ? Layout::kNDHWC : Layout::kNCDHW));
}

/// A vector [K], where it is wanted.
std::optional<Tensor> vector_if(bool wanted, const Tensor& like, std::int64_t k) {
  if (!wanted) return std::nullopt;
  return empty_strided_like(like, {k}, {1});
}

void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->mutable_data_ptr() : nullptr;
}

Gradients run(const PreparedCall& call, const GradientMask& wanted, const Tensor& grad_y, const Tensor& input,
              const Tensor& weight, const std::optional<Tensor>& norm_weight, const Tensor& saved) {
  const Problem& p = call.problem;
  const std::int32_t index = input.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  const BackwardPlan& plan = call.backward_plans->find(p, call.device, wanted);
  const Tensor x = contiguous_in(input, p.x_layout);
  const bool dense = is_dense_in(grad_y, Layout::kNCDHW) || is_dense_in(grad_y, Layout::kNDHWC);
  const Tensor dense_grad_y = dense ? grad_y : contiguous_in(grad_y, p.y_layout);
  const std::optional<Tensor> gamma = contiguous_vector(norm_weight);
  std::optional<Tensor> grad_x, grad_w, grad_c;
  if (plan.grad_x) grad_x = empty_strided_like(x, sizes_of(x), dense_strides(sizes_of(x), p.x_layout));
  if (plan.grad_w) grad_w = empty_gradient(weight);
  if (plan.library) {
    const std::int64_t pitch = plan.grad_c_pitch;
    grad_c = empty_strided_like(x, {p.n, p.positions(), pitch}, {p.positions() * pitch, pitch, 1});
  }
  const std::optional<Tensor> grad_bias = vector_if(wanted.bias, x, p.k);
  const std::optional<Tensor> grad_gamma = vector_if(wanted.gamma, x, p.k);
  const std::optional<Tensor> grad_beta = vector_if(wanted.beta, x, p.k);

  cuda::BackwardTensors t;
  t.grad_y = dense_grad_y.const_data_ptr();
  t.grad_y_layout = is_dense_in(dense_grad_y, p.y_layout) ? p.y_layout
                    : p.y_layout == Layout::kNCDHW        ? Layout::kNDHWC
                                                          : Layout::kNCDHW;
  t.saved = saved.const_data_ptr();
  t.x = x.const_data_ptr();
  t.w = weight.const_data_ptr();
  for (int axis = 0; axis < 5; ++axis) t.w_strides[axis] = weight.stride(axis);
  t.gamma = gamma ? gamma->const_data_ptr() : nullptr;
  t.grad_x = data_or_null(grad_x);
  t.grad_w = data_or_null(grad_w);
  for (int axis = 0; grad_w && axis < 5; ++axis) t.grad_w_strides[axis] = grad_w->stride(axis);
  t.grad_bias = data_or_null(grad_bias);
  t.grad_gamma = data_or_null(grad_gamma);
  t.grad_beta = data_or_null(grad_beta);
  t.grad_c = data_or_null(grad_c);
  const Tensor workspace =
      empty_bytes_like(x, cuda::backward_workspace_bytes(p, call.plan, plan, call.device, t));
  t.workspace = workspace.mutable_data_ptr();
  cuda::run_backward(p, call.plan, plan, call.device, t,
                     static_cast<cudaStream_t>(current_cuda_stream(index)));

  const auto or_empty = [&](const std::optional<Tensor>& tensor) {
    return tensor ? *tensor : empty_strided_like(x, {0}, {1});
  };
  if (grad_c) {
    const Extent3 out = p.out();
    const std::int64_t pitch = plan.grad_c_pitch;
    grad_c = reinterpret(*grad_c, call.y_sizes,
                         {p.positions() * pitch, 1, out[1] * out[2] * pitch, out[2] * pitch, pitch});
  }
  return {or_empty(grad_x),     or_empty(grad_w),    or_empty(grad_bias),
          or_empty(grad_gamma), or_empty(grad_beta), or_empty(grad_c)};
}

/// grad_y [N,K,Z,P,Q], input [N,C,D,H,W], saved [bytes] uint8. Returns the five gradients, empty where they
/// are not wanted, and grad_c [N,K,Z,P,Q] where it is left to the caller to convolve it.
Gradients fused_backward(const Tensor& grad_y, const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, const Ints& stride, const Ints& padding,
                         const Ints& output_padding, std::int64_t groups, const Ints& dilation,
                         std::int64_t num_groups, const std::optional<Tensor>& norm_weight, double eps,
                         StringHandle precision_handle, const Tensor& saved, std::int64_t wanted) {
  const std::string precision = take_string(precision_handle);
  const std::optional<Tensor> norm_bias;
  const auto call = prepare_call({input, weight, bias, norm_weight, norm_bias, stride, padding,
                                  output_padding, dilation, groups, num_groups, eps, precision, true});
  require_matching(*call, grad_y, input, saved);
  return run(*call, mask_of(wanted, bias.has_value(), norm_weight.has_value()), grad_y, input, weight,
             norm_weight, saved);
}

}  // namespace
}  // namespace upconv3d::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(upconv3d, library) {
  library.def(
      "fused_backward(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] output_padding, int groups, int[] dilation, int num_groups, Tensor? norm_weight, float eps, "
      "str precision, Tensor saved, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(upconv3d, CUDA, library) {
  library.impl("fused_backward", TORCH_BOX(&upconv3d::bindings::fused_backward));
}
