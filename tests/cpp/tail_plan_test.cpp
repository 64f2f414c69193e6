// SPDX-License-Identifier: Apache-2.0
/// \file
/// Plans of every tail (core/tail.hpp), without a GPU: what the kernels demand of a plan holds whatever is
/// asked for, and each family of tails runs where it should.

#include "core/tail.hpp"

#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "core/arguments.hpp"
#include "core/channels.hpp"
#include "core/errors.hpp"
#include "core/plan.hpp"
#include "core/sm90_plan.hpp"
#include "core/sm90_schedule.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

constexpr Activation kActivations[] = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                       Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kPrelu};

Problem with_tail(Problem p, Order order, Activation activation, bool norm = true) {
  p.tail.order = order;
  p.tail.activation = activation;
  p.tail.norm = norm;
  if (activation == Activation::kPrelu) p.tail.slopes = 1;
  if (!norm) p.num_groups = 1;
  return p;
}

/// Every order, activation and normalization, with and without a skip and a returned convolution.
std::vector<Problem> all_tails(const Problem& p) {
  std::vector<Problem> problems;
  for (const Activation activation : kActivations) {
    for (int bits = 0; bits < 16; ++bits) {
      const Order order = (bits & 1) != 0 ? Order::kNormAct : Order::kActNorm;
      Problem own = with_tail(p, order, activation, (bits & 2) == 0);
      own.tail.has_skip = (bits & 4) != 0;
      own.tail.returns_conv = (bits & 8) != 0;
      problems.push_back(own);
    }
  }
  return problems;
}

/// Blocks of whole and of padded channels, of strides, and of convolution groups.
std::vector<Problem> blocks() {
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
      for (const Precision precision : {Precision::kIEEE, Precision::kTF32}) {
        Problem p = headline(dtype, layout);
        p.precision = precision;
        problems.push_back(p);
        p.kernel = p.stride = {2, 2, 2};
        problems.push_back(p);
        p.k = 100, p.num_groups = 10;
        problems.push_back(p);
        p = headline(dtype, layout);
        p.precision = precision;
        p.groups = 2;
        problems.push_back(p);
      }
    }
  }
  return problems;
}

/// What forward.cpp and the SM90 kernels take for granted of their plan.
std::string broken_promise(const Problem& p, const Plan& plan) {
  const Tail& tail = p.tail;
  const bool whole_rows = p.y_layout == Layout::kNDHWC && p.k % kChannelUnit == 0;
  if (plan.linear == tail.norm) return "linear is without normalization";
  if (tail.has_skip) return "a skip";
  if (((plan.twice && tail.norm) || plan.keeps_activation) && !is_floor(tail.before())) return "before";
  if (plan.normalizes && !plan.twice && !(whole_rows && is_piecewise_linear(tail.after())))
    return "normalizes";
  if (plan.twice && !(plan.normalizes == tail.norm && plan.activation_in_y && plan.conv_layout == p.y_layout))
    return "twice";
  if (plan.linear && (plan.normalizes || plan.keeps_activation)) return "linear, and more";
  const bool in_place =
      plan.twice || stores_in_place(p, {plan.split_axes, plan.share_taps, plan.pair_phases});
  if (plan.linear && plan.activation_in_y != in_place) return "stored in place";
  if ((plan.linear || tail.returns_conv) && stores_steps(plan)) return "steps of a result";
  if (tail.returns_conv && (plan.linear || plan.activation_in_y || tail.before() != Activation::kNone))
    return "the returned convolution";
  if (plan.keeps_activation && (plan.activation_in_y || plan.twice || tail.returns_conv)) return "kept";
  return "";
}

