// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_arguments.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "core/text.hpp"

namespace py = pybind11;

namespace upconv3d::bindings {
namespace {

py::object item(const py::dict& dict, const char* key) {
  if (!dict.contains(key)) throw py::key_error(concat("upconv3d: missing argument \"", key, '"'));
  return dict[key];
}

template <typename T>
T get(const py::dict& dict, const char* key) {
  const py::object value = item(dict, key);
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw py::type_error(concat("upconv3d: argument ", key, " has the wrong type; got ",
                                std::string(py::str(py::type::of(value))), ", value ",
                                std::string(py::repr(value))));
  }
}

template <typename T>
T get_or(const py::dict& dict, const char* key, const T& otherwise) {
  return dict.contains(key) ? get<T>(dict, key) : otherwise;
}

TensorDesc parse_tensor(const py::dict& dict) {
  TensorDesc tensor;
  tensor.sizes = get<std::vector<std::int64_t>>(dict, "sizes");
  tensor.strides = get<std::vector<std::int64_t>>(dict, "strides");
  tensor.dtype = get<std::string>(dict, "dtype");
  tensor.device = get<std::string>(dict, "device");
  tensor.layout = get_or<std::string>(dict, "layout", "strided");
  tensor.data_ptr_mod16 = get_or<std::int64_t>(dict, "data_ptr_mod16", 0);
  if (tensor.layout == "strided" && tensor.strides.size() != tensor.sizes.size()) {
    throw py::type_error(concat("upconv3d: a tensor needs as many strides as sizes; got sizes=",
                                list_text(tensor.sizes), ", strides=", list_text(tensor.strides)));
  }
  return tensor;
}

std::optional<TensorDesc> parse_optional_tensor(const py::dict& dict, const char* key) {
  if (!dict.contains(key) || item(dict, key).is_none()) return std::nullopt;
  return parse_tensor(get<py::dict>(dict, key));
}

}  // namespace

Arguments parse_arguments(const py::dict& dict) {
  Arguments a;
  a.input = parse_tensor(get<py::dict>(dict, "input"));
  a.weight = parse_tensor(get<py::dict>(dict, "weight"));
  a.bias = parse_optional_tensor(dict, "bias");
  a.norm_weight = parse_optional_tensor(dict, "norm_weight");
  a.norm_bias = parse_optional_tensor(dict, "norm_bias");
  a.stride = get<std::vector<std::int64_t>>(dict, "stride");
  a.padding = get<std::vector<std::int64_t>>(dict, "padding");
  a.output_padding = get<std::vector<std::int64_t>>(dict, "output_padding");
  a.dilation = get<std::vector<std::int64_t>>(dict, "dilation");
  a.groups = get<std::int64_t>(dict, "groups");
  a.num_groups = get<std::int64_t>(dict, "num_groups");
  a.eps = get<double>(dict, "eps");
  a.precision = get<std::string>(dict, "precision");
  if (!dict.contains("order")) return a;  // relu before a group norm
  a.slopes = parse_optional_tensor(dict, "slopes");
  a.skip = parse_optional_tensor(dict, "skip");
  a.tail = make_tail(get<std::string>(dict, "order"), a.num_groups != 0, get<std::string>(dict, "activation"),
                     get<double>(dict, "activation_param"), get<bool>(dict, "return_conv"));
  if (!a.tail.norm) a.num_groups = 1;
  return a;
}

Device parse_device(const py::dict& dict) {
  Device device;
  device.is_cuda = get_or<bool>(dict, "is_cuda", device.is_cuda);
  device.compute_capability = get_or<int>(dict, "compute_capability", device.compute_capability);
  device.sm_count = get_or<int>(dict, "sm_count", device.sm_count);
  device.max_threads = get_or<int>(dict, "max_threads", device.max_threads);
  device.forced_plan = get_or<std::string>(dict, "forced_plan", device.forced_plan);
  return device;
}

py::dict to_dict(const Problem& p) {
  py::dict dict;
  dict["n"] = p.n;
  dict["c"] = p.c;
  dict["k"] = p.k;
  dict["in"] = p.in;
  dict["kernel"] = p.kernel;
  dict["stride"] = p.stride;
  dict["padding"] = p.padding;
  dict["output_padding"] = p.output_padding;
  dict["dilation"] = p.dilation;
  dict["out"] = p.out();
  dict["groups"] = p.groups;
  dict["num_groups"] = p.num_groups;
  dict["eps"] = p.eps;
  dict["dtype"] = name(p.dtype);
  dict["precision"] = name(p.precision);
  dict["x_layout"] = name(p.x_layout);
  dict["y_layout"] = name(p.y_layout);
  dict["x_aligned"] = p.x_aligned;
  dict["w_channels_last"] = p.w_channels_last;
  dict["has_bias"] = p.has_bias;
  dict["order"] = name(p.tail.order);
  dict["norm"] = p.tail.norm;
  dict["activation"] = name(p.tail.activation);
  dict["has_skip"] = p.tail.has_skip;
  dict["returns_conv"] = p.tail.returns_conv;
  return dict;
}

py::dict to_dict(const Plan& plan) {
  py::dict dict;
  dict["algorithm"] = name(plan.algorithm);
  dict["reason"] = plan.reason;
  dict["kernel"] = py::none();
  dict["tile"] = py::none();
  if (plan.instance) {
    dict["kernel"] = plan.instance->name;
    dict["tile"] = std::vector<int>{plan.instance->block_channels, plan.instance->block_positions};
  }
  dict["conv_layout"] = name(plan.conv_layout);
  dict["activation"] = name(plan.activation);
  dict["pack_x"] = plan.pack_x;
  dict["w_in_place"] = plan.w_in_place;
  dict["activation_in_y"] = plan.activation_in_y;
  dict["keeps_activation"] = plan.keeps_activation;
  dict["keeps_conv"] = plan.keeps_conv;
  dict["keeps_sum"] = plan.keeps_sum;
  dict["instead_of_sm90"] = plan.instead_of_sm90;
  dict["one_voxel"] = plan.one_voxel;
  dict["tile_positions"] = plan.tile_positions;
  dict["split_axes"] = plan.split_axes;
  dict["share_taps"] = plan.share_taps;
  dict["pair_phases"] = plan.pair_phases;
  dict["window_tiles"] = plan.window_tiles;
  dict["leaving_blocks"] = plan.leaving_blocks;
  dict["channels"] = plan.channels;
  dict["twice"] = plan.twice;
  dict["held"] = plan.held;
  dict["estimated_stored_ms"] = plan.estimated_stored_ms;
  dict["estimated_twice_ms"] = plan.estimated_twice_ms;
  dict["estimated_held_ms"] = plan.expected_held_us / 1e3;
  dict["estimated_direct_ms"] = plan.estimated_direct_ms;
  dict["saves_us"] = plan.saves_us;
  dict["tiles"] = plan.tiles;
  dict["stages"] = plan.stages;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

py::dict to_dict(const ConvInstance& instance) {
  py::dict dict;
  dict["name"] = instance.name;
  dict["arch"] = instance.arch;
  dict["operand"] = name(instance.operand);
  dict["products"] = instance.products;
  dict["output"] = name(instance.output);
  dict["stored_bits"] = instance.stored_bits;
  dict["block_channels"] = instance.block_channels;
  dict["block_positions"] = instance.block_positions;
  dict["block_inputs"] = instance.block_inputs;
  dict["twice"] = instance.twice;
  dict["held"] = instance.held;
  dict["compiled"] = instance.compiled;
  return dict;
}

}  // namespace upconv3d::bindings
