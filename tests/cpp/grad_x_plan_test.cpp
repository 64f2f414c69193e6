// SPDX-License-Identifier: Apache-2.0
/// \file
/// The plain convolution that computes grad_x, its slabs and its plan, without CUDA or a test framework.

#include <exception>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/grad_x_plan.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"
#include "grad_x_cases.hpp"
#include "shared_loads_check.hpp"

namespace upconv3d {
namespace {

using tests::index_of;

Problem block_of(const tests::GradXCase& shape) {
  Problem block = headline();
  block.n = shape.n, block.c = shape.c, block.k = shape.k, block.num_groups = 1;
  block.in = shape.in, block.kernel = shape.kernel, block.stride = shape.stride;
  block.padding = shape.padding, block.output_padding = shape.output_padding;
  block.dilation = shape.dilation;
  return block;
}

bool inside(const Problem& p, int axis, std::int64_t input) {
  return input >= 0 && input < p.in[axis];
}

/// Whether the slab's taps at `index` read what the plain convolution's definition says, and the others
/// nothing.
bool taps_right(const Problem& p, const Slab& slab, int axis, std::int64_t index) {
  const std::int64_t first = (slab.origin[axis] + index) * p.stride[axis] - p.padding[axis];
  std::vector<bool> kept(static_cast<std::size_t>(p.kernel[axis]));
  for (std::int64_t m = 0; m < slab.taps[axis]; ++m) {
    const std::int64_t tap = slab.tap[axis] - m * slab.tap_step[axis];
    if (tap < 0 || tap >= p.kernel[axis]) return false;
    kept[static_cast<std::size_t>(tap)] = true;
    const std::int64_t read = slab.window[axis] + index * slab.stride[axis] + m * slab.dilation[axis];
    if (read != first + tap * p.dilation[axis]) return false;
  }
  for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
    if (!kept[static_cast<std::size_t>(tap)] && inside(p, axis, first + tap * p.dilation[axis])) return false;
  }
  return true;
}

/// im2col walks from box.lower in strides, to where its upper corner ends it: as many windows as the slab has
/// positions, and with every input that a tap reads in the box.
void test_box_of(const Problem& p, const Slab& slab) {
  const InputBox box = input_box(p, slab);
  bool right = true;
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t reach = box.extent[axis] - 1 + box.upper[axis] - box.lower[axis];
    right = right && reach >= 0 && reach / slab.stride[axis] + 1 == slab.extent[axis];
    right = right && box.lower[axis] <= 0 && box.extent[axis] >= 1 &&
            box.origin[axis] + box.extent[axis] <= p.in[axis];
    if (slab.tap_count() == 0) continue;
    for (std::int64_t i = 0; i < slab.extent[axis]; ++i) {
      for (std::int64_t m = 0; m < slab.taps[axis]; ++m) {
        const std::int64_t read = slab.window[axis] + i * slab.stride[axis] + m * slab.dilation[axis];
        const std::int64_t in_box = box.lower[axis] + i * slab.stride[axis] + m * slab.dilation[axis];
        right = right && read == in_box + box.origin[axis];
        right = right && inside(p, axis, read) == (in_box >= 0 && in_box < box.extent[axis]);
      }
    }
  }
  expect(right, concat("input box: ", describe(p)));
}

void test_slabs_of(const Problem& p, const std::vector<Slab>& slabs, const std::string& kind) {
  const Extent3 out = p.out();
  std::vector<int> covered(static_cast<std::size_t>(volume(out)));
  bool right = true;
  for (const Slab& slab : slabs) {
    test_box_of(p, slab);
    for (std::int64_t i = 0; i < slab.positions(); ++i) {
      const Extent3 index = index_of(slab, i);
      for (int axis = 0; axis < 3; ++axis) {
        right = right && (slab.tap_count() == 0 || taps_right(p, slab, axis, index[axis]));
      }
      ++covered[static_cast<std::size_t>(((slab.origin[0] + index[0]) * out[1] + slab.origin[1] + index[1]) *
                                             out[2] +
                                         slab.origin[2] + index[2])];
    }
  }
  for (const int times : covered) right = right && times == 1;
  expect(right, concat(kind, " slabs: ", describe(p)));
}

void test_cases() {
  int shared = 0;
  for (const tests::GradXCase& shape : tests::kGradXCases) {
    const Problem block = block_of(shape), p = grad_x_problem(block);
    expect(p.out() == block.in && p.in == block.out(), concat("positions of x: ", describe(block)));
    expect(p.useful_flops() == block.useful_flops(), concat("useful work: ", describe(block)));
    for (int axes = 0; axes <= 3; ++axes) test_slabs_of(p, border_slabs(p, axes), concat(axes, " axes,"));
    if (p.stride != Extent3{1, 1, 1} || p.dilation != Extent3{1, 1, 1}) continue;
    test_slabs_of(p, tap_sharing_slabs(p), "tap sharing");
    for (const Slab& slab : tap_sharing_slabs(p)) {
      if (!shares_x_loads(p, slab)) continue;
      ++shared;
      expect(tests::shared_loads_are_right(p, slab, kSharedPlaneUnit),
             concat("loads serve several taps: ", describe(p)));
    }
  }
  expect(shared >= 4, concat("slabs that share loads are among the cases: ", shared));
}

