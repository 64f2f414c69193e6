// SPDX-License-Identifier: Apache-2.0
#include "core/direct_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>

#include "core/channel_share.hpp"
#include "core/channels.hpp"
#include "core/direct_limits.hpp"
#include "core/direct_tiling.hpp"
#include "core/extents.hpp"
#include "core/few_channels_layout.hpp"
#include "core/group_times.hpp"
#include "core/index_math.hpp"
#include "core/library_plan.hpp"
#include "core/sm90_compared.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

/// What follows the convolution that is not in these kernels, or "".
std::string tail_obstacle(const Tail& tail) {
  if (tail.has_skip) return "a skip is added to the convolution";
  if (tail.returns_conv) return "the convolution is wanted beside what follows it";
  return "";
}

// Times in us of an H200 with L2 cold, fitted to 20 blocks of one to three dtypes and orders
// (perf/NOTES.md, "Few inputs per output").

constexpr double kMillion = 1e6, kPerMs = 1e3;

/// The work of a convolution.
struct Work {
  double outputs;   // millions of values
  double products;  // per value, those with an input
  explicit Work(const Problem& p) {
    outputs = static_cast<double>(p.n * p.k) * static_cast<double>(p.positions()) / kMillion;
    products = p.n == 0 ? 0.0 : p.useful_flops() / 2 / kMillion / outputs;
  }
};

/// conv_transpose_depthwise, both passes.
double depthwise_us(const Problem& p, const Work& work) {
  constexpr double kPerValue = 0.8;
  const double per_product = p.kernel[0] == 3 ? 0.13 : 0.16;
  return work.outputs * (kPerValue + per_product * work.products);
}

/// conv_transpose_any_taps, both passes. Each input that a thread loads serves the channels that it computes.
double any_taps_us(const Problem& p, const DirectTiling& tiling, const Work& work) {
  constexpr double kPerValue = 1.5, kSlow = 20;
  const bool in_rows = p.x_layout == Layout::kNDHWC;
  double per_product = 4;
  if (tiling.vector == 8) per_product = in_rows && group_inputs(p) <= 4 ? 0.4 : 0.55;
  if (tiling.vector == 4) per_product = 1;
  // Neighbours' inputs lie as far apart as an input has channels.
  if (tiling.vector == 2) per_product = in_rows ? 4 : 1.6;
  return kSlow + work.outputs * (kPerValue + per_product * work.products);
}

/// What one thread alone takes for a pass: no card is quicker than that, however few outputs there are.
double serial_us(const Problem& p, const DirectTiling& tiling, const Work& work) {
  constexpr double kCyclesPerUs = 1700, kCyclesPerProduct = 120;
  const double cells = static_cast<double>(std::min(tiling.tile[1], tiling.cells[1]));
  // All phases of a cell, side by side.
  if (tiling.depthwise) return cells * (200 + 2 * static_cast<double>(volume(p.kernel))) / kCyclesPerUs;
  return cells * volume_of_any(p.stride) * work.products * kCyclesPerProduct / kCyclesPerUs;
}

double direct_us(const Problem& p, const DirectTiling& tiling) {
  constexpr double kLaunches = 20, kLaunch = 8;
  const double x = tensor_ms(p, p.c, static_cast<double>(volume(p.in)), size_of(p.dtype)) * kPerMs;
  const double y = tensor_ms(p, p.k, static_cast<double>(p.positions()), size_of(p.dtype)) * kPerMs;
  const Work work(p);
  const double both = tiling.depthwise ? depthwise_us(p, work) : any_taps_us(p, tiling, work);
  const double compute = std::max(both / 2, serial_us(p, tiling, work));
  if (!p.tail.norm) return kLaunch + std::max(compute, x + y);
  return kLaunches + std::max(compute, x) + std::max(compute, x + y);
}

/// cuDNN's convolution, benchmarked.
/// \param per_position us per million positions at least, without groups
double library_convolution_us(const Problem& p, const Work& work, double per_position) {
  const bool half_width = size_of(p.dtype) == 2;
  if (p.groups > 1 && group_inputs(p) > 1) return work.outputs * (half_width ? 8 : 34);
  if (p.groups > 1) {
    if (p.stride == Extent3{1, 1, 1}) return work.outputs * 1.2 * work.products;
    return work.outputs * (half_width ? 15 + 1.5 * work.products : 10 + 7 * work.products);
  }
  const double positions = work.outputs / static_cast<double>(p.k);  // millions
  const double per_gflop = half_width ? 1.6 : p.precision == Precision::kTF32 ? 3.5 : 20;
  constexpr double kTile = 64;
  return per_position * positions * std::max(1.0, static_cast<double>(p.k) / kTile) +
         per_gflop * p.useful_flops() * 1e-9;
}

