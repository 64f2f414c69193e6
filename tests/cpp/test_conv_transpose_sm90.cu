// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_relu_group_norm_sm90 on its own against a plain
/// double-precision convolution, GroupNorm and what may stand before and after it. Where the kernel keeps its
/// values: before(conv) exactly, on small integers, or to half a step of 16 bits. Where it ends with the
/// moments: its table to float accuracy or that of those steps; of other numbers than integers, to that of
/// tensor cores, beside what is stored. Where it normalizes: y to the accuracy of what it stores. What it
/// writes is NaN before, so that nothing is left unwritten; repeated launches must give the same bits. Needs
/// a GPU of compute capability 9.0. Exit code 0: all passed.
///
///   test_conv_transpose_sm90 [NAME]   NAME: part of the names of the variants that are wanted
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "conv_transpose_cases.hpp"
#include "conv_transpose_fixture.cuh"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cutlass/numeric_types.h"
#include "gpu_test.hpp"
#include "tail_cases.hpp"
#include "tally.hpp"

namespace {

using upconv3d::Activation;
using upconv3d::ConvInstance;
using upconv3d::Cut;
using upconv3d::DType;
using upconv3d::Problem;
using upconv3d::Tail;
using upconv3d::cuda::check;
using upconv3d::tests::activated;
using upconv3d::tests::can_have_windows;
using upconv3d::tests::can_launch;
using upconv3d::tests::can_read_w_in_place;
using upconv3d::tests::Case;
using upconv3d::tests::Fixture;
using upconv3d::tests::group_counts;
using upconv3d::tests::is_linear;
using upconv3d::tests::is_quantized;
using upconv3d::tests::kCases;
using upconv3d::tests::kCuts;
using upconv3d::tests::kModes;
using upconv3d::tests::kRealCases;
using upconv3d::tests::Launch;
using upconv3d::tests::linear_tails;
using upconv3d::tests::Mode;
using upconv3d::tests::normalizes;
using upconv3d::tests::piecewise_linear_tails;
using upconv3d::tests::slope_tails;
using upconv3d::tests::smooth_tails;
using upconv3d::tests::Tally;

/// The case that is launched again and again: five samples, several channel tiles, most work.
constexpr int kRepeatedCase = 9;

/// Few blocks, so that each walks several tiles and waits for the others.
constexpr int kFewBlocks = 5;

/// What activations with exponentials are held to, of values that are not small: 32 roundings of float.
constexpr double kCurveAccuracy = 32 * 0x1p-24;

/// What float statistics and their use are held to: 32 roundings.
constexpr double kStatAccuracy = 32 * 0x1p-24;

/// Half a unit in the last place of a value of 1.
double unit_roundoff(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

/// Moments of one group of a sample, in double.
struct GroupMoments {
  double mean = 0, rstd = 0;
  double largest = 0;                   // magnitude in the group
  std::vector<double> channel_largest;  // [K/G] in each channel
};

GroupMoments group_moments(const std::vector<double>& values, const Problem& problem, std::int64_t n,
                           std::int64_t group) {
  const std::int64_t channels = problem.k / problem.num_groups, positions = problem.positions();
  const double* const first = values.data() + n * positions * problem.k + group * channels;
  GroupMoments moments;
  moments.channel_largest.resize(channels);
  for (std::int64_t i = 0; i < positions * channels; ++i) {
    const double v = first[i / channels * problem.k + i % channels];
    moments.mean += v;
    double& largest = moments.channel_largest[i % channels];
    largest = std::max(largest, std::abs(v));
  }
  const double count = double(positions * channels);
  moments.mean /= count;
  double m2 = 0;
  for (std::int64_t i = 0; i < positions * channels; ++i) {
    const double delta = first[i / channels * problem.k + i % channels] - moments.mean;
    m2 += delta * delta;
  }
  moments.rstd = 1 / std::sqrt(m2 / count + problem.eps);
  for (const double v : moments.channel_largest) moments.largest = std::max(moments.largest, v);
  return moments;
}

std::string disagreement(const char* what, std::int64_t n, std::int64_t index, std::int64_t k, double got,
                         double expected) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s of n=%lld position=%lld k=%lld is %.9g, expected %.9g", what,
                (long long)n, (long long)index, (long long)k, got, expected);
  return text;
}

