// SPDX-License-Identifier: Apache-2.0
#include "bindings/block_call.hpp"

#include <cstdint>
#include <functional>
#include <vector>

#include "bindings/library_convolution.hpp"
#include "bindings/parameter_casts.hpp"
#include "bindings/plan_query.hpp"
#include "core/arguments.hpp"
#include "core/errors.hpp"
#include "core/library_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "cpu/relu_group_norm.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/forward.hpp"
#endif

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;

/// The op's tensors, batched, with per-channel vectors that lie dense.
struct BlockTensors {
  Tensor x;                      // [N,C,D,H,W] dtype
  Tensor w;                      // [C,K/groups,T,R,S] dtype
  std::optional<Tensor> bias;    // [K] dtype
  std::optional<Tensor> gamma;   // [K] dtype
  std::optional<Tensor> beta;    // [K] dtype
  std::optional<Tensor> slopes;  // [1] or [K] dtype
  std::optional<Tensor> skip;    // [N,K,Z,P,Q] dtype
};

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

/// ReLU before a group norm. \param saved set, unless null, to the convolution [N,K,Z,P,Q] dtype: with the
/// bias in 16 bit, else without
Tensor run_cpu(const PreparedCall& call, const BlockTensors& t, std::optional<Tensor>* saved) {
  const Problem& p = call.problem;
  const Plan& plan = call.plan;
  // oneDNN adds a 16-bit bias before it rounds; added to the rounded convolution, one that cancels it would
  // leave the rounding error alone. In float32 and float64 our pass adds it, which saves PyTorch's.
  const bool half_width = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  const std::optional<Tensor> conv_bias = half_width ? t.bias : std::nullopt;
  const LibraryConvolution library(p, t.w, conv_bias.has_value());
  // A channels_last_3d weight alone would make PyTorch's convolution choose that format.
  const Tensor w = plan.conv_layout == Layout::kNCDHW ? contiguous_in(library.w, Layout::kNCDHW) : library.w;
  const DenseResult conv = as_dense(
      library.run(contiguous_in(t.x, plan.conv_layout), w, conv_bias, std::nullopt), plan.conv_layout);
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
/// The call's plan for a convolution that lies in another layout than the plan expects.
std::optional<Plan> plan_of_other_layout(const PreparedCall& call, Layout layout) {
  if (layout == call.plan.conv_layout) return std::nullopt;
  Plan plan = call.plan;
  plan.conv_layout = layout;
  cuda::complete_plan(call.problem, call.device, plan);
  return plan;
}

cuda::ForwardTensors forward_tensors(const BlockTensors& t, const Tensor& y, const DeviceScratch& workspace) {
  cuda::ForwardTensors f;
  f.bias = data_or_null(t.bias);
  f.gamma = data_or_null(t.gamma);
  f.beta = data_or_null(t.beta);
  f.slopes = data_or_null(t.slopes);
  f.y = y.mutable_data_ptr();
  f.workspace = workspace.data();
  return f;
}

/// A plan whose convolution is ours.
Tensor run_own_convolution(const PreparedCall& call, const BlockTensors& t, CallExtras& extras,
                           std::int32_t index) {
  const Tensor x = contiguous_in(t.x, call.problem.x_layout);
  const Tensor y = empty_strided_like(x, call.y_sizes, call.y_strides);
  const DeviceScratch workspace(x, call.plan.workspace_bytes);
  cuda::ForwardTensors f = forward_tensors(t, y, workspace);
  if (call.saved_bytes > 0) {
    extras.saved = call.plan.keeps_conv ? empty_strided_like(x, call.y_sizes, call.y_strides)
                                        : empty_bytes_like(x, call.saved_bytes);
    f.saved = extras.saved->mutable_data_ptr();
  }
  if (call.problem.tail.returns_conv) {
    extras.conv = empty_strided_like(x, call.y_sizes, call.y_strides);
    f.c = extras.conv->mutable_data_ptr();
  }
  f.x = x.const_data_ptr();
  f.w = t.w.const_data_ptr();
  for (int axis = 0; axis < 5; ++axis) f.w_strides[axis] = t.w.stride(axis);
  cuda::run_forward(call.problem, call.plan, call.device, f,
                    static_cast<cudaStream_t>(current_cuda_stream(index)), call.launch_memo.get());
  return y;
}

/// x [N,C,D,H,W] and w [C,K/groups,T,R,S] as the library plan's convolution reads them.
struct LibraryOperands {
  Tensor x, w;
};

/// \param given x, and w with the taps of `p`
LibraryOperands library_operands(const Problem& p, const Plan& plan, const LibraryOperands& given,
                                 void* stream) {
  if (!copies_operands(p, plan)) return given;
  const auto last = [](const Tensor& like) {
    const Ints sizes = sizes_of(like);
    return empty_strided_like(like, sizes, dense_strides(sizes, Layout::kNDHWC));
  };
  const Tensor x = contiguous_in(given.x, Layout::kNCDHW), x_last = last(x);
  if (is_dense_in(given.w, Layout::kNDHWC)) {
    cuda::copy_operands(p, x.const_data_ptr(), x_last.mutable_data_ptr(), nullptr, nullptr,
                        static_cast<cudaStream_t>(stream));
    return {x_last, given.w};
  }
  const Tensor w = contiguous_in(given.w, Layout::kNCDHW), w_last = last(w);
  cuda::copy_operands(p, x.const_data_ptr(), x_last.mutable_data_ptr(), w.const_data_ptr(),
                      w_last.mutable_data_ptr(), static_cast<cudaStream_t>(stream));
  return {x_last, w_last};
}

/// convolution_alone(call.problem), as planned for itself.
Tensor run_convolution_alone(const PreparedCall& call, const BlockTensors& t) {
  const Problem& p = call.problem;
  const auto triple = [](const Extent3& of) { return Ints(of.begin(), of.end()); };
  const Ints stride = triple(p.stride), padding = triple(p.padding), dilation = triple(p.dilation),
             output_padding = triple(p.output_padding);
  const Problem alone = convolution_alone(p);
  const std::string precision = p.precision == Precision::kTF32 ? "tf32" : "ieee";
  CallExtras extras;
  const std::optional<Tensor>& bias = alone.has_bias ? t.bias : kNoTensor;
  return run_call({t.x, t.w, bias, kNoTensor, kNoTensor, stride, padding, output_padding, dilation,
                   alone.groups, alone.num_groups, alone.eps, precision, false, kNoTensor, kNoTensor,
                   alone.tail, call.device.spares_host},
                  extras);
}

/// The skip as the convolution lies, and where their sum goes, if that is stored: into the convolution's
/// place, where it is not the caller's.
struct SkipAndSum {
  std::optional<Tensor> skip, sum;

  SkipAndSum(const BlockTensors& t, const DenseResult& conv, const Plan& plan, bool returned) {
    if (!t.skip) return;
    skip = contiguous_in(*t.skip, conv.layout);
    if (!plan.adds_skip_first && !plan.keeps_sum) return;
    sum = conv.tensor;
    if (returned) sum = empty_strided_like(conv.tensor, sizes_of(conv.tensor), strides_of(conv.tensor));
  }
};

Tensor run_cuda_library(const PreparedCall& call, const BlockTensors& t, CallExtras& extras,
                        std::int32_t index) {
  const Problem& p = call.problem;
  // The asked precision must hold whatever torch.backends says, and only float32 has a choice.
  std::optional<CudnnFlags> flags;
  if (p.dtype == DType::kFloat32 || call.repeats_bits) {
    flags = read_cudnn_flags(p.precision == Precision::kTF32);
    flags->deterministic |= call.repeats_bits;
  }
  // A convolution that is returned has its bias; else our next pass adds it, which saves PyTorch's, and what
  // is kept is the same whoever convolves: a backward pass may plan another convolution, of x laid out anew.
  // Where nothing but an activation follows, that pass adds what is returned, too.
  const bool returned = p.tail.returns_conv;
  const bool adds_returned = returned && t.bias && !t.skip && !p.tail.norm &&
                             p.tail.activation != Activation::kNone && p.dtype != DType::kFloat64;
  const auto stream = static_cast<cudaStream_t>(current_cuda_stream(index));
  const auto convolve = [&] {
    if (call.plan.own_convolution) return run_convolution_alone(call, t);
    const std::optional<Tensor> bias = returned && !adds_returned ? t.bias : std::nullopt;
    const LibraryConvolution library(p, t.w, bias.has_value());
    const LibraryOperands operands = library_operands(library.problem, call.plan, {t.x, library.w}, stream);
    return library.run(operands.x, operands.w, bias, flags);
  };
  DenseResult conv = as_dense(convolve(), call.plan.conv_layout);
  if (adds_returned) conv = {contiguous_in(conv.tensor, p.y_layout), p.y_layout};
  if (call.saved_bytes > 0) {
    conv = {contiguous_in(conv.tensor, call.plan.conv_layout), call.plan.conv_layout};
    extras.saved = conv.tensor;  // or the sum that takes its place
  }
  const std::optional<Plan> other_layout = plan_of_other_layout(call, conv.layout);
  const Plan& plan = other_layout ? *other_layout : call.plan;
  const bool needed = returned || call.saved_bytes > 0;
  const Tensor y =
      needed ? empty_strided_like(conv.tensor, call.y_sizes, call.y_strides) : output_for(conv, call);
  const DeviceScratch workspace(conv.tensor, plan.workspace_bytes);
  cuda::ForwardTensors f = forward_tensors(t, y, workspace);
  if (returned && !adds_returned) f.bias = nullptr;
  if (returned) extras.conv = contiguous_in(conv.tensor, p.y_layout);
  f.conv = conv.tensor.const_data_ptr();
  const SkipAndSum summands(t, conv, plan, returned);
  f.skip = data_or_null(summands.skip);
  const std::optional<Tensor>& sum = adds_returned ? extras.conv : summands.sum;
  f.sum = sum ? sum->mutable_data_ptr() : nullptr;
  cuda::run_forward(p, plan, call.device, f, stream);
  return y;
}
#endif

Tensor run_plan(const PreparedCall& call, const BlockTensors& t, bool for_training, CallExtras& extras) {
#if UPCONV3D_WITH_CUDA
  if (call.device.is_cuda) {
    const std::int32_t index = t.x.get_device_index();
    const OnDevice current(index);
    return call.plan.algorithm == Algorithm::kCudaLibrary ? run_cuda_library(call, t, extras, index)
                                                          : run_own_convolution(call, t, extras, index);
  }
#endif
  return run_cpu(call, t, for_training ? &extras.saved : nullptr);
}

}  // namespace

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

