// SPDX-License-Identifier: Apache-2.0
#include "core/problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// Byte offsets of an 8-byte element must fit int64_t with room for sums of two of them.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 59;

// Extents below this keep every product and sum of the output size formula inside int64_t.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 30;

constexpr const char* kAxisNames[3] = {"depth", "height", "width"};

/// Pairs (input position, tap) of one axis whose product lands inside the output.
double axis_hits(std::int64_t in, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                 std::int64_t dilation, std::int64_t out) {
  double hits = 0.0;
  for (std::int64_t tap = 0; tap < kernel; ++tap) {
    const std::int64_t shift = tap * dilation - padding;  // output position of input position 0
    const std::int64_t first = shift >= 0 ? 0 : ceil_div(-shift, stride);
    const std::int64_t last = shift >= out ? -1 : (out - 1 - shift) / stride;
    hits += static_cast<double>(std::max<std::int64_t>(0, std::min(last, in - 1) - first + 1));
  }
  return hits;
}

/// "1, 2, 4, 8" and so on: what groups may be. Long lists end in dots.
std::string divisors_text(std::int64_t k) {
  constexpr int kMaxListed = 12;
  constexpr std::int64_t kMaxTried = 1 << 16;  // an error message need not factor a huge number
  std::string text;
  int listed = 0;
  for (std::int64_t d = 1; d <= std::min(k, kMaxTried); ++d) {
    if (k % d != 0) continue;
    if (listed == kMaxListed) return text + ", ...";
    text += (listed == 0 ? "" : ", ") + std::to_string(d);
    ++listed;
  }
  return text;
}

void require_at_least(const Extent3& values, std::int64_t least, const char* argument) {
  for (int axis = 0; axis < 3; ++axis) {
    if (values[axis] < least || values[axis] >= kMaxExtent) {
      throw RuleViolation(concat("upconv3d: ", argument, " must be at least ", least,
                                 " and less than 2^30 on every axis; got ", argument, "=",
                                 triple_text(values), ". Change its ", kAxisNames[axis], " value, ",
                                 values[axis], "."));
    }
  }
}

void validate_extents(const Problem& p) {
  if (p.n < 0) throw RuleViolation(concat("upconv3d: the batch must not be negative; got N=", p.n, "."));
  if (p.c < 1 || p.k < 1) {
    throw RuleViolation(concat("upconv3d: input and output need at least one channel each; got C=", p.c,
                               ", K=", p.k, ". Pass a weight [C, K/groups, T, R, S] without empty axes."));
  }
  require_at_least(p.in, 1, "input size");
  require_at_least(p.kernel, 1, "kernel size");
  require_at_least(p.stride, 1, "stride");
  require_at_least(p.dilation, 1, "dilation");
  require_at_least(p.padding, 0, "padding");
  require_at_least(p.output_padding, 0, "output_padding");
  for (int axis = 0; axis < 3; ++axis) {
    if (p.output_padding[axis] >= p.stride[axis] && p.output_padding[axis] >= p.dilation[axis]) {
      throw RuleViolation(
          concat("upconv3d: output_padding must be smaller than stride or dilation on every axis; got "
                 "output_padding=",
                 triple_text(p.output_padding), ", stride=", triple_text(p.stride),
                 ", dilation=", triple_text(p.dilation), ". Lower its ", kAxisNames[axis], " value below ",
                 std::max(p.stride[axis], p.dilation[axis]), "."));
    }
  }
}

void validate_output(const Problem& p) {
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    if (out[axis] < 1) {
      throw RuleViolation(concat(
          "upconv3d: the output size must be positive on every axis; got ", extent_text(out), " from input ",
          extent_text(p.in), ", kernel ", extent_text(p.kernel), ", stride ", triple_text(p.stride),
          ", padding ", triple_text(p.padding), ". Lower the padding of the ", kAxisNames[axis], " axis."));
    }
  }
  // Of no samples, too, plans count what one has.
  const std::int64_t n = std::max<std::int64_t>(p.n, 1);
  const std::int64_t x_elements = saturating_product(n, p.c, p.in[0], p.in[1], p.in[2]);
  const std::int64_t w_elements = saturating_product(p.c, p.k, p.kernel[0], p.kernel[1], p.kernel[2]);
  const std::int64_t y_elements = saturating_product(n, p.k, out[0], out[1], out[2]);
  if (std::max({x_elements, w_elements, y_elements}) > kMaxElements) {
    throw RuleViolation(concat("upconv3d: input, weight and output may have at most 2^59 elements each; got ",
                               describe(p), ". Split the batch or the volume."));
  }
}

