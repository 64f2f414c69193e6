// SPDX-License-Identifier: Apache-2.0
/// Checks run_grad_w on every candidate plan against a plain double-precision sum: exactly on small integers,
/// for either layout of x and of the weight, each dtype, rows that end amid chunks, scales; to the rounding
/// of the operands on normally distributed data of the headline's size. Scratch memory and results are NaN
/// before; repeated launches must give the same bits. Needs a GPU of compute capability 9.0. Exit code 0: all
/// passed. With --time it prints medians instead.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "core/channels.hpp"
#include "core/grad_w_plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_grad_w_sm90.hpp"
#include "cuda/grad_w.hpp"
#include "gpu_test.hpp"
#include "grad_w_reference.cuh"
#include "split_rows.cuh"

namespace {

using namespace upconv3d;
using cuda::check;
using tests::DeviceBuffer;

int passed = 0, failed = 0;

void report(const std::string& problem, const std::string& what) {
  problem.empty() ? ++passed : ++failed;
  if (!problem.empty() && failed <= 20) std::printf("FAILED %s: %s\n", what.c_str(), problem.c_str());
}

Device this_device() {
  Device device{.is_cuda = true, .compute_capability = 90};
  check(cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, 0),
        "asking for the SM count");
  return device;
}

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, stride, padding, output_padding = {0, 0, 0}, dilation = {1, 1, 1};
};

// A single position; tails of chunks of either operand, k-blocks across the ends of samples; strides,
// dilations, paddings and axes of one tap; more taps than wait in shared memory at once; padding that leaves
// fewer outputs than inputs; several tiles either way.
const Case kCases[] = {
    {1, 8, 8, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}},
    {2, 64, 128, {6, 6, 6}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}},
    {3, 24, 48, {5, 4, 7}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}},
    {2, 16, 100, {4, 9, 5}, {2, 3, 1}, {2, 1, 3}, {0, 1, 0}, {1, 0, 2}},
    {2, 100, 16, {5, 6, 7}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}},
    {1, 128, 136, {6, 6, 6}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}},
    {2, 8, 24, {9, 5, 6}, {3, 1, 2}, {1, 1, 1}, {1, 0, 0}, {0, 0, 1}, {2, 1, 3}},
    {1, 72, 64, {4, 5, 9}, {5, 3, 5}, {1, 1, 1}, {2, 1, 2}},
    {2, 200, 260, {3, 4, 5}, {2, 2, 3}, {1, 2, 1}, {0, 1, 1}},
    {5, 48, 8, {3, 10, 6}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}},
    {2, 1, 3, {5, 6, 7}, {3, 3, 3}, {3, 3, 3}, {2, 0, 1}, {0, 2, 0}},
    {1, 64, 64, {2, 3, 33}, {1, 3, 3}, {1, 1, 1}, {0, 2, 2}},
};

/// \param ieee float32 at its own accuracy, with three products
Problem make_problem(const Case& shape, DType dtype, Layout layout, bool ieee) {
  Problem p;
  p.n = shape.n, p.c = shape.c, p.k = shape.k, p.in = shape.in, p.kernel = shape.kernel;
  p.stride = shape.stride, p.padding = shape.padding, p.output_padding = shape.output_padding;
  p.dilation = shape.dilation, p.dtype = dtype, p.x_layout = layout;
  p.precision = ieee ? Precision::kIEEE : Precision::kTF32;
  return p;
}

/// Elements of a weight [C,K,T,R,S] between neighbours along each axis.
std::vector<std::int64_t> weight_strides(const Problem& p, bool channels_last) {
  const auto& [t, r, s] = p.kernel;
  if (channels_last) return {t * r * s * p.k, 1, r * s * p.k, s * p.k, p.k};
  return {p.k * t * r * s, t * r * s, r * s, s, 1};
}

/// Exponents that x's channels are scaled by: 0, or so small and uneven that packing must choose scales.
int channel_exponent(bool uneven, std::int64_t c) {
  return uneven ? static_cast<int>(c % 7) * 5 - 45 : 0;
}

