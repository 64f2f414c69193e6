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
#include <iterator>
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
#include "group_norm_comparisons.hpp"
#include "group_norm_reference.hpp"
#include "normalize_steps_cases.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

/// What the launchers take of a case, in device memory.
struct CaseBuffers {
  std::int64_t elements, off, y_off;  // off: bytes
  Buffer conv, skip, y, bias, gamma, beta, slopes, part, table, scratch;

  CaseBuffers(const Case& c, const GroupNormShape& shape, const Reference& ref, DType stat)
      : elements(c.n * c.k * c.positions),
        off(c.misalign * size_of(c.dtype)),
        y_off(c.misalign * size_of(c.y_dtype)),
        conv(elements * size_of(c.dtype) + off),
        skip(elements * size_of(c.dtype) + off),
        y(elements * size_of(c.y_dtype) + y_off),
        bias(c.k * size_of(c.dtype)),
        gamma(c.k * size_of(c.dtype)),
        beta(c.k * size_of(c.dtype)),
        slopes(c.k * size_of(c.y_dtype)),
        part(c.n * shape.tiles * c.k * 2 * size_of(stat)),
        table(3 * c.n * c.k * size_of(stat)),
        scratch(finalize_scratch_bytes(shape)) {
    upload(conv.data() + off, in_layout(c, c.layout, ref.c), c.dtype);
    upload(skip.data() + off, in_layout(c, c.layout, ref.skip), c.dtype);
    upload(bias.data(), ref.bias, c.dtype);
    upload(gamma.data(), ref.gamma, c.dtype);
    upload(beta.data(), ref.beta, c.dtype);
    upload(slopes.data(), ref.slopes, c.y_dtype);
  }

  ActivationParams activation(const Case& c, Activation kind) const {
    return {kind, c.parameter, kind == Activation::kPrelu ? slopes.data() : nullptr, c.one_slope ? 0 : 1};
  }
  ActivationMomentsParams moments(const Case& c, const GroupNormShape& shape) const {
    return {.shape = shape,
            .dtype = c.dtype,
            .y_dtype = c.y_dtype,
            .layout = c.layout,
            .before = activation(c, c.before),
            .c = conv.data() + off,
            .bias = c.has_bias ? bias.data() : nullptr,
            .skip = c.has_skip ? skip.data() + off : nullptr,
            .part = part.data()};
  }
  NormalizeParams normalize(const Case& c, const GroupNormShape& shape) const {
    return {.shape = shape,
            .a_dtype = c.dtype,
            .y_dtype = c.y_dtype,
            .a_layout = c.layout,
            .y_layout = c.y_layout,
            .before = activation(c, c.before),
            .after = activation(c, c.after),
            .a = conv.data() + off,
            .bias = c.has_bias ? bias.data() : nullptr,
            .skip = c.has_skip ? skip.data() + off : nullptr,
            .table = c.norm ? table.data() : nullptr,
            .y = y.data() + y_off};
  }
};

GroupNormShape shape_of(const Case& c) {
  GroupNormShape shape{c.n, c.k, c.positions, c.num_groups, c.tile_positions, 0};
  if (shape.tile_positions == 0) {
    shape.tile_positions = activation_moments_tile_positions(c.n, c.k, c.positions, c.layout, 132);
  }
  shape.tiles = (c.positions + shape.tile_positions - 1) / shape.tile_positions;
  return shape;
}

/// y from rows of a that are longer than their K channels, to a multiple of 8; what lies behind those is NaN.
void check_pitched(const Case& c, const Reference& ref, const NormalizeParams& dense, char* y) {
  const std::int64_t pitch = (c.k / 8 + 1) * 8, rows = c.n * c.positions;
  const auto padded = [&](const std::vector<double>& logical) {
    const std::vector<double> from = in_layout(c, Layout::kNDHWC, logical);
    std::vector<double> to(rows * pitch, std::nan(""));
    for (std::int64_t i = 0; i < rows * c.k; ++i) to[i / c.k * pitch + i % c.k] = from[i];
    return to;
  };
  Buffer a(rows * pitch * size_of(c.dtype)), skip(a.bytes());
  upload(a.data(), padded(ref.c), c.dtype);
  upload(skip.data(), padded(ref.skip), c.dtype);
  const std::int64_t bytes = rows * c.k * size_of(c.y_dtype);
  check(cudaMemset(y, 0xA5, bytes), "filling a test buffer");
  NormalizeParams normalize = dense;
  normalize.a = a.data();
  normalize.a_pitch = pitch;
  if (c.has_skip) normalize.skip = skip.data();
  normalize.y = y;
  launch_group_norm_normalize(normalize, nullptr);
  check_y(c, ref, download(y, rows * c.k, c.y_dtype), stat_roundoff(c), 1e-5);
  expect(a.pads_intact(), "wrote outside a buffer: " + describe(c));
}

