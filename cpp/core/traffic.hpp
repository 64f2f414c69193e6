// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a block's tensors hold, as estimates of times count it.
#pragma once

#include "core/problem.hpp"

namespace upconv3d {

/// Megabytes, of 10^6 bytes, of x, w and y.
struct Traffic {
  double x, w, y;

  explicit Traffic(const Problem& p) {
    const double size = 1e-6 * static_cast<double>(size_of(p.dtype));
    x = size * static_cast<double>(p.n * p.c * volume(p.in));
    w = size * static_cast<double>(p.c / p.groups * p.k * volume(p.kernel));
    y = size * static_cast<double>(p.n * p.k * p.positions());
  }
};

}  // namespace upconv3d