void test_every_tail_has_a_plan() {
  for (const Problem& block : blocks()) {
    for (const Problem& p : all_tails(block)) {
      for (const char* forced : {"", "sm90", "stored", "twice", "sm80", "library"}) {
        Device device = hopper();
        device.forced_plan = forced;
        const auto check = [&](const Plan& plan) {
          if (plan.algorithm == Algorithm::kSm80ImplicitGemm) {
            expect(p.tail.is_relu_group_norm(), "the SM80 kernel has one tail; got " + describe(p));
          }
          if (plan.algorithm != Algorithm::kSm90ImplicitGemm) return;
          const std::string broken = broken_promise(p, plan);
          expect(broken.empty(), broken + ": " + describe(p) + "\n" + describe(plan));
        };
        try {
          check(select_plan(p, device, all_compiled()));
          check(select_training_plan(p, device, all_compiled()));
        } catch (const RuleViolation& error) {
          const bool may_refuse = *forced != '\0' && std::string(forced) != "library";
          expect(may_refuse, std::string("a plan for every tail; got ") + error.what());
        }
      }
    }
  }
}

void test_where_tails_run() {
  const auto plan_of = [](const Problem& p) { return select_plan(p, hopper(), all_compiled()); };
  for (const Activation activation : kActivations) {
    const Plan plan = plan_of(with_tail(headline(), Order::kNormAct, activation));
    expect(
        plan.algorithm == Algorithm::kSm90ImplicitGemm && plan.normalizes == is_piecewise_linear(activation),
        std::string("our kernel convolves before ") + name(activation) + ": " + describe(plan));
    const Plan linear = plan_of(with_tail(headline(), Order::kActNorm, activation, false));
    expect(linear.linear && linear.activation_in_y, std::string("no normalization: ") + describe(linear));
    expect(linear.stages == std::vector<std::string>{"pack_operands", linear.instance->name},
           "every activation is in the epilogue: " + describe(linear));
    const Problem before = with_tail(headline(), Order::kActNorm, activation);
    expect(plan_of(before).algorithm == Algorithm::kSm90ImplicitGemm && plan_of(before).normalizes,
           std::string(name(activation)) + " before a normalization: " + describe(plan_of(before)));
    const Plan trained = select_training_plan(before, hopper(), all_compiled());
    expect(trained.keeps_activation == is_floor(activation) && trained.keeps_conv != is_floor(activation),
           "what a backward pass reads of it: " + describe(trained));
  }
  Problem returned = with_tail(headline(), Order::kNormAct, Activation::kRelu);
  returned.tail.returns_conv = true;
  expect(plan_of(returned).normalizes && !plan_of(returned).activation_in_y, "c beside y");
  expect(!select_training_plan(returned, hopper(), all_compiled()).keeps_activation, "no backward for it");
}

void test_channels_of_what_is_stored_in_place() {
  Problem p =
      with_tail(headline(DType::kBFloat16, Layout::kNCDHW), Order::kActNorm, Activation::kRelu, false);
  p.k = 100;
  const Plan plan = select_plan(p, hopper(), all_compiled());
  expect(plan.activation_in_y && plan.channels.empty() && plan.conv_layout == Layout::kNCDHW,
         "nothing is padded, and NCDHW stored: " + describe(plan));
}

void test_stages_of_the_library_plan() {
  Device device = hopper();
  device.forced_plan = "library";
  Problem p = with_tail(headline(), Order::kActNorm, Activation::kNone, false);
  p.has_bias = true;
  expect(select_plan(p, device, all_compiled()).stages.back() == "add", "a bias is added");
  p.has_bias = false;
  expect(select_plan(p, device, all_compiled()).stages.size() == 1, "nothing follows the convolution");
}

/// A convolution that is returned is not activated where it lies, and lies as y does.
void test_returned_convolutions() {
  for (const bool norm : {true, false}) {
    for (const char* forced : {"library", "col2im"}) {
      Device device = hopper();
      device.forced_plan = forced;
      Problem p = with_tail(headline(DType::kBFloat16, Layout::kNCDHW), Order::kNormAct, Activation::kSilu);
      p.n = 1, p.in = {6, 6, 6}, p.tail.norm = norm;
      const Plan alone = select_plan(p, device, all_compiled());
      expect(alone.conv_layout != p.y_layout || alone.activation_in_y, "in y: " + describe(alone));
      p.tail.returns_conv = true;
      const Plan plan = select_plan(p, device, all_compiled());
      expect(!plan.activation_in_y && plan.conv_layout == p.y_layout, "returned: " + describe(plan));
    }
  }
  Problem ragged = with_tail(headline(), Order::kNormAct, Activation::kRelu);
  ragged.k = 20, ragged.num_groups = 4, ragged.tail.returns_conv = true;
  Device device = hopper();
  device.forced_plan = "sm90";
  expect_violation<RuleViolation>([&] { select_plan(ragged, device, all_compiled()); },
                                  "no multiple of 16 bytes", "rows that are padded");
}