constexpr int kGradCExponent = 2;  // of float32's grad_c operand

/// One case's tensors and its exact gradient, for all plans. T: dtype of x and grad_w. Operand: of grad_c,
/// float for SplitRows.
template <class T, class Operand>
class Fixture {
 public:
  Fixture(const Case& shape, DType dtype, Layout layout, bool uneven, std::uint64_t& state)
      : problem(make_problem(shape, dtype, layout, kIeee)),
        uneven_(uneven),
        pitch_(padded_channels(problem.k) + (shape.n % 2 == 0 ? 8 : 0)),
        x_(problem.n * problem.c * volume(problem.in)),
        grad_c_(problem.n * problem.positions() * pitch_),
        grad_w_(weights()),
        unscale_(1) {
    auto x = tests::small_integers(problem.n * volume(problem.in) * problem.c, 1, state);
    for (double& v : x) v = tests::next_random(state) % 4 == 0 ? v : 0.0;
    auto grad_c = tests::small_integers(problem.n * problem.positions() * problem.k, 2, state);
    if (kIeee) {
      // Of one operand integers beyond float16's 11 bits, whose lower half is needed; sums stay below 2^24.
      for (double& v : shape.n % 2 == 0 ? x : grad_c) v *= 2049;
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = std::ldexp(x[i], channel_exponent(uneven_, std::int64_t(i) % problem.c));
      // Samples of different size share a channel's exponent.
      const std::int64_t n = std::int64_t(i) / (volume(problem.in) * problem.c);
      if (uneven_ && !kIeee) x[i] = std::ldexp(x[i], -int(n));
    }
    expected_ = tests::reference_grad_w(problem, x, grad_c);
    x_.upload(tests::rounded<T>(layout == Layout::kNDHWC ? x : transposed(x)));
    const auto rows = tests::packed(grad_c, 1, 1, problem.k, pitch_);
    const double scale = kScaled ? std::ldexp(1.0, kGradCExponent) : 1.0;
    if constexpr (kIeee) {
      grad_c_.upload(tests::split_rows(rows, pitch_, scale));
    } else {
      grad_c_.upload(tests::rounded<Operand>(rows, scale));
    }
    unscale_.upload({kScaled ? -kGradCExponent : 0});
  }

  std::string check_plan(const GradWPlan& plan, const Device& device, bool channels_last) {
    run(plan, device, channels_last);
    const std::vector<T> got = grad_w_.download();
    const auto strides = weight_strides(problem, channels_last);
    for (std::int64_t i = 0; i < weights(); ++i) {
      const Extent3& kernel = problem.kernel;
      const std::int64_t index[5] = {i / volume(kernel) / problem.k, i / volume(kernel) % problem.k,
                                     i / kernel[2] / kernel[1] % kernel[0], i / kernel[2] % kernel[1],
                                     i % kernel[2]};
      std::int64_t at = 0;
      for (int axis = 0; axis < 5; ++axis) at += index[axis] * strides[axis];
      const double value = double(float(got[at]));
      if (value == expected_[i]) continue;
      char text[200];
      std::snprintf(text, sizeof(text), "[%lld,%lld,%lld,%lld,%lld] is %.9g, expected %.9g",
                    (long long)index[0], (long long)index[1], (long long)index[2], (long long)index[3],
                    (long long)index[4], value, expected_[i]);
      return text;
    }
    return "";
  }

  std::string check_repeats(const GradWPlan& plan, const Device& device) {
    run(plan, device, false);
    const std::vector<T> first = grad_w_.download();
    for (int i = 0; i < 5; ++i) {
      run(plan, device, false);
      const std::vector<T> again = grad_w_.download();
      if (std::memcmp(first.data(), again.data(), first.size() * sizeof(T)) != 0) return "other bits";
    }
    return "";
  }

  const Problem problem;

 private:
  static constexpr bool kIeee = std::is_same_v<Operand, float>;
  static constexpr bool kScaled = std::is_same_v<T, float>;

  std::int64_t weights() const { return problem.c * problem.k * volume(problem.kernel); }

