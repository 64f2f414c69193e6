// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks group_norm_backward against a reference in double on the host. Plain CUDA, no torch.
///
///   test_group_norm_backward          seconds, also under compute-sanitizer
///   test_group_norm_backward --time   medians of large shapes instead, L2 flushed before each run
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
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
#include "cuda/group_norm/group_norm_backward.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"
#include "group_norm_backward_arena.hpp"
#include "group_norm_backward_reference.hpp"
#include "split_rows.cuh"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

/// How far `got` is off, in units of what is allowed; values that are not finite need only stay so.
double excess(double got, double want, double slack) {
  if (!std::isfinite(want)) return std::isfinite(got) ? INFINITY : 0;
  const double off = std::fabs(got - want);
  return off == 0 ? 0 : std::isnan(off) ? INFINITY : off / slack;
}

/// Smallest step of a dtype, halved: what is lost below its normal numbers.
double smallest(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-149;
}

/// grad_c as stored, [n*positions,grad_c_pitch].
std::vector<double> download_grad_c(const BackwardCase& c, const Arena& arena) {
  const std::int64_t count = c.n * c.positions * arena.grad_c_pitch;
  if (!c.split) return download(arena.grad_c_memory(), count, arena.grad_c_dtype);
  return tests::joined_rows(download_bytes(arena.grad_c_memory(), count * 4), arena.grad_c_pitch);
}

void check_grad_c(const BackwardCase& c, const BackwardReference& ref, const Arena& arena) {
  const std::int64_t rows = c.n * c.positions;
  const std::vector<double> got = download_grad_c(c, arena);
  const double roundoff = c.split ? 0x1p-23 : unit_roundoff(arena.grad_c_dtype);
  const double step = smallest(c.split ? DType::kFloat16 : arena.grad_c_dtype);
  int exponent = 0;
  if (c.scaled) {
    std::int32_t unscale;
    std::memcpy(&unscale, download_bytes(arena.unscale.data(), 4).data(), 4);
    exponent = unscale;
    int reach = 15;
    if (ref.bound > 0) std::frexp(ref.bound, &reach);
    reach = std::max(reach, -148);
    expect(
        std::abs(exponent - (reach - 15)) <= (ref.bound > 0 ? 1 : 0),
        "unscale " + std::to_string(exponent) + ", not " + std::to_string(reach - 15) + ": " + describe(c));
  }
  double worst = 0, largest = 0, error = 0, size = 0;
  std::int64_t worst_at = 0, not_zero = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t k = 0; k < arena.grad_c_pitch; ++k) {
      const double stored = got[row * arena.grad_c_pitch + k];
      if (k >= c.k) {
        not_zero += stored != 0;
        continue;
      }
      if (std::isfinite(stored)) largest = std::max(largest, std::fabs(stored));
      const std::int64_t i = row * c.k + k;
      const double want = ref.grad_c[i];
      const double slack =
          ref.grad_c_slack[i] + 1.01 * roundoff * std::fabs(want) + std::ldexp(step, exponent);
      error += std::pow(std::ldexp(stored, exponent) - want, 2), size += want * want;
      // float16 that is not scaled may overflow, as PyTorch's does.
      const bool overflow = arena.grad_c_dtype == DType::kFloat16 && !c.scaled && std::fabs(want) > 65500;
      const double off = overflow ? 0 : excess(std::ldexp(stored, exponent), want, slack);
      if (off > worst) worst = off, worst_at = i;
    }
  }
  expect(worst <= 1, "grad_c, " + std::to_string(worst) + " times the tolerance at " +
                         std::to_string(worst_at) + ", want " + std::to_string(ref.grad_c[worst_at]) + ": " +
                         describe(c));
  expect(!c.uneven || error <= size * 0x1p-42,
         "grad_c's rms error, " + std::to_string(std::sqrt(error / size)) + " of its rms: " + describe(c));
  expect(not_zero == 0, "grad_c is not zero behind its channels: " + describe(c));
  expect(!c.scaled || largest <= 32768, "scaled grad_c leaves its range: " + describe(c));
}

