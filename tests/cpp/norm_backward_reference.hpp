// SPDX-License-Identifier: Apache-2.0
/// \file
/// Cases, data and the reference in double that test_norm_backward.cu compares with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "group_norm_backward_reference.hpp"
#include "group_norm_reference.hpp"

namespace upconv3d::test {

struct ConvCase {
  std::int64_t n = 1, k = 1, positions = 1, num_groups = 1;
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kNCDHW;
  Activation before = Activation::kRelu;
  Activation after = Activation::kNone;
  double parameter = 0;     // of leaky_relu and elu
  std::int64_t slopes = 0;  // of prelu: 1 or k
  bool norm = true;         // else activation_backward is what runs
  bool bias = true, affine = true;
  bool in_place = true;  // grad_c over c
  bool sums_only = false;
  double mean = 0;            // added to the convolution
  double grad_size = 1;       // factor of grad_y
  double special = 0;         // non-zero: one element of grad_y becomes this
  std::int64_t misalign = 0;  // elements by which c, grad_y and grad_c start off a 16-byte boundary
};

inline std::string describe(const ConvCase& c) {
  char line[320];
  std::snprintf(
      line, sizeof(line),
      "n=%lld k=%lld positions=%lld groups=%lld %s %s before=%s after=%s parameter=%g slopes=%lld "
      "norm=%d bias=%d affine=%d in_place=%d sums_only=%d mean=%g grad_size=%g special=%g misalign=%lld",
      static_cast<long long>(c.n), static_cast<long long>(c.k), static_cast<long long>(c.positions),
      static_cast<long long>(c.num_groups), name(c.dtype), name(c.layout), name(c.before), name(c.after),
      c.parameter, static_cast<long long>(c.slopes), c.norm, c.bias, c.affine, c.in_place, c.sums_only,
      c.mean, c.grad_size, c.special, static_cast<long long>(c.misalign));
  return line;
}

/// Values, and the size of the terms that each is a sum of: what rounding is measured by.
struct Sized {
  std::vector<double> value, size;
  explicit Sized(std::int64_t count) : value(count), size(count) {}
  void add(std::int64_t i, double term) { add(i, term, std::fabs(term)); }
  void add(std::int64_t i, double term, double term_size) { value[i] += term, size[i] += term_size; }
};

/// Host data and the reference of one case, in the order [n][k][position].
struct ConvReference {
  static constexpr double kEps = 1e-5;
  std::vector<double> c, grad_y, bias, gamma, beta, slopes;  // as stored
  Sized grad_c, grad_gamma, grad_beta, grad_bias, grad_slopes;

  explicit ConvReference(const ConvCase& k)
      : grad_c(k.n * k.k * k.positions),
        grad_gamma(k.k),
        grad_beta(k.k),
        grad_bias(k.k),
        grad_slopes(k.slopes) {
    fill_data(k);
    if (!k.norm) add_all(k);
    for (std::int64_t n = 0; k.norm && n < k.n; ++n) {
      for (std::int64_t g = 0; g < k.num_groups; ++g) add_group(k, n, g);
    }
  }

 private:
  void fill_data(const ConvCase& k) {
    Random random(static_cast<std::uint64_t>(k.n * 1000003 + k.k * 1009 + k.positions + 17 * k.num_groups));
    for (std::int64_t i = 0; i < k.k; ++i) {
      bias.push_back(k.bias ? round_to(0.5 * random.normal(), k.dtype) : 0);
      gamma.push_back(k.affine ? round_to(0.3 + random.normal(), k.dtype) : 1);
      beta.push_back(k.affine ? round_to(0.5 * random.normal(), k.dtype) : 0);
    }
    for (std::int64_t i = 0; i < k.slopes; ++i) {
      slopes.push_back(round_to(0.25 + 0.5 * random.normal(), k.dtype));
    }
    const std::int64_t elements = k.n * k.k * k.positions;
    for (std::int64_t i = 0; i < elements; ++i) {
      c.push_back(round_to(random.normal() + k.mean, k.dtype));
      grad_y.push_back(round_to((random.normal() + 0.2) * k.grad_size, k.dtype));
    }
    if (k.special != 0) grad_y[elements - 1 - k.positions / 2] = k.special;
  }

  double parameter(const ConvCase& k, std::int64_t channel) const {
    return k.slopes > 0 ? slopes[channel % k.slopes] : k.parameter;
  }

  /// c + bias as float adds them: the kernels' gates are those of this sum.
  double sum_of(const ConvCase& k, std::int64_t i) const {
    return static_cast<float>(c[i]) + static_cast<float>(bias[i / k.positions % k.k]);
  }

