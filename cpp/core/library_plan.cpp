// SPDX-License-Identifier: Apache-2.0
#include "core/library_plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/held_norm.hpp"
#include "core/index_math.hpp"
#include "core/one_voxel.hpp"
#include "core/sm90_compared.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// Times in us and rates of an H200 with L2 cold, fitted to 30 small convolutions and blocks (perf/NOTES.md,
// "Small blocks in two launches"), those of NCDHW to 50 ("Small blocks in NCDHW").

constexpr double kMegabyte = 1e6;

/// Megabytes of x, w and y.
struct Traffic {
  double x, w, y;
  explicit Traffic(const Problem& p) {
    const double scale = static_cast<double>(size_of(p.dtype)) / kMegabyte;
    x = static_cast<double>(p.n * p.c * volume(p.in)) * scale;
    w = static_cast<double>(p.c * p.k * volume(p.kernel)) * scale;
    y = static_cast<double>(p.n * p.k * p.positions()) * scale;
  }
};

/// What the SM90 plan takes beside its estimate: 21 to 37 us, of float32 with the packing of its operands; of
/// NCDHW with that of all operands and with the transposed result, 25 to 80 us.
double sm90_beside_estimate(const Problem& p, const Traffic& mb) {
  const bool is_float = p.dtype == DType::kFloat32;
  if (p.y_layout == Layout::kNCDHW) {
    constexpr double kWeightPerMB = 0.7, kTensorPerMB = 0.5;
    return (is_float ? 38 : 27.5) + kWeightPerMB * mb.w + kTensorPerMB * (mb.x + mb.y);
  }
  if (!is_float) return 25;
  constexpr double kLaunches = 38, kPackPerMB = 1.5;
  return kLaunches + kPackPerMB * (mb.x + mb.w);
}

/// Whether the phases of a strided convolution have different numbers of taps.
bool has_uneven_phases(const Problem& p) {
  bool uneven = false;
  for (std::size_t axis = 0; axis < 3; ++axis) uneven |= p.kernel[axis] % p.stride[axis] != 0;
  return uneven;
}

/// GFLOP of cuDNN's tiles, which output channels fill as they do ours, and input channels up to 64, of
/// TF32 32. Of strides fewer than 32 inputs took it twice as long, and of long ones it multiplies the zeros
/// between inputs, at twice its rate (perf/NOTES.md, "What the limits of plans cost").
double library_gflops(const Problem& p) {
  constexpr std::int64_t kTileChannels = 64, kInputs = 64, kFloatInputs = 32, kLongStride = 3;
  constexpr double kStridedFew = 2, kRateOfZeros = 2, kFilledUp = 0.75, kDilated = 1.4;
  const bool half_width = size_of(p.dtype) == 2;
  const std::int64_t channels = group_inputs(p),
                     longest = *std::max_element(p.stride.begin(), p.stride.end());
  const double outputs = static_cast<double>(ceil_div(p.k, kTileChannels) * kTileChannels);
  const double inputs = static_cast<double>(std::max(channels, half_width ? kInputs : kFloatInputs));
  const double of_useful = outputs / static_cast<double>(p.k) * inputs / static_cast<double>(channels);
  const double gflops = p.useful_flops() * 1e-9 * of_useful;
  if (longest >= kLongStride && volume(p.kernel) > 1) {
    const double taps = static_cast<double>(volume(p.kernel));
    const double products = static_cast<double>(p.n * p.positions()) * taps * outputs * inputs;
    return std::max(gflops, 2e-9 * products / kRateOfZeros);
  }
  if (longest > 1) return (channels < kFloatInputs && p.k <= kTileChannels ? kStridedFew : 1) * gflops;
  return (half_width && channels < kInputs ? kFilledUp : 1) * (is_dilated(p) ? kDilated : 1) * gflops;
}

/// us per GFLOP of those tiles.
double library_per_gflop(const Problem& p) {
  if (p.dtype != DType::kFloat32) return 1.6;
  return p.is_ieee() ? 20 : 3.5;
}

