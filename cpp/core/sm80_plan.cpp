// SPDX-License-Identifier: Apache-2.0
#include "core/sm80_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/extents.hpp"
#include "core/index_math.hpp"
#include "core/pack_stages.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

constexpr int kAmpere = 80;
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kBlockC = 32;  // input channels of a k-block

/// What the tensor cores multiply, in how many products, and the dtype of relu(conv): that of y.
struct Family {
  DType operand;
  int products;
  DType output;
};

/// float16 carries TF32's 10-bit mantissa at twice its rate; float32's accuracy takes the hi/lo split.
Family family_of(const Problem& p) {
  if (p.dtype == DType::kFloat32) {
    return {DType::kFloat16, p.precision == Precision::kIEEE ? 3 : 1, DType::kFloat32};
  }
  return {p.dtype, 1, p.dtype};
}

std::string family_text(const Family& f) {
  return concat(name(f.operand), " x ", f.products, " -> ", name(f.output));
}

/// Whether all that the kernel keeps in 32 bits fits: extents, positions, a sample's vectors of 8 channels,
/// and windows, which may lie outside the volume.
bool fits_32_bits(const Problem& p, const std::vector<Slab>& slabs) {
  const std::int64_t counts[] = {p.n,
                                 operand_channels(p),
                                 p.k,
                                 p.positions(),
                                 saturating_product(volume(p.in), operand_channels(p) / kChannelUnit),
                                 saturating_product(p.k, operand_channels(p) / kChannelUnit),
                                 volume(p.kernel)};
  if (*std::max_element(std::begin(counts), std::end(counts)) > kMaxCount) return false;
  return std::all_of(slabs.begin(), slabs.end(), [&p](const Slab& slab) {
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t reach = saturating_product(slab.taps[axis], slab.dilation[axis]);
      if (std::max({std::abs(slab.window[axis]), reach, p.out()[axis]}) > kMaxCount / 4) return false;
    }
    return true;
  });
}

/// The first rule of the kernel on shape and dtype that the problem breaks, or "".
std::string shape_obstacle(const Problem& p) {
  if (p.dtype == DType::kFloat64) return "float64 has no tensor-core kernel";
  if (p.groups != 1) return concat("groups ", p.groups, " is not 1");
  if (p.k % kChannelUnit != 0) return concat("output channels ", p.k, " are not a multiple of 8");
  const Extent3 out = p.out();
  const std::int64_t phases = saturating_product(std::min(p.stride[0], out[0]), std::min(p.stride[1], out[1]),
                                                 std::min(p.stride[2], out[2]));
  if (phases > kMaxSlabs) {
    return concat("stride ", triple_text(p.stride), " makes ", phases, " phases, more than the ", kMaxSlabs,
                  " of one launch");
  }
  const std::vector<Slab> slabs = border_slabs(p, 0);
  for (const Slab& slab : slabs) {
    const std::int64_t taps = longest(slab.taps);
    if (taps > kMaxSm80Taps) {
      return concat("kernel ", extent_text(p.kernel), " has ", taps, " taps along an axis, more than ",
                    kMaxSm80Taps);
    }
  }
  if (!fits_32_bits(p, slabs)) {
    return "an extent or the values of a sample exceed the kernel's 32-bit coordinates";
  }
  return "";
}

std::int64_t tile_count(const Problem& p, const ConvInstance& instance, const std::vector<Slab>& slabs) {
  return saturating_product(p.n, slab_tiles(slabs, instance.block_positions),
                            ceil_div(p.k, instance.block_channels));
}

/// Estimated cycles of one tile on a multiprocessor of its own.
double tile_cycles(const Problem& p, const ConvInstance& instance, const Slab& slab) {
  // mma.sync's 16-bit multiply-adds per cycle on compute capability 8.0 and 9.0; elsewhere half of that,
  // which scales all variants alike.
  constexpr double kMacsPerCycle = 1024;
  // Warps of 64 x 32 read half as much again from shared memory per product as those of 64 x 64: 0.91 against
  // 0.69 ms for the headline shape.
  constexpr double kSmallTileRate = 0.75;
  // Finding addresses, filling the pipeline, and the epilogue.
  constexpr double kTileCycles = 1500;
  const double rate = instance.block_channels < 128 ? kSmallTileRate : 1.0;
  const double k_blocks = static_cast<double>(slab.tap_count() * ceil_div(operand_channels(p), kBlockC));
  return kTileCycles + k_blocks * instance.block_channels * instance.block_positions *
                           static_cast<double>(kBlockC) * instance.products / (kMacsPerCycle * rate);
}