/// before(conv) exactly; with steps to half of one, which is small against the channel's largest magnitude.
/// Of reals, whose sums are about 1, and of activations but ReLU to their rounding.
template <class Fixture>
std::string check_activation(const Fixture& fixture) {
  const std::int64_t k = fixture.problem().k, positions = fixture.problem().positions();
  std::vector<double> largest(fixture.problem().n * k, 0);  // [N,K] magnitude in each channel
  for (std::size_t i = 0; i < fixture.expected.size(); ++i) {
    double& of_channel = largest[i / k / positions * k + i % k];
    of_channel = std::max(of_channel, std::abs(fixture.expected[i]));
  }
  for (std::int64_t i = 0; i < fixture.samples * positions * k; ++i) {
    if (i % k >= fixture.channels) continue;
    const double got = double(float(fixture.a[i])), want = fixture.expected[i];
    double slack = 0;
    if (fixture.has_curve()) {
      slack = kCurveAccuracy * (1 + std::abs(want)) +
              1.01 * unit_roundoff(fixture.instance().output) * std::abs(want);
    }
    if (fixture.is_real) slack += 0x1p-14 + 1.01 * unit_roundoff(fixture.instance().output) * std::abs(want);
    if (is_quantized(fixture.instance())) {
      slack += 1.01 * fixture.half_step[i] + 0x1p-23 * std::abs(want);  // a float is what was rounded
      if (fixture.is_real) slack += fixture.half_step[i];  // what ReLU lets through is a step or more
      const double bound = 1.01 * fixture.step_roundoff() * largest[i / k / positions * k + i % k] + 0x1p-126;
      if (!(fixture.half_step[i] <= bound)) {
        return disagreement("half a step", i / k / positions, i / k % positions, i % k, fixture.half_step[i],
                            bound);
      }
    }
    if (!(std::abs(got - want) <= slack)) {
      return disagreement("a", i / k / positions, i / k % positions, i % k, got, fixture.expected[i]);
    }
  }
  return "";
}

/// mean, scale and shift; together mean and shift must hold the mean and beta.
template <class Fixture>
std::string check_channel_table(const Fixture& fixture, bool affine) {
  const Problem& problem = fixture.problem();
  const std::int64_t channels = problem.k / problem.num_groups, plane = problem.n * problem.k;
  // What the errors of all values do to mean and deviation.
  const double step = 1.01 * fixture.step_roundoff();
  for (std::int64_t ng = 0; ng < fixture.samples * problem.num_groups; ++ng) {
    const std::int64_t n = ng / problem.num_groups, group = ng % problem.num_groups;
    if (group * channels >= fixture.channels) continue;
    const GroupMoments moments = group_moments(fixture.expected, problem, n, group);
    for (std::int64_t k = group * channels; k < (group + 1) * channels; ++k) {
      const float* const row = fixture.channel_table.data() + n * problem.k + k;
      const double scale = (affine ? fixture.gamma[k] : 1.0) * moments.rstd;
      const double shift = (affine ? fixture.beta[k] : 0.0) - (moments.mean - row[0]) * scale;
      if (!(std::abs(row[0] - moments.mean) <= (kStatAccuracy + step) * moments.largest)) {
        return disagreement("mean", n, -1, k, row[0], moments.mean);
      }
      if (!(std::abs(row[plane] - scale) <=
            (kStatAccuracy + step * moments.largest * moments.rstd) * std::abs(scale))) {
        return disagreement("scale", n, -1, k, row[plane], scale);
      }
      const double slack =
          (kStatAccuracy + step) * moments.largest * std::abs(scale) + kStatAccuracy * std::abs(shift);
      if (!(std::abs(row[2 * plane] - shift) <= slack)) {
        return disagreement("shift", n, -1, k, row[2 * plane], shift);
      }
    }
  }
  return "";
}