/// Whose convolution a skip before a norm is added to, and whether by a launch of its own.
void test_skips() {
  const auto has_stage = [](const Plan& plan, const std::string& stage) {
    return std::find(plan.stages.begin(), plan.stages.end(), stage) != plan.stages.end();
  };
  Problem large = with_tail(headline(), Order::kActNorm, Activation::kSilu);
  large.tail.has_skip = true;
  const Plan plan = select_plan(large, hopper(), all_compiled());
  expect(plan.algorithm == Algorithm::kCudaLibrary && plan.own_convolution && !plan.adds_skip_first,
         "our convolution, and the skip read by each pass: " + describe(plan));
  expect(!has_stage(plan, "aten::convolution") && !has_stage(plan, "add"), "no stage of either");
  const Plan training = select_training_plan(large, hopper(), all_compiled());
  expect(training.own_convolution && training.adds_skip_first && training.keeps_sum && !training.keeps_conv,
         "the sum is kept: " + describe(training));
  expect(has_stage(training, "add"), "by a launch");
  expect(!training.activation_in_y, "nor is the activation written over it");
  Problem returned = large;
  returned.tail.returns_conv = true;
  const Plan both = select_training_plan(returned, hopper(), all_compiled());
  expect(both.adds_skip_first && both.keeps_sum && !both.activation_in_y, "beside a returned convolution");
  Problem small = large;
  small.n = 1, small.in = {6, 6, 6};
  const Plan held = select_plan(small, hopper(), all_compiled());
  expect(!held.own_convolution && held.adds_skip_first && !held.keeps_sum &&
             held.stages.back() == "activation_group_norm_held",
         "cuDNN's, and one launch after the sum: " + describe(held));
  Device device = hopper();
  device.forced_plan = "library";
  expect(!select_plan(large, device, all_compiled()).own_convolution, "cuDNN's, asked for");
  large.tail.norm = false, large.num_groups = 1;
  expect(select_training_plan(large, hopper(), all_compiled()).keeps_sum, "without a norm");
  const Plan bare = select_plan(large, hopper(), all_compiled());
  expect(bare.own_convolution && !bare.adds_skip_first && bare.stages.back() == "silu",
         "our convolution, and one pass that adds the skip: " + describe(bare));
  large = with_tail(headline(DType::kFloat64), Order::kActNorm, Activation::kSilu);
  large.tail.has_skip = true;
  expect(!select_training_plan(large, hopper(), all_compiled()).keeps_sum, "in float64");
}

