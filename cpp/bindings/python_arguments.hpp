// SPDX-License-Identifier: Apache-2.0
/// \file
/// Plain data across the Python border: argument dicts in, problem and plan dicts out.
#pragma once

#include <pybind11/pybind11.h>

#include "core/arguments.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

/// {"input": {"sizes", "strides", "dtype", "device", "layout", "data_ptr_mod16"}, ..., "precision": "ieee"};
/// and of another tail than relu before a group norm "order", "activation", "activation_param",
/// "return_conv", "slopes" and "skip", with "num_groups" 0 for no normalization.
/// \throws pybind11::key_error for a missing key, pybind11::type_error for a value of the wrong type.
Arguments parse_arguments(const pybind11::dict& arguments);

/// {"is_cuda", "compute_capability", "sm_count", "max_threads", "forced_plan"}, each with a default.
Device parse_device(const pybind11::dict& device);

pybind11::dict to_dict(const Problem& problem);
pybind11::dict to_dict(const Plan& plan);
pybind11::dict to_dict(const ConvInstance& instance);

}  // namespace upconv3d::bindings
