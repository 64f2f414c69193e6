// SPDX-License-Identifier: Apache-2.0
#include "core/plan_times.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <variant>

#include "core/channel_share.hpp"
#include "core/channels.hpp"
#include "core/col2im_plan.hpp"
#include "core/copy_tiles.hpp"
#include "core/extents.hpp"
#include "core/group_times.hpp"
#include "core/held_norm.hpp"
#include "core/idle_taps.hpp"
#include "core/index_math.hpp"
#include "core/library_plan.hpp"
#include "core/sm90_compared.hpp"
#include "core/sm90_plan.hpp"
#include "core/traffic.hpp"

namespace upconv3d {
namespace {

constexpr double kMega = 1e-6;

bool is_float(const Problem& p) {
  return p.dtype == DType::kFloat32;
}

/// A cost that dtype and order decide.
struct Cost {
  double half_ndhwc, half_ncdhw, float_ndhwc, float_ncdhw;

  double of(const Problem& p) const {
    if (is_float(p)) return in_rows(p) ? float_ndhwc : float_ncdhw;
    return in_rows(p) ? half_ndhwc : half_ncdhw;
  }
};

/// Megabytes, and millions of positions of y.
struct Work : Traffic {
  double positions;

  explicit Work(const Problem& p) : Traffic(p), positions(kMega * static_cast<double>(p.n * p.positions())) {}
};

template <class Predicate>
bool any_axis(const Predicate& holds) {
  return holds(0) || holds(1) || holds(2);
}

bool is_pointwise_unstrided(const Problem& p) {
  return volume(p.kernel) == 1 && p.stride == Extent3{1, 1, 1};
}

/// Whether several taps of a stride reach an output.
bool has_overlapping_taps(const Problem& p) {
  return any_axis([&p](std::size_t axis) { return p.stride[axis] > 1 && p.kernel[axis] > p.stride[axis]; });
}

/// Whether several taps of a stride reach some outputs, and fewer others.
bool has_uneven_phases(const Problem& p) {
  return any_axis([&p](std::size_t axis) {
    return p.kernel[axis] > p.stride[axis] && p.kernel[axis] % p.stride[axis] != 0;
  });
}

/// Work of the special function unit per value, SiLU's as 0.9; 0 of what needs none. ELU's was not timed with
/// the others.
double exponentials(Activation activation) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return 0;
    case Activation::kSilu:
      return 0.9;
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return 1.5;
    case Activation::kElu:
      return 2.0;
  }
  return 0;
}

/// What exponentials take of a kernel whose code for them comes from memory, and that takes `per_mb` of y.
double exponentials_us(const Problem& p, const Work& mb, double code, double per_mb) {
  const double share = exponentials(p.tail.activation);
  return share == 0 ? 0 : code + share * per_mb * mb.y;
}

/// The kernel that stores the convolution, then what normalizes it.
double stored_us(const Problem& p, const Plan& sm90) {
  const Work mb(p);
  constexpr Cost kLaunches = {25, 30, 42, 42}, kLaunchesOfLinear = {11, 17, 24, 26};
  constexpr Cost kResult = {0.38, 0.51, 0.38, 0.51}, kResultOfLinear = {0.1, 0.45, 0.1, 0.45};
  // In rows, of the last sample, behind which nothing is multiplied while it is normalized.
  constexpr Cost kLastResult = {0.39, 0, 0.25, 0};
  // MB from which on not all of that was seen: in 16 bit neither that nor all of kResult, of 19 blocks of 61
  // to 208 MB, in float32 about half, of 6 of 57 to 537 MB in pairs of phases.
  constexpr double kLargeResult = 32, kLessOfLarge = 0.45, kLessOfLargeFloat = 0.13;
  constexpr double kSchedule = 0.93, kHalfBlocks = 0.36;  // of what sm90_schedule.hpp says
  constexpr double kLaunch = 11, kPacked = 0.66, kPackedFloat = 0.47, kWeight = 0.21;
  constexpr double kRagged = 3;  // y's channels are stored elsewhere first
  constexpr double kCode = 6.1, kExponential = 0.18;
  constexpr double kOneChannel = 1.07;  // of norm groups, in 16 bit: each channel has moments of its own
  // A convolution that is returned is written beside the result, from rows into planes by a launch of its
  // own. Not timed: two passes at memory's speed.
  constexpr Cost kReturned = {0.35, 0.7, 0.35, 0.7};
  constexpr double kUnpacked = 4;
  const bool is_linear = !p.tail.norm;
  const double last = mb.y / static_cast<double>(std::max<std::int64_t>(p.n, 1));
  const double normalized_last =
      kLastResult.of(p) * last -
      (in_rows(p) ? (is_float(p) ? kLessOfLargeFloat : kLessOfLarge) * std::max(0.0, last - kLargeResult)
                  : 0);
  const double returned = p.tail.returns_conv ? kReturned.of(p) * mb.y + (in_rows(p) ? 0 : kUnpacked) : 0;
  const bool is_instance = !is_linear && !is_float(p) && p.num_groups == p.k;
  const bool halves = sm90.instance && sm90.instance->block_inputs != kBlockInputs;
  const double schedule = kSchedule + (halves ? kHalfBlocks : 0);
  const double us = (is_linear ? kLaunchesOfLinear : kLaunches).of(p) + kLaunch * (sm90.launches - 1) +
                    1e3 * schedule * sm90.scheduled_multiply_ms * dilated_share(p, sm90) +
                    (sm90.pack_x ? (is_float(p) ? kPackedFloat : kPacked) * mb.x : 0) + kWeight * mb.w +
                    (is_linear ? kResultOfLinear : kResult).of(p) * mb.y + (is_linear ? 0 : normalized_last) +
                    (p.k % kChannelUnit != 0 ? kRagged : 0) + exponentials_us(p, mb, kCode, kExponential);
  return (is_instance ? kOneChannel : 1) * us + returned;
}