  std::vector<double> transposed(const std::vector<double>& x) const {
    const std::int64_t positions = volume(problem.in);
    std::vector<double> to(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::int64_t row = std::int64_t(i) / problem.c, c = std::int64_t(i) % problem.c;
      to[(row / positions * problem.c + c) * positions + row % positions] = x[i];
    }
    return to;
  }

  void run(const GradWPlan& plan, const Device& device, bool channels_last) {
    const std::int64_t bytes = cuda::grad_w_workspace_bytes(problem, plan);
    if (bytes > workspace_bytes_) {
      workspace_ = std::make_unique<DeviceBuffer<char>>(bytes);
      workspace_bytes_ = bytes;
    }
    workspace_->poison(), grad_w_.poison();
    cuda::GradWTensors tensors;
    tensors.x = x_.get(), tensors.grad_c = grad_c_.get(), tensors.grad_c_pitch = pitch_;
    tensors.unscale_grad_c = kScaled ? unscale_.get() : nullptr;
    tensors.grad_w = grad_w_.get(), tensors.workspace = workspace_->get();
    std::copy_n(weight_strides(problem, channels_last).begin(), 5, tensors.w_strides);
    cuda::run_grad_w(problem, plan, device, tensors, nullptr);
    check(cudaDeviceSynchronize(), "run_grad_w");
  }

  const bool uneven_;
  const std::int64_t pitch_;
  DeviceBuffer<T> x_;
  DeviceBuffer<Operand> grad_c_;
  DeviceBuffer<T> grad_w_;
  DeviceBuffer<std::int32_t> unscale_;
  std::unique_ptr<DeviceBuffer<char>> workspace_;
  std::int64_t workspace_bytes_ = 0;
  std::vector<double> expected_;
};

/// All candidates, on all multiprocessors and on few, whose blocks then compute several tiles each.
template <class T, class Operand>
void run_cases(DType dtype) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  constexpr int kFewBlocks = 3;
  int turn = 0;
  for (const Case& shape : kCases) {
    for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
      for (const bool uneven : {false, true}) {
        if (uneven && dtype != DType::kFloat32) continue;
        Fixture<T, Operand> fixture(shape, dtype, layout, uneven, state);
        for (const bool few : {false, true}) {
          Device device = this_device();
          if (few) device.sm_count = kFewBlocks;
          const auto plans = grad_w_candidates(fixture.problem, device);
          if (plans.empty()) report("no candidates", describe(fixture.problem));
          for (GradWPlan plan : plans) {
            // More splits than the plan would take, so that sums of several are seen.
            if (++turn % 2 == 0) plan.splits = std::min<std::int64_t>(plan.k_blocks, 9);
            const std::string what = describe(fixture.problem) + "\n  " + describe(plan);
            report(fixture.check_plan(plan, device, turn % 3 == 0), what);
          }
        }
        const GradWPlan plan = grad_w_plan(fixture.problem, this_device());
        report(fixture.check_repeats(plan, this_device()), "repeated, " + describe(fixture.problem));
      }
    }
  }
}

/// A problem of random data on the device, for errors and times.
template <class T, class Operand>
struct Workload {
  Problem problem;
  GradWPlan plan;
  Device device = this_device();
  DeviceBuffer<T> x, grad_w;
  DeviceBuffer<Operand> grad_c;  // what the kernel is to multiply; float for SplitRows as well
  DeviceBuffer<Operand> rows;    // of SplitRows, the values that they stand for
  DeviceBuffer<std::int32_t> unscale;
  DeviceBuffer<char> workspace;
  cuda::GradWTensors tensors;

