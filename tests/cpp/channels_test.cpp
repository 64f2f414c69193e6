// SPDX-License-Identifier: Apache-2.0
/// \file
/// Plans for any number of channels and convolution groups, without torch, CUDA or a test framework.

#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/channels.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// Who asks for that plan.
Device asking_for_sm90() {
  Device device = hopper();
  device.forced_plan = "sm90";
  return device;
}

/// Channels and groups of any size on the SM90 kernel: what is padded, what is packed, who normalizes.
void test_channels() {
  const auto chosen = [](const std::function<void(Problem&)>& change) {
    Problem p = headline();
    change(p);
    return select_plan(p, hopper(), all_compiled());
  };
  // Asked for, since of tiles that channels leave half empty another plan may be expected to be quicker.
  const auto plan_of = [](const std::function<void(Problem&)>& change) {
    Problem p = headline();
    change(p);
    return select_plan(p, asking_for_sm90(), all_compiled());
  };
  const auto says = [](const Plan& plan, const char* part) {
    return plan.instance && plan.channels.find(part) != std::string::npos &&
           describe(plan).find(part) != std::string::npos;
  };
  expect(plan_of([](Problem&) {}).channels.empty(), "channels in eights lie as they are");
  const Plan inputs = plan_of([](Problem& p) { p.c = 20; });
  expect(says(inputs, "input channels padded from 20 to 64"), "20 input channels");
  expect(inputs.pack_x && inputs.activation_in_y, "x is padded as it is packed; y is as ever");
  expect(inputs.stages == std::vector<std::string>{"pack_operands", inputs.instance->name},
         "and so are stages");
  const Plan outputs = plan_of([](Problem& p) { p.k = 100, p.num_groups = 25; });
  expect(says(outputs, "output channels stored beside y, padded from 100 to 104"), "100 output channels");
  expect(!outputs.pack_x && !outputs.activation_in_y,
         "rows that are no chunks are normalized by another kernel");
  expect(outputs.stages.back() == "group_norm_normalize", "which is a stage of its own");
  const Plan tf32 = plan_of([](Problem& p) {
    p.dtype = DType::kFloat32, p.precision = Precision::kTF32, p.k = 20, p.num_groups = 1;
  });
  expect(tf32.instance && tf32.instance->stored_bits == 32, "no steps for who knows no tiles");
  const Plan transposed = plan_of([](Problem& p) {
    p.dtype = DType::kFloat32, p.precision = Precision::kTF32, p.k = 20, p.num_groups = 1;
    p.y_layout = Layout::kNCDHW;
  });
  expect(transposed.instance && transposed.instance->stored_bits == 16, "any channels for who does");
  const Plan few = plan_of([](Problem& p) { p.c = 3, p.k = 100, p.num_groups = 1; });
  expect(says(few, "input channels padded from 3 to 16"), "3 input channels");
  expect(
      plan_of([](Problem& p) { p.c = 48; }).pack_x == false && plan_of([](Problem& p) { p.c = 24; }).pack_x,
      "rows of whole sectors are read where they lie, others are not");
  const Plan in_place = plan_of([](Problem& p) { p.c = 80, p.w_channels_last = true; });
  expect(in_place.w_in_place && !in_place.pack_x && in_place.channels.empty(),
         "who copies nothing pads nothing");
  expect(says(plan_of([](Problem& p) { p.c = 80; }), "input channels padded from 80 to 128"),
         "80 input channels of a weight that is packed");
  expect(!chosen([](Problem& p) { p.c = p.k = p.num_groups = 1; }).instance, "one channel is the library's");

  const Plan packed = plan_of([](Problem& p) { p.groups = 2; });
  expect(says(packed, "2 groups of 32 input and 64 output channels"), "2 groups");
  expect(packed.pack_x && packed.activation_in_y, "groups of fewer channels than a k-block are packed apart");
  const Plan lying = plan_of([](Problem& p) { p.c = 256, p.groups = 4; });
  expect(lying.instance && !lying.pack_x, "groups of whole k-blocks are read where they lie");
  const auto grouped = [](Problem& p) { p.c = 160, p.groups = 4, p.dtype = DType::kFloat32; };
  expect(says(plan_of(grouped), "each group's input channels padded from 40 to 64"),
         "40 input channels a group");
  expect(!chosen([](Problem& p) { p.groups = 8; }).instance, "16 bit: groups of 8 are the library's");

  Problem p = headline();
  expect(channel_tiles(p, 128) == 1, "tiles of 128 channels");
  p.groups = 4;
  expect(channel_tiles(p, 128) == 4 && channel_tiles(p, 64) == 4, "no tile holds two groups");
  expect(operand_channels(p) == 16, "packed rows hold one group");
  p.k = 96, p.groups = 2, p.num_groups = 1;
  expect(moment_granule_shift(p) == 4, "a granule of 16 channels divides groups of 48");
  p.groups = 1;
  expect(moment_granule_shift(p) == 5, "and one of 32 the 96 of all");
}