/// The kernel that computes twice, or, where nothing is normalized, once.
double twice_us(const Problem& p, const Plan& sm90) {
  const Work mb(p);
  constexpr Cost kLaunches = {18, 22, 36, 38}, kLaunchesOfLinear = {12, 17, 23, 29};
  constexpr Cost kEstimate = {0.94, 0.92, 0.78, 0.65};
  constexpr Cost kInput = {0.14, 0.58, 0.55, 0.41}, kResult = {0, 0.13, 0, 0.13};
  constexpr double kWeight = 1.4, kOverlapping = 5.5;
  // Beyond the estimate, where taps overlap and more than one k-block of inputs is multiplied.
  constexpr std::int64_t kFewInputs = 64;
  constexpr Cost kOfOverlapping = {0.4, 0.15, 0.22, 0.15};
  constexpr double kOfOverlappingFew = 0.05;
  constexpr double kCode = 8.4, kExponential = 0.28;  // of those after a norm, its estimate knows
  const bool overlaps = has_overlapping_taps(p);
  const double longer = p.c > kFewInputs ? kOfOverlapping.of(p) : kOfOverlappingFew;
  const double estimate = kEstimate.of(p) + (overlaps ? longer : 0);
  return (p.tail.norm ? kLaunches : kLaunchesOfLinear).of(p) + 1e3 * estimate * sm90.estimated_twice_ms +
         kInput.of(p) * mb.x + kWeight * mb.w + kResult.of(p) * mb.y + (overlaps ? kOverlapping : 0) +
         exponentials_us(p, mb, kCode, p.tail.norm ? 0 : kExponential);
}

