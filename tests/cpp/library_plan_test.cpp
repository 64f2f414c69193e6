// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/library_plan.hpp: when PyTorch's convolution with our passes after it is the plan, or the col2im
/// plan. Without torch or CUDA.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/library_plan.hpp"
#include "core/plan.hpp"
#include "core/plan_times.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// x [1,512,6^3], w [512,512,3^3]: one tile of many k-blocks for the SM90 kernel.
Problem long_and_narrow() {
  Problem p = headline();
  p.n = 1, p.c = p.k = 512, p.in = {6, 6, 6}, p.padding = {1, 1, 1};
  p.w_channels_last = true;
  return p;
}

void test_choice() {
  const auto plan_of = [](const std::function<void(Problem&)>& change, const Device& device = hopper()) {
    Problem p = long_and_narrow();
    change(p);
    return select_plan(p, device, all_compiled());
  };
  const auto is_library = [&](const std::function<void(Problem&)>& change) {
    return plan_of(change).algorithm == Algorithm::kCudaLibrary;
  };
  const Plan plan = plan_of([](Problem&) {});
  expect(plan.algorithm == Algorithm::kCudaLibrary && has_part(plan.reason, "not the SM90 kernel") &&
             plan.stages.back() == "activation_group_norm_held",
         "a small block: " + plan.reason);
  expect(plan.expected_us == library_plan_us(long_and_narrow(), hopper()), "and what it is expected to take");
  const auto returned = [](Problem& p) { p.tail.returns_conv = true, p.tail.order = Order::kNormAct; };
  expect(is_library(returned), "a small block that returns its convolution");
  const auto biased = [&](Problem& p) { returned(p), p.has_bias = true; };
  expect(plan_of(biased).expected_us > plan_of(returned).expected_us + 3,
         "PyTorch adds a returned convolution's bias in a pass of its own");
  expect(!is_library([](Problem& p) { p.dtype = DType::kFloat32; }), "ieee has no tensor cores in cuDNN");
  const auto ncdhw = [](Problem& p) { p.x_layout = p.y_layout = Layout::kNCDHW; };
  const auto wide = [&](Problem& p) {
    ncdhw(p);
    p.n = 4, p.c = p.k = 128, p.in = {10, 10, 10}, p.w_channels_last = false;
  };
  const Plan copied = plan_of(wide);
  expect(copied.algorithm == Algorithm::kCudaLibrary && copied.conv_layout == Layout::kNDHWC &&
             copied.stages.front() == "channels_last_copies" &&
             copied.stages.back() == "activation_group_norm_held",
         "NCDHW, 30 us, without copies 35, the SM90 plan 57: " + copied.reason);
  const Plan as_it_lies = plan_of([&](Problem& p) { wide(p), returned(p); });
  expect(as_it_lies.conv_layout == Layout::kNCDHW, "a convolution that is returned lies as y does");
  Problem kept = long_and_narrow();
  wide(kept);
  Device library = hopper();
  library.forced_plan = "library";
  expect(select_plan(kept, library, all_compiled()).conv_layout == Layout::kNDHWC &&
             select_training_plan(kept, library, all_compiled()).conv_layout == Layout::kNCDHW,
         "as does one that is kept");
  expect(plan.instead_of_sm90 && copied.instead_of_sm90, "bits that have to repeat");
  const Plan apart = plan_of([&](Problem& p) {
    wide(p);
    p.x_aligned = false;
  });
  expect(apart.reason == copied.reason && apart.stages == copied.stages,
         "a copy lies aligned: " + apart.reason);
  // Small beside the kernel that computes twice; in training tiles of the other one would be empty.
  const auto thin = [&](Problem& p) {
    ncdhw(p);
    p.n = 512, p.c = 128, p.k = 64, p.in = {1, 3, 14}, p.kernel = {1, 1, 4}, p.stride = {2, 2, 2};
    p.padding = {0, 0, 3}, p.num_groups = 8;
  };
  Problem thin_problem = long_and_narrow();
  thin(thin_problem);
  const Plan trained = select_training_plan(thin_problem, hopper(), all_compiled());
  expect(plan_of(thin).instead_of_sm90 && trained.algorithm == Algorithm::kCudaLibrary &&
             !trained.instead_of_sm90,
         "small in inference alone: " + trained.reason);
  const Plan pointwise = plan_of([&](Problem& p) {
    ncdhw(p);
    p.c = p.k = 256, p.in = {64, 64, 5}, p.kernel = {1, 1, 1}, p.padding = {0, 0, 0};
  });
  expect(pointwise.algorithm == Algorithm::kCudaLibrary && pointwise.conv_layout == Layout::kNCDHW &&
             pointwise.stages.size() == 2,
         "pointwise convolutions of NCDHW need no copies: " + pointwise.reason);
  expect(!is_library([](Problem& p) { p.x_layout = Layout::kNCDHW; }), "x would be copied");
  const auto dilated = [](Problem& p) { p.dilation = {2, 2, 2}, p.padding = {2, 2, 2}; };
  expect(!is_library([&](Problem& p) { dilated(p), p.c = p.k = 128, p.n = 2, p.in = {24, 24, 24}; }),
         "dilated tiles of 128 channels");
  const Plan shared_by_none = plan_of([&](Problem& p) {
    dilated(p);
    p.n = 8, p.c = 96, p.k = p.num_groups = 48, p.in = {35, 47, 46};
  });
  expect(shared_by_none.algorithm == Algorithm::kCudaLibrary &&
             shared_by_none.stages.back() == "group_norm_normalize",
         "dilated tiles of 64 channels: 488 us, the SM90 plan 653, " + shared_by_none.reason);
  expect(!is_library([](Problem& p) { p.n = 64, p.in = {16, 16, 16}; }), "134 MB");
  expect(!is_library([](Problem& p) {
    p.c = p.k = 64, p.n = 4, p.in = {32, 32, 32}, p.kernel = {5, 5, 5}, p.padding = {2, 2, 2};
  }),
         "kernels that cuDNN has no quick one for");
  const Problem training = long_and_narrow();
  expect(select_training_plan(training, hopper(), all_compiled()).keeps_activation,
         "training keeps relu(conv)");
}

