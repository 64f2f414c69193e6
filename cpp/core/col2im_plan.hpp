// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows the col2im plan: one matrix product of the weight and all inputs, whose
/// rows are (output channel, tap) and whose columns are input positions, then a gather that sums up what
/// belongs to one output (cuda/conv_transpose/conv_transpose_columns_sm80.hpp, col2im.hpp), then what follows
/// the library plan's convolution.
#pragma once

#include <cstdint>
#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// How the product lies in memory: [samples][rows][pitch] floats.
struct ColumnsLayout {
  std::int64_t samples = 0;  // of rows of their own: N, or 1 where a row goes through all samples (NDHWC)
  std::int64_t rows = 0;     // K*T*R*S: row k*row_k + tap*row_tap, in w's own order
  std::int64_t row_k = 0, row_tap = 0;
  std::int64_t positions = 0;  // inputs of a row
  std::int64_t pitch = 0;      // from row to row: positions and what aligns them

  explicit ColumnsLayout(const Problem& problem);
  std::int64_t values() const;  // saturating
};

/// Rows of a tile of the product, 32, 64 or 128 of kColumnsTile values: those of which the fewest tiles are
/// needed.
inline constexpr std::int64_t kColumnsTile = 8192;
std::int64_t columns_tile_rows(std::int64_t rows, std::int64_t positions);

/// Output channels of a lane of the gather: 1, 2, 4 or 8. Of few outputs a lane has few, so that more of the
/// card has some.
int col2im_lane_channels(const Problem& problem);

/// Along an axis, from a tap that reaches an output to the next that does, or all taps.
std::int64_t col2im_tap_step(const Problem& problem, int axis);

/// The most taps that reach an output: one of kernel = stride.
std::int64_t col2im_most_taps(const Problem& problem);

/// Whether the gather has a form for so few taps, or takes four channels at once. Of more than 4 outputs what
/// the others take is counted, which is 0.91 to 0.99 of it.
bool col2im_has_short_lanes(const Problem& problem);

/// Rounds of tiles of the product, of which a multiprocessor holds two and is as good as full with one.
double columns_rounds(const Problem& problem, int sm_count);

/// Whether the gather applies all that follows the convolution, so that no launch does: without a norm, where
/// the convolution is neither kept nor returned.
bool col2im_finishes(const Problem& problem, bool keeps_conv);

/// Why the kernels of this plan cannot run, or "".
std::string col2im_obstacle(const Problem& problem, const Device& device);

/// Expected time of all launches, in us of an H200 with L2 cold; infinity where the product is larger than
/// was timed, at float32's accuracy of more than 512 inputs, of x beyond 440 MB and of sums too short for
/// that accuracy, and of blocks without plan_times.hpp's times that are unlike what was timed (perf/NOTES.md,
/// "Small blocks by col2im").
double col2im_us(const Problem& problem, const Device& device);

}  // namespace upconv3d