/// cuDNN's deterministic convolution of channels_last_3d, benchmarked.
double library_convolution(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 12, kStrided = 3, kUneven = 7;
  constexpr double kWeightPerMB = 0.6, kTensorPerMB = 0.25;
  const bool is_float = p.dtype == DType::kFloat32;
  const double per_gflop = library_per_gflop(p), gflops = library_gflops(p);
  return kLaunch + (p.stride != Extent3{1, 1, 1} ? kStrided : 0) +
         (is_float && has_uneven_phases(p) ? kUneven : 0) + per_gflop * gflops + kWeightPerMB * mb.w +
         kTensorPerMB * (mb.x + mb.y);
}

/// What cuDNN takes beside that for each tap in TF32, of fewer than 64 inputs: fitted to two blocks of 125
/// taps.
double library_taps(const Problem& p) {
  constexpr std::int64_t kInputs = 64;
  constexpr double kPerTap = 10e-6;
  if (p.dtype != DType::kFloat32 || group_inputs(p) >= kInputs) return 0;
  const double taps = static_cast<double>(volume(p.kernel)) / static_cast<double>(volume(p.stride));
  return kPerTap * taps * static_cast<double>(p.n * p.positions());
}

bool is_pointwise(const Problem& p) {
  return volume(p.kernel) == 1;
}

/// What PyTorch takes to bring a weight in the other order to that of x in NDHWC, at every call.
double library_weight_copy(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 4, kPerMB = 7;
  return p.w_channels_last || is_pointwise(p) ? 0 : kLaunch + kPerMB * mb.w;
}

/// What cuDNN's convolution of NCDHW takes longer: it copies x, w and the result, by a launch each.
double library_copies(const Problem& p, const Traffic& mb) {
  if (is_pointwise(p)) return 1.5;
  constexpr double kLaunches = 9.5;
  return kLaunches + (p.dtype == DType::kFloat32 ? 0.5 : 0.8) * (mb.x + mb.w + mb.y);
}

/// channels_last_copies.
double operand_copies(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 4, kPerMB = 0.6;
  return kLaunch + kPerMB * (mb.x + (p.w_channels_last || is_pointwise(p) ? 0 : mb.w));
}

/// activation_group_norm_held, or its form for NCDHW; transposing takes no longer.
double held_normalization(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 8.3;
  const double per_mb = p.y_layout == Layout::kNDHWC ? 0.6 : p.dtype == DType::kFloat32 ? 0.7 : 1.0;
  return kLaunch + per_mb * mb.y;
}

/// Three launches, where one cannot hold the result because it is larger than what that takes: of two blocks
/// of float32 in channels_last_3d, whose results have 20 and 21 MB (perf/NOTES.md, "Few channels at float32's
/// accuracy" and "What the limits of plans cost").
std::optional<double> normalization_in_launches(const Problem& p, const Traffic& mb) {
  constexpr double kLaunches = 8, kPerMB = 0.75, kLeastMB = 16, kMostMB = 24;
  const bool timed =
      p.tail.norm && p.dtype == DType::kFloat32 && p.y_layout == Layout::kNDHWC && mb.y > kLeastMB;
  if (!timed || mb.y > kMostMB) return std::nullopt;
  return kLaunches + kPerMB * mb.y;
}

/// The three launches in 16 bit, of one block of 58 MB.
double long_normalization_in_launches(const Traffic& mb) {
  constexpr double kLaunches = 8, kPerMB = 0.85;
  return kLaunches + kPerMB * mb.y;
}

/// 96 or 160 outputs, of which both kernels' tiles of 64 and 128 channels leave a part empty.
bool has_half_tile(const Problem& p) {
  return p.k == 96 || p.k == 160;
}

/// Whether that was timed: of dilated convolutions and of half tiles alone.
bool has_timed_launches(const Problem& p, const Traffic& mb) {
  constexpr double kMostMB = 64;
  return (is_dilated(p) || has_half_tile(p)) && mb.y <= kMostMB;
}

/// Whether cuDNN's deterministic kernels take far more than the estimates say: under "tf32", where one axis
/// has a single voxel, of kernels of 5 and more with a stride along another, convolutions took 63 and 297 us,
/// and a block 289, where 31 to 36 were expected (perf/results/h200_peers_found.txt, parts 3 and 5).
bool is_flat_and_long(const Problem& p) {
  constexpr std::int64_t kLong = 5;
  if (p.dtype != DType::kFloat32) return false;
  const Extent3 out = p.out();
  bool is_flat = false, is_long = false;
  for (int axis = 0; axis < 3; ++axis) {
    const bool is_voxel = p.in[axis] == 1 && out[axis] == 1;
    is_flat |= is_voxel;
    is_long |= !is_voxel && p.kernel[axis] >= kLong && p.stride[axis] > 1;
  }
  return is_flat && is_long;
}

