// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/held_tiles.hpp and core/held_plan.hpp: how a multiprocessor's shared memory is divided, and what
/// plans that hold a block say. Without torch or CUDA.

#include <cmath>
#include <cstdint>
#include <exception>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/held_tiles.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// Two blocks fit on a multiprocessor, tiles and k-blocks fit in a block, and no room is left over for
/// another of either.
void test_rooms() {
  constexpr int kOfHopper = 228 * 1024, kOfSystem = 1024, kSwizzled = 1024;
  for (const int positions : {64, 128}) {
    const HeldShape shape = held_shape(positions, 2, 2);
    expect(shape.blocks_per_sm * (shape.shared_bytes + kOfSystem) <= kOfHopper, "blocks of a multiprocessor");
    expect(shape.stage_bytes % kSwizzled == 0 && shape.tile_bytes % kSwizzled == 0, "swizzled tiles");
    expect(shape.stage_bytes == (64 + positions) * 64 * 2 && shape.tile_bytes == 64 * positions * 2, "bytes");
    for (std::int64_t tiles = 1; tiles <= 40; ++tiles) {
      const std::string what = concat(tiles, " tiles of ", positions, " positions");
      const HeldRooms rooms = held_rooms(shape, tiles);
      const int left = shape.shared_bytes - kHeldControlBytes - rooms.slots * shape.tile_bytes -
                       rooms.stages * shape.stage_bytes;
      expect(left >= 0, what + ": fit");
      expect(rooms.slots >= 1 && rooms.slots <= tiles, what + ": slots");
      expect(rooms.stages >= kMinHeldStages && rooms.stages <= kMaxHeldStages, what + ": stages");
      const int spared = left + (rooms.stages - kMinHeldStages) * shape.stage_bytes;
      expect(rooms.slots == tiles || spared < shape.tile_bytes, what + ": no further tile");
      expect(rooms.stages == kMaxHeldStages || left < shape.stage_bytes, what + ": no further k-block");
    }
  }
}

/// A block of the kind that can be held, asked of the planner by the kernel's name.
Problem random_problem(std::mt19937& random) {
  const auto up_to = [&](int most) { return std::int64_t{1} + static_cast<std::int64_t>(random() % most); };
  Problem p;
  p.n = up_to(16);
  p.c = 8 * up_to(40);
  p.k = 8 * up_to(80);
  p.dtype = random() % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
  for (int axis = 0; axis < 3; ++axis) {
    p.in[axis] = up_to(24);
    p.kernel[axis] = up_to(5);
    p.stride[axis] = up_to(3);
    p.dilation[axis] = p.stride[axis] == 1 ? up_to(2) : 1;
    p.output_padding[axis] = static_cast<std::int64_t>(random() % p.stride[axis]);
  }
  std::vector<std::int64_t> divisors;
  for (std::int64_t groups = 1; groups <= p.k; ++groups) {
    if (p.k % groups == 0) divisors.push_back(groups);
  }
  p.num_groups = divisors[random() % divisors.size()];
  p.x_layout = p.y_layout = Layout::kNDHWC;
  p.w_channels_last = random() % 2 == 0;
  return p;
}

/// What the launch relies on; and that an estimate of twice the samples is never less.
void test_plan(const Problem& p) {
  Device device = hopper();
  device.forced_plan = "held";
  const std::string what = describe(p);
  const Plan plan = select_plan(p, device, all_compiled());
  expect(plan.held && !plan.twice && plan.instance && plan.instance->held, what + ": the kernel");
  if (!plan.held) return;
  expect(plan.instance->operand == p.dtype && plan.instance->output == p.dtype, what + ": its dtype");
  expect(plan.normalizes && plan.activation_in_y && plan.launches == 1, what + ": one launch");
  expect(plan.stages.back() == plan.instance->name && plan.stages.size() <= 2, what + ": stages");
  std::int64_t moments = 0, positions = 0;
  const std::vector<Slab> slabs = border_slabs(p, 0);
  for (const Slab& slab : slabs) {
    moments += ceil_div(slab.positions(), plan.tile_positions);
    positions += slab.positions();
  }
  expect(plan.tiles == moments, what + ": partial moments");
  expect(positions == p.positions(), what + ": every position is one phase's");
  const int shift = held_granule_shift(p);
  expect(p.k / p.num_groups % (std::int64_t{1} << shift) == 0 && shift <= 4, what + ": whole granules");
  expect(std::isfinite(plan.expected_held_us) && plan.expected_held_us > 0, what + ": estimate");
  Problem twice = p;
  twice.n *= 2;
  const Plan more = select_plan(twice, device, all_compiled());
  expect(more.expected_held_us >= plan.expected_held_us, what + ": twice the samples");
}

void test_plans() {
  std::mt19937 random(20261201);
  for (int i = 0; i < 2000; ++i) test_plan(random_problem(random));
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_rooms();
    upconv3d::test_plans();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "held_plan: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
