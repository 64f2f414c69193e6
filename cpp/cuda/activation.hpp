// SPDX-License-Identifier: Apache-2.0
/// \file
/// An activation as a launcher takes it. What it computes: cuda/activation.cuh.
#pragma once

#include "core/tail.hpp"

namespace upconv3d::cuda {

struct ActivationParams {
  Activation kind = Activation::kNone;
  double parameter = 0.0;        // kLeakyRelu: negative_slope; kElu: alpha
  const void* slopes = nullptr;  // kPrelu: [1] or [K], dtype of y
  int slope_step = 0;            // from one channel's slope to the next's: 0 of [1], 1 of [K]
};

}  // namespace upconv3d::cuda
