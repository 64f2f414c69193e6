// SPDX-License-Identifier: Apache-2.0
/// \file
/// torch.ops.upconv3d._numbered_tail: the convolution with any tail (core/tail.hpp), its numbers as one
/// (block_settings.hpp), for calls that nothing but a CUDA kernel is to see. And _for_training, the same with
/// what _numbered_tail_backward (torch_backward.cpp) reads. And _tail and _tail_for_training, these with the
/// public operator's own arguments, which graphs of torch.compile call: a number holds for one process alone.
/// And _numbered_norm_act, what follows the convolution of one that is given. And _cast_parameters, for a
/// call under autocast that is recorded. The public operator is Python's; on the CPU it is PyTorch's
/// operators.

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/block_call.hpp"
#include "bindings/block_settings.hpp"
#include "bindings/parameter_casts.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/torch_calls.hpp"
#include "core/backward_plan.hpp"

namespace upconv3d::bindings {
namespace {

using Ints = std::vector<std::int64_t>;

OpArguments tail_arguments(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                           const std::optional<Tensor>& slopes, const std::optional<Tensor>& skip,
                           const BlockSettings& s, const Tail& tail, bool for_training) {
  return {input,
          weight,
          bias,
          norm_weight,
          norm_bias,
          s.stride,
          s.padding,
          s.output_padding,
          s.dilation,
          s.groups,
          s.num_groups,
          s.eps,
          s.precision,
          for_training,
          slopes,
          skip,
          tail,
          s.spares_host,
          s.casts_parameters};
}

/// y, and the convolution where the settings say that it is returned.
std::tuple<Tensor, std::optional<Tensor>> numbered_tail(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    const std::optional<Tensor>& slopes, const std::optional<Tensor>& skip, std::int64_t settings) {
  const BlockSettings& s = remembered_settings(settings);
  CallExtras extras;
  const Tensor y = run_call(
      tail_arguments(input, weight, bias, norm_weight, norm_bias, slopes, skip, s, s.tail, false), extras);
  return {y, extras.conv};
}

/// y, and what a backward pass reads, [bytes] uint8, or the convolution or its sum with a skip, [N,K,Z,P,Q];
/// or neither, with nothing computed, where the plan would keep nothing, or what _numbered_tail returns is
/// all that a backward pass reads.
/// \param settings with a skip those of the backward, which say that the convolution is returned; it is not
std::tuple<std::optional<Tensor>, std::optional<Tensor>> numbered_tail_for_training(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    const std::optional<Tensor>& slopes, const std::optional<Tensor>& skip, std::int64_t settings) {
  const BlockSettings& s = remembered_settings(settings);
  if (begins_with_result(s.tail) || (s.tail.returns_conv && !skip)) return {std::nullopt, std::nullopt};
  Tail tail = s.tail;
  tail.returns_conv = false;
  const OpArguments arguments =
      tail_arguments(input, weight, bias, norm_weight, norm_bias, slopes, skip, s, tail, true);
  const auto call = prepare_call(arguments);
  if (call->saved_bytes == 0) return {std::nullopt, std::nullopt};
  CallExtras extras;
  const Tensor y = run_prepared(*call, arguments, extras);
  return {y, extras.saved};
}

/// Parameters of a call, those that are float32 in the dtype of its `input`, which is 16 bit.
std::tuple<Tensor, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>>
cast_parameters_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                   const std::optional<Tensor>& slopes) {
  const Parameters cast = cast_parameters(input, {weight, bias, norm_weight, norm_bias, slopes});
  return {cast.w, cast.bias, cast.gamma, cast.beta, cast.slopes};
}

/// y of what PyTorch, say, has computed.
/// \param input [N,K,Z,P,Q] \param settings those of a call that returns its convolution, of a kernel of one
/// position
Tensor numbered_norm_act(const Tensor& input, const std::optional<Tensor>& norm_weight,
                         const std::optional<Tensor>& norm_bias, const std::optional<Tensor>& slopes,
                         std::int64_t settings) {
  const BlockSettings& s = remembered_settings(settings);
  const std::int64_t k = input.size(1);
  // Nothing reads it: what it says is that there are as many channels out as in. One value stands for all
  // k*k.
  const Tensor weight = reinterpret(empty_strided_like(input, {1}, {1}), {k, k, 1, 1, 1}, {0, 0, 0, 0, 0});
  return run_tail_of(
      tail_arguments(input, weight, kNoTensor, norm_weight, norm_bias, slopes, kNoTensor, s, s.tail, true));
}

/// y, and the convolution, [0] where it is not returned. \param num_groups 0 where nothing is normalized
std::tuple<Tensor, Tensor> tail(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                const Ints& stride, const Ints& padding, const Ints& output_padding,
                                std::int64_t groups, const Ints& dilation, StringHandle order,
                                std::int64_t num_groups, const std::optional<Tensor>& norm_weight,
                                const std::optional<Tensor>& norm_bias, double eps, StringHandle activation,
                                double parameter, const std::optional<Tensor>& slopes,
                                const std::optional<Tensor>& skip, bool return_conv, StringHandle precision) {
  const BlockSettings s = settings_of(stride, padding, output_padding, groups, dilation, order, num_groups,
                                      eps, activation, parameter, return_conv, precision);
  CallExtras extras;
  Tensor y = run_call(
      tail_arguments(input, weight, bias, norm_weight, norm_bias, slopes, skip, s, s.tail, false), extras);
  Tensor conv = extras.conv ? *extras.conv : empty_strided_like(input, {0}, {1});
  return {std::move(y), std::move(conv)};
}

/// The same with what is kept for a backward: what _tail_backward reads, [bytes] uint8, of a plan that keeps
/// the activation, or the sum with a skip, [N,K,Z,P,Q]; conv is [0].
std::tuple<Tensor, Tensor, Tensor> tail_for_training(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
    const Ints& padding, const Ints& output_padding, std::int64_t groups, const Ints& dilation,
    StringHandle order, std::int64_t num_groups, const std::optional<Tensor>& norm_weight,
    const std::optional<Tensor>& norm_bias, double eps, StringHandle activation, double parameter,
    const std::optional<Tensor>& slopes, const std::optional<Tensor>& skip, bool return_conv,
    StringHandle precision) {
  const BlockSettings s = settings_of(stride, padding, output_padding, groups, dilation, order, num_groups,
                                      eps, activation, parameter, return_conv, precision);
  CallExtras extras;
  Tensor y = run_call(
      tail_arguments(input, weight, bias, norm_weight, norm_bias, slopes, skip, s, s.tail, true), extras);
  if (!extras.saved || extras.conv) {
    throw std::logic_error(
        "upconv3d: _tail_for_training is for plans that keep the activation, or a sum with a skip, and "
        "return "
        "no convolution, unlike this call's. Use conv_transpose3d_norm_act.");
  }
  return {std::move(y), empty_strided_like(input, {0}, {1}), *extras.saved};
}

}  // namespace
}  // namespace upconv3d::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(upconv3d, library) {
  const std::string forward =
      "(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? slopes, "
      "Tensor? skip, int settings)";
  library.def(("_numbered_tail" + forward + " -> (Tensor y, Tensor? conv)").c_str());
  library.def(("_numbered_tail_for_training" + forward + " -> (Tensor? y, Tensor? saved)").c_str());
  library.def(
      "_numbered_norm_act(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor? slopes, int "
      "settings) "
      "-> Tensor");
  library.def(
      "_cast_parameters(Tensor input, Tensor(a) weight, Tensor(b)? bias, Tensor(c)? norm_weight, "
      "Tensor(d)? norm_bias, Tensor(e)? slopes) -> "
      "(Tensor(a), Tensor(b)?, Tensor(c)?, Tensor(d)?, Tensor(e)?)");
  const std::string whole =
      "(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
      "int groups, int[] dilation, str order, int num_groups, Tensor? norm_weight, Tensor? norm_bias, "
      "float eps, str activation, float activation_param, Tensor? slopes, Tensor? skip, bool return_conv, "
      "str precision)";
  library.def(("_tail" + whole + " -> (Tensor y, Tensor conv)").c_str());
  library.def(("_tail_for_training" + whole + " -> (Tensor y, Tensor conv, Tensor saved)").c_str());
  library.def(
      "_numbered_tail_backward(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, Tensor? "
      "norm_weight, "
      "Tensor? norm_bias, Tensor? slopes, Tensor(a!) saved, int settings, int wanted, bool consume_saved) -> "
      "(Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)");
  library.def(
      "_tail_backward(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] output_padding, int groups, int[] dilation, str order, int num_groups, Tensor? norm_weight, "
      "Tensor? norm_bias, float eps, str activation, float activation_param, Tensor? slopes, str precision, "
      "Tensor saved, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(upconv3d, CUDA, library) {
  library.impl("_tail", TORCH_BOX(&upconv3d::bindings::tail));
  library.impl("_tail_for_training", TORCH_BOX(&upconv3d::bindings::tail_for_training));
  library.impl("_numbered_tail", TORCH_BOX(&upconv3d::bindings::numbered_tail));
  library.impl("_numbered_norm_act", TORCH_BOX(&upconv3d::bindings::numbered_norm_act));
  library.impl("_cast_parameters", TORCH_BOX(&upconv3d::bindings::cast_parameters_of));
  library.impl("_numbered_tail_for_training", TORCH_BOX(&upconv3d::bindings::numbered_tail_for_training));
}
