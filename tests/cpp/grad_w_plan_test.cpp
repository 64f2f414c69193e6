// SPDX-License-Identifier: Apache-2.0
/// \file
/// The plan of the gradient of the weight, without a GPU: that it visits each product once, what it refuses,
/// and what it chooses for the shapes that are timed.

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "core/grad_w_plan.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

std::vector<GradWInstance> compiled_grad_w() {
  std::vector<GradWInstance> instances = grad_w_instances();
  for (GradWInstance& instance : instances) instance.compiled = true;
  return instances;
}

GradWPlan plan_of(const Problem& p, const Device& device = hopper()) {
  return grad_w_plan(p, device, compiled_grad_w());
}

/// For either mover along an axis: position i and tap meet the pairs of the definition and no other, and the
/// box that TMA walks has as many positions as the plan counts.
void test_walk(std::int64_t in, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
               std::int64_t dilation, std::int64_t output_padding) {
  Problem p = headline();
  p.in = {1, 1, in}, p.kernel = {1, 1, kernel}, p.stride[2] = stride, p.padding[2] = padding,
  p.dilation[2] = dilation, p.output_padding[2] = output_padding;
  const std::int64_t out = p.out()[2];
  const std::string what =
      concat("in ", in, " k", kernel, " s", stride, " p", padding, " d", dilation, " op", output_padding);
  for (const bool moves_x : {false, true}) {
    if (moves_x && stride != 1) continue;
    const GradWOperand x = grad_w_operand(p, {moves_x, moves_x, moves_x}, true);
    const GradWOperand grad_c = grad_w_operand(p, {moves_x, moves_x, moves_x}, false);
    const std::int64_t positions = moves_x ? out : in;
    std::int64_t pairs = 0, expected = 0;
    for (std::int64_t i = 0; i < in; ++i) {
      for (std::int64_t tap = 0; tap < kernel; ++tap) {
        const std::int64_t o = i * stride - padding + tap * dilation;
        expected += o >= 0 && o < out;
      }
    }
    for (std::int64_t i = 0; i < positions; ++i) {
      for (std::int64_t tap = 0; tap < kernel; ++tap) {
        const std::int64_t at_x = i * x.step[2] + x.lower[2] + (moves_x ? (kernel - 1 - tap) * dilation : 0);
        const std::int64_t at_c = i * grad_c.step[2] + grad_c.lower[2] + (moves_x ? 0 : tap * dilation);
        if (at_x < 0 || at_x >= in || at_c < 0 || at_c >= out) continue;
        ++pairs;
        expect(at_c == at_x * stride - padding + tap * dilation, what + ": a pair that should not meet");
      }
    }
    expect(pairs == expected, what + ": pairs");
    for (const GradWOperand& operand : {x, grad_c}) {
      const std::int64_t last = operand.extent[2] - 1 + operand.upper[2];
      expect((last - operand.lower[2]) / operand.step[2] + 1 == positions, what + ": positions of the box");
    }
  }
}