  Workload(const Problem& problem_, const GradWPlan& plan_, tests::Noise noise)
      : problem(problem_),
        plan(plan_),
        x(problem.n * problem.c * volume(problem.in)),
        grad_w(problem.c * problem.k * volume(problem.kernel)),
        grad_c(problem.n * problem.positions() * padded_channels(problem.k)),
        rows(kSplit ? problem.n * problem.positions() * padded_channels(problem.k) : 0),
        unscale(1),
        workspace(cuda::grad_w_workspace_bytes(problem, plan)) {
    tests::fill(x.get(), problem.n * problem.c * volume(problem.in), 1, noise);
    const std::int64_t values = problem.n * problem.positions() * problem.k;
    tests::fill(kSplit ? rows.get() : grad_c.get(), values, 2, tests::Noise::kNormal);
    if constexpr (kSplit) {
      constexpr int kExponent = 12;  // of values below 8
      tests::split_on_device(rows.get(), grad_c.get(), values, padded_channels(problem.k), 1 << kExponent);
      unscale.upload({-kExponent});
      tensors.unscale_grad_c = unscale.get();
    }
    tensors.x = x.get(), tensors.grad_c = grad_c.get(), tensors.grad_w = grad_w.get();
    tensors.grad_c_pitch = padded_channels(problem.k), tensors.workspace = workspace.get();
    std::copy_n(weight_strides(problem, false).begin(), 5, tensors.w_strides);
  }
  void run() { cuda::run_grad_w(problem, plan, device, tensors, nullptr); }
  const Operand* values() const { return kSplit ? rows.get() : grad_c.get(); }

 private:
  static constexpr bool kSplit = std::is_same_v<Operand, float>;
};

const Case kHeadline = {16, 64, 128, {32, 32, 32}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}};

/// Error of two input channels' gradients, relative to their rms. Data that float16 holds exactly leaves the
/// accumulation's error alone where results are float32.
///
/// \param bound on the relative rms error
template <class T, class Operand>
void run_accuracy(DType dtype, tests::Noise noise, double bound) {
  const Problem problem = make_problem(kHeadline, dtype, Layout::kNDHWC, std::is_same_v<Operand, float>);
  Workload<T, Operand> work(problem, grad_w_plan(problem, this_device()), noise);
  work.run();
  const std::vector<T> got = work.grad_w.download();
  double error = 0, size = 0, largest = 0;
  const std::int64_t per_channel = problem.k * volume(problem.kernel);
  for (const std::int64_t c : {std::int64_t{0}, problem.c - 1}) {
    const std::vector<double> expected = tests::reference_channel(problem, work.x.get(), work.values(), c);
    for (std::int64_t i = 0; i < per_channel; ++i) {
      const double delta = double(float(got[c * per_channel + i])) - expected[i];
      error += delta * delta, size += expected[i] * expected[i];
      largest = std::max(largest, std::abs(delta));
    }
  }
  const double relative = std::sqrt(error / size);
  std::printf("headline, %s, grad_c %d bytes, %s x: relative rms error %.3g, largest %.3g of rms\n",
              name(dtype), int(sizeof(Operand)), tests::name(noise), relative,
              largest / std::sqrt(size / (2.0 * double(per_channel))));
  report(relative <= bound ? "" : "relative rms error above " + std::to_string(bound),
         std::string("accuracy in ") + name(dtype));
}

/// Median of 15 times in ms, L2 flushed before each.
double median_ms(const std::function<void()>& body) {
  static DeviceBuffer<char> flush(std::size_t{256} << 20);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event"), check(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    flush.clear();
    check(cudaEventRecord(begin), "recording");
    body();
    check(cudaEventRecord(end), "recording");
    check(cudaEventSynchronize(end), "timing");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "timing");
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double useful_flops(const Problem& p) {
  double taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    std::int64_t hits = 0;
    for (std::int64_t i = 0; i < p.in[axis]; ++i) {
      for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
        const std::int64_t o = i * p.stride[axis] - p.padding[axis] + tap * p.dilation[axis];
        hits += o >= 0 && o < p.out()[axis];
      }
    }
    taps *= double(hits);
  }
  return 2.0 * double(p.n * p.c * p.k) * taps;
}

