// SPDX-License-Identifier: Apache-2.0
/// \file
/// Cases, data and the reference in double that test_group_norm_backward.cu compares with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/tail.hpp"
#include "group_norm_reference.hpp"

namespace upconv3d::test {

enum class Gamma { kNull, kRandom, kSomeZero };

struct BackwardCase {
  std::int64_t n = 1, k = 1, positions = 1, num_groups = 1;
  DType dtype = DType::kFloat32;
  bool steps = false;   // a in 16 bits with steps
  bool scaled = false;  // grad_c in scaled float16
  Layout layout = Layout::kNDHWC;
  Gamma gamma = Gamma::kRandom;
  double a_mean = 0;            // added to a before the ReLU
  double grad_size = 1;         // factor of grad_y
  double special = 0;           // non-zero: one element of grad_y, in the last group, becomes this
  std::int64_t misalign = 0;    // elements by which grad_y starts off a 16-byte boundary
  std::int64_t more_pitch = 0;  // by which rows of a and grad_c are longer than they must be
  bool sums_only = false;
  Activation before = Activation::kRelu;  // or none
  Activation after = Activation::kNone;
  double parameter = 0;     // of `after`, except of prelu
  std::int64_t slopes = 0;  // of prelu: 1 or k
  bool beta = true;         // else null
  bool signed_steps = false;
  bool split = false;     // scaled: grad_c in two float16
  bool in_place = false;  // grad_c over a, where that is possible
  bool uneven = false;    // grad_y of odd channels is 2^20 times smaller
};

inline std::string describe(const BackwardCase& c) {
  char line[512];
  std::snprintf(line, sizeof(line),
                "n=%lld k=%lld positions=%lld groups=%lld %s steps=%d scaled=%d %s gamma=%d a_mean=%g "
                "grad_size=%g special=%g misalign=%lld more_pitch=%lld sums_only=%d before=%s after=%s "
                "parameter=%g slopes=%lld beta=%d signed_steps=%d split=%d in_place=%d uneven=%d",
                static_cast<long long>(c.n), static_cast<long long>(c.k), static_cast<long long>(c.positions),
                static_cast<long long>(c.num_groups), name(c.dtype), c.steps, c.scaled, name(c.layout),
                static_cast<int>(c.gamma), c.a_mean, c.grad_size, c.special,
                static_cast<long long>(c.misalign), static_cast<long long>(c.more_pitch), c.sums_only,
                name(c.before), name(c.after), c.parameter, static_cast<long long>(c.slopes), c.beta,
                c.signed_steps, c.split, c.in_place, c.uneven);
  return line;
}

/// Host data and the reference of one case. Logical order is [n][position][k]. Each `_slack` is what float
/// arithmetic is allowed to be off by, before the result's own rounding.
struct BackwardReference {
  static constexpr std::int64_t kMoments = 3;
  std::vector<double> grad_y, a, gamma, beta, slopes;
  std::vector<std::uint16_t> bits;    // with steps: a = (bits - zero) * 2^steps
  std::vector<int> steps, moment_of;  // [n][moment][k], [position]
  std::vector<float> table;           // [n][group][4]
  std::vector<double> g, g_slack;     // grad_y*after'(u)
  std::vector<double> grad_c, grad_c_slack;
  std::vector<double> grad_gamma, grad_beta, grad_bias, gamma_slack, beta_slack, bias_slack;
  std::vector<double> grad_slopes, slopes_slack;
  double bound = 0;  // of |grad_c|, over groups where it is finite
};

/// after'(u).
inline double derivative(Activation after, double u, double parameter) {
  constexpr double kPi = 3.14159265358979323846;
  switch (after) {
    case Activation::kNone:
      return 1;
    case Activation::kRelu:
      return u <= 0 ? 0 : 1;
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return u > 0 ? 1 : parameter;
    case Activation::kElu:
      return u > 0 ? 1 : parameter * std::exp(u);
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-u));
      return s + u * s * (1 - s);
    }
    case Activation::kGelu:
      return 0.5 * std::erfc(-u / std::sqrt(2.0)) + u * std::exp(-u * u / 2) / std::sqrt(2 * kPi);
    case Activation::kGeluTanh: {
      const double t = std::tanh(std::sqrt(2 / kPi) * (u + 0.044715 * u * u * u));
      return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * u * u);
    }
  }
  return NAN;
}

