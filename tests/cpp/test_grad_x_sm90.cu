// SPDX-License-Identifier: Apache-2.0
/// Checks run_grad_x against a plain sum in double, exactly, on small integers: every compiled variant that
/// can run, every cut, both layouts of x and of w. What it writes is NaN before, so that nothing is left
/// unwritten, and what lies behind grad_x must stay so; few blocks and all of them must give the same bits.
/// Needs a GPU of compute capability 9.0. Exit code 0: all passed.
///
///   test_grad_x_sm90          checks, in seconds
///   test_grad_x_sm90 --time   times the shapes of the benchmark (ms, useful TFLOP/s)
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/border_slabs.hpp"
#include "core/grad_x_plan.hpp"
#include "core/plan.hpp"
#include "cuda/check.hpp"
#include "cuda/grad_x.hpp"
#include "cutlass/numeric_types.h"
#include "gpu_test.hpp"
#include "grad_x_cases.hpp"
#include "split_rows.cuh"
#include "tally.hpp"

namespace {

using upconv3d::ConvInstance;
using upconv3d::Cut;
using upconv3d::Device;
using upconv3d::DType;
using upconv3d::Extent3;
using upconv3d::GradXPlan;
using upconv3d::Layout;
using upconv3d::Precision;
using upconv3d::Problem;
using upconv3d::volume;
using upconv3d::cuda::check;
using upconv3d::cuda::GradXTensors;
using upconv3d::tests::DeviceBuffer;
using upconv3d::tests::GradXCase;
using upconv3d::tests::kGradXCases;
using upconv3d::tests::next_random;
using upconv3d::tests::rounded;
using upconv3d::tests::small_integers;
using upconv3d::tests::Tally;

/// Few blocks, so that each walks several tiles.
constexpr int kFewBlocks = 5;

/// grad_c of a float32 block is scaled by 2^kScale, which unscale undoes.
constexpr int kScale = 3;

/// In place of 1 in three products: of 13 significant bits, which take hi and lo.
constexpr double kLongValue = 4097.0 / 1024;

/// What odd samples of grad_x [N,C,D,H,W] are scaled by in three products: the lower half of a long value is
/// a float16 below the normal ones then.
constexpr double kTiny = 0x1p-10;

/// Elements behind grad_x that nobody may write.
constexpr std::int64_t kGuard = 64;

constexpr Cut kCuts[] = {{0, false}, {1, false}, {3, false}, {0, true}};

Device device_of(int sm_count) {
  // A forced plan keeps selection from leaving blocks of few channels to the library.
  return {.is_cuda = true, .compute_capability = 90, .sm_count = sm_count, .forced_plan = "sm90"};
}

Problem make_block(const GradXCase& shape, DType dtype, Layout layout,
                   Precision precision = Precision::kTF32) {
  Problem block;
  block.n = shape.n, block.c = shape.c, block.k = shape.k;
  block.in = shape.in, block.kernel = shape.kernel, block.stride = shape.stride;
  block.padding = shape.padding, block.output_padding = shape.output_padding;
  block.dilation = shape.dilation;
  block.dtype = dtype;
  block.precision = precision;
  block.x_layout = block.y_layout = layout;
  return block;
}

GradXPlan plan_of(const Problem& block, int sm_count) {
  std::optional<GradXPlan> plan;
  const std::string obstacle =
      upconv3d::grad_x_obstacle(block, device_of(sm_count), upconv3d::conv_instances(), plan);
  if (!plan) throw std::runtime_error(obstacle);
  return *plan;
}

/// grad_x [N,D,H,W,C] of grad_c [N,Z,P,Q,K] and w [C,K,T,R,S], in double.
__global__ void grad_x_reference(const double* grad_c, const double* w, double* grad_x, Problem block,
                                 Extent3 out) {
  const std::int64_t index = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= block.n * block.in[0] * block.in[1] * block.in[2] * block.c) return;
  const std::int64_t c = index % block.c;
  std::int64_t rest = index / block.c, at[3];
  for (int axis = 2; axis >= 0; --axis) {
    at[axis] = rest % block.in[axis];
    rest /= block.in[axis];
  }
  const Extent3& kernel = block.kernel;
  double sum = 0;
  for (std::int64_t tap = 0; tap < kernel[0] * kernel[1] * kernel[2]; ++tap) {
    const std::int64_t taps[3] = {tap / kernel[2] / kernel[1], tap / kernel[2] % kernel[1], tap % kernel[2]};
    std::int64_t row = rest;
    bool inside = true;
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t z =
          at[axis] * block.stride[axis] - block.padding[axis] + taps[axis] * block.dilation[axis];
      inside = inside && z >= 0 && z < out[axis];
      row = row * out[axis] + z;
    }
    if (!inside) continue;
    for (std::int64_t k = 0; k < block.k; ++k) {
      sum += grad_c[row * block.k + k] * w[(c * block.k + k) * kernel[0] * kernel[1] * kernel[2] + tap];
    }
  }
  grad_x[index] = sum;
}

