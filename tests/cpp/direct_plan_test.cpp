// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/direct_tiling.hpp and core/direct_plan.hpp: how outputs are cut and dealt to threads, what is
/// refused, and where the direct plan is chosen. Without torch or CUDA.

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>

#include "core/direct_limits.hpp"
#include "core/direct_plan.hpp"
#include "core/direct_tiling.hpp"
#include "core/errors.hpp"
#include "core/few_channels_layout.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// An up-block of MedNeXt-S: k taps, stride 2, each channel a group.
Problem mednext(std::int64_t channels, std::int64_t extent, std::int64_t taps = 3,
                Layout layout = Layout::kNDHWC) {
  Problem p;
  p.n = 1, p.c = p.k = p.groups = p.num_groups = channels;
  p.in = {extent, extent, extent};
  p.kernel = {taps, taps, taps};
  p.stride = {2, 2, 2};
  p.padding = {taps / 2, taps / 2, taps / 2};
  p.dtype = DType::kBFloat16;
  p.x_layout = p.y_layout = layout;
  p.tail.activation = Activation::kNone;
  p.tail.order = Order::kNormAct;
  return p;
}

/// KernelBench level 2, problem 60.
Problem few_channels(Layout layout = Layout::kNDHWC) {
  Problem p = mednext(16, 16, 3, layout);
  p.n = 128, p.c = 3, p.groups = 1, p.num_groups = 4, p.in = {16, 32, 32};
  return p;
}

/// Cells cover each axis's outputs once, tiles cover the cells, and the lanes are the block's threads.
void test_tiling_of(const Problem& p) {
  const std::string what = "tiling of " + describe(p);
  const DirectTiling t = direct_tiling(p);
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t first = t.first[axis] * p.stride[axis] - p.padding[axis];
    const std::int64_t behind = (t.first[axis] + t.cells[axis]) * p.stride[axis] - p.padding[axis];
    expect(first <= 0 && first > -p.stride[axis], what + ": the first cell holds the first output");
    expect(behind >= out[axis] && behind - p.stride[axis] < out[axis], what + ": the last cell");
    expect(
        t.tiles[axis] * t.tile[axis] >= t.cells[axis] && (t.tiles[axis] - 1) * t.tile[axis] < t.cells[axis],
        what + ": tiles");
  }
  expect(t.lanes_c * t.lanes_q * t.lanes_z == kDirectThreads, what + ": lanes");
  expect(t.channel_blocks * t.lanes_c * t.vector >= p.k, what + ": channels");
  expect(p.k % t.vector == 0, what + ": whole vectors");
  expect(!t.depthwise || t.shared_bytes % 16 == 0, what + ": weights in whole loads");
  Problem unaligned = p;
  unaligned.x_aligned = false;
  expect(!t.depthwise || direct_tiling(unaligned).vector == 1, what + ": pairs of aligned inputs alone");
  expect(!t.depthwise || t.lanes_c <= kMaxDepthwiseLanes,
         what + ": a block's threads cover a row of weights");
  expect(t.vector == 1 || t.depthwise || (p.k / p.groups) % t.vector == 0, what + ": vectors of one group");
}

void test_tiling() {
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const std::int64_t channels : {1, 6, 7, 64, 512}) {
      for (const std::int64_t extent : {1, 5, 8, 64}) {
        for (const std::int64_t taps : {1, 2, 3, 5, 7}) {
          Problem p = mednext(channels, extent, taps, layout);
          test_tiling_of(p);
          expect(direct_tiling(p).depthwise == (taps == 3 || taps == 5 || taps == 7), "k3, k5 and k7");
          p.stride = {3, 1, 2}, p.dilation = {1, 2, 3}, p.padding = {0, 0, 1};
          if (p.out()[2] > 0) test_tiling_of(p);
        }
      }
    }
    // The kernels of a channel per group were compiled for the same number of either, without dilation.
    Problem others = mednext(64, 8, 3, layout);
    others.dilation = {1, 1, 2};
    expect(!direct_tiling(others).depthwise, "not dilated");
    others = mednext(64, 8, 3, layout), others.k = others.num_groups = 128;
    expect(!direct_tiling(others).depthwise, "not of two outputs per input");
    test_tiling_of(few_channels(layout));
    // Hardly any positions beside the channels, so that threads are left over for these.
    for (const Extent3& in : {Extent3{1, 9, 1}, Extent3{1, 9, 2}, Extent3{2, 9, 1}, Extent3{2, 2, 2}}) {
      for (const std::int64_t channels : {3, 64, 512}) {
        for (const std::int64_t taps : {3, 5, 7}) {
          Problem p = mednext(channels, 1, taps, layout);
          p.in = in;
          if (p.out()[0] > 0 && p.out()[2] > 0) test_tiling_of(p);
        }
      }
    }
  }
}