void check_parameters(const BackwardCase& c, const BackwardReference& ref, const Arena& arena) {
  const auto compare = [&](const char* what, const Buffer& buffer, const std::vector<double>& want,
                           const std::vector<double>& slack) {
    const std::vector<double> got = download(buffer.data(), static_cast<std::int64_t>(want.size()), c.dtype);
    double worst = 0;
    for (std::size_t k = 0; k < want.size(); ++k) {
      if (c.dtype == DType::kFloat16 && std::fabs(want[k]) > 65500) continue;
      const double allowed =
          slack[k] + 1.01 * unit_roundoff(c.dtype) * std::fabs(want[k]) + smallest(c.dtype);
      worst = std::max(worst, excess(got[k], want[k], allowed));
    }
    expect(worst <= 1,
           std::string(what) + ", " + std::to_string(worst) + " times the tolerance: " + describe(c));
  };
  compare("grad_gamma", arena.grad_gamma, ref.grad_gamma, ref.gamma_slack);
  compare("grad_beta", arena.grad_beta, ref.grad_beta, ref.beta_slack);
  compare("grad_bias", arena.grad_bias, ref.grad_bias, ref.bias_slack);
  compare("grad_slopes", arena.grad_slopes, ref.grad_slopes, ref.slopes_slack);
}

void run_case(const BackwardCase& c) {
  const BackwardReference ref = make_reference(c);
  Arena arena(c);
  arena.fill(c, ref);
  launch_group_norm_backward(arena.params, nullptr);
  const std::vector<char> once = arena.outputs();
  if (!c.sums_only) check_grad_c(c, ref, arena);
  check_parameters(c, ref, arena);

  arena.fill(c, ref);  // of which a may have been written over
  check(cudaMemset(arena.grad_c.data(), 0xA5, arena.grad_c.bytes()), "filling a test buffer");
  check(cudaMemset(arena.scratch.data(), 0xA5, arena.scratch.bytes()), "filling a test buffer");
  check(cudaMemset(arena.scratch.data(), 0, group_norm_backward_counter_bytes(arena.params)), "clearing");
  arena.params.counters_cleared = true;
  launch_group_norm_backward(arena.params, nullptr);
  expect(once == arena.outputs(), "the same bits twice: " + describe(c));
  expect(arena.pads_intact(), "wrote outside a buffer: " + describe(c));
}

struct Kind {
  DType dtype;
  bool steps, scaled, split = false;
};
constexpr Kind kKinds[] = {{DType::kBFloat16, false, false},    {DType::kFloat16, false, false},
                           {DType::kFloat32, false, false},     {DType::kFloat32, false, true},
                           {DType::kFloat32, true, false},      {DType::kFloat32, true, true},
                           {DType::kFloat32, false, true, true}};
constexpr Layout kLayouts[] = {Layout::kNDHWC, Layout::kNCDHW};

