// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks the CUDA GroupNorm launchers against a reference in double on the host. Plain CUDA, no torch.
///
///   test_group_norm           seconds, also under compute-sanitizer
///   test_group_norm --large   adds tensors of more than 2^31 elements (needs 10 GB of device memory)
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "comparisons.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"
#include "group_norm_reference.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

/// Partial moments against the reference, tile by tile. Both NaN agree.
void check_part(const Case& c, const GroupNormShape& shape, const Reference& ref,
                const std::vector<double>& part, double roundoff) {
  double worst = 0;
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t t = 0; t < shape.tiles; ++t) {
      const std::int64_t begin = t * shape.tile_positions,
                         end = std::min(begin + shape.tile_positions, c.positions);
      for (std::int64_t k = 0; k < c.k; ++k) {
        const double* v = ref.v.data() + (n * c.k + k) * c.positions;
        long double mean = 0, m2 = 0, largest = 0;
        for (std::int64_t p = begin; p < end; ++p) {
          mean += v[p];
          largest = std::max<long double>(largest, std::fabs(v[p]));
        }
        mean /= end - begin;
        for (std::int64_t p = begin; p < end; ++p) m2 += (v[p] - mean) * (v[p] - mean);
        const double* got = part.data() + ((n * shape.tiles + t) * c.k + k) * 2;
        const long double mean_slack = 12 * roundoff * largest + 1e-300L;
        // A mean that is off by e moves M2 by at most 2*e*sum|v - mean| <= 2*e*sqrt(count*M2), and by
        // count*e^2.
        const long double m2_slack = 40 * roundoff * m2 +
                                     4 * roundoff * largest * std::sqrt((end - begin) * m2) +
                                     (end - begin) * mean_slack * mean_slack + 1e-300L;
        if (!std::isfinite(static_cast<double>(mean))) {
          if (std::isfinite(got[0]) || std::isfinite(got[1])) worst = std::numeric_limits<double>::infinity();
          continue;
        }
        const long double off =
            std::max(std::fabs(got[0] - mean) / mean_slack, std::fabs(got[1] - m2) / m2_slack);
        worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max<double>(worst, off);
      }
    }
  }
  expect(worst <= 1, "moments, " + std::to_string(worst) + " times the tolerance: " + describe(c));
}

void check_y(const Case& c, const Reference& ref, const std::vector<double>& y, double roundoff, double eps) {
  double worst = 0;
  std::int64_t at = 0, i = 0;
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t k = 0; k < c.k; ++k) {
      const std::int64_t ng = n * c.num_groups + k / (c.k / c.num_groups);
      const double scale = std::fabs(c.affine ? ref.gamma[k] : 1.0) / std::sqrt(ref.variance[ng] + eps);
      for (std::int64_t p = 0; p < c.positions; ++p, ++i) {
        const double got = y[index_of(c, c.y_layout, n, k, p)], want = ref.y[i];
        const double magnitude = std::fabs(ref.v[i]) + std::fabs(ref.mean[ng]);
        const double slack = 1.01 * unit_roundoff(c.y_dtype) * std::fabs(want) +
                             8 * roundoff * (magnitude * scale + std::fabs(want) + 1);
        const double off =
            std::isnan(want) ? (std::isnan(got) ? 0 : INFINITY) : std::fabs(got - want) / slack;
        if (std::isnan(off) || off > worst) {
          worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : off;
          at = i;
        }
      }
    }
  }
  expect(worst <= 1, "y, " + std::to_string(worst) + " times the tolerance at " + std::to_string(at) + ": " +
                         describe(c));
}