template <class T, class Operand>
void time_plan(const Problem& problem, const GradWPlan& plan) {
  Workload<T, Operand> work(problem, plan, tests::Noise::kNormal);
  const double all = median_ms([&] { work.run(); });
  cuda::GradWReduceParams reduce{.problem = problem, .plan = plan};
  reduce.partial =
      reinterpret_cast<const float*>(work.workspace.get() + cuda::grad_w_workspace_bytes(problem, plan) -
                                     plan.partial_floats() * std::int64_t(sizeof(float)));
  reduce.grad_w = work.grad_w.get();
  std::copy_n(work.tensors.w_strides, 5, reduce.w_strides);
  const double last = median_ms([&] { cuda::launch_grad_w_reduce(reduce, nullptr); });
  std::printf("%.4f ms, final sum from memory %.4f, %6.1f TFLOP/s  %s\n", all, last,
              useful_flops(problem) / all * 1e-9, describe(plan).c_str());
}

/// The chosen plan, then the next best by the estimate.
template <class T, class Operand>
void time_shape(const Case& shape, DType dtype, std::size_t plans) {
  const Problem problem = make_problem(shape, dtype, Layout::kNDHWC, std::is_same_v<Operand, float>);
  auto candidates = grad_w_candidates(problem, this_device());
  std::stable_sort(candidates.begin(), candidates.end(), [](const GradWPlan& a, const GradWPlan& b) {
    return a.estimated_cycles < b.estimated_cycles;
  });
  std::printf("%s\n", describe(problem).c_str());
  for (std::size_t i = 0; i < std::min(plans, candidates.size()); ++i) {
    GradWPlan plan = candidates[i];
    time_plan<T, Operand>(problem, plan);
    const std::int64_t one_wave = std::max<std::int64_t>(1, this_device().sm_count / plan.tiles());
    if (i == 0 && plan.splits != one_wave) {
      plan.splits = one_wave;
      time_plan<T, Operand>(problem, plan);
    }
  }
}

int run_times() {
  time_shape<__nv_bfloat16, __nv_bfloat16>(kHeadline, DType::kBFloat16, 3);
  time_shape<__half, __half>(kHeadline, DType::kFloat16, 1);
  time_shape<float, __half>(kHeadline, DType::kFloat32, 1);
  time_shape<float, float>(kHeadline, DType::kFloat32, 6);
  using B = __nv_bfloat16;
  time_shape<B, B>({2, 256, 128, {32, 32, 32}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}}, DType::kBFloat16,
                   4);
  time_shape<B, B>({1, 128, 128, {48, 48, 48}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}}, DType::kBFloat16, 3);
  time_shape<B, B>({16, 512, 256, {8, 8, 8}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}}, DType::kBFloat16, 3);
  time_shape<B, B>({2, 64, 32, {64, 64, 64}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}}, DType::kBFloat16,
                   3);
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  if (tests::no_gpu(90)) return tests::kSkipped;
  if (argc > 1 && std::string(argv[1]) == "--time") return run_times();
  try {
    run_cases<__nv_bfloat16, __nv_bfloat16>(DType::kBFloat16);
    run_cases<__half, __half>(DType::kFloat16);
    run_cases<float, __half>(DType::kFloat32);
    run_cases<float, float>(DType::kFloat32);
    // Rounding of results to 8 and 11 bits; TF32's rounding of the operands; the accumulation's own; and what
    // PyTorch's float32 sums come to.
    run_accuracy<__nv_bfloat16, __nv_bfloat16>(DType::kBFloat16, tests::Noise::kNormal, 2.2e-3);
    run_accuracy<__half, __half>(DType::kFloat16, tests::Noise::kNormal, 3.5e-4);
    run_accuracy<float, __half>(DType::kFloat32, tests::Noise::kNormal, 3.6e-4);
    run_accuracy<float, __half>(DType::kFloat32, tests::Noise::kHalf, 1.5e-4);
    run_accuracy<float, __half>(DType::kFloat32, tests::Noise::kPositiveHalf, 1.5e-4);
    run_accuracy<float, float>(DType::kFloat32, tests::Noise::kNormal, 1e-6);
    run_accuracy<float, float>(DType::kFloat32, tests::Noise::kPositiveHalf, 1e-6);
  } catch (const std::exception& error) {
    report(error.what(), "run_grad_w");
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
