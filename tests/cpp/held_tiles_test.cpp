// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_held_sm90 relies on: that shared memory has room, that blocks deal out every tile
/// once, that every value of y is one tile's and every partial moment one granule's, that 32-bit counters
/// suffice, and that select_plan refuses what it assumes. Without torch or CUDA. Problems are random; a seed
/// may be given.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/errors.hpp"
#include "core/held_tiles.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

std::mt19937_64 generator;

std::int64_t between(std::int64_t least, std::int64_t most) {
  return least + static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(most - least + 1));
}

/// held_tile_index of cuda/conv_transpose/held_params_sm90.cuh, line by line.
std::int64_t tile_index(std::int64_t k_tiles, std::int64_t blocks, std::int64_t block, std::int64_t round) {
  const std::int64_t of_channels = block / k_tiles, k_tile = block % k_tiles;
  const std::int64_t last = blocks / k_tiles - 1 - of_channels;
  const bool turns = round % 2 != 0 && last >= 0;
  return round * blocks + (turns ? last * k_tiles + k_tile : block);
}

/// Each tile falls to one block, which has no more behind its first index beyond the last tile; the block
/// that has most has as many as held_rooms is told; and channels of a block stay the same where they can.
void test_dealing(std::int64_t tiles, std::int64_t k_tiles, std::int64_t blocks) {
  const std::string what = concat(tiles, " tiles, ", k_tiles, " of channels, by ", blocks, " blocks");
  std::vector<int> dealt(static_cast<std::size_t>(tiles), 0);
  std::int64_t most = 0;
  bool ends = true, keeps_channels = true;
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::int64_t round = 0;
    for (std::int64_t index; (index = tile_index(k_tiles, blocks, block, round)) < tiles; ++round) {
      ++dealt[static_cast<std::size_t>(index)];
      keeps_channels = keeps_channels && index % k_tiles == block % k_tiles;
    }
    ends = ends && tile_index(k_tiles, blocks, block, round + 1) >= tiles;
    most = std::max(most, round);
  }
  expect(std::all_of(dealt.begin(), dealt.end(), [](int times) { return times == 1; }), what + ": once");
  expect(ends, what + ": nothing behind the end");
  expect(most == ceil_div(tiles, blocks), what + ": most of a block");
  expect(keeps_channels || blocks % k_tiles != 0, what + ": the same channels");
}

/// By as many blocks as an H200 holds, by fewer as where a context is granted a share of it, and by any
/// number.
void test_dealings() {
  for (int i = 0; i < 400; ++i) {
    const std::int64_t k_tiles = between(1, 20), tiles = k_tiles * between(1, 300);
    const std::int64_t most = std::min<std::int64_t>(tiles, 2 * hopper().sm_count);
    for (std::int64_t blocks = most; blocks > 1; blocks = (blocks + 1) / 2) {
      test_dealing(tiles, k_tiles, blocks);
    }
    test_dealing(tiles, k_tiles, between(1, most));
  }
}

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

std::int64_t random_divisor(std::int64_t of) {
  std::vector<std::int64_t> divisors;
  for (std::int64_t d = 1; d <= of; ++d) {
    if (of % d == 0) divisors.push_back(d);
  }
  return divisors[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(divisors.size()) - 1))];
}

/// 16 bit and of a channels_last_3d result, of any numbers, and so of many that the kernel does not take.
Problem random_problem(std::int64_t most_samples, std::int64_t most_channels, std::int64_t most_extent) {
  Problem p;
  do {
    p.n = between(1, most_samples);
    p.c = between(1, most_channels);
    p.k = between(0, 7) == 0 ? between(1, most_channels) : 8 * between(1, ceil_div(most_channels, 8));
    for (int axis = 0; axis < 3; ++axis) {
      p.in[axis] = between(1, most_extent);
      p.kernel[axis] = between(1, 7);
      p.stride[axis] = between(1, between(2, 4));
      p.dilation[axis] = between(0, 1) == 0 ? 1 : between(1, 4);
      p.padding[axis] = between(0, between(0, 12));
      p.output_padding[axis] = between(0, std::max(p.stride[axis], p.dilation[axis]) - 1);
    }
  } while (std::ranges::min(p.out()) < 1 || p.n * p.positions() == 1);
  p.num_groups = random_divisor(p.k);
  p.dtype = between(0, 1) == 0 ? DType::kBFloat16 : DType::kFloat16;
  p.x_layout = between(0, 9) == 0 ? Layout::kNCDHW : Layout::kNDHWC;
  p.x_aligned = between(0, 9) != 0;
  p.y_layout = Layout::kNDHWC;
  p.w_channels_last = between(0, 1) == 0;
  p.has_bias = between(0, 1) == 0;
  return p;
}