/// Which convolution where nothing is normalized: blocks that were timed on both (perf/NOTES.md, "Without a
/// norm").
void test_without_norm() {
  struct Case {
    const char* what;
    std::int64_t n, c, k;
    Extent3 in, kernel, stride, padding;
    Activation activation;
    bool library;
  };
  const Case cases[] = {
      {"few tiles of many taps",
       4,
       320,
       48,
       {7, 16, 16},
       {3, 3, 3},
       {1, 1, 1},
       {1, 1, 1},
       Activation::kNone,
       true},
      {"once", 2, 64, 64, {10, 21, 20}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}, Activation::kLeakyRelu, false},
      {"an exponential", 2, 64, 64, {10, 21, 20}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}, Activation::kGelu, true},
      {"ReLU in the epilogue",
       1,
       320,
       320,
       {8, 13, 14},
       {2, 2, 2},
       {2, 2, 2},
       {0, 0, 0},
       Activation::kRelu,
       false},
      {"overlapping taps",
       2,
       256,
       64,
       {16, 18, 16},
       {4, 4, 4},
       {2, 2, 2},
       {1, 1, 1},
       Activation::kLeakyRelu,
       false},
  };
  for (const Case& c : cases) {
    Problem p = with_tail(headline(), Order::kNormAct, c.activation, false);
    p.n = c.n, p.c = c.c, p.k = c.k, p.in = c.in, p.kernel = c.kernel, p.stride = c.stride;
    p.padding = c.padding, p.w_channels_last = true, p.has_bias = true;
    const Plan plan = select_plan(p, hopper(), all_compiled());
    expect((plan.algorithm == Algorithm::kCudaLibrary) == c.library, c.what + (": " + describe(plan)));
    expect(plan.instead_of_sm90 == c.library, "bits that have to repeat: " + describe(plan));
    const Plan trained = select_training_plan(p, hopper(), all_compiled());
    expect(trained.algorithm == Algorithm::kCudaLibrary && trained.keeps_conv,
           "what is activated is kept: " + describe(trained));
    expect(
        trained.own_convolution == (select_plan(convolution_alone(p), hopper(), all_compiled()).algorithm ==
                                    Algorithm::kSm90ImplicitGemm),
        "by the quicker convolution alone: " + describe(trained));
  }
  const Problem large = with_tail(headline(), Order::kNormAct, Activation::kRelu, false);
  expect(select_plan(large, hopper(), all_compiled()).algorithm == Algorithm::kSm90ImplicitGemm,
         "many tiles, all of them full");
}

/// A call of [1,8,2,2,2] with weight [8,8,1,1,1], its result as large.
Arguments small_call() {
  Arguments a;
  a.input = {{1, 8, 2, 2, 2}, {64, 8, 4, 2, 1}, "float32", "cpu", "strided", 0};
  a.weight = {{8, 8, 1, 1, 1}, {8, 1, 1, 1, 1}, "float32", "cpu", "strided", 0};
  a.stride = a.dilation = {1, 1, 1};
  a.padding = a.output_padding = {0, 0, 0};
  return a;
}

void test_rules_of_slopes_and_skip() {
  const TensorDesc vector = {{3}, {1}, "float32", "cpu", "strided", 0};
  const auto expect_rule = [](const Arguments& a, const std::string& part) {
    expect_violation<RuleViolation>([&] { make_problem(a); }, part, part);
  };
  Arguments a = small_call();
  a.tail.activation = Activation::kPrelu;
  expect_rule(a, "activation_param must be a tensor");
  a.slopes = vector;
  expect_rule(a, "activation_param.shape=[3]");
  a.slopes->sizes = {8};
  expect(make_problem(a).tail.slopes == 8, "a slope per channel");
  a.tail.activation = Activation::kRelu;
  expect_rule(a, "and for no other");
  a = small_call();
  a.skip = a.input;
  expect(make_problem(a).tail.has_skip, "a skip like the result");
  a.skip->sizes = {1, 8, 1, 2, 2};
  expect_rule(a, "skip must have the sizes");
  a.input.sizes.erase(a.input.sizes.begin()), a.input.strides.erase(a.input.strides.begin());
  a.skip = a.input;
  expect(make_problem(a).tail.has_skip, "an unbatched skip of an unbatched call");
  a = small_call();
  a.skip = a.input;
  a.skip->dtype = "bfloat16";
  expect_rule(a, "skip.dtype=bfloat16");
  a = small_call();
  a.tail.norm = false;
  a.input.sizes = {1, 8, 1, 1, 1}, a.weight.sizes[1] = 1;
  expect(make_problem(a).positions() == 1, "one value, which nothing normalizes");
  a.norm_bias = vector;
  expect_rule(a, "norm=None");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_every_tail_has_a_plan();
    upconv3d::test_where_tails_run();
    upconv3d::test_channels_of_what_is_stored_in_place();
    upconv3d::test_stages_of_the_library_plan();
    upconv3d::test_returned_convolutions();
    upconv3d::test_skips();
    upconv3d::test_without_norm();
    upconv3d::test_rules_of_slopes_and_skip();
  } catch (const std::exception& error) {
    upconv3d::expect(false, std::string("unexpected exception: ") + error.what());
  }
  if (upconv3d::failures == 0) std::cout << "tail_plan_test: all expectations hold\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
