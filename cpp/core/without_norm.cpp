// SPDX-License-Identifier: Apache-2.0
#include "core/without_norm.hpp"

#include <cstddef>

#include "core/half_blocks.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// Times in us of an H200 with L2 cold, fitted to blocks of results of up to 500 MB in bfloat16 and in float32
// ("tf32") in either layout (perf/NOTES.md, "Without a norm", "Activations in the epilogue, and once by the
// kernel that computes twice").

double megabytes(const Problem& p, std::int64_t values) {
  return 1e-6 * static_cast<double>(values * size_of(p.dtype));
}

/// A launch that reads a convolution and writes what is made of it.
double pass_us(const Problem& p) {
  constexpr double kLaunch = 3, kPerMB = 0.5;
  return kLaunch + kPerMB * megabytes(p, p.n * p.k * p.positions());
}

/// Whether taps of a stride overlap: of such cuDNN's kernels in 16 bit took up to 1.7 of their estimate.
bool has_overlapping_taps(const Problem& p) {
  bool overlaps = false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    overlaps |= p.stride[axis] > 1 && p.kernel[axis] > p.stride[axis];
  }
  return overlaps;
}

/// What the activation takes in the epilogue of either SM90 kernel: stored of all rows of a tile, 64 or more;
/// of exponentials also their code, which comes from memory. Fitted to the 36 blocks, ELU's to a few others.
double epilogue_us(const Problem& p, bool twice) {
  constexpr std::int64_t kRows = 64;
  constexpr double kCode = 3, kOfFloat = 0.6, kOfTwice = 0.75;
  const std::int64_t rows = twice ? p.k : ceil_div(p.k, kRows) * kRows;
  const double values = 1e-6 * static_cast<double>(p.n * rows * p.positions());
  const double share = (p.dtype == DType::kFloat32 ? kOfFloat : 1) * (twice ? kOfTwice : 1);
  const auto exponential = [&](double per_million) { return kCode + share * per_million * values; };
  switch (p.tail.activation) {
    case Activation::kNone:
    case Activation::kRelu:
      return 0;
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return 0.05 * values;
    case Activation::kSilu:
      return exponential(0.9);
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return exponential(1.5);
    case Activation::kElu:
      return exponential(2.0);
  }
  return 0;
}

}  // namespace

double sm90_us_without_norm(const Problem& p, const Plan& sm90) {
  const bool is_float = p.dtype == DType::kFloat32, is_last = p.y_layout == Layout::kNDHWC;
  const double x = megabytes(p, p.n * p.c * volume(p.in)), w = megabytes(p, p.c * p.k * volume(p.kernel));
  const double y = megabytes(p, p.n * p.k * p.positions());
  if (sm90.twice) {
    const double launches = is_float ? 25.0 : is_last ? 12.0 : 16.0;
    constexpr double kUnstrided = 0.7;  // of stride 1 in 16 bit
    const bool is_unstrided = !is_float && p.stride == Extent3{1, 1, 1};
    const double of_estimate = (is_float ? (is_last ? 0.75 : 0.9) : 0.8) * (is_unstrided ? kUnstrided : 1);
    const double per_mb_of_x = is_float ? 0.35 : is_last ? 0 : 0.9;
    return launches + of_estimate * 1e3 * sm90.estimated_twice_ms + per_mb_of_x * x + epilogue_us(p, true);
  }
  constexpr double kHalfBlocks = 1.3;  // of what the schedule says of k-blocks of half the inputs
  const bool halves = sm90.instance && sm90.instance->block_inputs == kHalfBlockInputs;
  const double multiply = 1e3 * sm90.scheduled_multiply_ms * (halves ? kHalfBlocks : 1);
  const double launches = is_float ? 26.0 : is_last ? 11.5 : 16.5, of_schedule = is_last ? 0.85 : 0.9;
  const double per_mb_of_x = is_float ? 0.35 : 0;
  constexpr double kWeightPerMB = 0.8, kUnpackedPerMB = 0.55, kLaunch = 15;
  return launches + of_schedule * multiply + per_mb_of_x * x + kWeightPerMB * w +
         (sm90.activation_in_y ? 0 : kUnpackedPerMB * y) + epilogue_us(p, false) +
         kLaunch * (sm90.launches - 1);
}

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
  const double ours = sm90_us_without_norm(p, sm90);
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
