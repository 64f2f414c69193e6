// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "core/col2im_plan.hpp"
#include "core/direct_plan.hpp"
#include "core/errors.hpp"
#include "core/extents.hpp"
#include "core/group_times.hpp"
#include "core/held_norm.hpp"
#include "core/held_plan.hpp"
#include "core/index_math.hpp"
#include "core/library_plan.hpp"
#include "core/one_voxel.hpp"
#include "core/plan.hpp"
#include "core/plan_times.hpp"
#include "core/separate_tail.hpp"
#include "core/slab_launches.hpp"
#include "core/sm80_plan.hpp"
#include "core/sm90_plan.hpp"
#include "core/text.hpp"
#include "core/twice_transposed.hpp"

namespace upconv3d {
namespace {

/// Whether the forced plan is the SM90 plan, by its name or by that of one of its kernels.
bool is_sm90(const std::string& forced_plan) {
  return forced_plan == "sm90" || forced_plan == "stored" || forced_plan == "twice" || forced_plan == "held";
}

void require_known(const std::string& forced_plan) {
  constexpr const char* kKnown[] = {"",     "sm80",   "sm90",   "stored", "twice",
                                    "held", "direct", "col2im", "library"};
  if (std::find(std::begin(kKnown), std::end(kKnown), forced_plan) != std::end(kKnown)) return;
  throw ValueViolation(
      concat("upconv3d: UPCONV3D_PLAN must name a plan for CUDA devices; got \"", forced_plan,
             "\". Set it to sm80, sm90, stored, twice, held, direct, col2im or library, or unset it."));
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

/// Why a plan that may run is not worth it, or "": PyTorch's convolution and our passes after it are expected
/// to be quicker by far, as where samples of a few positions leave most of every tile empty.
/// \param keeps_activation as for choose
std::string sm90_disadvantage(const Problem& p, const Plan& plan, bool keeps_activation) {
  // Only where tiles are mostly empty, or there are more phases than one launch stores, which were hardly
  // compared: of strides and few channels the estimate of cuDNN below is up to 5 times too low.
  constexpr double kLeastFilled = 0.25;
  const double positions = static_cast<double>(p.positions());
  const double filled = positions / static_cast<double>(plan.tiles * plan.tile_positions);
  if (p.n == 0 || (filled >= kLeastFilled && slab_launches(p) == 1)) return "";
  // Matmul rates of an H200 in FLOP/ms and the share of them that cuDNN reached at stride 1; what its
  // launches and ours take at least; and by how much the estimate must be ahead to count.
  const double rate = size_of(p.dtype) == 2 ? 679e9 : p.precision == Precision::kTF32 ? 349e9 : 51e9;
  constexpr double kShare = 0.4, kLaunchesMs = 0.02, kAhead = 3;
  const double library = p.useful_flops() / (kShare * rate) +
                         tensor_ms(p, p.c, static_cast<double>(volume(p.in)), size_of(p.dtype)) +
                         3 * tensor_ms(p, p.k, positions, size_of(p.dtype)) + kLaunchesMs;
  const double ours = compared_ms(plan);
  // Of long strides, whose zeros cuDNN multiplies, it took 115 to 250 us per million positions of up to eight
  // output channels, of 16 and 20 twice that (perf/NOTES.md, "What the limits of plans cost").
  constexpr std::int64_t kLongStride = 3;
  constexpr double kOfZeros = 150e-9, kOutputs = 8, kMostOutputs = 24;  // ms per position
  const bool is_long =
      longest(p.stride) >= kLongStride && volume(p.kernel) > 1 && p.groups == 1 && !keeps_activation;
  const double outputs = std::clamp(static_cast<double>(p.k), kOutputs, kMostOutputs) / kOutputs;
  const double zeros = is_long ? kOfZeros * outputs * static_cast<double>(p.n) * positions : 0;
  if (ours <= std::max(kAhead * library, zeros)) return "";
  return concat("tiles are filled to ", 100 * filled, "% and estimated at ", ours,
                " ms, where cuDNN's convolution is expected to need ", std::max(library, zeros),
                " ms with our normalization");
}

/// Whether the SM80 kernel is expected quicker than PyTorch's convolution with our kernels after it. Not on
/// Hopper, where cuDNN has wgmma and this kernel has not.
bool prefers_sm80(const Device& device) {
  return device.compute_capability != kHopper;
}

/// Whether group_norm_backward, whose counters are 32-bit, can read what this plan would keep.
bool backward_can_count(const Problem& p, const Plan& plan) {
  constexpr std::int64_t kEnd = std::numeric_limits<std::int32_t>::max();
  return p.positions() < kEnd / 2 && saturating_product(p.n, p.k) <= kEnd &&
         saturating_product(p.n, plan.tiles) <= kEnd;
}

/// From one channel to one at float32's accuracy, of stride 1, cuDNN has a quick kernel: 16 of 32^3, k3, took
/// 37 us with what follows, the direct plan 124 and col2im 84.
bool is_one_channel_of_ieee(const Problem& p) {
  return p.is_ieee() && p.c == 1 && p.k == 1 && p.stride == Extent3{1, 1, 1};
}

/// Whether `direct` is expected to be quicker than the SM90 plan `sm90`, or, without one, than the library
/// plan.
/// \param least of a block that has times, what the quicker of those takes, in us
bool direct_is_quicker(const Problem& p, const Device& device, const Plan& direct, const Plan* sm90,
                       double least) {
  const bool is_timed = has_group_times(p) || (has_plan_times(p) && device.compute_capability == kHopper);
  if (is_timed) return direct_us(p, device, direct) < least;
  return sm90 ? beats_sm90(p, device, direct, *sm90)
              : !is_one_channel_of_ieee(p) && beats_library(p, device, direct);
}

/// The direct plan where it is expected to be quicker.
/// \param sm90, least as for direct_is_quicker
/// \param reason why another plan does not run; that of the direct plan, or why it does not either, is added
std::optional<Plan> choose_direct(const Problem& p, const Device& device, const Plan* sm90, double least,
                                  std::string& reason) {
  if (!device.forced_plan.empty()) return std::nullopt;
  const std::string separator = reason.empty() ? "" : "; ";
  const std::string obstacle = direct_obstacle(p, device);
  if (!obstacle.empty()) {
    reason += concat(separator, "not the direct kernel: ", obstacle);
    return std::nullopt;
  }
  Plan plan = direct_plan(p, device);
  if (!direct_is_quicker(p, device, plan, sm90, least)) return std::nullopt;
  plan.reason = concat(reason, separator, plan.reason);
  return plan;
}

/// The direct plan, asked for by name.
Plan forced_direct(const Problem& p, const Device& device) {
  require_no_obstacle(p, device.forced_plan, direct_obstacle(p, device));
  return direct_plan(p, device);
}

/// The col2im plan, asked for by name.
Plan forced_col2im(const Problem& p, const Device& device, bool for_training) {
  require_no_obstacle(p, device.forced_plan, col2im_obstacle(p, device));
  return cuda_col2im_plan(p, device, "UPCONV3D_PLAN=" + device.forced_plan, for_training);
}

/// Why the library plan is to train a block that the SM90 plan could, or nothing: of a stride's phases with
/// at most 64 positions per sample, tiles are half empty in the forward and in grad_x. In 16 bit and
/// channels_last_3d such steps took 0.63 to 0.99 of the SM90 plan's where the forward saves so much; a short
/// one 1.2, which waited for its host, and under "tf32" they took 1.4 (perf/NOTES.md, "One voxel, and half
/// tiles").
LibraryAdvantage training_advantage(const Problem& p, const Device& device, const Plan& sm90) {
  constexpr double kPositions = 64, kLeastUs = 25;
  const bool is_kind = size_of(p.dtype) == 2 && p.y_layout == Layout::kNDHWC &&
                       p.stride != Extent3{1, 1, 1} &&
                       static_cast<double>(p.positions()) <= kPositions * volume_of_any(p.stride);
  if (!is_kind || (device.spares_host && sm90_spares_host(p, sm90))) return {};
  const LibraryAdvantage advantage = library_advantage(p, device, sm90);
  const bool saves = !advantage.reason.empty() && sm90_us(p, sm90) - advantage.us >= kLeastUs;
  return saves ? advantage : LibraryAdvantage{};
}

/// What is expected to be quicker than the SM90 plan, if anything and none is asked for.
std::optional<Plan> instead_of_sm90(const Problem& p, const Device& device, const Plan& sm90,
                                    bool keeps_activation) {
  if (!device.forced_plan.empty()) return std::nullopt;
  LibraryAdvantage advantage;
  if (keeps_activation || !has_times(p)) advantage.reason = sm90_disadvantage(p, sm90, keeps_activation);
  const bool is_slow = !advantage.reason.empty();
  // A backward pass reads what the SM90 plan keeps, or PyTorch's convolution.
  if (keeps_activation && !is_slow) advantage = training_advantage(p, device, sm90);
  if (!keeps_activation) {
    const bool spares_host = device.spares_host && sm90_spares_host(p, sm90);
    if (!is_slow && !spares_host) advantage = library_advantage(p, device, sm90);
    const bool has_library = !advantage.reason.empty();
    // Of many outputs it has a launch more than the SM90 plan. Without a norm and without times it was
    // compared with that alone.
    const bool compared = has_times(p) || is_slow || !has_library || p.tail.norm;
    const bool considers_direct = compared && (!spares_host || !has_many_outputs_of_few_inputs(p, device));
    if (considers_direct) {
      const double least = has_library ? advantage.us : sm90_us(p, sm90);
      std::string reason = is_slow ? "not the SM90 kernel: " + advantage.reason : "";
      if (auto direct = choose_direct(p, device, is_slow ? nullptr : &sm90, least, reason)) return direct;
    }
  }
  if (advantage.reason.empty()) return std::nullopt;
  Plan library = cuda_library_plan(p, device, "not the SM90 kernel: " + advantage.reason, keeps_activation);
  library.instead_of_sm90 = !is_slow;
  library.expected_us = advantage.us;
  return library;
}

/// The SM90 plan, of whichever kernel; where none can run, nothing and why.
///
/// \param keeps_activation as for choose
std::optional<Plan> sm90_choice(const Problem& problem, const Device& device,
                                const std::vector<ConvInstance>& instances, bool keeps_activation,
                                std::string& obstacle) {
  const std::string& forced = device.forced_plan;
  std::optional<ConvInstance> instance;
  obstacle = sm90_obstacle(problem, device, instances, keeps_activation, instance);
  if (!instance) return std::nullopt;
  Plan plan = sm90_plan(problem, device, *instance, instances);
  const bool has_backward = problem.tail.norm && !problem.tail.returns_conv;
  // Who asks for the plan gets it, to compare.
  const bool trains = plan.launches == 1 || !forced.empty();
  if (keeps_activation && has_backward && trains && backward_can_count(problem, plan)) {
    plan.keeps_activation = true;
    plan.activation_in_y = false;
    if (forced == "twice" || forced == "held")
      plan.reason += "; stored, because the backward reads what is stored";
    return plan;
  }
  std::string twice_obstacle = consider_twice(problem, device, instances, plan);
  if (const auto transposed = twice_transposed_plan(problem, device, instances, plan)) {
    plan = *transposed;
    twice_obstacle = "";
  }
  const std::string held_obstacle =
      keeps_activation ? "a backward pass follows" : consider_held(problem, device, instances, plan);
  if (keeps_activation && has_backward && !trains) {
    obstacle = concat("a backward pass follows, and of more than ", kMaxSlabs,
                      " phases it was not compared with cuDNN's");
  } else if (forced == "twice") {
    obstacle = twice_obstacle;
  } else if (forced == "held") {
    obstacle = held_obstacle;
  }
  if (!obstacle.empty()) return std::nullopt;
  return plan;
}

/// What a plan is expected to take, in us: of the library plan, where nothing is known of it, what it takes
/// at least.
double expected_us(const Problem& p, const Device& device, const Plan& plan) {
  switch (plan.algorithm) {
    case Algorithm::kSm90ImplicitGemm:
      return sm90_us(p, plan);
    case Algorithm::kCudaDirect:
      return direct_us(p, device, plan);
    default:
      return has_plan_times(p) ? library_plan_us(p, device) : least_library_us(p);
  }
}

/// By which the estimate of col2im is to be ahead of that of `chosen`.
double margin_of_col2im(const Problem& p, const Plan& chosen) {
  constexpr double kTimed = 1.1, kAhead = 1.05, kHigh = 1.15;
  // Products of so many bytes are to be worth them.
  constexpr std::int64_t kManyBytes = 128'000'000;
  constexpr double kMemory = 1.3;
  if (ColumnsLayout(p).values() > kManyBytes / static_cast<std::int64_t>(sizeof(float))) return kMemory;
  if (has_plan_times(p)) return kTimed;
  if (chosen.algorithm != Algorithm::kCudaLibrary) return kAhead;
  if (chosen.expected_us > 0) return kHigh;  // the estimate of cuDNN is on the high side
  // Of fewer inputs cuDNN took 0.9 to 1.5 of least_library_us, and down to half of it in float32 of stride 1
  // and without overlaps, where strides of 2 were timed.
  constexpr std::int64_t kInputs = 16, kStride = 2;
  constexpr double kHalf = 1.9;
  if (p.c >= kInputs) return 1.0;
  const std::int64_t stride = longest(p.stride);
  const bool is_apart = p.kernel == p.stride && p.dilation == Extent3{1, 1, 1};
  const bool is_unstrided_float = p.dtype == DType::kFloat32 && stride == 1;
  return is_unstrided_float || (is_apart && stride <= kStride) ? kHalf : kHigh;
}

/// Whether col2im's convolution may be kept for a backward pass where the chosen plan would keep something:
/// in the place of PyTorch's, and of few outputs in that of what the SM90 plan keeps, whose gradients are
/// computed among 64 channels then, in up to twice cuDNN's time (perf/NOTES.md, "Training few outputs").
bool trains_by_col2im(const Problem& p, const Device& device, const Plan& chosen) {
  if (!p.tail.norm || p.tail.returns_conv) return false;  // not compared
  if (chosen.keeps_conv) return chosen.algorithm == Algorithm::kCudaLibrary;
  // PyTorch's convolution_backward takes the host some 150 us longer, so shorter blocks stay.
  constexpr std::int64_t kFewOutputs = 8;
  constexpr double kLeastUs = 100;
  return chosen.keeps_activation && keeps_library_conv(p) && !p.is_ieee() && p.k <= kFewOutputs &&
         expected_us(p, device, chosen) >= kLeastUs;
}

/// The col2im plan, where it is expected to be quicker than the one that was chosen.
std::optional<Plan> choose_col2im(const Problem& p, const Device& device, const Plan& chosen,
                                  bool for_training) {
  if (for_training && !trains_by_col2im(p, device, chosen)) return std::nullopt;
  if (!device.forced_plan.empty() || !col2im_obstacle(p, device).empty()) return std::nullopt;
  if (is_one_voxel_product(p)) return std::nullopt;
  // Its three launches take the host longer than the SM90 plan's two. At float32's accuracy that one takes
  // the device longer than was compared with the host.
  const bool spares_host = device.spares_host && !p.is_ieee();
  if (spares_host && chosen.algorithm == Algorithm::kSm90ImplicitGemm && sm90_spares_host(p, chosen)) {
    return std::nullopt;
  }
  // As it lies, a product is all there is to cuDNN's pointwise convolution. With a stride it was not compared
  // at float32's accuracy.
  const bool is_product = volume(p.kernel) == 1 && (p.stride == Extent3{1, 1, 1} || p.is_ieee());
  const bool cudnn_is_quick = is_product || is_one_channel_of_ieee(p);
  if (chosen.algorithm == Algorithm::kCudaLibrary && cudnn_is_quick) return std::nullopt;
  const double col2im = col2im_us(p, device);
  const double other = chosen.expected_us > 0 ? chosen.expected_us : expected_us(p, device, chosen);
  if (margin_of_col2im(p, chosen) * col2im >= other) return std::nullopt;
  Plan plan =
      cuda_col2im_plan(p, device,
                       concat("a matrix product and a gather, with what follows, are expected to take ",
                              col2im, " us, ", name(chosen.algorithm), " ", other, " us"),
                       for_training);
  plan.instead_of_sm90 = chosen.instead_of_sm90 || chosen.algorithm == Algorithm::kSm90ImplicitGemm;
  plan.expected_us = col2im;
  plan.saves_us = other - col2im;
  return plan;
}

Plan choose(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances,
            bool keeps_activation);

/// The SM90 plan of the convolution alone, where the library plan is to begin with it: where that plan would
/// run it alone and, if a norm follows, so not in most small blocks, would run that too.
std::optional<Plan> own_convolution(const Problem& p, const Device& device,
                                    const std::vector<ConvInstance>& instances) {
  Problem normalized = p;
  normalized.tail = make_tail("norm_act", true, "none", 0.0, false);
  // Without a norm, who asks for a plan of the forward pass asks nothing of the backward's.
  const std::string& forced = device.forced_plan;
  if (!p.tail.norm && !forced.empty() && forced != "sm90" && forced != "stored") return std::nullopt;
  const auto is_ours = [](const Plan& plan) { return plan.algorithm == Algorithm::kSm90ImplicitGemm; };
  const Plan alone = choose(convolution_alone(p), device, instances, false);
  bool is_own = is_ours(alone);
  if (is_own && p.tail.norm) {
    // That one of its kernels holds a small block tells nothing of a convolution that is stored.
    std::vector<ConvInstance> storing = instances;
    std::erase_if(storing, [](const ConvInstance& instance) { return instance.held; });
    const Plan whole = choose(normalized, device, storing, false);
    // The direct kernel, which adds no skip, was compared with the SM90 plan, not with cuDNN's convolution.
    const bool instead = whole.algorithm == Algorithm::kCudaDirect;
    is_own = is_ours(whole) || (instead && has_many_outputs_of_few_inputs(normalized, device));
  }
  return is_own ? std::optional<Plan>(alone) : std::nullopt;
}

/// Lets the library plan begin with `own`, if it is to.
void begin_with(const Problem& p, const std::optional<Plan>& own, Plan& plan) {
  plan.own_convolution = own.has_value();
  if (own) {
    plan.conv_layout = p.y_layout;
    plan.reason += concat("; its convolution is that of ", name(own->algorithm), ": ", own->reason);
  }
  plan.stages = own ? own->stages : std::vector<std::string>{"aten::convolution"};
  if (copies_operands(p, plan)) plan.stages.insert(plan.stages.begin(), "channels_last_copies");
}

/// What the library plan makes of a skip that is added before a norm: a launch of its own, where a backward
/// pass will begin with the sum, or where all that follows it is then one launch. Without a norm the pass
/// that activates adds it too.
Plan with_skip(const Problem& p, const Device& device, const std::vector<ConvInstance>& instances,
               bool for_training, Plan plan) {
  if (!p.tail.has_skip || p.dtype == DType::kFloat64 || p.n == 0) return plan;
  begin_with(p, own_convolution(p, device, instances), plan);
  plan.keeps_sum = for_training;
  plan.activation_in_y = plan.conv_layout == p.y_layout && !p.tail.returns_conv && !for_training;
  plan.adds_skip_first =
      p.tail.norm && (for_training || held_cut(after_skip(p), plan.conv_layout, device.compute_capability));
  if (plan.adds_skip_first) plan.stages.emplace_back("add");
  add_tail_stages(plan.adds_skip_first ? after_skip(p) : p, device, plan);
  return plan;
}

/// Without a norm the convolution is kept, or its sum with a skip, and what follows is one launch. (Where the
/// backward begins with the result, the forward pass is that of inference.)
Plan training_without_norm(const Problem& p, const Device& device,
                           const std::vector<ConvInstance>& instances) {
  Plan plan = cuda_library_plan(p, device, "the backward pass begins with what is activated", true);
  if (p.n == 0 || p.tail.has_skip) return with_skip(p, device, instances, true, plan);
  begin_with(p, own_convolution(p, device, instances), plan);
  add_tail_stages(p, device, plan);
  return plan;
}

/// \param keeps_activation whether a backward pass will want before(conv), or the convolution
Plan choose(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances,
            bool keeps_activation) {
  validate(problem);
  if (!device.is_cuda) return cpu_library_plan(problem, device);
  const std::string& forced = device.forced_plan;
  require_known(forced);
  if (keeps_activation && problem.tail.returns_conv && keeps_library_conv(problem)) {
    // Whichever plan computed it: the forward pass of such a call is that of inference.
    return cuda_library_plan(problem, device, "the backward pass begins with the returned convolution", true);
  }
  if (keeps_activation && !problem.tail.norm && problem.dtype != DType::kFloat64) {
    return training_without_norm(problem, device, instances);
  }
  if (forced.empty() && is_one_voxel_product(problem)) {
    Plan plan = cuda_library_plan(
        problem, device, "one voxel per sample: the convolution is a matrix product", keeps_activation);
    plan.one_voxel = true;
    plan.instead_of_sm90 = device.compute_capability == kHopper && problem.dtype != DType::kFloat64;
    return with_skip(problem, device, instances, keeps_activation, plan);
  }
  if (forced == "direct") return forced_direct(problem, device);
  if (forced == "col2im") return forced_col2im(problem, device, keeps_activation);
  std::string reason = forced.empty() ? "" : "UPCONV3D_PLAN=" + forced;
  if (forced.empty() || is_sm90(forced)) {
    std::string obstacle;
    const std::optional<Plan> plan = sm90_choice(problem, device, instances, keeps_activation, obstacle);
    if (!forced.empty()) require_no_obstacle(problem, forced, obstacle);
    if (plan) return instead_of_sm90(problem, device, *plan, keeps_activation).value_or(*plan);
    reason = concat("not the SM90 kernel: ", obstacle);
  }
  // The SM80 kernel keeps nothing, so that a backward pass would compute the convolution once more.
  const bool kept_elsewhere = keeps_activation && keeps_library_conv(problem);
  if (kept_elsewhere && forced.empty() && prefers_sm80(device)) {
    reason += "; not the SM80 kernel: a backward pass follows";
  } else if (forced == "sm80" || (forced.empty() && prefers_sm80(device))) {
    std::optional<ConvInstance> instance;
    const std::string obstacle = sm80_obstacle(problem, device, instances, instance);
    if (!forced.empty()) require_no_obstacle(problem, forced, obstacle);
    if (instance) return sm80_plan(problem, device, *instance);
    reason += concat("; not the SM80 kernel: ", obstacle);
  }
  if (!keeps_activation) {
    const double least = has_times(problem) ? library_plan_us(problem, device) : 0;
    if (const auto direct = choose_direct(problem, device, nullptr, least, reason)) return *direct;
  }
  return with_skip(problem, device, instances, keeps_activation,
                   cuda_library_plan(problem, device, reason, keeps_activation));
}

}  // namespace

Plan select_plan(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances) {
  const Plan chosen = choose(problem, device, instances, false);
  return device.is_cuda ? choose_col2im(problem, device, chosen, false).value_or(chosen) : chosen;
}

Plan select_training_plan(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances) {
  const Plan chosen = choose(problem, device, instances, true);
  return device.is_cuda ? choose_col2im(problem, device, chosen, true).value_or(chosen) : chosen;
}

}  // namespace upconv3d
