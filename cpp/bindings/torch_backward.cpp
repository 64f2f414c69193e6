// SPDX-License-Identifier: Apache-2.0
/// \file
/// torch.ops.upconv3d.fused_backward: gradients of the block by our CUDA kernels, from what
/// conv_transpose3d_relu_group_norm_for_training kept. The backward operator, in Python, calls it. And
/// _numbered_tail_backward and _tail_backward, the same after their likes in torch_tail.cpp.

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/block_call.hpp"
#include "bindings/block_settings.hpp"
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
using MaybeTensor = std::optional<Tensor>;
using TailGradients =
    std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

/// The per-channel tensors of a call; those that it does not have are empty.
struct ChannelTensors {
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& norm_weight;
  const std::optional<Tensor>& norm_bias = kNoTensor;  // read only where an activation follows the norm
  const std::optional<Tensor>& slopes = kNoTensor;
};

/// Which gradients are wanted: bits 0 to 5 for x, weight, bias, norm_weight, norm_bias and slopes.
GradientMask mask_of(std::int64_t bits, const ChannelTensors& channels) {
  return {(bits & 1) != 0,
          (bits & 2) != 0,
          (bits & 4) != 0 && channels.bias,
          (bits & 8) != 0 && channels.norm_weight,
          (bits & 16) != 0,
          (bits & 32) != 0 && channels.slopes};
}

void require_matching(const PreparedCall& call, const Tensor& grad_y, const Tensor& input,
                      const Tensor& saved) {
  if (sizes_of(grad_y) != call.y_sizes || kind_of(grad_y).dtype != kind_of(input).dtype) {
    throw RuleViolation(
        concat("upconv3d: grad_y must have the sizes and the dtype of the block's result; got ",
               list_text(sizes_of(grad_y)), " for a result of ", list_text(call.y_sizes),
               ". Pass the gradient of that result."));
  }
  const TensorKind kept = kind_of(saved), own = kind_of(input), incoming = kind_of(grad_y);
  const auto same_device = [&own](const TensorKind& other) {
    return other.device_type == own.device_type && other.device_index == own.device_index;
  };
  if (!same_device(kept) || !same_device(incoming)) {
    throw RuleViolation(concat("upconv3d: grad_y and what the forward kept must be on the device of input, ",
                               describe_tensor(input).device, "; got ", describe_tensor(grad_y).device,
                               " and ", describe_tensor(saved).device, ". Move them there."));
  }
  const bool keeps = call.plan.keeps_activation || call.plan.keeps_conv;
  const bool lies_as_kept = call.plan.keeps_conv
                                ? kept.dtype == own.dtype && sizes_of(saved) == call.y_sizes &&
                                      is_dense_in(saved, call.plan.conv_layout)
                                : saved.element_size() == 1 && saved.is_contiguous();
  const std::int64_t bytes = saved.numel() * static_cast<std::int64_t>(saved.element_size());
  if (!keeps || bytes != call.saved_bytes || !lies_as_kept) {
    throw RuleViolation(
        concat("upconv3d: what the forward kept must be of the same call; got ", bytes,
               " bytes where this call keeps ", call.saved_bytes,
               ". Do not change the memory format of input, weight and what is saved of them between forward "
               "and backward, nor where they begin amid 16 bytes, or use recompute=True."));
  }
}

/// Uninitialized, in the sizes of `like` and in its memory format where that is dense, else contiguous.
Tensor empty_gradient(const Tensor& like) {
  const Ints sizes = sizes_of(like);
  const bool channels_last = !is_dense_in(like, Layout::kNCDHW) && is_dense_in(like, Layout::kNDHWC);
  return empty_strided_like(like, sizes,
                            dense_strides(sizes, channels_last ? Layout::kNDHWC : Layout::kNCDHW));
}

/// A vector [size], where it is wanted.
std::optional<Tensor> vector_if(bool wanted, const Tensor& like, std::int64_t size) {
  if (!wanted) return std::nullopt;
  return empty_strided_like(like, {size}, {1});
}

void* mutable_data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->mutable_data_ptr() : nullptr;
}