/// A block of few or odd channels.
struct NearCase {
  std::int64_t n, c, k;
  Extent3 in, kernel, stride, padding, output_padding;
  std::int64_t num_groups;
  bool is_float;  // "tf32" NCDHW; else bfloat16 channels_last_3d
  Algorithm quickest;
};

/// Which plan is quicker was measured of each (perf/results/h200_small_channels.txt, h200_plan_limits.txt,
/// h100_col2im.txt).
void test_near_choices() {
  constexpr Algorithm library = Algorithm::kCudaLibrary, col2im = Algorithm::kCudaCol2im;
  constexpr Algorithm sm90 = Algorithm::kSm90ImplicitGemm, direct = Algorithm::kCudaDirect;
  const NearCase cases[] = {
      {4, 8, 24, {4, 4, 4}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}, 8, false, library},
      {4, 8, 24, {4, 4, 4}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}, 8, true, col2im},
      {4, 512, 8, {6, 6, 6}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, 8, false, col2im},
      {4, 512, 8, {6, 6, 6}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, 8, true, col2im},
      {2, 32, 8, {12, 12, 12}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}, 2, true, col2im},
      {8, 100, 3, {28, 28, 28}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, 1, true, col2im},
      {8, 100, 3, {28, 28, 28}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, 1, false, col2im},
      {1, 256, 12, {22, 19, 21}, {3, 3, 3}, {3, 3, 3}, {0, 0, 0}, {0, 0, 0}, 4, false, col2im},
      {8, 512, 64, {4, 8, 8}, {3, 3, 3}, {3, 3, 3}, {0, 0, 0}, {0, 0, 0}, 16, false, sm90},
      {1, 256, 32, {8, 8, 8}, {3, 3, 3}, {3, 3, 3}, {0, 0, 0}, {0, 0, 0}, 16, true, col2im},
      {4, 8, 8, {24, 24, 24}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, 1, true, direct},
      {1, 20, 32, {28, 28, 28}, {5, 5, 5}, {1, 1, 1}, {2, 2, 2}, {0, 0, 0}, 1, true, sm90},
      {1, 512, 6, {14, 14, 14}, {5, 5, 5}, {1, 1, 1}, {2, 2, 2}, {0, 0, 0}, 2, false, col2im},
      {4, 20, 20, {20, 20, 20}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}, 4, false, sm90},
      {1, 128, 20, {5, 10, 11}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}, 2, false, library},
      {2, 8, 128, {24, 24, 24}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}, 16, true, library},
  };
  for (const NearCase& c : cases) {
    Problem p = headline(c.is_float ? DType::kFloat32 : DType::kBFloat16,
                         c.is_float ? Layout::kNCDHW : Layout::kNDHWC);
    p.precision = c.is_float ? Precision::kTF32 : Precision::kIEEE;
    p.n = c.n, p.c = c.c, p.k = c.k, p.in = c.in, p.kernel = c.kernel, p.stride = c.stride;
    p.padding = c.padding, p.output_padding = c.output_padding, p.num_groups = c.num_groups;
    p.w_channels_last = !c.is_float;
    const Plan plan = select_plan(p, hopper(), all_compiled());
    const std::string what = concat(describe(p), ": ", plan.reason);
    expect(plan.algorithm == c.quickest, concat(name(plan.algorithm), ": ", what));
    expect(c.quickest != library || plan.instead_of_sm90, "bits that have to repeat: " + what);
    const bool held = plan.stages.back() == "activation_group_norm_held";
    expect(held || (c.quickest != library && !has_part(plan.stages.front(), "columns")),
           "one launch after it: " + what);
  }
  // The kernel for few channels is asked first.
  Problem few = headline();
  few.n = 4, few.c = 48, few.k = 12, few.in = {20, 20, 20}, few.kernel = few.stride = {2, 2, 2};
  few.num_groups = 4, few.w_channels_last = true;
  expect(select_plan(few, hopper(), all_compiled()).algorithm == Algorithm::kCudaDirect, "few channels");
}

