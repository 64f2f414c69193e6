// SPDX-License-Identifier: Apache-2.0
/// \file
/// torch.ops.upconv3d.conv_transpose3d_relu_group_norm: schema and implementations for CPU and CUDA. And
/// _for_training, the same with what a backward pass reads of it, an opaque piece of memory: empty where the
/// plan keeps nothing. Fake kernels and autograd are registered in Python. And both once more with their
/// numbers as one (block_settings.hpp), for calls that nothing but a CPU or CUDA kernel is to see.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/block_settings.hpp"
#include "bindings/plan_query.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/torch_calls.hpp"
#include "core/arguments.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cpu/relu_group_norm.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/forward.hpp"
#endif

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;

/// The op's tensors, batched, with per-channel vectors that lie dense.
struct BlockTensors {
  Tensor x;                     // [N,C,D,H,W] dtype
  Tensor w;                     // [C,K/groups,T,R,S] dtype
  std::optional<Tensor> bias;   // [K] dtype
  std::optional<Tensor> gamma;  // [K] dtype
  std::optional<Tensor> beta;   // [K] dtype
};

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

/// The input as a batch; [C,D,H,W] becomes a batch of one.
Tensor batched(const Tensor& input) {
  if (input.dim() == 5) return input;
  Ints sizes = sizes_of(input);
  Ints strides = strides_of(input);
  const std::int64_t sample_stride = sizes[0] * strides[0];
  sizes.insert(sizes.begin(), 1);
  strides.insert(strides.begin(), sample_stride);
  return reinterpret(input, sizes, strides);
}

Tensor unbatched(const Tensor& y) {
  Ints sizes = sizes_of(y);
  Ints strides = strides_of(y);
  sizes.erase(sizes.begin());
  strides.erase(strides.begin());
  return reinterpret(y, sizes, strides);
}

/// A convolution's result that lies dense in the order `layout`, whatever PyTorch chose to return.
struct DenseResult {
  Tensor tensor;
  Layout layout;
};

DenseResult as_dense(const Tensor& conv, Layout expected) {
  const Layout other = expected == Layout::kNCDHW ? Layout::kNDHWC : Layout::kNCDHW;
  for (const Layout layout : {expected, other}) {
    if (is_dense_in(conv, layout)) return {conv, layout};
  }
  return {contiguous_in(conv, expected), expected};
}

/// y with PyTorch's strides of its format: in the convolution's memory where the order is the same.
Tensor output_for(const DenseResult& conv, const PreparedCall& call) {
  return conv.layout == call.problem.y_layout ? reinterpret(conv.tensor, call.y_sizes, call.y_strides)
                                              : empty_strided_like(conv.tensor, call.y_sizes, call.y_strides);
}

/// \param saved set, unless null, to the convolution [N,K,Z,P,Q] dtype: with the bias in 16 bit, else without
Tensor run_cpu(const PreparedCall& call, const BlockTensors& t, std::optional<Tensor>* saved) {
  const Problem& p = call.problem;
  const Plan& plan = call.plan;
  // A channels_last_3d weight alone would make PyTorch's convolution choose that format.
  const Tensor w = plan.conv_layout == Layout::kNCDHW ? contiguous_in(t.w, Layout::kNCDHW) : t.w;
  // oneDNN adds a 16-bit bias before it rounds; added to the rounded convolution, one that cancels it would
  // leave the rounding error alone. In float32 and float64 our pass adds it, which saves PyTorch's.
  const bool half_width = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  const std::optional<Tensor> conv_bias = half_width ? t.bias : std::nullopt;
  const DenseResult conv =
      as_dense(conv_transpose3d(contiguous_in(t.x, plan.conv_layout), w, conv_bias, p, std::nullopt),
               plan.conv_layout);
  if (saved) *saved = conv.tensor;
  const Tensor y =
      saved ? empty_strided_like(conv.tensor, call.y_sizes, call.y_strides) : output_for(conv, call);
  cpu::ReluGroupNormParams params;
  params.n = p.n;
  params.k = p.k;
  params.positions = p.positions();
  params.num_groups = p.num_groups;
  params.eps = p.eps;
  params.dtype = p.dtype;
  params.c_layout = conv.layout;
  params.y_layout = p.y_layout;
  params.c = conv.tensor.const_data_ptr();
  params.bias = half_width ? nullptr : data_or_null(t.bias);
  params.gamma = data_or_null(t.gamma);
  params.beta = data_or_null(t.beta);
  params.y = y.mutable_data_ptr();
  cpu::relu_group_norm(params,
                       [](std::int64_t end, const std::function<void(std::int64_t, std::int64_t)>& body) {
                         torch::stable::parallel_for(0, end, 1, body);
                       });
  return y;
}

#if UPCONV3D_WITH_CUDA
cuda::ForwardTensors forward_tensors(const BlockTensors& t, const Tensor& y, const DeviceScratch& workspace) {
  cuda::ForwardTensors f;
  f.bias = data_or_null(t.bias);
  f.gamma = data_or_null(t.gamma);
  f.beta = data_or_null(t.beta);
  f.y = y.mutable_data_ptr();
  f.workspace = workspace.data();
  return f;
}

