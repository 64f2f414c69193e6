// SPDX-License-Identifier: Apache-2.0
/// \file
/// upconv3d._C: what Python asks of the build beyond the op itself. The op registers when this module loads.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bindings/block_settings.hpp"
#include "bindings/build_info.hpp"
#include "bindings/plan_query.hpp"
#include "bindings/python_arguments.hpp"
#include "bindings/settings_number.hpp"
#include "core/arguments.hpp"
#include "core/backward_plan.hpp"
#include "core/errors.hpp"
#include "core/plan.hpp"
#include "core/tail.hpp"
#include "core/text.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/activation_memory.hpp"
#endif

namespace py = pybind11;

namespace upconv3d::bindings {
namespace {

py::object text_or_none(const char* text) {
  return *text ? py::object(py::str(text)) : py::object(py::none());
}

std::vector<std::string> arch_list() {
  std::vector<std::string> archs;
  std::istringstream text(kCudaArchs);
  std::string arch;
  while (std::getline(text, arch, ';')) archs.push_back(arch);
  return archs;
}

py::dict build_config() {
  py::list kernels;
  for (const ConvInstance& instance : conv_instances()) kernels.append(to_dict(instance));
  py::dict config;
  config["version"] = kPackageVersion;
  config["torch_build_version"] = kTorchBuildVersion;
  config["torch_minimum_version"] = kTorchMinimumVersion;
  config["cuda"] = static_cast<bool>(UPCONV3D_WITH_CUDA);
  config["cuda_runtime_version"] = text_or_none(kCudaRuntime);
  config["cuda_archs"] = arch_list();
  config["cutlass_version"] = text_or_none(kCutlassVersion);
  config["cxx_compiler"] = kCxxCompiler;
  config["cuda_compiler"] = text_or_none(kCudaCompiler);
  config["kernels"] = kernels;
  py::list grad_w_kernels;
  for (const GradWInstance& instance : grad_w_instances()) {
    py::dict kernel;
    kernel["name"] = instance.name;
    kernel["compiled"] = instance.compiled;
    grad_w_kernels.append(kernel);
  }
  config["grad_w_kernels"] = grad_w_kernels;
  return config;
}

/// The variants, all taken for compiled where `assume_compiled`: what a full build would choose.
std::vector<ConvInstance> instances_for(bool assume_compiled) {
  std::vector<ConvInstance> instances = conv_instances();
  for (ConvInstance& instance : instances) instance.compiled = instance.compiled || assume_compiled;
  return instances;
}

py::dict explain(const py::dict& dict) {
  const Arguments arguments = parse_arguments(dict);
  const Problem problem = make_problem(arguments);
  bool assume_compiled = false;
  Device device;
  if (dict.contains("device") && !dict["device"].is_none()) {
    const auto given = dict["device"].cast<py::dict>();
    device = parse_device(given);
    assume_compiled = given.contains("assume_compiled") && given["assume_compiled"].cast<bool>();
  } else {
    device = query_device(arguments.input.device);
  }
  device.spares_host = dict.contains("spares_host") && dict["spares_host"].cast<bool>();
  const bool for_training = dict.contains("training") && dict["training"].cast<bool>();
  // A call that returns what its backward begins with runs as without gradients. A sum with a skip, which is
  // kept where the convolution is not returned, is what it begins with as if that were returned.
  const bool apart = problem.tail.returns_conv || begins_with_result(problem.tail);
  const Plan plan = make_plan(problem, device, instances_for(assume_compiled), for_training && !apart);
  Problem begun = problem;
  begun.tail.has_skip = false;
  begun.tail.returns_conv = true;
  // PyTorch's own calls are recorded where the same tensor would be returned twice.
  const Tail& tail = problem.tail;
  const bool is_bare = !tail.norm && tail.activation == Activation::kNone && !tail.has_skip;
  const bool begins_apart = for_training && (apart || plan.keeps_sum) && !(is_bare && tail.returns_conv);
  const Plan read = begins_apart ? make_plan(begun, device, instances_for(assume_compiled), true) : plan;
  print_plan_if_asked(problem, plan);
  py::dict result;
  result["problem"] = to_dict(problem);
  result["plan"] = to_dict(plan);
  result["flops"] = problem.useful_flops();
  std::string description = describe(problem) + "\n" + describe(plan);
  std::vector<std::string> backward_stages;
  const GradientMask all = {true, true, problem.has_bias, true, true};
  if (read.keeps_conv) {
    const BackwardPlan backward = library_backward_plan(problem, all);
    backward_stages = backward.stages;
    description += "\n" + describe(backward) + "\n";
  } else if (plan.keeps_activation) {
    std::vector<GradWInstance> grad_w_variants = grad_w_instances();
    for (GradWInstance& instance : grad_w_variants) instance.compiled = instance.compiled || assume_compiled;
    const BackwardPlan backward =
        select_backward_plan(problem, device, all, instances_for(assume_compiled), grad_w_variants);
    backward_stages = backward.stages;
    description += "\n" + describe(backward) + "\n";
  }
  result["backward_stages"] = backward_stages;
#if UPCONV3D_WITH_CUDA
  result["saved_bytes"] = cuda::saved_bytes(problem, plan);
#else
  result["saved_bytes"] = 0;
#endif
  result["description"] = description;
  return result;
}

using Ints = std::vector<std::int64_t>;

/// \param settings (stride, padding, output_padding, groups, dilation, num_groups, eps, precision), and for
/// another tail than relu before a group norm also (order, activation, activation_param, return_conv);
/// num_groups is then 0 where there is no normalization. Then, or not, spares_host and casts_parameters.
std::optional<std::int64_t> remember(const py::tuple& settings) {
  constexpr std::size_t kBlock = 8, kWithTail = 12, kWithAll = 14;
  const std::size_t count = settings.size();
  if (count != kBlock && count != kWithTail && count != kWithAll) {
    throw py::value_error(concat("upconv3d: settings must be ", kBlock, ", ", kWithTail, " or ", kWithAll,
                                 " values; got ", count, "."));
  }
  BlockSettings s = {settings[0].cast<Ints>(),   settings[1].cast<Ints>(),
                     settings[2].cast<Ints>(),   settings[3].cast<std::int64_t>(),
                     settings[4].cast<Ints>(),   settings[5].cast<std::int64_t>(),
                     settings[6].cast<double>(), settings[7].cast<std::string>()};
  if (count >= kWithTail) {
    s.tail = make_tail(settings[8].cast<std::string>(), s.num_groups != 0, settings[9].cast<std::string>(),
                       settings[10].cast<double>(), settings[11].cast<bool>());
    if (!s.tail.norm) s.num_groups = 1;
  }
  if (count == kWithAll) {
    s.spares_host = settings[12].cast<bool>();
    s.casts_parameters = settings[13].cast<bool>();
  }
  return remember_settings(std::move(s));
}

py::tuple remembered(std::int64_t number) {
  const BlockSettings& s = remembered_settings(number);
  const auto triple = [](const Ints& list) { return py::make_tuple(list.at(0), list.at(1), list.at(2)); };
  const py::tuple block =
      py::make_tuple(triple(s.stride), triple(s.padding), triple(s.output_padding), s.groups,
                     triple(s.dilation), s.tail.norm ? s.num_groups : 0, s.eps, s.precision);
  const bool is_tail_alone = !s.spares_host && !s.casts_parameters;
  if (s.tail.is_relu_group_norm() && is_tail_alone) return block;
  const py::tuple whole = block + py::make_tuple(name(s.tail.order), name(s.tail.activation),
                                                 s.tail.parameter, s.tail.returns_conv);
  if (is_tail_alone) return whole;
  return whole + py::make_tuple(s.spares_host, s.casts_parameters);
}

/// What pybind11 does not translate by itself.
void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const UnsupportedViolation& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  }
}

}  // namespace
}  // namespace upconv3d::bindings