/// y from rows of a that are longer than their K channels, to a multiple of 8; what lies behind those is NaN.
void check_pitched(const Case& c, const Reference& ref, const NormalizeParams& dense, char* y) {
  const std::int64_t pitch = (c.k / 8 + 1) * 8, rows = c.n * c.positions;
  const std::vector<double> from = in_layout(c, Layout::kNDHWC, ref.c);
  std::vector<double> padded(rows * pitch, std::nan(""));
  for (std::int64_t i = 0; i < rows * c.k; ++i) padded[i / c.k * pitch + i % c.k] = from[i];
  Buffer a(rows * pitch * size_of(c.dtype));
  upload(a.data(), padded, c.dtype);
  const std::int64_t bytes = rows * c.k * size_of(c.y_dtype);
  check(cudaMemset(y, 0xA5, bytes), "filling a test buffer");
  NormalizeParams normalize = dense;
  normalize.a = a.data();
  normalize.a_pitch = pitch;
  normalize.y = y;
  launch_group_norm_normalize(normalize, nullptr);
  const double roundoff = unit_roundoff(c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  check_y(c, ref, download(y, rows * c.k, c.y_dtype), roundoff, 1e-5);
  expect(a.pads_intact(), "wrote outside a buffer: " + describe(c));
}

/// All three launchers, twice where c may be overwritten in place, against the reference.
void run_case(const Case& c) {
  const double eps = 1e-5;
  const DType stat = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Reference ref = make_reference(c, eps);
  GroupNormShape shape{c.n, c.k, c.positions, c.num_groups, c.tile_positions, 0};
  if (shape.tile_positions == 0) {
    shape.tile_positions = relu_moments_tile_positions(c.n, c.k, c.positions, c.layout, 132);
  }
  shape.tiles = (c.positions + shape.tile_positions - 1) / shape.tile_positions;

  const std::int64_t elements = c.n * c.k * c.positions, off = c.misalign * size_of(c.dtype);
  const std::int64_t y_off = c.misalign * size_of(c.y_dtype);
  Buffer conv(elements * size_of(c.dtype) + off), y(elements * size_of(c.y_dtype) + y_off);
  Buffer bias(c.k * size_of(c.dtype)), gamma(c.k * size_of(c.dtype)), beta(c.k * size_of(c.dtype));
  Buffer part(c.n * shape.tiles * c.k * 2 * size_of(stat)), table(3 * c.n * c.k * size_of(stat));
  Buffer scratch(finalize_scratch_bytes(shape, c.dtype));
  upload(conv.data() + off, in_layout(c, c.layout, ref.c), c.dtype);
  upload(bias.data(), ref.bias, c.dtype);
  upload(gamma.data(), ref.gamma, c.dtype);
  upload(beta.data(), ref.beta, c.dtype);

  ReluMomentsParams moments{
      shape, c.dtype, c.layout, conv.data() + off, c.apply_relu ? bias.data() : nullptr, part.data()};
  FinalizeParams finalize{
      shape, c.dtype,        part.data(), c.affine ? gamma.data() : nullptr, c.affine ? beta.data() : nullptr,
      eps,   scratch.data(), table.data()};
  NormalizeParams normalize{shape,           c.dtype, c.y_dtype,         c.layout,    c.y_layout,
                            c.apply_relu,    0,       conv.data() + off, bias.data(), table.data(),
                            y.data() + y_off};
  launch_relu_moments(moments, nullptr);
  launch_group_norm_finalize(finalize, nullptr);
  launch_group_norm_normalize(normalize, nullptr);

  const double roundoff = unit_roundoff(stat);
  check_part(c, shape, ref, download(part.data(), c.n * shape.tiles * c.k * 2, stat), roundoff);
  check_y(c, ref, download(y.data() + y_off, elements, c.y_dtype), roundoff, eps);

  const std::vector<char> once = download_bytes(table.data(), table.bytes());
  launch_relu_moments(moments, nullptr);
  launch_group_norm_finalize(finalize, nullptr);
  expect(once == download_bytes(table.data(), table.bytes()), "the same bits twice: " + describe(c));

  if (c.dtype == c.y_dtype && c.layout == c.y_layout) {
    const std::vector<char> apart = download_bytes(y.data() + y_off, elements * size_of(c.y_dtype));
    normalize.y = conv.data() + off;
    launch_group_norm_normalize(normalize, nullptr);
    expect(apart == download_bytes(conv.data() + off, elements * size_of(c.dtype)),
           "in place: " + describe(c));
  }
  if (c.layout == Layout::kNDHWC) check_pitched(c, ref, normalize, y.data() + y_off);
  check(cudaDeviceSynchronize(), "waiting for the kernels under test");
  for (const Buffer* buffer : {&conv, &y, &part, &table, &scratch}) {
    expect(buffer->pads_intact(), "wrote outside a buffer: " + describe(c));
  }
}

/// Finalize alone, on partials of its own: many tiles and few groups, which takes the two-kernel path.
void run_finalize(std::int64_t n, std::int64_t k, std::int64_t tiles, std::int64_t num_groups, DType dtype) {
  const DType stat = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const std::int64_t tile_positions = 37, last = 5, channels = k / num_groups;
  const GroupNormShape shape{n, k, (tiles - 1) * tile_positions + last, num_groups, tile_positions, tiles};
  const double eps = 1e-3;
  Random random(static_cast<std::uint64_t>(tiles));
  std::vector<double> partials(n * tiles * k * 2);
  for (std::size_t i = 0; i < partials.size(); i += 2) {
    partials[i] = round_to(1e4 + random.normal(), stat);
    partials[i + 1] = round_to(20 * random.uniform(), stat);
  }
  Buffer part(n * tiles * k * 2 * size_of(stat)), table(3 * n * k * size_of(stat));
  Buffer scratch(finalize_scratch_bytes(shape, dtype));
  upload(part.data(), partials, stat);
  launch_group_norm_finalize({shape, dtype, part.data(), nullptr, nullptr, eps, scratch.data(), table.data()},
                             nullptr);
  const std::vector<double> got = download(table.data(), 3 * n * k, stat);

  double worst = 0;
  for (std::int64_t ng = 0; ng < n * num_groups; ++ng) {
    // body(count, mean, M2) for every partial of the group
    const auto for_each_partial = [&](auto&& body) {
      for (std::int64_t t = 0; t < tiles; ++t) {
        for (std::int64_t i = 0; i < channels; ++i) {
          const std::int64_t at = (ng / num_groups * tiles + t) * k + ng % num_groups * channels + i;
          body(static_cast<long double>(t == tiles - 1 ? last : tile_positions), partials[2 * at],
               partials[2 * at + 1]);
        }
      }
    };
    const long double total = static_cast<long double>(shape.positions) * channels;
    long double sum = 0, m2 = 0;
    for_each_partial([&](long double count, double mean, double) { sum += count * mean; });
    const long double mean = sum / total;
    for_each_partial([&](long double count, double partial_mean, double partial_m2) {
      const long double delta = partial_mean - mean;
      m2 += partial_m2 + count * delta * delta;
    });
    const long double scale = 1 / std::sqrt(m2 / total + eps);
    for (std::int64_t i = 0; i < channels; ++i) {
      const std::int64_t at = ng / num_groups * k + ng % num_groups * channels + i;
      const long double shift = -(mean - got[at]) * scale;
      // A double keeps what its own sums rounded away; a float is rounded once, at the end.
      const double roundoff = (stat == DType::kFloat64 ? 8 : 2) * unit_roundoff(stat);
      // The shift carries what the mean lost by rounding, to the last bits of a double.
      worst = std::max({worst, std::fabs(static_cast<double>((got[at] - mean) / mean)) / roundoff,
                        std::fabs(static_cast<double>((got[n * k + at] - scale) / scale)) / (4 * roundoff),
                        std::fabs(static_cast<double>(got[2 * n * k + at] - shift)) / (1e-10 + 1e-6 * 1e-3)});
    }
  }
  char what[160];
  std::snprintf(what, sizeof(what),
                "finalize, %g times the tolerance: n=%lld k=%lld tiles=%lld groups=%lld %s", worst,
                static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(tiles),
                static_cast<long long>(num_groups), name(dtype));
  expect(worst <= 1, what);
  expect(scratch.pads_intact() && table.pads_intact(), std::string("wrote outside a buffer: ") + what);
}

/// y from 16 bits with a step per (sample, partial moment, channel), of which some say "not finite".
void run_steps(std::int64_t n, std::int64_t k, std::int64_t positions, std::int64_t misalign) {
  constexpr std::int64_t kMoments = 5;
  constexpr int kNotFinite = -128;
  const std::int64_t pitch = (k + 7) / 8 * 8;
  Random random(static_cast<std::uint64_t>(n * 1000003 + k * 1009 + positions));
  // What lies behind K is never normalized, so it may be anything.
  std::vector<std::uint16_t> bits(n * positions * pitch, 0xffff);
  std::vector<std::int8_t> steps(n * kMoments * pitch, kNotFinite);
  std::vector<std::int32_t> moment_of(positions);
  std::vector<float> table(3 * n * k);
  for (std::int64_t i = 0; i < n * positions * k; ++i) {
    bits[i / k * pitch + i % k] = static_cast<std::uint16_t>(random.uniform() * 65536);
  }
  for (std::int64_t i = 0; i < n * kMoments * k; ++i) {
    const int step = i % 37 == 5 ? kNotFinite : i % 41 == 7 ? -126 : i % 43 == 9 ? 90 : int(i % 23) - 20;
    steps[i / k * pitch + i % k] = static_cast<std::int8_t>(step);
  }
  for (std::int32_t& moment : moment_of) moment = static_cast<std::int32_t>(random.uniform() * kMoments);
  for (float& value : table) value = static_cast<float>(random.normal());
  Buffer a(bits.size() * 2), exponents(steps.size()), moments(moment_of.size() * 4), rows(table.size() * 4);
  Buffer y((n * k * positions + misalign) * 4);
  const auto copy = [](const Buffer& to, const void* from) {
    check(cudaMemcpy(to.data(), from, to.bytes(), cudaMemcpyHostToDevice), "uploading");
  };
  copy(a, bits.data()), copy(exponents, steps.data()), copy(moments, moment_of.data()),
      copy(rows, table.data());
  NormalizeParams normalize;
  normalize.shape = {n, k, positions, 1, 0, kMoments};
  normalize.a_layout = Layout::kNDHWC, normalize.a_pitch = pitch;
  normalize.a = a.data(), normalize.table = rows.data(), normalize.y = y.data() + 4 * misalign;
  normalize.steps = reinterpret_cast<const std::int8_t*>(exponents.data());
  normalize.moment_of = reinterpret_cast<const std::int32_t*>(moments.data());
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    normalize.y_layout = layout;
    check(cudaMemset(y.data(), 0xA5, y.bytes()), "filling a test buffer");
    launch_group_norm_normalize(normalize, nullptr);
    const std::vector<double> got = download(y.data() + 4 * misalign, n * k * positions, DType::kFloat32);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < n * k * positions; ++i) {
      const std::int64_t channel = i / positions, p = i % positions,
                         sample = channel / k;  // of [N*K,positions]
      const double value = got[layout == Layout::kNCDHW ? i : (sample * positions + p) * k + channel % k];
      const int step = steps[(sample * kMoments + moment_of[p]) * pitch + channel % k];
      const double mean = table[channel], scale = table[n * k + channel], shift = table[2 * n * k + channel];
      const double v = std::ldexp(bits[(sample * positions + p) * pitch + channel % k], step);
      const double magnitude = std::fabs(v * scale) + std::fabs(mean * scale) + std::fabs(shift);
      const double off = std::fabs(value - ((v - mean) * scale + shift));
      wrong += step == kNotFinite ? !std::isnan(value) : !(off <= 4 * 0x1p-24 * magnitude + 1e-38);
    }
    char what[160];
    std::snprintf(what, sizeof(what),
                  "steps to %s, %lld values wrong, or a pad: n=%lld k=%lld positions=%lld misalign=%lld",
                  name(layout), (long long)wrong, (long long)n, (long long)k, (long long)positions,
                  (long long)misalign);
    expect(wrong == 0 && y.pads_intact(), what);
  }
}