/// Convolutions of any length: where tiles leave most of the last wave idle, and cuDNN's kernels are quick.
void test_long_choices() {
  const auto plan_of = [](const std::function<void(Problem&)>& change) {
    Problem p = headline();
    p.n = 2, p.c = 384, p.in = {28, 28, 28}, p.padding = {1, 1, 1};
    p.w_channels_last = true;
    change(p);
    return select_plan(p, hopper(), all_compiled());
  };
  const Plan chosen = plan_of([](Problem&) {});
  expect(chosen.algorithm == Algorithm::kCudaLibrary && chosen.instead_of_sm90, "1.3 waves of tiles");
  expect(has_part(chosen.reason, "cuDNN's convolution and what follows it are expected to take"),
         "its reason: " + chosen.reason);
  const auto sm90 = [&](const std::function<void(Problem&)>& change, const std::string& what) {
    expect(plan_of(change).algorithm == Algorithm::kSm90ImplicitGemm, what);
  };
  sm90([](Problem& p) { p = headline(); }, "the headline");
  sm90([](Problem& p) { p.kernel = {5, 5, 5}, p.padding = {2, 2, 2}; },
       "kernels that cuDNN has no quick one for");
  sm90([](Problem& p) { p.dtype = DType::kFloat32, p.precision = Precision::kTF32; }, "float32");
}