/// grad_y, a, gamma, beta, slopes as stored.
inline void fill_data(const BackwardCase& c, BackwardReference& ref) {
  Random random(static_cast<std::uint64_t>(c.n * 1000003 + c.k * 1009 + c.positions + 17 * c.num_groups));
  constexpr std::int64_t kMoments = BackwardReference::kMoments;
  for (std::int64_t k = 0; k < c.k; ++k) {
    double gamma = c.gamma == Gamma::kNull ? 1.0 : round_to(0.3 + random.normal(), c.dtype);
    if (c.gamma == Gamma::kSomeZero && k % 3 == 1) gamma = 0;
    ref.gamma.push_back(gamma);
  }
  const std::int64_t elements = c.n * c.positions * c.k;
  ref.grad_y.resize(elements);
  ref.a.resize(elements);
  for (double& grad : ref.grad_y) grad = round_to((random.normal() + 0.2) * c.grad_size, c.dtype);
  for (std::int64_t i = 1; c.uneven && i < elements; ++i) {
    if (i % c.k % 2 == 1) ref.grad_y[i] *= 0x1p-20;
  }
  if (c.special != 0) ref.grad_y[elements - 1 - c.positions / 2 * c.k] = c.special;
  for (std::int64_t p = 0; p < c.positions; ++p) {
    ref.moment_of.push_back(static_cast<int>(random.uniform() * kMoments));
  }
  for (std::int64_t i = 0; i < c.n * kMoments * c.k; ++i) {
    ref.steps.push_back(static_cast<int>(random.uniform() * 3) - 15);
  }
  ref.bits.resize(c.steps ? elements : 0);
  for (std::int64_t i = 0; i < elements; ++i) {
    const double c_value = random.normal() + c.a_mean;
    const bool relu = c.before == Activation::kRelu || (c.steps && !c.signed_steps);
    const double v = relu ? std::max(0.0, c_value) : c_value;
    if (!c.steps) {
      ref.a[i] = round_to(v, c.dtype);
      continue;
    }
    const std::int64_t n = i / c.k / c.positions, p = i / c.k % c.positions;
    const int step = ref.steps[(n * kMoments + ref.moment_of[p]) * c.k + i % c.k];
    const int zero = c.signed_steps ? 32768 : 0;
    const double bits = std::round(std::ldexp(v, -step)) + zero;
    ref.bits[i] = static_cast<std::uint16_t>(std::clamp(bits, 0.0, 65535.0));
    ref.a[i] = std::ldexp(ref.bits[i] - zero, step);
  }
  for (std::int64_t k = 0; k < c.k; ++k) {
    ref.beta.push_back(c.beta ? round_to(0.5 * random.normal(), c.dtype) : 0);
  }
  for (std::int64_t i = 0; i < c.slopes; ++i) {
    ref.slopes.push_back(round_to(0.25 + 0.5 * random.normal(), c.dtype));
  }
}

/// The table row of one (sample, group), as the forward pass leaves it.
inline void fill_row(const BackwardCase& c, BackwardReference& ref, std::int64_t n, std::int64_t g) {
  const std::int64_t channels = c.k / c.num_groups;
  const double count = static_cast<double>(channels * c.positions);
  double sum = 0, m2 = 0;
  const auto each = [&](auto&& body) {
    for (std::int64_t p = 0; p < c.positions; ++p) {
      for (std::int64_t k = g * channels; k < (g + 1) * channels; ++k) {
        body(ref.a[(n * c.positions + p) * c.k + k]);
      }
    }
  };
  each([&](double v) { sum += v; });
  const double mean = sum / count;
  each([&](double v) { m2 += (v - mean) * (v - mean); });
  float* const row = ref.table.data() + (n * c.num_groups + g) * 4;
  row[0] = static_cast<float>(mean);
  row[1] = static_cast<float>(mean - row[0]);
  row[2] = static_cast<float>(1 / std::sqrt(m2 / count + 1e-5));
  row[3] = NAN;  // not to be used
}

