// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/plan_times.hpp: what plans are expected to take. Without torch or CUDA.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/library_plan.hpp"
#include "core/plan.hpp"
#include "core/plan_times.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// Of both layouts and of 16 bit and float32.
std::vector<Problem> inputs_of(Problem p) {
  std::vector<Problem> problems;
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      p.x_layout = p.y_layout = layout, p.dtype = dtype, p.precision = Precision::kTF32;
      problems.push_back(p);
    }
  }
  return problems;
}

/// The estimate of a kernel of the SM90 plan, or 0 where that cannot run.
double sm90_time(const Problem& p, const char* kernel) {
  Device device = hopper();
  device.forced_plan = kernel;
  try {
    return sm90_plan_us(p, select_plan(p, device, all_compiled()));
  } catch (const RuleViolation&) {
    return 0;
  }
}

void test_which_have_times() {
  for (const Problem& p : inputs_of(headline())) {
    expect(has_plan_times(p), "times of " + describe(p));
    const auto without = [&](const std::function<void(Problem&)>& change, const std::string& what) {
      Problem other = p;
      change(other);
      expect(!has_plan_times(other), "no times " + what + ": " + describe(other));
    };
    without([](Problem& q) { q.dtype = DType::kFloat32, q.precision = Precision::kIEEE; },
            "at float32's accuracy");
    without([](Problem& q) { q.dtype = DType::kFloat64; }, "of float64");
    without([](Problem& q) { q.groups = 2; }, "of convolution groups");
    without([](Problem& q) { q.stride = {1, 1, 5}; }, "of a stride of 5");
    without([](Problem& q) { q.dilation = q.stride = {1, 2, 1}; }, "of dilation with a stride");
    without([](Problem& q) { q.tail.has_skip = true; }, "with a skip");
    without([](Problem& q) { q.n = 0; }, "without samples");
    without([](Problem& q) { q.operation = Operation::kConv; }, "of the backward's convolution");
    without([](Problem& q) { q.y_layout = q.x_layout == Layout::kNCDHW ? Layout::kNDHWC : Layout::kNCDHW; },
            "where y lies otherwise than x");
    Problem flat = p;
    flat.in[0] = flat.kernel[0] = 1, flat.kernel[1] = 5, flat.stride[1] = 2;
    expect(has_plan_times(flat) == (p.dtype == DType::kBFloat16), "cuDNN's slow kernels: " + describe(flat));
    Problem others = p;
    others.stride = {4, 4, 4}, others.tail = make_tail("norm_act", true, "silu", 1.0, true);
    expect(has_plan_times(others), "of other tails, and strides up to 4: " + describe(others));
  }
}

/// What is more of something takes no less.
void test_times() {
  struct Times {
    double library, col2im, stored, twice;
    explicit Times(const Problem& p)
        : library(library_plan_us(p, hopper())),
          col2im(col2im_plan_us(p, hopper())),
          stored(sm90_time(p, "stored")),
          twice(sm90_time(p, "twice")) {}
    bool grew_from(const Times& less) const {
      return library > less.library && col2im > less.col2im && stored > less.stored &&
             (less.twice == 0 || twice > less.twice);
    }
    std::string text() const { return concat(library, ", ", col2im, ", ", stored, ", ", twice, " us"); }
  };
  Problem block = headline();
  block.c = 64, block.k = 32, block.in = {16, 16, 16}, block.kernel = block.stride = {2, 2, 2};
  bool has_twice = false;
  for (const Problem& p : inputs_of(block)) {
    const auto expect_more = [&](const std::function<void(Problem&)>& change, const std::string& what) {
      Problem more = p;
      change(more);
      const Times less(p), all(more);
      has_twice |= less.twice > 0;
      expect(all.grew_from(less),
             concat(what, ": ", describe(p), ", ", less.text(), "; of more ", all.text()));
    };
    expect_more([](Problem& q) { q.n = 64; }, "samples");
    expect_more([](Problem& q) { q.in = {32, 32, 32}; }, "positions");
    expect_more([](Problem& q) { q.k = 64; }, "outputs");
    Problem dilated = p;
    dilated.kernel = {3, 3, 3}, dilated.stride = dilated.padding = {1, 1, 1};
    const Times near(dilated);
    dilated.dilation = dilated.padding = {2, 2, 2};
    const Times far(dilated);
    expect(far.library > near.library && far.col2im >= near.col2im && far.stored > near.stored,
           concat("taps that lie apart: ", describe(dilated), ", ", near.text(), "; dilated ", far.text()));
    Problem silu = p, gelu = p;
    silu.tail = make_tail("norm_act", true, "silu", 1.0, false);
    gelu.tail = make_tail("norm_act", true, "gelu", 1.0, false);
    for (const char* kernel : {"stored", "twice"}) {
      const double none = sm90_time(p, kernel), one = sm90_time(silu, kernel), two = sm90_time(gelu, kernel);
      expect(none < one && one <= two,
             concat("exponentials of ", kernel, ": ", describe(p), ", ", none, ", ", one, ", ", two, " us"));
    }
  }
  expect(has_twice, "a block that can be computed twice");
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    Problem half = headline(DType::kBFloat16, layout);
    half.w_channels_last = layout == Layout::kNDHWC;
    Problem full = half;
    full.dtype = DType::kFloat32, full.precision = Precision::kTF32;
    const double us = library_plan_us(half, hopper()), us_of_float = library_plan_us(full, hopper());
    expect(us_of_float > us, concat("float32: ", describe(half), ", ", us, " and ", us_of_float, " us"));
  }
}

