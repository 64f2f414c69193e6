// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/cpu_conv_layout.hpp"
#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/sm80_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// TMA im2col in 3-D: signed 5-bit box corners, 5-bit filter offsets, and channel strides in units of 16
// bytes.
constexpr std::int64_t kIm2colMinCorner = -16;
constexpr std::int64_t kIm2colMaxCorner = 15;
constexpr std::int64_t kIm2colMaxOffset = 30;

/// Whether TMA im2col can describe what the slabs read.
bool within_im2col(const Problem& p, const std::vector<Slab>& slabs) {
  return std::all_of(slabs.begin(), slabs.end(), [&](const Slab& slab) {
    const InputBox box = input_box(p, slab);
    for (int axis = 0; axis < 3; ++axis) {
      if (box.lower[axis] < kIm2colMinCorner || box.upper[axis] < kIm2colMinCorner ||
          box.upper[axis] > kIm2colMaxCorner ||
          (slab.taps[axis] - 1) * slab.dilation[axis] > kIm2colMaxOffset) {
        return false;
      }
    }
    return true;
  });
}

constexpr int kHopper = 90;

/// The variant family that a dtype runs on: what is multiplied, in how many products, and what is stored.
struct Family {
  DType operand;
  int products;
  DType output;
  int stored_bits;  // of relu(conv) until it is normalized
};

/// Whether the SM90 kernel normalizes what it stored. That takes y's rows to be whole 16-byte chunks.
bool normalizes_in_place(const Problem& p) {
  return p.y_layout == Layout::kNDHWC && p.k % kChannelUnit == 0;
}

/// float16 carries TF32's 10-bit mantissa at twice its rate; float32's accuracy takes the hi/lo split.
Family family_of(const Problem& p) {
  if (p.dtype == DType::kBFloat16) return {DType::kBFloat16, 1, DType::kBFloat16, 16};
  if (p.dtype == DType::kFloat16) return {DType::kFloat16, 1, DType::kFloat16, 16};
  if (p.precision == Precision::kIEEE) return {DType::kFloat16, 3, DType::kFloat32, 32};
  // 16 bit with a step per channel and tile, unless the kernel that normalizes y as it lies has to: that one
  // knows no tiles.
  const bool knows_tiles = p.y_layout == Layout::kNCDHW || normalizes_in_place(p);
  return {DType::kFloat16, 1, DType::kFloat32, knows_tiles ? 16 : 32};
}

std::string family_text(const Family& f) {
  return concat(name(f.operand), " x ", f.products, " -> ", name(f.output));
}

/// Share of the tensor cores' products that are wanted: of k-blocks and tiles of 64 channels, the rest is
/// padding.
double channel_share(const Problem& p) {
  constexpr std::int64_t kSmallestTile = 64;
  const auto filled = [](std::int64_t channels, std::int64_t block) {
    return static_cast<double>(channels) / static_cast<double>(ceil_div(channels, block) * block);
  };
  return filled(group_inputs(p), kBlockInputs) * filled(group_outputs(p), kSmallestTile);
}

/// The share from which the SM90 kernel was quicker than cuDNN's convolution and our normalization on an
/// H200, between the shapes on either side that were timed.
double least_channel_share(const Problem& p) {
  // Times of ours over the library plan's, for bfloat16 channels_last_3d, tf32, ieee:
  //   one group,  20 > 100 channels, share 0.24    0.61  0.83  0.45
  //               24 >   3                 0.018   1.5   1.3   3.0
  //               32 >   2, stride 2       0.016   2.3   2.0   3.5
  //   groups of   64 >  64                 1       0.94  0.58  0.13
  //               32 >  32                 0.25    2.0   0.97  0.26
  //               16 >  16                 0.06    3.9   2.0   0.49
  //               64 >  64, stride 2       1       0.03  0.12  0.16
  //               16 >  16, stride 2       0.06    2.2   0.45  0.63
  // In multiples of 8, channels of one group have not been compared and always run here.
  if (p.groups == 1) return std::min(p.c, p.k) < kChannelUnit ? 1.0 / 32 : 0.0;
  if (p.dtype != DType::kFloat32) return 3.0 / 8;
  return p.precision == Precision::kIEEE || p.stride != Extent3{1, 1, 1} ? 1.0 / 32 : 1.0 / 4;
}