/// mean and scale of channels that are norm groups of their own, beside the moments of a as it is stored.
/// Tensor cores truncate what they add up, of 256 positions by less than 2^-18 of it, always downwards: a sum
/// of squares by 2^-21 to 2^-20 as a rule, where a float's would not lose more. Of twice that a variance may
/// be off; but of no more than 2^-9 of itself, since of a small share of the squares it must not be taken.
template <class Fixture>
std::string check_stored_moments(const Fixture& fixture) {
  const Problem& problem = fixture.problem();
  const std::int64_t positions = problem.positions(), plane = problem.n * problem.k;
  for (std::int64_t nk = 0; nk < plane; ++nk) {
    const std::int64_t n = nk / problem.k, k = nk % problem.k;
    const auto at = [&](std::int64_t i) {
      return double(float(fixture.a[(n * positions + i) * problem.k + k]));
    };
    double mean = 0, variance = 0;
    for (std::int64_t i = 0; i < positions; ++i) mean += at(i) / double(positions);
    for (std::int64_t i = 0; i < positions; ++i) {
      variance += (at(i) - mean) * (at(i) - mean) / double(positions);
    }
    const double square = mean * mean + variance, scale = fixture.channel_table[plane + nk];
    const double got_mean = fixture.channel_table[nk], got_variance = 1 / (scale * scale) - problem.eps;
    if (!(std::abs(got_mean - mean) <= 0x1p-18 * std::sqrt(square))) {
      return disagreement("mean", n, -1, k, got_mean, mean);
    }
    const double of_float = 0x1p-21 * (variance + problem.eps);  // what scale's own rounding leaves
    if (!(std::abs(got_variance - variance) <= std::min(0x1p-17 * square, 0x1p-9 * variance) + of_float)) {
      return disagreement("variance", n, -1, k, got_variance, variance);
    }
  }
  return "";
}

/// y, to its own rounding, that of the statistics and that of 16 bits with a step. No slope after it is above
/// 1, so errors do not grow. NaN must reach all of its groups.
template <class Fixture>
std::string check_y(const Fixture& fixture, bool affine) {
  const Problem& problem = fixture.problem();
  const std::int64_t channels = problem.k / problem.num_groups, positions = problem.positions();
  const double roundoff = 1.01 * unit_roundoff(fixture.instance().output);
  const double step = fixture.step_roundoff();
  for (std::int64_t ng = 0; ng < fixture.samples * problem.num_groups; ++ng) {
    const std::int64_t n = ng / problem.num_groups, group = ng % problem.num_groups;
    const bool is_nan = group * channels >= fixture.channels;
    const GroupMoments moments = group_moments(fixture.expected, problem, n, group);
    for (std::int64_t i = 0; i < positions * channels; ++i) {
      const std::int64_t k = group * channels + i % channels;
      const std::int64_t at = (n * positions + i / channels) * problem.k + k;
      const double gamma = affine ? fixture.gamma[k] : 1.0, beta = affine ? fixture.beta[k] : 0.0;
      const double normalized = (fixture.expected[at] - moments.mean) * moments.rstd;
      const double y = normalized * gamma + beta;
      const double scale = std::abs(gamma) * moments.rstd;
      // The value's own error, and what the errors of all values do to mean and deviation.
      const double stored =
          step * scale *
          (moments.channel_largest[i % channels] + moments.largest * (1 + std::abs(normalized)));
      const double slack =
          roundoff * std::abs(y) + stored +
          kStatAccuracy * (moments.largest * scale + std::abs(normalized * gamma) + std::abs(beta));
      const double got = double(float(fixture.y[at]));
      const double want = activated(problem.tail, problem.tail.after(), y, k);
      const bool agrees = is_nan ? std::isnan(got) : std::abs(got - want) <= slack;
      if (!agrees) return disagreement("y", n, i / channels, k, got, want);
    }
  }
  return "";
}

