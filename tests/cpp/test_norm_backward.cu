// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks run_library_tail_backward, moments included, with a norm and without one, against a reference in
/// double on the host. Plain CUDA, no torch.
///
///   test_norm_backward          seconds, also under compute-sanitizer
///   test_norm_backward --time   medians of large shapes instead
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "comparisons.hpp"
#include "cuda/forward.hpp"
#include "cuda/library_backward.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"
#include "norm_backward_reference.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

Device this_device() {
  Device device = query_device(0);
  device.forced_plan = "library";
  return device;
}

/// A convolution whose output has the case's sizes: of one input channel, kernel and stride 1.
Problem problem_of(const ConvCase& c) {
  Problem p;
  p.n = c.n, p.c = 1, p.k = c.k, p.in = {1, 1, c.positions}, p.kernel = {1, 1, 1};
  p.x_layout = p.y_layout = c.layout;
  p.num_groups = c.num_groups, p.eps = ConvReference::kEps, p.dtype = c.dtype, p.has_bias = c.bias;
  const bool first = c.before != Activation::kNone || c.after == Activation::kNone;
  p.tail.norm = c.norm;
  p.tail.order = first ? Order::kActNorm : Order::kNormAct;
  p.tail.activation = first ? c.before : c.after;
  p.tail.parameter = c.parameter, p.tail.slopes = c.slopes;
  return p;
}

/// [n][k][position] as it lies in the case's layout.
std::vector<double> in_layout(const ConvCase& c, const std::vector<double>& planes) {
  if (c.layout == Layout::kNCDHW) return planes;
  std::vector<double> rows(planes.size());
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const std::int64_t plane = i / c.positions, p = i % c.positions;
    rows[(plane / c.k * c.positions + p) * c.k + plane % c.k] = planes[i];
  }
  return rows;
}

/// Device memory of a case, and the call that it makes.
struct Arena {
  ConvCase c;
  Problem problem;
  Device device;
  Plan forward;
  BackwardPlan plan;
  BackwardCall call;
  std::int64_t offset;  // bytes by which the large tensors are off a 16-byte boundary
  Buffer conv, grad_y, grad_c, bias, gamma, beta, slopes, grad_bias, grad_gamma, grad_beta, grad_slopes,
      workspace;
  BackwardTensors tensors;

  static Plan plan_of(const Problem& problem, const Device& device) {
    Plan plan = select_training_plan(problem, device);
    complete_plan(problem, device, plan);
    return plan;
  }

  explicit Arena(const ConvCase& given)
      : c(given),
        problem(problem_of(c)),
        device(this_device()),
        forward(plan_of(problem, device)),
        plan(library_backward_plan(problem, {true, true, true, true, true, true})),
        call{problem, forward, plan, device},
        offset(c.misalign * size_of(c.dtype)),
        conv(c.n * c.k * c.positions * size_of(c.dtype) + offset),
        grad_y(conv.bytes()),
        grad_c(conv.bytes()),
        bias(c.k * size_of(c.dtype)),
        gamma(bias.bytes()),
        beta(bias.bytes()),
        slopes(c.slopes * size_of(c.dtype)),
        grad_bias(bias.bytes()),
        grad_gamma(bias.bytes()),
        grad_beta(bias.bytes()),
        grad_slopes(slopes.bytes()),
        workspace(library_tail_backward_workspace_bytes(call)) {
    tensors.saved = conv.data() + offset;
    tensors.grad_y = grad_y.data() + offset;
    if (!c.sums_only) tensors.grad_c = (c.in_place ? conv : grad_c).data() + offset;
    if (c.bias && (c.norm || !begins_with_result(problem.tail))) tensors.bias = bias.data();
    if (c.affine) tensors.gamma = gamma.data(), tensors.beta = beta.data();
    if (c.slopes > 0) tensors.slopes = slopes.data(), tensors.grad_slopes = grad_slopes.data();
    tensors.grad_bias = grad_bias.data();
    tensors.grad_gamma = grad_gamma.data();
    tensors.grad_beta = grad_beta.data();
    tensors.workspace = workspace.data();
  }