/// The first rule of the SM90 kernel on shape and dtype that the problem breaks, or "".
std::string sm90_shape_obstacle(const Problem& p) {
  if (p.dtype == DType::kFloat64) return "float64 has no tensor-core kernel";
  if (p.groups != 1 && group_outputs(p) % kChannelUnit != 0) {
    return concat("groups ", p.groups, " leave ", group_outputs(p),
                  " output channels each, not a multiple of 8");
  }
  if (channel_share(p) < least_channel_share(p)) {
    return concat("channels fill ", 100 * channel_share(p), "% of the tiles, and cuDNN is quicker below ",
                  100 * least_channel_share(p), "%");
  }
  const Extent3 out = p.out();
  const std::int64_t largest = std::max({p.n, p.c, p.k, p.in[0], p.in[1], p.in[2], out[0], out[1], out[2]});
  if (largest > kMaxSm90Count || p.positions() > kMaxSm90Count || volume(p.in) > kMaxSm90Count) {
    return concat("an extent or the positions of a sample exceed the kernel's 32-bit coordinates");
  }
  constexpr std::int64_t kMaxPadded = std::int64_t{1} << 59;  // elements: as validate allows without padding
  if (saturating_product(p.n, p.groups) > kMaxSm90Count ||
      saturating_product(p.groups, operand_channels(p)) > kMaxSm90Count ||
      saturating_product(p.n, p.groups, operand_channels(p), volume(p.in)) > kMaxPadded ||
      saturating_product(p.k, operand_channels(p), volume(p.kernel)) > kMaxPadded ||
      saturating_product(p.n, padded_channels(p.k), p.positions()) > kMaxPadded) {
    return "groups, or tensors whose channels are padded to multiples of 8, exceed the kernel's counters";
  }
  const std::int64_t phases = saturating_product(std::min(p.stride[0], out[0]), std::min(p.stride[1], out[1]),
                                                 std::min(p.stride[2], out[2]));
  if (phases > kMaxSlabs) {
    return concat("stride ", triple_text(p.stride), " makes ", phases, " phases, more than the ", kMaxSlabs,
                  " of one launch");
  }
  if (!within_im2col(p, border_slabs(p, 0))) {
    return concat(
        "kernel ", extent_text(p.kernel), " with stride ", triple_text(p.stride), ", padding ",
        triple_text(p.padding), " and dilation ", triple_text(p.dilation),
        " is beyond TMA's im2col limits (windows reach at most 16 beyond the volume, taps at most 30 "
        "inputs apart)");
  }
  if (saturating_product(p.n, p.num_groups) > kMaxSm90Count) {
    return concat("samples x norm groups, ", p.n, " x ", p.num_groups,
                  ", exceed the kernel's 32-bit counters");
  }
  return "";
}

std::int64_t tile_count(const Problem& p, const ConvInstance& instance) {
  return saturating_product(p.n, ceil_div(p.positions(), instance.block_positions),
                            channel_tiles(p, instance.block_channels));
}

