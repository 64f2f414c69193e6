// SPDX-License-Identifier: Apache-2.0
#include "core/one_voxel.hpp"

#include <cstdint>
#include <limits>
#include <optional>

#include "core/idle_taps.hpp"
#include "core/index_math.hpp"

namespace upconv3d {

std::optional<Problem> product_of_one_voxel(const Problem& problem) {
  constexpr Extent3 kOne = {1, 1, 1}, kNone = {0, 0, 0};
  const bool has_one_tap_per_output = problem.padding == kNone && problem.out() == problem.kernel;
  const bool is_one_voxel = problem.operation == Operation::kConvTranspose && problem.in == kOne;
  if (problem.groups != 1 || !is_one_voxel || !has_one_tap_per_output) return std::nullopt;
  Problem product = problem;
  product.k = saturating_product(problem.k, volume(problem.kernel));
  product.kernel = product.stride = product.dilation = kOne;
  product.output_padding = kNone;
  constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
  const bool counts = saturating_product(problem.n, product.k) <= kMaxCount &&
                      saturating_product(problem.c, product.k) <= kMaxCount;
  return counts ? std::optional(product) : std::nullopt;
}

bool is_one_voxel_product(const Problem& problem) {
  if (problem.n == 0 || (problem.tail.returns_conv && problem.has_bias)) return false;
  const std::optional<CroppedTaps> cropped = without_idle_taps(problem);
  return product_of_one_voxel(cropped ? cropped->problem : problem).has_value();
}

}  // namespace upconv3d