/// Whether the estimates above were compared with measurements of such convolutions, but for dilation.
bool was_compared_undilated(const Problem& p) {
  const bool tensor_cores = p.dtype != DType::kFloat32 || p.precision == Precision::kTF32;
  const bool whole = p.c % kChannelUnit == 0 && p.k % kChannelUnit == 0 && p.c >= 32 && p.k >= 16;
  // cuDNN's copy of a NCDHW x lies as it wants it, and so does ours.
  const bool aligned = p.x_aligned || (p.x_layout == Layout::kNCDHW && !is_pointwise(p));
  return tensor_cores && whole && p.groups == 1 && aligned && p.x_layout == p.y_layout &&
         *std::max_element(p.stride.begin(), p.stride.end()) <= 2 && !is_flat_and_long(p);
}

bool was_compared(const Problem& p) {
  return was_compared_undilated(p) && !is_dilated(p);
}

/// Whether others are near enough to those for an estimate on the slow side: of any number of channels, and
/// in 16 bit of longer strides. Of float32 only little arithmetic, pointwise and dilated ones: the kernels
/// that cuDNN is quick with are not deterministic (4, 512 > 8, 6^3, k5 s2 takes 164 us by deterministic ones,
/// 63 by any; of many outputs 8, 24 > 384, 3x7x8, k3 s2 takes 23 by deterministic ones).
bool is_near_compared(const Problem& p) {
  constexpr double kMostFloatFlops = 0.5e9, kMostOfManyOutputs = 1e9, kMostDilated = 5e9;
  constexpr std::int64_t kManyOutputs = 64;
  const bool is_float = p.dtype == DType::kFloat32, is_unstrided = p.stride == Extent3{1, 1, 1};
  if (p.is_ieee() || is_flat_and_long(p)) return false;
  const double most = is_dilated(p)         ? kMostDilated
                      : p.k >= kManyOutputs ? kMostOfManyOutputs
                                            : kMostFloatFlops;
  if (is_float && !is_pointwise(p) && p.useful_flops() > most) return false;
  // Of many taps and channels that are no multiple of 8 it took 3 times as long as expected: 4, 20 > 320,
  // 8x10x10, k5.
  constexpr std::int64_t kTaps = 27;
  constexpr double kMostRaggedFlops = 2e9;
  const bool is_ragged = p.c % kChannelUnit != 0 || p.k % kChannelUnit != 0;
  if (is_ragged && volume(p.kernel) > kTaps && p.useful_flops() > kMostRaggedFlops) return false;
  const std::int64_t longest = is_float ? 2 : 4;
  if (is_dilated(p) && !is_unstrided) return false;
  return p.groups == 1 && p.x_layout == p.y_layout &&
         *std::max_element(p.stride.begin(), p.stride.end()) <= longest;
}

/// Whether a block at float32's accuracy is near those whose deterministic convolution was timed: some 20 of
/// stride 1, as many of stride 2 (perf/NOTES.md, "Small blocks by plan"). Its sums take one product after the
/// other: of 324 and more, at stride 1, rms errors were 2.4 to 3.5 times those of the kernels that eager
/// takes. With a stride, kernels of more taps took up to 14 ms.
bool is_near_compared_ieee(const Problem& p) {
  constexpr double kMostFlops = 0.5e9, kMostStridedFlops = 0.05e9, kMostProducts = 128;
  constexpr std::int64_t kStridedTaps = 9;
  if (!p.is_ieee() || p.groups != 1 || p.x_layout != p.y_layout) return false;
  const std::int64_t longest = *std::max_element(p.stride.begin(), p.stride.end());
  const double products = static_cast<double>(p.c * volume(p.kernel)) / static_cast<double>(volume(p.stride));
  if (!is_pointwise(p) && products > kMostProducts) return false;
  if (longest == 1) return p.useful_flops() <= kMostFlops;
  return longest == 2 && !is_dilated(p) && volume(p.kernel) <= kStridedTaps &&
         p.useful_flops() <= kMostStridedFlops;
}