/// Estimated cycles of one of a slab's tiles: the slower of the tensor cores and shared memory.
double tile_cycles(const Problem& p, const ConvInstance& instance, const Slab& slab, bool share_taps) {
  constexpr double kBlockK = kBlockInputs;
  constexpr double kMacsPerCycle = 2048;  // 16-bit tensor-core multiply-adds of one SM
  // Shared-memory bandwidth of one SM: 128 bytes per cycle, of which 0.92 were seen with one product, 128 x
  // 256.
  constexpr double kSharedBytesPerCycle = 118;
  // Filling the pipeline, and handing the accumulators over.
  constexpr double kTileCycles = 1500;
  const double bc = instance.block_channels;
  const double bp = instance.block_positions;
  const double copies = instance.products == 1 ? 1 : 2;  // hi, or hi and lo
  const double k_blocks = static_cast<double>(slab.tap_count() * ceil_div(group_inputs(p), kBlockInputs));
  const double multiply = k_blocks * bc * bp * kBlockK * instance.products / kMacsPerCycle;
  // TMA writes a k-block once, or x once for all taps that share it; each of the two warpgroups reads its 64
  // channels and its positions per product.
  const double row_bytes = kBlockK * 2;
  double x_rows = bp;
  if (share_taps && shares_x_loads(p, slab)) {
    const double taps = static_cast<double>(slab.taps[1]);
    x_rows = (bp + (taps - 1) * static_cast<double>(slab.extent[2])) / taps;
  }
  const double written = (bc + x_rows) * row_bytes * copies;
  const double read =
      2 * (64 + static_cast<double>(moment_positions(instance))) * row_bytes * instance.products;
  // The epilogue stages a tile: written once, read to be stored and to take its moments.
  const double staged = 3 * bc * bp * instance.stored_bits / 8;
  return kTileCycles + std::max(multiply, (k_blocks * (written + read) + staged) / kSharedBytesPerCycle);
}

/// Estimated cycles of the convolution: those of block 0, which takes the first and costliest tile of every
/// wave.
double estimated_cycles(const Problem& p, const ConvInstance& instance, const std::vector<Slab>& slabs,
                        bool share_taps, int sm_count) {
  const std::int64_t blocks = std::max(sm_count, 1);
  const std::int64_t k_tiles = channel_tiles(p, instance.block_channels);
  double cycles = 0;
  std::int64_t begin = 0;
  for (const Slab& slab : slabs) {
    const std::int64_t tiles =
        saturating_product(p.n, ceil_div(slab.positions(), instance.block_positions), k_tiles);
    if (tiles > kMaxSm90Tiles - begin) return std::numeric_limits<double>::infinity();
    const std::int64_t waves =
        ceil_div(begin + tiles, blocks) - ceil_div(begin, blocks);  // that begin in this slab
    cycles += static_cast<double>(waves) * tile_cycles(p, instance, slab, share_taps);
    begin += tiles;
  }
  return cycles;
}

/// How the output is cut into slabs.
struct Cut {
  int split_axes = 0;
  bool share_taps = false;
};

/// The cut with the least estimated time; one slab unless that gains.
Cut cheapest_cut(const Problem& p, const ConvInstance& instance, int sm_count) {
  // Descriptors of many slabs cost host time and launch parameters: a gain within the estimate's error, or a
  // convolution that takes less than about 30 us, is not worth them.
  constexpr double kWorthwhileGain = 0.97;
  constexpr double kWorthwhileCycles = 50e3;
  Cut best;
  double best_cycles = estimated_cycles(p, instance, border_slabs(p, 0), false, sm_count);
  if (best_cycles < kWorthwhileCycles) return best;
  best_cycles *= kWorthwhileGain;
  const auto consider = [&](const Cut& cut, const std::vector<Slab>& slabs, double worthwhile_gain) {
    if (slabs.size() == 1 || slabs.size() > static_cast<std::size_t>(kMaxSlabs)) return;
    if (!within_im2col(p, slabs)) return;
    const double cycles = estimated_cycles(p, instance, slabs, cut.share_taps, sm_count);
    if (cycles < best_cycles * worthwhile_gain) {
      best = cut;
      best_cycles = cycles;
    }
  };
  for (int axes = 1; axes <= 3; ++axes) consider({axes, false}, border_slabs(p, axes), 1.0);
  // With three products, two loads of that many rows leave no room for w. With tiles of 128 x 256, which the
  // estimate sees 2 to 4 % ahead, sharing was 2 % quicker or slower by turns; smaller ones, which wait for
  // shared memory, gained 10 %.
  constexpr Extent3 kOnes = {1, 1, 1};
  const double sharing_gain = instance.block_channels * instance.block_positions >= 128 * 256 ? 0.95 : 1.0;
  if (p.stride == kOnes && p.dilation == kOnes && instance.products == 1) {
    consider({0, true}, tap_sharing_slabs(p), sharing_gain);
  }
  return best;
}