/// What cuDNN's convolution of few channels takes beyond library_convolution_us, which was fitted to 27/8
/// taps per output: of blocks of 27 to 125 taps. Not of others than conv_transpose_few_channels_sm80 was
/// compared with.
double library_taps_us(const Problem& p) {
  constexpr double kPerTap = 10, kFitted = 27.0 / 8, kMost = 125;  // us per million positions
  const double taps = static_cast<double>(volume(p.kernel)) / volume_of_any(p.stride);
  const double positions = static_cast<double>(p.n * p.positions()) / kMillion;
  return kPerTap * std::max(0.0, std::min(taps, kMost) - kFitted) * positions;
}

/// What cuDNN takes at least for a million positions, where conv_transpose_few_channels_sm80 is compared with
/// it. At float32's accuracy it took 121, with what library_us adds, of the one block in NCDHW that was timed
/// with fewer than eight output channels, 240 to 400 of three in NDHWC, and of one output 85 to 120.
double library_us_of_few_channels(const Problem& p) {
  constexpr std::int64_t kFewOutputs = 8;
  constexpr double kOfOneOutput = 85, kOfFewOutputs = 100, kOfFewInRows = 240;
  if (p.dtype == DType::kFloat32 && p.k == 1) return kOfOneOutput;
  if (!p.is_ieee() || p.k >= kFewOutputs) return library_us_per_million_positions(p);
  return p.x_layout == Layout::kNDHWC ? kOfFewInRows : kOfFewOutputs;
}

/// What channels that are no multiple of 8 cost cuDNN beside that, at least: 150 to 400 us per million
/// positions of six blocks of 3 to 20 outputs.
double library_ragged_us(const Problem& p) {
  constexpr double kPerMillion = 150;
  const bool is_whole = p.c % kChannelUnit == 0 && p.k % kChannelUnit == 0;
  if (is_whole || p.is_ieee()) return 0;
  return kPerMillion * static_cast<double>(p.n * p.positions()) / kMillion;
}

/// cuDNN's convolution and our passes after it.
/// \param few_channels as conv_transpose_few_channels_sm80 is compared with it
double library_us(const Problem& p, bool few_channels) {
  constexpr double kConvolution = 12, kPasses = 10;
  const double per_position =
      few_channels ? library_us_of_few_channels(p) : library_us_per_million_positions(p);
  double convolution = library_convolution_us(p, Work(p), per_position);
  if (few_channels) {
    convolution += library_taps_us(p) + library_ragged_us(p);
  }
  const double y = tensor_ms(p, p.k, static_cast<double>(p.positions()), size_of(p.dtype)) * kPerMs;
  return kConvolution + kPasses + convolution + (p.tail.norm ? 3 : 2) * y;
}

/// What the kernels on CUDA cores took of their estimate, of groups of four inputs and more: 1.4 to 3 in the
/// median, by the number of outputs.
constexpr double kCoresOfGroups = 2;

/// Whether the estimates were compared with such convolutions: of 4 inputs and fewer per tap the direct
/// kernels were quicker, of 16 and 32 slower by far.
bool has_few_inputs(const Problem& p) {
  constexpr std::int64_t kMostInputs = 4;
  return group_inputs(p) <= kMostInputs;
}

/// Whether conv_transpose_few_channels_sm80 is as exact as float32 there, and TF32 quick enough for its three
/// products: elsewhere (8.6, 8.9, 12.0) TF32's rate is float32's or twice that, by the cards' data sheets.
bool suits_ieee(const Problem& p, const Device& device) {
  const int capability = device.compute_capability;
  const bool is_quick = capability == 80 || capability / 10 == 9 || capability / 10 == 10;
  return is_quick && hides_tf32_words(p);
}

