// SPDX-License-Identifier: Apache-2.0
/// \file
/// relu_group_norm against a reference in double: every dtype, every pair of layouts, ragged extents, large
/// means, NaN and infinity, and the same bits however the work is split. Exits with 1 and a line per failure.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/problem.hpp"
#include "cpu/relu_group_norm.hpp"

namespace {

using upconv3d::DType;
using upconv3d::Layout;
using upconv3d::cpu::ParallelFor;
using upconv3d::cpu::ReluGroupNormParams;

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

/// Values of one dtype as bytes, in the order in which they are indexed.
using Bytes = std::vector<std::uint8_t>;

/// Slow, obvious rounding of a double to binary16: nearest, ties to even.
std::uint16_t to_float16(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000u : 0u;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7E00u;
  if (magnitude >= 65520.0) return sign | 0x7C00u;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int step = std::max(exponent - 11, -24);  // exponent of the last bit
  const double units = std::nearbyint(std::ldexp(magnitude, -step));
  const int biased = step + 24;  // 0 for subnormal numbers, whose leading bit is not implied
  return sign | static_cast<std::uint16_t>(static_cast<int>(units) + biased * 1024);
}

double from_float16(std::uint16_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25));
}

void write(Bytes& to, std::size_t index, DType dtype, double value) {
  const std::size_t size = static_cast<std::size_t>(upconv3d::size_of(dtype));
  std::uint8_t* at = to.data() + index * size;
  if (dtype == DType::kFloat64) {
    std::memcpy(at, &value, size);
  } else if (dtype == DType::kFloat16) {
    const std::uint16_t bits = to_float16(value);
    std::memcpy(at, &bits, size);
  } else {
    const float single = static_cast<float>(value);
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(single);
    const std::uint16_t upper =
        static_cast<std::uint16_t>(bits >> 16);  // a bfloat16 near the value is enough
    std::memcpy(at, dtype == DType::kFloat32 ? static_cast<const void*>(&single) : &upper, size);
  }
}

double read(const Bytes& from, std::size_t index, DType dtype) {
  const std::size_t size = static_cast<std::size_t>(upconv3d::size_of(dtype));
  const std::uint8_t* at = from.data() + index * size;
  if (dtype == DType::kFloat64) {
    double value = 0.0;
    std::memcpy(&value, at, size);
    return value;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, size);
  if (dtype == DType::kFloat16) return from_float16(static_cast<std::uint16_t>(bits));
  return std::bit_cast<float>(dtype == DType::kBFloat16 ? bits << 16 : bits);
}

struct Case {
  std::int64_t n, k, positions, num_groups;
  DType dtype;
  Layout c_layout, y_layout;
  bool affine;  // bias, gamma and beta given
  double offset = 0.0;
  double special = 0.0;  // put into one element where it is not zero

  std::size_t index(Layout layout, std::int64_t sample, std::int64_t channel, std::int64_t position) const {
    return static_cast<std::size_t>(layout == Layout::kNCDHW ? (sample * k + channel) * positions + position
                                                             : (sample * positions + position) * k + channel);
  }
};

std::string text(const Case& t) {
  return "n=" + std::to_string(t.n) + " k=" + std::to_string(t.k) +
         " positions=" + std::to_string(t.positions) + " num_groups=" + std::to_string(t.num_groups) + " " +
         upconv3d::name(t.dtype) + " " + upconv3d::name(t.c_layout) + " to " + upconv3d::name(t.y_layout) +
         (t.affine ? " affine" : "") + " offset=" + std::to_string(t.offset);
}

struct Data {
  Bytes c, bias, gamma, beta;
};

Data make_data(const Case& t, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  const std::size_t size = static_cast<std::size_t>(upconv3d::size_of(t.dtype));
  const auto fill = [&](std::int64_t count, double offset) {
    Bytes bytes(static_cast<std::size_t>(count) * size);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      write(bytes, i, t.dtype, normal(generator) + offset);
    }
    return bytes;
  };
  Data data = {fill(t.n * t.k * t.positions, t.offset), fill(t.k, 0.0), fill(t.k, 1.0), fill(t.k, 0.0)};
  if (t.special != 0.0 || std::isnan(t.special))
    write(data.c, t.index(t.c_layout, 0, 0, t.positions / 2), t.dtype, t.special);
  return data;
}