/// \param saved set, unless null, to what the plan keeps, if anything: [call.saved_bytes] uint8
Tensor run_implicit_gemm(const PreparedCall& call, const BlockTensors& t, std::optional<Tensor>* saved,
                         std::int32_t index) {
  const Tensor x = contiguous_in(t.x, call.problem.x_layout);
  const Tensor y = empty_strided_like(x, call.y_sizes, call.y_strides);
  const DeviceScratch workspace(x, call.plan.workspace_bytes);
  cuda::ForwardTensors f = forward_tensors(t, y, workspace);
  if (saved && call.saved_bytes > 0) {
    *saved = empty_bytes_like(x, call.saved_bytes);
    f.saved = (*saved)->mutable_data_ptr();
  }
  f.x = x.const_data_ptr();
  f.w = t.w.const_data_ptr();
  for (int axis = 0; axis < 5; ++axis) f.w_strides[axis] = t.w.stride(axis);
  cuda::run_forward(call.problem, call.plan, call.device, f,
                    static_cast<cudaStream_t>(current_cuda_stream(index)));
  return y;
}

Tensor run_cuda_library(const PreparedCall& call, const BlockTensors& t, std::int32_t index) {
  const Problem& p = call.problem;
  // The asked precision must hold whatever torch.backends says, and only float32 has a choice.
  std::optional<CudnnFlags> flags;
  if (p.dtype == DType::kFloat32) flags = read_cudnn_flags(p.precision == Precision::kTF32);
  const DenseResult conv =
      as_dense(conv_transpose3d(t.x, t.w, std::nullopt, p, flags), call.plan.conv_layout);
  std::optional<Plan> other_layout;
  if (conv.layout != call.plan.conv_layout) {
    other_layout = call.plan;
    other_layout->conv_layout = conv.layout;
    cuda::complete_plan(p, call.device, *other_layout);
  }
  const Plan& plan = other_layout ? *other_layout : call.plan;
  const Tensor y = output_for(conv, call);
  const DeviceScratch workspace(conv.tensor, plan.workspace_bytes);
  cuda::ForwardTensors f = forward_tensors(t, y, workspace);
  f.conv = conv.tensor.const_data_ptr();
  cuda::run_forward(p, plan, call.device, f, static_cast<cudaStream_t>(current_cuda_stream(index)));
  return y;
}
#endif

/// \param saved set, unless null, to what a backward pass will read, if the plan keeps anything
Tensor run_plan(const PreparedCall& call, const BlockTensors& t, std::optional<Tensor>* saved) {
#if UPCONV3D_WITH_CUDA
  if (call.device.is_cuda) {
    const std::int32_t index = t.x.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    return call.plan.algorithm == Algorithm::kCudaLibrary ? run_cuda_library(call, t, index)
                                                          : run_implicit_gemm(call, t, saved, index);
  }
#endif
  return run_cpu(call, t, saved);
}

/// \param saved set where the plan keeps something for a backward pass; null where arguments do not ask for
/// it
Tensor run_call(const OpArguments& a, std::optional<Tensor>* saved) {
  const auto call = prepare_call(a);
  print_plan_if_asked(call->problem, call->plan);
  const Tensor y = call->problem.n == 0
                       ? empty_strided_like(a.input, call->y_sizes, call->y_strides)
                       : run_plan(*call,
                                  {batched(a.input), a.weight, contiguous_vector(a.bias),
                                   contiguous_vector(a.norm_weight), contiguous_vector(a.norm_bias)},
                                  saved);
  return a.input.dim() == 5 ? y : unbatched(y);
}

Tensor conv_transpose3d_relu_group_norm(const Tensor& input, const Tensor& weight,
                                        const std::optional<Tensor>& bias, const Ints& stride,
                                        const Ints& padding, const Ints& output_padding, std::int64_t groups,
                                        const Ints& dilation, std::int64_t num_groups,
                                        const std::optional<Tensor>& norm_weight,
                                        const std::optional<Tensor>& norm_bias, double eps,
                                        StringHandle precision_handle) {
  const std::string precision = take_string(precision_handle);
  return run_call({input, weight, bias, norm_weight, norm_bias, stride, padding, output_padding, dilation,
                   groups, num_groups, eps, precision},
                  nullptr);
}

/// The block, and what the backward operator takes as `saved`: [bytes] uint8 on CUDA, on the CPU the
/// convolution.
std::tuple<Tensor, Tensor> run_for_training(const OpArguments& a) {
  std::optional<Tensor> saved;
  const Tensor y = run_call(a, &saved);
  return {y, saved ? *saved : empty_bytes_like(a.input, 0)};
}

std::tuple<Tensor, Tensor> conv_transpose3d_relu_group_norm_for_training(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
    const Ints& padding, const Ints& output_padding, std::int64_t groups, const Ints& dilation,
    std::int64_t num_groups, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    double eps, StringHandle precision_handle) {
  const std::string precision = take_string(precision_handle);
  return run_for_training({input, weight, bias, norm_weight, norm_bias, stride, padding, output_padding,
                           dilation, groups, num_groups, eps, precision, true});
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
  return run_call(
      numbered_arguments(input, weight, bias, norm_weight, norm_bias, remembered_settings(settings), false),
      nullptr);
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