void validate_groups(const Problem& p) {
  if (p.groups < 1 || p.c % p.groups != 0) {
    throw RuleViolation(concat("upconv3d: groups must divide the input channels; got groups=", p.groups,
                               ", C=", p.c, ". Divisors: ", divisors_text(p.c), "."));
  }
  if (p.k % p.groups != 0) {  // not of a weight [C, K/groups, T, R, S]
    throw RuleViolation(concat("upconv3d: groups must divide the output channels; got groups=", p.groups,
                               ", K=", p.k, ". Divisors: ", divisors_text(p.k), "."));
  }
  if (p.num_groups < 1) {
    throw RuleViolation(concat("upconv3d: num_groups must be at least 1; got num_groups=", p.num_groups,
                               ". Divisors of the output channels ", p.k, ": ", divisors_text(p.k), "."));
  }
  if (p.k % p.num_groups != 0) {
    throw RuleViolation(
        concat("upconv3d: num_groups must divide the output channels; got num_groups=", p.num_groups,
               ", output channels ", p.k, ". Divisors: ", divisors_text(p.k), "."));
  }
}

}  // namespace

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
  }
  throw std::logic_error("upconv3d: DType out of range");
}

const char* name(Layout layout) {
  return layout == Layout::kNCDHW ? "NCDHW" : "NDHWC";
}

const char* name(Precision precision) {
  return precision == Precision::kIEEE ? "ieee" : "tf32";
}

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
  }
  throw std::logic_error("upconv3d: DType out of range");
}

Extent3 Problem::out() const {
  Extent3 e{};
  for (int axis = 0; axis < 3; ++axis) {
    if (operation == Operation::kConv) {
      e[axis] =
          (in[axis] - 1 + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - output_padding[axis]) /
              stride[axis] +
          1;
      continue;
    }
    e[axis] = (in[axis] - 1) * stride[axis] - 2 * padding[axis] + dilation[axis] * (kernel[axis] - 1) +
              output_padding[axis] + 1;
  }
  return e;
}

double Problem::useful_flops() const {
  const Extent3 o = out();
  double flops = 2.0 * static_cast<double>(n) * static_cast<double>(c / groups) * static_cast<double>(k);
  // The pairs of a plain convolution are those of the transposed one whose gradient it is.
  const bool is_plain = operation == Operation::kConv;
  const Extent3& from = is_plain ? o : in;
  const Extent3& to = is_plain ? in : o;
  for (int axis = 0; axis < 3; ++axis) {
    flops *= axis_hits(from[axis], kernel[axis], stride[axis], padding[axis], dilation[axis], to[axis]);
  }
  return flops;
}

void validate(const Problem& problem) {
  validate_extents(problem);
  validate_groups(problem);
  validate_output(problem);
  if (!std::isfinite(problem.eps)) {
    throw ValueViolation(
        concat("upconv3d: eps must be finite; got eps=", problem.eps, ". PyTorch's default is 1e-5."));
  }
  const std::int64_t values =
      saturating_product(problem.n, problem.k / problem.num_groups, problem.positions());
  if (values == 1 && problem.tail.norm) {
    throw ValueViolation(concat("upconv3d: group_norm needs more than one value per group; got N=1, ",
                                problem.k / problem.num_groups, " channel per group and 1 output position (",
                                describe(problem), "). Use fewer groups or a larger input."));
  }
}

Problem convolution_alone(const Problem& problem) {
  Problem alone = problem;
  alone.has_bias = problem.has_bias && problem.tail.returns_conv;
  alone.tail = make_tail("norm_act", false, "none", 0.0, false);
  alone.num_groups = 1;
  return alone;
}

Problem after_skip(const Problem& problem) {
  Problem after = problem;
  after.tail.has_skip = false;
  after.has_bias = false;
  return after;
}

std::string describe(const Problem& p) {
  std::string text =
      concat(p.operation == Operation::kConv ? "plain convolution " : "", "N=", p.n, " C=", p.c, " K=", p.k,
             " in=", extent_text(p.in), " kernel=", extent_text(p.kernel), " stride=", extent_text(p.stride),
             " padding=", extent_text(p.padding), " output_padding=", extent_text(p.output_padding),
             " dilation=", extent_text(p.dilation), " groups=", p.groups, " num_groups=", p.num_groups,
             " out=", extent_text(p.out()), ' ', name(p.dtype));
  if (p.dtype == DType::kFloat32) text += concat(' ', name(p.precision));
  text += concat(" x:", name(p.x_layout), " y:", name(p.y_layout), p.has_bias ? " bias" : " no bias");
  return p.tail.is_relu_group_norm() ? text : concat(text, "; ", describe(p.tail));
}

}  // namespace upconv3d