void run_shapes() {
  struct Shape {
    std::int64_t n, k, positions, num_groups;
  };
  const Shape shapes[] = {{2, 16, 60, 4},    {3, 64, 264, 8},  {1, 128, 129, 1},  {2, 30, 77, 6},
                          {1, 7, 515, 7},    {2, 3, 1, 3},     {1, 1, 2053, 1},   {5, 40, 136, 8},
                          {1, 260, 67, 4},   {2, 20, 515, 5},  {2, 100, 77, 20},  {300, 24, 5, 3},
                          {2, 128, 4096, 8}, {3, 2056, 9, 1},  {2, 1031, 2, 1},   {1, 64, 20000, 64},
                          {40, 130, 40, 2},  {2, 512, 300, 2}, {2, 16, 20000, 4}, {1, 32, 4096, 8},
                          {2, 48, 5003, 6}};
  int turn = 0;
  for (const Shape& s : shapes) {
    for (const Kind& kind : kKinds) {
      for (const Layout layout : kLayouts) {
        ++turn;
        BackwardCase c{s.n, s.k, s.positions, s.num_groups, kind.dtype, kind.steps, kind.scaled, layout};
        c.gamma = turn % 5 == 0 ? Gamma::kNull : turn % 5 == 1 ? Gamma::kSomeZero : Gamma::kRandom;
        c.misalign = turn % 7 == 0 ? 1 : 0;
        c.more_pitch = turn % 3 == 0 ? 8 : 0;
        c.a_mean = turn % 4 == 0 ? 1.0 : 0.0;
        c.sums_only = turn % 11 == 0 && !kind.scaled;
        c.split = kind.split, c.in_place = turn % 2 == 0;
        run_case(c);
        c.in_place = !c.in_place;
        if (c.split) run_case(c);
      }
    }
  }
}

/// Channels whose gradients are far apart do not cost the others' accuracy, nor the tensor's.
void run_uneven() {
  for (const std::int64_t k : {24, 64, 192}) {
    for (const Layout layout : kLayouts) {
      BackwardCase c{2, k, 1001, 4, DType::kFloat32, false, true, layout};
      c.split = c.in_place = c.uneven = true;
      run_case(c);
    }
  }
}

/// Sums of 512 values per thread: added up one after the other, they would be off by 3600 units of 2^-24
/// here.
void run_sum_accuracy() {
  for (const Layout layout : kLayouts) {
    for (const Activation before : {Activation::kRelu, Activation::kNone}) {
      BackwardCase c{1, 64, 16384, 4, DType::kFloat32};
      c.layout = layout, c.before = before;
      const BackwardReference ref = make_reference(c);
      Arena arena(c);
      arena.params.sm_count = 1;
      arena.fill(c, ref);
      launch_group_norm_backward(arena.params, nullptr);
      const std::vector<double> got = download(arena.grad_beta.data(), c.k, c.dtype);
      double squares = 0;
      for (std::int64_t k = 0; k < c.k; ++k) squares += std::pow(got[k] - ref.grad_beta[k], 2);
      const double error = std::ldexp(std::sqrt(squares / double(c.k)), 24);
      expect(error <= 2600, "grad_beta is off by " + std::to_string(error) + " units: " + describe(c));
    }
  }
}

void run_special() {
  const std::int64_t n = 3, k = 24, positions = 301, groups = 3;
  for (const Layout layout : kLayouts) {
    for (const Kind& kind : kKinds) {
      BackwardCase c{n, k, positions, groups, kind.dtype, kind.steps, kind.scaled, layout};
      c.split = c.in_place = kind.split;
      BackwardCase special = c;
      special.special = std::nan("");
      run_case(special);
      special.special = -INFINITY;
      run_case(special);
      BackwardCase far = c;
      far.a_mean = kind.dtype == DType::kFloat32 && !kind.steps ? 1e4 : kind.steps ? 1.2 : 30;
      run_case(far);
      BackwardCase zero = c;
      zero.grad_size = 0;
      run_case(zero);
      if (kind.dtype == DType::kFloat16) continue;
      for (const double size : {1e-8, 1e-30, 1e30, 1e-37, 1e-42}) {
        BackwardCase sized = c;
        sized.grad_size = size;
        run_case(sized);
      }
    }
  }
}

constexpr Activation kAfters[] = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                  Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                  Activation::kGeluTanh, Activation::kPrelu};

/// Takes the `turn`-th way of each argument that a tail has.
void set_tail(BackwardCase& c, Activation before, Activation after, int turn) {
  c.before = before, c.after = after;
  c.parameter = after == Activation::kLeakyRelu ? 0.01 : after == Activation::kElu ? 0.7 : 0;
  if (after == Activation::kPrelu) c.slopes = turn % 2 == 0 ? 1 : c.k;
  c.beta = turn % 3 != 0;
  c.signed_steps = c.steps && (before == Activation::kNone) == (turn % 4 != 0);
}