/// Of the kind that is chosen as it stands: doubles each extent, and packs nothing.
Problem doubling_problem() {
  Problem p = random_problem(4, between(0, 1) == 0 ? 400 : 900, 14);
  p.kernel = {4, 4, 4}, p.stride = {2, 2, 2};
  p.padding = p.dilation = {1, 1, 1}, p.output_padding = {0, 0, 0};
  p.in = {p.in[0], p.in[0], p.in[0]};
  p.c = 16 * ceil_div(p.c, 16);
  p.x_layout = Layout::kNDHWC;
  p.w_channels_last = p.x_aligned = true;
  return p;
}

std::string message_of(const Problem& p, const Device& device) {
  try {
    select_plan(p, device, all_compiled());
  } catch (const RuleViolation& error) {
    return error.what();
  }
  return "";
}

Device asking_for(const char* forced) {
  Device device = hopper();
  device.forced_plan = forced;
  return device;
}

/// Every value of y is of one tile, and every partial moment of the rows of one tile that lie side by side in
/// one norm group. In the kernel's order: slab by slab of all samples, channels innermost.
void test_places(const Problem& p, std::int64_t block_positions) {
  const std::string what = concat(describe(p), ", tiles of ", block_positions, " positions");
  const std::vector<Slab> slabs = border_slabs(p, 0);
  const Extent3 out = p.out();
  const std::int64_t moments = slab_tiles(slabs, block_positions), group = p.k / p.num_groups;
  const std::int64_t granule = std::int64_t{1} << held_granule_shift(p), granules = p.k / granule;
  expect(granules * granule == p.k && kHeldChannels % granule == 0, what + ": granules of a tile");
  std::vector<int> owners(static_cast<std::size_t>(p.positions() * p.k), 0);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(moments * granules), 0);
  bool in_groups = true;
  std::int64_t first_moment = 0;
  for (const Slab& slab : slabs) {
    for (std::int64_t at = 0; at < slab.positions(); ++at) {
      const std::int64_t q = at % slab.extent[2], rows = at / slab.extent[2];
      const std::int64_t h = rows % slab.extent[1], z = rows / slab.extent[1];
      const std::int64_t pixel =
          ((slab.origin[0] + z * slab.step[0]) * out[1] + slab.origin[1] + h * slab.step[1]) * out[2] +
          slab.origin[2] + q * slab.step[2];
      const std::int64_t moment = first_moment + at / block_positions;
      for (std::int64_t channel = 0; channel < p.k; ++channel) {
        ++owners[static_cast<std::size_t>(pixel * p.k + channel)];
        ++counts[static_cast<std::size_t>(moment * granules + channel / granule)];
        in_groups = in_groups && channel / group == channel / granule * granule / group;
      }
    }
    first_moment += ceil_div(slab.positions(), block_positions);
  }
  expect(std::all_of(owners.begin(), owners.end(), [](int times) { return times == 1; }), what + ": y");
  expect(std::all_of(counts.begin(), counts.end(), [](std::int64_t count) { return count > 0; }) && in_groups,
         what + ": partial moments");
  for (std::int64_t g = 0; g < p.num_groups; ++g) {
    std::int64_t merged = 0;
    for (std::int64_t moment = 0; moment < moments; ++moment) {
      for (std::int64_t of = g * group / granule; of < (g + 1) * group / granule; ++of) {
        merged += counts[static_cast<std::size_t>(moment * granules + of)];
      }
    }
    expect(merged == group * p.positions(), what + ": values of a norm group");
  }
}

/// What the kernel counts in 32 bits of a block that it is given, with a step beyond the end of each loop.
void test_counters(const Problem& p, const Plan& plan) {
  constexpr std::int64_t kEnd = std::numeric_limits<std::int32_t>::max();
  const std::string what = describe(p);
  const std::int64_t blocks = 2 * std::int64_t{hopper().sm_count}, loads_of_team = 4 * 128;
  const std::int64_t of_group = p.k / p.num_groups >> held_granule_shift(p);
  expect(p.n * plan.tiles * ceil_div(p.k, kHeldChannels) + 2 * blocks <= kEnd, what + ": tiles");
  expect(saturating_product(plan.tiles, of_group) <= kEnd - loads_of_team, what + ": partial moments");
  expect(p.n * p.num_groups + 4 * blocks <= kEnd, what + ": norm groups");
  expect(p.positions() <= kEnd && volume(p.in) <= kEnd, what + ": positions");
  expect(border_slabs(p, 0).size() <= std::size_t{kMaxSlabs} && p.groups == 1 && p.k % 8 == 0,
         what + ": phases, groups and channels");
}

