// SPDX-License-Identifier: Apache-2.0
#include "core/library_plan.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/channel_share.hpp"
#include "core/channels.hpp"
#include "core/extents.hpp"
#include "core/held_norm.hpp"
#include "core/index_math.hpp"
#include "core/one_voxel.hpp"
#include "core/plan_times.hpp"
#include "core/sm90_compared.hpp"
#include "core/text.hpp"
#include "core/traffic.hpp"

namespace upconv3d {
namespace {

// Times in us and rates of an H200 with L2 cold.

bool is_pointwise(const Problem& p) {
  return volume(p.kernel) == 1;
}

/// Whether copies of operands were compared with cuDNN's on such convolutions.
bool has_compared_copies(const Problem& p) {
  const bool tensor_cores = p.dtype != DType::kFloat32 || p.precision == Precision::kTF32;
  const bool whole = p.c % kChannelUnit == 0 && p.k % kChannelUnit == 0 && p.c >= 32 && p.k >= 16;
  // cuDNN's copy of a NCDHW x lies as it wants it, and so does ours.
  const bool aligned = p.x_aligned || (p.x_layout == Layout::kNCDHW && !is_pointwise(p));
  return tensor_cores && whole && p.groups == 1 && aligned && p.x_layout == p.y_layout && !is_dilated(p) &&
         longest(p.stride) <= 2 && !is_flat_and_long(p);
}

// The rest is of float32's accuracy.

constexpr double kPerGFlop = 20;

/// GFLOP of cuDNN's tiles at stride 1, which output channels fill as they do ours, and input channels up to
/// 32.
double library_gflops(const Problem& p) {
  constexpr std::int64_t kTileChannels = 64, kInputs = 32;
  constexpr double kDilated = 1.4;
  const double outputs = static_cast<double>(ceil_div(p.k, kTileChannels) * kTileChannels);
  const double inputs = static_cast<double>(std::max(p.c, kInputs));
  const double of_useful = outputs / static_cast<double>(p.k) * inputs / static_cast<double>(p.c);
  return p.useful_flops() * 1e-9 * of_useful * (is_dilated(p) ? kDilated : 1);
}

/// activation_group_norm_held, or its form for NCDHW.
double held_normalization(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 8.3, kPerMBInRows = 0.6, kPerMB = 0.7;
  return kLaunch + (in_rows(p) ? kPerMBInRows : kPerMB) * mb.y;
}

/// Whether a block is near those whose deterministic convolution was timed: some 20 of stride 1, as many of
/// stride 2 (perf/NOTES.md, "Small blocks by plan"). Its sums take one product after the other: of 324 and
/// more, at stride 1, rms errors were 2.4 to 3.5 times those of the kernels that eager takes. With a stride,
/// kernels of more taps took up to 14 ms.
bool is_near_compared(const Problem& p) {
  constexpr double kMostFlops = 0.5e9, kMostStridedFlops = 0.05e9, kMostProducts = 128;
  constexpr std::int64_t kStridedTaps = 9;
  if (!p.is_ieee() || p.groups != 1 || p.x_layout != p.y_layout) return false;
  const std::int64_t stride = longest(p.stride);
  const double products = static_cast<double>(p.c * volume(p.kernel)) / volume_of_any(p.stride);
  if (!is_pointwise(p) && products > kMostProducts) return false;
  if (stride == 1) return p.useful_flops() <= kMostFlops;
  return stride == 2 && !is_dilated(p) && volume(p.kernel) <= kStridedTaps &&
         p.useful_flops() <= kMostStridedFlops;
}

/// cuDNN's convolution, which copies nothing in NCDHW, of a block near those. Positions cost it something
/// whatever the number of channels.
double near_convolution(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 12, kInRows = 14, kWeightPerMB = 0.6, kTensorPerMB = 0.25, kPerTap = 20e-6;
  constexpr double kPlanes = 1.5;  // a pointwise convolution of planes takes longer than one of rows
  constexpr double kStridedPerInput = 0.14, kStridedPerGFlop = 300, kStridedPerPosition = 350e-6;
  const double positions = static_cast<double>(p.n * p.positions());
  const bool is_unstrided = p.stride == Extent3{1, 1, 1};
  if (is_pointwise(p) && is_unstrided) {
    const double copies = in_rows(p) ? 0 : kPlanes;
    const double usual =
        kLaunch + kPerGFlop * library_gflops(p) + kWeightPerMB * mb.w + kTensorPerMB * (mb.x + mb.y) + copies;
    const double least = kLaunch + 1e-6 * library_us_per_million_positions(p) * positions;
    return std::max(usual, least) + kPerTap * positions;
  }
  const double launches = kLaunch + (in_rows(p) ? kInRows : 0);
  if (is_unstrided) return launches + kPerGFlop * library_gflops(p);
  return launches + kStridedPerInput * static_cast<double>(p.c) + kStridedPerGFlop * p.useful_flops() * 1e-9 +
         kStridedPerPosition * positions;
}

/// Whether a block is a matmul as it lies, of as many channels as were timed: cuDNN's is bound by memory,
/// where the SM90 plan packs and transposes.
bool is_plain_matmul(const Problem& p) {
  constexpr std::int64_t kInputs = 32, kOutputs = 96;
  return is_pointwise(p) && p.stride == Extent3{1, 1, 1} && p.in == p.out() && p.groups == 1 && !in_rows(p) &&
         p.x_layout == p.y_layout && p.tail.norm && p.c <= kInputs && p.k <= kOutputs;
}

/// What is compared, in us, and what is said of it.
struct Times {
  double library = std::numeric_limits<double>::infinity(), sm90 = 0;
  const char* what = "";
};

/// Of a matmul, by the bytes that the plans move: blocks took 0.8 to 1.15 of it (perf/NOTES.md, "What the
/// limits of plans cost").
Times matmul_times(const Problem& p, const Traffic& mb) {
  constexpr double kLaunches = 15, kConvolution = 0.33, kPasses = 0.75;
  constexpr double kLaunchesOfSm90 = 28, kPack = 1.9, kStore = 0.75;  // hi and lo, of four blocks
  constexpr std::int64_t kPackedInputs = 64;
  const double packed = static_cast<double>(std::max(p.c, kPackedInputs)) / static_cast<double>(p.c);
  const double convolution = std::max(kConvolution * (mb.x + mb.y), kPerGFlop * library_gflops(p));
  return {kLaunches + convolution + kPasses * mb.y, kLaunchesOfSm90 + kPack * packed * mb.x + kStore * mb.y,
          "a matmul as it lies: cuDNN and what follows it are expected to take "};
}

/// What the SM90 kernel's epilogue takes for an activation, of all rows of a tile, 64 or more; of
/// exponentials also their code.
double epilogue_us(const Problem& p) {
  constexpr std::int64_t kRows = 64;
  constexpr double kLinear = 0.05, kCode = 3, kSilu = 0.54, kGelu = 0.9, kElu = 1.2;  // per million values
  const double values = 1e-6 * static_cast<double>(p.n * ceil_div(p.k, kRows) * kRows * p.positions());
  switch (p.tail.activation) {
    case Activation::kNone:
    case Activation::kRelu:
      return 0;
    case Activation::kLeakyRelu:
    case Activation::kPrelu:
      return kLinear * values;
    case Activation::kSilu:
      return kCode + kSilu * values;
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return kCode + kGelu * values;
    case Activation::kElu:
      return kCode + kElu * values;
  }
  return 0;
}

/// Without a norm: a launch adds what follows cuDNN's convolution, which alone takes less than as the first
/// of two launches, to which its estimate was fitted; the SM90 plan adds it as it stores.
Times times_without_norm(const Problem& p, const Traffic& mb, const Plan& sm90) {
  constexpr double kSecondLaunch = 5, kPass = 3, kPassPerMB = 0.5, kLongest = 150;  // of those timed
  constexpr double kLaunches = 26, kPerMBOfX = 0.35, kWeightPerMB = 0.8, kUnpackedPerMB = 0.55, kLaunch = 15;
  const double convolution = near_convolution(p, mb) - kSecondLaunch;
  if (convolution > kLongest) return {};
  const double pass = kPass + kPassPerMB * mb.y;
  const bool is_activated = p.tail.activation != Activation::kNone;
  // A convolution that is returned is written once more, with its bias.
  const double returned = p.tail.returns_conv && p.has_bias ? pass / 2 : 0;
  const double ours = kLaunches + (in_rows(p) ? 0.85 : 0.9) * 1e3 * sm90.scheduled_multiply_ms +
                      kPerMBOfX * mb.x + kWeightPerMB * mb.w +
                      (sm90.activation_in_y ? 0 : kUnpackedPerMB * mb.y) + kLaunch * (sm90.launches - 1) +
                      epilogue_us(p);
  return {convolution + (is_activated || p.has_bias ? pass : 0) + returned, ours,
          "cuDNN's convolution and what follows it are expected to take "};
}

/// The SM90 plan at float32's accuracy.
double ieee_sm90_us(const Problem& p, const Plan& sm90) {
  // Output channels that are no multiple of 8 are stored elsewhere first.
  constexpr double kRaggedOutputs = 10;
  constexpr double kLaunches = 38, kWeightPerMB = 0.7, kTensorPerMB = 0.5, kPackPerMB = 1.5;
  const Traffic mb(p);
  const double beside =
      in_rows(p) ? kPackPerMB * (mb.x + mb.w) : kWeightPerMB * mb.w + kTensorPerMB * (mb.x + mb.y);
  return 1e3 * compared_ms(sm90) * dilated_share(p, sm90) + kLaunches + beside +
         (p.k % kChannelUnit == 0 ? 0 : kRaggedOutputs);
}

Times ieee_times(const Problem& p, const Device& device, const Plan& sm90) {
  if (p.n == 0 || !p.is_ieee()) return {};
  const Traffic mb(p);
  if (!p.tail.norm) return is_near_compared(p) ? times_without_norm(p, mb, sm90) : Times{};
  if (p.tail.returns_conv) return {};
  if (is_plain_matmul(p)) return matmul_times(p, mb);
  if (!is_near_compared(p) || !held_cut(p, p.y_layout, device.compute_capability)) return {};
  return {near_convolution(p, mb) + held_normalization(p, mb), sm90_us(p, sm90),
          "a small block: cuDNN's convolution and one launch after it are expected to take at most "};
}

}  // namespace

bool is_flat_and_long(const Problem& p) {
  constexpr std::int64_t kLong = 5;
  if (p.dtype != DType::kFloat32) return false;
  const Extent3 out = p.out();
  bool is_flat = false, is_long = false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const bool is_voxel = p.in[axis] == 1 && out[axis] == 1;
    is_flat |= is_voxel;
    is_long |= !is_voxel && p.kernel[axis] >= kLong && p.stride[axis] > 1;
  }
  return is_flat && is_long;
}