/// cuDNN's convolution and the launch after it, in us, of a block near those that were compared: 80 such, of
/// results of up to 22 MB, are in perf/results/h200_small_channels.txt. Positions cost cuDNN something
/// whatever the number of channels, its float32 kernels of few channels something per tap, stores of long
/// strides and short rows of channels are what it waits for, and channels that are no multiple of 8 cost it
/// more of everything in 16 bit with a stride or many taps.
double near_library_block(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 12, kStoresPerMB = 1.5, kFloatPerTap = 20e-6;
  constexpr double kRagged = 1.6, kRaggedPerPosition = 350e-6, kShortRow = 64;
  constexpr std::int64_t kFewTaps = 27;
  constexpr std::int64_t kInputs = 24;  // of 8 it stored rows of 256 channels no quicker
  const double short_rows = p.c < kInputs ? 1 : std::min(1.0, kShortRow / static_cast<double>(p.k));
  const bool in_rows = p.y_layout == Layout::kNDHWC, is_float = p.dtype == DType::kFloat32;
  const double per_position = 1e-6 * library_us_per_million_positions(p);
  const double positions = static_cast<double>(p.n * p.positions());
  const double taps = static_cast<double>(volume(p.kernel)) / static_cast<double>(volume(p.stride));
  const double usual =
      library_convolution(p, mb) + (in_rows ? library_weight_copy(p, mb) : library_copies(p, mb));
  const bool pointwise = is_pointwise(p);
  const double convolution = std::max(usual, kLaunch + per_position * positions) +
                             (pointwise ? 0 : kStoresPerMB * mb.y * short_rows) +
                             (is_float ? kFloatPerTap * taps * positions : 0);
  const double block = convolution + held_normalization(p, mb);
  const bool whole = p.c % kChannelUnit == 0 && p.k % kChannelUnit == 0 && p.x_aligned;
  if (is_float || whole) return block;
  const bool is_usual = p.stride == Extent3{1, 1, 1} && volume(p.kernel) <= kFewTaps;
  return (is_usual ? 1 : kRagged) * block + kRaggedPerPosition * positions;
}

/// The same at float32's accuracy, where cuDNN copies nothing in NCDHW.
double near_library_block_ieee(const Problem& p, const Traffic& mb) {
  if (is_pointwise(p) && p.stride == Extent3{1, 1, 1}) return near_library_block(p, mb);
  constexpr double kLaunch = 12, kInRows = 14;
  constexpr double kStridedPerInput = 0.14, kStridedPerGFlop = 300, kStridedPerPosition = 350e-6;
  const double launches = kLaunch + (p.y_layout == Layout::kNDHWC ? kInRows : 0) + held_normalization(p, mb);
  if (p.stride == Extent3{1, 1, 1}) return launches + library_per_gflop(p) * library_gflops(p);
  return launches + kStridedPerInput * static_cast<double>(p.c) + kStridedPerGFlop * p.useful_flops() * 1e-9 +
         kStridedPerPosition * static_cast<double>(p.n * p.positions());
}

/// Whether a block is a matmul as it lies, of which the SM90 plan packs or transposes something: cuDNN's is
/// bound by memory. Of as many channels as were timed.
bool is_plain_matmul(const Problem& p) {
  constexpr std::int64_t kInputs = 512, kOutputs = 320, kIeeeInputs = 32, kIeeeOutputs = 96;
  const bool in_rows = p.y_layout == Layout::kNDHWC;
  const bool in_place = p.dtype != DType::kFloat32 && in_rows;
  const bool few =
      p.c <= (p.is_ieee() ? kIeeeInputs : kInputs) && p.k <= (p.is_ieee() ? kIeeeOutputs : kOutputs);
  return is_pointwise(p) && p.stride == Extent3{1, 1, 1} && p.in == p.out() && p.groups == 1 &&
         !(p.is_ieee() && in_rows) && !in_place && p.x_layout == p.y_layout && p.tail.norm && few;
}