/// One block's tensors on the device and its exact grad_x, for all launches. Operand is what grad_c is given
/// as: float for SplitRows of three products.
template <class Operand, class Output>
class Fixture {
 public:
  Fixture(const Problem& block, bool w_channels_last, std::uint64_t& state)
      : block_(block),
        pitch_(grad_c_pitch(block)),
        grad_c_(block.n * block.positions() * pitch_),
        w_(block.c * block.k * volume(block.kernel)),
        grad_x_(block.n * volume(block.in) * block.c + kGuard),
        unscale_(1) {
    // Sparse and small enough that every sum is exact in a 16-bit result: at most 2^8 in bfloat16.
    auto grad_c = small_integers(block.n * block.positions() * block.k, 1, state);
    for (double& v : grad_c) v = next_random(state) % 16 == 0 ? v : 0.0;
    const auto w = small_integers(block.c * block.k * volume(block.kernel), 1, state);
    compute_reference(grad_c, w);
    if (kSplit) scale_samples(grad_c, w_channels_last ? 1.0 : kLongValue);
    const double scale = kColumnScales ? double(1 << kScale) : 1.0;
    const auto rows = upconv3d::tests::packed(grad_c, 1, 1, block.k, pitch_);
    if constexpr (kSplit) {
      grad_c_.upload(upconv3d::tests::split_rows(rows, pitch_, scale));
    } else {
      grad_c_.upload(rounded<Operand>(rows, scale));
    }
    unscale_.upload({-kScale});
    upload_w(w, w_channels_last);
  }

  /// Launches once, over poisoned memory. Returns grad_x and the guard behind it.
  std::vector<Output> run(const GradXPlan& plan, int sm_count) {
    grad_x_.poison();
    DeviceBuffer<char> workspace(upconv3d::cuda::grad_x_workspace_bytes(plan));
    workspace.poison();
    GradXTensors tensors;
    tensors.grad_c = grad_c_.get();
    if (kColumnScales) tensors.unscale = unscale_.get();
    tensors.w = w_.get();
    for (int axis = 0; axis < 5; ++axis) tensors.w_strides[axis] = w_strides_[axis];
    tensors.grad_x = grad_x_.get();
    tensors.workspace = workspace.get();
    run_grad_x(plan, device_of(sm_count), tensors, nullptr);
    check(cudaDeviceSynchronize(), plan.instance.name);
    return grad_x_.download();
  }

  /// "" where `got` is exact and what lies behind it untouched.
  std::string compare(const std::vector<Output>& got) const {
    const std::int64_t positions = volume(block_.in), c = block_.c;
    for (std::int64_t i = 0; i < std::int64_t(expected_.size()); ++i) {
      const std::int64_t n = i / c / positions, position = i / c % positions, channel = i % c;
      const std::int64_t at =
          block_.x_layout == Layout::kNDHWC ? i : (n * c + channel) * positions + position;
      const double value = double(float(got[at]));
      if (value == expected_[i]) continue;
      char text[120];
      std::snprintf(text, sizeof(text), "n=%lld position=%lld c=%lld is %.9g, expected %.9g", (long long)n,
                    (long long)position, (long long)channel, value, expected_[i]);
      return text;
    }
    for (std::int64_t i = 0; i < kGuard; ++i) {
      const double guard = double(float(got[expected_.size() + i]));
      if (guard == guard) return "something was written behind grad_x";
    }
    return "";
  }

 private:
  static constexpr bool kSplit = std::is_same_v<Operand, float>;
  static constexpr bool kColumnScales = std::is_same_v<Output, float>;

