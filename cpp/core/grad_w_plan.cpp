// SPDX-License-Identifier: Apache-2.0
#include "core/grad_w_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// TMA im2col in 3-D: signed 5-bit box corners, 5-bit filter offsets, steps up to 8.
constexpr std::int64_t kMinCorner = -16;
constexpr std::int64_t kMaxCorner = 15;
constexpr std::int64_t kMaxOffset = 30;
constexpr std::int64_t kMaxStep = 8;

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max() - kGradWBlock;

/// k-blocks that one accumulator may sum up: the tensor cores truncate, by up to 2^-23 of the sum for each 16
/// positions.
constexpr std::int64_t kMaxChain = 1024;

bool within_im2col(const Problem& p, const GradWOperand& operand, int axis) {
  const auto is_corner = [](std::int64_t v) { return v >= kMinCorner && v <= kMaxCorner; };
  return is_corner(operand.lower[axis]) && is_corner(operand.upper[axis]) && operand.step[axis] <= kMaxStep &&
         (operand.taps[axis] - 1) * p.dilation[axis] <= kMaxOffset;
}

/// Whether the taps of `axis` can move x (else grad_c).
bool can_move(const Problem& p, int axis, bool x) {
  if (x && p.stride[axis] != 1) return false;
  const std::array<bool, 3> moves = {x, x, x};
  return within_im2col(p, grad_w_operand(p, moves, true), axis) &&
         within_im2col(p, grad_w_operand(p, moves, false), axis);
}

/// The first rule that problem or device break, whatever the choice of roles, or "".
std::string find_obstacle(const Problem& p, const Device& device) {
  if (!device.is_cuda || device.compute_capability != kHopper) {
    return "the gradient of the weight has a kernel for compute capability 9.0 alone";
  }
  if (p.groups != 1) return concat("its kernel takes 1 convolution group; got groups=", p.groups);
  if (p.dtype == DType::kFloat64) return "float64 has no tensor-core kernel";
  if (p.n < 1) return "there are no samples";
  const Extent3 out = p.out();
  const std::int64_t largest = std::max({saturating_product(p.n, p.in[0], p.in[1], p.in[2]),
                                         saturating_product(p.n, out[0], out[1], out[2]), p.c, p.k});
  if (largest > kMaxCount) {
    return concat("channels or positions of all samples exceed 32-bit coordinates; got ", largest);
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (!can_move(p, axis, false) && !can_move(p, axis, true)) {
      return concat("stride ", p.stride[axis], ", padding ", p.padding[axis], " and dilation ",
                    p.dilation[axis], " of ", p.kernel[axis], " taps along axis ", axis,
                    " exceed TMA's im2col");
    }
  }
  return "";
}

/// Cycles of a multiprocessor's tensor cores for one k-block of a tile. Tiles of 64 rows load half as much
/// again for the same products: where all else was equal, 1.3 times as long on an H200.
double block_cycles(const GradWInstance& instance) {
  constexpr double kProductsPerCycle = 2048;
  constexpr double kSmallTile = 1.3;
  const double columns = 2.0 * warpgroup_columns(instance.row_chunks, instance.column_chunks);
  const double products = instance.products * columns * kGradWChunk * kGradWChunk * kGradWBlock;
  return products / kProductsPerCycle * (instance.row_chunks == 1 ? kSmallTile : 1.0);
}

/// Sets the number of splits that takes least time, in cycles; returns that time.
double choose_splits(GradWPlan& plan, std::int64_t multiprocessors) {
  constexpr std::int64_t kMaxWaves = 6;
  // Filling the pipeline and storing a tile, fitted to one and two waves of two shapes on an H200; reading
  // one again for the final sum, 128 KiB of 3 TB/s.
  constexpr double kTileCycles = 9000, kReadCycles = 80;
  const std::int64_t fewest = ceil_div(plan.k_blocks, kMaxChain);
  double best = std::numeric_limits<double>::infinity();
  for (std::int64_t wave = 1; wave <= kMaxWaves; ++wave) {
    const std::int64_t wanted = std::max({fewest, wave * multiprocessors / plan.tiles(), std::int64_t{1}});
    const std::int64_t splits = std::min(wanted, plan.k_blocks);
    const auto units = static_cast<double>(splits * plan.tiles());
    const auto waves = static_cast<double>(ceil_div(splits * plan.tiles(), multiprocessors));
    const auto length = static_cast<double>(ceil_div(plan.k_blocks, splits));
    const double cycles = waves * (length * block_cycles(*plan.instance) + kTileCycles) + units * kReadCycles;
    if (cycles >= best) continue;
    best = cycles;
    plan.splits = splits;
  }
  return best;
}