/// How long the tensor cores take for cuDNN's convolution, by the tile that is quickest: all phases of a
/// stride side by side, each a product of its own taps.
///
/// \param sm_count multiprocessors: 132 where this was fitted; a context may be granted fewer
double cudnn_multiply_us(const Problem& p, int sm_count) {
  struct Tile {
    std::int64_t positions, outputs;
  };
  constexpr Tile kTiles[] = {{64, 32},  {128, 32}, {64, 64},   {128, 64},
                             {256, 64}, {64, 128}, {128, 128}, {256, 128}};
  const double at_once = std::max(sm_count, 1);            // blocks
  constexpr std::int64_t kInputs = 64, kFloatInputs = 32;  // of a k-block, which may be half empty
  constexpr double kPerOutput = 2e-5, kPerRow = 1.6e-3;    // of a tile, us per k-block
  constexpr double kTile = 1.4, kTileOfFloat = 2.6;        // us of a tile beside those
  constexpr std::int64_t kManyTaps = 3;  // along an axis; of more, other kernels, that take longer
  constexpr double kOfManyTaps = 1.3, kDilated = 1.4, kUneven = 1.1, kLeastTaps = 0.25;
  // Long sums of few tiles, at stride 1, are as quick as if two blocks took half of a tile's sum each, and a
  // launch added them up: 62 blocks.
  constexpr std::int64_t kSplitProducts = 4608, kSplitOutputs = 64;
  constexpr double kSplitShare = 0.75;  // of the blocks: more tiles gain nothing by it
  constexpr double kAdded = 2, kAddedPerMB = 0.3;
  const std::int64_t half_block = (is_float(p) ? kFloatInputs : kInputs) / 2;
  const double blocks = static_cast<double>(ceil_div(p.c, half_block)) / 2;
  const Extent3 out = p.out();
  std::int64_t all_phases = 1, most_taps = 1;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::int64_t of_axis = std::min(p.stride[axis], out[axis]);
    all_phases *= of_axis;
    most_taps *= ceil_div(p.kernel[axis], of_axis);
  }
  const double phases = static_cast<double>(all_phases);
  const double taps = std::max(static_cast<double>(volume(p.kernel)) / phases, kLeastTaps);
  const bool many_taps = longest(p.kernel) > kManyTaps;
  const double slower =
      (many_taps ? kOfManyTaps : 1) * (is_dilated(p) ? kDilated : 1) * (has_uneven_phases(p) ? kUneven : 1);
  const double of_phase = static_cast<double>(p.n * p.positions()) / phases;
  const double fixed = is_float(p) ? kTileOfFloat : kTile;
  const bool splits = p.stride == Extent3{1, 1, 1} && !many_taps && p.k >= kSplitOutputs &&
                      p.c * volume(p.kernel) >= kSplitProducts;
  const double added =
      kAdded + kAddedPerMB * kMega * static_cast<double>(p.n * p.positions() * p.k) * sizeof(float);
  double least = std::numeric_limits<double>::infinity();
  for (const Tile& tile : kTiles) {
    const double tiles = phases * std::ceil(of_phase / static_cast<double>(tile.positions)) *
                         static_cast<double>(ceil_div(p.k, tile.outputs));
    const double full = std::max(1.0, tiles / at_once);
    const double waves = (full + std::ceil(full)) / 2;  // half of what the last leaves idle was seen
    const double k_block = slower * std::max(kPerRow * static_cast<double>(tile.positions + tile.outputs),
                                             kPerOutput * static_cast<double>(tile.positions * tile.outputs));
    const double alone = static_cast<double>(most_taps) * blocks * k_block + fixed;
    least = std::min(least, std::max(waves * (taps * blocks * k_block + fixed), alone));
    if (splits && tiles <= kSplitShare * at_once) {
      const double halves = std::max(1.0, 2 * tiles / at_once);
      least =
          std::min(least, (halves + std::ceil(halves)) / 2 * (taps * blocks * k_block / 2 + fixed) + added);
    }
  }
  return least;
}

/// What cuDNN takes longer for channels that are no multiple of 8: of 340 times on the H200 and an H100,
/// within 10 to 15 % of most. Of fewer than 8 inputs and stride 1, four blocks.
double ragged_share(const Problem& p) {
  constexpr double kHalfInputs = 1.6, kHalfOutputs = 1.45, kHalfOutputsOfPlanes = 1.1, kOfManyTaps = 1.15;
  constexpr double kFloat = 1.1, kFloatOfManyTaps = 1.4, kFewInputs = 2.2, kFewInputsOfFloat = 1.8;
  constexpr std::int64_t kTaps = 27;
  const bool inputs = p.c % kChannelUnit != 0;
  if (!inputs && p.k % kChannelUnit == 0) return 1;
  if (p.c < kChannelUnit && p.stride == Extent3{1, 1, 1}) return is_float(p) ? kFewInputsOfFloat : kFewInputs;
  const bool many_taps = volume(p.kernel) > kTaps;
  if (is_float(p)) return many_taps ? kFloatOfManyTaps : kFloat;
  return (inputs       ? kHalfInputs
          : in_rows(p) ? kHalfOutputs
                       : kHalfOutputsOfPlanes) *
         (many_taps ? kOfManyTaps : 1);
}