/// The tensors of a backward call but for what each stage brings with it.
cuda::BackwardTensors common_tensors(const Problem& p, const Tensor& grad_y, const Tensor& saved,
                                     const Tensor& x, const Tensor& weight) {
  cuda::BackwardTensors t;
  t.grad_y = grad_y.const_data_ptr();
  const Layout other = p.y_layout == Layout::kNCDHW ? Layout::kNDHWC : Layout::kNCDHW;
  t.grad_y_layout = is_dense_in(grad_y, p.y_layout) ? p.y_layout : other;
  t.saved = saved.mutable_data_ptr();
  t.x = x.const_data_ptr();
  t.w = weight.const_data_ptr();
  for (int axis = 0; axis < 5; ++axis) t.w_strides[axis] = weight.stride(axis);
  return t;
}

/// Runs a stage with scratch memory that is the allocator's again when it has been launched.
void run_stage(const cuda::BackwardCall& call, cuda::BackwardStage stage, cuda::BackwardTensors t,
               const Tensor& like, std::int32_t index) {
  const DeviceScratch workspace(like, cuda::backward_workspace_bytes(call, stage, t));
  t.workspace = workspace.data();
  cuda::run_backward_stage(call, stage, t, static_cast<cudaStream_t>(current_cuda_stream(index)));
}

/// grad_c [N,Z,P,Q,pitch], and its exponent where it is scaled.
struct GradC {
  std::optional<Tensor> memory;  // none where it takes the activation's place
  std::optional<DeviceScratch> unscale;

  GradC(const cuda::BackwardCall& call, const Tensor& like, bool consume_saved, cuda::BackwardTensors& t) {
    const BackwardPlan& plan = call.plan;
    if (plan.grad_c_pitch == 0) return;
    if (plan.scaled || plan.split) {
      unscale.emplace(like, static_cast<std::int64_t>(sizeof(std::int32_t)));
      t.unscale = static_cast<std::int32_t*>(unscale->data());
    }
    if (consume_saved) t.grad_c = cuda::overwritable_activation(call, t);
    if (t.grad_c) return;
    const std::int64_t values = call.problem.n * call.problem.positions() * plan.grad_c_pitch;
    memory = plan.scaled ? empty_bytes_like(like, values * size_of(DType::kFloat16))
                         : empty_strided_like(like, {values}, {1});
    t.grad_c = memory->mutable_data_ptr();
  }
};

/// grad_c [N,K,Z,P,Q] as it lies in `memory`.
Tensor viewed_grad_c(const PreparedCall& prepared, const BackwardPlan& plan, const Tensor& memory) {
  if (prepared.plan.keeps_conv) return reinterpret(memory, prepared.y_sizes, prepared.y_strides);
  const Extent3 out = prepared.problem.out();
  const std::int64_t pitch = plan.grad_c_pitch;
  return reinterpret(
      memory, prepared.y_sizes,
      {prepared.problem.positions() * pitch, 1, out[1] * out[2] * pitch, out[2] * pitch, pitch});
}

