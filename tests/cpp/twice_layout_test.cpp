// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/twice_layout.hpp, and when select_plan computes the convolution twice. Without torch or CUDA.

#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/twice_layout.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// 1, 128 > 128, 48^3, kernel = stride = 2.
Problem kernel_is_stride() {
  Problem p = headline();
  p.n = 1, p.c = p.k = 128, p.in = {48, 48, 48}, p.kernel = p.stride = {2, 2, 2}, p.num_groups = 32;
  return p;
}

/// Counts the rows by phase, whose taps are to be among those of the class.
void count_rows(const Problem& p, const TwiceLayout& layout, const TwiceClass& made, const TwiceRows& rows,
                std::vector<std::int64_t>& computed) {
  const std::string what = "computed twice: " + describe(p);
  const std::int64_t end = std::min(rows.row + kTwiceRows, layout.fold * p.k);
  for (std::int64_t row = rows.row; row < end; ++row) {
    const TwiceRow at = twice_row(layout, row), box = twice_row(layout, row / layout.box * layout.box);
    expect(at.channel < p.k, what + ", channel");
    expect(at.phase == box.phase && at.channel == box.channel + row % layout.box, what + ", boxes of w");
    const std::size_t index = static_cast<std::size_t>(rows.view * layout.fold + at.phase);
    ++computed[index];
    const Slab& phase = layout.phases[index];
    const Slab& view = layout.views[static_cast<std::size_t>(rows.view)];
    expect(phase.origin[2] == view.origin[2] + at.phase && phase.extent == made.window.extent,
           what + ", phases of the view");
    if (phase.tap_count() == 0) continue;
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t lead = tap_lead(made.window, phase, axis);
      expect(made.window.window[axis] - lead * phase.dilation[axis] == phase.window[axis], what + ", grid");
      expect(lead <= 0 && phase.taps[axis] - lead <= made.window.taps[axis], what + ", taps");
    }
  }
}

/// Every row of every phase is computed once, and each phase's taps are among those of its class.
void test_twice_layout_of(const Problem& p) {
  const std::string what = "computed twice: " + describe(p);
  const TwiceLayout layout = twice_layout(p);
  std::vector<std::int64_t> computed(layout.phases.size(), 0);
  for (const TwiceClass& made : layout.classes) {
    expect(made.units[0].count + made.units[1].count <= kMaxTwiceUnits, what + ", weights fit");
    for (const TwiceSet& set : made.sets) {
      for (int group = 0; group < 2; ++group) {
        const TwiceRows& rows = set.rows[group];
        expect((rows.view < 0) == (made.units[group].count == 0), what + ", rows are multiplied");
        if (rows.view >= 0) count_rows(p, layout, made, rows, computed);
      }
    }
  }
  for (const std::int64_t rows : computed) expect(rows == p.k, what + ", every row once");
}

/// What select_plan says where it cannot do as asked.
std::string refusal(const Problem& p, const Device& device) {
  try {
    select_plan(p, device, all_compiled());
  } catch (const RuleViolation& error) {
    return error.what();
  }
  return "";
}

/// y [N,K,Z,P,Q].
void test_stacked() {
  Problem p = kernel_is_stride();
  p.y_layout = Layout::kNCDHW;
  test_twice_layout_of(p);
  const TwiceLayout layout = twice_layout(p);
  expect(layout.fold == 2 && layout.run == 8 && layout.classes.size() == 1 && twice_sets(layout) == 8,
         "phases along the width stacked");
  expect(!twice_reads_w_in_place(layout), "in rows that are no channels as they lie");
  const TwiceRows(&rows)[2] = layout.classes[0].sets[0].rows;
  expect(rows[0].row == rows[1].row && rows[0].view != rows[1].view, "phases along the height side by side");
  expect(twice_row(layout, 8).phase == 1 && twice_row(layout, 8).channel == 0, "a thread's two rows");
  expect(twice_row(layout, 71).phase == 0 && twice_row(layout, 71).channel == 39, "the fifth run's last row");
  for (const std::int64_t k : {8, 24, 40, 136}) {
    p.k = p.num_groups = k;
    test_twice_layout_of(p);
  }
  p.in = {1, 2, 3};
  test_twice_layout_of(p);
  p.kernel = {3, 3, 3};
  p.c = 64, p.k = 32;
  p.padding = p.output_padding = {1, 1, 1};
  test_twice_layout_of(p);
  p.output_padding = {1, 1, 0};
  expect(twice_layout(p).classes.empty(), "an odd width has phases of unequal extents");
  p = kernel_is_stride();
  p.y_layout = Layout::kNCDHW;
  p.stride[2] = 1;
  expect(twice_layout(p).classes.empty(), "one phase along the width");
  p = kernel_is_stride();
  p.y_layout = Layout::kNCDHW;
  p.k = p.num_groups = 36;
  expect(twice_layout(p).classes.empty(), "channels in runs of 8");
}

