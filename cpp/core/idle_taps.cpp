// SPDX-License-Identifier: Apache-2.0
#include "core/idle_taps.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/index_math.hpp"

namespace upconv3d {
namespace {

/// One axis: output i*stride - padding + tap*dilation for input i and tap.
struct Axis {
  std::int64_t in, kernel, stride, padding, output_padding, dilation, out;

  bool reaches_output(std::int64_t tap) const {
    const std::int64_t shift = tap * dilation - padding;  // output position of input position 0
    const std::int64_t first = shift >= 0 ? 0 : ceil_div(-shift, stride);
    return first < in && first * stride + shift < out;
  }

  /// Without taps below `begin` and from `end` on.
  Axis of_taps(std::int64_t begin, std::int64_t end) const {
    Axis axis = *this;
    axis.kernel = end - begin;
    axis.padding = padding - begin * dilation;
    axis.output_padding = out - 1 - (in - 1) * stride + 2 * axis.padding - dilation * (axis.kernel - 1);
    return axis;
  }

  bool is_expressible() const {
    return padding >= 0 && output_padding >= 0 && output_padding < std::max(stride, dilation);
  }
};

/// Taps side by side.
struct TapRange {
  std::int64_t begin, end;
};

/// The fewest that hold all which reach an output, at least one, and that PyTorch can be asked for.
TapRange fewest_taps(const Axis& axis) {
  // Of idle ones at the front, and up to those at the back.
  std::int64_t idle = 0, last = axis.kernel;
  while (idle < axis.kernel && !axis.reaches_output(idle)) ++idle;
  while (last > 0 && !axis.reaches_output(last - 1)) --last;
  if (idle == 0 && last == axis.kernel) return {0, axis.kernel};
  for (std::int64_t count = std::max<std::int64_t>(last - idle, 1); count < axis.kernel; ++count) {
    const std::int64_t least = std::max<std::int64_t>(last - count, 0);
    for (std::int64_t begin = std::min(idle, axis.kernel - count); begin >= least; --begin) {
      if (axis.of_taps(begin, begin + count).is_expressible()) return {begin, begin + count};
    }
  }
  return {0, axis.kernel};
}

}  // namespace

std::optional<CroppedTaps> without_idle_taps(const Problem& problem) {
  CroppedTaps cropped{problem, {0, 0, 0}};
  Problem& p = cropped.problem;
  const Extent3 out = problem.out();
  bool drops = false;
  for (int i = 0; i < 3; ++i) {
    const Axis axis{p.in[i],       p.kernel[i], p.stride[i], p.padding[i], p.output_padding[i],
                    p.dilation[i], out[i]};
    const TapRange taps = fewest_taps(axis);
    const Axis left = axis.of_taps(taps.begin, taps.end);
    p.kernel[i] = left.kernel, p.padding[i] = left.padding, p.output_padding[i] = left.output_padding;
    cropped.first[i] = taps.begin;
    drops |= left.kernel < axis.kernel;
  }
  return drops ? std::optional(cropped) : std::nullopt;
}

}  // namespace upconv3d