/// Whether conv_transpose_few_channels_sm80 was compared with others on blocks of such channels at float32's
/// accuracy.
bool has_compared_channels_of_ieee(const Problem& p, const Device& device) {
  const std::int64_t inputs = group_inputs(p), outputs = group_outputs(p);
  // Of many inputs, less than two tiles of eight outputs, and stride 1, took 1.4 to 1.8 of their estimate.
  constexpr std::int64_t kInputs = 128, kOutputs = 64, kFewInputs = 32, kTwoTiles = 16, kSomeInputs = 64;
  const bool strided = p.stride != Extent3{1, 1, 1};
  const std::int64_t most = !strided ? kFewInputs : outputs >= kTwoTiles ? kInputs : kSomeInputs;
  return suits_ieee(p, device) && inputs <= most && outputs <= kOutputs;
}

/// Whether the estimates of the direct plan's kernel were compared with such convolutions.
bool was_compared(const Problem& p, const Device& device, const Plan& direct) {
  if (has_group_times(p)) return !direct.few_channels || !p.is_ieee() || suits_ieee(p, device);
  if (!direct.few_channels) return has_few_inputs(p);
  constexpr std::int64_t kInputs = 64, kFewInputs = 16, kTaps = 7, kStride = 4;
  const std::int64_t inputs = group_inputs(p), outputs = inputs < kFewInputs ? 64 : 32;
  // Of groups of fewer inputs, CUDA cores were compared.
  constexpr std::int64_t kLeastOfGroup = 4;
  if (p.groups > 1 && inputs < kLeastOfGroup) return false;
  const bool few = p.is_ieee() ? has_compared_channels_of_ieee(p, device)
                               : has_many_outputs_of_few_inputs(p, device) ||
                                     (inputs <= kInputs && group_outputs(p) <= outputs);
  return few && longest(p.kernel) <= kTaps && longest(p.stride) <= kStride;
}

/// Why the kernels on CUDA cores cannot run, or "".
std::string cuda_cores_obstacle(const Problem& p, const Device& device) {
  if (p.dtype == DType::kFloat64) return "float64 is not computed in float32";
  const std::string tail = tail_obstacle(p.tail);
  if (!tail.empty()) return tail;
  if (!fits_32_bits(p)) {
    return "an extent or the values of a sample exceed the direct kernel's 32-bit coordinates";
  }
  constexpr std::int64_t kMaxStride = 64;
  if (longest(p.stride) > kMaxStride) {
    return concat("stride ", triple_text(p.stride), " exceeds the direct kernel's ", kMaxStride);
  }
  // Weights of one thread's channels at least, beside the moments' exchange. Half a multiprocessor's.
  constexpr std::int64_t kMaxShared = 113 * 1024;
  const std::int64_t available = std::min(kMaxShared, shared_bytes_per_block(device.compute_capability));
  const DirectTiling tiling = direct_tiling(p);
  const std::int64_t taken = saturating_sum(tiling.shared_bytes, direct_moment_bytes(tiling));
  if (taken > available) {
    return concat(
        "the weights of ", tiling.lanes_c * tiling.vector, " output channels and their moments take ", taken,
        " bytes of shared memory, of which the direct kernel has ", available, " on compute capability ",
        device.compute_capability / 10, '.', device.compute_capability % 10);
  }
  if (saturating_product(p.n, tiling.tile_count(), tiling.channel_blocks) > kMaxCount) {
    return "tiles exceed the direct kernel's 32-bit counters";
  }
  return "";
}

/// The plan of the kernels on CUDA cores.
Plan cuda_cores_plan(const Problem& p) {
  const DirectTiling tiling = direct_tiling(p);
  Plan plan;
  plan.estimated_direct_ms = direct_us(p, tiling) / kPerMs;
  plan.reason = "few inputs per output";
  const char* kernel = tiling.depthwise ? "conv_transpose_depthwise" : "conv_transpose_any_taps";
  if (p.tail.norm) {
    plan.tile_positions = direct_tile_positions(p, tiling);
    plan.tiles = tiling.tile_count();
    plan.stages = {kernel, "group_norm_finalize"};
  }
  plan.stages.emplace_back(kernel);
  return plan;
}

/// The plan of conv_transpose_few_channels_sm80.
Plan few_channels_plan(const Problem& p, const FewChannelsLayout& layout) {
  constexpr const char* kKernel = "conv_transpose_few_channels_sm80";
  Plan plan;
  plan.few_channels = true;
  plan.estimated_direct_ms = few_channels_ms(p, layout);
  plan.reason = "few channels";
  plan.tile_positions = volume(layout.tile) * volume(p.stride);
  plan.tiles = layout.tile_count();
  plan.stages = {kKernel, "group_norm_finalize", kKernel};
  return plan;
}