/// All three launchers, twice where c may be overwritten in place, against the reference.
void run_case(const Case& c) {
  const double eps = 1e-5;
  const DType stat = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Reference ref = make_reference(c, eps);
  const GroupNormShape shape = shape_of(c);
  const CaseBuffers on(c, shape, ref, stat);
  const ActivationMomentsParams moments = on.moments(c, shape);
  FinalizeParams finalize{shape,
                          c.dtype,
                          on.part.data(),
                          c.affine ? on.gamma.data() : nullptr,
                          c.affine ? on.beta.data() : nullptr,
                          eps,
                          on.scratch.data(),
                          on.table.data()};
  NormalizeParams normalize = on.normalize(c, shape);
  launch_activation_moments(moments, nullptr);
  launch_group_norm_finalize(finalize, nullptr);
  launch_group_norm_normalize(normalize, nullptr);

  const double roundoff = stat_roundoff(c);
  check_part(c, shape, ref, download(on.part.data(), c.n * shape.tiles * c.k * 2, stat), roundoff);
  check_y(c, ref, download(on.y.data() + on.y_off, on.elements, c.y_dtype), roundoff, eps);

  const std::vector<char> once = download_bytes(on.table.data(), on.table.bytes());
  launch_activation_moments(moments, nullptr);
  launch_group_norm_finalize(finalize, nullptr);
  expect(once == download_bytes(on.table.data(), on.table.bytes()), "the same bits twice: " + describe(c));

  if (c.dtype == c.y_dtype && c.layout == c.y_layout) {
    const std::int64_t bytes = on.elements * size_of(c.dtype);
    const std::vector<char> apart = download_bytes(on.y.data() + on.y_off, bytes);
    normalize.y = on.conv.data() + on.off;
    launch_group_norm_normalize(normalize, nullptr);
    expect(apart == download_bytes(on.conv.data() + on.off, bytes), "in place: " + describe(c));
  }
  if (c.layout == Layout::kNDHWC) check_pitched(c, ref, normalize, on.y.data() + on.y_off);
  check(cudaDeviceSynchronize(), "waiting for the kernels under test");
  for (const Buffer* buffer : {&on.conv, &on.skip, &on.y, &on.part, &on.table, &on.scratch}) {
    expect(buffer->pads_intact(), "wrote outside a buffer: " + describe(c));
  }
}

/// The moments and normalize see the same bits: partial moments of one position are its value, and so is y
/// without a normalization.
void run_same_value(const Case& c) {
  const GroupNormShape shape = shape_of(c);
  const CaseBuffers on(c, shape, make_reference(c, 1e-5), c.y_dtype);
  launch_activation_moments(on.moments(c, shape), nullptr);
  launch_group_norm_normalize(on.normalize(c, shape), nullptr);
  const std::vector<double> part = download(on.part.data(), c.n * shape.tiles * c.k * 2, c.y_dtype);
  const std::vector<double> y = download(on.y.data(), on.elements, c.y_dtype);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < on.elements; ++i) {
    different +=
        part[2 * i] != y[index_of(c, c.y_layout, i / (c.k * c.positions), i % c.k, i / c.k % c.positions)];
  }
  expect(different == 0, std::to_string(different) + " values differ from their moments: " + describe(c));
}

/// Finalize alone, on partials of its own: with many tiles and few groups, which takes the two-kernel path.
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
  Buffer scratch(finalize_scratch_bytes(shape));
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