bool has_quick_deterministic_kernels(const Problem& p) {
  constexpr std::int64_t kStride = 2;
  const std::int64_t stride = longest(p.stride);
  const bool half_width = size_of(p.dtype) == 2;
  if (p.is_ieee()) return is_near_compared(p);
  if (p.groups > 1) return stride == 1 && (half_width || are_groups_of_cudnn(p));
  if (half_width || stride == 1) return true;
  return stride <= kStride && !is_dilated(p) && !is_flat_and_long(p);
}

double library_us_per_million_positions(const Problem& p) {
  if (size_of(p.dtype) != 2) return 175;
  return p.x_layout == Layout::kNDHWC ? 85 : 130;
}

bool library_copies_operands(const Problem& p, const Device& device) {
  if (p.n == 0 || p.tail.returns_conv || p.y_layout != Layout::kNCDHW || !has_compared_copies(p))
    return false;
  // A pointwise convolution copies nothing. Of others cuDNN copies x, w and the result by a launch each, at
  // 0.5 (float32) to 0.8 us per MB; our launch copies x and w, at 0.3 to 0.9.
  return !is_pointwise(p) && !is_one_voxel_product(p) && held_tiles(p, device.compute_capability).has_value();
}

LibraryAdvantage library_advantage(const Problem& p, const Device& device, const Plan& sm90) {
  const bool is_timed = has_times(p);
  const Times times = is_timed ? Times{library_plan_us(p, device), sm90_us(p, sm90),
                                       "cuDNN's convolution and what follows it are expected to take "}
                               : ieee_times(p, device, sm90);
  // Of two that are near, cuDNN's convolution is never far behind a peer that runs it as well: of the blocks
  // that were timed, as many us are lost as by the lesser, on half as many blocks. Of float32's accuracy it
  // is to be ahead in NCDHW, where it takes the host longer.
  constexpr double kNear = 1.05, kAhead = 0.95;
  const double share = is_timed ? kNear : p.tail.norm && !in_rows(p) ? kAhead : 1;
  if (times.library >= share * times.sm90) return {};
  return {concat(times.what, times.library, " us, the SM90 kernel ", times.sm90, " us"), times.library};
}

double sm90_us(const Problem& p, const Plan& sm90) {
  // Of groups, in the median, with a stride and pointwise; of others 1.04.
  constexpr double kOfGroups = 1.2;
  const bool unstrided = p.stride == Extent3{1, 1, 1} && !is_pointwise(p);
  const double groups = p.groups > 1 && !unstrided ? kOfGroups : 1;
  return groups * (p.is_ieee() ? ieee_sm90_us(p, sm90) : sm90_plan_us(p, sm90));
}

bool sm90_spares_host(const Problem& p, const Plan& sm90) {
  // In models, between PyTorch's operators: the library plan 90 us, PyTorch's three calls 90 to 150.
  constexpr double kHostOfLibrary = 90;
  return p.n > 0 && sm90_us(p, sm90) <= kHostOfLibrary;
}

}  // namespace upconv3d