void run_tails() {
  struct Shape {
    std::int64_t n, k, positions, num_groups;
  };
  const Shape shapes[] = {{1, 24, 301, 3}, {2, 7, 515, 7},  {3, 40, 136, 8}, {2, 260, 67, 4},
                          {3, 13, 1, 13},  {3, 1, 2053, 1}, {1, 31, 77, 1},  {2, 64, 264, 8},
                          {2, 1031, 2, 1}, {40, 6, 40, 2},  {1, 48, 4096, 6}};
  int turn = 0;
  for (const Activation before : {Activation::kNone, Activation::kRelu}) {
    for (const Activation after : kAfters) {
      for (const Kind& kind : kKinds) {
        for (const Layout layout : kLayouts) {
          for (int repeat = 0; repeat < 2; ++repeat) {
            ++turn;
            const Shape& s = shapes[turn % std::size(shapes)];
            BackwardCase c{s.n, s.k, s.positions, s.num_groups, kind.dtype, kind.steps, kind.scaled, layout};
            c.gamma = turn % 5 == 0 ? Gamma::kNull : turn % 5 == 1 ? Gamma::kSomeZero : Gamma::kRandom;
            c.misalign = turn % 7 == 0 ? 1 : 0;
            c.more_pitch = turn % 3 == 1 ? 8 : 0;
            c.a_mean = turn % 6 == 0 ? 1.0 : 0.0;
            c.sums_only = turn % 11 == 0 && !kind.scaled;
            c.split = kind.split, c.in_place = turn % 4 < 2;
            set_tail(c, before, after, turn / 2);
            run_case(c);
          }
        }
      }
    }
  }
}

/// Gradients that are not finite, or as small or large as float goes, through each activation.
void run_special_tails() {
  int turn = 0;
  for (const Activation after : kAfters) {
    for (const Kind& kind : kKinds) {
      BackwardCase c{3, 24, 301, 3, kind.dtype, kind.steps, kind.scaled, kLayouts[turn % 2]};
      c.split = c.in_place = kind.split;
      set_tail(c, Activation::kNone, after, ++turn);
      for (const double special : {std::nan(""), -HUGE_VAL}) {
        BackwardCase one = c;
        one.special = special;
        run_case(one);
      }
      BackwardCase far = c;
      far.a_mean = kind.dtype == DType::kFloat32 && !kind.steps ? 1e4 : kind.steps ? 0.5 : -30;
      run_case(far);
      if (kind.dtype == DType::kFloat16) continue;
      for (const double size : {0.0, 1e-30, 1e30, 1e-42}) {
        BackwardCase sized = c;
        sized.grad_size = size;
        run_case(sized);
      }
    }
  }
}

/// No samples: the parameters' gradients are 0.
void run_empty() {
  BackwardCase c{1, 16, 60, 4, DType::kFloat32};
  set_tail(c, Activation::kNone, Activation::kPrelu, 1);
  for (const std::int64_t slopes : {std::int64_t{1}, c.k}) {
    c.slopes = slopes;
    const Arena arena(c);
    GroupNormBackwardParams params = arena.params;
    params.n = 0;
    launch_group_norm_backward(params, nullptr);
    for (const Buffer* const buffer :
         {&arena.grad_gamma, &arena.grad_beta, &arena.grad_bias, &arena.grad_slopes}) {
      const std::vector<char> bytes = download_bytes(buffer->data(), buffer->bytes());
      expect(std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; }),
             "gradients of no samples are 0: " + describe(c));
    }
    expect(arena.pads_intact(), "wrote outside a buffer without samples: " + describe(c));
  }
}