/// More than 2^31 elements of bfloat16, of which a few at either end are not 0: offsets must not wrap.
/// \param rectifier kRelu, or for the kernels that decide at run time kLeakyRelu, whose slope is 0
void run_large(Layout layout, Layout y_layout, Activation rectifier) {
  const std::int64_t k = 8, positions = (std::int64_t{1} << 28) + 40, elements = k * positions;
  GroupNormShape shape{1, k, positions, k, 0, 0};
  shape.tile_positions = activation_moments_tile_positions(1, k, positions, layout, 132);
  shape.tiles = (positions + shape.tile_positions - 1) / shape.tile_positions;
  const bool in_place = layout == y_layout;
  Buffer c(elements * 2), y(in_place ? 0 : elements * 2);
  Buffer part(shape.tiles * k * 2 * 4), table(3 * k * 4), scratch(finalize_scratch_bytes(shape));
  check(cudaMemset(c.data(), 0, c.bytes()), "clearing a test buffer");
  const std::int64_t marked = layout == Layout::kNDHWC ? elements - 1 : k * positions - 1;
  upload(c.data() + marked * 2, {1024.0},
         DType::kBFloat16);  // channel k - 1, the last position, in either layout
  const ActivationParams before{.kind = rectifier};
  launch_activation_moments({.shape = shape,
                             .dtype = DType::kBFloat16,
                             .y_dtype = DType::kBFloat16,
                             .layout = layout,
                             .before = before,
                             .c = c.data(),
                             .part = part.data()},
                            nullptr);
  launch_group_norm_finalize(
      {shape, DType::kBFloat16, part.data(), nullptr, nullptr, 1e-5, scratch.data(), table.data()}, nullptr);
  char* to = in_place ? c.data() : y.data();
  launch_group_norm_normalize({.shape = shape,
                               .a_dtype = DType::kBFloat16,
                               .y_dtype = DType::kBFloat16,
                               .a_layout = layout,
                               .y_layout = y_layout,
                               .before = before,
                               .a = c.data(),
                               .table = table.data(),
                               .y = to},
                              nullptr);
  const double mean = 1024.0 / positions, variance = 1024.0 * mean - mean * mean;
  const double high = (1024 - mean) / std::sqrt(variance + 1e-5), low = -mean / std::sqrt(variance + 1e-5);
  const std::string what =
      std::string("large, ") + name(layout) + " to " + name(y_layout) + ", " + name(rectifier);
  expect(std::fabs(download(to + (elements - 1) * 2, 1, DType::kBFloat16)[0] / high - 1) < 0.01,
         what + ", last");
  const std::int64_t last_but_one = y_layout == Layout::kNDHWC ? elements - 1 - k : elements - 2;
  expect(std::fabs(download(to + last_but_one * 2, 1, DType::kBFloat16)[0] / low - 1) < 0.01,
         what + ", last but one");
  expect(download(to, 1, DType::kBFloat16)[0] == 0, what + ", first");
}

struct Types {
  DType c, y;
};
constexpr Types kTypes[] = {{DType::kFloat32, DType::kFloat32},  {DType::kBFloat16, DType::kBFloat16},
                            {DType::kFloat16, DType::kFloat16},  {DType::kFloat64, DType::kFloat64},
                            {DType::kBFloat16, DType::kFloat32}, {DType::kFloat16, DType::kFloat32}};
constexpr Layout kLayouts[] = {Layout::kNDHWC, Layout::kNCDHW};
constexpr Activation kActivations[] = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                       Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kPrelu};
struct Shape {
  std::int64_t n, k, positions, num_groups;
};
constexpr Shape kShapes[] = {{2, 16, 60, 4},  {3, 64, 264, 8},   {1, 128, 129, 1}, {2, 30, 77, 6},
                             {1, 7, 515, 7},  {2, 3, 1, 3},      {1, 1, 2053, 1},  {2, 40, 136, 8},
                             {1, 260, 67, 4}, {2, 20, 515, 5},   {2, 100, 77, 20}, {3, 2, 300, 2},
                             {5, 9, 33, 3},   {1, 136, 301, 17}, {1, 2056, 9, 1},  {2, 1031, 2, 1}};

/// ReLU before the norm and what the SM90 kernel's epilogue left, on every shape.
void run_relu_cases() {
  int turn = 0;
  for (const Shape& s : kShapes) {
    for (const Types& t : kTypes) {
      for (const Layout from : kLayouts) {
        for (const Layout to : kLayouts) {
          ++turn;
          Case c{s.n, s.k, s.positions, s.num_groups, t.c, t.y, from, to};
          const bool is_due = turn % 3 != 0;
          c.before = is_due ? Activation::kRelu : Activation::kNone;
          c.has_bias = is_due && turn % 11 != 0;
          c.affine = turn % 4 != 1;
          c.tile_positions = turn % 5 == 0 ? 19 : 0;
          c.misalign = turn % 7 == 0 ? 1 : 0;
          run_case(c);
        }
      }
    }
  }
}

/// Every activation before the normalization, after it, and without one; every pair of layouts and types.
void run_tail_cases() {
  int turn = 0;
  for (const Activation activation : kActivations) {
    for (int place = 0; place < 3; ++place) {
      for (const Types& t : kTypes) {
        for (const Layout from : kLayouts) {
          for (const Layout to : kLayouts) {
            // Two cases each, whose shapes and other arguments drift through all combinations.
            for (int i = 0; i < 2; ++i) {
              ++turn;
              const Shape& s = kShapes[turn * 7 / 3 % std::size(kShapes)];
              Case c{s.n, s.k, s.positions, s.num_groups, t.c, t.y, from, to};
              c.before = place == 1 ? Activation::kNone : activation;
              c.after = place == 1 ? activation : Activation::kNone;
              c.norm = place != 2;
              c.parameter = activation == Activation::kElu ? 1.5 : 0.01;
              c.one_slope = turn % 5 < 2;
              c.has_bias = turn % 3 != 0;
              c.has_skip = turn % 4 < 2;
              c.affine = turn % 7 != 1;
              c.tile_positions = turn % 11 == 0 ? 19 : 0;
              c.misalign = turn % 13 == 0 ? 1 : 0;
              run_case(c);
            }
          }
        }
      }
    }
  }
}