void test_choice() {
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const Problem& p : {mednext(64, 64, 3, layout), mednext(512, 8, 3, layout),
                             mednext(64, 48, 5, layout), mednext(512, 8, 7, layout), few_channels(layout)}) {
      const Plan plan = select_plan(p, hopper(), all_compiled());
      expect(plan.algorithm == Algorithm::kCudaDirect, "chosen for " + describe(p) + ": " + plan.reason);
      // Of few channels the SM90 plan could run, which is expected to take longer.
      expect(has_part(plan.reason, "direct kernel") &&
                 has_part(plan.reason, "not the SM90 kernel") == (p.groups > 1),
             "reason: " + plan.reason);
      const std::int64_t tiles =
          plan.few_channels ? few_channels_layout(p).tile_count() : direct_tiling(p).tile_count();
      expect(plan.stages.size() == 3 && plan.tiles == tiles, "three launches");
      expect(plan.few_channels == (p.groups == 1), "tensor cores wherever channels are not apart");
      expect(select_training_plan(p, hopper(), all_compiled()).algorithm == Algorithm::kCudaLibrary,
             "training keeps the library plan: " + describe(p));
    }
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Plan headline_plan = select_plan(headline(dtype), hopper(), all_compiled());
    expect(headline_plan.algorithm == Algorithm::kSm90ImplicitGemm, "many channels keep the SM90 plan");
  }
  Problem stride_1 = mednext(64, 32);
  stride_1.stride = {1, 1, 1};
  expect(select_plan(stride_1, hopper(), all_compiled()).algorithm == Algorithm::kCudaLibrary,
         "cuDNN's depthwise convolutions of stride 1 are quicker");
  Problem groups_of_16 = mednext(64, 32);
  groups_of_16.groups = 4;
  const Plan of_groups = select_plan(groups_of_16, hopper(), all_compiled());
  expect(of_groups.algorithm == Algorithm::kCudaDirect && of_groups.few_channels,
         "groups of 16 go to the kernel for few channels: " + of_groups.reason);
}

/// As timed by plan (perf/results/h200_few_inputs.txt).
void test_many_outputs_of_few_inputs() {
  Problem p;
  p.n = 1, p.c = 4, p.k = 512, p.in = {16, 16, 16}, p.kernel = {3, 3, 3}, p.padding = {1, 1, 1};
  p.has_bias = true, p.num_groups = 32;
  const auto expect_plan = [](const Problem& problem, Algorithm algorithm) {
    const Plan plan = select_plan(problem, hopper(), all_compiled());
    expect(plan.algorithm == algorithm,
           "of few inputs and many outputs: " + describe(problem) + "\n" + describe(plan));
  };
  for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      p.x_layout = p.y_layout = layout, p.dtype = dtype, p.precision = Precision::kTF32;
      expect_plan(p, Algorithm::kCudaDirect);
      Problem long_result = p;
      long_result.n = 4;
      const bool is_half = dtype == DType::kBFloat16;
      expect_plan(long_result, is_half ? Algorithm::kSm90ImplicitGemm : Algorithm::kCudaDirect);
      Problem one_input = p;
      one_input.c = 1, one_input.k = 128, one_input.in = {32, 32, 32}, one_input.num_groups = 8;
      expect_plan(one_input, is_half ? Algorithm::kSm90ImplicitGemm : Algorithm::kCudaDirect);
      Problem strided = one_input;
      strided.n = 2, strided.k = 96, strided.kernel = strided.stride = {2, 2, 2}, strided.padding = {0, 0, 0};
      expect_plan(strided, Algorithm::kSm90ImplicitGemm);
      expect(select_training_plan(strided, hopper(), all_compiled()).algorithm == Algorithm::kCudaLibrary,
             "trained 1083 and 1427 in NCDHW, by the library plan 764 and 1176");
      Problem many_taps = p;
      many_taps.n = 16, many_taps.c = 3, many_taps.in = {19, 16, 18};
      many_taps.kernel = {5, 5, 5}, many_taps.padding = {2, 2, 2};
      expect_plan(many_taps, Algorithm::kSm90ImplicitGemm);
    }
  }
}

