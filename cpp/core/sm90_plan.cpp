// SPDX-License-Identifier: Apache-2.0
#include "core/sm90_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/border_slabs.hpp"
#include "core/channel_share.hpp"
#include "core/channels.hpp"
#include "core/half_blocks.hpp"
#include "core/im2col_limits.hpp"
#include "core/index_math.hpp"
#include "core/leaving_blocks.hpp"
#include "core/pack_stages.hpp"
#include "core/phase_pairs.hpp"
#include "core/plan_times.hpp"
#include "core/slab_launches.hpp"
#include "core/sm90_compared.hpp"
#include "core/sm90_schedule.hpp"
#include "core/text.hpp"
#include "core/tile_order.hpp"
#include "core/traffic.hpp"
#include "core/twice_layout.hpp"

namespace upconv3d {
namespace {

/// The variant family that a dtype runs on: what is multiplied, in how many products, and what is stored.
struct Family {
  DType operand;
  int products;
  DType output;
  int stored_bits;  // of before(conv) until it is normalized
};

/// Whether the SM90 kernel normalizes what it stored. That takes y's rows to be whole 16-byte chunks.
bool normalizes_in_place(const Problem& p) {
  return p.y_layout == Layout::kNDHWC && p.k % kChannelUnit == 0;
}

/// Whether the SM90 kernel, or the pass after it, is to leave before(conv) in the dtype of y.
bool wants_whole_values(const Problem& p) {
  return p.operation == Operation::kConv || !p.tail.norm || p.tail.returns_conv;
}

/// What follows the convolution that the SM90 kernels do not do, or "".
std::string tail_obstacle(const Problem& p, bool trains) {
  const Tail& tail = p.tail;
  if (tail.has_skip) return "a skip is added to the convolution";
  if (!tail.norm) return tail.returns_conv ? "the convolution is wanted beside what follows it" : "";
  const Activation before = tail.before();
  const bool whole_rows = p.y_layout == Layout::kNCDHW || p.k % kChannelUnit == 0;
  if (tail.returns_conv && (before != Activation::kNone || !whole_rows)) {
    return concat("the convolution is wanted too, where ",
                  whole_rows ? name(before) : "rows that are no multiple of 16 bytes",
                  whole_rows ? " of it is stored" : " are stored");
  }
  // ReLU's result tells what it let through.
  if (trains && !is_floor(before)) {
    return concat("a backward pass follows, which needs the convolution before ", name(before));
  }
  return "";
}

/// float16 carries TF32's 10-bit mantissa at twice its rate; float32's accuracy takes the hi/lo split.
Family family_of(const Problem& p) {
  if (p.dtype == DType::kBFloat16) return {DType::kBFloat16, 1, DType::kBFloat16, 16};
  if (p.dtype == DType::kFloat16) return {DType::kFloat16, 1, DType::kFloat16, 16};
  if (p.precision == Precision::kIEEE) return {DType::kFloat16, 3, DType::kFloat32, 32};
  if (wants_whole_values(p)) return {DType::kFloat16, 1, DType::kFloat32, 32};
  // 16 bit with a step per channel and tile, unless the kernel that normalizes y as it lies has to: that one
  // knows no tiles.
  const bool knows_tiles = p.y_layout == Layout::kNCDHW || normalizes_in_place(p);
  return {DType::kFloat16, 1, DType::kFloat32, knows_tiles ? 16 : 32};
}

std::string family_text(const Family& f) {
  return concat(name(f.operand), " x ", f.products, " -> ", name(f.output));
}

/// The first rule of the SM90 kernel on shape and dtype that the problem breaks, or "".
std::string sm90_shape_obstacle(const Problem& p) {
  if (p.dtype == DType::kFloat64) return "float64 has no tensor-core kernel";
  if (p.groups != 1 && group_outputs(p) % kChannelUnit != 0) {
    return concat("groups ", p.groups, " leave ", group_outputs(p),
                  " output channels each, not a multiple of 8");
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
  if (p.operation == Operation::kConvTranspose && phases > kMaxPhases) {
    return concat("stride ", triple_text(p.stride), " makes ", phases, " phases, more than the ", kMaxPhases,
                  " that it takes");
  }
  if (!within_im2col(p, border_slabs(p, 0))) {
    return concat(
        "kernel ", extent_text(p.kernel), " with stride ", triple_text(p.stride), ", padding ",
        triple_text(p.padding), " and dilation ", triple_text(p.dilation),
        " is beyond TMA's im2col limits (windows reach at most 16 beyond the volume, taps at most 30 "
        "inputs apart, a plain convolution's stride at most 8)");
  }
  if (saturating_product(p.n, p.num_groups) > kMaxSm90Count) {
    return concat("samples x norm groups, ", p.n, " x ", p.num_groups,
                  ", exceed the kernel's 32-bit counters");
  }
  return "";
}

/// Whether this kernel of half k-blocks, which all input channels fit into, is considered. That of a result
/// in float32 is there for grad_x of few outputs: what it takes of a transposed convolution was not compared
/// with cuDNN's.
bool considers_half_blocks(const Problem& p, const ConvInstance& instance) {
  const bool is_compared = p.operation == Operation::kConv || instance.stored_bits == 16;
  return is_compared && fits_half_block(p);
}

/// The compiled variant of the problem's family by which the plan is compared with others, that with the
/// least estimated time; the first listed wins a tie.
std::optional<ConvInstance> compared_instance(const Problem& p, const Device& device,
                                              const std::vector<ConvInstance>& instances) {
  const Family family = family_of(p);
  std::optional<ConvInstance> best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (const ConvInstance& instance : instances) {
    if (!instance.compiled || instance.arch != kHopper || instance.twice || instance.held ||
        (instance.block_inputs != kBlockInputs && !considers_half_blocks(p, instance)) ||
        instance.operand != family.operand || instance.products != family.products ||
        instance.output != family.output || instance.stored_bits != family.stored_bits ||
        tile_count(p, instance) > kMaxSm90Tiles) {
      continue;
    }
    const double cycles = compared_cycles(p, instance, device.sm_count);
    if (cycles < best_cycles) {
      best = instance;
      best_cycles = cycles;
    }
  }
  return best;
}

/// How the SM90 plan pads channels and keeps convolution groups apart, "" where nothing of the kind is done.
std::string channels_text(const Problem& p, bool packs, bool stored_in_place) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  const std::int64_t inputs = group_inputs(p), padded = operand_channels(p);
  if (p.groups != 1) {
    add(concat(p.groups, " groups of ", inputs, " input and ", group_outputs(p),
               " output channels, in tiles of their own"));
  }
  if (packs && padded != inputs) {
    add(concat(p.groups == 1 ? "input" : "each group's input", " channels padded from ", inputs, " to ",
               padded));
  }
  if (!stored_in_place && padded_channels(p.k) != p.k) {
    add(concat("output channels stored beside y, padded from ", p.k, " to ", padded_channels(p.k)));
  }
  return text;
}

// An H200's copy bandwidth; an H100's, which differs, favours computing twice.
constexpr double kBytesPerMs = 4.2e9;

/// Estimated time of a stored plan whose multiplication takes that long: x is read and before(conv) written
/// beside it; then, where there is a normalization, before(conv) is read and y written.
double estimated_stored_ms(const Problem& p, const ConvInstance& instance, double multiply) {
  const double positions = static_cast<double>(p.positions());
  const double x = tensor_ms(p, p.c, static_cast<double>(volume(p.in)), size_of(instance.operand));
  const double stored = tensor_ms(p, p.k, positions, instance.stored_bits / 8);
  if (!p.tail.norm) return std::max(multiply, x + stored);
  return std::max(multiply, x + stored) + stored + tensor_ms(p, p.k, positions, size_of(p.dtype));
}

/// Estimated time of a normalization that is a kernel of its own.
double normalize_ms(const Problem& p, const ConvInstance& instance) {
  const double positions = static_cast<double>(p.positions());
  return tensor_ms(p, p.k, positions, instance.stored_bits / 8) +
         tensor_ms(p, p.k, positions, size_of(p.dtype));
}

/// Estimated time of the convolution computed twice: the same multiplication with nothing to write, then with
/// y, of whose bandwidth a quarter was seen not to hide, all of it where y is float32; between the two,
/// blocks wait for each other. Without a norm the second alone, without its activation. x in NCDHW is read
/// and packed before, as it is for a stored plan.
double estimated_twice_ms(const Problem& p, const TwiceLayout& layout, int sm_count) {
  constexpr double kWaitMs = 0.006;
  const double unhidden = p.dtype == DType::kFloat32 ? 1.0 : 0.25;
  const std::int64_t block_inputs = twice_block_inputs(p), c_blocks = ceil_div(p.c, block_inputs);
  // Two results of the special function unit per value, 64 x 256 values by 16 lanes, of each warpgroup.
  constexpr double kExponentialCycles = 2048;
  double longest = 0, exponentials = 0;
  for (const TwiceClass& from : layout.classes) {
    const bool staged = p.y_layout == Layout::kNDHWC;
    const double tile = static_cast<double>(twice_tile_cycles(from, c_blocks, block_inputs, staged));
    const std::int64_t sets = static_cast<std::int64_t>(from.sets.size());
    const double tiles = static_cast<double>(p.n * sets * ceil_div(from.window.positions(), kTwicePositions));
    if (p.tail.norm && !is_piecewise_linear(p.tail.after()))
      exponentials += tiles * kExponentialCycles * (from.units[1].count == 0 ? 1 : 2);
    longest = std::max(longest, tile);
  }
  const double cycles = static_cast<double>(p.n) * twice_cycles(p, layout);
  const double pass = (cycles / std::max(sm_count, 1) + longest) / kCyclesPerMs;
  const double x = tensor_ms(p, p.c, static_cast<double>(volume(p.in)), size_of(DType::kFloat16));
  const double y = tensor_ms(p, p.k, static_cast<double>(p.positions()), size_of(p.dtype));
  // Of NCDHW, rows that are no whole 16 bytes: with 10 values of 2 or 4 the block took 5 times y longer.
  const bool in_pieces = p.y_layout == Layout::kNCDHW && p.out()[2] * size_of(p.dtype) % 16 != 0;
  const double again = pass + exponentials / std::max(sm_count, 1) / kCyclesPerMs;
  const double written = std::max(again + unhidden * y, x + y) + (in_pieces ? 5 * y : 0);
  return p.tail.norm ? std::max(pass, x) + written + kWaitMs : written;
}

/// Of a few weights, with the wait for it.
constexpr double kPackingLaunchMs = 0.005;

/// Whether the kernel that stores before(conv) is to read w as it lies. Rows that begin amid a sector, TMA
/// brings so slowly that packing them pays, but of short multiplications and of many weights (perf/NOTES.md,
/// "Rows of w that begin amid a sector, and few output channels").
bool is_quicker_from_w_in_place(const Problem& p, double multiply_ms, bool packs_x) {
  if (!reads_w_in_place(p)) return false;
  if (p.k % kSectorChannels == 0) return true;
  // What the multiplication takes longer, of itself, by output channels: 16 sizes of up to 128.
  constexpr std::int64_t kFewOutputs = 8, kHalfOutputs = 48;
  constexpr double kOfFew = 0.7, kOfHalf = 0.3, kOfOthers = 0.1;
  constexpr double kPackedPerMB = 0.001;  // ms, of w
  const double longer = p.k <= kFewOutputs ? kOfFew : p.k <= kHalfOutputs ? kOfHalf : kOfOthers;
  return longer * multiply_ms < (packs_x ? 0 : kPackingLaunchMs) + kPackedPerMB * Traffic(p).w;
}

/// Why the convolution cannot be computed twice, or "" with `instance` and `layout` set.
std::string twice_obstacle(const Problem& p, const std::vector<ConvInstance>& instances,
                           std::optional<ConvInstance>& instance, TwiceLayout& layout) {
  if (p.k % kChannelUnit != 0) return concat("output channels, ", p.k, ", are no multiple of ", kChannelUnit);
  if (p.tail.returns_conv) return "the convolution is to be stored";
  if (p.tail.norm && !is_floor(p.tail.before()))
    return concat(name(p.tail.before()), " comes before the normalization");
  if (p.groups != 1) return concat("groups ", p.groups, " is not 1");
  const Family family = family_of(p);
  if (family.products != 1) return "float32's accuracy takes three products, which that kernel lacks";
  const auto found = std::find_if(instances.begin(), instances.end(), [&](const ConvInstance& candidate) {
    return candidate.compiled && candidate.twice && candidate.operand == family.operand &&
           candidate.output == family.output && candidate.block_inputs == twice_block_inputs(p);
  });
  if (found == instances.end()) return concat("this build has no such kernel for ", family_text(family));
  layout = twice_layout(p);
  if (!stacks_phases(p, layout)) {
    return concat(
        "y is NCDHW, which that kernel writes where the width's stride is 2 and its extent even, not ",
        p.stride[2], " and ", p.out()[2]);
  }
  if (layout.classes.empty()) {
    return "the weights of a phase do not fit into a block's shared memory, or all phases not into a launch";
  }
  std::vector<Slab> windows;
  std::int64_t tiles = 0;
  for (const TwiceClass& from : layout.classes) {
    windows.push_back(from.window);
    if (!from.reached) windows.back().taps = {};
    tiles += saturating_product(p.n, static_cast<std::int64_t>(from.sets.size()),
                                ceil_div(from.window.positions(), kTwicePositions));
  }
  if (!within_im2col(p, windows)) return "phases taken together are beyond TMA's im2col limits";
  if (p.tail.norm) {
    const std::int64_t moments = twice_moments(layout), floats = twice_table_floats(p, moments);
    tiles = std::max({tiles, floats, twice_merging(p, moments).partials});
  }
  if (tiles > kMaxSm90Count) return "its tiles, groups or their partial moments exceed 32-bit counters";
  instance = *found;
  return "";
}

/// Whether the kernel that computes twice is expected to be quicker than `stored`, which has its estimate.
/// \param packing in ms, that `stored` does without; negative where it takes it, and twice does not
bool twice_is_quicker(const Problem& p, const TwiceLayout& layout, const Plan& stored, double packing) {
  // Of more phases than a launch stores, and few tiles per set of weights: 1, 256 > 320, 8^3, k4 s4 took
  // 280 us and stored 59 (2, 512 > 192, 3x6x6: 65, 62). Once, with four of them, 34 and 58 (1, 256 > 256,
  // 16x16x4).
  constexpr std::int64_t kFewTiles = 4, kFewOnce = 2;
  std::int64_t tiles_of_set = 0;
  for (const TwiceClass& from : layout.classes)
    tiles_of_set = std::max(tiles_of_set, p.n * ceil_div(from.window.positions(), kTwicePositions));
  if (stored.launches > 1 && tiles_of_set <= (p.tail.norm ? kFewTiles : kFewOnce)) return false;
  Plan twice = stored;
  twice.twice = true;
  return sm90_plan_us(p, twice) + 1e3 * packing < sm90_plan_us(p, stored);
}

}  // namespace

double seen_of_stored(const ConvInstance& stored) {
  if (stored.block_inputs != kBlockInputs) return 1.0;
  return stored.stored_bits < 8 * size_of(stored.output) ? 1.4 : stored.block_channels == 64 ? 0.75 : 1.0;
}

double tensor_ms(const Problem& p, std::int64_t channels, double positions, std::int64_t bytes) {
  return static_cast<double>(p.n * channels * bytes) * positions / kBytesPerMs;
}

std::string sm90_obstacle(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
                          bool trains, std::optional<ConvInstance>& instance) {
  if (device.compute_capability != kHopper) {
    return concat("compute capability ", device.compute_capability / 10, '.', device.compute_capability % 10,
                  " is not 9.0");
  }
  for (const std::string& obstacle : {tail_obstacle(p, trains), sm90_shape_obstacle(p)}) {
    if (!obstacle.empty()) return obstacle;
  }
  // Who asks for the plan gets it, to compare.
  const double least = least_channel_share(p, trains);
  const bool is_compared_later = !trains && has_times(p);
  if (device.forced_plan.empty() && !is_compared_later && channel_share(p) < least) {
    return concat("channels fill ", 100 * channel_share(p), "% of the tiles, and cuDNN is quicker below ",
                  100 * least, "%");
  }
  instance = compared_instance(p, device, instances);
  if (!instance)
    return concat("this build has no kernel for ", family_text(family_of(p)),
                  " on arch 90a that can count this block's tiles");
  return "";
}

Plan sm90_plan(const Problem& p, const Device& device, const ConvInstance& compared,
               const std::vector<ConvInstance>& instances) {
  const Schedule schedule = cheapest_schedule(p, compared, instances, device.sm_count);
  const ConvInstance& instance = schedule.instance;
  Plan plan;
  plan.algorithm = Algorithm::kSm90ImplicitGemm;
  plan.reason = concat("Hopper: ", family_text(family_of(p)));
  plan.instance = instance;
  plan.conv_layout = Layout::kNDHWC;
  plan.activation = instance.output;
  plan.pack_x =
      p.x_layout != Layout::kNDHWC || p.dtype == DType::kFloat32 || !p.x_aligned || !has_operand_channels(p);
  plan.linear = !p.tail.norm;
  plan.launches = slab_launches(p);
  // Functions with exponentials are too much for the few warps that normalize beside the multiplication, and
  // none of several launches has the moments of all phases.
  plan.normalizes =
      p.tail.norm && normalizes_in_place(p) && is_piecewise_linear(p.tail.after()) && plan.launches == 1;
  plan.activation_in_y = plan.normalizes && !p.tail.returns_conv;
  plan.tile_positions = moment_positions(instance);
  const Cut cut = schedule.cut;
  if (plan.linear) {
    plan.activation_in_y = stores_in_place(p, cut);
    if (plan.activation_in_y) plan.conv_layout = p.y_layout;
  }
  plan.split_axes = cut.split_axes;
  plan.share_taps = cut.share_taps;
  plan.pair_phases = cut.pair_phases;
  const std::vector<Slab> slabs = plan_slabs(p, cut);
  const bool has_phases = p.stride != Extent3{1, 1, 1};
  if (cut.split_axes == 0 && has_phases)
    plan.window_tiles = window_tiles(p, cut.pair_phases ? reads_of_pairs(pair_phases(p)) : slabs, instance);
  if (!plan.linear && !plan.normalizes && plan.launches == 1 && !p.tail.returns_conv) {
    plan.leaving_blocks = leaving_blocks(
        compared_multiply_ms(p, schedule, device.sm_count), normalize_ms(p, instance), stores_steps(plan),
        tile_count(p, instance) / (cut.pair_phases ? 2 : 1), p.n, device.sm_count);
  }
  plan.tiles = slab_tiles(slabs, plan.tile_positions);
  plan.scheduled_multiply_ms = schedule.multiply_ms;
  plan.compared_instance = compared;
  plan.estimated_stored_ms =
      estimated_stored_ms(p, compared, compared_multiply_ms(p, compared, device.sm_count));
  plan.w_in_place = is_quicker_from_w_in_place(p, schedule.multiply_ms, plan.pack_x);
  const bool packs = plan.pack_x || !plan.w_in_place;
  plan.channels = channels_text(p, packs, plan.activation_in_y);
  if (packs) plan.stages = pack_stages(p);
  plan.stages.insert(plan.stages.end(), static_cast<std::size_t>(plan.launches), instance.name);
  if (p.tail.norm && plan.launches > 1) plan.stages.push_back("group_norm_finalize_slabs");
  if (p.tail.norm && p.tail.returns_conv && p.y_layout != plan.conv_layout)
    plan.stages.push_back("unpack_rows");
  if (plan.linear) {
    if (!plan.activation_in_y) plan.stages.push_back("unpack_rows");
  } else if (!plan.normalizes) {
    plan.stages.push_back("group_norm_normalize");
  }
  return plan;
}

std::string consider_twice(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
                           Plan& plan) {
  std::optional<ConvInstance> instance;
  TwiceLayout layout;
  const std::string obstacle = twice_obstacle(p, instances, instance, layout);
  if (!instance) return obstacle;
  plan.estimated_twice_ms = estimated_twice_ms(p, layout, device.sm_count);
  const bool w_in_place =
      p.y_layout == Layout::kNDHWC && reads_w_in_place(p) && twice_reads_w_in_place(layout);
  // One that either plan does without, where the other does not.
  const int launches = plan.pack_x ? 0 : static_cast<int>(!w_in_place) - static_cast<int>(!plan.w_in_place);
  const double packing = launches * kPackingLaunchMs;
  const bool quicker = twice_is_quicker(p, layout, plan, packing);
  if (device.forced_plan == "stored" || (device.forced_plan != "twice" && !quicker)) return "";
  plan.twice = true;
  plan.instance = instance;
  plan.tile_positions = kTwicePositions;
  plan.window_tiles = plan.split_axes = 0;
  plan.leaving_blocks = 0;
  plan.launches = 1;
  plan.share_taps = plan.pair_phases = false;
  plan.w_in_place = w_in_place;
  plan.piles_views = layout.pile > 1;
  plan.tiles = twice_moments(layout);
  // This kernel's own registers hold what it normalizes, so any activation may follow.
  plan.normalizes = p.tail.norm;
  plan.activation_in_y = true;
  plan.conv_layout = p.y_layout;
  const bool packs = plan.pack_x || !plan.w_in_place;
  plan.channels = channels_text(p, packs, true);
  plan.stages.clear();
  if (packs) plan.stages = pack_stages(p);
  plan.stages.push_back(instance->name);
  return "";
}

}  // namespace upconv3d