/// PyTorch copies a weight that does not lie as an input in NDHWC does, but for pointwise ones, which lie in
/// either order. In NCDHW ours are copied with x, unless they lie so.
void test_weight_copies() {
  Problem block = headline();
  block.n = 1, block.c = block.k = 512, block.in = {6, 6, 6}, block.padding = {1, 1, 1};
  for (Problem p : inputs_of(block)) {
    p.w_channels_last = true;
    const double without = library_plan_us(p, hopper());
    expect(library_weight_copy_us(p) == 0, "no copy: " + describe(p));
    p.w_channels_last = false;
    const double copy = library_weight_copy_us(p), with = library_plan_us(p, hopper());
    expect((copy > 0) == (p.x_layout == Layout::kNDHWC), concat("a copy: ", describe(p), ", ", copy, " us"));
    const std::string times = concat(describe(p), ": ", without, " and ", with, " us");
    expect(copy > 0 ? std::abs(with - without - copy) < 1e-6 : with > without, times);
    p.kernel = {1, 1, 1};
    expect(library_weight_copy_us(p) == 0, "pointwise: " + describe(p));
  }
}

/// Two blocks share a long sum (of 4608 products and more) where tiles are few, and take less than one takes
/// for a somewhat shorter one.
void test_split_sums() {
  Problem block = headline();
  block.in = {12, 12, 12}, block.padding = {1, 1, 1};
  for (Problem p : inputs_of(block)) {
    p.w_channels_last = true;
    const auto of_more_inputs = [&p](std::int64_t samples) {
      Problem less = p, more = p;
      less.n = more.n = samples, less.c = 168, more.c = 176;
      return library_plan_us(more, hopper()) / library_plan_us(less, hopper());
    };
    const double few = of_more_inputs(4), many = of_more_inputs(64);
    expect(few < 0.9, concat("few tiles are split: ", describe(p), ", ", few));
    expect(many > 1, concat("many tiles are not: ", describe(p), ", ", many));
    p.stride = {2, 2, 2};
    const double strided = of_more_inputs(1);
    expect(strided >= 1, concat("nor with a stride: ", describe(p), ", ", strided));
  }
}

/// Without a stride, in 16 bit, more of x and y hides behind the same products, beyond what a small block has
/// of them: what they take grows no more with a wider result whose tile cuDNN computes in any case.
void test_hidden_memory() {
  Problem block = headline();
  block.n = 1, block.c = 160, block.in = {80, 80, 80}, block.kernel = {2, 2, 2}, block.tail.norm = false;
  block.tail.activation = Activation::kNone, block.has_bias = false;
  for (Problem p : inputs_of(block)) {
    if (p.dtype == DType::kFloat32 || p.y_layout != Layout::kNDHWC) continue;
    const auto us_of = [&p](std::int64_t k) {
      Problem of = p;
      of.k = k;
      return library_plan_us(of, hopper());
    };
    expect(us_of(32) - us_of(8) < 1, concat("hidden: ", describe(p), ", ", us_of(8), ", ", us_of(32)));
    p.stride = {2, 2, 2};
    expect(us_of(32) - us_of(8) > 1, concat("not of a stride: ", describe(p)));
  }
}

