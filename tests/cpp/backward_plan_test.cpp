// SPDX-License-Identifier: Apache-2.0
/// \file
/// Selection of training and backward plans, without a GPU.

#include "core/backward_plan.hpp"

#include <exception>
#include <iostream>

#include "core_cases.hpp"

namespace upconv3d {
namespace {

std::vector<GradWInstance> all_grad_w() {
  std::vector<GradWInstance> instances = grad_w_instances();
  for (GradWInstance& instance : instances) instance.compiled = true;
  return instances;
}

BackwardPlan plan_of(const Problem& p, const GradientMask& wanted, const Device& device = hopper()) {
  return select_backward_plan(p, device, wanted, all_compiled(), all_grad_w());
}

constexpr GradientMask kAll = {true, true, true, true, true};

void test_training_plans() {
  const Plan plan = select_training_plan(headline(), hopper(), all_compiled());
  expect(plan.keeps_activation && plan.normalizes && !plan.activation_in_y, "a is kept beside y");
  Problem k_is_s = headline();
  k_is_s.kernel = k_is_s.stride = {2, 2, 2};
  expect(select_plan(k_is_s, hopper(), all_compiled()).twice, "computed twice where nothing is kept");
  const Plan stored = select_training_plan(k_is_s, hopper(), all_compiled());
  expect(!stored.twice && stored.keeps_activation, "stored where it is kept");
  Device ampere = hopper();
  ampere.compute_capability = 80;
  expect(!select_training_plan(headline(), ampere, all_compiled()).keeps_activation, "nothing on Ampere");
  Problem many = headline();
  many.n = std::int64_t{1} << 25;
  expect(!select_training_plan(many, hopper(), all_compiled()).keeps_activation,
         "2^32 samples times channels are not counted");
  many.in = {2, 2, 2};
  expect(!select_training_plan(many, hopper(), all_compiled()).keeps_activation, "of one tile, either");
  many.n = 1, many.in = {1, 49152, 32768}, many.kernel = {1, 1, 1};
  expect(!select_training_plan(many, hopper(), all_compiled()).keeps_activation,
         "nor more than 2^30 positions of a sample");
}

void test_backward_plans() {
  const BackwardPlan bf16 = plan_of(headline(), kAll);
  expect(bf16.grad_x && bf16.grad_w && !bf16.library && !bf16.scaled && bf16.grad_c_pitch == 128,
         "headline: " + describe(bf16));
  Problem tf32 = headline(DType::kFloat32, Layout::kNCDHW);
  tf32.precision = Precision::kTF32;
  expect(plan_of(tf32, kAll).scaled && !plan_of(tf32, kAll).split,
         "float32 at TF32's accuracy takes scaled float16");
  const BackwardPlan ieee = plan_of(headline(DType::kFloat32), kAll);
  expect(ieee.grad_x && ieee.grad_w && !ieee.library && !ieee.scaled && ieee.split &&
             ieee.grad_x->split_grad_c() && ieee.grad_w->split_grad_c() && ieee.grad_c_pitch == 128,
         "float32's accuracy takes two float16 in the place of a float: " + describe(ieee));
  const BackwardPlan vectors = plan_of(headline(), {false, false, true, true, true});
  expect(!vectors.grad_x && !vectors.grad_w && !vectors.library && vectors.grad_c_pitch == 0,
         "grad_c is not wanted for vectors alone");
  const BackwardPlan weight = plan_of(headline(), {false, true, false, false, false});
  expect(!weight.grad_x && weight.grad_w.has_value(), "what is not asked for is not computed");
}

void test_library_training() {
  Problem small = headline(DType::kFloat32, Layout::kNCDHW);
  small.c = small.k = small.num_groups = 2;
  const Plan plan = select_training_plan(small, hopper(), all_compiled());
  expect(plan.algorithm == Algorithm::kCudaLibrary && plan.keeps_conv && !plan.keeps_activation &&
             !plan.activation_in_y,
         "the convolution is kept beside y: " + describe(plan));
  Device library = hopper();
  library.forced_plan = "library";
  const Plan without = select_plan(small, library, all_compiled());
  expect(without.activation_in_y && !without.keeps_conv, "nothing is kept where nothing follows");
  const auto keeps = [](const Problem& p) {
    return select_training_plan(p, hopper(), all_compiled()).keeps_conv;
  };
  Problem wide = small;
  wide.dtype = DType::kFloat64;
  Problem rows = small;
  rows.x_layout = rows.y_layout = Layout::kNDHWC;
  expect(keeps(rows), "kept in either layout");
  Problem skip = small;
  skip.tail.has_skip = true;
  Problem returned = small;
  returned.tail.returns_conv = true;
  Problem bare = small;
  bare.num_groups = 1, bare.tail.norm = false;
  expect(!keeps(wide) && !keeps(skip), "what PyTorch differentiates is not kept");
  expect(keeps(bare), "without a norm, what the activation applied to or made");
  expect(begins_with_result(bare.tail) && !begins_with_result(small.tail), "ReLU's result, without a norm");
  const BackwardPlan without_norm = library_backward_plan(bare, kAll);
  expect(without_norm.stages.front() == "activation_backward" && without_norm.library,
         "no moments without a norm: " + describe(without_norm));
  bare.tail.has_skip = true;
  expect(!keeps(bare), "nor with a skip, whose sum is not kept");
  bare.tail.activation = Activation::kNone;
  expect(library_backward_plan(bare, {true, true, false, false, false}).stages.size() == 1,
         "without an activation and a bias the library is all");
  expect(library_backward_plan(bare, kAll).stages.front() == "activation_backward", "which sums the bias");
  expect(keeps(returned), "relu's result of the returned convolution, which may change, is what is read");
  returned.tail.order = Order::kNormAct;
  expect(keeps(returned), "the returned convolution is what the backward reads");
  Device ampere = hopper();
  ampere.compute_capability = 80;
  const Problem planes = headline(DType::kBFloat16, Layout::kNCDHW);
  expect(select_training_plan(planes, ampere, all_compiled()).keeps_conv, "kept on Ampere");
  ampere.forced_plan = "sm80";
  expect(!select_training_plan(planes, ampere, all_compiled()).keeps_conv, "the SM80 kernel keeps nothing");
  const BackwardPlan all = library_backward_plan(small, kAll);
  expect(all.library && all.grad_c_pitch == 2 && all.stages.back() == "aten::convolution_backward",
         "the library convolves: " + describe(all));
  expect(!library_backward_plan(small, {false, false, true, true, true}).library, "vectors alone");
}

void test_library() {
  const auto expect_library = [](const Problem& p, const char* part, const Device& device = hopper()) {
    const BackwardPlan plan = plan_of(p, kAll, device);
    expect(plan.library && !plan.grad_x && !plan.grad_w && plan.grad_c_pitch >= p.k &&
               has_part(plan.reason, part),
           std::string(part) + ": " + describe(plan));
  };
  Problem groups = headline();
  groups.groups = 2;
  expect_library(groups, "groups");
  Device forced = hopper();
  forced.forced_plan = "library";
  expect_library(headline(), "UPCONV3D_PLAN", forced);
  const BackwardPlan none = select_backward_plan(headline(), hopper(), kAll, {}, {});
  expect(none.library, "nothing compiled");
  Problem padded = headline();
  padded.k = 20, padded.num_groups = 4;
  const BackwardPlan half = select_backward_plan(padded, hopper(), kAll, all_compiled(), {});
  expect(half.library && !half.grad_x && half.grad_c_pitch == 24,
         "not one gradient of the two, and rows of whole units: " + describe(half));
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_training_plans();
    upconv3d::test_backward_plans();
    upconv3d::test_library_training();
    upconv3d::test_library();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "backward plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
