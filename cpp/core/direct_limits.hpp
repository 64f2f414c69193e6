// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the direct plan's kernels, on CUDA cores and on tensor cores, count and hold at most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/extents.hpp"
#include "core/index_math.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// a+b, or the largest int64 where the sum would not fit; both at least 0.
inline std::int64_t saturating_sum(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::int64_t>::max() : sum;
}

/// Whether all that the kernels keep in 32 bits fits: a sample's offsets, and coordinates that may lie
/// outside of the volume by as much as a kernel reaches.
inline bool fits_32_bits(const Problem& p) {
  constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
  const Extent3 out = p.out();
  if (p.n > kMaxCount || saturating_product(p.c, p.in[0], p.in[1], p.in[2]) > kMaxCount ||
      saturating_product(p.k, out[0], out[1], out[2]) > kMaxCount) {
    return false;
  }
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t reach = saturating_product(p.kernel[axis], p.dilation[axis]);
    if (std::max({reach, p.padding[axis], out[axis], p.stride[axis], p.dilation[axis]}) > kMaxCount / 8) {
      return false;
    }
  }
  return true;
}

/// Whether outputs sum up as many products as hide that words of TF32 lack a float's last bits: of fewer,
/// errors were 2 to 3.4 times float32's rms.
inline bool hides_tf32_words(const Problem& p) {
  constexpr double kLeastProducts = 8;
  return static_cast<double>(p.c / p.groups * volume(p.kernel)) >= kLeastProducts * volume_of_any(p.stride);
}

/// Shared memory that a block may ask for, in bytes.
/// \param compute_capability major*10 + minor
inline std::int64_t shared_bytes_per_block(int compute_capability) {
  const bool small = compute_capability == 86 || compute_capability == 89 || compute_capability >= 120;
  if (small) return std::int64_t{99} * 1024;
  if (compute_capability >= 90) return std::int64_t{227} * 1024;
  if (compute_capability >= 80) return std::int64_t{163} * 1024;
  // 7.0 has 96.
  return std::int64_t{compute_capability >= 70 ? 64 : 48} * 1024;
}

}  // namespace upconv3d