/// The library plan of those and the SM90 plan, by the bytes that they move: fitted to 40 blocks of 12
/// shapes, which took 0.8 to 1.15 of it (perf/NOTES.md, "What the limits of plans cost").
struct MatmulTimes {
  double library, sm90;  // us

  explicit MatmulTimes(const Problem& p) {
    const Traffic mb(p);
    constexpr double kConvolution = 0.33, kPasses = 0.75;
    constexpr double kPackInRows = 0.75, kStoreInRows = 0.35, kPack = 0.72, kStore = 0.75;
    constexpr double kPackTwice = 1.9;  // hi and lo, of four blocks
    constexpr std::int64_t kPackedInputs = 64;
    const bool in_rows = p.y_layout == Layout::kNDHWC;
    const double arithmetic = library_per_gflop(p) * library_gflops(p);
    library = (in_rows ? 8 : 15) + std::max(kConvolution * (mb.x + mb.y), arithmetic) + kPasses * mb.y;
    const double packed = static_cast<double>(std::max(p.c, kPackedInputs)) / static_cast<double>(p.c);
    sm90 = p.is_ieee() ? 28 + kPackTwice * packed * mb.x + kStore * mb.y
           : in_rows   ? 25 + kPackInRows * packed * mb.x + kStoreInRows * mb.y
                       : 28 + kPack * mb.x + kStore * mb.y;
  }
};

/// Whether the library plan of a result that one launch cannot hold was timed on blocks that are only near:
/// in 16 bit, of stride 1. Of twelve such of 1 to 20 outputs three took 0.7 to 0.9 of near_library_block and
/// two more launches, the others 0.92 to 1.13 (perf/results/h200_plan_limits.txt, part 10).
bool has_few_outputs_in_launches(const Problem& p, const Traffic& mb) {
  constexpr std::int64_t kOutputs = 20;
  constexpr double kMostMB = 1, kMostFlops = 1.2e9;
  return p.dtype != DType::kFloat32 && p.stride == Extent3{1, 1, 1} && p.k <= kOutputs && p.tail.norm &&
         mb.y <= kMostMB && p.useful_flops() <= kMostFlops;
}

/// Whether the library's time is less than the SM90 plan's. Of NCDHW the host takes 15 us longer.
bool favours_library(const Problem& p, double library, double sm90) {
  return library < (p.y_layout == Layout::kNCDHW ? 0.95 : 1) * sm90;
}

double sm90_block(const Problem& p, const Traffic& mb, const Plan& sm90) {
  return 1e3 * compared_ms(sm90) * dilated_share(p, sm90) + sm90_beside_estimate(p, mb);
}

/// Whether cuDNN's convolution was compared with the SM90 kernel at any length: stride 1, 16 bit,
/// channels_last_3d.
bool was_compared_at_length(const Problem& p) {
  return was_compared_undilated(p) && size_of(p.dtype) == 2 && p.y_layout == Layout::kNDHWC &&
         p.stride == Extent3{1, 1, 1};
}

/// cuDNN's convolution of those, benchmarked, in us, fitted to 115 of 10 us to 1 ms: within 20 % of most. Of
/// four dilated ones it took up to 1.4 times as long.
double library_convolution_at_length(const Problem& p, const Traffic& mb, int sm_count) {
  constexpr double kLaunch = 8, kTensorPerMB = 0.1;
  constexpr std::int64_t kTile = 64, kInputs = 32;  // channels that tiles are filled up to
  // FLOP/us. Of kernels of more than 3 taps along an axis, it takes others.
  const std::int64_t longest = *std::max_element(p.kernel.begin(), p.kernel.end());
  const double rate = longest > 3 ? 400e6 : is_pointwise(p) ? 1100e6 : 680e6;
  const std::int64_t outputs = ceil_div(p.k, kTile) * kTile, inputs = ceil_div(p.c, kInputs) * kInputs;
  const double positions = static_cast<double>(p.n * p.positions());
  constexpr double kDilated = 1.4, k96 = 0.86;
  const double flops = 2 * positions * static_cast<double>(outputs * inputs * volume(p.kernel)) *
                       (is_dilated(p) ? kDilated : 1) * (p.k == 96 ? k96 : 1);
  // Of the last wave of tiles of 128 positions, half the loss was seen.
  const std::int64_t tile_channels = outputs % (2 * kTile) == 0 ? 2 * kTile : kTile;
  const double waves = std::ceil(positions / 128) * static_cast<double>(outputs / tile_channels) /
                       static_cast<double>(std::max(sm_count, 1));
  const double filled = std::max(waves / std::ceil(waves), 1.0 / 3);
  const double per_position = 1e-6 * 1.2 * library_us_per_million_positions(p);
  return kLaunch + std::max(flops / rate / std::sqrt(filled), per_position * positions) +
         kTensorPerMB * (mb.x + mb.y);
}