Tensor run_call(const OpArguments& arguments, CallExtras& extras) {
  return run_prepared(*prepare_call(arguments), arguments, extras);
}

Tensor run_prepared(const PreparedCall& call, const OpArguments& a, CallExtras& extras) {
  print_plan_if_asked(call.problem, call.plan);
  if (!call.device.is_cuda && !call.problem.tail.is_relu_group_norm()) {
    throw UnsupportedViolation(
        concat("upconv3d: on the CPU this operator computes relu before a group norm; got ",
               describe(call.problem.tail), ". Call torch.ops.upconv3d.conv_transpose3d_norm_act."));
  }
  const auto run = [&] {
    const auto empty = [&] { return empty_strided_like(a.input, call.y_sizes, call.y_strides); };
    if (call.problem.n == 0) {
      if (call.problem.tail.returns_conv) extras.conv = empty();
      // The CPU keeps the convolution, as its fake kernel says, whatever the sizes.
      if (a.for_training && !call.device.is_cuda) extras.saved = empty();
      return empty();
    }
    Parameters given = {a.weight, a.bias, a.norm_weight, a.norm_bias, a.slopes};
    if (a.casts_parameters) given = cast_parameters(a.input, given);
    const BlockTensors tensors = {batched(a.input),
                                  given.w,
                                  contiguous_vector(given.bias),
                                  contiguous_vector(given.gamma),
                                  contiguous_vector(given.beta),
                                  contiguous_vector(given.slopes),
                                  a.skip ? std::optional(batched(*a.skip)) : std::nullopt};
    return run_plan(call, tensors, a.for_training, extras);
  };
  const Tensor y = run();
  if (a.input.dim() == 5) return y;
  if (extras.conv) extras.conv = unbatched(*extras.conv);
  return unbatched(y);
}

