// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/col2im_plan.hpp: what the col2im plan takes, where it is chosen and kept for a backward pass, and how
/// its product lies. Without torch or CUDA.

#include "core/col2im_plan.hpp"

#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// What it does not take, and what was not compared; what is kept in training.
void test_choice() {
  Problem p = headline(DType::kFloat32, Layout::kNCDHW);
  p.n = 2, p.c = 96, p.k = 64, p.in = {9, 12, 10};
  const Device device = hopper();
  expect(col2im_obstacle(p, device).empty() && std::isfinite(col2im_us(p, device)), "a small block");
  const auto obstacle = [&](const std::function<void(Problem&)>& change) {
    Problem other = p;
    change(other);
    return col2im_obstacle(other, device);
  };
  expect(obstacle([](Problem& o) { o.dtype = DType::kFloat16; }).empty(), "16 bit");
  expect(has_part(obstacle([](Problem& o) { o.dtype = DType::kFloat64; }), "no float64"), "float64");
  expect(has_part(obstacle([](Problem& o) { o.groups = 2; }), "groups"), "convolution groups");
  expect(has_part(obstacle([](Problem& o) { o.tail.has_skip = true; }), "skip"), "a skip");
  expect(has_part(obstacle([](Problem& o) { o.n = 4096, o.k = 4096; }), "31 bits"), "4.2e10 products");
  Device turing = device;
  turing.compute_capability = 75;
  expect(has_part(col2im_obstacle(p, turing), "8.0"), "no TF32");
  Device forced = device;
  forced.forced_plan = "col2im";
  expect(select_plan(p, forced, all_compiled()).algorithm == Algorithm::kCudaCol2im, "asked for");
  expect(select_training_plan(p, device, all_compiled()).algorithm != Algorithm::kCudaCol2im,
         "a backward pass reads what the SM90 plan keeps");
  Problem one_output = p;
  one_output.k = one_output.num_groups = 1, one_output.c = 128, one_output.in = {42, 38, 37};
  const Plan trained = select_training_plan(one_output, device, all_compiled());
  expect(trained.algorithm == Algorithm::kCudaCol2im && trained.keeps_conv && !trained.activation_in_y,
         "kept in the place of PyTorch's convolution: " + trained.reason);
  one_output.dtype = DType::kFloat64;
  expect(select_training_plan(one_output, device, all_compiled()).algorithm == Algorithm::kCudaLibrary,
         "of float64 PyTorch's");
  Device ampere = device;
  ampere.compute_capability = 80;
  expect(select_plan(p, ampere, all_compiled()).algorithm != Algorithm::kCudaCol2im, "not compared there");
  Problem large = p;
  large.n = 64;
  expect(!std::isfinite(col2im_us(large, device)), "more than was compared");
  Problem returned = p;
  returned.tail.returns_conv = true;
  expect(std::isfinite(col2im_us(returned, device)), "a second result, which the gather writes anyway");
  one_output.dtype = DType::kFloat32, one_output.tail.returns_conv = true;
  expect(select_training_plan(one_output, device, all_compiled()).algorithm == Algorithm::kCudaLibrary,
         "trained, such blocks were not compared");
}

/// Without a norm the gather applies any activation, where its sums are not wanted.
void test_finishing() {
  Problem p = headline(DType::kFloat32, Layout::kNCDHW);
  p.n = 2, p.c = 96, p.k = 64, p.in = {9, 12, 10};
  Device device = hopper();
  device.forced_plan = "col2im";
  const auto stages = [&](const char* activation, bool returned, bool training) {
    p.tail = make_tail("norm_act", false, activation, 0.01, returned);
    const Plan plan =
        training ? select_training_plan(p, device, all_compiled()) : select_plan(p, device, all_compiled());
    return plan.algorithm == Algorithm::kCudaCol2im ? plan.stages.size() : 0;
  };
  for (const char* activation : {"none", "relu", "leaky_relu", "prelu", "elu", "silu", "gelu", "gelu_tanh"}) {
    expect(stages(activation, false, false) == 2, concat("product and gather: ", activation));
  }
  expect(stages("relu", true, false) == 3, "the gather writes the convolution that is returned");
  p.tail = make_tail("norm_act", true, "relu", 0.01, false);
  expect(!col2im_finishes(p, false), "before a norm");
  p.tail = make_tail("norm_act", false, "relu", 0.01, false);
  expect(col2im_finishes(p, false) && !col2im_finishes(p, true), "a backward reads the convolution");
}