std::string label(const Problem& problem, const Launch& launch) {
  const char* const modes[] = {"moments only", "in place", "y beside a", "linear", "linear, channels first"};
  return "N=" + std::to_string(problem.n) + " C=" + std::to_string(problem.c) +
         " K=" + std::to_string(problem.k) + " P=" + std::to_string(problem.out()[1]) +
         " groups=" + std::to_string(problem.groups) + " num_groups=" + std::to_string(launch.num_groups) +
         " split_axes=" + std::to_string(launch.cut.split_axes) +
         (launch.cut.share_taps ? " share_taps, " : ", ") + (launch.cut.pair_phases ? "pairs, " : "") +
         (problem.has_bias ? "" : "no bias, ") + modes[int(launch.mode)] + ", " + describe(launch.tail) +
         (launch.w_in_place ? ", w in place" : "") + (launch.clears_counters ? ", clears counters" : "") +
         (launch.windows ? ", windows" : "");
}

/// One launch by few blocks, and all that it wrote.
template <class Fixture>
void run_one_launch(Fixture& fixture, const Launch& launch, Tally& tally) {
  tally.run(fixture.instance(), label(fixture.problem(), launch), [&] {
    fixture.launch(launch, kFewBlocks);
    std::string problem;
    if (launch.mode != Mode::kInPlace) problem = check_activation(fixture);
    if (problem.empty() && launch.mode == Mode::kMoments) {
      problem = fixture.is_real ? check_stored_moments(fixture) : check_channel_table(fixture, launch.affine);
    }
    if (problem.empty() && normalizes(launch.mode)) problem = check_y(fixture, launch.affine);
    return problem;
  });
}

/// The launch; where variant and case can, once more with w as it lies and window by window, and with
/// counters that it has to clear.
template <class Fixture>
void run_launch(Fixture& fixture, Launch launch, Tally& tally) {
  run_one_launch(fixture, launch, tally);
  launch.clears_counters = true;
  launch.w_in_place = can_read_w_in_place(fixture.instance(), fixture.problem());
  launch.windows = can_have_windows(fixture.problem(), launch.cut);
  if (launch.w_in_place || launch.windows) run_one_launch(fixture, launch, tally);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
}

/// 20 launches, by few blocks and by all that fit, that clear their counters or find them so, and with w
/// packed or as it lies, give the same bits.
template <class Fixture>
std::string check_repeats(Fixture& fixture, Launch launch, int sm_count) {
  constexpr int kLaunches = 20;
  const bool may_lie = can_read_w_in_place(fixture.instance(), fixture.problem());
  fixture.launch(launch, sm_count);
  const auto a = fixture.a;
  const auto y = fixture.y;
  const auto channel_table = fixture.channel_table;
  for (int i = 1; i < kLaunches; ++i) {
    launch.clears_counters = i % 2 == 1;
    launch.w_in_place = may_lie && i % 3 != 0;
    fixture.launch(launch, i % 4 == 1 ? kFewBlocks : sm_count);
    if (!same_bits(a, fixture.a) || !same_bits(y, fixture.y)) {
      return "launch " + std::to_string(i) + " stored other bits than launch 0";
    }
    if (!same_bits(channel_table, fixture.channel_table)) {
      return "launch " + std::to_string(i) + " wrote another channel_table than launch 0";
    }
  }
  return "";
}

/// Every cut with ReLU before a norm, in place and with the moments only; group counts, and whether gamma and
/// beta are given, take turns.
template <class Fixture>
void run_cuts(Fixture& fixture, int index, int sm_count, Tally& tally) {
  const std::vector<std::int64_t> counts = group_counts(kCases[index]);
  for (const Mode mode : {Mode::kMoments, Mode::kInPlace}) {
    std::size_t turn = normalizes(mode) ? 0 : 1;
    for (const Cut& cut : kCuts) {
      if (!can_launch(fixture.instance(), fixture.problem(), mode, cut)) continue;
      const std::int64_t groups = counts[turn++ % counts.size()];
      const bool affine = (turn + index) % 3 != 0;
      run_launch(fixture, {cut, groups, affine, mode, Tail{}}, tally);
      const std::int64_t k = fixture.problem().k;
      const bool many_launches = mode == Mode::kMoments && slab_launches(fixture.problem()) > 2;
      // Of few channels, rows that are normalized hold several positions, unless tiles are kept: many blocks
      // do.
      const bool folds = normalizes(mode) && k <= 24 && cut.split_axes == 0 && !cut.share_taps;
      const bool repeats = (many_launches || cut.pair_phases || folds) && k % 8 == 0;
      if ((index == kRepeatedCase && (cut.share_taps || cut.split_axes == 3)) || repeats) {
        const Launch launch{cut, 8, true, mode, Tail{}};
        tally.run(fixture.instance(), "repeated, " + label(fixture.problem(), launch),
                  [&] { return check_repeats(fixture, launch, sm_count); });
      }
    }
  }
}