  void fill(const ConvReference& ref) const {
    upload(conv.data() + offset, in_layout(c, ref.c), c.dtype);
    upload(grad_y.data() + offset, in_layout(c, ref.grad_y), c.dtype);
    upload(bias.data(), ref.bias, c.dtype);
    upload(gamma.data(), ref.gamma, c.dtype);
    upload(beta.data(), ref.beta, c.dtype);
    upload(slopes.data(), ref.slopes, c.dtype);
  }

  void run() const { run_library_tail_backward(call, tensors, nullptr); }

  std::vector<const Buffer*> outputs() const {
    std::vector<const Buffer*> all = {&grad_bias, &grad_gamma, &grad_beta, &grad_slopes};
    if (!c.sums_only) all.push_back(c.in_place ? &conv : &grad_c);
    return all;
  }

  std::vector<char> output_bytes() const {
    std::vector<char> all;
    for (const Buffer* const buffer : outputs()) {
      const std::vector<char> bytes = download_bytes(buffer->data(), buffer->bytes());
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }

  bool pads_intact() const {
    const Buffer* const all[] = {&conv,   &grad_y,    &grad_c,     &bias,      &gamma,     &beta,
                                 &slopes, &grad_bias, &grad_gamma, &grad_beta, &workspace, &grad_slopes};
    return std::all_of(std::begin(all), std::end(all), [](const Buffer* b) { return b->pads_intact(); });
  }
};

/// Smallest step of a dtype, halved: what is lost below its normal numbers.
double smallest(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-149;
}

void compare(const ConvCase& c, const char* what, const char* memory, const Sized& want) {
  const auto count = static_cast<std::int64_t>(want.value.size());
  const std::vector<double> got = download(memory, count, c.dtype);
  const Activation own = c.before == Activation::kNone ? c.after : c.before;
  // Exponentials are right to some of float's last bits, and what they make of v to as many more.
  // The mean that the moments give is rounded like the values that it is of.
  const double slack = (is_piecewise_linear(own) ? 12 : 64) * 0x1p-24 * (1 + std::fabs(c.mean) / 100);
  double worst = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(want.value[i])) {
      if (std::isfinite(got[i])) worst = INFINITY;
      continue;
    }
    if (c.dtype == DType::kFloat16 && std::fabs(want.value[i]) > 65500) continue;
    const double allowed = slack * want.size[i] + 1.01 * unit_roundoff(c.dtype) * std::fabs(want.value[i]) +
                           smallest(c.dtype) + static_cast<double>(c.positions) * 0x1p-147;
    const double off = std::fabs(got[i] - want.value[i]) / allowed;
    worst = std::isnan(off) ? INFINITY : std::max(worst, off);
  }
  expect(worst <= 1,
         std::string(what) + ", " + std::to_string(worst) + " times the tolerance: " + describe(c));
}

void run_case(const ConvCase& c) {
  const ConvReference ref(c);
  const Arena arena(c);
  expect(arena.forward.keeps_conv, "the plan keeps the convolution: " + describe(c));
  arena.fill(ref);
  arena.run();
  const std::vector<char> once = arena.output_bytes();
  if (!c.sums_only) {
    Sized rows(0);
    rows.value = in_layout(c, ref.grad_c.value), rows.size = in_layout(c, ref.grad_c.size);
    compare(c, "grad_c", (c.in_place ? arena.conv : arena.grad_c).data() + arena.offset, rows);
  }
  if (c.norm) {
    compare(c, "grad_gamma", arena.grad_gamma.data(), ref.grad_gamma);
    compare(c, "grad_beta", arena.grad_beta.data(), ref.grad_beta);
  }
  compare(c, "grad_bias", arena.grad_bias.data(), ref.grad_bias);
  compare(c, "grad_slopes", arena.grad_slopes.data(), ref.grad_slopes);
  arena.fill(ref);
  check(cudaMemset(arena.workspace.data(), 0xA5, arena.workspace.bytes()), "filling a test buffer");
  arena.run();
  expect(once == arena.output_bytes(), "the same bits twice: " + describe(c));
  expect(arena.pads_intact(), "wrote outside a buffer: " + describe(c));
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr Activation kActivations[] = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                       Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kPrelu};