/// More than 2^31 elements of bfloat16, of which a few at either end are not 0: offsets must not wrap.
void run_large(Layout layout, Layout y_layout) {
  const std::int64_t k = 8, positions = (std::int64_t{1} << 28) + 40, elements = k * positions;
  GroupNormShape shape{1, k, positions, k, 0, 0};
  shape.tile_positions = relu_moments_tile_positions(1, k, positions, layout, 132);
  shape.tiles = (positions + shape.tile_positions - 1) / shape.tile_positions;
  const bool in_place = layout == y_layout;
  Buffer c(elements * 2), y(in_place ? 0 : elements * 2);
  Buffer part(shape.tiles * k * 2 * 4), table(3 * k * 4),
      scratch(finalize_scratch_bytes(shape, DType::kBFloat16));
  check(cudaMemset(c.data(), 0, c.bytes()), "clearing a test buffer");
  const std::int64_t marked = layout == Layout::kNDHWC ? elements - 1 : k * positions - 1;
  upload(c.data() + marked * 2, {1024.0},
         DType::kBFloat16);  // channel k - 1, the last position, in either layout
  launch_relu_moments({shape, DType::kBFloat16, layout, c.data(), nullptr, part.data()}, nullptr);
  launch_group_norm_finalize(
      {shape, DType::kBFloat16, part.data(), nullptr, nullptr, 1e-5, scratch.data(), table.data()}, nullptr);
  char* to = in_place ? c.data() : y.data();
  launch_group_norm_normalize({shape, DType::kBFloat16, DType::kBFloat16, layout, y_layout, true, 0, c.data(),
                               nullptr, table.data(), to},
                              nullptr);
  const double mean = 1024.0 / positions, variance = 1024.0 * mean - mean * mean;
  const double high = (1024 - mean) / std::sqrt(variance + 1e-5), low = -mean / std::sqrt(variance + 1e-5);
  const std::string what = std::string("large, ") + name(layout) + " to " + name(y_layout);
  expect(std::fabs(download(to + (elements - 1) * 2, 1, DType::kBFloat16)[0] / high - 1) < 0.01,
         what + ", last");
  const std::int64_t before = y_layout == Layout::kNDHWC ? elements - 1 - k : elements - 2;
  expect(std::fabs(download(to + before * 2, 1, DType::kBFloat16)[0] / low - 1) < 0.01,
         what + ", last but one");
  expect(download(to, 1, DType::kBFloat16)[0] == 0, what + ", first");
}

