// SPDX-License-Identifier: Apache-2.0
/// \file
/// The decision as data: which algorithm, which compiled kernel, how much scratch memory, and why.
///
/// before(conv) and after() are those of the problem's tail (core/tail.hpp); of ReLU before a group
/// norm, relu(conv) and nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

enum class Algorithm : std::uint8_t {
  kSm90ImplicitGemm,  // our TMA + wgmma convolution, whose epilogue applies before() and takes moments
  kSm80ImplicitGemm,  // our cp.async + mma.sync convolution with ReLU + moments, then our normalize kernels
  kCudaDirect,        // our convolution of few inputs per output, computed for its moments, and normalized
  kCudaCol2im,        // our matrix product of weight and inputs and a gather, then as the library plan
  kCudaLibrary,       // PyTorch's convolution, then our moments and normalize kernels
  kCpuLibrary,        // PyTorch's convolution, then our fused ReLU + GroupNorm on the host
};

const char* name(Algorithm algorithm);

/// One compiled variant of a convolution kernel, as listed in cpp/instances.cmake.
struct ConvInstance {
  const char* name;     // "conv_transpose_relu_group_norm_sm90_bf16x1_bf16_128x256"
  int arch;             // 90: conv_transpose_relu_group_norm_sm90, conv_transpose_twice_sm90 or
                        // conv_transpose_held_sm90; 80: conv_transpose_relu_moments_sm80
  DType operand;        // what the tensor cores multiply: kBFloat16 or kFloat16
  int products;         // 1, or 3 for the hi/lo split that carries float32's accuracy
  DType output;         // dtype of y
  int stored_bits;      // of a value of before(conv) until it is normalized
  int block_channels;   // output channels of a tile
  int block_positions;  // output positions of a tile
  int block_inputs;     // SM90: input channels of a k-block, kBlockInputs or half of it
  bool twice;           // conv_transpose_twice_sm90: nothing is stored but the result
  bool held;            // conv_transpose_held_sm90: neither is it, as a rule
  bool compiled;        // false in a build without CUDA, or without an arch it runs on
};

/// Output positions of one consumer warpgroup of an SM90 instance. Tiles of 128 channels give both warpgroups
/// all positions, tiles of 64 channels half of them each.
inline std::int64_t warpgroup_positions(const ConvInstance& instance) {
  return instance.block_channels == 64 ? instance.block_positions / 2 : instance.block_positions;
}

/// Parts in which an SM90 tile is staged on its way to memory, one after the other: the operands need the
/// shared memory more.
constexpr int stage_rounds(int block_channels, int block_positions, int stored_bits) {
  constexpr int kMaxStagedBytes = 64 * 1024;
  return block_channels * block_positions * stored_bits / 8 > kMaxStagedBytes ? 2 : 1;
}

/// Output positions that one partial moment of an SM90 instance covers: those that a warpgroup stages at
/// once.
inline std::int64_t moment_positions(const ConvInstance& instance) {
  return warpgroup_positions(instance) /
         stage_rounds(instance.block_channels, instance.block_positions, instance.stored_bits);
}

/// Neighbouring channels of one norm group that share a partial moment in the SM90 kernel, as a power of two:
/// at most the 64 channels of a consumer warpgroup, and all of one convolution group.
inline int moment_granule_shift(const Problem& problem) {
  constexpr int kMaxShift = 6;
  const auto norm_channels = static_cast<std::uint64_t>(problem.k / problem.num_groups);
  const auto conv_channels = static_cast<std::uint64_t>(group_outputs(problem));
  return std::min({kMaxShift, std::countr_zero(norm_channels), std::countr_zero(conv_channels)});
}

/// Every variant of instances.cmake, compiled or not, in the order listed there.
const std::vector<ConvInstance>& conv_instances();

/// What selection needs to know of the device. Plain numbers, so that tests need no GPU.
struct Device {
  bool is_cuda = false;
  int compute_capability = 0;  // major*10 + minor
  int sm_count = 0;
  int max_threads = 1;  // host threads, for the CPU plan
  // On CUDA, a plan that must run: "sm80", "sm90", one of the latter's three kernels "stored", "twice" or
  // "held", "direct", "col2im" or "library"; "" leaves the choice to select_plan.
  std::string forced_plan = "";
  // Whether a small block is to spare the host rather than the device, as where an eager model waits for the
  // host: the SM90 plan launches two kernels where PyTorch's convolution runs through all of PyTorch.
  bool spares_host = false;
};