/// Pointwise convolutions that are matmuls as they lie, and few channels at float32's accuracy.
void test_matmuls_and_few_outputs() {
  const auto plan_of = [](const std::function<void(Problem&)>& change) {
    Problem p = headline(DType::kBFloat16, Layout::kNCDHW);
    p.n = 1, p.c = 320, p.k = 96, p.in = {48, 48, 48}, p.kernel = {1, 1, 1}, p.padding = {0, 0, 0};
    change(p);
    return select_plan(p, hopper(), all_compiled());
  };
  const auto is_library = [&](const std::function<void(Problem&)>& change) {
    return plan_of(change).algorithm == Algorithm::kCudaLibrary;
  };
  const Plan matmul = plan_of([](Problem& p) { p.n = 2, p.c = 96, p.k = 48, p.in = {56, 56, 57}; });
  expect(matmul.algorithm == Algorithm::kCudaLibrary && matmul.instead_of_sm90,
         "66 us, the SM90 plan 159: " + matmul.reason);
  expect(is_library([](Problem& p) { p.n = 2, p.c = p.k = 32, p.in = {64, 64, 64}; }),
         "51 us, the SM90 plan 137, and quicker than the kernel for few channels");
  expect(!is_library([](Problem& p) { p.n = 4, p.c = p.k = 1024, p.in = {32, 32, 32}; }),
         "many channels, of which arithmetic is what takes long");
  const auto few_outputs = [](Problem& p) {
    p.dtype = DType::kFloat32, p.precision = Precision::kIEEE;
    p.n = 2, p.c = 320, p.k = p.num_groups = 8, p.in = {29, 39, 40}, p.kernel = p.stride = {2, 2, 2};
  };
  expect(plan_of(few_outputs).algorithm == Algorithm::kCudaCol2im, "149 us, the SM90 plan 433, cuDNN's 4665");
  const auto single_channel = [](Problem& p) {
    p.dtype = DType::kFloat32, p.precision = Precision::kIEEE;
    p.n = 16, p.c = p.k = p.num_groups = 1, p.in = {32, 32, 32}, p.kernel = {3, 3, 3};
  };
  expect(is_library(single_channel), "37 us, the direct plan 124, col2im 84");
}

/// Of which each was measured by plan (perf/results/h200_plan_limits.txt, parts 9 to 12).
void test_small_blocks_by_plan() {
  const auto plan_of = [](std::int64_t c, std::int64_t k, const Extent3& in, const Extent3& kernel,
                          const std::function<void(Problem&)>& change) {
    Problem p = headline(DType::kFloat32, Layout::kNCDHW);
    p.precision = Precision::kTF32;
    p.n = 1, p.c = c, p.k = k, p.in = in, p.kernel = kernel, p.padding = {0, 0, 0}, p.num_groups = 1;
    change(p);
    return select_plan(p, hopper(), all_compiled());
  };
  constexpr Algorithm library = Algorithm::kCudaLibrary, col2im = Algorithm::kCudaCol2im;
  const auto check = [](const Plan& plan, Algorithm algorithm, const std::string& what) {
    expect(plan.algorithm == algorithm, concat(what, ": ", name(plan.algorithm), ", ", plan.reason));
  };
  const auto dilate = [](Problem& p) { p.dilation = p.padding = {2, 2, 2}; };
  check(plan_of(16, 48, {14, 14, 15}, {3, 3, 3}, dilate), library, "dilated: 30 us, col2im 29");
  check(plan_of(32, 128, {22, 17, 21}, {3, 3, 3}, dilate), library, "wide: 44 us, the SM90 plan 60");
  const auto in_rows = [](Problem& p) { p.x_layout = p.y_layout = Layout::kNDHWC, p.w_channels_last = true; };
  const auto half = [&](Problem& p) { in_rows(p), p.dtype = DType::kBFloat16; };
  const auto many_taps = [&](Problem& p) { half(p), p.n = 4; };
  check(plan_of(20, 320, {8, 10, 10}, {5, 5, 5}, many_taps), Algorithm::kSm90ImplicitGemm,
        "and many taps: three times as expected");

  const auto four_outputs = [&](Problem& p) { half(p), p.padding = {1, 1, 1}, p.num_groups = 4; };
  check(plan_of(64, 4, {17, 17, 17}, {3, 3, 3}, four_outputs), col2im, "cuDNN's 32, the SM90 plan 48");
  const auto pointwise = [&](Problem& p) { half(p), p.num_groups = 4; };
  const Plan launches = plan_of(64, 4, {17, 17, 17}, {1, 1, 1}, pointwise);
  check(launches, library, "all there is to it is a product");
  expect(launches.stages.size() == 4 && launches.stages.back() == "group_norm_normalize", launches.reason);
  check(plan_of(64, 4, {60, 60, 60}, {3, 3, 3}, four_outputs), col2im,
        "on an H100 122, the SM90 plan 145, the library plan 154");

  const auto ieee = [](Problem& p) { p.precision = Precision::kIEEE; };
  const auto short_sums = [&](Problem& p) { ieee(p), p.padding = {1, 0, 0}, p.num_groups = 256; };
  check(plan_of(4, 256, {18, 14, 19}, {3, 3, 3}, short_sums), library, "sums of 108 products: 34, 87");
  const auto long_sums = [&](Problem& p) { ieee(p), p.padding = {1, 0, 1}, p.num_groups = 64; };
  check(plan_of(96, 64, {9, 12, 10}, {3, 3, 3}, long_sums), col2im, "of 2592, in series by cuDNN's kernels");
  const Plan matmul = plan_of(20, 12, {23, 24, 23}, {1, 1, 1}, [&](Problem& p) { ieee(p), p.n = 2; });
  check(matmul, library, "18, the kernel for few channels 29");
  expect(has_part(matmul.reason, "a matmul as it lies"), matmul.reason);
  const auto eight_phases = [&](Problem& p) { ieee(p), p.n = 2, p.stride = {2, 2, 2}; };
  check(plan_of(192, 16, {17, 14, 13}, {2, 2, 2}, eight_phases), col2im, "36, cuDNN's 217");
  const auto one_output = [&](Problem& p) { ieee(p), p.padding = {1, 1, 1}; };
  check(plan_of(128, 1, {42, 38, 37}, {3, 3, 3}, one_output), col2im, "36, cuDNN's by any kernel 66");
}

