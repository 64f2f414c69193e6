// SPDX-License-Identifier: Apache-2.0
/// \file
/// Normalization of values stored as 16 bits with a step, for test_group_norm.cu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "comparisons.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "device_buffer.hpp"
#include "group_norm_reference.hpp"

namespace upconv3d::test {

struct StepsCase {
  std::int64_t n = 1, k = 1, positions = 1;
  bool is_signed = false;
  Activation after = Activation::kNone;
  bool one_slope = false;     // of kPrelu, else one per channel
  std::int64_t misalign = 0;  // elements by which y starts off a 16-byte boundary
};

/// Host data: one step per (sample, partial moment, channel), of which some say "not finite".
struct StepsData {
  static constexpr std::int64_t kMoments = 5;
  static constexpr int kNotFinite = -128;
  static constexpr double kParameter = 0.25;  // of leaky_relu and elu

  StepsCase c;
  std::int64_t pitch;
  std::vector<std::uint16_t> bits;  // what lies behind K is never normalized, so it may be anything
  std::vector<std::int8_t> steps;
  std::vector<std::int32_t> moment_of;
  std::vector<float> table, slopes;

  explicit StepsData(const StepsCase& of)
      : c(of),
        pitch((c.k + 7) / 8 * 8),
        bits(c.n * c.positions * pitch, 0xffff),
        steps(c.n * kMoments * pitch, kNotFinite),
        moment_of(c.positions),
        table(3 * c.n * c.k),
        slopes(c.k) {
    Random random(static_cast<std::uint64_t>(c.n * 1000003 + c.k * 1009 + c.positions));
    for (std::int64_t i = 0; i < c.n * c.positions * c.k; ++i) {
      bits[i / c.k * pitch + i % c.k] = static_cast<std::uint16_t>(random.uniform() * 65536);
    }
    for (std::int64_t i = 0; i < c.n * kMoments * c.k; ++i) {
      const int step = i % 37 == 5 ? kNotFinite : i % 41 == 7 ? -126 : i % 43 == 9 ? 90 : int(i % 23) - 20;
      steps[i / c.k * pitch + i % c.k] = static_cast<std::int8_t>(step);
    }
    for (std::int32_t& moment : moment_of) moment = static_cast<std::int32_t>(random.uniform() * kMoments);
    for (float& value : table) value = static_cast<float>(random.normal());
    for (float& value : slopes) value = static_cast<float>(0.3 * random.normal());
  }

  /// Whether `value` is y of a position of a channel.
  bool agrees(double value, std::int64_t sample, std::int64_t channel, std::int64_t position) const {
    const int step = steps[(sample * kMoments + moment_of[position]) * pitch + channel];
    if (step == kNotFinite) return std::isnan(value);
    const std::int64_t row = sample * c.k + channel;
    const double mean = table[row], scale = table[c.n * c.k + row], shift = table[2 * c.n * c.k + row];
    const int zero = c.is_signed ? 32768 : 0;
    const double v = std::ldexp(bits[(sample * c.positions + position) * pitch + channel] - zero, step);
    const double magnitude = std::fabs(v * scale) + std::fabs(mean * scale) + std::fabs(shift);
    const double u = (v - mean) * scale + shift;
    const double parameter = c.after == Activation::kPrelu ? slopes[c.one_slope ? 0 : channel] : kParameter;
    double slack = 4 * 0x1p-24 * magnitude + 1e-38;
    if (c.after != Activation::kNone) {
      slack = slack * steepest(parameter) + activation_slack(c.after, u, parameter, 0x1p-24);
    }
    return std::fabs(value - activation_value(c.after, u, parameter)) <= slack;
  }
};

inline void run_steps(const StepsCase& c) {
  const StepsData data(c);
  const auto copy = [](const Buffer& to, const void* from) {
    check(cudaMemcpy(to.data(), from, to.bytes(), cudaMemcpyHostToDevice), "uploading");
  };
  Buffer a(data.bits.size() * 2), steps(data.steps.size()), moment_of(data.moment_of.size() * 4);
  Buffer table(data.table.size() * 4), slopes(data.slopes.size() * 4);
  Buffer y((c.n * c.k * c.positions + c.misalign) * 4);
  copy(a, data.bits.data()), copy(steps, data.steps.data()), copy(moment_of, data.moment_of.data());
  copy(table, data.table.data()), copy(slopes, data.slopes.data());
  cuda::NormalizeParams normalize;
  normalize.shape = {c.n, c.k, c.positions, 1, 0, StepsData::kMoments};
  normalize.a_layout = Layout::kNDHWC, normalize.a_pitch = data.pitch;
  normalize.after = {c.after, StepsData::kParameter, slopes.data(), c.one_slope ? 0 : 1};
  normalize.a = a.data(), normalize.table = table.data(), normalize.y = y.data() + 4 * c.misalign;
  normalize.steps = reinterpret_cast<const std::int8_t*>(steps.data());
  normalize.signed_steps = c.is_signed;
  normalize.moment_of = reinterpret_cast<const std::int32_t*>(moment_of.data());
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    normalize.y_layout = layout;
    check(cudaMemset(y.data(), 0xA5, y.bytes()), "filling a test buffer");
    cuda::launch_group_norm_normalize(normalize, nullptr);
    const std::vector<double> got =
        download(y.data() + 4 * c.misalign, c.n * c.k * c.positions, DType::kFloat32);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < c.n * c.k * c.positions; ++i) {
      const std::int64_t sample = i / c.positions / c.k, channel = i / c.positions % c.k;
      const std::int64_t p = i % c.positions;
      const std::int64_t at = layout == Layout::kNCDHW ? i : (sample * c.positions + p) * c.k + channel;
      wrong += !data.agrees(got[at], sample, channel, p);
    }
    char what[200];
    std::snprintf(what, sizeof(what),
                  "steps to %s, %lld values wrong, or a pad: n=%lld k=%lld positions=%lld signed=%d after=%s "
                  "one_slope=%d misalign=%lld",
                  name(layout), static_cast<long long>(wrong), static_cast<long long>(c.n),
                  static_cast<long long>(c.k), static_cast<long long>(c.positions), c.is_signed,
                  name(c.after), c.one_slope, static_cast<long long>(c.misalign));
    expect(wrong == 0 && y.pads_intact(), what);
  }
}

inline void run_steps_cases() {
  int turn = 0;
  for (const std::int64_t k : {1, 8, 16, 20, 32, 40, 64, 100, 136}) {
    for (const std::int64_t positions : {1, 60, 77, 515, 2052}) {
      ++turn;
      StepsCase c{2, k, positions};
      c.is_signed = turn % 2 != 0;
      c.misalign = k / 4 % 2;
      run_steps(c);
      c.is_signed = !c.is_signed;
      c.after = static_cast<Activation>(turn % 8);
      c.one_slope = turn % 16 < 8;
      run_steps(c);
    }
  }
  // Several tiles per block, and a rest.
  run_steps({260, 130, 700});
  run_steps({1030, 8, 2001});
  run_steps({700, 20, 1500, true, Activation::kSilu});
}

}  // namespace upconv3d::test
