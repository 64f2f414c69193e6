// SPDX-License-Identifier: Apache-2.0
/// \file
/// torch.ops.upconv3d.conv_transpose3d_relu_group_norm: schema and implementations for CPU and CUDA. And
/// _for_training, the same with what a backward pass reads of it, an opaque piece of memory: empty where the
/// plan keeps nothing; and _recomputed, of which autograd keeps the input alone. Fake kernels and autograd
/// are registered in Python. And the first two once more with their numbers as one (block_settings.hpp), for
/// calls that nothing but a CPU or CUDA kernel is to see.

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/block_call.hpp"
#include "bindings/block_settings.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/torch_calls.hpp"
#include "core/library_plan.hpp"

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;

Tensor run_block(const OpArguments& arguments) {
  CallExtras none;
  return run_call(arguments, none);
}

Tensor conv_transpose3d_relu_group_norm(const Tensor& input, const Tensor& weight,
                                        const std::optional<Tensor>& bias, const Ints& stride,
                                        const Ints& padding, const Ints& output_padding, std::int64_t groups,
                                        const Ints& dilation, std::int64_t num_groups,
                                        const std::optional<Tensor>& norm_weight,
                                        const std::optional<Tensor>& norm_bias, double eps,
                                        StringHandle precision_handle) {
  const std::string precision = take_string(precision_handle);
  return run_block({input, weight, bias, norm_weight, norm_bias, stride, padding, output_padding, dilation,
                    groups, num_groups, eps, precision});
}

/// The block, and what the backward operator takes as `saved`: of the SM90 plan [bytes] uint8, of library
/// plans the convolution [N,K,Z,P,Q].
std::tuple<Tensor, Tensor> run_for_training(const OpArguments& a) {
  CallExtras extras;
  const Tensor y = run_call(a, extras);
  return {y, extras.saved ? *extras.saved : empty_bytes_like(a.input, 0)};
}

/// The block as a backward that keeps nothing will compute it again: by the plan of training. What that keeps
/// is dropped where inference has another plan, of small blocks.
Tensor conv_transpose3d_relu_group_norm_recomputed(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
    const Ints& padding, const Ints& output_padding, std::int64_t groups, const Ints& dilation,
    std::int64_t num_groups, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    double eps, StringHandle precision_handle) {
  const std::string precision = take_string(precision_handle);
  OpArguments arguments = {input,          weight,   bias,   norm_weight, norm_bias, stride,    padding,
                           output_padding, dilation, groups, num_groups,  eps,       precision, false};
  const auto call = prepare_call(arguments);
  arguments.for_training = call->repeats_bits || copies_operands(call->problem, call->plan) ||
                           call->plan.algorithm == Algorithm::kCudaCol2im;
  return run_block(arguments);
}

std::tuple<Tensor, Tensor> conv_transpose3d_relu_group_norm_for_training(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
    const Ints& padding, const Ints& output_padding, std::int64_t groups, const Ints& dilation,
    std::int64_t num_groups, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    double eps, StringHandle precision_handle) {
  const std::string precision = take_string(precision_handle);
  const OpArguments arguments = {input,          weight,   bias,   norm_weight, norm_bias, stride,    padding,
                                 output_padding, dilation, groups, num_groups,  eps,       precision, true};
  const auto [y, saved] = run_for_training(arguments);
  // A convolution in the format of y, whatever PyTorch chose: the fake kernel has to say which it is.
  if (saved.dim() != 5) return {y, saved};
  return {y, contiguous_in(saved, prepare_call(arguments)->problem.y_layout)};
}

OpArguments numbered_arguments(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& norm_weight,
                               const std::optional<Tensor>& norm_bias, const BlockSettings& s,
                               bool for_training) {
  return {input,       weight,           bias,       norm_weight, norm_bias,    s.stride,
          s.padding,   s.output_padding, s.dilation, s.groups,    s.num_groups, s.eps,
          s.precision, for_training};
}

/// conv_transpose3d_relu_group_norm with remembered_settings(settings).
Tensor numbered_block(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                      std::int64_t settings) {
  return run_block(
      numbered_arguments(input, weight, bias, norm_weight, norm_bias, remembered_settings(settings), false));
}

/// conv_transpose3d_relu_group_norm_for_training with remembered_settings(settings).
std::tuple<Tensor, Tensor> numbered_block_for_training(const Tensor& input, const Tensor& weight,
                                                       const std::optional<Tensor>& bias,
                                                       const std::optional<Tensor>& norm_weight,
                                                       const std::optional<Tensor>& norm_bias,
                                                       std::int64_t settings) {
  return run_for_training(
      numbered_arguments(input, weight, bias, norm_weight, norm_bias, remembered_settings(settings), true));
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("conv_transpose3d_relu_group_norm", TORCH_BOX(&conv_transpose3d_relu_group_norm));
  library.impl("conv_transpose3d_relu_group_norm_recomputed",
               TORCH_BOX(&conv_transpose3d_relu_group_norm_recomputed));
  library.impl("conv_transpose3d_relu_group_norm_for_training",
               TORCH_BOX(&conv_transpose3d_relu_group_norm_for_training));
}

void implement_numbered(torch::stable::detail::StableLibrary& library) {
  library.impl("_numbered_block", TORCH_BOX(&numbered_block));
  library.impl("_numbered_block_for_training", TORCH_BOX(&numbered_block_for_training));
}

}  // namespace
}  // namespace upconv3d::bindings

STABLE_TORCH_LIBRARY(upconv3d, library) {
  const std::string arguments =
      "(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
      "int groups, int[] dilation, int num_groups, Tensor? norm_weight, Tensor? norm_bias, float eps, "
      "str precision)";
  const std::string block = "conv_transpose3d_relu_group_norm";
  library.def((block + arguments + " -> Tensor").c_str());
  library.def((block + "_recomputed" + arguments + " -> Tensor").c_str());
  library.def((block + "_for_training" + arguments + " -> (Tensor y, Tensor saved)").c_str());
  const std::string numbered =
      "(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, int settings)";
  library.def(("_numbered_block" + numbered + " -> Tensor").c_str());
  library.def(("_numbered_block_for_training" + numbered + " -> (Tensor y, Tensor saved)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(upconv3d, CPU, library) {
  upconv3d::bindings::implement(library);
  upconv3d::bindings::implement_numbered(library);
}
STABLE_TORCH_LIBRARY_IMPL(upconv3d, CUDA, library) {
  upconv3d::bindings::implement(library);
  upconv3d::bindings::implement_numbered(library);
}
// Sparse tensors break a rule; only an implementation gets to say which, and what to do about it.
STABLE_TORCH_LIBRARY_IMPL(upconv3d, SparseCPU, library) {
  upconv3d::bindings::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(upconv3d, SparseCUDA, library) {
  upconv3d::bindings::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(upconv3d, SparseCsrCPU, library) {
  upconv3d::bindings::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(upconv3d, SparseCsrCUDA, library) {
  upconv3d::bindings::implement(library);
}