/// Estimated cycles of the convolution, whose tiles the multiprocessors take as they become free.
double estimated_cycles(const Problem& p, const ConvInstance& instance, const std::vector<Slab>& slabs,
                        int sm_count) {
  const std::int64_t k_tiles = ceil_div(p.k, instance.block_channels);
  double cycles = 0;
  for (const Slab& slab : slabs) {
    const std::int64_t tiles =
        saturating_product(p.n, ceil_div(slab.positions(), instance.block_positions), k_tiles);
    cycles += static_cast<double>(tiles) * tile_cycles(p, instance, slab);
  }
  // The last wave, half full on average; and no card is quicker than one of its tiles.
  return cycles / std::max(sm_count, 1) + tile_cycles(p, instance, slabs.front()) / 2;
}

/// The variant of the problem's family with the least estimated time; the first listed wins a tie.
std::optional<ConvInstance> cheapest_instance(const Problem& p, const Device& device,
                                              const std::vector<ConvInstance>& instances) {
  const Family family = family_of(p);
  const std::vector<Slab> slabs = border_slabs(p, 0);
  std::optional<ConvInstance> best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (const ConvInstance& instance : instances) {
    if (!instance.compiled || instance.arch != kAmpere || instance.operand != family.operand ||
        instance.products != family.products || instance.output != family.output ||
        tile_count(p, instance, slabs) > kMaxCount) {
      continue;
    }
    const double cycles = estimated_cycles(p, instance, slabs, device.sm_count);
    if (cycles < best_cycles) {
      best = instance;
      best_cycles = cycles;
    }
  }
  return best;
}

/// Axes along which cutting borders off saves most; none unless that gains.
int cheapest_cut(const Problem& p, const ConvInstance& instance, int sm_count) {
  // A gain within the estimate's error, or of a convolution that takes less than about 30 us, is not worth
  // the partial tiles of more slabs.
  constexpr double kWorthwhileGain = 0.97;
  constexpr double kWorthwhileCycles = 50e3;
  double best_cycles = estimated_cycles(p, instance, border_slabs(p, 0), sm_count);
  if (best_cycles < kWorthwhileCycles) return 0;
  best_cycles *= kWorthwhileGain;
  int best = 0;
  for (int axes = 1; axes <= 3; ++axes) {
    const std::vector<Slab> slabs = border_slabs(p, axes);
    if (slabs.size() > static_cast<std::size_t>(kMaxSlabs) || tile_count(p, instance, slabs) > kMaxCount) {
      break;
    }
    const double cycles = estimated_cycles(p, instance, slabs, sm_count);
    if (cycles < best_cycles) {
      best = axes;
      best_cycles = cycles;
    }
  }
  return best;
}

}  // namespace

std::string sm80_obstacle(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
                          std::optional<ConvInstance>& instance) {
  if (device.compute_capability < kAmpere) {
    return concat("compute capability ", device.compute_capability / 10, '.', device.compute_capability % 10,
                  " is below 8.0");
  }
  if (!p.tail.is_relu_group_norm()) return "its epilogue has ReLU before a group norm, and nothing else";
  std::string obstacle = shape_obstacle(p);
  if (!obstacle.empty()) return obstacle;
  instance = cheapest_instance(p, device, instances);
  if (!instance) {
    return concat("this build has no SM80 kernel for ", family_text(family_of(p)),
                  " that can count this block's tiles");
  }
  return "";
}

Plan sm80_plan(const Problem& p, const Device& device, const ConvInstance& instance) {
  Plan plan;
  plan.algorithm = Algorithm::kSm80ImplicitGemm;
  plan.reason =
      concat("compute capability ", device.compute_capability / 10, '.', device.compute_capability % 10,
             ", groups 1, output channels in eights: ", family_text(family_of(p)));
  plan.instance = instance;
  plan.conv_layout = Layout::kNDHWC;
  plan.activation = instance.output;
  plan.pack_x = p.x_layout != Layout::kNDHWC || p.dtype == DType::kFloat32 || !p.x_aligned ||
                operand_channels(p) != p.c;
  plan.activation_in_y = p.y_layout == Layout::kNDHWC;
  plan.tile_positions = instance.block_positions;
  plan.split_axes = cheapest_cut(p, instance, device.sm_count);
  plan.tiles = slab_tiles(border_slabs(p, plan.split_axes), plan.tile_positions);
  plan.stages = pack_stages(p);
  plan.stages.insert(plan.stages.end(), {instance.name, "group_norm_finalize", "group_norm_normalize"});
  return plan;
}

}  // namespace upconv3d