/// The SM90 plan that stores the convolution, from packed operands on, in us, as its schedule has it: what
/// such blocks took beside it was fitted with it.
double scheduled_block(const Problem& p, const Plan& sm90, const Traffic& mb) {
  constexpr double kLaunches = 21, kPerMB = 0.44;
  return kLaunches + 1e3 * sm90.scheduled_multiply_ms * dilated_share(p, sm90) + kPerMB * mb.y;
}

/// What PyTorch takes to add the bias of a convolution that is returned: a launch, and two passes at memory's
/// speed. An estimate.
double bias_of_returned(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 3, kPerMB = 0.5;
  return p.tail.returns_conv && p.has_bias ? kLaunch + kPerMB * mb.y : 0;
}

/// What near_library_advantage compares, in us, and what it says of it.
struct NearTimes {
  double library = std::numeric_limits<double>::infinity(), sm90 = 0;
  const char* what = "";
};

NearTimes near_times(const Problem& p, const Device& device, const Plan& sm90) {
  if (p.n == 0 || p.tail.returns_conv) return {};
  if (is_plain_matmul(p)) {
    const MatmulTimes times(p);
    return {times.library, times.sm90,
            "a matmul as it lies: cuDNN and what follows it are expected to take "};
  }
  if (was_compared(p)) return {};
  const Traffic mb(p);
  const double ours = sm90_us(p, sm90);
  const bool is_near = p.is_ieee() ? is_near_compared_ieee(p) : is_near_compared(p);
  if (!is_near) return {};
  if (held_cut(p, p.y_layout, device.compute_capability)) {
    return {p.is_ieee() ? near_library_block_ieee(p, mb) : near_library_block(p, mb), ours,
            "a small block: cuDNN's convolution and one launch after it are expected to take at most "};
  }
  if (!has_few_outputs_in_launches(p, mb)) return {};
  constexpr double kTwoMoreLaunches = 10;
  return {near_library_block(p, mb) + kTwoMoreLaunches, ours,
          "a small block: cuDNN's convolution and three launches after it are expected to take "};
}

}  // namespace

double library_convolution_us(const Problem& p) {
  constexpr std::int64_t kOutputs = 16;  // up to as many, positions count more than what was fitted knows
  const Traffic mb(p);
  if (was_compared(p) && p.k > kOutputs) {
    return library_convolution(p, mb) + library_taps(p) +
           (p.y_layout == Layout::kNDHWC ? library_weight_copy(p, mb) : library_copies(p, mb));
  }
  const bool is_near = p.is_ieee() ? is_near_compared_ieee(p) : is_near_compared(p);
  if (!is_near) return std::numeric_limits<double>::infinity();
  return (p.is_ieee() ? near_library_block_ieee(p, mb) : near_library_block(p, mb)) -
         held_normalization(p, mb);
}

double library_us_per_million_positions(const Problem& p) {
  if (size_of(p.dtype) != 2) return 175;
  return p.x_layout == Layout::kNDHWC ? 85 : 130;
}

bool library_copies_operands(const Problem& p, const Device& device) {
  if (p.n == 0 || p.tail.returns_conv || p.y_layout != Layout::kNCDHW || !was_compared(p)) return false;
  if (is_one_voxel_product(p)) return false;
  if (!held_tiles(p, device.compute_capability)) return false;
  const Traffic mb(p);
  return operand_copies(p, mb) < library_copies(p, mb);
}