/// The compiled variant of the problem's family with the least estimated time; the first listed wins a tie.
std::optional<ConvInstance> cheapest_instance(const Problem& p, const Device& device,
                                              const std::vector<ConvInstance>& instances) {
  const Family family = family_of(p);
  std::optional<ConvInstance> best;
  const std::vector<Slab> whole = border_slabs(p, 0);
  double best_cycles = std::numeric_limits<double>::infinity();
  for (const ConvInstance& instance : instances) {
    if (!instance.compiled || instance.arch != kHopper || instance.operand != family.operand ||
        instance.products != family.products || instance.output != family.output ||
        instance.stored_bits != family.stored_bits || tile_count(p, instance) > kMaxSm90Tiles) {
      continue;
    }
    const double cycles = estimated_cycles(p, instance, whole, false, device.sm_count);
    if (cycles < best_cycles) {
      best = instance;
      best_cycles = cycles;
    }
  }
  return best;
}

/// Why the SM90 kernel cannot run, or "" with `instance` set.
std::string sm90_obstacle(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
                          std::optional<ConvInstance>& instance) {
  if (device.compute_capability != kHopper) {
    return concat("compute capability ", device.compute_capability / 10, '.', device.compute_capability % 10,
                  " is not 9.0");
  }
  std::string obstacle = sm90_shape_obstacle(p);
  if (!obstacle.empty()) return obstacle;
  instance = cheapest_instance(p, device, instances);
  if (!instance)
    return concat("this build has no kernel for ", family_text(family_of(p)),
                  " on arch 90a that can count this block's tiles");
  return "";
}

/// How the SM90 plan pads channels and keeps convolution groups apart, "" where nothing of the kind is done.
std::string channels_text(const Problem& p) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  const std::int64_t inputs = group_inputs(p), padded = operand_channels(p);
  if (p.groups != 1) {
    add(concat(p.groups, " groups of ", inputs, " input and ", group_outputs(p),
               " output channels, in tiles of their own"));
  }
  if (padded != inputs) {
    add(concat(p.groups == 1 ? "input" : "each group's input", " channels padded from ", inputs, " to ",
               padded));
  }
  if (padded_channels(p.k) != p.k) {
    add(concat("output channels stored beside y, padded from ", p.k, " to ", padded_channels(p.k)));
  }
  return text;
}

/// Position tiles of a window of the launch order, 0 for slab by slab. Phases read the same x; slab by slab,
/// a large sample's x has left L2 when the next phase comes.
std::int64_t window_tiles(const Problem& p, const std::vector<Slab>& slabs, const ConvInstance& instance) {
  constexpr std::int64_t kTiles = 16;  // 8 and 32 were as quick
  std::int64_t longest = 0;
  for (const Slab& slab : slabs)
    longest = std::max(longest, ceil_div(slab.positions(), instance.block_positions));
  const std::int64_t windows = longest / kTiles;
  if (slabs.size() == 1 || windows < 2) return 0;
  // Places of the order that hold no tile are passed over, but they are counted.
  const std::int64_t window = ceil_div(longest, windows);
  const std::int64_t places = saturating_product(p.n, static_cast<std::int64_t>(slabs.size()),
                                                 window * windows, channel_tiles(p, instance.block_channels));
  return places <= kMaxSm90Count ? window : 0;
}

Plan sm90_plan(const Problem& p, const Device& device, const ConvInstance& instance) {
  Plan plan;
  plan.algorithm = Algorithm::kSm90ImplicitGemm;
  plan.reason = concat("Hopper: ", family_text(family_of(p)));
  plan.instance = instance;
  plan.conv_layout = Layout::kNDHWC;
  plan.activation = instance.output;
  plan.pack_x =
      p.x_layout != Layout::kNDHWC || p.dtype == DType::kFloat32 || !p.x_aligned || !has_operand_channels(p);
  plan.activation_in_y = normalizes_in_place(p);
  plan.channels = channels_text(p);
  plan.tile_positions = moment_positions(instance);
  const Cut cut = cheapest_cut(p, instance, device.sm_count);
  plan.split_axes = cut.split_axes;
  plan.share_taps = cut.share_taps;
  const std::vector<Slab> slabs = plan_slabs(p, cut.split_axes, cut.share_taps);
  if (cut.split_axes == 0 && p.stride != Extent3{1, 1, 1}) {
    plan.window_tiles = window_tiles(p, slabs, instance);
  }
  plan.tiles = slab_tiles(slabs, plan.tile_positions);
  if (p.dtype == DType::kFloat32) {
    plan.stages = {"pack_weight", "pack_input", "repack"};
  } else {
    plan.stages = {"pack_operands"};
  }
  plan.stages.push_back(instance.name);
  if (!plan.activation_in_y) plan.stages.push_back("group_norm_normalize");
  return plan;
}