struct Plan {
  Algorithm algorithm = Algorithm::kCpuLibrary;
  std::string reason;                    // why this algorithm and not a quicker one
  std::optional<ConvInstance> instance;  // kSm90ImplicitGemm and kSm80ImplicitGemm only
  Layout conv_layout = Layout::kNCDHW;   // memory format in which the convolution runs and stores
  DType activation = DType::kFloat32;    // dtype of before(conv) between convolution and normalize
  bool pack_x = false;                   // x is copied into operand form first (layout, dtype, channels or
                                         // alignment)
  bool activation_in_y = false;          // before(conv) is stored in y's memory, and normalized there
  bool normalizes = false;               // SM90: the convolution's kernel normalizes too
  bool keeps_activation = false;         // SM90: before(conv) and its moments are kept for the backward
  bool keeps_conv = false;               // library and col2im: the backward reads the convolution, without
                                         // bias unless it is what the call returned
  bool own_convolution = false;          // library: of convolution_alone(problem), by the SM90 plan
  bool one_voxel = false;                // library: the convolution is a matrix product (one_voxel.hpp)
  bool adds_skip_first = false;          // library: what follows it is that of after_skip(problem)
  bool keeps_sum = false;                // library: the backward reads the sum of convolution and skip
  bool instead_of_sm90 = false;          // library and col2im: though it could run (library_plan.hpp)
  bool linear = false;                   // SM90: no normalization follows, and so no moments are taken
  bool w_in_place = false;               // SM90: w is read as it lies, [C,T,R,S,K], and not packed
  bool piles_views = false;              // computed twice: TwiceLayout::pile is 2
  std::int64_t tile_positions = 0;       // positions that one partial moment covers (moment_positions)
  int split_axes = 0;                    // axes along which our kernels cut borders off (border_slabs)
  bool share_taps = false;               // SM90: a load of x serves several taps (tap_sharing_slabs)
  bool pair_phases = false;              // SM90: two phases share tiles (phase_pairs.hpp)
  int leaving_blocks = 0;                // SM90: that end early, so that normalizing begins beside the
                                         // convolution
  int launches = 1;                      // SM90: of a stored convolution, among which its slabs are divided
  std::int64_t window_tiles = 0;         // SM90: position tiles of a window of the launch order, 0: none
  bool twice = false;                    // SM90: the convolution is computed for its moments, and once more,
                                         // or, where linear, once; by conv_transpose_twice_sm90
  double scheduled_multiply_ms = 0.0;    // SM90: the convolution alone, stored (sm90_schedule.hpp)
  bool held = false;              // SM90: the convolution is held in shared memory until it is normalized, by
                                  // conv_transpose_held_sm90
  double expected_held_us = 0.0;  // SM90: of that kernel (held_plan.hpp)
  // SM90: by whose estimate plans are compared where plan_times.hpp has no times
  std::optional<ConvInstance> compared_instance;
  double estimated_stored_ms = 0.0;  // SM90: that estimate (sm90_compared.hpp), without packing, before(conv)
                                     // stored in between; 0 where that cannot run
  double estimated_twice_ms = 0.0;   // the same by that kernel; 0 where that cannot run
  bool few_channels = false;         // direct: on tensor cores, not on CUDA cores
  double estimated_direct_ms = 0.0;  // direct: all launches
  double expected_us = 0.0;          // col2im and library: all launches, where they were compared; else 0
  double saves_us = 0.0;             // col2im: of what the plan is expected to take that it runs in place of
  std::int64_t tiles = 0;            // partial moments per sample and channel (SM90: and granule of them)
  std::string channels;              // how channels are padded or grouped, "" where they lie as they are
  std::vector<std::string> stages;   // kernels in launch order, by name
  std::int64_t workspace_bytes = 0;  // scratch beside y
};

/// Chooses the plan. A pure function of its arguments.
///
/// \param instances the variants that may be named; only those with `compiled` set are.
/// \throws RuleViolation or ValueViolation (core/errors.hpp) where the problem breaks a rule, too many
/// elements for any plan to index among them; or where device.forced_plan is unknown or cannot run.
Plan select_plan(const Problem& problem, const Device& device,
                 const std::vector<ConvInstance>& instances = conv_instances());

/// The plan of a forward pass that a backward pass will follow: as select_plan's, but where that is one of
/// inference alone (direct, col2im) another, where it is the SM90 plan, before(conv) is stored beside y and
/// kept, and where it is the library plan, the convolution is.
Plan select_training_plan(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances = conv_instances());

/// Whether before(conv) is stored in 16 bits with a step per channel and partial moment, not as
/// plan.activation.
inline bool stores_steps(const Plan& plan) {
  return plan.instance && plan.instance->stored_bits < 8 * size_of(plan.instance->output);
}

/// The estimate by which an SM90 plan is compared with others where plan_times.hpp has no times.
inline double compared_ms(const Plan& sm90) {
  return sm90.twice ? sm90.estimated_twice_ms : sm90.estimated_stored_ms;
}

/// Several lines for people: algorithm, reason, kernel, stages, workspace.
std::string describe(const Plan& plan);

}  // namespace upconv3d