PYBIND11_MODULE(_C, module) {
  using namespace upconv3d::bindings;
  module.doc() = "Native part of upconv3d: build configuration, plans, and torch.ops.upconv3d.";
  py::register_local_exception_translator(&translate);
  module.def("build_config", &build_config,
             "Versions, CUDA architectures and kernel variants of this build, as a dict.");
  module.def(
      "explain", &explain, py::arg("args"),
      "The plan that would run for `args`, as a dict with problem, plan, flops (multiplications and "
      "additions) and description.\n\nRaises RuntimeError, ValueError or NotImplementedError for a broken "
      "rule, TypeError or KeyError for malformed `args`.");
  module.def(
      "validate", [](const py::dict& args) { upconv3d::make_problem(parse_arguments(args)); },
      py::arg("args"), "Checks every rule of the block on `args`; raises as explain does.");
  module.def("forced_plan", &forced_plan,
             "What UPCONV3D_PLAN was in the environment when it was read, once, or an empty string.");
  module.def(
      "remember_settings", &remember, py::arg("settings"),
      "A number for (stride, padding, output_padding, groups, dilation, num_groups, eps, precision), "
      "which torch.ops.upconv3d._numbered_block takes, or for these and (order, activation, "
      "activation_param, return_conv) and, or not, (spares_host, casts_parameters), which _numbered_tail "
      "takes: whether a small block is to take the host least, and whether float32 parameters of a "
      "16-bit input are cast to its dtype; None where too many are remembered already.");
  module.def("remembered_settings", &remembered, py::arg("number"), "What remember_settings was given.");
  add_settings_number(module);
}
