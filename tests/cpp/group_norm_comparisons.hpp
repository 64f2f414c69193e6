// SPDX-License-Identifier: Apache-2.0
/// \file
/// Partial moments and y against the reference in double, for test_group_norm.cu.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "comparisons.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "group_norm_reference.hpp"

namespace upconv3d::test {

/// Partial moments against the reference, tile by tile. Both NaN agree.
inline void check_part(const Case& c, const cuda::GroupNormShape& shape, const Reference& ref,
                       const std::vector<double>& part, double roundoff) {
  double worst = 0;
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t t = 0; t < shape.tiles; ++t) {
      const std::int64_t begin = t * shape.tile_positions,
                         end = std::min(begin + shape.tile_positions, c.positions);
      for (std::int64_t k = 0; k < c.k; ++k) {
        const double* v = ref.v.data() + (n * c.k + k) * c.positions;
        const double* slack = ref.v_slack.data() + (n * c.k + k) * c.positions;
        long double mean = 0, m2 = 0, largest = 0, off_by = 0;
        for (std::int64_t p = begin; p < end; ++p) {
          mean += v[p];
          largest = std::max<long double>(largest, std::fabs(v[p]));
          off_by = std::max<long double>(off_by, slack[p]);
        }
        mean /= end - begin;
        for (std::int64_t p = begin; p < end; ++p) m2 += (v[p] - mean) * (v[p] - mean);
        const double* got = part.data() + ((n * shape.tiles + t) * c.k + k) * 2;
        const long double mean_slack = 12 * roundoff * largest + off_by + 1e-300L;
        // A mean or values that are off by e move M2 by at most 2*e*sum|v - mean| <= 2*e*sqrt(count*M2), and
        // by count*e^2.
        const long double m2_slack = 40 * roundoff * m2 +
                                     (4 * roundoff * largest + 2 * off_by) * std::sqrt((end - begin) * m2) +
                                     (end - begin) * mean_slack * mean_slack + 1e-300L;
        if (!std::isfinite(static_cast<double>(mean))) {
          if (std::isfinite(got[0]) || std::isfinite(got[1])) worst = std::numeric_limits<double>::infinity();
          continue;
        }
        const long double off =
            std::max(std::fabs(got[0] - mean) / mean_slack, std::fabs(got[1] - m2) / m2_slack);
        worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max<double>(worst, off);
      }
    }
  }
  expect(worst <= 1, "moments, " + std::to_string(worst) + " times the tolerance: " + describe(c));
}

/// By how much y may be off where `want` is its value: it is rounded to y's dtype, the activation after is
/// computed of what was off before, and the normalization multiplies what was off before that.
inline double y_slack(const Case& c, const Reference& ref, std::int64_t i, double roundoff, double eps) {
  const std::int64_t k = i / c.positions % c.k;
  const std::int64_t ng = i / (c.k * c.positions) * c.num_groups + k / (c.k / c.num_groups);
  double slack = ref.v_slack[i];
  if (c.norm) {
    const double scale = std::fabs(c.affine ? ref.gamma[k] : 1.0) / std::sqrt(ref.variance[ng] + eps);
    const double magnitude = std::fabs(ref.v[i]) + std::fabs(ref.mean[ng]);
    // Values that are off move the mean by as much, and the deviation by as much.
    slack = 8 * roundoff * (magnitude * scale + std::fabs(ref.u[i]) + 1) +
            scale * (slack + ref.group_slack[ng] * (1 + std::fabs(ref.u[i])));
  }
  if (c.after != Activation::kNone) {
    const double parameter = ref.parameter(c, k);
    slack = slack * steepest(parameter) + activation_slack(c.after, ref.u[i], parameter, roundoff);
  }
  constexpr double kSmallestHalf = 0x1p-24;
  return slack + 1.01 * unit_roundoff(c.y_dtype) * std::fabs(ref.y[i]) +
         (c.y_dtype == DType::kFloat16 ? kSmallestHalf : 1e-300);
}

inline void check_y(const Case& c, const Reference& ref, const std::vector<double>& y, double roundoff,
                    double eps) {
  double worst = 0;
  std::int64_t at = 0, i = 0;
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t k = 0; k < c.k; ++k) {
      for (std::int64_t p = 0; p < c.positions; ++p, ++i) {
        const double got = y[index_of(c, c.y_layout, n, k, p)], want = ref.y[i];
        double off = std::numeric_limits<double>::infinity();
        if (got == want || (std::isnan(want) && std::isnan(got))) {
          off = 0;
        } else if (std::isfinite(want) && std::isfinite(got)) {
          off = std::fabs(got - want) / y_slack(c, ref, i, roundoff, eps);
        }
        if (!(off <= worst)) worst = off, at = i;
      }
    }
  }
  expect(worst <= 1, "y, " + std::to_string(worst) + " times the tolerance at " + std::to_string(at) + ": " +
                         describe(c));
}

}  // namespace upconv3d::test
