// SPDX-License-Identifier: Apache-2.0
#include "core/without_norm.hpp"

#include <cstddef>

#include "core/half_blocks.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// Times in us of an H200 with L2 cold, fitted to 40 blocks of results of up to 100 MB in bfloat16 NDHWC and
// in float32 ("tf32") NCDHW (perf/NOTES.md, "Without a norm").

double megabytes(const Problem& p, std::int64_t values) {
  return 1e-6 * static_cast<double>(values * size_of(p.dtype));
}

/// A launch that reads a convolution and writes what is made of it.
double pass_us(const Problem& p) {
  constexpr double kLaunch = 3, kPerMB = 0.5;
  return kLaunch + kPerMB * megabytes(p, p.n * p.k * p.positions());
}

/// The convolution by the SM90 plan, with its packing and, in NCDHW, a result stored in pieces.
double sm90_convolution_us(const Problem& p, const Plan& sm90) {
  constexpr double kHalfBlocks = 1.3;  // of what the schedule says of k-blocks of half the inputs
  const bool halves = sm90.instance && sm90.instance->block_inputs == kHalfBlockInputs;
  const double multiply = 1e3 * sm90.scheduled_multiply_ms * (halves ? kHalfBlocks : 1);
  if (p.dtype != DType::kFloat32 && p.y_layout == Layout::kNDHWC) {
    constexpr double kLaunch = 10, kOfSchedule = 0.95;
    return kLaunch + kOfSchedule * multiply;
  }
  // Of 16 bit, whose NCDHW was not fitted: less by what float32's packing takes of blocks with a norm.
  constexpr double kLaunches = 27, kLaunchesOf16Bit = 17, kOfSchedule = 0.8;
  constexpr double kWeightPerMB = 0.7, kTensorPerMB = 0.5;
  const double x = megabytes(p, p.n * p.c * volume(p.in)), w = megabytes(p, p.c * p.k * volume(p.kernel));
  const double y = megabytes(p, p.n * p.k * p.positions());
  return (p.dtype == DType::kFloat32 ? kLaunches : kLaunchesOf16Bit) + kOfSchedule * multiply +
         kWeightPerMB * w + kTensorPerMB * (x + y);
}

/// Whether taps of a stride overlap: of such cuDNN's kernels in 16 bit took up to 1.7 of their estimate.
bool has_overlapping_taps(const Problem& p) {
  bool overlaps = false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    overlaps |= p.stride[axis] > 1 && p.kernel[axis] > p.stride[axis];
  }
  return overlaps;
}

}  // namespace

LibraryAdvantage advantage_without_norm(const Problem& p, const Plan& sm90) {
  if (p.n == 0) return {};
  // Alone cuDNN's convolution takes less than as the first of two launches, to which its estimate was fitted.
  constexpr double kSecondLaunch = 4, kSecondLaunchOfFloat32 = 5;
  const double convolution =
      library_convolution_us(p) - (p.dtype == DType::kFloat32 ? kSecondLaunchOfFloat32 : kSecondLaunch);
  constexpr double kLongest = 150;  // of those that were timed; also true of infinity
  if (convolution > kLongest) return {};
  const double pass = pass_us(p);
  const bool is_activated = p.tail.activation != Activation::kNone;
  const bool in_epilogue = is_in_epilogue(p.tail.activation) && !p.tail.returns_conv;
  const double ours = sm90_convolution_us(p, sm90) + (is_activated && !in_epilogue ? pass : 0);
  // A convolution that is returned is written once more, with its bias.
  constexpr double kWrittenOnce = 0.5;  // of a pass
  const double returning = p.tail.returns_conv && p.has_bias ? kWrittenOnce * pass : 0;
  const double library = convolution + (is_activated || p.has_bias ? pass : 0) + returning;
  // Of short ones the estimate held, whatever their taps.
  constexpr double kShort = 20, kAhead = 0.85;
  const bool is_uncertain = p.dtype != DType::kFloat32 && has_overlapping_taps(p) && convolution > kShort;
  const double ahead = is_uncertain ? kAhead : 1;
  if (library >= ahead * ours) return {};
  return {concat("cuDNN's convolution is expected to take ", convolution, " us, ", library,
                 " with what follows it, the SM90 kernel ", ours, " us"),
          library};
}

}  // namespace upconv3d