/// The formula in double, sums in long double, in order of (sample, channel, position).
std::vector<double> reference(const Case& t, const Data& data, double eps) {
  std::vector<double> out(static_cast<std::size_t>(t.n * t.k * t.positions));
  const std::int64_t channels = t.k / t.num_groups;
  const double count = static_cast<double>(channels * t.positions);
  for (std::int64_t unit = 0; unit < t.n * t.num_groups; ++unit) {
    const std::int64_t sample = unit / t.num_groups;
    const std::int64_t first = unit % t.num_groups * channels;
    const auto each = [&](const std::function<void(double&, std::size_t)>& body) {
      for (std::int64_t k = first; k < first + channels; ++k) {
        for (std::int64_t p = 0; p < t.positions; ++p) {
          body(out[t.index(Layout::kNCDHW, sample, k, p)], static_cast<std::size_t>(k));
        }
      }
    };
    long double sum = 0.0;
    for (std::int64_t k = first; k < first + channels; ++k) {
      for (std::int64_t p = 0; p < t.positions; ++p) {
        double v = read(data.c, t.index(t.c_layout, sample, k, p), t.dtype);
        if (t.affine) v += read(data.bias, static_cast<std::size_t>(k), t.dtype);
        // As the dtype's own addition would round it.
        if (t.dtype != DType::kFloat64) v = static_cast<double>(static_cast<float>(v));
        v = v < 0.0 ? 0.0 : v;
        out[t.index(Layout::kNCDHW, sample, k, p)] = v;
        sum += v;
      }
    }
    const double mean = static_cast<double>(sum / count);
    long double m2 = 0.0;
    each([&](double& v, std::size_t) { m2 += (v - mean) * (v - mean); });
    const double rstd = 1.0 / std::sqrt(static_cast<double>(m2 / count) + eps);
    each([&](double& v, std::size_t k) {
      v = (v - mean) * rstd;
      if (t.affine) v = v * read(data.gamma, k, t.dtype) + read(data.beta, k, t.dtype);
    });
  }
  return out;
}

Bytes run(const Case& t, const Data& data, double eps, const ParallelFor& parallel_for) {
  // In place where that is allowed: the harder case.
  const bool in_place = t.c_layout == t.y_layout;
  Bytes y = in_place ? data.c : Bytes(data.c.size(), 0xFF);
  ReluGroupNormParams params;
  params.n = t.n;
  params.k = t.k;
  params.positions = t.positions;
  params.num_groups = t.num_groups;
  params.eps = eps;
  params.dtype = t.dtype;
  params.c_layout = t.c_layout;
  params.y_layout = t.y_layout;
  params.c = in_place ? y.data() : data.c.data();
  params.bias = t.affine ? data.bias.data() : nullptr;
  params.gamma = t.affine ? data.gamma.data() : nullptr;
  params.beta = t.affine ? data.beta.data() : nullptr;
  params.y = y.data();
  relu_group_norm(params, parallel_for);
  return y;
}

void serial(std::int64_t end, const std::function<void(std::int64_t, std::int64_t)>& body) {
  body(0, end);
}

/// Splits unevenly over real threads.
void threaded(std::int64_t end, const std::function<void(std::int64_t, std::int64_t)>& body) {
  std::vector<std::thread> threads;
  for (std::int64_t begin = 0, step = 1; begin < end; begin += step, step = step * 2 + 1) {
    const std::int64_t stop = std::min(end, begin + step);
    threads.emplace_back([&body, begin, stop] { body(begin, stop); });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Half a unit in the last place of 16 bit; for the wide types a few roundings of the normalization.
double relative_tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 5e-7;
    case DType::kBFloat16:
      return 0x1.02p-8;
    case DType::kFloat16:
      return 0x1.02p-11;
    case DType::kFloat64:
      return 1e-13;
  }
  return 0.0;
}

void check(const Case& t, std::uint32_t seed) {
  constexpr double kEps = 1e-5;
  const Data data = make_data(t, seed);
  const std::vector<double> expected = reference(t, data, kEps);
  const Bytes y = run(t, data, kEps, serial);
  expect(y == run(t, data, kEps, threaded), text(t) + ": bits depend on the split");
  // Values near |offset| are themselves only known to their last place; float64's stays below its tolerance.
  const double absolute =
      relative_tolerance(t.dtype) * (4.0 + (t.dtype == DType::kFloat64 ? std::fabs(t.offset) : 0.0));
  for (std::int64_t sample = 0; sample < t.n; ++sample) {
    for (std::int64_t k = 0; k < t.k; ++k) {
      for (std::int64_t p = 0; p < t.positions; ++p) {
        const double got = read(y, t.index(t.y_layout, sample, k, p), t.dtype);
        const double want = expected[t.index(Layout::kNCDHW, sample, k, p)];
        const bool near = std::fabs(got - want) <= absolute + relative_tolerance(t.dtype) * std::fabs(want);
        if (!near && !(std::isnan(got) && std::isnan(want))) {
          expect(false, text(t) + ": at (" + std::to_string(sample) + ", " + std::to_string(k) + ", " +
                            std::to_string(p) + ") got " + std::to_string(got) + ", want " +
                            std::to_string(want));
          return;
        }
      }
    }
  }
}