/// cuDNN's pointwise convolution, a matrix product as it lies.
double cudnn_pointwise_us(const Problem& p, const Work& mb) {
  constexpr double kLaunch = 4.2, kPlanes = 2, kPerMB = 0.32, kPerMBOfPlanes = 0.24;
  constexpr double kPerGFlop = 2.9, kPerGFlopOfFloat = 6.6;
  // Of planes of which every second begins amid 4 bytes: of four blocks, within 10 %.
  constexpr double kPerMBOfOdd = 0.72, kPerGFlopOfOdd = 7.6;
  constexpr std::int64_t kTile = 64, kFloatInputs = 32;
  const std::int64_t half_block = (is_float(p) ? kFloatInputs : kTile) / 2;
  const double products =
      static_cast<double>(ceil_div(p.c, half_block) * half_block * ceil_div(p.k, kTile) * kTile);
  const double gflops = 2e-3 * mb.positions * products;
  const bool is_odd = !in_rows(p) && !is_float(p) && volume(p.in) % 2 != 0;
  const double per_mb = is_odd ? kPerMBOfOdd : in_rows(p) ? kPerMB : kPerMBOfPlanes;
  const double per_gflop = is_odd ? kPerGFlopOfOdd : is_float(p) ? kPerGFlopOfFloat : kPerGFlop;
  return ragged_share(p) *
         (kLaunch + (in_rows(p) ? 0 : kPlanes) + std::max(per_mb * (mb.x + mb.y), per_gflop * gflops));
}

/// Of strides of 3 and more, whose zeros cuDNN multiplies, beside what the products take: a power law of 68
/// times that are within 40 % of it (standard deviation). Another plan was quicker than any of them.
double cudnn_long_stride_us(const Problem& p, const Work& mb) {
  const double n = mb.positions, k = static_cast<double>(p.k), c = static_cast<double>(p.c);
  constexpr double kLaunch = 15;
  if (is_float(p)) return kLaunch + 15 * std::pow(n, 0.77) * std::pow(k, 0.68) * std::pow(c, 0.28);
  return kLaunch + 67 * std::pow(n, 0.66) * std::pow(k, 0.26) * std::pow(c, 0.15);
}

/// PyTorch's convolution, with the copies that cuDNN makes of NCDHW or, where `copies`, those of x and w that
/// are ours.
double cudnn_us(const Problem& p, const Device& device, const Work& mb, bool copies) {
  if (is_pointwise_unstrided(p) && p.in == p.out()) return cudnn_pointwise_us(p, mb);
  constexpr std::int64_t kLongStride = 3;
  constexpr Cost kLaunch = {7.1, 12, 7.5, 13};
  constexpr double kStrided = 2.9, kInput = 0.23, kInputOfFloat = 0.17, kResult = 0.19, kResultOfFloat = 0.04,
                   kWeight = 0.03, kWeightOfFloat = 0.06;
  // Without a stride, in 16 bit, what x and y take beyond that hides behind the products of large blocks, as
  // far as memory's rate lets it.
  constexpr double kUnhidden = 20, kLeastPerMB = 0.24;
  constexpr double kCopied = 0.92, kCopiedOfFloat = 0.63;
  constexpr double kCopiedByTiles = 0.35;  // of two blocks whose planes are whole loads
  // Of w, of nine blocks of 4 to 134 MB: in 16 bit 0.6 to 0.8 per MB less than value by value, in float32 0
  // to 0.3. Of less than 2 MB, and of x, no gain was seen apart from what follows.
  constexpr double kCopiedInStretches = 0.3, kCopiedInStretchesOfFloat = 0.45, kSmallWeight = 2;
  double us = cudnn_multiply_us(p, device.sm_count) + (p.stride != Extent3{1, 1, 1} ? kStrided : 0);
  if (is_float(p)) {
    us += kInputOfFloat * mb.x + kResultOfFloat * mb.y + kWeightOfFloat * mb.w;
  } else {
    const double memory = kInput * mb.x + kResult * mb.y;
    const bool hides = p.stride == Extent3{1, 1, 1};
    us = hides ? std::max(us + std::min(memory, kUnhidden), kLeastPerMB * (mb.x + mb.y)) : us + memory;
    us += kWeight * mb.w;
  }
  if (!in_rows(p)) {
    const double copied = is_float(p) ? kCopiedOfFloat : kCopied;
    const std::int64_t planes = volume(p.in);
    if (!copies) {
      us += copied * (mb.x + mb.w + mb.y);
    } else {
      const bool tiles =
          planes % CopyTiles::kLoad == 0 && is_copied_by_tiles(p.n, p.c, planes, size_of(p.dtype));
      us += (tiles ? kCopiedByTiles : copied) * mb.x;
      const double w = p.w_channels_last ? 0 : mb.w, small = std::min(w, kSmallWeight);
      const bool stretches = is_copied_in_stretches(p.k, volume(p.kernel), size_of(p.dtype));
      const double in_stretches = is_float(p) ? kCopiedInStretchesOfFloat : kCopiedInStretches;
      us += copied * small + (stretches ? in_stretches : copied) * (w - small);
    }
  }
  const double all = ragged_share(p) * (kLaunch.of(p) + us);
  const bool multiplies_zeros = longest(p.stride) >= kLongStride && volume(p.kernel) > 1;
  return multiplies_zeros ? std::max(all, cudnn_long_stride_us(p, mb)) : all;
}