  /// Elements of one (sample, group).
  template <class Body>
  static void each(const ConvCase& k, std::int64_t n, std::int64_t g, Body&& body) {
    const std::int64_t channels = k.k / k.num_groups;
    for (std::int64_t channel = g * channels; channel < (g + 1) * channels; ++channel) {
      for (std::int64_t p = 0; p < k.positions; ++p) body((n * k.k + channel) * k.positions + p, channel);
    }
  }

  /// Without a norm.
  void add_all(const ConvCase& k) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(c.size()); ++i) {
      const std::int64_t channel = i / k.positions % k.k;
      // The backward of ReLU begins with its result, which has the bias in it.
      const double v = k.before == Activation::kRelu ? c[i] : sum_of(k, i);
      const double slope = derivative(k.before, v, parameter(k, channel));
      const bool closed = k.before == Activation::kRelu && slope == 0;
      const double grad = closed ? 0 : grad_y[i] * slope;
      const double size = closed ? 0 : std::fabs(grad_y[i]) * (1 + std::fabs(parameter(k, channel)));
      grad_c.add(i, grad, size);
      grad_bias.add(channel, grad, size);
      if (k.slopes > 0 && !(v > 0)) grad_slopes.add(channel % k.slopes, grad_y[i] * v);
    }
  }

  void add_group(const ConvCase& k, std::int64_t n, std::int64_t g) {
    const double count = static_cast<double>(k.k / k.num_groups * k.positions);
    const auto a_of = [&](std::int64_t i, std::int64_t channel) {
      return activation_value(k.before, sum_of(k, i), parameter(k, channel));
    };
    double mean = 0, m2 = 0, c1 = 0, c2 = 0, c1_size = 0, c2_size = 0;
    each(k, n, g, [&](std::int64_t i, std::int64_t channel) { mean += a_of(i, channel) / count; });
    each(k, n, g,
         [&](std::int64_t i, std::int64_t channel) { m2 += std::pow(a_of(i, channel) - mean, 2) / count; });
    const double rstd = 1 / std::sqrt(m2 + kEps);
    each(k, n, g, [&](std::int64_t i, std::int64_t channel) {
      const double xhat = (a_of(i, channel) - mean) * rstd, u = xhat * gamma[channel] + beta[channel];
      // Gates that rounding decides get no gradient.
      if (k.after != Activation::kNone && std::fabs(u) < 1e-4 * (1 + std::fabs(k.mean))) grad_y[i] = 0;
      const double slope = derivative(k.after, u, parameter(k, channel));
      const double grad = k.after == Activation::kRelu && slope == 0 ? 0 : grad_y[i] * slope;
      const double size = std::fabs(grad_y[i]) * (1 + std::fabs(parameter(k, channel)));
      grad_beta.add(channel, grad, size);
      grad_gamma.add(channel, grad * xhat, size * std::fabs(xhat));
      c1 += gamma[channel] * grad / count, c1_size += std::fabs(gamma[channel]) * size / count;
      c2 += gamma[channel] * grad * xhat / count;
      c2_size += std::fabs(gamma[channel] * xhat) * size / count;
      if (k.slopes > 0 && k.after == Activation::kPrelu && !(u > 0)) {
        grad_slopes.add(channel % k.slopes, grad_y[i] * u);
      }
    });
    each(k, n, g, [&](std::int64_t i, std::int64_t channel) {
      const double v = sum_of(k, i), own = parameter(k, channel);
      const double xhat = (a_of(i, channel) - mean) * rstd, u = xhat * gamma[channel] + beta[channel];
      const double after = derivative(k.after, u, own);
      const double grad = k.after == Activation::kRelu && after == 0 ? 0 : grad_y[i] * after;
      const double size = rstd * (std::fabs(gamma[channel] * grad_y[i]) * (1 + std::fabs(own)) + c1_size +
                                  std::fabs(xhat) * c2_size);
      const double grad_a = rstd * (gamma[channel] * grad - c1 - xhat * c2);
      const double before = derivative(k.before, v, own);
      const bool closed = k.before == Activation::kRelu && before == 0;
      grad_c.add(i, closed ? 0 : grad_a * before, closed ? 0 : size * (1 + std::fabs(own)));
      grad_bias.add(channel, grad_c.value[i], grad_c.size[i]);
      if (k.slopes > 0 && k.before == Activation::kPrelu && !(v > 0)) {
        grad_slopes.add(channel % k.slopes, grad_a * v, size * std::fabs(v));
      }
    });
  }
};

}  // namespace upconv3d::test