void test_walks() {
  for (const std::int64_t stride : {1, 2, 3}) {
    for (const std::int64_t kernel : {1, 2, 3, 5}) {
      for (const std::int64_t dilation : {1, 2}) {
        for (const std::int64_t padding : {0, 1, 2}) {
          for (std::int64_t extra = 0; extra < std::max(stride, dilation); ++extra) {
            if ((9 - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0) {
              test_walk(9, kernel, stride, padding, dilation, extra);
            }
          }
        }
      }
    }
  }
  test_walk(9, 18, 2, 0, 1, 0);  // the box ends 17 before the last output, of which a corner tells 16
}

void test_choices() {
  const GradWPlan plan = plan_of(headline());
  expect(plan.obstacle.empty() && !plan.rows_are_x, "the headline's rows are grad_c");
  expect(plan.moves_x == std::array<bool, 3>{true, false, false}, "the taps of one axis move x");
  expect(std::string(plan.instance->name) == "conv_transpose_grad_w_sm90_bf16x1_128x192", "its tile");
  expect(plan.row_tiles == 9 && plan.column_tiles == 1, describe(plan));
  expect(plan.k_blocks == 16 * 32 * 32 * 34 / 64, "its positions");
  expect(!plan.pack_x && plan.x_pitch == 64, "x is read as it lies");
  expect(plan.partial_floats() == 9 * plan.splits * 128 * 192, "partial sums");

  Problem p = headline();
  p.stride = {2, 2, 2}, p.padding = {1, 1, 1}, p.output_padding = {1, 1, 1}, p.c = 256, p.n = 2;
  const GradWPlan strided = plan_of(p);
  expect(strided.obstacle.empty() && strided.positions == p.in, "stride 2 walks x");
  p = headline(DType::kFloat32, Layout::kNCDHW);
  p.precision = Precision::kTF32;
  const GradWPlan packed = plan_of(p);
  expect(packed.pack_x && !packed.split_grad_c() && packed.instance->operand == DType::kFloat16,
         "float32 is packed to float16");
  p.precision = Precision::kIEEE;
  const GradWPlan split = plan_of(p);
  expect(split.pack_x && split.split_grad_c() && split.instance->products == 3, "float32 in three products");
  p = headline();
  p.c = 20;
  expect(plan_of(p).pack_x && plan_of(p).x_pitch == 64, "rows that are no whole chunks of 16 bytes");
  p.c = 24, p.x_aligned = false;
  expect(plan_of(p).pack_x, "x that is not aligned");
  for (const std::int64_t n : {1, 2, 16, 64}) {
    p = headline(), p.n = n;
    const GradWPlan any = plan_of(p);
    expect(any.splits >= 1 && any.splits <= any.k_blocks, concat("splits of ", n, " samples"));
  }
  p = headline(), p.n = 4, p.c = p.k = 1024;
  const GradWPlan many_tiles = plan_of(p);
  expect(many_tiles.k_blocks > 1024 && many_tiles.k_blocks <= 1024 * many_tiles.splits, "chains of k-blocks");
}

/// What any of the plans among which one is chosen has to keep to.
void test_candidates() {
  Problem p = headline();
  p.in[1] = 4, p.stride = {1, 2, 1}, p.padding = {1, 1, 1};
  std::vector<GradWPlan> candidates = grad_w_candidates(p, hopper(), compiled_grad_w());
  bool moves_strided = candidates.empty();
  for (const GradWPlan& plan : candidates) moves_strided = moves_strided || plan.moves_x[1];
  expect(!moves_strided, "taps of an axis with a stride move grad_c");
  // Positions of x along the height and of grad_c along the depth are 17 and 31 times those of either.
  p = headline();
  p.n = 1, p.in = {1, 31, 1 << 22}, p.kernel = {17, 1, 1}, p.padding = {0, 15, 0};
  candidates = grad_w_candidates(p, hopper(), compiled_grad_w());
  bool counts = !candidates.empty();
  for (const GradWPlan& plan : candidates) counts = counts && volume(plan.positions) < std::int64_t{1} << 31;
  expect(counts, "positions that 32 bits count");
}

void test_obstacles() {
  const auto refused = [](const Problem& p, const char* part) {
    expect(has_part(plan_of(p).obstacle, part), concat(part, ": ", plan_of(p).obstacle));
  };
  Problem p = headline();
  p.groups = 2;
  refused(p, "groups=2");
  refused(headline(DType::kFloat64), "float64");
  p = headline(), p.n = 0;
  refused(p, "no samples");
  p = headline(), p.n = 100000;
  refused(p, "32-bit");
  p = headline(), p.dilation[0] = 16, p.kernel[0] = 3;
  refused(p, "im2col");
  p = headline(), p.stride[2] = 9;
  refused(p, "stride 9");
  p = headline(), p.kernel[0] = 33, p.padding[0] = 16;
  refused(p, "33 taps along axis 0");
  p = headline(), p.kernel[2] = 18, p.stride[2] = 2;
  expect(plan_of(p).obstacle.empty(), "a corner within a stride of the least one");
  Device ampere = hopper();
  ampere.compute_capability = 80;
  expect(has_part(plan_of(headline(), ampere).obstacle, "9.0"), "Ampere");
  expect(has_part(grad_w_plan(headline(), hopper(), {}).obstacle, "part of this build"), "nothing compiled");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_walks();
    upconv3d::test_choices();
    upconv3d::test_candidates();
    upconv3d::test_obstacles();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "grad_w plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