/// us of perf/results/h200_plans_of_kinds.txt: at float32's accuracy, of a returned convolution, dilated.
void test_kinds_timed_later() {
  const auto algorithm = [](const std::function<void(Problem&)>& change) {
    Problem p = headline();
    p.n = 4, p.c = p.k = 80, p.num_groups = 1, p.in = {9, 8, 9}, p.has_bias = true, p.w_channels_last = true;
    p.dtype = DType::kFloat32;
    change(p);
    return select_plan(p, hopper(), all_compiled()).algorithm;
  };
  const auto without_norm = [](Problem& p) { p.tail = make_tail("norm_act", false, "relu", 0.0, false); };
  expect(algorithm([&](Problem& p) {
           without_norm(p);
           p.precision = Precision::kIEEE, p.kernel = {1, 3, 3}, p.padding = {0, 1, 1};
         }) == Algorithm::kCudaCol2im,
         "ieee without a norm: col2im 24, SM90 46, library 37");
  expect(algorithm([&](Problem& p) {
           without_norm(p);
           p.precision = Precision::kIEEE, p.n = 8, p.c = 72, p.k = 100, p.in = {17, 17, 16};
           p.padding = {1, 1, 1};
         }) == Algorithm::kSm90ImplicitGemm,
         "ieee without a norm, larger: SM90 265, col2im 733");
  expect(algorithm([](Problem& p) {
           p.precision = Precision::kIEEE, p.n = 8, p.c = 128, p.k = 24, p.in = {11, 12, 12};
           p.kernel = p.stride = {3, 3, 3};
         }) == Algorithm::kCudaCol2im,
         "ieee, y of 33 MB: col2im 136, SM90 216, library 215");
  expect(algorithm([](Problem& p) {
           p.tail = make_tail("norm_act", true, "relu", 0.0, true);
           p.precision = Precision::kTF32, p.c = 200, p.k = p.num_groups = 20, p.in = {6, 6, 6};
           p.kernel = {4, 4, 4}, p.stride = {2, 2, 2}, p.padding = {1, 1, 1};
         }) == Algorithm::kCudaCol2im,
         "a returned convolution: col2im 30, library 42");
  expect(algorithm([&](Problem& p) {
           without_norm(p);
           p.precision = Precision::kTF32, p.n = 1, p.c = 32, p.k = 48, p.in = {7, 7, 7};
           p.kernel = {5, 5, 5}, p.stride = {2, 2, 2}, p.dilation = {1, 2, 2}, p.padding = {2, 2, 2};
           p.output_padding = {1, 1, 1};
         }) == Algorithm::kCudaCol2im,
         "dilated with a stride, no norm: col2im 31, library 41, SM90 64");
}

/// Of larger inputs, each measured by plan (perf/results/h100_col2im.txt).
void test_few_outputs() {
  const auto plan_of = [](const std::function<void(Problem&)>& change, bool training = false) {
    Problem p = headline();
    p.padding = {0, 0, 0}, p.w_channels_last = true;
    change(p);
    return training ? select_training_plan(p, hopper(), all_compiled())
                    : select_plan(p, hopper(), all_compiled());
  };
  const auto check = [](const Plan& plan, Algorithm algorithm, const std::string& what) {
    expect(plan.algorithm == algorithm, concat(what, ": ", name(plan.algorithm), ", ", plan.reason));
  };
  constexpr Algorithm col2im = Algorithm::kCudaCol2im;
  const auto ieee = [](Problem& p) { p.dtype = DType::kFloat32, p.precision = Precision::kIEEE; };
  const auto long_sums = [](Problem& p) {
    p.n = 1, p.c = 512, p.k = p.num_groups = 1, p.in = {16, 32, 32}, p.kernel = {7, 7, 7};
    p.padding = {3, 3, 3};
  };
  check(plan_of(long_sums), col2im, "104 us, cuDNN's 1017");
  check(plan_of(long_sums, true), col2im, "in training too");
  const auto four = [](Problem& p) {
    p.n = 2, p.c = 128, p.k = p.num_groups = 4, p.in = {40, 40, 40}, p.kernel = p.stride = {2, 2, 2};
  };
  check(plan_of(four), col2im, "107 us, the SM90 plan 126");
  check(plan_of([&](Problem& p) { four(p), ieee(p); }), col2im, "123 us, the SM90 plan 486, cuDNN's 2800");
  const auto twenty = [](Problem& p) {
    p.n = 2, p.c = 160, p.k = 20, p.num_groups = 5, p.in = {31, 42, 41}, p.kernel = p.stride = {2, 2, 1};
  };
  check(plan_of(twenty), Algorithm::kSm90ImplicitGemm, "83 us, col2im 133");
  check(plan_of([&](Problem& p) { twenty(p), ieee(p); }), col2im, "195 us, the SM90 plan 304");

  // Results or inputs of more than 45 and 135 MB (perf/results/h200_large_inputs.txt).
  const auto in_planes = [](Problem& p) {
    p.dtype = DType::kFloat32, p.precision = Precision::kTF32;
    p.x_layout = p.y_layout = Layout::kNCDHW, p.w_channels_last = false;
  };
  const auto flat = [](Problem& p) {
    p.n = 4, p.c = 48, p.k = 4, p.num_groups = 2, p.in = {64, 64, 64}, p.kernel = {1, 3, 3};
    p.stride = {1, 2, 2}, p.padding = {0, 1, 1};
  };
  check(plan_of([&](Problem& p) { flat(p), in_planes(p); }), col2im,
        "415 us, the kernel for few channels 579 where 515 are expected");
  check(plan_of(flat), Algorithm::kCudaDirect, "157 us, col2im 400");
  check(plan_of([&](Problem& p) { flat(p), p.n = 2, p.c = 64, p.k = 16, p.in = {48, 48, 48}, in_planes(p); }),
        Algorithm::kSm90ImplicitGemm, "177 us where 303 are expected, col2im 212");
  const auto one = [](Problem& p) {
    p.n = 4, p.c = 32, p.k = p.num_groups = 1, p.in = {64, 64, 64}, p.kernel = {4, 4, 4};
    p.stride = {2, 2, 2}, p.padding = {1, 1, 1};
  };
  check(plan_of(one), col2im, "354 us, the kernel for few channels 507 where 307 are expected");

  // In training, forward and gradients together, of 64 > 2, k5 (perf/results/h200_training_plans.txt).
  const auto two = [](Problem& p) {
    p.n = 2, p.c = 64, p.k = p.num_groups = 2, p.in = {40, 38, 37}, p.kernel = {5, 5, 5};
    p.padding = {2, 2, 2};
  };
  check(plan_of(two, true), col2im, "464 us, the SM90 plan 776");
  expect(
      plan_of(two, true).instead_of_sm90 && !plan_of(long_sums, true).instead_of_sm90,
      "whose place it takes: where that was the SM90 plan's, inference keeps its promise of the same bits");
  check(plan_of([&](Problem& p) { two(p), p.in = {10, 8, 8}; }, true), Algorithm::kSm90ImplicitGemm,
        "too short for PyTorch's convolution_backward, which takes the host longer");
  check(plan_of([&](Problem& p) { two(p), p.k = 16; }, true), Algorithm::kSm90ImplicitGemm,
        "of 16 outputs the SM90 plan's gradients are as quick");
  check(plan_of([&](Problem& p) { two(p), ieee(p); }, true), Algorithm::kSm90ImplicitGemm, "not compared");
  check(plan_of([&](Problem& p) { two(p), p.tail.returns_conv = true; }, true), Algorithm::kCudaLibrary,
        "a returned convolution is what is kept");

  Problem p = headline();
  const auto lanes = [&p](std::int64_t k, const Extent3& in) {
    p.n = 1, p.k = k, p.in = in;
    return col2im_lane_channels(p);
  };
  expect(lanes(1, {64, 64, 64}) == 1 && lanes(3, {8, 8, 8}) == 2 && lanes(3, {80, 80, 80}) == 2,
         "channels of a lane, of few");
  p.stride = {2, 2, 2};
  expect(lanes(3, {20, 20, 20}) == 2 && lanes(3, {80, 80, 80}) == 4, "and of short sums");
  p.stride = {1, 1, 1};
  expect(lanes(20, {8, 8, 8}) == 2 && lanes(20, {64, 64, 64}) == 8, "and of more where there are enough");
}