/// Small blocks that are to spare the host: the SM90 plan, as long as it takes the device no longer than
/// PyTorch's convolution takes the host.
void test_spared_hosts() {
  const auto algorithm = [](Problem p, bool spares_host) {
    Device device = hopper();
    device.spares_host = spares_host;
    return select_plan(p, device, all_compiled()).algorithm;
  };
  Problem small = headline();  // a level of MONAI's UNet
  small.n = 2, small.c = 384, small.k = 64, small.in = {6, 6, 6}, small.stride = {2, 2, 2};
  small.padding = small.output_padding = {1, 1, 1};
  small.num_groups = 2;
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      small.dtype = dtype, small.precision = Precision::kTF32;
      small.x_layout = small.y_layout = layout;
      // On an H100 28 to 34 us, the library plan 33 to 49 but for 26 of bfloat16 in NDHWC, of a weight that
      // lies so; here it lies in NCDHW, which PyTorch copies at every call.
      expect(algorithm(small, false) == Algorithm::kCudaCol2im, "quickest: " + describe(small));
      expect(algorithm(small, true) == Algorithm::kSm90ImplicitGemm,
             "and with a launch less: " + describe(small));
    }
  }
  Problem empty_tiles = small;  // a few positions of each sample
  empty_tiles.n = 64, empty_tiles.c = 2048, empty_tiles.k = 512, empty_tiles.in = {2, 2, 2};
  empty_tiles.kernel = {4, 4, 4}, empty_tiles.output_padding = {0, 0, 0}, empty_tiles.w_channels_last = true;
  expect(algorithm(empty_tiles, true) == Algorithm::kCudaLibrary, "tiles that are mostly empty");
  Problem lengthy = headline();
  lengthy.n = 2, lengthy.c = 384, lengthy.in = {28, 28, 28}, lengthy.padding = {1, 1, 1};
  lengthy.w_channels_last = true;
  expect(algorithm(lengthy, true) == Algorithm::kCudaLibrary, "what the device takes longer for");
  Problem few = small;
  few.c = 32, few.k = 2, few.in = {48, 48, 48};
  expect(algorithm(few, true) == Algorithm::kCudaDirect, "two channels");

  // col2im launches more than the SM90 plan, which takes the device 400 us of this, 684 and 45 of those.
  Problem many = headline(DType::kFloat32);
  many.precision = Precision::kTF32, many.n = 3, many.c = 96, many.k = 3, many.in = {37, 36, 37};
  many.kernel = many.stride = {2, 2, 2}, many.num_groups = 1, many.w_channels_last = true;
  Problem ieee = headline(DType::kFloat32);
  ieee.n = 4, ieee.c = 320, ieee.k = 2, ieee.in = {28, 26, 27}, ieee.padding = {1, 1, 1};
  ieee.num_groups = 1, ieee.w_channels_last = true;
  Problem brief = headline(DType::kFloat32, Layout::kNCDHW);
  brief.n = 1, brief.c = 12, brief.k = 24, brief.in = {8, 8, 9}, brief.kernel = brief.stride = {2, 2, 2};
  for (const Problem& p : {many, ieee, brief}) {
    expect(algorithm(p, true) == Algorithm::kCudaCol2im, "to the host's cost: " + describe(p));
    expect(algorithm(p, false) == Algorithm::kCudaCol2im, "what an eager model asks first: " + describe(p));
  }
}