/// NaN and Inf as PyTorch has them; and what the moments see is what normalize sees.
void run_value_cases() {
  for (const Activation activation : kActivations) {
    for (const Layout from : kLayouts) {
      for (const Layout to : kLayouts) {
        Case c{2, 8, 300, 2, DType::kFloat32, DType::kFloat32, from, to};
        c.parameter = 0.5;
        for (const double special : {std::nan(""), double(INFINITY), -double(INFINITY)}) {
          c.special = special;
          c.before = activation, c.after = Activation::kNone, c.norm = true;
          run_case(c);
          c.norm = false;
          run_case(c);
          c.before = Activation::kNone, c.after = activation, c.norm = true;
          run_case(c);
        }
        c = {2, 24, 77, 2, DType::kFloat32, DType::kFloat32, from, to};
        c.before = activation, c.parameter = 0.3, c.norm = false, c.has_skip = true, c.tile_positions = 1;
        run_same_value(c);
        c.dtype = DType::kBFloat16;
        run_same_value(c);
        c.dtype = c.y_dtype = DType::kFloat64;
        run_same_value(c);
      }
    }
  }
}

/// What a launch refuses.
void run_refusals() {
  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const GroupNormShape shape{1, 8, 8, 1, 8, 1};
  const ActivationParams relu{.kind = Activation::kRelu}, prelu{.kind = Activation::kPrelu};
  const auto normalize = [&](const NormalizeParams& params) {
    return refused([&] { launch_group_norm_normalize(params, nullptr); });
  };
  expect(normalize({.shape = shape, .before = relu, .after = relu}), "two activations are refused");
  expect(normalize({.shape = shape, .after = prelu}), "prelu without slopes is refused");
  expect(normalize({.shape = shape, .y_dtype = DType::kFloat64}), "float64 from float32 is refused");
  expect(refused([&] { launch_activation_moments({.shape = shape, .y_dtype = DType::kFloat64}, nullptr); }),
         "slopes in float64 beside float32 are refused");
  const std::int8_t step = 0;
  const std::int32_t moment = 0;
  const NormalizeParams steps{
      .shape = shape, .a_layout = Layout::kNDHWC, .table = &step, .steps = &step, .moment_of = &moment};
  for (const auto change :
       {+[](NormalizeParams& p) { p.before.kind = Activation::kRelu; },
        +[](NormalizeParams& p) { p.bias = p.table; }, +[](NormalizeParams& p) { p.skip = p.table; },
        +[](NormalizeParams& p) { p.table = nullptr; }}) {
    NormalizeParams changed = steps;
    change(changed);
    expect(normalize(changed), "steps with something due are refused");
  }
}

void run_cases() {
  run_relu_cases();
  run_tail_cases();
  run_value_cases();
  run_refusals();
  for (const Layout from : kLayouts) {
    for (const Layout to : kLayouts) {
      // |mean| >> std; more rows than a grid has in y; more than one tile per
      // block.
      run_case({.n = 1,
                .k = 8,
                .positions = 2000,
                .num_groups = 2,
                .layout = from,
                .y_layout = to,
                .bias_mean = 1e4});
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
  run_steps_cases();
  run_finalize(1, 8, 20000, 1, DType::kFloat32);
  run_finalize(1, 8, 20000, 1, DType::kFloat64);
  run_finalize(2, 768, 300, 3, DType::kFloat32);
  run_finalize(16, 128, 154, 8, DType::kBFloat16);
  run_finalize(1, 4096, 3, 1, DType::kFloat16);
  // A warp each: of the last block one has a group; of 256 partials, and of more, which a block merges.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    run_finalize(40, 96, 5, 32, dtype);
    run_finalize(3, 6, 40, 3, dtype);
    run_finalize(3, 12, 64, 3, dtype);
    run_finalize(3, 12, 65, 3, dtype);
    run_finalize(1, 1, 1, 1, dtype);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  const bool large = argc > 1 && std::strcmp(argv[1], "--large") == 0;
  try {
    run_cases();
    if (large) {
      for (const Layout from : {Layout::kNDHWC, Layout::kNCDHW}) {
        for (const Activation rectifier : {Activation::kRelu, Activation::kLeakyRelu}) {
          run_large(from, Layout::kNDHWC, rectifier);
          run_large(from, Layout::kNCDHW, rectifier);
        }
      }
    }
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("group_norm: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