/// Where the kernel for few channels was not compared with the SM90 plan, or could not run, all stays as it
/// is.
void test_others_of_few_inputs() {
  Problem p;
  p.n = 1, p.c = 4, p.k = 512, p.in = {16, 16, 16}, p.kernel = {3, 3, 3}, p.padding = {1, 1, 1};
  p.num_groups = 32, p.dtype = DType::kFloat32, p.precision = Precision::kTF32;
  expect(select_plan(p, hopper(), all_compiled()).few_channels, "by that kernel");
  Device sparing = hopper();
  sparing.spares_host = true;
  expect(select_plan(p, sparing, all_compiled()).algorithm == Algorithm::kSm90ImplicitGemm,
         "two launches where the host is to be spared");
  Device ampere = hopper();
  ampere.compute_capability = 80, ampere.sm_count = 108;
  expect(!select_plan(p, ampere, all_compiled()).few_channels, "times are an H200's");
  Problem with_skip = p;
  with_skip.dtype = DType::kBFloat16;
  expect(select_plan(with_skip, hopper(), all_compiled()).few_channels,
         "that kernel in 16 bit, which adds no skip");
  with_skip.tail.has_skip = true;
  expect(select_plan(with_skip, hopper(), all_compiled()).own_convolution, "a skip has our convolution");
  Problem bare = p;
  bare.n = 4, bare.c = 1, bare.k = 72, bare.in = {32, 32, 32}, bare.kernel = {2, 2, 2}, bare.num_groups = 1;
  bare.tail = make_tail("act_norm", false, "gelu", 0.0, false);
  expect(select_plan(bare, hopper(), all_compiled()).algorithm == Algorithm::kCudaDirect, "without a norm");
  // More partial moments than are worth merging by several blocks, of no norm group.
  for (const std::int64_t inputs : {1, 64}) {
    Problem empty = p;
    empty.n = 0, empty.c = inputs, empty.k = 128, empty.in = {64, 64, 64}, empty.num_groups = 1;
    empty.kernel = empty.stride = {2, 2, 2}, empty.padding = {0, 0, 0};
    expect(!select_plan(empty, hopper(), all_compiled()).reason.empty(), "a plan without samples");
  }
}

/// Groups with a stride, by times of h200_grouped.txt, part 6.
void test_strided_groups() {
  Problem p = headline();
  p.n = 2, p.c = 192, p.k = 24, p.groups = 4, p.in = {8, 8, 8}, p.num_groups = 1;
  p.stride = {2, 2, 2}, p.padding = p.output_padding = {1, 1, 1};
  const auto algorithm = [&] { return select_plan(p, hopper(), all_compiled()).algorithm; };
  expect(algorithm() == Algorithm::kCudaDirect, "48 > 6, bfloat16: 26 us, cuDNN 79");
  p.dtype = DType::kFloat32, p.precision = Precision::kTF32, p.x_layout = p.y_layout = Layout::kNCDHW;
  p.w_channels_last = false;
  expect(algorithm() == Algorithm::kCudaLibrary, "tf32 in NCDHW: 40 us, cuDNN 34");
  p.n = 1, p.c = 256, p.k = 96, p.in = {20, 20, 20}, p.kernel = p.stride = {1, 2, 2}, p.num_groups = 8;
  p.padding = p.output_padding = {0, 0, 0}, p.x_layout = p.y_layout = Layout::kNDHWC;
  p.w_channels_last = true;
  expect(algorithm() == Algorithm::kCudaDirect, "64 > 24, tf32: 57 us, the SM90 plan 90");
}

