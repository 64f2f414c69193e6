// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/twice_layout.hpp, and when select_plan computes the convolution twice. Without torch or CUDA.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core/twice_layout.hpp"
#include "core/twice_transposed.hpp"
#include "core_cases.hpp"
#include "shared_loads_check.hpp"

namespace upconv3d {
namespace {

/// 1, 128 > 128, 48^3, kernel = stride = 2.
Problem kernel_is_stride() {
  Problem p = headline();
  p.n = 1, p.c = p.k = 128, p.in = {48, 48, 48}, p.kernel = p.stride = {2, 2, 2}, p.num_groups = 32;
  return p;
}

/// Whether the mask names all of the phase's taps.
bool names_taps(const TwiceClass& made, std::uint32_t mask, const Slab& phase) {
  Extent3 lead;
  for (int axis = 0; axis < 3; ++axis) lead[axis] = tap_lead(made.window, phase, axis);
  for (std::int64_t t = 0; t < phase.taps[0]; ++t) {
    for (std::int64_t r = 0; r < phase.taps[1]; ++r) {
      for (std::int64_t s = 0; s < phase.taps[2]; ++s) {
        if ((mask >> tap_bit(made, {t - lead[0], r - lead[1], s - lead[2]}) & 1) == 0) return false;
      }
    }
  }
  return true;
}

/// Taps have places of their own, those that a load serves next to each other, and loads bring what is read.
void test_loads_of(const Problem& p, const TwiceClass& made) {
  const std::string what = "computed twice: " + describe(p);
  const Extent3& taps = made.window.taps;
  std::uint64_t places = 0;
  for (std::int64_t t = 0; t < taps[0]; ++t) {
    for (std::int64_t r = 0; r < taps[1]; ++r) {
      for (std::int64_t s = 0; s < taps[2]; ++s) {
        const int bit = tap_bit(made, {t, r, s});
        places |= std::uint64_t{1} << bit;
        Extent3 first = {t, r, s};
        if (made.shared.taps > 1) first[made.shared.axis] = 0;
        expect(tap_bit(made, first) == bit / made.shared.taps * made.shared.taps, what + ", a load's taps");
      }
    }
  }
  expect(places == (std::uint64_t{1} << made.window.tap_count()) - 1, what + ", places of taps");
  for (const TwiceUnits& of : made.units) {
    const std::int64_t c_blocks = made.reached ? ceil_div(p.c, twice_block_inputs(p)) : 1;
    expect(of.count == std::popcount(of.taps) * c_blocks, what + ", k-blocks");
  }
  if (made.shared.taps == 1) return;
  expect(made.reached && made.shared.taps == taps[made.shared.axis], what + ", all taps along an axis");
  expect(tests::shared_loads_are_right(p, made.window, kTwicePositions), what + ", shared loads");
}

/// Counts the rows by phase, whose taps are to be among those of the class.
void count_rows(const Problem& p, const TwiceLayout& layout, const TwiceClass& made, int group,
                const TwiceRows& rows, std::vector<std::int64_t>& computed) {
  const std::string what = "computed twice: " + describe(p);
  const std::int64_t end = std::min(rows.row + kTwiceRows, twice_rows_end(layout));
  for (std::int64_t row = rows.row; row < end; ++row) {
    const TwiceRow at = twice_row(layout, row), box = twice_row(layout, row / layout.box * layout.box);
    expect(at.channel < p.k, what + ", channel");
    expect(at.view == box.view && at.phase == box.phase && at.channel == box.channel + row % layout.box,
           what + ", boxes of w");
    const std::size_t index = twice_phase(layout, rows, row);
    ++computed[index];
    const Slab& phase = layout.phases[index];
    const Slab& view = layout.views[static_cast<std::size_t>(rows.view + at.view)];
    expect(phase.origin[2] == view.origin[2] + at.phase && phase.extent == made.window.extent,
           what + ", phases of the view");
    if (phase.tap_count() == 0) continue;
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t lead = tap_lead(made.window, phase, axis);
      expect(made.window.window[axis] - lead * phase.dilation[axis] == phase.window[axis], what + ", grid");
      expect(lead <= 0 && phase.taps[axis] - lead <= made.window.taps[axis], what + ", taps");
    }
    expect(names_taps(made, made.units[group].taps, phase), what + ", taps that are used");
  }
}

/// Every row of every phase is computed once, and each phase's taps are among those of its class.
void test_twice_layout_of(const Problem& p) {
  const std::string what = "computed twice: " + describe(p);
  const TwiceLayout layout = twice_layout(p);
  std::vector<std::int64_t> computed(layout.phases.size(), 0);
  for (const TwiceClass& made : layout.classes) {
    expect(made.units[0].count + made.units[1].count <= max_twice_units(p, layout), what + ", weights fit");
    test_loads_of(p, made);
    for (const TwiceSet& set : made.sets) {
      for (int group = 0; group < 2; ++group) {
        const TwiceRows& rows = set.rows[group];
        expect((rows.view < 0) == (made.units[group].count == 0), what + ", rows are multiplied");
        if (rows.view >= 0) count_rows(p, layout, made, group, rows, computed);
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

void expect_stored_in_three(const Plan& plan, const std::string& what) {
  expect(plan.algorithm == Algorithm::kSm90ImplicitGemm && !plan.twice && plan.launches == 3 &&
             !plan.normalizes && plan.estimated_stored_ms > 0 &&
             std::count(plan.stages.begin(), plan.stages.end(), plan.instance->name) == 3 &&
             has_part(describe(plan), "launches: 3 of the convolution"),
         what + ": " + describe(plan));
}

/// y NCDHW of many phases and few channels: computed twice as NDHWC beside y, then transposed.
void test_transposed() {
  Problem p = kernel_is_stride();
  p.c = p.k = 32, p.in = {24, 24, 24}, p.kernel = p.stride = {4, 4, 4}, p.num_groups = 8;
  p.x_layout = p.y_layout = Layout::kNCDHW;
  const auto is_transposed = [&](const Plan& plan) {
    return plan.twice && transposes_result(p, plan) && plan.conv_layout == Layout::kNDHWC &&
           !plan.activation_in_y && plan.stages.back() == "group_norm_normalize" &&
           problem_of_conv(p, plan).y_layout == Layout::kNDHWC;
  };
  Device device = hopper();
  expect(is_transposed(select_plan(p, device, all_compiled())), "few channels, 64 phases, NCDHW");
  const Plan trained = select_training_plan(p, device, all_compiled());
  expect(!trained.twice && trained.keeps_conv, "not where a backward pass follows: " + describe(trained));
  device.forced_plan = "stored";
  expect_stored_in_three(select_plan(p, device, all_compiled()), "the same, asked for");
  device.forced_plan = "twice";
  p.c = p.k = 256, p.in = {32, 32, 5};
  expect(is_transposed(select_plan(p, device, all_compiled())), "many channels where that is asked for");
  p.tail = make_tail("norm_act", false, "relu", 0.0, false);
  expect(refusal(p, device).find("y is NCDHW") != std::string::npos, "not without a norm");
  p.tail = Tail{};
  p.stride = p.kernel = {3, 3, 3};
  expect(refusal(p, device).find("y is NCDHW") != std::string::npos, "nor of phases that one launch stores");
  device.forced_plan = "";
  p.stride = p.kernel = {4, 4, 2};
  const Plan direct = select_plan(p, device, all_compiled());
  expect(!transposes_result(p, direct), "nor where NCDHW can be written");
}

/// More phases than one launch takes of the kernel that stores them.
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
  expect(plan.twice && plan.w_in_place && plan.launches == 1 && plan.stages.size() == 1,
         "64 phases are computed twice");
  const Plan training = select_training_plan(p, hopper(), all_compiled());
  expect(training.algorithm == Algorithm::kCudaLibrary && training.keeps_conv &&
             training.reason.find("more than 27 phases") != std::string::npos,
         "and are PyTorch's where a backward pass wants the convolution");
  Device device = hopper();
  device.forced_plan = "stored";
  expect_stored_in_three(select_plan(p, device, all_compiled()), "64 phases, where that is asked for");
  expect_stored_in_three(select_training_plan(p, device, all_compiled()), "and by a backward pass");
  p.tail = make_tail("norm_act", false, "relu", 0.0, false);
  const Plan once = select_plan(p, hopper(), all_compiled());
  expect(once.twice && once.linear && !once.normalizes && once.stages.size() == 1, "once, without a norm");
  p.tail = Tail{};
  p.x_layout = p.y_layout = Layout::kNCDHW;
  expect_stored_in_three(select_plan(p, hopper(), all_compiled()), "64 phases of y NCDHW");
  p.x_layout = p.y_layout = Layout::kNDHWC;
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

/// What a launch has no parameters for has no classes.
void test_limits() {
  Problem p = kernel_is_stride();
  p.c = 1024, p.k = 320, p.num_groups = 1, p.in = {9, 8, 10}, p.kernel = p.stride = {4, 4, 4};
  expect(twice_layout(p).classes.empty(), "320 sets, of which a block holds one warpgroup's rows each");
  p.k = 256;
  expect(twice_sets(twice_layout(p)) == kMaxTwiceSets, "256 sets");
  p.c = 32, p.k = 192, p.kernel = {4, 5, 4}, p.stride = {3, 4, 3}, p.padding = {2, 2, 2};
  expect(twice_layout(p).classes.empty(), "55 classes");
  p.k = 64, p.kernel = {4, 4, 3}, p.stride = {4, 4, 2}, p.padding = {0, 0, 0};
  expect(p.out()[2] % 2 == 1 && twice_layout(p).classes.empty(), "32 views, in rows that are not folded");
  p.c = 8, p.k = 64, p.in = {3, 8, 64}, p.kernel = {33, 1, 1}, p.stride = {1, 1, 1};
  expect(twice_layout(p).classes.empty(), "33 taps");
}

/// k-blocks of 32 input channels: as many again fit into a block's shared memory.
void test_half_blocks() {
  Problem p = headline();
  p.n = 4, p.c = 32, p.k = 16, p.kernel = {4, 4, 4}, p.stride = {2, 2, 2}, p.padding = {1, 1, 1};
  test_twice_layout_of(p);
  const TwiceLayout half = twice_layout(p);
  expect(max_twice_units(p, half) == 32 && half.classes.size() == 2 && half.classes[0].units[1].count == 12,
         "12 taps of two rows of phases side by side");
  Device device = hopper();
  device.forced_plan = "twice";
  const Plan plan = select_plan(p, device, all_compiled());
  expect(plan.twice && plan.instance->block_inputs == 32, "in half k-blocks");
  std::vector<ConvInstance> whole = all_compiled();
  std::erase_if(whole, [](const ConvInstance& instance) { return instance.block_inputs != kTwiceBlockC; });
  expect_violation<RuleViolation>([&] { select_plan(p, device, whole); }, "this build has no such kernel",
                                  "or not at all");
  p.c = 64;
  test_twice_layout_of(p);
  const TwiceLayout whole_blocks = twice_layout(p);
  expect(max_twice_units(p, whole_blocks) == 16 && whole_blocks.classes[0].units[1].count == 0,
         "whole ones do not fit");
  expect(select_plan(p, device, all_compiled()).instance->block_inputs == 64, "but run");
  const TwiceClass& one = half.classes[0];
  expect(twice_tile_cycles(one, 1, kHalfBlockInputs, true) < twice_tile_cycles(one, 1, kTwiceBlockC, true),
         "half k-blocks take less");
}

/// Views of 32 rows, two in a warpgroup's 64.
void test_piles() {
  Problem p = kernel_is_stride();
  p.c = 64, p.k = 16, p.num_groups = 8;
  for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
    p.y_layout = layout;
    p.kernel = p.stride = {2, 2, 2}, p.padding = p.output_padding = {0, 0, 0};
    test_twice_layout_of(p);
    const TwiceLayout all = twice_layout(p);
    expect(all.pile == 2 && all.classes.size() == 1 && twice_sets(all) == 1, "all phases in one set");
    expect(twice_row(all, 31).view == 0 && twice_row(all, 32).view == 1 && twice_row(all, 32).channel == 0,
           "one below the other");
    const TwiceRows(&rows)[2] = all.classes[0].sets[0].rows;
    expect(rows[0].view == 0 && rows[1].view == 2 && all.views[1].origin == Extent3{0, 1, 0},
           "neighbours along the height");
    p.kernel = p.stride = {1, 2, 2};
    test_twice_layout_of(p);
    expect(twice_layout(p).pile == 2 && twice_layout(p).classes[0].units[1].count == 0,
           "four phases in 64 rows");
    p.kernel = {3, 3, 3}, p.stride = {2, 2, 2}, p.padding = p.output_padding = {1, 1, 1};
    test_twice_layout_of(p);
    const TwiceLayout three = twice_layout(p);
    expect(three.pile == 2 && three.classes.size() == 1 && three.classes[0].units[0].count == 8 &&
               three.classes[0].units[1].count == 4,
           "by zeros where a tap is the other view's");
    p.output_padding = {0, 0, 1};
    expect(twice_layout(p).pile == 1, "planes of unequal extents");
    p.kernel = {4, 4, 4}, p.output_padding = {0, 0, 0}, p.c = 32;
    expect(twice_layout(p).pile == 1, "18 taps instead of 12 and 12 gain little");
    p.c = 64;
  }
  p.kernel = p.stride = {2, 2, 2}, p.padding = {0, 0, 0};
  for (const std::int64_t k : {8, 24, 32}) {
    p.k = p.num_groups = k;
    expect(twice_layout(p).pile == 1, "views of other rows");
  }
  p.y_layout = Layout::kNDHWC;
  p.k = p.num_groups = 32, p.kernel = p.stride = {2, 2, 1};
  test_twice_layout_of(p);
  expect(twice_layout(p).pile == 2 && twice_layout(p).box == 32, "of one phase each");
  p.k = p.num_groups = 8, p.kernel = p.stride = {2, 2, 4};
  test_twice_layout_of(p);
  expect(twice_layout(p).pile == 2 && twice_layout(p).fold == 4, "four phases along the width in each");
  p.k = 16, p.num_groups = 8, p.kernel = p.stride = {4, 2, 2};
  test_twice_layout_of(p);
  expect(twice_layout(p).pile == 2 && twice_sets(twice_layout(p)) == 2, "four piles in two sets");
  p.c = 512, p.kernel = p.stride = {2, 2, 2};
  test_twice_layout_of(p);
  expect(twice_layout(p).pile == 2, "as many weights as there is room for");
}

/// Loads that serve several taps: along the height, along the depth of small planes, and where they would
/// leave no room.
void test_shared() {
  const auto shared = [](const Problem& p) {
    test_twice_layout_of(p);
    std::string text;
    for (const TwiceClass& made : twice_layout(p).classes)
      text += concat(text.empty() ? "" : ", ", made.shared.taps, made.shared.axis == 0 ? " deep" : " high");
    return text;
  };
  Problem p = headline();
  p.n = 2, p.k = 32, p.in = {4, 64, 64}, p.stride = {2, 2, 2}, p.padding = p.output_padding = {1, 1, 1};
  expect(shared(p) == "2 high, 2 high", "phases of two taps along the height, beside such of one");
  expect(twice_shared_rows(twice_layout(p)) == 64, "with a row more");
  p.y_layout = Layout::kNCDHW;
  expect(shared(p) == "2 high, 2 high", "y NCDHW");
  p.y_layout = Layout::kNDHWC;
  p.in = {6, 8, 10};
  expect(shared(p) == "2 deep, 2 deep", "planes of 80 positions");
  p.in = {6, 9, 10};
  expect(shared(p) == "1 high, 1 high", "planes of 90, no multiple of 8");
  p.c = 32, p.k = 16, p.in = {4, 32, 32}, p.kernel = {4, 4, 4}, p.output_padding = {0, 0, 0};
  expect(shared(p) == "3 high, 3 high", "half k-blocks, two rows of phases side by side");
  p.c = 64, p.k = 64, p.kernel = {3, 3, 3}, p.stride = {2, 1, 2}, p.output_padding = {1, 0, 1};
  shared(p);
  p = headline();
  p.c = 32, p.k = 16, p.in = {2, 17, 8}, p.kernel = {1, 16, 3}, p.stride = {1, 1, 3};
  expect(shared(p).find("16 high") == 0, "loads that reach as far as im2col can");
  p.in[1] = 16, p.kernel[1] = 17;
  expect(shared(p).find("17 high") == std::string::npos, "or would reach further");
  int sharing = 0;
  for (const std::int64_t width : {8, 16, 24}) {
    for (const Extent3 kernel : {Extent3{3, 3, 3}, Extent3{4, 4, 4}, Extent3{2, 5, 3}, Extent3{1, 3, 1}}) {
      for (const std::int64_t k : {8, 16, 40, 64}) {
        for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
          p = headline();
          p.n = 1, p.c = 40, p.k = p.num_groups = k, p.in = {3, 32, width}, p.kernel = kernel;
          p.stride = {1, 2, 2}, p.padding = {0, 1, 1}, p.y_layout = layout;
          p.output_padding = {0, (kernel[1] + 1) % 2 == 0, (kernel[2] + 1) % 2 == 0};
          sharing += shared(p).find_first_of("2345") != std::string::npos;
        }
      }
    }
  }
  expect(sharing >= 20, concat("layouts that share loads are among the cases: ", sharing));
}

/// Segments of partial moments: of many partials and few groups several, none of them empty.
void test_merging() {
  Problem p = kernel_is_stride();
  for (const std::int64_t groups : {1, 2, 8, 32, 64, 128}) {
    for (const std::int64_t samples : {1, 2, 5}) {
      for (const std::int64_t moments : {1, 255, 3456, 8192, 8193, 70000}) {
        p.num_groups = groups, p.n = samples;
        const TwiceMerging merging = twice_merging(p, moments);
        const std::int64_t granules = p.k / groups >> twice_granule_shift(p);
        const std::int64_t length = ceil_div(merging.partials, merging.segments);
        expect(merging.groups == samples * groups && merging.partials == moments * granules, "all partials");
        expect((merging.segments - 1) * length < merging.partials, "no segment is empty");
        expect(merging.segments == 1 || merging.groups * merging.segments <= 128, "a block for each segment");
        expect((merging.segments > 1) == (merging.partials > 8192 && merging.groups <= 64),
               "several segments of many partials and few groups");
        // A row for each group; of several segments four floats for each, and a counter for each group.
        const std::int64_t floats = merging.segments > 1 ? 4 + 4 * merging.segments + 1 : 4;
        expect(twice_table_floats(p, moments) == merging.groups * floats, "room for all that is merged");
      }
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
  test_limits();
  test_transposed();
  test_half_blocks();
  test_piles();
  test_shared();
  test_merging();
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