/// Takes the `turn`-th way of each argument that a tail has.
void set_tail(ConvCase& c, bool first, Activation activation, int turn) {
  c.before = first ? activation : Activation::kNone;
  c.after = first ? Activation::kNone : activation;
  c.parameter = activation == Activation::kLeakyRelu ? 0.01 : activation == Activation::kElu ? 0.7 : 0;
  c.slopes = activation == Activation::kPrelu ? (turn % 2 == 0 ? 1 : c.k) : 0;
}

void run_shapes() {
  struct Shape {
    std::int64_t n, k, positions, num_groups;
  };
  const Shape shapes[] = {{2, 2, 40000, 2},  {2, 3, 1, 3},    {1, 1, 2053, 1}, {5, 40, 136, 8},
                          {1, 260, 67, 4},   {2, 20, 515, 5}, {300, 24, 5, 3}, {1, 64, 20000, 64},
                          {3, 2056, 9, 1},   {2, 7, 515, 7},  {40, 6, 40, 2},  {2, 512, 64, 8},
                          {1, 600, 33, 600}, {2, 16, 60, 4},  {3, 31, 77, 1},  {1, 2, 300001, 1}};
  int turn = 0;
  for (const Shape& s : shapes) {
    for (const DType dtype : kDTypes) {
      for (const bool first : {true, false}) {
        ++turn;
        ConvCase c{s.n, s.k, s.positions, s.num_groups, dtype};
        // ReLU every other time.
        set_tail(c, first, turn % 4 < 2 ? Activation::kRelu : kActivations[turn / 2 % 8], turn);
        c.bias = turn % 3 != 0, c.affine = turn % 5 != 0;
        c.in_place = turn % 4 != 1, c.sums_only = turn % 11 == 0;
        c.misalign = turn % 7 == 0 ? 1 : 0;
        run_case(c);
        c.layout = Layout::kNDHWC;
        run_case(c);
      }
    }
  }
}

void run_tails() {
  int turn = 0;
  for (const Activation activation : kActivations) {
    for (const DType dtype : kDTypes) {
      for (const bool first : {true, false}) {
        for (int repeat = 0; repeat < 2; ++repeat) {
          ++turn;
          ConvCase c{3, 24, repeat == 0 ? 301 : 2048, repeat == 0 ? 3 : 24, dtype};
          set_tail(c, first, activation, turn / 2);
          c.affine = turn % 5 != 0;
          run_case(c);
          c.layout = Layout::kNDHWC;
          run_case(c);
        }
      }
    }
  }
}

/// Means far from 0, gradients that are not finite, or as small and large as float goes.
void run_special() {
  int turn = 0;
  for (const Activation activation : kActivations) {
    for (const DType dtype : kDTypes) {
      ConvCase c{3, 24, 301, 3, dtype};
      c.layout = turn % 4 < 2 ? Layout::kNCDHW : Layout::kNDHWC;
      ++turn;
      set_tail(c, turn % 2 == 0, activation, turn);
      for (const double special : {std::nan(""), -HUGE_VAL}) {
        ConvCase one = c;
        one.special = special;
        run_case(one);
      }
      if (dtype == DType::kFloat16) continue;
      for (const double size : {0.0, 1e-8, 1e-30, 1e30}) {
        ConvCase sized = c;
        sized.grad_size = size;
        run_case(sized);
      }
    }
  }
  ConvCase far{2, 4, 5000, 2};
  far.mean = 1e4;
  run_case(far);
  far.layout = Layout::kNDHWC;
  run_case(far);
}