/// In planes of each sample, or in rows through all; and the tile that it is cut into.
void test_columns() {
  Problem p = headline(DType::kFloat32, Layout::kNCDHW);
  p.n = 2, p.c = 96, p.k = 64, p.in = {9, 12, 10};
  const ColumnsLayout planes(p);
  expect(planes.samples == 2 && planes.positions == 1080 && planes.pitch == 1080 && planes.rows == 64 * 27 &&
             planes.row_k == 27 && planes.row_tap == 1,
         "rows of each sample's positions, in the weight's order");
  p.x_layout = Layout::kNDHWC, p.w_channels_last = true, p.in = {3, 3, 3};
  const ColumnsLayout rows(p);
  expect(
      rows.samples == 1 && rows.positions == 54 && rows.pitch == 56 && rows.row_k == 1 && rows.row_tap == 64,
      "rows through all samples, whole 16 bytes, and the weight's other order");
  expect(columns_tile_rows(27, 59052) == 32 && columns_tile_rows(1728, 1152) == 64 &&
             columns_tile_rows(8640, 64) == 128,
         "the tile of which the fewest are needed");
}

/// What the kernels count in 32 bits, with what lies beyond it.
void test_counts() {
  const auto runs = [](const Problem& p) { return col2im_obstacle(p, hopper()).empty(); };
  Problem p = headline(DType::kFloat32, Layout::kNDHWC);
  p.n = 1, p.k = 1, p.num_groups = 1, p.kernel = {1, 1, 1}, p.c = 1;
  constexpr std::int64_t kEnd = std::int64_t{1} << 31;
  p.in = {1, 1, kEnd / 16};
  expect(runs(p), "few enough");
  p.k = 16;
  expect(!runs(p), "2^31 columns");
  p.in[2] -= 32;
  expect(!runs(p), "and 512 fewer, which a block's last values go beyond");
  p.in[2] -= 64;
  expect(runs(p), "1536 fewer");
  p = headline(), p.in = {1, 1, 1}, p.kernel = {1, 1, 2};
  p.stride[2] = 1 << 20, p.dilation[2] = (1 << 20) - 1;
  expect(!runs(p), "taps of one phase 2^40 outputs apart");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_choice();
    upconv3d::test_few_outputs();
    upconv3d::test_finishing();
    upconv3d::test_kinds_timed_later();
    upconv3d::test_columns();
    upconv3d::test_counts();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "col2im_plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