  /// grad_c and what is expected, where three products are to show. One of grad_c and w has long values.
  void scale_samples(std::vector<double>& grad_c, double value) {
    const bool has_tiny = block_.x_layout == Layout::kNCDHW;
    const auto scale = [&](std::vector<double>& values, double factor) {
      const std::size_t of_sample = values.size() / block_.n;
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] *= factor * (has_tiny && i / of_sample % 2 == 1 ? kTiny : 1.0);
      }
    };
    scale(grad_c, value);
    scale(expected_, kLongValue);
  }

  void compute_reference(const std::vector<double>& grad_c, const std::vector<double>& w) {
    const std::int64_t elements = block_.n * volume(block_.in) * block_.c;
    DeviceBuffer<double> grad_c64(grad_c.size()), w64(w.size()), reference(elements);
    grad_c64.upload(grad_c), w64.upload(w);
    grad_x_reference<<<unsigned((elements + 127) / 128), 128>>>(grad_c64.get(), w64.get(), reference.get(),
                                                                block_, block_.out());
    upconv3d::cuda::check_launch("grad_x_reference");
    expected_ = reference.download();
  }

  /// [C,K,T,R,S] contiguous, or with K innermost; output channels of different size, for their exponents.
  void upload_w(const std::vector<double>& w, bool channels_last) {
    const Extent3& kernel = block_.kernel;
    const std::int64_t taps = volume(kernel), k = block_.k;
    const std::int64_t inner = channels_last ? k : 1;
    w_strides_[0] = k * taps;
    w_strides_[1] = channels_last ? 1 : taps;
    w_strides_[2] = kernel[1] * kernel[2] * inner;
    w_strides_[3] = kernel[2] * inner;
    w_strides_[4] = inner;
    const double value = kSplit && channels_last ? kLongValue : 1.0;
    std::vector<double> lying(w.size());
    for (std::int64_t i = 0; i < std::int64_t(w.size()); ++i) {
      const std::int64_t c = i / taps / k;
      lying[c * w_strides_[0] + i / taps % k * w_strides_[1] + i % taps * w_strides_[4]] =
          value * (kColumnScales ? w[i] * double(1 << c % 4) : w[i]);
    }
    if (kColumnScales) {
      for (std::int64_t i = 0; i < std::int64_t(expected_.size()); ++i) {
        expected_[i] *= double(1 << i % block_.c % 4);
      }
    }
    w_.upload(rounded<Output>(lying));
  }

  Problem block_;
  std::int64_t pitch_;
  DeviceBuffer<Operand> grad_c_;
  DeviceBuffer<Output> w_, grad_x_;
  DeviceBuffer<std::int32_t> unscale_;
  std::int64_t w_strides_[5] = {};
  std::vector<double> expected_;  // [N,D,H,W,C]
};

/// The instances that a plan could have named in place of its own.
std::vector<ConvInstance> family_of(const ConvInstance& named) {
  std::vector<ConvInstance> family;
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (instance.compiled && instance.arch == 90 && !instance.twice && instance.operand == named.operand &&
        instance.products == named.products && instance.output == named.output &&
        instance.stored_bits == named.stored_bits) {
      family.push_back(instance);
    }
  }
  return family;
}

/// The plan as selected, with few blocks and with all; then every variant and cut in its place.
template <class Operand, class Output>
void run_block(const Problem& block, bool w_channels_last, int sm_count, std::uint64_t& state, Tally& tally) {
  Fixture<Operand, Output> fixture(block, w_channels_last, state);
  const GradXPlan selected = plan_of(block, sm_count);
  tally.run(selected.instance, "selected, " + describe(block), [&] {
    const auto first = fixture.run(selected, kFewBlocks);
    const auto second = fixture.run(selected, sm_count);
    if (std::memcmp(first.data(), second.data(), first.size() * sizeof(first[0])) != 0) {
      return std::string("few blocks give other bits than all");
    }
    return fixture.compare(first);
  });
  for (const ConvInstance& instance : family_of(selected.instance)) {
    for (const Cut& cut : kCuts) {
      if (cut.share_taps && (block.stride != Extent3{1, 1, 1} || block.dilation != Extent3{1, 1, 1}))
        continue;
      if (cut.share_taps && instance.products == 3) continue;  // which leaves three products no room for w
      GradXPlan plan = selected;
      plan.instance = instance;
      cut_output(plan, cut);
      const auto slabs = upconv3d::plan_slabs(plan.problem, cut);
      if (slabs.size() > std::size_t(upconv3d::kMaxSlabs)) continue;
      const std::string what =
          (cut.share_taps ? "loads shared, " : std::to_string(cut.split_axes) + " axes cut, ");
      tally.run(instance, what + describe(block),
                [&] { return fixture.compare(fixture.run(plan, kFewBlocks)); });
    }
  }
}

void run_checks(int sm_count, Tally& tally) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  bool w_channels_last = false;
  for (const GradXCase& shape : kGradXCases) {
    for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
      run_block<cutlass::bfloat16_t, cutlass::bfloat16_t>(make_block(shape, DType::kBFloat16, layout),
                                                          w_channels_last, sm_count, state, tally);
      run_block<cutlass::half_t, cutlass::half_t>(make_block(shape, DType::kFloat16, layout),
                                                  !w_channels_last, sm_count, state, tally);
      run_block<cutlass::half_t, float>(make_block(shape, DType::kFloat32, layout), w_channels_last, sm_count,
                                        state, tally);
      for (const bool long_weights : {false, true}) {
        run_block<float, float>(make_block(shape, DType::kFloat32, layout, Precision::kIEEE), long_weights,
                                sm_count, state, tally);
      }
      w_channels_last = !w_channels_last;
    }
  }
}