/// What the SM90 plan took beside that, in ms, of fewer input channels than half a k-block has, in 16 bit, so
/// that the rest of each is zeros: 4 to 44 us of five blocks of 16 and 24 with a stride and bfloat16 in
/// place, 20 to 30 in NCDHW; of fewer than half of those in TF32, 60 of two blocks of 8.
double of_padding(const Problem& p, bool in_place) {
  const std::int64_t filled = kBlockInputs / (size_of(p.dtype) == 2 ? 2 : 4);
  constexpr double kInPlace = 0.010, kPacked = 0.025;
  const bool strided = p.stride != Extent3{1, 1, 1};
  if (group_inputs(p) >= filled || p.is_ieee() || !strided || p.kernel == p.stride) return 0;
  return in_place ? kInPlace : kPacked;
}

/// The SM90 plan, packing and all, of blocks of few channels, in ms (perf/NOTES.md, "Few channels by either
/// plan" and "What the limits of plans cost").
/// \param in_place whether neither x is packed, but for its channels, nor y transposed
double narrow_sm90_ms(const Problem& p, const Plan& sm90, bool in_place) {
  // What it took of its estimate, and beside it for packing and for transposed stores. Stored with a stride,
  // less of it; at float32's accuracy all of it.
  constexpr double kSeen = 1.13, kPacking = 0.025, kSeenOfStored = 0.9, kPackingOfStored = 0.017;
  // In place, of long strides computed twice, and dilated; and of channels that y must not have.
  constexpr double kUnusual = 0.018, kPadded = 0.010;
  constexpr std::int64_t kLongStride = 3;
  const double estimate = compared_ms(sm90) * dilated_share(p, sm90), padding = of_padding(p, in_place);
  const bool stored = p.stride != Extent3{1, 1, 1} && !sm90.twice;
  if (in_place) {
    const bool is_long = longest(p.stride) >= kLongStride && sm90.twice;
    const bool unusual = is_long || is_dilated(p);
    return estimate + (unusual ? kUnusual : 0) + (group_outputs(p) % kChannelUnit != 0 ? kPadded : 0) +
           padding;
  }
  if (stored && p.is_ieee()) return estimate + kPacking;
  if (stored) return kSeenOfStored * estimate + kPackingOfStored + padding;
  return kSeen * estimate + kPacking + padding;
}

/// What the SM90 plan with half k-blocks takes of what beats_sm90 expects of whole ones: the same for kernel
/// = stride and for stored blocks, less for others that are computed twice, most where operands are packed
/// (perf/NOTES.md, "Few channels by either plan", has the times behind it).
double less_for_half_blocks(const Problem& p, const Plan& sm90, bool in_place) {
  if (!sm90.instance || sm90.instance->block_inputs == kBlockInputs) return 1.0;
  if (p.kernel == p.stride || !sm90.twice) return 1.0;
  // Of half a half k-block and less, 1.0 to 1.3 of it was seen where operands are packed.
  constexpr std::int64_t kFullEnough = kBlockInputs / 4;
  return in_place ? 0.95 : group_inputs(p) < kFullEnough ? 1.0 : 0.8;
}

/// What the kernel for few channels takes of its estimate where many inputs become few outputs, and many of
/// them: 0.88 to 1.78, mostly 1.1 to 1.5, of one output up to 1.74 (perf/NOTES.md, "Large inputs of few
/// outputs"); of large pointwise blocks 1.42 to 1.9.
double direct_at_length(const Problem& p) {
  constexpr std::int64_t kInputs = 32, kOutputs = 4, kBytes = 16'000'000;
  constexpr double kFew = 1.3, kOne = 1.6, kPointwise = 1.45;
  const bool is_large = p.n * p.k * p.positions() * size_of(p.dtype) > kBytes;
  if (is_large && volume(p.kernel) == 1 && !p.is_ieee()) return kPointwise;
  if (p.c < kInputs || p.k > kOutputs || !is_large) return 1;
  return p.k == 1 ? kOne : kFew;
}

}  // namespace

bool has_many_outputs_of_few_inputs(const Problem& p, const Device& device) {
  constexpr std::int64_t kMostOutputs = 512;
  return device.compute_capability == kHopper && p.groups == 1 && !p.is_ieee() && p.tail.norm &&
         p.stride == Extent3{1, 1, 1} && volume(p.kernel) > 1 && has_few_inputs(p) && p.k > kFewOutputs &&
         p.k <= kMostOutputs;
}

