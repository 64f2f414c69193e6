// SPDX-License-Identifier: Apache-2.0
#include "core/col2im_plan.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/direct_limits.hpp"
#include "core/index_math.hpp"
#include "core/plan_times.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"
#include "core/traffic.hpp"

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
  if (p.dtype == DType::kFloat64) return "it computes no float64";
  if (p.groups != 1) return "the convolution has groups";
  if (p.tail.has_skip) return "a skip is added to the convolution";
  const int capability = device.compute_capability;
  if (capability < 80) {
    return concat("tensor cores multiply TF32 and bfloat16 from compute capability 8.0 on; this is ",
                  capability / 10, '.', capability % 10);
  }
  constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t kRounded = 1024;  // at most that the last block has beyond what there is
  const ColumnsLayout columns(p);
  bool counts = fits_32_bits(p) && columns.values() <= kMaxCount - kRounded &&
                p.positions() <= kMaxCount - kRounded &&
                saturating_product(p.c, columns.rows) <= kMaxCount - kRounded &&
                saturating_product(p.n, p.c, volume(p.in)) <= kMaxCount &&
                // The gather's blocks, of 256 values but for what positions and channels leave over.
                saturating_product(p.n, p.k) <= kMaxCount / 4 &&
                saturating_product(p.n, p.k, p.positions()) <= kMaxCount * 16;
  for (int axis = 0; axis < 3; ++axis) {
    // By so many outputs the gather looks back, from a tap that reaches one to the next.
    counts = counts && std::lcm(p.stride[axis], p.dilation[axis]) <= kMaxCount / 8;
  }
  return counts ? "" : "offsets need more than 31 bits";
}

namespace {
/// Taps that reach an output, in what was timed of the gather's forms for few.
constexpr std::int64_t kShortSum = 8;
}  // namespace

int col2im_lane_channels(const Problem& p) {
  constexpr std::int64_t kManyOutputs = 1 << 20, kFewOutputs = 4;
  if (p.k == 1) return 1;
  if (p.k == 2 || p.n * p.k * p.positions() < kManyOutputs) return 2;
  if (p.k > kFewOutputs) return 8;
  return col2im_most_taps(p) <= kShortSum ? 4 : 2;  // of longer sums lanes of four were not timed
}

std::int64_t col2im_tap_step(const Problem& p, int axis) {
  return std::min(p.stride[axis] / std::gcd(p.stride[axis], p.dilation[axis]), p.kernel[axis]);
}

std::int64_t col2im_most_taps(const Problem& p) {
  std::int64_t most = 1;
  for (int axis = 0; axis < 3; ++axis) most *= ceil_div(p.kernel[axis], col2im_tap_step(p, axis));
  return most;
}

bool col2im_has_short_lanes(const Problem& p) {
  constexpr std::int64_t kMostOutputs = 4;
  const std::int64_t taps = col2im_most_taps(p);
  return p.k <= kMostOutputs &&
         (taps == 1 || (p.k == 1 && taps <= kShortSum) || col2im_lane_channels(p) == 4);
}

bool col2im_finishes(const Problem& p, bool keeps_conv) {
  return !p.tail.norm && !p.tail.returns_conv && !keeps_conv;
}

double columns_rounds(const Problem& p, int sm_count) {
  constexpr double kLeastRounds = 0.75;
  const ColumnsLayout columns(p);
  const std::int64_t rows = columns_tile_rows(columns.rows, columns.positions);
  const std::int64_t tiles =
      columns.samples * ceil_div(columns.rows, rows) * ceil_div(columns.positions, kColumnsTile / rows);
  return std::max(kLeastRounds, static_cast<double>(ceil_div(tiles, std::max(sm_count, 1))) / 2);
}

namespace {

/// What a block moves, in megabytes, and those of its product.
struct ColumnsWork : Traffic {
  double columns;