void run_cases() {
  struct Shape {
    std::int64_t n, k, positions, num_groups;
  };
  const Shape shapes[] = {{2, 16, 60, 4},  {3, 64, 264, 8},   {1, 128, 129, 1}, {2, 30, 77, 6},
                          {1, 7, 515, 7},  {2, 3, 1, 3},      {1, 1, 2053, 1},  {2, 40, 136, 8},
                          {1, 260, 67, 4}, {2, 20, 515, 5},   {2, 100, 77, 20}, {3, 2, 300, 2},
                          {5, 9, 33, 3},   {1, 136, 301, 17}, {1, 2056, 9, 1},  {2, 1031, 2, 1}};
  struct Types {
    DType c, y;
  };
  const Types types[] = {{DType::kFloat32, DType::kFloat32},  {DType::kBFloat16, DType::kBFloat16},
                         {DType::kFloat16, DType::kFloat16},  {DType::kFloat64, DType::kFloat64},
                         {DType::kBFloat16, DType::kFloat32}, {DType::kFloat16, DType::kFloat32}};
  const Layout layouts[] = {Layout::kNDHWC, Layout::kNCDHW};
  int turn = 0;
  for (const Shape& s : shapes) {
    for (const Types& t : types) {
      for (const Layout from : layouts) {
        for (const Layout to : layouts) {
          ++turn;
          Case c{s.n, s.k, s.positions, s.num_groups, t.c, t.y, from, to};
          c.apply_relu = turn % 3 != 0;
          c.affine = turn % 4 != 1;
          c.tile_positions = turn % 5 == 0 ? 19 : 0;
          c.misalign = turn % 7 == 0 ? 1 : 0;
          run_case(c);
        }
      }
    }
  }
  for (const Layout from : layouts) {
    for (const Layout to : layouts) {
      // |mean| >> std; NaN and Inf in one group; more rows than a grid has in y; more than one tile per
      // block.
      run_case({.n = 1,
                .k = 8,
                .positions = 2000,
                .num_groups = 2,
                .layout = from,
                .y_layout = to,
                .bias_mean = 1e4});
      for (const double special : {std::nan(""), static_cast<double>(INFINITY)}) {
        run_case({.n = 2,
                  .k = 8,
                  .positions = 300,
                  .num_groups = 2,
                  .layout = from,
                  .y_layout = to,
                  .special = special});
      }
      run_case({.n = 300, .k = 240, .positions = 3, .num_groups = 240, .layout = from, .y_layout = to});
      run_case({.n = 70000, .k = 2, .positions = 2, .num_groups = 1, .layout = from, .y_layout = to});
      run_case({.n = 1, .k = 64, .positions = 40000, .num_groups = 1, .layout = from, .y_layout = to});
      run_case({.n = 1,
                .k = 8,
                .positions = 525000,
                .num_groups = 1,
                .dtype = DType::kBFloat16,
                .y_dtype = DType::kBFloat16,
                .layout = from,
                .y_layout = to});
    }
  }
  for (const std::int64_t k : {1, 8, 16, 20, 32, 40, 64, 100, 136}) {
    for (const std::int64_t positions : {1, 60, 77, 515, 2052}) run_steps(2, k, positions, k / 4 % 2);
  }
  // Several tiles per block, and a rest.
  run_steps(260, 130, 700, 0);
  run_steps(1030, 8, 2001, 0);
  run_steps(700, 20, 1500, 0);
  run_finalize(1, 8, 20000, 1, DType::kFloat32);
  run_finalize(1, 8, 20000, 1, DType::kFloat64);
  run_finalize(2, 768, 300, 3, DType::kFloat32);
  run_finalize(16, 128, 154, 8, DType::kBFloat16);
  run_finalize(1, 4096, 3, 1, DType::kFloat16);
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  const bool large = argc > 1 && std::strcmp(argv[1], "--large") == 0;
  try {
    run_cases();
    if (large) {
      for (const Layout from : {Layout::kNDHWC, Layout::kNCDHW}) {
        run_large(from, Layout::kNDHWC);
        run_large(from, Layout::kNCDHW);
      }
    }
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("group_norm: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