/// The plan of a choice of roles and tile, without splits.
GradWPlan plan_of(const Problem& p, const GradWInstance& instance, bool rows_are_x,
                  const std::array<bool, 3>& moves_x) {
  GradWPlan plan;
  plan.instance = instance;
  plan.rows_are_x = rows_are_x;
  plan.moves_x = moves_x;
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) plan.positions[axis] = moves_x[axis] ? out[axis] : p.in[axis];
  plan.k_blocks = ceil_div(p.n * volume(plan.positions), kGradWBlock);
  plan.row_tiles = ceil_div(grad_w_operand(p, moves_x, rows_are_x).chunks(), instance.row_chunks);
  plan.column_tiles = ceil_div(grad_w_operand(p, moves_x, !rows_are_x).chunks(), instance.column_chunks);
  plan.pack_x =
      p.dtype == DType::kFloat32 || p.x_layout != Layout::kNDHWC || p.c % kChannelUnit != 0 || !p.x_aligned;
  plan.x_pitch = plan.pack_x ? operand_channels(p) : p.c;
  return plan;
}

}  // namespace

std::int64_t GradWOperand::chunks() const {
  return volume(taps) * ceil_div(channels, kGradWChunk);
}

std::int64_t GradWPlan::partial_floats() const {
  const std::int64_t rows = instance->row_chunks * kGradWChunk;
  return saturating_product(splits, tiles(), rows * instance->column_chunks * kGradWChunk);
}

GradWOperand grad_w_operand(const Problem& p, const std::array<bool, 3>& moves_x, bool of_x) {
  GradWOperand operand;
  const Extent3 out = p.out();
  operand.channels = of_x ? p.c : p.k;
  operand.extent = of_x ? p.in : out;
  for (int axis = 0; axis < 3; ++axis) {
    const bool moves = moves_x[axis] == of_x;
    operand.taps[axis] = moves ? p.kernel[axis] : 1;
    operand.step[axis] = moves && !of_x ? p.stride[axis] : 1;
    if (!moves) continue;  // its own positions, one by one
    // Taps of x count backwards: grad_c's position o meets x's o + padding - tap*dilation.
    const std::int64_t reach = (p.kernel[axis] - 1) * p.dilation[axis];
    operand.lower[axis] = of_x ? p.padding[axis] - reach : -p.padding[axis];
    const std::int64_t positions = of_x ? out[axis] : p.in[axis];
    const std::int64_t upper =
        (positions - 1) * operand.step[axis] + operand.lower[axis] - (operand.extent[axis] - 1);
    // The box may end anywhere before the position behind the last.
    operand.upper[axis] = std::min(std::max(upper, kMinCorner), upper + operand.step[axis] - 1);
  }
  return operand;
}

std::vector<GradWPlan> grad_w_candidates(const Problem& p, const Device& device,
                                         const std::vector<GradWInstance>& instances) {
  std::vector<GradWPlan> candidates;
  if (!find_obstacle(p, device).empty()) return candidates;
  const bool split = p.is_ieee();
  const DType wanted = p.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  constexpr int kChoices = 8;  // of moves_x
  for (const GradWInstance& instance : instances) {
    if (!instance.compiled || instance.operand != wanted || instance.products != (split ? 3 : 1)) continue;
    for (int choice = 0; choice < 2 * kChoices; ++choice) {
      const std::array<bool, 3> moves_x = {(choice & 1) != 0, (choice & 2) != 0, (choice & 4) != 0};
      bool possible = true;
      for (int axis = 0; axis < 3; ++axis) possible = possible && can_move(p, axis, moves_x[axis]);
      if (!possible) continue;
      GradWPlan plan = plan_of(p, instance, choice < kChoices, moves_x);
      // Positions of one tensor along one axis and of the other along the next may be more than either has.
      if (saturating_product(p.n, plan.positions[0], plan.positions[1], plan.positions[2]) > kMaxCount)
        continue;
      plan.estimated_cycles = choose_splits(plan, std::max(device.sm_count, 1));
      if (plan.splits * plan.tiles() <= kMaxCount) candidates.push_back(plan);
    }
  }
  return candidates;
}

GradWPlan grad_w_plan(const Problem& p, const Device& device, const std::vector<GradWInstance>& instances) {
  GradWPlan none;
  none.obstacle = find_obstacle(p, device);
  if (!none.obstacle.empty()) return none;
  none.obstacle = "no kernel for its gradient of the weight is part of this build";
  const std::vector<GradWPlan> candidates = grad_w_candidates(p, device, instances);
  const auto best = std::min_element(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.estimated_cycles < b.estimated_cycles;
  });
  return best == candidates.end() ? none : *best;
}

std::string describe(const GradWPlan& plan) {
  if (!plan.obstacle.empty()) return concat("no grad_w kernel: ", plan.obstacle);
  const auto moved = [&](bool x) {
    std::string axes;
    for (int axis = 0; axis < 3; ++axis) {
      if (plan.moves_x[axis] == x) axes += "trs"[axis];
    }
    return axes.empty() ? std::string("no") : axes;
  };
  return concat(plan.instance->name, ", rows ", plan.rows_are_x ? "x" : "grad_c", ", ", moved(true),
                " taps move x, ", moved(false), " grad_c, ", plan.row_tiles, 'x', plan.column_tiles,
                " tiles x ", plan.splits, " splits of ", plan.k_blocks, " k-blocks",
                plan.pack_x ? ", x packed" : "", plan.split_grad_c() ? ", grad_c split" : "");
}

}  // namespace upconv3d
