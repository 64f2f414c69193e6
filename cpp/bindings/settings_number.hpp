// SPDX-License-Identifier: Apache-2.0
/// \file
/// The number of remembered settings, asked for with Python's own objects.
#pragma once

#include <pybind11/pybind11.h>

namespace upconv3d::bindings {

/// Adds `settings_number` to the module.
void add_settings_number(pybind11::module_& module);

}  // namespace upconv3d::bindings
