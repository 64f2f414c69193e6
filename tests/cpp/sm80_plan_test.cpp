// SPDX-License-Identifier: Apache-2.0
/// \file
/// Selection of the SM80 plan, and plans that are forced, without a GPU.

#include <exception>
#include <iostream>

#include "core/border_slabs.hpp"
#include "core/errors.hpp"
#include "core/plan.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

void test_sm80_selection() {
  Device ampere = hopper();
  ampere.compute_capability = 80, ampere.sm_count = 108;
  const Plan bf16 = select_plan(headline(), ampere, all_compiled());
  expect(bf16.algorithm == Algorithm::kSm80ImplicitGemm && bf16.instance && bf16.instance->arch == 80,
         "Ampere takes the SM80 kernel");
  expect(bf16.activation_in_y && !bf16.pack_x && bf16.split_axes == 3, "headline on Ampere");
  expect(bf16.tiles == slab_tiles(border_slabs(headline(), 3), bf16.instance->block_positions),
         "a partial moment per tile");
  Problem unaligned = headline();
  unaligned.x_aligned = false;
  expect(select_plan(unaligned, ampere, all_compiled()).pack_x, "x that begins amid 16 bytes is copied");
  Problem p = headline(DType::kFloat32, Layout::kNCDHW);
  const Plan ieee = select_plan(p, ampere, all_compiled());
  expect(ieee.instance->products == 3 && ieee.pack_x && !ieee.activation_in_y, "float32 on Ampere");
  p.precision = Precision::kTF32;
  expect(select_plan(p, ampere, all_compiled()).instance->products == 1, "float32 at TF32's accuracy");
  for (const int capability : {86, 89, 100, 120}) {
    Device device = ampere;
    device.compute_capability = capability;
    expect(select_plan(headline(), device, all_compiled()).algorithm == Algorithm::kSm80ImplicitGemm,
           concat("compute capability ", capability));
  }
  expect(has_part(select_plan(headline(), ampere, {}).reason, "no SM80 kernel"), "nothing compiled");
  p = headline();
  p.kernel = {1, 1, 11};
  expect(has_part(select_plan(p, ampere, all_compiled()).reason, "11 taps"), "a bit per tap");
  p.stride = {1, 1, 2};
  expect(select_plan(p, ampere, all_compiled()).algorithm == Algorithm::kSm80ImplicitGemm,
         "6 and 5 taps in two phases");
  p.padding = {0, 0, 8}, p.kernel = {1, 1, 9}, p.stride = {1, 1, 1}, p.dilation = {1, 1, 40};
  expect(select_plan(p, ampere, all_compiled()).algorithm == Algorithm::kSm80ImplicitGemm,
         "no limits of im2col");
  p = headline();
  p.in = {2000, 2000, 2000}, p.c = 8, p.kernel = {1, 1, 1}, p.n = 1;
  expect(has_part(select_plan(p, ampere, all_compiled()).reason, "32-bit"), "8e9 positions of one sample");
}

void test_forced_plans() {
  const auto forced = [](const char* plan, int capability) {
    Device device = hopper();
    device.compute_capability = capability;
    device.forced_plan = plan;
    return select_plan(headline(), device, all_compiled()).algorithm;
  };
  expect(forced("sm80", 90) == Algorithm::kSm80ImplicitGemm, "sm80 on Hopper");
  expect(forced("sm90", 90) == Algorithm::kSm90ImplicitGemm, "sm90 on Hopper");
  expect(forced("library", 90) == Algorithm::kCudaLibrary, "library on Hopper");
  expect(forced("library", 80) == Algorithm::kCudaLibrary, "library on Ampere");
  expect_violation<RuleViolation>([&] { forced("sm90", 80); }, "8.0 is not 9.0", "sm90 on Ampere");
  expect_violation<RuleViolation>([&] { forced("sm80", 75); }, "7.5 is below 8.0", "sm80 on Turing");
  expect_violation<ValueViolation>([&] { forced("fastest", 90); }, "got \"fastest\"", "no such plan");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_sm80_selection();
    upconv3d::test_forced_plans();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "sm80 plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