/// A launch that must be refused before anything runs.
void run_refusals() {
  const BackwardCase c{2, 16, 60, 4, DType::kFloat32, false, true};
  const auto refused = [&](auto&& change, const char* what) {
    Arena arena(c);
    change(arena.params);
    bool thrown = false;
    try {
      launch_group_norm_backward(arena.params, nullptr);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    expect(thrown, std::string("must be refused: ") + what);
  };
  refused([](auto& params) { params.dtype = DType::kFloat64; }, "float64");
  refused([](auto& params) { params.dtype = DType::kBFloat16; }, "scaled bfloat16");
  refused([](auto& params) { params.unscale = nullptr; }, "scaled without unscale");
  refused([](auto& params) { params.operand = GradOperand::kSplitFloat16, params.unscale = nullptr; },
          "split without unscale");
  refused([](auto& params) { params.grad_c = const_cast<void*>(params.a); }, "16 bits over 32");
  refused([](auto& params) { params.a_pitch = 20; }, "a_pitch 20");
  refused([](auto& params) { params.grad_c_pitch = 8; }, "grad_c_pitch below k");
  refused([](auto& params) { params.num_groups = 3; }, "3 groups of 16 channels");
  refused([](auto& params) { params.a = static_cast<const char*>(params.a) + 4; }, "misaligned a");
  refused([](auto& params) { params.sm_count = 0; }, "no multiprocessors");
  refused([](auto& params) { params.before = Activation::kSilu; }, "silu before the normalization");
  refused([](auto& params) { params.signed_steps = true; }, "signed steps without steps");
  refused([](auto& params) { params.after.kind = Activation::kPrelu; }, "prelu without slopes");
  refused([](auto& params) { params.grad_slopes = params.grad_bias; }, "slopes' gradient without prelu");
}

/// Median milliseconds of a case with data that do not matter.
void time_case(const char* what, const BackwardCase& c) {
  Arena arena(c);
  check(cudaMemset(arena.grad_y.data(), 0x3c, arena.grad_y.bytes()), "filling");
  check(cudaMemset(arena.a.data(), 0x3c, arena.a.bytes()), "filling");
  check(cudaMemset(arena.steps.data(), 0, arena.steps.bytes()), "filling");
  check(cudaMemset(arena.moment_of.data(), 0, arena.moment_of.bytes()), "filling");
  check(cudaMemset(arena.table.data(), 0x3c, arena.table.bytes()), "filling");
  check(cudaMemset(arena.gamma.data(), 0x3c, arena.gamma.bytes()), "filling");
  check(cudaMemset(arena.beta.data(), 0x3c, arena.beta.bytes()), "filling");
  check(cudaMemset(arena.slopes.data(), 0x3c, arena.slopes.bytes()), "filling");
  arena.params.counters_cleared = true;
  Buffer flush(256 << 20);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  std::vector<float> times;
  for (int i = 0; i < 15; ++i) {
    check(cudaMemsetAsync(arena.scratch.data(), 0, group_norm_backward_counter_bytes(arena.params)),
          "clearing");
    check(cudaMemsetAsync(flush.data(), i, flush.bytes()), "flushing L2");
    check(cudaEventRecord(begin), "recording");
    launch_group_norm_backward(arena.params, nullptr);
    check(cudaEventRecord(end), "recording");
    check(cudaEventSynchronize(end), "waiting for the kernel");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "reading a time");
    times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  const double moved = arena.grad_y.bytes() + arena.a.bytes() + (c.sums_only ? 0 : arena.grad_c.bytes());
  std::printf("%-44s %8.4f ms  min %8.4f  %6.2f TB/s of single reads and writes\n", what,
              times[times.size() / 2], times[0], moved / times[times.size() / 2] * 1e-9);
  check(cudaEventDestroy(begin), "destroying an event");
  check(cudaEventDestroy(end), "destroying an event");
}

void run_times() {
  constexpr DType kBF16 = DType::kBFloat16, kF32 = DType::kFloat32;
  constexpr Layout kRows = Layout::kNDHWC, kPlanes = Layout::kNCDHW;
  const std::int64_t out = 34 * 34 * 34, big = 64 * 64 * 64, huge = 96 * 96 * 96;
  time_case("16x128x34^3 bf16 NDHWC", {16, 128, out, 8, kBF16, false, false, kRows});
  for (const Activation after : kAfters) {
    BackwardCase c{16, 128, out, 8, kBF16, false, false, kRows};
    set_tail(c, Activation::kNone, after, 1);
    time_case((std::string("16x128x34^3 bf16 NDHWC, then ") + name(after)).c_str(), c);
  }
  for (const Activation after : {Activation::kNone, Activation::kRelu, Activation::kSilu}) {
    BackwardCase c{16, 128, out, 8, kF32, true, true, kPlanes};
    set_tail(c, Activation::kNone, after, 1);
    time_case((std::string("16x128x34^3 f32 steps NCDHW, then ") + name(after)).c_str(), c);
  }
  time_case("16x128x34^3 bf16 NDHWC, sums only",
            {.n = 16, .k = 128, .positions = out, .num_groups = 8, .dtype = kBF16, .sums_only = true});
  time_case("16x128x34^3 bf16 NCDHW", {16, 128, out, 8, kBF16, false, false, kPlanes});
  time_case("16x128x34^3 f32 steps NCDHW to scaled f16", {16, 128, out, 8, kF32, true, true, kPlanes});
  time_case("16x128x34^3 f32 steps NDHWC to scaled f16", {16, 128, out, 8, kF32, true, true, kRows});
  time_case("16x128x34^3 f32 NCDHW to f32", {16, 128, out, 8, kF32, false, false, kPlanes});
  for (const Layout layout : kLayouts) {
    BackwardCase c{16, 128, out, 8, kF32, false, true, layout};
    c.split = c.in_place = true;
    time_case((std::string("16x128x34^3 f32 to two f16 in place, ") + name(layout)).c_str(), c);
  }
  time_case("2x128x64^3 bf16 NDHWC", {2, 128, big, 8, kBF16, false, false, kRows});
  time_case("2x128x64^3 bf16 NCDHW", {2, 128, big, 8, kBF16, false, false, kPlanes});
  time_case("2x128x64^3 f32 steps NCDHW to scaled f16", {2, 128, big, 8, kF32, true, true, kPlanes});
  time_case("1x128x96^3 bf16 NDHWC", {1, 128, huge, 8, kBF16, false, false, kRows});
  time_case("1x128x96^3 f32 steps NCDHW to scaled f16", {1, 128, huge, 8, kF32, true, true, kPlanes});
  time_case("16x256x18^3 bf16 NDHWC", {16, 256, 18 * 18 * 18, 8, kBF16, false, false, kRows});
  time_case("16x128x35^3 bf16 NCDHW, odd rows", {16, 128, 35 * 35 * 35, 8, kBF16, false, false, kPlanes});
  // As many values of few channels: planes of whole 16 bytes, and of single elements.
  for (const std::int64_t k : {8, 16, 24, 32, 48, 64, 96, 128}) {
    for (const std::int64_t more : {0, 1}) {
      const std::int64_t positions = (1 << 24) / k / 8 * 8 + more;
      const std::string what = "1x" + std::to_string(k) + "x" + std::to_string(positions);
      time_case((what + " bf16 NCDHW").c_str(), {1, k, positions, k, kBF16, false, false, kPlanes});
      time_case((what + " f32 steps NCDHW to scaled f16").c_str(),
                {1, k, positions, k, kF32, true, true, kPlanes});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(80)) return upconv3d::tests::kSkipped;
  try {
    if (argc > 1 && std::strcmp(argv[1], "--time") == 0) {
      run_times();
      return 0;
    }
    run_refusals();
    run_shapes();
    run_uneven();
    run_sum_accuracy();
    run_special();
    run_tails();
    run_special_tails();
    run_empty();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("group_norm_backward: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