Tensor run_tail_of(const OpArguments& a) {
  const std::shared_ptr<const PreparedCall> call = prepare_call(a);
  print_plan_if_asked(call->problem, call->plan);
#if UPCONV3D_WITH_CUDA
  if (call->plan.algorithm == Algorithm::kCudaLibrary) {
    const std::int32_t index = a.input.get_device_index();
    const OnDevice current(index);
    const DenseResult conv = as_dense(a.input, call->plan.conv_layout);
    const std::optional<Plan> other_layout = plan_of_other_layout(*call, conv.layout);
    const Plan& plan = other_layout ? *other_layout : call->plan;
    const BlockTensors tensors = {a.input,
                                  a.weight,
                                  std::nullopt,
                                  contiguous_vector(a.norm_weight),
                                  contiguous_vector(a.norm_bias),
                                  contiguous_vector(a.slopes),
                                  std::nullopt};
    const Tensor y = empty_strided_like(a.input, call->y_sizes, call->y_strides);
    const DeviceScratch workspace(y, plan.workspace_bytes);
    cuda::ForwardTensors f = forward_tensors(tensors, y, workspace);
    f.conv = conv.tensor.const_data_ptr();
    cuda::run_forward(call->problem, plan, call->device, f,
                      static_cast<cudaStream_t>(current_cuda_stream(index)));
    return y;
  }
#endif
  throw std::logic_error(concat("upconv3d: what follows a convolution by itself is the library plan's; got ",
                                name(call->plan.algorithm), ". Call PyTorch's operators."));
}

BlockSettings settings_of(const std::vector<std::int64_t>& stride, const std::vector<std::int64_t>& padding,
                          const std::vector<std::int64_t>& output_padding, std::int64_t groups,
                          const std::vector<std::int64_t>& dilation, StringHandle order,
                          std::int64_t num_groups, double eps, StringHandle activation, double parameter,
                          bool return_conv, StringHandle precision) {
  const std::string order_name = take_string(order), activation_name = take_string(activation);
  BlockSettings s = {stride,     padding, output_padding,        groups, dilation,
                     num_groups, eps,     take_string(precision)};
  s.tail = make_tail(order_name, num_groups != 0, activation_name, parameter, return_conv);
  if (!s.tail.norm) s.num_groups = 1;
  return s;
}

}  // namespace upconv3d::bindings