/// cuDNN's convolution of groups that it has kernels for: as of one group of as many times the samples, whose
/// weight is all of theirs; 112 blocks and inputs took 0.7 to 1.5 of that in 16 bits, under "tf32" up to
/// twice as long (perf/NOTES.md, "Groups that cuDNN has kernels for"). Of operands that are ours nothing is
/// known.
double cudnn_quick_groups_us(const Problem& p, const Device& device, const Work& mb) {
  constexpr Cost kOfOneGroup = {1.05, 1.2, 1.45, 1.3};  // by which the choice among those is best
  // Of fewer inputs, 0.3 to 0.9 of it: six blocks.
  constexpr std::int64_t kInputs = 32;
  constexpr double kOfFewInputs = 0.6;
  Problem one = p;
  one.n *= p.groups;
  one.c /= p.groups;
  one.k /= p.groups;
  one.groups = 1;
  Work work(one);
  work.w = mb.w;
  return kOfOneGroup.of(p) * (one.c < kInputs ? kOfFewInputs : 1) * cudnn_us(one, device, work, false);
}

/// PyTorch's convolution, as for cudnn_us.
double convolution_us(const Problem& p, const Device& device, const Work& mb, bool copies) {
  if (are_quick_groups(p)) return cudnn_quick_groups_us(p, device, mb);
  return p.groups > 1 ? cudnn_groups_us(p) : cudnn_us(p, device, mb, copies);
}

/// What a held norm takes less where values stay in registers, as they have since its times were fitted
/// (perf/results/h200_kept_values.txt).
double saved_by_keeping(const HeldCut& cut) {
  constexpr double kKept = 1.1;
  return keeps_values(cut) ? kKept : 0;
}

/// Behind cuDNN's convolution, what it takes less where they do not stay there, but planes are whole vectors
/// and no activation is decided at run time: of three blocks, since when such planes have loops of their own.
double saved_of_whole_planes(const Problem& p, const HeldCut& cut, const Work& mb) {
  constexpr double kPerMB = 0.2;
  if (keeps_values(cut) || !has_held_kernel(p.tail.before())) return 0;
  const bool whole =
      std::holds_alternative<HeldPlanes>(cut) && p.positions() * size_of(p.dtype) % kVectorBytes == 0;
  return whole ? kPerMB * mb.y : 0;
}

/// What follows a convolution that lies in memory in the order `layout`.
double tail_us(const Problem& p, const Device& device, Layout layout, const Work& mb) {
  if (!p.tail.norm) {
    constexpr double kLaunch = 3.3, kPerMB = 0.42;
    return p.tail.activation == Activation::kNone && !p.has_bias ? 0 : kLaunch + kPerMB * mb.y;
  }
  constexpr Cost kHeld = {0.76, 1.1, 0.72, 0.83}, kInLaunches = {0.79, 0.95, 0.79, 0.79};
  constexpr double kLaunch = 7.3, kLaunches = 9.4;
  // Before a norm, exponentials are computed for the moments and once more.
  constexpr double kExponential = 0.3, kExponentialOfFloat = 0.06;
  const double before = p.tail.order == Order::kActNorm
                            ? exponentials_us(p, mb, 0, is_float(p) ? kExponentialOfFloat : kExponential)
                            : 0;
  const std::optional<HeldCut> held = held_cut(p, layout, device.compute_capability);
  if (!held) return before + kLaunches + kInLaunches.of(p) * mb.y;
  return before + kLaunch + kHeld.of(p) * mb.y - saved_by_keeping(*held) -
         saved_of_whole_planes(p, *held, mb);
}

}  // namespace

