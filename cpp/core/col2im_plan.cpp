// SPDX-License-Identifier: Apache-2.0
#include "core/col2im_plan.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/direct_limits.hpp"
#include "core/index_math.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {

ColumnsLayout::ColumnsLayout(const Problem& p) {
  constexpr std::int64_t kUnit = 4;  // floats of 16 bytes
  const std::int64_t taps = volume(p.kernel), inputs = volume(p.in);
  const bool one_row = p.x_layout == Layout::kNDHWC;
  samples = one_row ? 1 : p.n;
  positions = one_row ? saturating_product(p.n, inputs) : inputs;
  rows = saturating_product(p.k, taps);
  row_k = p.w_channels_last ? 1 : taps;
  row_tap = p.w_channels_last ? p.k : 1;
  pitch = positions > std::numeric_limits<std::int64_t>::max() - kUnit ? positions
                                                                       : ceil_div(positions, kUnit) * kUnit;
}

std::int64_t ColumnsLayout::values() const {
  return saturating_product(samples, rows, pitch);
}

std::int64_t columns_tile_rows(std::int64_t rows, std::int64_t positions) {
  const auto tiles = [&](std::int64_t of) {
    return saturating_product(ceil_div(rows, of), ceil_div(positions, kColumnsTile / of));
  };
  std::int64_t best = 64;
  for (const std::int64_t other : {32, 128}) {
    if (tiles(other) < tiles(best)) best = other;
  }
  return best;
}

std::string col2im_obstacle(const Problem& p, const Device& device) {
  if (p.dtype != DType::kFloat32) return "it computes float32";
  if (p.groups != 1) return "the convolution has groups";
  if (p.tail.has_skip) return "a skip is added to the convolution";
  const int capability = device.compute_capability;
  if (capability < 80) {
    return concat("tensor cores multiply TF32 from compute capability 8.0 on; this is ", capability / 10, '.',
                  capability % 10);
  }
  constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t kRounded = 1024;  // at most that the last block has beyond what there is
  const ColumnsLayout columns(p);
  bool counts = fits_32_bits(p) && columns.values() <= kMaxCount - kRounded &&
                p.positions() <= kMaxCount - kRounded &&
                saturating_product(p.c, columns.rows) <= kMaxCount - kRounded &&
                saturating_product(p.n, p.c, volume(p.in)) <= kMaxCount;
  for (int axis = 0; axis < 3; ++axis) {
    // By so many outputs the gather looks back, from a tap that reaches one to the next.
    counts = counts && std::lcm(p.stride[axis], p.dilation[axis]) <= kMaxCount / 8;
  }
  return counts ? "" : "offsets need more than 31 bits";
}

double col2im_us(const Problem& p, const Device& device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kMostColumnsMB = 128, kMostResultMB = 32, kMostInputMB = 64, kMostFlops = 8e9;
  // Of a few outputs at float32's accuracy two larger ones were timed, which took 0.88 and 1.33 of the
  // estimate.
  constexpr double kFewColumnsMB = 360, kFewResultMB = 104, kFewInputMB = 440, kFewFlops = 18e9,
                   kSlower = 1.35;
  constexpr std::int64_t kMostInputs = 512, kFewOutputs = 4;
  const ColumnsLayout columns(p);
  const double mega = sizeof(float) * 1e-6;
  const double columns_mb = static_cast<double>(columns.values()) * mega;
  const double x_mb = static_cast<double>(p.n * p.c * volume(p.in)) * mega;
  const double y_mb = static_cast<double>(p.n * p.k * p.positions()) * mega;
  const auto within = [&](double most_columns, double most_x, double most_y, double most_flops) {
    return columns_mb <= most_columns && x_mb <= most_x && y_mb <= most_y && p.useful_flops() <= most_flops;
  };
  const bool was_fitted = within(kMostColumnsMB, kMostInputMB, kMostResultMB, kMostFlops);
  const bool was_timed =
      p.is_ieee() && p.k <= kFewOutputs && within(kFewColumnsMB, kFewInputMB, kFewResultMB, kFewFlops);
  if (p.n == 0 || !p.tail.norm || p.tail.returns_conv || device.compute_capability != kHopper ||
      p.c > kMostInputs || !(was_fitted || was_timed) || (p.is_ieee() && !hides_tf32_words(p))) {
    return kInfinity;
  }
  constexpr double kLaunches = 16.5, kColumnsPerMB = 0.53, kInputPerMB = 0.13, kResultPerMB = 1.25;
  constexpr double kPerPosition = 25e-6;
  // A multiprocessor holds two blocks, and is as good as full with one.
  constexpr double kLeastRounds = 0.75;
  constexpr std::int64_t kBlockInputs = 16;
  const double per_block = p.is_ieee() ? 1.65 : 0.9;
  const std::int64_t rows = columns_tile_rows(columns.rows, columns.positions);
  const std::int64_t tiles =
      columns.samples * ceil_div(columns.rows, rows) * ceil_div(columns.positions, kColumnsTile / rows);
  const double rounds =
      std::max(kLeastRounds, static_cast<double>(ceil_div(tiles, std::max(device.sm_count, 1))) / 2);
  return (was_fitted ? 1 : kSlower) *
         (kLaunches + per_block * rounds * static_cast<double>(ceil_div(p.c, kBlockInputs)) +
          kColumnsPerMB * columns_mb + kInputPerMB * x_mb + kResultPerMB * y_mb +
          kPerPosition * static_cast<double>(p.n * p.positions()));
}

}  // namespace upconv3d