/// Calls body(dtype, c_layout, y_layout) for every combination.
void for_each_kind(const std::function<void(DType, Layout, Layout)>& body) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (Layout c : {Layout::kNCDHW, Layout::kNDHWC}) {
      for (Layout y : {Layout::kNCDHW, Layout::kNDHWC}) body(dtype, c, y);
    }
  }
}

void check_shapes() {
  struct Shape {
    std::int64_t n, k, positions, num_groups;
  };
  // Single elements, widths beside every vector length, many small channels, more channels than a block
  // holds, groups that cross tiles, instance norm.
  const Shape shapes[] = {{1, 1, 2, 1},       {2, 3, 7, 3},      {1, 8, 8, 2},     {3, 12, 125, 4},
                          {2, 33, 70, 11},    {1, 320, 8, 32},   {1, 130, 343, 5}, {1, 1040, 67, 4},
                          {1, 2, 40000, 1},   {2, 16, 4913, 16}, {5, 64, 512, 8},  {1, 1, 9001, 1},
                          {1, 2053, 3, 2053}, {1, 24, 3000, 3}};
  std::uint32_t seed = 1;
  for_each_kind([&](DType dtype, Layout c, Layout y) {
    for (const Shape& s : shapes) {
      check({s.n, s.k, s.positions, s.num_groups, dtype, c, y, seed % 2 == 0}, seed);
      ++seed;
    }
  });
}

void check_large_mean() {
  for (Layout c : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (Layout y : {Layout::kNCDHW, Layout::kNDHWC}) {
      check({1, 16, 20000, 4, DType::kFloat32, c, y, true, 1e4}, 7);
      check({1, 16, 20000, 4, DType::kFloat64, c, y, true, 1e4}, 8);
    }
  }
}

/// A sum that lies amid two values of 16 bit becomes that whose last bit is 0.
void check_ties() {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
      const Case t = {1, 2, 1, 1, dtype, layout, layout, true};
      Data data = {Bytes(4), Bytes(4), Bytes(4), Bytes(4)};
      const double half = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
      for (std::size_t k : {0, 1}) {
        write(data.c, k, dtype, k == 0 ? 0.0 : 2.0);  // normalized to -1 and 1
        write(data.bias, k, dtype, 0.0);
        write(data.gamma, k, dtype, 1.0);
        write(data.beta, k, dtype, half);
      }
      expect(read(run(t, data, 0.0, serial), 1, dtype) == 1.0, text(t) + ": ties to even");
    }
  }
}

void check_special_values() {
  for_each_kind([](DType dtype, Layout c, Layout y) {
    const double infinity = std::numeric_limits<double>::infinity();
    for (double special : {std::nan(""), infinity, -infinity}) {
      check({2, 8, 60, 4, dtype, c, y, false, 0.0, special}, 9);
    }
  });
}

void check_empty_and_wrong() {
  for_each_kind([](DType dtype, Layout c, Layout y) {
    check({0, 8, 60, 4, dtype, c, y, true}, 10);
    check({2, 8, 0, 4, dtype, c, y, true}, 10);
  });
  ReluGroupNormParams params;
  params.k = 6;
  params.num_groups = 4;
  bool thrown = false;
  try {
    relu_group_norm(params, serial);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  expect(thrown, "num_groups that does not divide the channels is refused");
  float value = 0.0f;
  params.num_groups = 2, params.n = params.positions = 1;
  params.c = params.y = &value, params.y_layout = Layout::kNDHWC;
  thrown = false;
  try {
    relu_group_norm(params, serial);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  expect(thrown, "layouts are not exchanged in place");
}

}  // namespace

int main() {
  check_shapes();
  check_large_mean();
  check_ties();
  check_special_values();
  check_empty_and_wrong();
  if (failures == 0) std::puts("relu_group_norm: all checks passed");
  return failures == 0 ? 0 : 1;
}
