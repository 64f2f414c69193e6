// SPDX-License-Identifier: Apache-2.0
#include "bindings/parameter_casts.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/layout/cast_parameters.hpp"
#endif

namespace upconv3d::bindings {
namespace {

/// Whether the argument is to be cast to a tensor on the device of `input`, whose kind is `like`.
/// \throws RuleViolation, as of a call whose tensors have been cast, where a kernel could not read it.
bool is_cast(const char* argument, const Tensor& parameter, const Tensor& input, const TensorKind& like) {
  const TensorKind own = kind_of(parameter);
  if (own.dtype != aoti_torch_dtype_float32() || own.dtype == like.dtype) return false;
  // Described, which takes the host longer than a cast, where a rule may be broken alone.
  const bool is_strided = own.layout == aoti_torch_layout_strided();
  if (!is_strided || own.device_type != like.device_type || own.device_index != like.device_index) {
    const TensorDesc described = describe_tensor(parameter);
    require_strided(argument, described);
    require_device(argument, described, describe_tensor(input));
  }
  return true;
}

#if UPCONV3D_WITH_CUDA
/// The tensor itself where it lies dense, else a copy that does.
Tensor dense(const Tensor& tensor) {
  if (tensor.is_contiguous() || (tensor.dim() == 5 && is_dense_in(tensor, Layout::kNDHWC))) return tensor;
  return torch::stable::contiguous(tensor);
}

/// All of them in one piece of memory.
void cast_together(const Tensor& input, DType dtype, const std::vector<Tensor*>& tensors) {
  constexpr std::int64_t kAligned = 8;  // values, 16 bytes
  std::vector<Tensor> sources;
  std::int64_t values = 0;
  for (const Tensor* const tensor : tensors) {
    sources.push_back(dense(*tensor));
    values += ceil_div(tensor->numel(), kAligned) * kAligned;
  }
  const Tensor memory = empty_strided_like(input, {values}, {1});
  cuda::CastParametersParams params;
  params.dtype = dtype;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& source = sources[i];
    const Tensor result = reinterpret(memory, sizes_of(source), strides_of(source), at);
    params.tensors[static_cast<std::size_t>(params.num_tensors++)] = {
        static_cast<const float*>(source.const_data_ptr()), result.mutable_data_ptr(), source.numel()};
    at += ceil_div(source.numel(), kAligned) * kAligned;
    *tensors[i] = result;
  }
  const std::int32_t index = input.get_device_index();
  const OnDevice current(index);
  cuda::launch_cast_parameters(params, static_cast<cudaStream_t>(current_cuda_stream(index)));
}
#endif

}  // namespace

Parameters cast_parameters(const Tensor& input, const Parameters& parameters) {
  Parameters cast = parameters;
  const TensorKind kind = kind_of(input);
  std::vector<Tensor*> tensors;
  if (is_cast("weight", cast.w, input, kind)) tensors.push_back(&cast.w);
  const std::pair<const char*, std::optional<Tensor>*> vectors[] = {{"bias", &cast.bias},
                                                                    {"norm_weight", &cast.gamma},
                                                                    {"norm_bias", &cast.beta},
                                                                    {"activation_param", &cast.slopes}};
  for (const auto& [argument, vector] : vectors) {
    if (*vector && is_cast(argument, **vector, input, kind)) tensors.push_back(&**vector);
  }
  if (tensors.empty()) return cast;
  const bool is_bfloat16 = kind.dtype == aoti_torch_dtype_bfloat16();
  if (!is_bfloat16 && kind.dtype != aoti_torch_dtype_float16()) {
    throw UnsupportedViolation(concat("upconv3d: parameters are cast to 16 bit; got input.dtype=",
                                      describe_tensor(input).dtype, ". Cast them by Tensor.to first."));
  }
#if UPCONV3D_WITH_CUDA
  if (kind.device_type == aoti_torch_device_type_cuda()) {
    cast_together(input, is_bfloat16 ? DType::kBFloat16 : DType::kFloat16, tensors);
    return cast;
  }
#endif
  throw UnsupportedViolation(
      concat("upconv3d: parameters of another dtype than input's are cast on CUDA; got ",
             describe_tensor(input).device, ". Cast them by Tensor.to first."));
}

std::optional<TensorDesc> cast_desc(std::optional<TensorDesc> parameter, const TensorDesc& input) {
  const bool low = input.dtype == "bfloat16" || input.dtype == "float16";
  if (!parameter || parameter->dtype != "float32" || !low) return parameter;
  parameter->dtype = input.dtype;
  parameter->data_ptr_mod16 = 0;
  const auto lies = [&parameter](Layout layout) {
    return is_dense(parameter->sizes, parameter->strides, layout);
  };
  if (parameter->sizes.size() == 5 && !lies(Layout::kNDHWC) && !lies(Layout::kNCDHW)) {
    parameter->strides = dense_strides(parameter->sizes, Layout::kNCDHW);
  }
  return parameter;
}

}  // namespace upconv3d::bindings