/// What the launch takes from a plan, and what people are told of it: nothing of the kernel that stores.
void test_fields(const Problem& p, const Plan& plan) {
  const std::string what = describe(p);
  expect(plan.instance->stored_bits == 16 && plan.instance->block_channels == kHeldChannels &&
             plan.instance->block_inputs == kBlockInputs && plan.instance->products == 1,
         what + ": its variant");
  expect(!plan.twice && plan.stages.back() == plan.instance->name, what + ": the kernel comes last");
  expect(plan.normalizes && plan.activation_in_y && plan.launches == 1 && plan.activation == p.dtype &&
             plan.conv_layout == Layout::kNDHWC && !plan.linear && !plan.keeps_activation,
         what + ": into y, in one launch");
  expect(plan.split_axes == 0 && plan.window_tiles == 0 && plan.leaving_blocks == 0 && !plan.share_taps &&
             !plan.pair_phases && !plan.piles_views,
         what + ": tiles as they come");
  const bool packs_x = p.x_layout != Layout::kNDHWC || !p.x_aligned || p.c % kSectorChannels != 0;
  expect(plan.pack_x == packs_x && plan.w_in_place == p.w_channels_last, what + ": what is packed");
  const bool pads = (packs_x || !plan.w_in_place) && operand_channels(p) != p.c;
  expect(plan.channels.empty() != pads, concat(what, ": channels are \"", plan.channels, '"'));
}

/// A time, which of twice the samples is never less.
void test_estimate(const Problem& p, const Plan& plan) {
  const std::string what = describe(p);
  expect(std::isfinite(plan.expected_held_us) && plan.expected_held_us > 0, what + ": estimate");
  Problem twice = p;
  twice.n *= 2;
  if (!message_of(twice, asking_for("held")).empty()) return;
  const Plan more = select_plan(twice, asking_for("held"), all_compiled());
  expect(more.expected_held_us >= plan.expected_held_us, what + ": twice the samples");
}

/// Of the tiles that it can run on, those expected to be quicker; and of a block that is held as chosen, the
/// choice: no operand is packed, sizes are those that times are known of, and other plans are had by name.
void test_choice(const Problem& p, const Plan& plan) {
  const std::string what = describe(p);
  for (const std::int64_t positions : {64, 128}) {
    std::vector<ConvInstance> one = all_compiled();
    std::erase_if(one, [&](const ConvInstance& i) { return i.held && i.block_positions != positions; });
    const double us = select_plan(p, asking_for("held"), one).expected_held_us;
    expect(us >= plan.expected_held_us, concat(what, ": tiles of ", positions, " are quicker"));
  }
  expect(!plan.pack_x && plan.w_in_place && plan.stages.size() == 1, what + ": chosen, packs nothing");
  const std::int64_t y = 2 * p.n * p.positions() * p.k, w = 2 * p.c * p.k * volume(p.kernel);
  expect(y <= 20'000'000 && w <= 30'000'000, what + ": chosen, of sizes that were timed");
  for (const char* other : {"stored", "library"})
    expect(!select_plan(p, asking_for(other), all_compiled()).held, concat(what, ": held, not ", other));
}

/// By the kernel's name; and as chosen.
void test_problem(const Problem& p, int& held, int& chosen) {
  const std::string refusal = message_of(p, asking_for("held"));
  const Plan free = select_plan(p, hopper(), all_compiled());
  expect(refusal.empty() || !free.held, describe(p) + ": chosen though it cannot run: " + refusal);
  if (!refusal.empty()) return;
  ++held;
  const Plan asked = select_plan(p, asking_for("held"), all_compiled());
  test_counters(p, asked);
  test_fields(p, asked);
  test_estimate(p, asked);
  if (p.n * p.positions() * p.k <= 40'000 && p.num_groups <= 64) {
    for (const std::int64_t positions : {64, 128}) test_places(p, positions);
  }
  if (!free.held) return;
  ++chosen;
  test_choice(p, free);
}

void test_random_problems() {
  int held = 0, chosen = 0;
  for (int i = 0; i < 1500; ++i)
    test_problem(random_problem(64, 1100, between(0, 9) == 0 ? 300 : 24), held, chosen);
  for (int i = 0; i < 500; ++i) test_problem(random_problem(2, 100, 8), held, chosen);
  for (int i = 0; i < 500; ++i) test_problem(doubling_problem(), held, chosen);
  expect(held >= 400 && chosen >= 50, concat("random problems: ", held, " held, ", chosen, " chosen"));
}

