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
                saturating_product(p.n, p.c, volume(p.in)) <= kMaxCount;
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

namespace {

/// Whether the gather has a form for so few taps, or takes four channels at once. Of more than 4 outputs what
/// the others take is counted, since choices were fitted with that: theirs is 0.91 to 0.99 of it.
bool col2im_has_short_lanes(const Problem& p) {
  constexpr std::int64_t kMostOutputs = 4;
  const std::int64_t taps = col2im_most_taps(p);
  return p.k <= kMostOutputs &&
         (taps == 1 || (p.k == 1 && taps <= kShortSum) || col2im_lane_channels(p) == 4);
}

/// What a block moves and multiplies, megabytes of 10^6 bytes.
struct ColumnsWork {
  double columns_mb, x_mb, y_mb;
  double rounds;  // of tiles, of which a multiprocessor holds two and is as good as full with one

  ColumnsWork(const Problem& p, int sm_count) {
    constexpr double kMega = 1e-6, kLeastRounds = 0.75;
    const ColumnsLayout columns(p);
    const double size = static_cast<double>(size_of(p.dtype)) * kMega;
    columns_mb = static_cast<double>(columns.values()) * sizeof(float) * kMega;
    x_mb = static_cast<double>(p.n * p.c * volume(p.in)) * size;
    y_mb = static_cast<double>(p.n * p.k * p.positions()) * size;
    const std::int64_t rows = columns_tile_rows(columns.rows, columns.positions);
    const std::int64_t tiles =
        columns.samples * ceil_div(columns.rows, rows) * ceil_div(columns.positions, kColumnsTile / rows);
    rounds = std::max(kLeastRounds, static_cast<double>(ceil_div(tiles, std::max(sm_count, 1))) / 2);
  }
};

/// The largest blocks of a kind that were timed.
struct ColumnsLimits {
  double columns_mb, x_mb, y_mb, flops;

  bool hold(const Problem& p, const ColumnsWork& work) const {
    return work.columns_mb <= columns_mb && work.x_mb <= x_mb && work.y_mb <= y_mb &&
           p.useful_flops() <= flops;
  }
};

constexpr ColumnsLimits kAnyOutputs = {128, 64, 32, 8e9};

/// What launches, a k-block of a round of tiles, megabytes and lanes of the gather take, us. Rows of x or w
/// that come value by value are waited for in each k-block.
struct ColumnsCosts {
  std::int64_t block_inputs;  // of a k-block
  std::int64_t row_values;    // rows of multiples of these come in larger pieces
  double launches, block, odd_input, odd_weight, columns_mb, input_mb, result_mb, long_lane;

  double us(const Problem& p, const ColumnsWork& work) const {
    const ColumnsLayout columns(p);
    const bool is_input_odd = (p.x_layout == Layout::kNDHWC ? p.c : columns.positions) % row_values != 0;
    const bool is_weight_odd = columns.rows % row_values != 0;
    const double blocks = work.rounds * static_cast<double>(ceil_div(p.c, block_inputs));
    const double lanes = static_cast<double>(p.n * p.positions() * ceil_div(p.k, col2im_lane_channels(p)));
    // Forms for few taps, and of four channels, took 10 to 14 (perf/NOTES.md, "Large inputs of few outputs").
    constexpr double kShortLane = 12e-6;
    const double lane = col2im_has_short_lanes(p) ? kShortLane : long_lane;
    return launches + (block + (is_input_odd ? odd_input : 0) + (is_weight_odd ? odd_weight : 0)) * blocks +
           columns_mb * work.columns_mb + input_mb * work.x_mb + result_mb * work.y_mb + lane * lanes;
  }
};

/// Of 60 blocks that none was fitted to they were off by 8 % in float32 and 11 % in 16 bit (standard
/// deviation); 17 large ones took 0.74 to 1.21 of them in five inputs, 0.94 on average, before lanes were
/// short.
constexpr ColumnsCosts kTf32Costs = {16, 4, 15, 0.8, 0.45, 0.35, 0.65, 0.07, 0.75, 24e-6};
constexpr ColumnsCosts kIeeeCosts = {16, 4, 15, 1.45, 0.45, 0.35, 0.65, 0.07, 0.75, 24e-6};
constexpr ColumnsCosts kHalfCosts = {32, 2, 16.5, 0.65, 1.35, 1, 0.68, 0, 0.9, 25e-6};

}  // namespace

double col2im_us(const Problem& p, const Device& device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kMostInputs = 512;
  if (p.n == 0 || !p.tail.norm || p.tail.returns_conv || device.compute_capability != kHopper ||
      p.c > kMostInputs) {
    return kInfinity;
  }
  const ColumnsWork work(p, device.sm_count);
  if (p.dtype != DType::kFloat32) {
    constexpr std::int64_t kFewOutputs = 16;
    constexpr ColumnsLimits kOfFewOutputs = {450, 151, 67, 22e9};
    const bool timed = kAnyOutputs.hold(p, work) || (p.k <= kFewOutputs && kOfFewOutputs.hold(p, work));
    return timed ? kHalfCosts.us(p, work) : kInfinity;
  }
  if (p.is_ieee() && !hides_tf32_words(p)) return kInfinity;
  const ColumnsCosts& costs = p.is_ieee() ? kIeeeCosts : kTf32Costs;
  constexpr std::int64_t kSomeOutputs = 24, kFewOutputs = 8, kLeastOutputs = 4;
  constexpr ColumnsLimits kOfSomeOutputs = {450, 135, 56, 13e9}, kOfFewOutputs = {450, 302, 134, 13e9},
                          kOfLeastOutputs = {360, 440, 104, 18e9};
  const bool is_timed = kAnyOutputs.hold(p, work) || (p.k <= kSomeOutputs && kOfSomeOutputs.hold(p, work)) ||
                        (p.k <= kFewOutputs && kOfFewOutputs.hold(p, work));
  if (is_timed) return costs.us(p, work);
  // At float32's accuracy two larger ones were timed, which took 0.88 and 1.33 of the estimate.
  constexpr double kSlower = 1.35;
  const bool timed = p.is_ieee() && p.k <= kLeastOutputs && kOfLeastOutputs.hold(p, work);
  return timed ? kSlower * costs.us(p, work) : kInfinity;
}

}  // namespace upconv3d