/// Of cuDNN's deterministic kernels; times of any and of these, us, from h200_deterministic.txt.
void test_deterministic_kernels() {
  const auto is_quick = [](DType dtype, const std::function<void(Problem&)>& change) {
    Problem p = headline(dtype);
    p.precision = Precision::kTF32;
    change(p);
    return has_quick_deterministic_kernels(p);
  };
  const auto stays = [](Problem&) {};
  const auto strided = [](Problem& p) { p.kernel = p.stride = {2, 2, 2}; };
  const auto grouped = [](Problem& p) { p.groups = 2; };
  const auto both = [&](Problem& p) { strided(p), grouped(p); };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    expect(is_quick(dtype, stays) && is_quick(dtype, strided), "one group");
    expect(!is_quick(dtype, both), "groups with a stride: 185 and 15418 in bfloat16");
  }
  const auto dilated = [](Problem& p) { p.dilation = {1, 2, 2}; };
  const auto dilated_and_strided = [&](Problem& p) { strided(p), dilated(p); };
  expect(is_quick(DType::kFloat32, dilated) && is_quick(DType::kBFloat16, dilated_and_strided), "dilated");
  expect(!is_quick(DType::kFloat32, dilated_and_strided), "tf32, dilated with a stride: 67 and 143");
  const auto long_strided = [](Problem& p) { p.kernel = p.stride = {4, 4, 4}; };
  expect(!is_quick(DType::kFloat32, long_strided) && is_quick(DType::kFloat16, long_strided),
         "tf32, a stride of 4: 19 and 413");
  expect(is_quick(DType::kFloat16, grouped) && !is_quick(DType::kFloat32, grouped),
         "groups of 32 > 64 at stride 1; tf32 up to 2.3 times as long");
  expect(is_quick(DType::kFloat32, [](Problem& p) { p.groups = 4, p.c = p.k = 128; }),
         "groups that cuDNN has kernels for");
  const auto ieee = [](Problem& p) { p.precision = Precision::kIEEE; };
  expect(!is_quick(DType::kFloat32, ieee), "float32's accuracy");
  expect(is_quick(DType::kFloat32,
                  [&](Problem& p) { ieee(p), p.n = 1, p.kernel = {1, 1, 1}, p.in = {10, 9, 11}; }),
         "that of a short pointwise block: 13 and 13");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_choice();
    upconv3d::test_near_choices();
    upconv3d::test_long_choices();
    upconv3d::test_matmuls_and_few_outputs();
    upconv3d::test_small_blocks_by_plan();
    upconv3d::test_spared_hosts();
    upconv3d::test_deterministic_kernels();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "library_plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