/// Nothing is normalized: of no activation the sum alone, since grad_c is grad_y.
void run_without_norm() {
  struct Shape {
    std::int64_t n, k, positions;
  };
  const Shape shapes[] = {{2, 2, 40000}, {2, 3, 1},    {1, 1, 2053}, {5, 40, 136},
                          {1, 260, 67},  {300, 24, 5}, {3, 2056, 9}, {1, 2, 300001}};
  int turn = 0;
  for (const Shape& s : shapes) {
    for (const Activation activation : kActivations) {
      ConvCase c{s.n, s.k, s.positions, 1, kDTypes[turn % 3]};
      ++turn;
      set_tail(c, true, activation, turn);
      c.norm = false, c.affine = false, c.bias = turn % 3 != 1;
      c.in_place = turn % 4 < 2, c.sums_only = activation == Activation::kNone || turn % 11 == 0;
      c.misalign = turn % 5 == 0 ? 1 : 0;
      run_case(c);
      c.layout = Layout::kNDHWC;
      run_case(c);
      c.special = turn % 2 == 0 ? std::nan("") : -HUGE_VAL;
      run_case(c);
    }
  }
}

void time_case(const char* what, const ConvCase& c) {
  const Arena arena(c);
  for (const Buffer* const buffer : {&arena.conv, &arena.grad_y, &arena.bias, &arena.gamma, &arena.beta}) {
    check(cudaMemset(buffer->data(), 0x3c, buffer->bytes()), "filling");
  }
  check(cudaMemset(arena.slopes.data(), 0x3c, arena.slopes.bytes()), "filling");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    check(cudaEventRecord(begin), "recording");
    arena.run();
    check(cudaEventRecord(end), "recording");
    check(cudaEventSynchronize(end), "waiting for the kernels");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "reading a time");
    times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  const double moved = 6.0 * static_cast<double>(arena.conv.bytes());  // c three times, grad_y twice, grad_c
  std::printf("%-44s %8.4f ms  min %8.4f  %6.2f TB/s\n", what, times[times.size() / 2], times[0],
              moved / times[times.size() / 2] * 1e-9);
  check(cudaEventDestroy(begin), "destroying an event");
  check(cudaEventDestroy(end), "destroying an event");
}

void run_times() {
  constexpr std::int64_t kUp = 96 * 96 * 96, kOut = 34 * 34 * 34;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string kind = std::string(name(dtype)) + ", ";
    time_case((kind + "2x2x96^3, relu, group norm").c_str(), {2, 2, kUp, 2, dtype});
    ConvCase instance{2, 2, kUp, 2, dtype};
    set_tail(instance, false, Activation::kPrelu, 0);
    time_case((kind + "2x2x96^3, instance norm, prelu").c_str(), instance);
    time_case((kind + "2x16x48^3, relu, group norm").c_str(), {2, 16, 48 * 48 * 48, 8, dtype});
    time_case((kind + "2x512x4^3, relu, group norm").c_str(), {2, 512, 64, 8, dtype});
    time_case((kind + "16x128x34^3, relu, group norm").c_str(), {16, 128, kOut, 8, dtype});
    time_case((kind + "16x128x34^3 NDHWC, relu, group norm").c_str(),
              {16, 128, kOut, 8, dtype, Layout::kNDHWC});
    time_case((kind + "2x2x96^3 NDHWC, relu, group norm").c_str(), {2, 2, kUp, 2, dtype, Layout::kNDHWC});
    for (const bool first : {true, false}) {
      ConvCase silu{16, 128, kOut, 8, dtype};
      set_tail(silu, first, Activation::kSilu, 0);
      time_case((kind + "16x128x34^3, silu " + (first ? "before" : "after")).c_str(), silu);
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
    run_shapes();
    run_tails();
    run_special();
    run_without_norm();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("norm_backward: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
