// SPDX-License-Identifier: Apache-2.0
#include "core/held_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/held_tiles.hpp"
#include "core/index_math.hpp"
#include "core/pack_stages.hpp"
#include "core/plan_times.hpp"
#include "core/text.hpp"
#include "core/traffic.hpp"

namespace upconv3d {
namespace {

/// What cannot be held whatever the tile, or "".
std::string held_obstacle(const Problem& p, const std::vector<Slab>& slabs) {
  const Tail& tail = p.tail;
  if (!tail.norm) return "nothing is normalized";
  if (tail.returns_conv) return "the convolution is to be stored";
  if (!is_floor(tail.before())) return concat(name(tail.before()), " comes before the normalization");
  if (!is_piecewise_linear(tail.after())) return concat(name(tail.after()), " comes after the normalization");
  if (p.groups != 1) return concat("groups ", p.groups, " is not 1");
  if (p.is_ieee()) return "float32's accuracy takes three products, which that kernel lacks";
  if (!in_rows(p)) return "y is NCDHW";
  if (p.k % kChannelUnit != 0) return concat("output channels, ", p.k, ", are no multiple of ", kChannelUnit);
  if (slabs.size() > std::size_t{kMaxSlabs})
    return concat(slabs.size(), " phases are more than a launch takes");
  return "";
}

/// How a launch's tiles fall to blocks, as the kernel deals them out.
struct HeldWork {
  std::int64_t tiles;
  std::int64_t rounds;          // of the block that has most tiles
  double longest;               // k-blocks of the block that has most
  double of_each;               // k-blocks of a multiprocessor, on average
  std::int64_t group_partials;  // of a tile's channels
  std::int64_t merged;          // partial moments of a norm group
};

HeldWork held_work(const Problem& p, const std::vector<Slab>& slabs, const ConvInstance& instance,
                   int sm_count) {
  const std::int64_t k_tiles = ceil_div(p.k, kHeldChannels), c_blocks = ceil_div(p.c, kBlockInputs);
  const HeldShape shape =
      held_shape(static_cast<int>(instance.block_positions), static_cast<int>(size_of(instance.operand)),
                 static_cast<int>(size_of(instance.output)));
  const std::int64_t most_blocks = std::int64_t{shape.blocks_per_sm} * std::max(sm_count, 1);
  HeldWork work{};
  // Tiles come slab by slab, the costliest first, so the first tile of each round is its longest.
  double total = 0;
  for (const Slab& slab : slabs) {
    const std::int64_t tiles =
        saturating_product(p.n, ceil_div(slab.positions(), instance.block_positions), k_tiles);
    const double k_blocks = static_cast<double>(std::max<std::int64_t>(slab.tap_count() * c_blocks, 1));
    const std::int64_t first_round = ceil_div(work.tiles, most_blocks);
    work.tiles = std::min(work.tiles + tiles, kMaxSm90Count + 1);
    work.rounds = ceil_div(work.tiles, most_blocks);
    work.longest += static_cast<double>(work.rounds - first_round) * k_blocks;
    total += static_cast<double>(tiles) * k_blocks;
  }
  work.of_each = total / std::max(sm_count, 1);
  const std::int64_t moments = slab_tiles(slabs, instance.block_positions);
  work.group_partials = moments * (kHeldChannels >> held_granule_shift(p));
  work.merged = saturating_product(moments, p.k / p.num_groups >> held_granule_shift(p));
  return work;
}

/// What the kernel takes, in us of an H200 with L2 cold: 52 times of 27 blocks of 0.3 to 20 MB in two tiles
/// each are within 9 % of it (standard deviation; perf/NOTES.md, "Small blocks held by the convolution").
double held_us(const Problem& p, const HeldWork& work, const ConvInstance& instance) {
  constexpr double kLaunch = 11.1, kResult = 0.22, kWeight = 0.26;  // per MB
  // Of a k-block of 64 channels and 64 positions: of a block alone, and of those that share a multiprocessor.
  constexpr double kAlone = 0.197, kShared = 0.162;
  constexpr double kTile = 2.6;  // of 64 positions, beyond a block's first tile
  constexpr double kMergedApart = 1.5, kPerPartial = 4e-5;
  const double rows = static_cast<double>(kHeldChannels + instance.block_positions) / (2 * kHeldChannels);
  const double tile = static_cast<double>(instance.block_positions) / kHeldChannels;
  const Traffic mb(p);
  const bool apart = held_merges_apart(p, work.group_partials / (kHeldChannels >> held_granule_shift(p)));
  return kLaunch + rows * std::max(kAlone * work.longest, kShared * work.of_each) +
         kTile * tile * static_cast<double>(work.rounds - 1) + kResult * mb.y + kWeight * mb.w +
         (apart ? kMergedApart : 0) + kPerPartial * static_cast<double>(work.group_partials);
}

/// Whether the estimate is of such blocks, and none of their operands has to be packed first.
bool is_held_timed(const Problem& p, const Plan& plan) {
  constexpr double kMostResult = 20, kMostWeight = 30;  // MB
  const Traffic mb(p);
  return has_plan_times(p) && !plan.pack_x && reads_w_in_place(p) && mb.y <= kMostResult &&
         mb.w <= kMostWeight;
}

}  // namespace

std::string consider_held(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
                          Plan& plan) {
  const std::vector<Slab> slabs = border_slabs(p, 0);
  const std::string obstacle = held_obstacle(p, slabs);
  if (!obstacle.empty()) return obstacle;
  const DType operand = p.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  std::optional<ConvInstance> best;
  double least = std::numeric_limits<double>::infinity();
  for (const ConvInstance& instance : instances) {
    if (!instance.compiled || !instance.held || instance.operand != operand || instance.output != p.dtype) {
      continue;
    }
    const HeldWork work = held_work(p, slabs, instance, device.sm_count);
    const double us = held_us(p, work, instance);
    if (std::max(work.tiles, work.merged) > kMaxSm90Count || us >= least) continue;
    best = instance;
    least = us;
  }
  if (!best) {
    return concat("this build has no such kernel for ", name(p.dtype),
                  " that can count its tiles and partial moments");
  }
  const bool may = device.forced_plan.empty() || device.forced_plan == "sm90";
  const bool is_quicker = may && is_held_timed(p, plan) && least < sm90_plan_us(p, plan);
  if (device.forced_plan != "held" && !is_quicker) return "";
  plan.held = true;
  plan.expected_held_us = least;
  plan.twice = false;
  plan.instance = best;
  plan.tile_positions = best->block_positions;
  plan.window_tiles = plan.split_axes = 0;
  plan.leaving_blocks = 0;
  plan.launches = 1;
  plan.share_taps = plan.pair_phases = plan.piles_views = false;
  plan.w_in_place = reads_w_in_place(p);
  plan.tiles = slab_tiles(slabs, best->block_positions);
  plan.normalizes = plan.activation_in_y = true;
  plan.activation = p.dtype;
  plan.conv_layout = Layout::kNDHWC;
  plan.stages.clear();
  if (plan.pack_x || !plan.w_in_place) {
    plan.stages = pack_stages(p);
  } else {
    plan.channels.clear();  // as they lie
  }
  plan.stages.push_back(best->name);
  return "";
}

}  // namespace upconv3d
