// SPDX-License-Identifier: Apache-2.0
/// \file
/// Cases, data and the reference in double that test_group_norm.cu compares with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/tail.hpp"

namespace upconv3d::test {

/// Rounds to `dtype`, in double. Not to be inlined: GCC 12 at -O3 was seen to leave the rounding out of
/// loops.
[[gnu::noinline]] inline double round_to(double value, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(value);
    case DType::kBFloat16:
      return __bfloat162float(__float2bfloat16_rn(static_cast<float>(value)));
    case DType::kFloat16:
      return __half2float(__float2half_rn(static_cast<float>(value)));
    case DType::kFloat64:
      return value;
  }
  return value;
}

/// Distance from 1 to the next number, halved: the largest relative rounding error.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kFloat64:
      return 0x1p-53;
  }
  return 0;
}

/// Repeatable values, roughly normal: the sum of four uniforms, standard deviation 1.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  double uniform() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state_ >> 11) * 0x1p-53;
  }
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508075688772; }

 private:
  std::uint64_t state_;
};

/// What the activations are, in double. \param parameter negative_slope, alpha or slope
inline double activation_value(Activation activation, double v, double parameter) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0 ? 0 : v;
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return v > 0 ? v : v * parameter;
    case Activation::kElu:
      return v > 0 ? v : std::expm1(v) * parameter;
    case Activation::kSilu:
      return v / (1 + std::exp(-v));
    case Activation::kGelu:
      return 0.5 * v * std::erfc(-v * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v)));
  }
  throw std::logic_error("Activation out of range");
}

/// How far off activation_value may be where it is computed with this unit roundoff: all of them are products
/// of v, or of alpha*v, with a factor of at most 1 that is some roundings off.
inline double activation_slack(Activation activation, double v, double parameter, double roundoff) {
  if (activation == Activation::kNone || activation == Activation::kRelu || !std::isfinite(v)) return 0;
  return 8 * roundoff * std::fmax(1, std::fabs(parameter)) * std::fabs(v);
}

/// By how much more an activation's value may differ than the value that it is applied to.
inline double steepest(double parameter) {
  return std::fmax(1.13, std::fabs(parameter));  // 1.13: gelu
}

struct Case {
  std::int64_t n = 1, k = 1, positions = 1, num_groups = 1;
  DType dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
  Layout layout = Layout::kNDHWC;
  Layout y_layout = Layout::kNDHWC;
  Activation before = Activation::kRelu;
  Activation after = Activation::kNone;
  double parameter = 0.0;  // of kLeakyRelu and kElu
  bool one_slope = false;  // of kPrelu, else one per channel
  bool has_bias = true;
  bool has_skip = false;
  bool norm = true;
  bool affine = true;
  double bias_mean = 0.0;
  double special = 0.0;             // non-zero: one element of the last group becomes this
  bool alike = false;               // each norm group's c is one value
  std::int64_t tile_positions = 0;  // 0: what the library plan takes
  std::int64_t misalign = 0;        // elements by which c, skip and y start off a 16-byte boundary
};

inline std::string describe(const Case& c) {
  char line[336];
  std::snprintf(line, sizeof(line),
                "n=%lld k=%lld positions=%lld groups=%lld %s->%s %s->%s before=%s after=%s parameter=%g "
                "one_slope=%d bias=%d of %g skip=%d norm=%d affine=%d special=%g alike=%d tile=%lld "
                "misalign=%lld",
                static_cast<long long>(c.n), static_cast<long long>(c.k), static_cast<long long>(c.positions),
                static_cast<long long>(c.num_groups), name(c.dtype), name(c.y_dtype), name(c.layout),
                name(c.y_layout), name(c.before), name(c.after), c.parameter, c.one_slope, c.has_bias,
                c.bias_mean, c.has_skip, c.norm, c.affine, c.special, c.alike,
                static_cast<long long>(c.tile_positions), static_cast<long long>(c.misalign));
  return line;
}

/// Host data and the reference of one case. Logical order is [n][k][position].
struct Reference {
  std::vector<double> c, skip, bias, gamma, beta, slopes;  // as stored: rounded to the dtype
  std::vector<double> v;                                   // before(c + bias + skip)
  std::vector<double> v_slack;                             // by how much v may be off
  std::vector<double> mean, variance, group_slack;         // [n][group]; the largest v_slack
  std::vector<double> u;                                   // what the activation after sees
  std::vector<double> y;