/// The chosen plan is expected to take hardly more than the SM90 plan and the library plan are.
void test_expected_is_chosen() {
  constexpr double kTie = 1.1;
  int choices[4] = {};
  Problem block = headline();
  for (const std::int64_t c : {16, 64, 256}) {
    for (const std::int64_t k : {8, 64, 192}) {
      for (const std::int64_t extent : {6, 12, 24}) {
        for (const std::int64_t stride : {1, 2}) {
          block.n = 2, block.c = c, block.k = k, block.in = {extent, extent, extent};
          block.stride = {stride, stride, stride}, block.padding = {1, 1, 1}, block.w_channels_last = true;
          for (const Problem& p : inputs_of(block)) {
            const Plan plan = select_plan(p, hopper(), all_compiled());
            const double library = library_plan_us(p, hopper()), sm90 = sm90_time(p, "sm90");
            const bool is_sm90 = plan.algorithm == Algorithm::kSm90ImplicitGemm;
            const bool is_library = plan.algorithm == Algorithm::kCudaLibrary;
            const double us = is_sm90                                    ? sm90_plan_us(p, plan)
                              : plan.algorithm == Algorithm::kCudaDirect ? 1e3 * plan.estimated_direct_ms
                                                                         : plan.expected_us;
            ++choices[is_sm90 ? 0 : is_library ? 1 : plan.algorithm == Algorithm::kCudaCol2im ? 2 : 3];
            expect(us > 0 && us <= kTie * std::min(library, sm90),
                   concat(name(plan.algorithm), ": ", describe(p), ", ", us, " us, library ", library,
                          ", SM90 ", sm90));
          }
        }
      }
    }
  }
  for (const int count : choices) expect(count > 0, "each plan is chosen of some block");
}

/// No estimate of cuDNN is below what the products take at the card's rate, whatever the numbers: problems
/// far from those that were timed would take the library plan.
void test_within_the_rate() {
  constexpr double kHalf = 1e15, kFloat = 0.5e15;  // FLOP/s of dense products, an H200's data sheet
  std::mt19937 random(20261128);
  const auto any = [&](std::initializer_list<std::int64_t> of) {
    return *(of.begin() + random() % of.size());
  };
  int timed = 0;
  for (int i = 0; i < 4000; ++i) {
    Problem p = headline();
    p.n = any({1, 2, 8, 64}), p.c = any({1, 3, 8, 64, 100, 512, 2048}), p.k = any({1, 4, 24, 64, 320, 2048});
    for (std::size_t axis = 0; axis < 3; ++axis) {
      p.in[axis] = any({1, 2, 5, 16, 33, 64}), p.kernel[axis] = any({1, 2, 3, 4, 5, 8});
      p.stride[axis] = any({1, 1, 2, 3, 4});
      p.padding[axis] = any({0, 0, (p.kernel[axis] - 1) / 2});
      if (p.out()[axis] < 1) p.padding[axis] = 0;
    }
    p.num_groups = 1;
    for (Problem& q : inputs_of(p)) {
      q.w_channels_last = q.x_layout == Layout::kNDHWC;
      if (!has_plan_times(q)) continue;
      const double least = 1e6 * q.useful_flops() / (q.dtype == DType::kFloat32 ? kFloat : kHalf);
      const double us = library_plan_us(q, hopper());
      expect(us >= least, concat(describe(q), ": ", us, " us, its products alone ", least));
      ++timed;
    }
  }
  expect(timed > 8000, concat("problems with times: ", timed));
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_which_have_times();
    upconv3d::test_times();
    upconv3d::test_weight_copies();
    upconv3d::test_split_sums();
    upconv3d::test_hidden_memory();
    upconv3d::test_expected_is_chosen();
    upconv3d::test_within_the_rate();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "plan_times: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