  explicit ColumnsWork(const Problem& p)
      : Traffic(p), columns(1e-6 * static_cast<double>(ColumnsLayout(p).values()) * sizeof(float)) {}
};

constexpr std::int64_t kMostInputs = 512;

/// Whether a block without plan_times.hpp's times is no larger than those that were timed.
bool is_timed_size(const Problem& p) {
  constexpr double kColumnsMB = 128, kInputMB = 64, kResultMB = 32, kFlops = 8e9;
  const ColumnsWork work(p);
  return work.columns <= kColumnsMB && work.x <= kInputMB && work.y <= kResultMB &&
         p.useful_flops() <= kFlops;
}

/// What launches, a k-block of a round of tiles, megabytes and lanes of the gather take, us. Rows of x or w
/// that come value by value are waited for in each k-block. Fitted at float32's accuracy to small blocks; of
/// 120 others, with products up to 1 GB, nine of ten took 0.8 to 1.05 of it.
double ieee_columns_us(const Problem& p, const ColumnsWork& work, int sm_count) {
  constexpr std::int64_t kBlockInputs = 16, kRowValues = 4;
  constexpr double kLaunches = 15, kBlock = 1.45, kOddInput = 0.45, kOddWeight = 0.35;
  constexpr double kColumnsPerMB = 0.65, kInputPerMB = 0.07, kResultPerMB = 0.75;
  // Without a norm; and where the gather writes the result, not a launch behind it.
  constexpr double kLaunchesOfLinear = 11, kResultPerMBOfLinear = 0.3;
  constexpr double kLaunchesOfFinished = 8, kResultPerMBOfFinished = 0.05;
  constexpr double kLane = 24e-6, kShortLane = 12e-6;
  const ColumnsLayout columns(p);
  const bool is_input_odd = (p.x_layout == Layout::kNDHWC ? p.c : columns.positions) % kRowValues != 0;
  const bool is_weight_odd = columns.rows % kRowValues != 0;
  const double blocks = columns_rounds(p, sm_count) * static_cast<double>(ceil_div(p.c, kBlockInputs));
  const double lanes = static_cast<double>(p.n * p.positions() * ceil_div(p.k, col2im_lane_channels(p)));
  const bool finished = col2im_finishes(p, false);
  const double launches = p.tail.norm ? kLaunches : finished ? kLaunchesOfFinished : kLaunchesOfLinear;
  const double result = p.tail.norm ? kResultPerMB : finished ? kResultPerMBOfFinished : kResultPerMBOfLinear;
  return launches + (kBlock + (is_input_odd ? kOddInput : 0) + (is_weight_odd ? kOddWeight : 0)) * blocks +
         kColumnsPerMB * work.columns + kInputPerMB * work.x + result * work.y +
         (col2im_has_short_lanes(p) ? kShortLane : kLane) * lanes;
}

/// Expected time at float32's accuracy.
double ieee_us(const Problem& p, const Device& device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // Of larger x two blocks, which took 0.88 and 1.33 of the estimate.
  constexpr double kMostMB = 440, kLargeMB = 302, kSlower = 1.35;
  const ColumnsWork work(p);
  if (p.c > kMostInputs || work.x > kMostMB || !hides_tf32_words(p)) return kInfinity;
  return (work.x > kLargeMB ? kSlower : 1) * ieee_columns_us(p, work, device.sm_count);
}

}  // namespace

double col2im_us(const Problem& p, const Device& device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kMostBytes = 450'000'000;  // of the product, that was timed
  if (p.n == 0 || device.compute_capability != kHopper) return kInfinity;
  if (ColumnsLayout(p).values() > kMostBytes / static_cast<std::int64_t>(sizeof(float))) return kInfinity;
  if (p.is_ieee()) return ieee_us(p, device);
  if (!has_plan_times(p) && (p.c > kMostInputs || !is_timed_size(p))) return kInfinity;
  return col2im_plan_us(p, device);
}

}  // namespace upconv3d