/// More phases than the kernel takes that stores them.
void test_many_phases() {
  Problem p = kernel_is_stride();
  p.c = p.k = 256, p.in = {32, 32, 5}, p.kernel = p.stride = {4, 4, 4};
  test_twice_layout_of(p);
  TwiceLayout layout = twice_layout(p);
  expect(layout.fold == 4 && layout.views.size() == 16 && layout.classes.size() == 1 &&
             twice_sets(layout) == 128 && twice_reads_w_in_place(layout),
         "64 phases in one class");
  p.w_channels_last = true;
  const Plan plan = select_plan(p, hopper(), all_compiled());
  expect(plan.twice && plan.w_in_place && plan.estimated_stored_ms == 0 && plan.stages.size() == 1,
         "64 phases are computed twice");
  const Plan training = select_training_plan(p, hopper(), all_compiled());
  expect(training.algorithm == Algorithm::kCudaLibrary && training.keeps_conv &&
             training.reason.find("64 phases") != std::string::npos,
         "and are PyTorch's where a backward pass wants the convolution");
  Device device = hopper();
  device.forced_plan = "stored";
  expect(refusal(p, device).find("64 phases, more than the 27") != std::string::npos, "they are not stored");
  p.tail = make_tail("norm_act", false, "relu", 0.0, false);
  expect(select_plan(p, hopper(), all_compiled()).algorithm == Algorithm::kCudaLibrary,
         "nor computed twice without a norm");
  p.tail = Tail{};
  p.k = 1024;
  expect(twice_layout(p).classes.empty(), "512 sets of weights are too many");
  p.stride[2] = 5;
  expect(refusal(p, device).find("80 phases, more than the 64") != std::string::npos, "80 phases");
  for (const std::int64_t k : {8, 24, 32, 40, 72, 96, 192}) {
    p = kernel_is_stride();
    p.k = p.num_groups = k, p.kernel = p.stride = {4, 4, 4}, p.in = {3, 5, 4};
    test_twice_layout_of(p);
    p.kernel = p.stride = {1, 8, 8};
    test_twice_layout_of(p);
    expect(twice_layout(p).fold == 8 && twice_layout(p).classes.size() == 1, "8 phases side by side");
  }
  // Stride 4, kernels of 5 to 8: phases of 8 taps down to one. Of 256 input channels 8 taps do not fit.
  for (const std::int64_t kernel : {5, 6, 7, 8}) {
    for (const std::int64_t padding : {1, 2}) {
      p = kernel_is_stride();
      p.c = 64, p.k = 64, p.in = {6, 7, 5}, p.stride = {4, 4, 4};
      p.kernel = {kernel, kernel, kernel}, p.padding = {padding, padding, padding};
      p.output_padding = {0, 0, (4 - (kernel - 2 * padding) % 4) % 4};
      test_twice_layout_of(p);
      p.c = 512;
      expect(twice_layout(p).classes.empty(), "8 taps of 512 channels do not stay in shared memory");
    }
  }
}

void test_twice() {
  Problem p = kernel_is_stride();
  test_twice_layout_of(p);
  expect(twice_layout(p).classes.size() == 1 && twice_sets(twice_layout(p)) == 8,
         "one set per phase, its two halves of K side by side");
  expect(twice_reads_w_in_place(twice_layout(p)), "from w as it lies");
  test_stacked();
  test_many_phases();
  p = headline();
  p.n = 2, p.k = 32, p.in = {64, 64, 64}, p.stride = {2, 2, 2}, p.padding = p.output_padding = {1, 1, 1};
  test_twice_layout_of(p);
  const TwiceLayout layout = twice_layout(p);
  expect(layout.fold == 2 && layout.classes.size() == 2 && layout.classes[0].units[0].count == 8 &&
             layout.classes[0].units[1].count == 4,
         "32 channels: phases along the width stacked, along the height side by side");
  p.output_padding = {0, 0, 0};
  test_twice_layout_of(p);
  p.kernel = {1, 1, 1};
  test_twice_layout_of(p);
  expect(twice_layout(headline()).classes.empty(), "27 taps of 64 channels do not stay in shared memory");

  Device device = hopper();
  p = kernel_is_stride();
  const Plan plan = select_plan(p, device, all_compiled());
  expect(plan.twice && plan.estimated_twice_ms < plan.estimated_stored_ms,
         "kernel = stride is computed twice");
  expect(plan.stages == std::vector<std::string>{"pack_operands", plan.instance->name} &&
             plan.instance->twice && plan.tiles == 8 * 432,
         "in one kernel");
  p.w_channels_last = true;
  const Plan lying = select_plan(p, device, all_compiled());
  expect(lying.twice && lying.w_in_place && lying.stages == std::vector<std::string>{plan.instance->name},
         "in one launch");
  p.w_channels_last = false;
  for (const char* activation : {"silu", "gelu", "gelu_tanh", "elu", "leaky_relu"}) {
    p.tail = make_tail("norm_act", true, activation, 1.0, false);
    const Plan after = select_plan(p, device, all_compiled());
    expect(after.twice && after.normalizes && after.activation_in_y && after.stages == plan.stages,
           std::string("in one kernel with ") + activation);
  }
  p.tail = Tail{};
  device.forced_plan = "stored";
  const Plan stored = select_plan(p, device, all_compiled());
  expect(!stored.twice && !stored.instance->twice && stored.estimated_twice_ms > 0, "stored where asked for");
  device.forced_plan = "twice";
  expect(select_plan(p, device, all_compiled()).twice, "twice where asked for");
  p.x_layout = p.y_layout = Layout::kNCDHW;
  p.dtype = DType::kFloat32, p.precision = Precision::kTF32;
  const Plan channels_first = select_plan(p, hopper(), all_compiled());
  expect(channels_first.twice && channels_first.conv_layout == Layout::kNCDHW &&
             channels_first.activation_in_y && channels_first.normalizes &&
             channels_first.stages.back() == channels_first.instance->name,
         "NCDHW from the kernel's own registers");
  p.in[2] = 47, p.padding[2] = 1, p.kernel[2] = 3;
  expect(refusal(p, device).find("y is NCDHW") != std::string::npos, "NCDHW of odd width is stored");
  expect(refusal(headline(), device).find("shared memory") != std::string::npos,
         "twice has no room for 27 taps");
  expect(!select_plan(headline(), hopper(), all_compiled()).twice, "the headline shape is stored");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_twice();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "twice_layout: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