void test_no_norm_is_one_launch() {
  Problem p = mednext(64, 64);
  p.tail.norm = false, p.num_groups = 1;
  const Plan plan = direct_plan(p, hopper());
  expect(plan.stages.size() == 1 && plan.tiles == 0, "nothing is computed twice without a norm");
  const std::string text = describe(plan);
  expect(has_part(text, "computed once") && !has_part(text, "moments"), "described so: " + text);
}

void test_estimate_is_described() {
  for (const char* forced : {"", "direct"}) {
    Device device = hopper();
    device.forced_plan = forced;
    const Plan plan = select_plan(mednext(64, 64), device, all_compiled());
    const std::string estimate = concat("estimate: ", plan.estimated_direct_ms, " ms");
    expect(has_part(describe(plan), estimate.c_str()), "described with its estimate: " + describe(plan));
  }
}

/// Weights of 8 channels of k7 and 8 inputs take 86 KB, and their moments 17.
void test_shared_memory() {
  Problem p = few_channels();
  p.n = 1, p.c = 64, p.groups = 8, p.k = 64, p.num_groups = 8, p.in = {32, 32, 32};
  p.kernel = {7, 7, 7}, p.padding = {3, 3, 3};
  Device device = hopper();
  expect(direct_obstacle(p, device).empty(), "taken on Hopper: " + direct_obstacle(p, device));
  for (const int capability : {75, 86, 89, 120}) {
    device.compute_capability = capability;
    const std::string obstacle = direct_obstacle(p, device);
    expect(has_part(obstacle, "shared memory"), concat("refused on ", capability, ": ", obstacle));
  }
  for (const std::int64_t inputs : {1, 2, 4, 8}) {
    for (const std::int64_t taps : {2, 4, 5, 7}) {
      p.kernel = {taps, taps, taps}, p.c = 8 * inputs;
      const DirectTiling tiling = direct_tiling(p);
      const std::int64_t taken = tiling.shared_bytes + direct_moment_bytes(tiling);
      expect(taken <= shared_bytes_per_block(89) || tiling.lanes_c == 1,
             concat(taken, " bytes for ", tiling.lanes_c, " lanes of ", describe(p)));
    }
  }
}

void test_obstacles() {
  const auto refuses = [](const Problem& p, const char* part) {
    const std::string obstacle = direct_obstacle(p, hopper());
    expect(has_part(obstacle, part), concat("obstacle \"", obstacle, "\" has \"", part, "\""));
    Device forced = hopper();
    forced.forced_plan = "direct";
    expect_violation<RuleViolation>([&] { select_plan(p, forced, all_compiled()); }, part, part);
  };
  Problem p = mednext(64, 8);
  expect(direct_obstacle(p, hopper()).empty(), "no obstacle");
  p.dtype = DType::kFloat64;
  refuses(p, "float64");
  p = mednext(64, 8);
  p.tail.has_skip = true;
  refuses(p, "skip");
  p = mednext(64, 8);
  p.tail.returns_conv = true;
  refuses(p, "convolution is wanted");
  p = mednext(64, 8);
  p.stride = {65, 2, 2};
  refuses(p, "stride (65, 2, 2)");
  refuses(mednext(512, 128), "32-bit");
  p = mednext(64, 8, 16);
  p.c = p.k = 4096, p.groups = 1;
  refuses(p, "shared memory");
}

/// Of one voxel a stride enlarges nothing, and three of them are more than 64 bits hold.
void test_long_strides() {
  Problem p = headline(DType::kFloat32);
  constexpr std::int64_t kLong = std::int64_t{1} << 30;
  p.in = {1, 1, 1}, p.stride = {kLong, kLong, kLong};
  expect(!hides_tf32_words(p), "sums of few products, if the volume of a stride were 0");
}

}  // namespace
}  // namespace upconv3d

int main() {
  upconv3d::test_long_strides();
  upconv3d::test_tiling();
  upconv3d::test_choice();
  upconv3d::test_many_outputs_of_few_inputs();
  upconv3d::test_others_of_few_inputs();
  upconv3d::test_strided_groups();
  upconv3d::test_no_norm_is_one_launch();
  upconv3d::test_estimate_is_described();
  upconv3d::test_shared_memory();
  upconv3d::test_obstacles();
  if (upconv3d::failures == 0) std::cout << "direct plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
