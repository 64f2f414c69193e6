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

}  // namespace

std::optional<CroppedTaps> without_idle_taps(const Problem& problem) {
  CroppedTaps cropped{problem, {0, 0, 0}};
  Problem& p = cropped.problem;
  const Extent3 out = problem.out();
  bool drops = false;
  for (int i = 0; i < 3; ++i) {
    const Axis axis{p.in[i],       p.kernel[i], p.stride[i], p.padding[i], p.output_padding[i],
                    p.dilation[i], out[i]};
    std::int64_t begin = 0, end = axis.kernel;
    while (begin + 1 < end && !axis.reaches_output(begin)) ++begin;
    while (begin + 1 < end && !axis.reaches_output(end - 1)) --end;
    // What is dropped at the front lessens the padding, of either side; at the back output_padding makes up
    // for it.
    while (begin > 0 && axis.of_taps(begin, end).padding < 0) --begin;
    while (end < axis.kernel && !axis.of_taps(begin, end).is_expressible()) ++end;
    const Axis left = axis.of_taps(begin, end);
    if (left.kernel == axis.kernel || !left.is_expressible()) continue;
    p.kernel[i] = left.kernel, p.padding[i] = left.padding, p.output_padding[i] = left.output_padding;
    cropped.first[i] = begin;
    drops = true;
  }
  return drops ? std::optional(cropped) : std::nullopt;
}

}  // namespace upconv3d