  double parameter(const Case& c, std::int64_t k) const {
    const bool prelu = c.before == Activation::kPrelu || c.after == Activation::kPrelu;
    return prelu ? slopes[c.one_slope ? 0 : k] : c.parameter;
  }
};

inline std::int64_t index_of(const Case& c, Layout layout, std::int64_t n, std::int64_t k, std::int64_t p) {
  return layout == Layout::kNCDHW ? (n * c.k + k) * c.positions + p : (n * c.positions + p) * c.k + k;
}

inline double stat_roundoff(const Case& c) {
  return unit_roundoff(c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
}

inline void fill_data(const Case& c, Reference& ref) {
  Random random(static_cast<std::uint64_t>(c.n * 1000003 + c.k * 1009 + c.positions));
  const std::int64_t elements = c.n * c.k * c.positions;
  for (std::int64_t k = 0; k < c.k; ++k) {
    ref.bias.push_back(round_to(c.bias_mean + 0.5 * random.normal(), c.dtype));
    ref.gamma.push_back(round_to(1.0 + 0.5 * random.normal(), c.dtype));
    ref.beta.push_back(round_to(random.normal(), c.dtype));
    ref.slopes.push_back(round_to(0.3 * random.normal(), c.y_dtype));
  }
  ref.c.resize(elements);
  ref.skip.resize(elements);
  for (double& value : ref.c) value = round_to(random.normal(), c.dtype);
  for (double& value : ref.skip) value = round_to(random.normal(), c.dtype);
  const std::int64_t group = c.k / c.num_groups * c.positions;
  for (std::int64_t i = 0; c.alike && i < elements; ++i) ref.c[i] = ref.c[i / group * group];
  if (c.special != 0) ref.c[elements - 1 - c.positions / 2] = c.special;
}

/// before(c + bias + skip), whose sums are rounded as the kernels round them.
inline void fill_v(const Case& c, Reference& ref) {
  const DType stat = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  for (std::size_t i = 0; i < ref.c.size(); ++i) {
    const std::int64_t k = static_cast<std::int64_t>(i) / c.positions % c.k;
    double v = ref.c[i];
    if (c.has_bias) v = round_to(v + ref.bias[k], stat);
    if (c.has_skip) v = round_to(v + ref.skip[i], stat);
    ref.v.push_back(activation_value(c.before, v, ref.parameter(c, k)));
    ref.v_slack.push_back(activation_slack(c.before, v, ref.parameter(c, k), stat_roundoff(c)));
  }
}

inline Reference make_reference(const Case& c, double eps) {
  Reference ref;
  fill_data(c, ref);
  fill_v(c, ref);
  ref.u = ref.v;
  const std::int64_t count = c.k / c.num_groups * c.positions;
  for (std::int64_t begin = 0; begin < static_cast<std::int64_t>(ref.v.size()); begin += count) {
    long double sum = 0, m2 = 0;
    double slack = 0;
    for (std::int64_t i = begin; i < begin + count; ++i) {
      sum += ref.v[i];
      slack = std::fmax(slack, ref.v_slack[i]);
    }
    const long double mean = sum / count;
    for (std::int64_t i = begin; i < begin + count; ++i) m2 += (ref.v[i] - mean) * (ref.v[i] - mean);
    ref.mean.push_back(static_cast<double>(mean));
    ref.variance.push_back(static_cast<double>(m2 / count));
    ref.group_slack.push_back(slack);
    for (std::int64_t i = begin; c.norm && i < begin + count; ++i) {
      const std::int64_t k = i / c.positions % c.k;
      const long double standard = (ref.v[i] - mean) / std::sqrt(m2 / count + eps);
      ref.u[i] = static_cast<double>(c.affine ? standard * ref.gamma[k] + ref.beta[k] : standard);
    }
  }
  for (std::size_t i = 0; i < ref.u.size(); ++i) {
    const std::int64_t k = static_cast<std::int64_t>(i) / c.positions % c.k;
    ref.y.push_back(activation_value(c.after, ref.u[i], ref.parameter(c, k)));
  }
  return ref;
}

inline std::vector<double> in_layout(const Case& c, Layout layout, const std::vector<double>& logical) {
  std::vector<double> stored(logical.size());
  std::int64_t i = 0;
  for (std::int64_t n = 0; n < c.n; ++n)
    for (std::int64_t k = 0; k < c.k; ++k)
      for (std::int64_t p = 0; p < c.positions; ++p) stored[index_of(c, layout, n, k, p)] = logical[i++];
  return stored;
}

}  // namespace upconv3d::test