/// Values between -size and size that no two neighbours share: what is multiplied decides the card's power.
template <class T>
__global__ void fill_random(T* data, std::int64_t count, float size) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    std::uint32_t bits = std::uint32_t(i) * 2654435761u;
    bits = (bits ^ (bits >> 15)) * 2246822519u;
    data[i] = T((float(bits ^ (bits >> 13)) * 0x1p-31f - 1.f) * size);
  }
}

template <class Operand, class Output>
void time_plan(const Problem& block, const GradXPlan& plan, int sm_count) {
  constexpr int kWarmUp = 5, kRuns = 40;
  DeviceBuffer<Operand> grad_c(block.n * block.positions() * plan.grad_c_pitch);
  DeviceBuffer<Output> w(block.c * block.k * volume(block.kernel));
  DeviceBuffer<Output> grad_x(block.n * volume(block.in) * block.c);
  DeviceBuffer<char> workspace(upconv3d::cuda::grad_x_workspace_bytes(plan));
  DeviceBuffer<std::int32_t> unscale(1);
  unscale.clear();
  if constexpr (std::is_same_v<Operand, float>) {
    DeviceBuffer<float> rows(block.n * block.positions() * plan.grad_c_pitch);
    fill_random<<<1024, 256>>>(rows.get(), block.n * block.positions() * plan.grad_c_pitch, 1.f);
    upconv3d::tests::split_on_device(rows.get(), grad_c.get(),
                                     block.n * block.positions() * plan.grad_c_pitch, plan.grad_c_pitch,
                                     0x1p14f);
  } else {
    fill_random<<<1024, 256>>>(grad_c.get(), block.n * block.positions() * plan.grad_c_pitch, 1.f);
  }
  fill_random<<<1024, 256>>>(w.get(), block.c * block.k * volume(block.kernel), 1.f);
  const std::int64_t taps = volume(block.kernel), rs = block.kernel[1] * block.kernel[2];
  const GradXTensors tensors{grad_c.get(), unscale.get(),
                             w.get(),      {block.k * taps, taps, rs, block.kernel[2], 1},
                             grad_x.get(), workspace.get()};
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  for (int i = 0; i < kWarmUp + kRuns; ++i) {
    if (i == kWarmUp) check(cudaEventRecord(begin), "recording");
    run_grad_x(plan, device_of(sm_count), tensors, nullptr);
  }
  check(cudaEventRecord(end), "recording");
  check(cudaEventSynchronize(end), "timing");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "timing");
  ms /= kRuns;
  std::printf("%8.4f ms %6.0f TFLOP/s (estimated %.4f) %s%s %s %s\n", ms,
              plan.problem.useful_flops() / ms * 1e-9, plan.estimated_multiply_ms,
              plan.instance.name + std::strlen("conv_transpose_relu_group_norm_sm90_"),
              plan.cut.share_taps ? " shared" : (" cut " + std::to_string(plan.cut.split_axes)).c_str(),
              name(block.x_layout), describe(block).c_str());
  check(cudaEventDestroy(begin), "destroying an event");
  check(cudaEventDestroy(end), "destroying an event");
}

/// The plan as selected, then the other variants and cuts in its place.
template <class Operand, class Output>
void time_block(const Problem& block, bool alternatives, int sm_count) {
  const GradXPlan selected = plan_of(block, sm_count);
  time_plan<Operand, Output>(block, selected, sm_count);
  if (!alternatives) return;
  for (const ConvInstance& instance : family_of(selected.instance)) {
    for (const bool share_taps : {false, true}) {
      if (share_taps && block.stride != Extent3{1, 1, 1}) continue;
      GradXPlan plan = selected;
      plan.instance = instance;
      cut_output(plan, {0, share_taps});
      time_plan<Operand, Output>(block, plan, sm_count);
    }
  }
}

void run_timing(int sm_count) {
  const GradXCase headline{16, 64, 128, {32, 32, 32}, {3, 3, 3}};
  const GradXCase stride_2{2, 256, 128, {32, 32, 32}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}};
  const GradXCase kernel_2{1, 128, 128, {48, 48, 48}, {2, 2, 2}, {2, 2, 2}};
  for (const GradXCase& shape : {headline, stride_2, kernel_2}) {
    for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
      const bool alternatives = layout == Layout::kNDHWC;
      time_block<cutlass::bfloat16_t, cutlass::bfloat16_t>(make_block(shape, DType::kBFloat16, layout),
                                                           alternatives, sm_count);
      time_block<cutlass::half_t, float>(make_block(shape, DType::kFloat32, layout), alternatives, sm_count);
      time_block<float, float>(make_block(shape, DType::kFloat32, layout, Precision::kIEEE), false, sm_count);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "asking for the SM count");
  if (argc > 1 && std::strcmp(argv[1], "--time") == 0) {
    run_timing(sm_count);
    return EXIT_SUCCESS;
  }
  Tally tally;
  run_checks(sm_count, tally);
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed || !tally.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