/// Of a norm group of so many channels, more partial moments than 32 bits count, though tiles are fewer.
void test_many_channels() {
  for (int i = 0; i < 200; ++i) {
    Problem p = headline();
    p.n = p.c = 1;
    p.k = 8 * (2 * between(1 << 19, 40 << 19) + 1);
    p.num_groups = between(0, 1) == 0 ? 1 : 8;
    p.in = {between(1, 40), 1, between(1, 40)};
    p.kernel = {1, 1, 1};
    p.stride = {between(1, 3), 3, between(1, 3)};
    for (int axis = 0; axis < 3; ++axis) p.output_padding[axis] = p.stride[axis] - 1;
    if (!message_of(p, asking_for("held")).empty()) continue;
    test_counters(p, select_plan(p, asking_for("held"), all_compiled()));
  }
}

/// Each assumption of the kernel's, broken alone.
void test_refusals() {
  struct Refusal {
    const char* part;  // of the message
    std::function<void(Problem&)> breaks;
  };
  const auto tail = [](const char* order, bool norm, const char* activation, bool returns_conv) {
    return [=](Problem& p) { p.tail = make_tail(order, norm, activation, 0.5, returns_conv); };
  };
  const Refusal refusals[] = {
      {"y is NCDHW", [](Problem& p) { p.y_layout = Layout::kNCDHW; }},
      {"no multiple of 8", [](Problem& p) { p.k = 100, p.num_groups = 4; }},
      {"groups 2 is not 1", [](Problem& p) { p.groups = 2; }},
      {"phases are more than a launch takes", [](Problem& p) { p.stride = {4, 4, 2}; }},
      {"three products", [](Problem& p) { p.dtype = DType::kFloat32; }},
      {"no such kernel for float32",
       [](Problem& p) { p.dtype = DType::kFloat32, p.precision = Precision::kTF32; }},
      {"no tensor-core kernel", [](Problem& p) { p.dtype = DType::kFloat64; }},
      {"im2col limits", [](Problem& p) { p.dilation = {1, 1, 16}, p.padding = {0, 0, 16}; }},
      {"a skip is added", [](Problem& p) { p.tail.has_skip = true; }},
      {"nothing is normalized", tail("norm_act", false, "relu", false)},
      {"the convolution is to be stored", tail("norm_act", true, "relu", true)},
      {"silu comes before the normalization", tail("act_norm", true, "silu", false)},
      {"leaky_relu comes before the normalization", tail("act_norm", true, "leaky_relu", false)},
      {"gelu comes after the normalization", tail("norm_act", true, "gelu", false)},
  };
  expect(message_of(headline(), asking_for("held")).empty(), "nothing is broken");
  for (const Refusal& refusal : refusals) {
    Problem p = headline();
    refusal.breaks(p);
    const std::string message = message_of(p, asking_for("held"));
    expect(has_part(message, refusal.part), concat(refusal.part, ": message is \"", message, '"'));
    expect(!select_plan(p, hopper(), all_compiled()).held, concat(refusal.part, ": chosen"));
  }
  for (const char* other : {"stored", "library"}) {
    expect(!select_plan(headline(), asking_for(other), all_compiled()).held, concat(other, " is held"));
  }
  for (const char* asked : {"", "held"}) {
    const Plan trained = select_training_plan(headline(), asking_for(asked), all_compiled());
    expect(!trained.held, "a forward pass that keeps its activation is held");
    expect(has_part(trained.reason, "stored, because the backward reads") == (asked[0] != '\0'),
           "the reason of a forward pass that is stored though another was asked for");
  }
}

/// What convolves before a skip does not depend on a kernel that cannot run the block.
void test_skips() {
  std::vector<ConvInstance> others = all_compiled();
  std::erase_if(others, [](const ConvInstance& instance) { return instance.held; });
  for (int i = 0; i < 500; ++i) {
    Problem p = doubling_problem();
    p.tail.has_skip = true;
    const bool own = select_plan(p, hopper(), all_compiled()).own_convolution;
    expect(own == select_plan(p, hopper(), others).own_convolution, describe(p) + ": its convolution");
  }
}

}  // namespace
}  // namespace upconv3d

int main(int count, char** arguments) {
  const std::uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 20261201;
  std::cout << "held_tiles: seed " << seed << '\n';
  upconv3d::generator.seed(seed);
  try {
    upconv3d::test_rooms();
    upconv3d::test_dealings();
    upconv3d::test_refusals();
    upconv3d::test_random_problems();
    upconv3d::test_many_channels();
    upconv3d::test_skips();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "held_tiles: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
