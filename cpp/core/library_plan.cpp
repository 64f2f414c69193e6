// SPDX-License-Identifier: Apache-2.0
#include "core/library_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/held_norm.hpp"
#include "core/index_math.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

// Times in us and rates of an H200 with L2 cold, fitted to 30 small convolutions and blocks (perf/NOTES.md,
// "Small blocks in two launches").

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

/// What the SM90 plan takes beside its estimate: 21 to 37 us, of float32 with the packing of its operands.
double sm90_beside_estimate(const Problem& p, const Traffic& mb) {
  if (p.dtype != DType::kFloat32) return 25;
  constexpr double kLaunches = 38, kPackPerMB = 1.5;
  return kLaunches + kPackPerMB * (mb.x + mb.w);
}

/// cuDNN's deterministic convolution, benchmarked. Output channels fill its tiles as they do ours.
double library_convolution(const Problem& p, const Traffic& mb) {
  constexpr double kLaunch = 12, kStrided = 3;
  constexpr double kWeightPerMB = 0.6, kTensorPerMB = 0.25;
  constexpr std::int64_t kTileChannels = 64;
  const double per_gflop = p.dtype == DType::kFloat32 ? 3.5 : 1.6;
  const double padded = static_cast<double>(ceil_div(p.k, kTileChannels) * kTileChannels);
  const double gflops = p.useful_flops() * 1e-9 * padded / static_cast<double>(p.k);
  // PyTorch brings a weight in the other order to that of x at every call.
  constexpr double kCopyLaunch = 4, kCopyPerMB = 7;
  const bool copies_weight = !p.w_channels_last && volume(p.kernel) > 1;
  return kLaunch + (p.stride != Extent3{1, 1, 1} ? kStrided : 0) + per_gflop * gflops + kWeightPerMB * mb.w +
         kTensorPerMB * (mb.x + mb.y) + (copies_weight ? kCopyLaunch + kCopyPerMB * mb.w : 0);
}

/// activation_group_norm_held.
double held_normalization(const Traffic& mb) {
  constexpr double kLaunch = 8.3, kPerMB = 0.6;
  return kLaunch + kPerMB * mb.y;
}

/// Whether the estimates above were compared with measurements of such convolutions.
bool was_compared(const Problem& p) {
  const bool tensor_cores = p.dtype != DType::kFloat32 || p.precision == Precision::kTF32;
  const bool whole = p.c % kChannelUnit == 0 && p.k % kChannelUnit == 0 && p.c >= 32 && p.k >= 16;
  return tensor_cores && whole && p.groups == 1 && p.dilation == Extent3{1, 1, 1} && p.x_aligned &&
         p.x_layout == Layout::kNDHWC && *std::max_element(p.stride.begin(), p.stride.end()) <= 2;
}

}  // namespace

std::string library_advantage(const Problem& p, const Device& device, const Plan& sm90) {
  if (p.n == 0 || p.tail.returns_conv || !was_compared(p)) return "";
  if (!held_tiles(p, p.y_layout, device.compute_capability)) return "";
  constexpr double kLongest = 110;  // of the convolutions that were compared
  const Traffic mb(p);
  const double convolution = library_convolution(p, mb), normalization = held_normalization(mb);
  const double estimate = 1e3 * (sm90.twice ? sm90.estimated_twice_ms : sm90.estimated_stored_ms);
  const double ours = estimate + sm90_beside_estimate(p, mb);
  if (convolution > kLongest || convolution + normalization >= ours) return "";
  return concat("a small block: cuDNN's convolution is expected to take ", convolution,
                " us and one launch after it ", normalization, " us, the SM90 kernel ", ours, " us");
}

}  // namespace upconv3d