/// g of one (sample, group) and what it adds to the slopes' gradient. A float u may be on the other side of
/// 0.
inline void add_g(const BackwardCase& c, BackwardReference& ref, std::int64_t n, std::int64_t g) {
  constexpr double kRoundoff = 0x1p-24;
  const std::int64_t channels = c.k / c.num_groups;
  const float* const row = ref.table.data() + (n * c.num_groups + g) * 4;
  for (std::int64_t p = 0; p < c.positions; ++p) {
    for (std::int64_t k = g * channels; k < (g + 1) * channels; ++k) {
      const std::int64_t i = (n * c.positions + p) * c.k + k;
      const double grad = ref.grad_y[i], scale = ref.gamma[k] * row[2];
      const double u = (ref.a[i] - row[0] - row[1]) * scale + ref.beta[k];
      const double parts = std::fabs((ref.a[i] - row[0]) * scale) + std::fabs(row[1] * scale) +
                           (scale != 0 ? std::fabs(ref.beta[k]) : 0);
      const double u_slack = 4 * kRoundoff * parts;
      const double parameter = c.slopes > 0 ? ref.slopes[k % c.slopes] : c.parameter;
      const double slope = derivative(c.after, u, parameter);
      ref.g[i] = c.after == Activation::kRelu && slope == 0 ? 0 : grad * slope;
      if (c.after != Activation::kNone) {
        const bool smooth = !is_piecewise_linear(c.after);
        double off = smooth ? (1 + std::fabs(parameter)) * (u_slack + 16 * kRoundoff * (1 + std::fabs(u)))
                            : 3 * kRoundoff * std::fabs(slope);
        if (std::fabs(u) < u_slack) {
          off +=
              std::fabs(derivative(c.after, u_slack, parameter) - derivative(c.after, -u_slack, parameter));
        }
        ref.g_slack[i] = std::fabs(grad) * off + 0x1p-149;
      }
      if (c.slopes == 0 || u > u_slack) continue;
      if (!(u > 0)) ref.grad_slopes[k % c.slopes] += grad * u;
      ref.slopes_slack[k % c.slopes] += std::fabs(grad) * (u_slack + 8 * kRoundoff * std::fabs(u)) + 0x1p-149;
    }
  }
}