/// Six gradients and grad_c, those that there are.
TailGradients run(const PreparedCall& prepared, const GradientMask& wanted, const Tensor& grad_y,
                  const Tensor& input, const Tensor& weight, const ChannelTensors& channels,
                  const Tensor& saved, bool consume_saved) {
  const Problem& p = prepared.problem;
  const std::int32_t index = input.get_device_index();
  const OnDevice current(index);
  PreparedBackward& backward = prepared.backwards->find(p, prepared.plan, prepared.device, wanted);
  const BackwardPlan& plan = backward.plan;
  const cuda::BackwardCall call{p, prepared.plan, plan, prepared.device, &backward.grad_x_memo};
  const Tensor x = contiguous_in(input, p.x_layout);
  const bool keeps_conv = prepared.plan.keeps_conv;  // grad_y is then read as it lies
  const bool dense =
      is_dense_in(grad_y, p.y_layout) ||
      (!keeps_conv && (is_dense_in(grad_y, Layout::kNCDHW) || is_dense_in(grad_y, Layout::kNDHWC)));
  const Tensor dense_grad_y = dense ? grad_y : contiguous_in(grad_y, p.y_layout);
  const std::optional<Tensor> bias = contiguous_vector(channels.bias);
  const std::optional<Tensor> gamma = contiguous_vector(channels.norm_weight);
  const std::optional<Tensor> beta = contiguous_vector(channels.norm_bias);
  const std::optional<Tensor> slopes = contiguous_vector(channels.slopes);
  const std::optional<Tensor> grad_bias = vector_if(wanted.bias, x, p.k);
  const std::optional<Tensor> grad_gamma = vector_if(wanted.gamma, x, p.k);
  const std::optional<Tensor> grad_beta = vector_if(wanted.beta, x, p.k);
  const std::optional<Tensor> grad_slopes = vector_if(wanted.slopes, x, p.tail.slopes);
  cuda::BackwardTensors t = common_tensors(p, dense_grad_y, saved, x, weight);
  // What a call returned has the bias in it.
  const bool holds_bias = keeps_conv && (p.tail.returns_conv || begins_with_result(p.tail));
  t.bias = holds_bias ? nullptr : data_or_null(bias);
  t.gamma = data_or_null(gamma);
  t.beta = data_or_null(beta);
  t.slopes = data_or_null(slopes);
  t.grad_bias = mutable_data_or_null(grad_bias);
  t.grad_gamma = mutable_data_or_null(grad_gamma);
  t.grad_beta = mutable_data_or_null(grad_beta);
  t.grad_slopes = mutable_data_or_null(grad_slopes);
  // What the library convolves is PyTorch's to free, when it wants to: never in saved memory, but for the
  // convolution, which is a tensor of its own.
  const GradC grad_c(call, x, consume_saved && (keeps_conv || !plan.library), t);
  run_stage(call, cuda::BackwardStage::kGroupNorm, t, x, index);

  std::optional<Tensor> grad_x, grad_w, grad_c_view;
  if (plan.grad_w) {
    grad_w = empty_gradient(weight);
    t.grad_w = grad_w->mutable_data_ptr();
    for (int axis = 0; axis < 5; ++axis) t.grad_w_strides[axis] = grad_w->stride(axis);
    run_stage(call, cuda::BackwardStage::kGradW, t, x, index);
  }
  if (plan.grad_x) {
    grad_x = empty_strided_like(x, sizes_of(x), dense_strides(sizes_of(x), p.x_layout));
    t.grad_x = grad_x->mutable_data_ptr();
    run_stage(call, cuda::BackwardStage::kGradX, t, x, index);
  }
  if (plan.library) grad_c_view = viewed_grad_c(prepared, plan, grad_c.memory ? *grad_c.memory : saved);
  return {grad_x, grad_w, grad_bias, grad_gamma, grad_beta, grad_slopes, grad_c_view};
}

/// grad_y [N,K,Z,P,Q], input [N,C,D,H,W], saved [bytes] uint8 or [N,K,Z,P,Q]. Returns the five gradients,
/// empty where they are not wanted, and grad_c [N,K,Z,P,Q] where it is left to the caller to convolve it.
/// \param consume_saved whether `saved` may be overwritten, as nobody needs it again
Gradients fused_backward(const Tensor& grad_y, const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, const Ints& stride, const Ints& padding,
                         const Ints& output_padding, std::int64_t groups, const Ints& dilation,
                         std::int64_t num_groups, const std::optional<Tensor>& norm_weight, double eps,
                         StringHandle precision_handle, const Tensor& saved, std::int64_t wanted,
                         bool consume_saved) {
  const std::string precision = take_string(precision_handle);
  const std::optional<Tensor> norm_bias;
  const auto call = prepare_call({input, weight, bias, norm_weight, norm_bias, stride, padding,
                                  output_padding, dilation, groups, num_groups, eps, precision, true});
  require_matching(*call, grad_y, input, saved);
  const ChannelTensors channels = {bias, norm_weight};
  const auto [x, w, b, gamma, beta, slopes, grad_c] =
      run(*call, mask_of(wanted, channels), grad_y, input, weight, channels, saved, consume_saved);
  const Tensor empty = empty_strided_like(input, {0}, {1});  // one for all: it takes as long as any size
  const auto or_empty = [&](const MaybeTensor& tensor) { return tensor ? *tensor : empty; };
  return {or_empty(x), or_empty(w), or_empty(b), or_empty(gamma), or_empty(beta), or_empty(grad_c)};
}