bool has_plan_times(const Problem& p) {
  constexpr std::int64_t kStride = 4;
  return p.operation == Operation::kConvTranspose && p.n > 0 && p.dtype != DType::kFloat64 && !p.is_ieee() &&
         p.groups == 1 && p.x_layout == p.y_layout && !p.tail.has_skip && longest(p.stride) <= kStride &&
         !(is_dilated(p) && p.stride != Extent3{1, 1, 1}) && !is_flat_and_long(p);
}

bool has_times(const Problem& p) {
  return has_plan_times(p) || has_group_times(p);
}

double sm90_plan_us(const Problem& p, const Plan& sm90) {
  if (sm90.held) return sm90.expected_held_us;
  return sm90.twice ? twice_us(p, sm90) : stored_us(p, sm90);
}

double library_weight_copy_us(const Problem& p) {
  constexpr double kLaunch = 4, kPerMB = 7;
  return p.w_channels_last || !in_rows(p) || volume(p.kernel) == 1 ? 0 : kLaunch + kPerMB * Work(p).w;
}

double library_plan_us(const Problem& given, const Device& device) {
  // The weight that PyTorch's convolution gets lacks taps that reach no output.
  const std::optional<CroppedTaps> cropped = without_idle_taps(given);
  const Problem& p = cropped ? cropped->problem : given;
  const Work mb(p);
  const bool copies = library_copies_operands(p, device);
  // PyTorch adds the bias of a convolution that is returned by a launch of its own.
  constexpr double kLaunch = 3, kPerMB = 0.5;
  const double returned = p.tail.returns_conv && p.has_bias ? kLaunch + kPerMB * mb.y : 0;
  return convolution_us(p, device, mb, copies) + library_weight_copy_us(p) + returned +
         tail_us(p, device, copies ? Layout::kNDHWC : p.y_layout, mb);
}

double col2im_plan_us(const Problem& p, const Device& device) {
  const Work mb(p);
  const ColumnsLayout columns(p);
  constexpr std::int64_t kHalfInputs = 32, kFloatInputs = 16;  // of a k-block
  constexpr std::int64_t kHalfRow = 2, kFloatRow = 4;  // values: rows of multiples come in larger pieces
  constexpr double kHalfBlock = 0.68, kFloatBlock = 0.72, kOddInput = 0.4, kOddWeight = 0.5;
  // Fewer of those without a norm, and where the gather writes the result, not a launch behind it.
  constexpr double kLaunches = 16, kLaunchesOfFloat = 14, kLinear = 4, kFinished = 6.5;
  constexpr double kPerMB = 0.76, kInput = 0.077, kLane = 14, kShortLane = 12;
  constexpr Cost kResult = {0.79, 0.46, 0.79, 0.46}, kResultOfLinear = {0.38, 0.13, 0.38, 0.13};
  constexpr Cost kResultOfFinished = {0.25, 0.05, 0.25, 0.05};
  constexpr double kUnheld = 1.4;
  const std::int64_t inputs = is_float(p) ? kFloatInputs : kHalfInputs;
  const std::int64_t whole = is_float(p) ? kFloatRow : kHalfRow;
  const double blocks = columns_rounds(p, device.sm_count) * static_cast<double>(ceil_div(p.c, inputs));
  const bool is_input_odd = (p.x_layout == Layout::kNDHWC ? p.c : columns.positions) % whole != 0;
  const double block = (is_float(p) ? kFloatBlock : kHalfBlock) + (is_input_odd ? kOddInput : 0) +
                       (columns.rows % whole != 0 ? kOddWeight : 0);
  const double lanes =
      mb.positions * static_cast<double>(ceil_div(p.k, std::int64_t{col2im_lane_channels(p)}));
  const std::optional<HeldCut> held = held_cut(p, p.y_layout, device.compute_capability);
  const bool unheld = p.tail.norm && !held;
  const bool finished = col2im_finishes(p, false);
  const Cost& result = p.tail.norm ? kResult : finished ? kResultOfFinished : kResultOfLinear;
  return (is_float(p) ? kLaunchesOfFloat : kLaunches) -
         (p.tail.norm ? 0
          : finished  ? kFinished
                      : kLinear) +
         block * blocks + kPerMB * static_cast<double>(columns.values()) * sizeof(float) * kMega +
         kInput * mb.x + result.of(p) * mb.y + (col2im_has_short_lanes(p) ? kShortLane : kLane) * lanes +
         (unheld ? kUnheld : 0) - (held ? saved_by_keeping(*held) : 0);
}

}  // namespace upconv3d