std::string direct_obstacle(const Problem& p, const Device& device) {
  FewChannelsLayout layout;
  const std::string obstacle = cuda_cores_obstacle(p, device);
  return obstacle.empty() || few_channels_obstacle(p, device, layout).empty() ? "" : obstacle;
}

Plan direct_plan(const Problem& p, const Device& device) {
  std::optional<Plan> plan;
  if (cuda_cores_obstacle(p, device).empty()) plan = cuda_cores_plan(p);
  FewChannelsLayout layout;
  if (few_channels_obstacle(p, device, layout).empty()) {
    const Plan few = few_channels_plan(p, layout);
    // Asked for by name, groups are on CUDA cores where this kernel was not compared with others.
    const bool asked = !device.forced_plan.empty() && p.groups == 1;
    const bool eligible = asked || was_compared(p, device, few);
    const double ahead = has_group_times(p) ? kCoresOfGroups : 1;
    if (!plan || (eligible && few.estimated_direct_ms < ahead * plan->estimated_direct_ms)) plan = few;
  }
  if (!plan) throw std::logic_error("upconv3d: the direct plan has an obstacle, and was asked for");
  plan->algorithm = Algorithm::kCudaDirect;
  plan->reason = device.forced_plan.empty() ? concat(plan->reason, ": the direct kernel is expected to take ",
                                                     plan->estimated_direct_ms, " ms")
                                            : "UPCONV3D_PLAN=" + device.forced_plan;
  plan->conv_layout = p.y_layout;
  plan->activation = DType::kFloat32;
  return *plan;
}

bool beats_library(const Problem& p, const Device& device, const Plan& direct) {
  return p.n > 0 && was_compared(p, device, direct) &&
         direct.estimated_direct_ms < library_us(p, direct.few_channels) / kPerMs;
}

double least_library_us(const Problem& p) {
  const double least = library_us(p, true);
  // By any kernel, of up to 4 outputs and at least 16 inputs: seven blocks in NCDHW took 0.9 to 1.25 of this.
  constexpr std::int64_t kOutputs = 4, kInputs = 16;
  constexpr double kLaunches = 20, kPerPosition = 300, kPerTap = 18, kMostTaps = 27;
  if (p.groups > 1 || p.k > kOutputs || p.c < kInputs || p.dtype != DType::kFloat32) return least;
  const double taps = static_cast<double>(volume(p.kernel)) / volume_of_any(p.stride);
  const double positions = static_cast<double>(p.n * p.positions()) / kMillion;
  return std::max(least, kLaunches + (kPerPosition + kPerTap * std::min(taps, kMostTaps)) * positions);
}

double direct_us(const Problem& p, const Device& device, const Plan& direct) {
  if (p.n == 0 || !was_compared(p, device, direct)) return std::numeric_limits<double>::infinity();
  // By how much the kernels on CUDA cores are to be ahead.
  constexpr double kAhead = 1.25;
  const double us = kPerMs * direct.estimated_direct_ms;
  if (has_group_times(p)) return (direct.few_channels ? 1 : kCoresOfGroups) * us;
  return direct.few_channels || p.is_ieee() ? direct_at_length(p) * us : kAhead * us;
}

bool beats_sm90(const Problem& p, const Device& device, const Plan& direct, const Plan& sm90) {
  if (p.n == 0 || !was_compared(p, device, direct)) return false;
  if (direct.few_channels) {
    const LibraryAdvantage library = library_advantage(p, device, sm90);
    const double expected_us = direct.estimated_direct_ms * kPerMs;
    if (!library.reason.empty() && expected_us >= library.us) return false;
    // Of many outputs at stride 1 it took 0.75 to 1.15 of its estimate, the SM90 plan 0.8 to 1.4.
    constexpr double kOfManyOutputs = 1.15;
    if (has_many_outputs_of_few_inputs(p, device)) return expected_us < kOfManyOutputs * sm90_us(p, sm90);
    const bool in_place = p.dtype != DType::kFloat32 && p.y_layout == Layout::kNDHWC;
    return direct.estimated_direct_ms <
           less_for_half_blocks(p, sm90, in_place) * narrow_sm90_ms(p, sm90, in_place);
  }
  // That, in ms, and by how much this one is to be ahead.
  constexpr double kBeside = 0.025, kAhead = 1.25;
  const double ours = compared_ms(sm90) * dilated_share(p, sm90) + kBeside;
  return kAhead * direct.estimated_direct_ms < ours;
}

}  // namespace upconv3d
