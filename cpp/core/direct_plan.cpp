// SPDX-License-Identifier: Apache-2.0
#include "core/direct_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>

#include "core/channels.hpp"
#include "core/direct_tiling.hpp"
#include "core/few_channels_layout.hpp"
#include "core/index_math.hpp"
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

/// Whether all that the kernels keep in 32 bits fits: a sample's offsets, and coordinates that may lie
/// outside of the volume by as much as a kernel reaches.
bool fits_32_bits(const Problem& p) {
  if (p.n > kMaxCount || saturating_product(p.c, volume(p.in)) > kMaxCount ||
      saturating_product(p.k, p.positions()) > kMaxCount) {
    return false;
  }
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t reach = saturating_product(p.kernel[axis], p.dilation[axis]);
    if (std::max({reach, p.padding[axis], out[axis], p.stride[axis], p.dilation[axis]}) > kMaxCount / 8) {
      return false;
    }
  }
  return true;
}

double outputs(const Problem& p) {
  return static_cast<double>(p.n * p.k) * static_cast<double>(p.positions());
}

/// Time of both passes and of what merges the moments in between, in ms on an H200.
double estimated_ms(const Problem& p, const DirectTiling& tiling) {
  // Multiplications, and what else a value takes: at 132 multiprocessors of 128 lanes, 1.7 GHz, two of three
  // cycles used.
  constexpr double kPerMs = 132 * 128 * 1.7e6 * 0.66, kPerValue = 5;
  const double per_product = tiling.depthwise ? 1.3 : 1.0 + 12.0 / (1.0 + tiling.vector);
  const double instructions = (p.useful_flops() / 2 * per_product + kPerValue * outputs(p)) / kPerMs;
  const double x = tensor_ms(p, p.c, static_cast<double>(volume(p.in)), size_of(p.dtype));
  const double y = tensor_ms(p, p.k, static_cast<double>(p.positions()), size_of(p.dtype));
  constexpr double kLaunch = 0.004;
  const double output_pass = std::max(instructions, x + 1.2 * y) + kLaunch;
  if (!p.tail.norm) return output_pass;
  return std::max(instructions, x) + kLaunch + kLaunch + output_pass;
}

/// cuDNN's convolution and our passes after it, in ms on an H200.
double library_ms(const Problem& p) {
  constexpr double kLaunch = 0.02;
  const double products = p.useful_flops() / 2;
  double convolution = products / 100e6;
  if (p.groups == 1) {
    // Channels fill its tiles as they do ours.
    const auto padded = [](std::int64_t channels, std::int64_t unit) {
      return static_cast<double>(ceil_div(channels, unit) * unit) / static_cast<double>(channels);
    };
    const double per_ms = size_of(p.dtype) == 2 ? 100e9 : p.precision == Precision::kTF32 ? 60e9 : 15e9;
    convolution = products * padded(p.c, 32) * padded(p.k, 64) / per_ms;
  }
  const double y = tensor_ms(p, p.k, static_cast<double>(p.positions()), size_of(p.dtype));
  return kLaunch + convolution + y + (p.tail.norm ? 3 * y : 0);
}

}  // namespace

namespace {

/// Why the kernels on CUDA cores cannot run, or "".
std::string cuda_cores_obstacle(const Problem& p) {
  if (p.dtype == DType::kFloat64) return "float64 is not computed in float32";
  const std::string tail = tail_obstacle(p.tail);
  if (!tail.empty()) return tail;
  if (!fits_32_bits(p)) {
    return "an extent or the values of a sample exceed the direct kernel's 32-bit coordinates";
  }
  constexpr std::int64_t kMaxStride = 64;
  if (*std::max_element(p.stride.begin(), p.stride.end()) > kMaxStride) {
    return concat("stride ", triple_text(p.stride), " exceeds the direct kernel's ", kMaxStride);
  }
  // Weights of one thread's channels at least, beside the moments' exchange. Half a multiprocessor's.
  constexpr std::int64_t kMaxShared = 100 * 1024;
  const DirectTiling tiling = direct_tiling(p);
  if (tiling.shared_bytes > kMaxShared) {
    return concat("the weights of ", tiling.vector, " output channels take ", tiling.shared_bytes,
                  " bytes, more than the ", kMaxShared, " of shared memory that the direct kernel has");
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
  plan.estimated_direct_ms = estimated_ms(p, tiling);
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

}  // namespace

std::string direct_obstacle(const Problem& p, const Device& device) {
  FewChannelsLayout layout;
  const std::string obstacle = cuda_cores_obstacle(p);
  return obstacle.empty() || few_channels_obstacle(p, device, layout).empty() ? "" : obstacle;
}

Plan direct_plan(const Problem& p, const Device& device) {
  std::optional<Plan> plan;
  if (cuda_cores_obstacle(p).empty()) plan = cuda_cores_plan(p);
  FewChannelsLayout layout;
  if (few_channels_obstacle(p, device, layout).empty()) {
    const Plan few = few_channels_plan(p, layout);
    if (!plan || few.estimated_direct_ms < plan->estimated_direct_ms) plan = few;
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

bool beats_library(const Problem& p, const Plan& direct) {
  return p.n > 0 && direct.estimated_direct_ms < library_ms(p);
}

bool beats_sm90(const Problem& p, const Plan& direct, const Plan& sm90) {
  // What the SM90 plan takes beside its estimate, in ms.
  constexpr double kBeside = 0.025;
  const double ours = sm90.twice ? sm90.estimated_twice_ms : sm90.estimated_stored_ms;
  return p.n > 0 && direct.estimated_direct_ms < ours + kBeside;
}

}  // namespace upconv3d