/// Every mode with one of the other tails, without a norm with ReLU and two others; these, cuts and group
/// counts take turns.
template <class Fixture>
void run_tails(Fixture& fixture, int index, int sm_count, Tally& tally) {
  const Problem& problem = fixture.problem();
  const std::vector<std::int64_t> counts = group_counts(kCases[index]);
  std::vector<Tail> tails = slope_tails(problem.k);
  for (const Tail& tail : piecewise_linear_tails(problem.k)) tails.push_back(tail);
  for (const Mode mode : kModes) {
    const int turn = index + int(mode);
    Launch launch{kCuts[turn % std::size(kCuts)], 1, turn % 3 != 0, mode, tails[turn % tails.size()]};
    if (!can_launch(fixture.instance(), problem, mode, launch.cut)) launch.cut = {0, false};
    if (!can_launch(fixture.instance(), problem, mode, launch.cut)) continue;
    if (is_linear(mode)) {
      const std::vector<Tail> others = linear_tails(problem.k);
      const std::size_t half = others.size() / 2;
      launch.tail.norm = false;
      launch.tail.activation = Activation::kRelu;
      for (const Tail& tail : {launch.tail, others[turn % half], others[half + turn % half]}) {
        launch.tail = tail;
        run_launch(fixture, launch, tally);
      }
      continue;
    }
    launch.num_groups = counts[turn % counts.size()];
    run_launch(fixture, launch, tally);
    if (index != kRepeatedCase || mode == Mode::kMoments) continue;
    launch = {{0, false}, 8, true, mode, tails.back()};
    tally.run(fixture.instance(), "repeated, " + label(problem, launch),
              [&] { return check_repeats(fixture, launch, sm_count); });
  }
}

/// What tensor cores round as they add up: with ReLU, without an activation and with those before the norm
/// that have exponentials, a norm group per channel.
template <class Operand, class Output>
void run_reals(const ConvInstance& instance, std::uint64_t& state, Tally& tally) {
  if (instance.products != 1) return;  // integers are what x and w are split into
  for (const Case& shape : kRealCases) {
    Fixture<Operand, Output> fixture(instance, shape, state);
    std::vector<Tail> tails = smooth_tails(upconv3d::Order::kActNorm);
    tails.insert(tails.end(), {Tail{}, piecewise_linear_tails(shape.k).front()});
    for (const Tail& tail : tails) {
      run_launch(fixture, {{0, false}, shape.k, false, Mode::kMoments, tail}, tally);
    }
  }
}

template <class Operand, class Output>
void run_instance(const ConvInstance& instance, int sm_count, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  for (int index = 0; index < int(std::size(kCases)); ++index) {
    Fixture<Operand, Output> fixture(instance, kCases[index], state);
    run_cuts(fixture, index, sm_count, tally);
    run_tails(fixture, index, sm_count, tally);
  }
  run_reals<Operand, Output>(instance, state, tally);
}

void run_instance(const ConvInstance& instance, int sm_count, Tally& tally) {
  if (instance.operand == DType::kBFloat16) {
    run_instance<cutlass::bfloat16_t, cutlass::bfloat16_t>(instance, sm_count, tally);
  } else if (instance.output == DType::kFloat16) {
    run_instance<cutlass::half_t, cutlass::half_t>(instance, sm_count, tally);
  } else {
    run_instance<cutlass::half_t, float>(instance, sm_count, tally);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  const char* const wanted = argc > 1 ? argv[1] : "";
  Tally tally;
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "asking for the SM count");
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled || instance.arch != 90 || instance.twice) continue;
    if (std::strstr(instance.name, wanted) == nullptr) continue;
    tally.run(instance, "preparing its cases", [&] {
      run_instance(instance, sm_count, tally);
      return std::string();
    });
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
