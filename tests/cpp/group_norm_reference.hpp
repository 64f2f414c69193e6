// SPDX-License-Identifier: Apache-2.0
/// \file
/// Cases, data and the reference in double that test_group_norm.cu compares with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/problem.hpp"

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

struct Case {
  std::int64_t n = 1, k = 1, positions = 1, num_groups = 1;
  DType dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
  Layout layout = Layout::kNDHWC;
  Layout y_layout = Layout::kNDHWC;
  bool apply_relu = true;
  bool affine = true;
  double bias_mean = 0.0;
  double special = 0.0;             // non-zero: one element of the last group becomes this
  std::int64_t tile_positions = 0;  // 0: what the library plan takes
  std::int64_t misalign = 0;        // elements by which c and y start off a 16-byte boundary
};

inline std::string describe(const Case& c) {
  char line[256];
  std::snprintf(line, sizeof(line),
                "n=%lld k=%lld positions=%lld groups=%lld %s->%s %s->%s relu=%d affine=%d bias=%g special=%g "
                "tile=%lld misalign=%lld",
                static_cast<long long>(c.n), static_cast<long long>(c.k), static_cast<long long>(c.positions),
                static_cast<long long>(c.num_groups), name(c.dtype), name(c.y_dtype), name(c.layout),
                name(c.y_layout), c.apply_relu, c.affine, c.bias_mean, c.special,
                static_cast<long long>(c.tile_positions), static_cast<long long>(c.misalign));
  return line;
}

/// Host data and the reference of one case. Logical order is [n][k][position].
struct Reference {
  std::vector<double> c, bias, gamma, beta;  // as stored: rounded to the dtype
  std::vector<double> v;                     // relu(c + bias), in the statistics' precision
  std::vector<double> mean, variance;        // [n][group]
  std::vector<double> y;
};

inline std::int64_t index_of(const Case& c, Layout layout, std::int64_t n, std::int64_t k, std::int64_t p) {
  return layout == Layout::kNCDHW ? (n * c.k + k) * c.positions + p : (n * c.positions + p) * c.k + k;
}

inline Reference make_reference(const Case& c, double eps) {
  Reference ref;
  Random random(static_cast<std::uint64_t>(c.n * 1000003 + c.k * 1009 + c.positions));
  const std::int64_t elements = c.n * c.k * c.positions, channels = c.k / c.num_groups;
  for (std::int64_t k = 0; k < c.k; ++k) {
    ref.bias.push_back(round_to(c.bias_mean + 0.5 * random.normal(), c.dtype));
    ref.gamma.push_back(round_to(1.0 + 0.5 * random.normal(), c.dtype));
    ref.beta.push_back(round_to(random.normal(), c.dtype));
  }
  ref.c.resize(elements);
  for (double& value : ref.c) {
    value = round_to(random.normal(), c.dtype);
    // Without apply_relu the ReLU is behind c already, as behind our own epilogue.
    if (!c.apply_relu) value = std::fabs(value);
  }
  if (c.special != 0) ref.c[elements - 1 - c.positions / 2] = c.special;
  ref.v.resize(elements);
  ref.y.resize(elements);
  for (std::int64_t row = 0; row < c.n * c.k; ++row) {
    for (std::int64_t p = 0; p < c.positions; ++p) {
      double v = ref.c[row * c.positions + p];
      if (c.apply_relu) {
        v += ref.bias[row % c.k];
        if (c.dtype != DType::kFloat64) v = static_cast<float>(v);
        v = v < 0 ? 0 : v;
      }
      ref.v[row * c.positions + p] = v;
    }
  }
  for (std::int64_t ng = 0; ng < c.n * c.num_groups; ++ng) {
    const std::int64_t begin = ng * channels * c.positions, count = channels * c.positions;
    long double sum = 0, m2 = 0;
    for (std::int64_t i = begin; i < begin + count; ++i) sum += ref.v[i];
    const long double mean = sum / count;
    for (std::int64_t i = begin; i < begin + count; ++i) m2 += (ref.v[i] - mean) * (ref.v[i] - mean);
    ref.mean.push_back(static_cast<double>(mean));
    ref.variance.push_back(static_cast<double>(m2 / count));
    for (std::int64_t i = begin; i < begin + count; ++i) {
      const std::int64_t k = i / c.positions % c.k;
      const long double standard = (ref.v[i] - mean) / std::sqrt(m2 / count + eps);
      ref.y[i] = static_cast<double>(c.affine ? standard * ref.gamma[k] + ref.beta[k] : standard);
    }
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