LibraryAdvantage library_advantage(const Problem& p, const Device& device, const Plan& sm90) {
  if (p.n == 0 || !was_compared(p)) return {};
  const bool copies = library_copies_operands(p, device);
  const Layout layout = copies ? Layout::kNDHWC : p.y_layout;
  constexpr double kLongest = 110;  // of the convolutions that were compared
  const Traffic mb(p);
  const bool held = held_cut(p, layout, device.compute_capability).has_value();
  const std::optional<double> after = held ? held_normalization(p, mb) : normalization_in_launches(p, mb);
  if (!after) return {};
  const double before = copies                         ? operand_copies(p, mb)
                        : p.y_layout == Layout::kNCDHW ? library_copies(p, mb)
                                                       : library_weight_copy(p, mb);
  const double convolution = library_convolution(p, mb) + library_taps(p) + before + bias_of_returned(p, mb);
  const double normalization = *after;
  double ours = sm90_block(p, mb, sm90), bar = ours;
  // Pointwise ones, of which the estimate of cuDNN is high, were not timed on the SM90 kernel beside it.
  if (was_compared_at_length(p) && !is_pointwise(p) && !sm90.twice) {
    constexpr double kTie = 0.95;  // goes to the SM90 plan, which takes the host less
    const double scheduled = scheduled_block(p, sm90, mb);
    ours = std::min(ours, scheduled);
    bar = std::min(bar, kTie * scheduled);
  }
  const double library = convolution + normalization;
  if (convolution > kLongest || !favours_library(p, library, bar)) return {};
  return {concat("a small block: cuDNN's convolution is expected to take ", convolution,
                 copies ? " us with copies of x and w" : " us",
                 held ? " and one launch after it " : " and three launches after it ", normalization,
                 " us, the SM90 kernel ", ours, " us"),
          library};
}

LibraryAdvantage library_advantage_at_length(const Problem& p, const Device& device, const Plan& sm90) {
  if (p.n == 0 || !p.tail.norm || p.tail.returns_conv || sm90.twice || !was_compared_at_length(p)) return {};
  // By which the estimate of cuDNN may be off. That of dilated ones is on the slow side. Of half tiles 25
  // were timed by plan (perf/NOTES.md, "One voxel, and half tiles").
  const double ahead = p.k == 96 ? 1.05 : is_dilated(p) || has_half_tile(p) ? 1.1 : 1.2;
  const Traffic mb(p);
  const double convolution =
      library_convolution_at_length(p, mb, device.sm_count) + library_weight_copy(p, mb);
  const bool held = held_cut(p, p.y_layout, device.compute_capability).has_value();
  if (!held && !has_timed_launches(p, mb)) return {};
  const double normalization = held ? held_normalization(p, mb) : long_normalization_in_launches(mb);
  const double ours = scheduled_block(p, sm90, mb);
  if (ahead * (convolution + normalization) >= ours) return {};
  return {concat("cuDNN's convolution is expected to take ", convolution, " us, and ",
                 held ? "one launch" : "three launches", " after it ", normalization, " us, the SM90 kernel ",
                 ours, " us"),
          convolution + normalization};
}

double sm90_us(const Problem& p, const Plan& sm90) {
  // Output channels that are no multiple of 8 are stored elsewhere first.
  constexpr double kRaggedOutputs = 10;
  return sm90_block(p, Traffic(p), sm90) + (p.k % kChannelUnit == 0 ? 0 : kRaggedOutputs);
}

bool sm90_spares_host(const Problem& p, const Plan& sm90) {
  // In models, between PyTorch's operators: the library plan 90 us, PyTorch's three calls 90 to 150.
  constexpr double kHostOfLibrary = 90;
  return p.n > 0 && sm90_block(p, Traffic(p), sm90) <= kHostOfLibrary;
}

double near_library_us(const Problem& p, const Device& device, const Plan& sm90) {
  const NearTimes times = near_times(p, device, sm90);
  return favours_library(p, times.library, times.sm90) ? times.library
                                                       : std::numeric_limits<double>::infinity();
}

LibraryAdvantage near_library_advantage(const Problem& p, const Device& device, const Plan& sm90) {
  const NearTimes times = near_times(p, device, sm90);
  if (!favours_library(p, times.library, times.sm90)) return {};
  return {concat(times.what, times.library, " us, the SM90 kernel ", times.sm90, " us"), times.library};
}

}  // namespace upconv3d