std::string obstacle_of(const std::function<void(Problem&)>& change, const Device& device = hopper()) {
  Problem block = headline();
  change(block);
  std::optional<GradXPlan> plan;
  const std::string obstacle = grad_x_obstacle(block, device, all_compiled(), plan);
  expect(obstacle.empty() == plan.has_value(), "an obstacle or a plan");
  return obstacle;
}

GradXPlan plan_of(const std::function<void(Problem&)>& change) {
  Problem block = headline();
  change(block);
  std::optional<GradXPlan> plan;
  const std::string obstacle = grad_x_obstacle(block, hopper(), all_compiled(), plan);
  expect(plan.has_value(), concat("grad_x of ", describe(block), ": ", obstacle));
  return plan.value_or(GradXPlan{});
}

void test_plans() {
  const GradXPlan plan = plan_of([](Problem&) {});
  expect(plan.cut.share_taps && plan.in_place && plan.grad_c_pitch == 128, "the headline shape shares loads");
  expect(plan.instance.block_channels == 64 && plan.stages.size() == 2, "in tiles of 64 channels");
  expect(has_part(describe(plan), "loads shared"), "which describe says");
  expect(plan.instance.block_inputs == 64, "in whole k-blocks");
  expect(plan_of([](Problem& p) { p.k = 32; }).instance.block_inputs == 32, "of few outputs in half ones");
  const auto tf32 = [](Problem& p) { p.dtype = DType::kFloat32, p.precision = Precision::kTF32; };
  const auto few = [&](Problem& p) { tf32(p), p.k = 32; };
  expect(plan_of(few).instance.block_inputs == 32, "of float32 too");
  expect(plan_of(tf32).instance.stored_bits == 32 && plan_of(tf32).instance.operand == DType::kFloat16,
         "float32 is stored as it is");
  const GradXPlan ieee = plan_of([](Problem& p) { p.dtype = DType::kFloat32; });
  const auto few_ieee = [](Problem& p) { p.dtype = DType::kFloat32, p.k = 32; };
  expect(plan_of(few_ieee).instance.block_inputs == 64, "but hi and lo in whole ones");
  expect(ieee.split_grad_c() && ieee.stages.size() == 2 && !ieee.cut.share_taps && ieee.in_place,
         "float32's accuracy takes three products of a grad_c that comes split");
  const GradXPlan narrow = plan_of([](Problem& p) { p.dtype = DType::kFloat32, p.k = 35, p.num_groups = 1; });
  expect(narrow.grad_c_pitch == 40, "whose rows are those of before(conv)");
  const auto ncdhw = [](Problem& p) { p.x_layout = Layout::kNCDHW; };
  expect(plan_of(ncdhw).in_place && plan_of(ncdhw).cut.share_taps, "channels first too, whole planes");
  expect(plan_of([&](Problem& p) { ncdhw(p), p.c = 20; }).in_place, "of any number of channels");
  const GradXPlan odd = plan_of([&](Problem& p) { ncdhw(p), p.in = {33, 33, 33}; });
  expect(!odd.in_place && odd.stages.back() == "unpack_rows", "but rows of whole 16-byte chunks");
  const GradXPlan padded = plan_of([](Problem& p) { p.c = 20, p.k = 40, p.num_groups = 1; });
  expect(!padded.in_place && padded.grad_c_pitch == 48,
         "rows of 20 channels are unpacked, those of 40 padded");

  expect(has_part(obstacle_of([](Problem& p) { p.groups = 2; }), "groups 2"), "convolution groups");
  expect(has_part(obstacle_of([](Problem& p) { p.dtype = DType::kFloat64; }), "float64"), "float64");
  expect(has_part(obstacle_of([](Problem& p) { p.stride = {9, 1, 1}, p.in = {2, 4, 4}; }), "im2col"),
         "stride 9");
  expect(obstacle_of([](Problem& p) { p.stride = {8, 1, 1}, p.in = {2, 4, 4}; }).empty(), "stride 8");
  expect(has_part(obstacle_of([](Problem& p) { p.padding = {17, 0, 0}; }), "im2col"), "padding 17");
  expect(has_part(obstacle_of([](Problem&) {}, {.is_cuda = true, .compute_capability = 80}), "8.0"),
         "Ampere");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_cases();
    upconv3d::test_plans();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "grad_x plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