/// The same for remembered_settings(settings), with the gradient of slopes before grad_c, and nothing for
/// what is not wanted: an empty tensor takes as long as any.
TailGradients numbered_tail_backward(const Tensor& grad_y, const Tensor& input, const Tensor& weight,
                                     const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& norm_weight,
                                     const std::optional<Tensor>& norm_bias,
                                     const std::optional<Tensor>& slopes, const Tensor& saved,
                                     std::int64_t settings, std::int64_t wanted, bool consume_saved) {
  const BlockSettings& s = remembered_settings(settings);
  const auto call = prepare_call({input, weight, bias, norm_weight, norm_bias, s.stride, s.padding,
                                  s.output_padding, s.dilation, s.groups, s.num_groups, s.eps, s.precision,
                                  true, slopes, kNoTensor, s.tail, s.spares_host});
  require_matching(*call, grad_y, input, saved);
  const ChannelTensors channels = {bias, norm_weight, norm_bias, slopes};
  return run(*call, mask_of(wanted, channels), grad_y, input, weight, channels, saved, consume_saved);
}

/// The same by the public operator's own arguments, for graphs of torch.compile, where our kernels compute
/// the convolution's gradients: those of x, weight, bias, norm_weight, norm_bias and slopes, [0] where not
/// wanted.
Gradients tail_backward(const Tensor& grad_y, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const Ints& stride, const Ints& padding,
                        const Ints& output_padding, std::int64_t groups, const Ints& dilation,
                        StringHandle order, std::int64_t num_groups, const std::optional<Tensor>& norm_weight,
                        const std::optional<Tensor>& norm_bias, double eps, StringHandle activation,
                        double parameter, const std::optional<Tensor>& slopes, StringHandle precision,
                        const Tensor& saved, std::int64_t wanted) {
  const BlockSettings s = settings_of(stride, padding, output_padding, groups, dilation, order, num_groups,
                                      eps, activation, parameter, false, precision);
  const auto call =
      prepare_call({input, weight, bias, norm_weight, norm_bias, s.stride, s.padding, s.output_padding,
                    s.dilation, s.groups, s.num_groups, s.eps, s.precision, true, slopes, kNoTensor, s.tail});
  require_matching(*call, grad_y, input, saved);
  const ChannelTensors channels = {bias, norm_weight, norm_bias, slopes};
  const auto [x, w, b, gamma, beta, slope, grad_c] =
      run(*call, mask_of(wanted, channels), grad_y, input, weight, channels, saved, false);
  if (grad_c) {
    throw std::logic_error(
        "upconv3d: _tail_backward is for plans whose gradients are all our kernels', which this call's are "
        "not. Use conv_transpose3d_norm_act_backward.");
  }
  const Tensor empty = empty_strided_like(input, {0}, {1});
  const auto or_empty = [&](const MaybeTensor& tensor) { return tensor ? *tensor : empty; };
  return {or_empty(x), or_empty(w), or_empty(b), or_empty(gamma), or_empty(beta), or_empty(slope)};
}

}  // namespace
}  // namespace upconv3d::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(upconv3d, library) {
  // Where consume_saved is set, grad_c may lie in saved, which no schema can say of some calls alone: nobody
  // traces such a call.
  library.def(
      "fused_backward(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] output_padding, int groups, int[] dilation, int num_groups, Tensor? norm_weight, float eps, "
      "str precision, Tensor(a!) saved, int wanted, bool consume_saved) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(upconv3d, CUDA, library) {
  library.impl("fused_backward", TORCH_BOX(&upconv3d::bindings::fused_backward));
  library.impl("_numbered_tail_backward", TORCH_BOX(&upconv3d::bindings::numbered_tail_backward));
  library.impl("_tail_backward", TORCH_BOX(&upconv3d::bindings::tail_backward));
}