/// k-blocks of 32 input channels where a group has no more, and a variant is compiled.
void test_half_blocks() {
  const auto plan_of = [](const std::function<void(Problem&)>& change,
                          const std::vector<ConvInstance>& instances) {
    Problem p = headline();
    change(p);
    return select_plan(p, asking_for_sm90(), instances);
  };
  const auto inputs_of = [&](const std::function<void(Problem&)>& change) {
    const Plan plan = plan_of(change, all_compiled());
    return plan.instance ? plan.instance->block_inputs : 0;
  };
  const auto tf32 = [](Problem& p) { p.c = 32, p.dtype = DType::kFloat32, p.precision = Precision::kTF32; };
  expect(inputs_of([](Problem& p) { p.c = 32; }) == 32 && inputs_of([](Problem& p) { p.c = 8; }) == 32,
         "up to 32 input channels");
  expect(inputs_of([](Problem& p) { p.c = 32, p.k = 64; }) == 32, "in tiles of 64 channels");
  expect(inputs_of([](Problem& p) { p.c = 32, p.dtype = DType::kFloat16; }) == 32 && inputs_of(tf32) == 32,
         "of float16 and float32");
  expect(inputs_of([](Problem& p) { p.c = 32, p.dtype = DType::kFloat32; }) == 64, "not of three products");
  expect(inputs_of([](Problem& p) { p.c = 33; }) == 64 && inputs_of([](Problem& p) { p.c = 64; }) == 64 &&
             inputs_of([](Problem& p) { p.c = 96; }) == 64,
         "more take whole k-blocks, whatever the last one is left with");
  expect(inputs_of([](Problem& p) { p.c = 64, p.groups = 2; }) == 32, "groups of 32");

  const auto few = [](Problem& p) { p.c = 32; };
  const Plan half = plan_of(few, all_compiled());
  expect(has_part(describe(half), "positions, k-blocks of 32 input channels"), "which describe says");
  std::vector<ConvInstance> whole = all_compiled();
  std::erase_if(whole, [](const ConvInstance& instance) { return instance.block_inputs != kBlockInputs; });
  const Plan without = plan_of(few, whole);
  expect(without.instance && without.instance->block_inputs == 64, "else whole ones, half of them zeros");
  expect(half.estimated_stored_ms < 0.8 * without.estimated_stored_ms, "which are expected to take longer");
  expect(!has_part(describe(without), "k-blocks"), "and not worth a word");
}

void test_split_rows() {
  const SplitRow blocks(192), rest(72), one(64), few(8);
  expect(blocks.lo_step == 64 && blocks.block_step() == 128 && blocks.extent() == 320,
         "whole k-blocks have their lo behind their hi");
  expect(rest.lo_step == 72 && rest.block_step() == 64 && rest.extent() == 72, "others behind all hi");
  expect(one.lo_step == 64 && one.extent() == 64 && few.lo_step == 8 && few.extent() == 8, "one k-block");
  for (const SplitRow& row : {blocks, rest, one, few}) {
    expect(row.lo_step + row.extent() == row.elements(), "a row ends with its last lo");
  }
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_channels();
    upconv3d::test_half_blocks();
    upconv3d::test_split_rows();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "channels: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