Plan cuda_library_plan(const Problem& p, const std::string& reason) {
  Plan plan;
  plan.algorithm = Algorithm::kCudaLibrary;
  plan.reason = reason;
  plan.conv_layout = p.y_layout;  // what cuDNN keeps
  plan.activation = p.dtype;
  plan.activation_in_y = true;
  plan.stages = {"aten::convolution", "relu_moments", "group_norm_finalize", "group_norm_normalize"};
  return plan;
}

Plan cpu_library_plan(const Problem& p, const Device& device) {
  Plan plan;
  plan.algorithm = Algorithm::kCpuLibrary;
  plan.conv_layout = cpu_conv_layout(p, device.max_threads);
  plan.reason =
      concat("input is on the CPU; PyTorch's convolution is expected quicker in ", name(plan.conv_layout),
             " on ", device.max_threads, device.max_threads == 1 ? " thread" : " threads");
  plan.activation = p.dtype;
  plan.activation_in_y = plan.conv_layout == p.y_layout;
  plan.stages = {"aten::convolution", "relu_group_norm"};
  return plan;
}

/// Whether the SM80 kernel is expected quicker than PyTorch's convolution with our kernels after it. Not on
/// Hopper, where cuDNN has wgmma and this kernel has not.
bool prefers_sm80(const Device& device) {
  return device.compute_capability != kHopper;
}

void require_known(const std::string& forced_plan) {
  constexpr const char* kKnown[] = {"", "sm80", "sm90", "library"};
  if (std::find(std::begin(kKnown), std::end(kKnown), forced_plan) != std::end(kKnown)) return;
  throw ValueViolation(concat("upconv3d: UPCONV3D_PLAN must name a plan for CUDA devices; got \"",
                              forced_plan, "\". Set it to sm80, sm90 or library, or unset it."));
}

/// Refuses a forced plan that cannot run.
void require_no_obstacle(const Problem& problem, const std::string& forced_plan,
                         const std::string& obstacle) {
  if (obstacle.empty()) return;
  throw RuleViolation(
      concat("upconv3d: the plan that UPCONV3D_PLAN names must be able to run the block; got ", forced_plan,
             ", but ", obstacle, ", for ", describe(problem),
             ". Unset UPCONV3D_PLAN, or set it to library, which runs every block."));
}

}  // namespace

Plan select_plan(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances) {
  validate(problem);
  if (!device.is_cuda) return cpu_library_plan(problem, device);
  const std::string& forced = device.forced_plan;
  require_known(forced);
  std::optional<ConvInstance> instance;
  std::string reason = forced.empty() ? "" : "UPCONV3D_PLAN=" + forced;
  if (forced.empty() || forced == "sm90") {
    const std::string obstacle = sm90_obstacle(problem, device, instances, instance);
    if (!forced.empty()) require_no_obstacle(problem, forced, obstacle);
    if (instance) return sm90_plan(problem, device, *instance);
    reason = concat("not the SM90 kernel: ", obstacle);
  }
  if (forced == "sm80" || (forced.empty() && prefers_sm80(device))) {
    const std::string obstacle = sm80_obstacle(problem, device, instances, instance);
    if (!forced.empty()) require_no_obstacle(problem, forced, obstacle);
    if (instance) return sm80_plan(problem, device, *instance);
    reason += concat("; not the SM80 kernel: ", obstacle);
  }
  return cuda_library_plan(problem, reason);
}

}  // namespace upconv3d