/// Sums of one (sample, group), added to the parameters' gradients; and grad_c.
inline void add_group(const BackwardCase& c, BackwardReference& ref, std::int64_t n, std::int64_t g) {
  constexpr double kRoundoff = 0x1p-24;
  const std::int64_t channels = c.k / c.num_groups, k0 = g * channels;
  const double m = static_cast<double>(channels * c.positions);
  const float* const row = ref.table.data() + (n * c.num_groups + g) * 4;
  const double mean = static_cast<double>(row[0]) + row[1], rstd = row[2];
  struct Sums {
    double grad = 0, grad_xhat = 0, grad_size = 0, grad_xhat_size = 0, max_grad = 0, max_xhat = 0;
    double grad_off = 0, grad_xhat_off = 0;
  };
  std::vector<Sums> sums(channels);
  for (std::int64_t p = 0; p < c.positions; ++p) {
    for (std::int64_t k = 0; k < channels; ++k) {
      const std::int64_t i = (n * c.positions + p) * c.k + k0 + k;
      const double grad = ref.g[i], xhat = (ref.a[i] - mean) * rstd;
      Sums& s = sums[k];
      s.grad += grad, s.grad_size += std::fabs(grad);
      s.grad_xhat += grad * xhat, s.grad_xhat_size += std::fabs(grad * xhat);
      s.grad_off += ref.g_slack[i], s.grad_xhat_off += ref.g_slack[i] * std::fabs(xhat);
      s.max_grad = std::max(s.max_grad, std::fabs(grad)), s.max_xhat = std::max(s.max_xhat, std::fabs(xhat));
    }
  }
  double c1 = 0, c2 = 0, c1_size = 0, c2_size = 0, c1_off = 0, c2_off = 0, bound = 0;
  for (std::int64_t k = 0; k < channels; ++k) {
    c1 += ref.gamma[k0 + k] * sums[k].grad / m,
        c1_size += std::fabs(ref.gamma[k0 + k]) * sums[k].grad_size / m;
    c2 += ref.gamma[k0 + k] * sums[k].grad_xhat / m;
    c2_size += std::fabs(ref.gamma[k0 + k]) * sums[k].grad_xhat_size / m;
    c1_off += std::fabs(ref.gamma[k0 + k]) * sums[k].grad_off / m;
    c2_off += std::fabs(ref.gamma[k0 + k]) * sums[k].grad_xhat_off / m;
    ref.grad_beta[k0 + k] += sums[k].grad, ref.grad_gamma[k0 + k] += sums[k].grad_xhat;
    ref.beta_slack[k0 + k] += 8 * kRoundoff * sums[k].grad_size + sums[k].grad_off;
    // Products below float's smallest number are rounded to a multiple of it.
    const double lost = static_cast<double>(c.positions) * 0x1p-149 * std::max(rstd, 1.0);
    ref.gamma_slack[k0 + k] += 8 * kRoundoff * sums[k].grad_xhat_size + sums[k].grad_xhat_off + lost;
    ref.bias_slack[k0 + k] += lost * std::max(rstd, 1.0);
  }
  for (std::int64_t k = 0; k < channels; ++k) {
    bound = std::max(bound, rstd * (std::fabs(ref.gamma[k0 + k]) * sums[k].max_grad + std::fabs(c1) +
                                    sums[k].max_xhat * std::fabs(c2)));
  }
  if (std::isfinite(c1) && std::isfinite(c2)) ref.bound = std::max(ref.bound, bound);
  for (std::int64_t p = 0; p < c.positions; ++p) {
    for (std::int64_t k = k0; k < k0 + channels; ++k) {
      const std::int64_t i = (n * c.positions + p) * c.k + k;
      const double xhat = (ref.a[i] - mean) * rstd;
      const bool open = c.before != Activation::kRelu || !(ref.a[i] <= 0);
      ref.grad_c[i] = open ? rstd * (ref.gamma[k] * ref.g[i] - c1 - xhat * c2) : 0;
      const double size = rstd * (std::fabs(ref.gamma[k] * ref.g[i]) + c1_size + std::fabs(xhat) * c2_size);
      const double off =
          rstd * (std::fabs(ref.gamma[k]) * ref.g_slack[i] + c1_off + std::fabs(xhat) * c2_off);
      ref.grad_c_slack[i] = open ? 8 * kRoundoff * size + off + 0x1p-147 : 0;
      ref.grad_bias[k] += ref.grad_c[i];
      ref.bias_slack[k] += open ? 8 * kRoundoff * size + off : 0;
    }
  }
}

inline BackwardReference make_reference(const BackwardCase& c) {
  BackwardReference ref;
  fill_data(c, ref);
  ref.table.resize(c.n * c.num_groups * 4);
  for (auto* values : {&ref.g, &ref.g_slack, &ref.grad_c, &ref.grad_c_slack}) values->resize(ref.a.size());
  for (auto* sums : {&ref.grad_slopes, &ref.slopes_slack}) sums->resize(c.slopes);
  for (auto* sums : {&ref.grad_gamma, &ref.grad_beta, &ref.grad_bias, &ref.gamma_slack, &ref.beta_slack,
                     &ref.bias_slack}) {
    sums->resize(c.k);
  }
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t g = 0; g < c.num_groups; ++g) {
      fill_row(c, ref, n, g);
      add_g(c, ref, n, g);
      add_group(c, ref, n, g);
    }
  }
  return ref;
}

}  // namespace upconv3d::test
