// SPDX-License-Identifier: Apache-2.0
/// \file
/// Integer arithmetic on extents that cannot overflow unnoticed.
#pragma once

#include <cstdint>
#include <limits>

namespace upconv3d {

/// a*b, or the largest int64 where the product would not fit; both at least 0.
inline std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

/// a*b*c..., saturating.
template <typename... Rest>
std::int64_t saturating_product(std::int64_t a, std::int64_t b, Rest... rest) {
  return saturating_product(saturating_product(a, b), rest...);
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace upconv3d
