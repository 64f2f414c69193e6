// SPDX-License-Identifier: Apache-2.0
/// \file
/// The part of select_plan that knows the SM90 kernels: what they can run, on which variant, cut how, stored
/// or computed twice.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr int kHopper = 90;  // compute capability, major*10 + minor

/// Why the SM90 kernels cannot run, or "" with `instance` set.
std::string sm90_obstacle(const Problem& problem, const Device& device,
                          const std::vector<ConvInstance>& instances, std::optional<ConvInstance>& instance);

/// How the output is cut into slabs: plan_slabs.
struct Cut {
  int split_axes = 0;
  bool share_taps = false;
};

/// The cut with the least estimated time; one slab unless that gains.
Cut cheapest_cut(const Problem& problem, const ConvInstance& instance, int sm_count, bool may_share = true);

/// Whether the kernel in its linear mode can store the output where it belongs: in rows of whole 16-byte
/// chunks of channels, or of positions that no slab parts but between planes.
bool stores_in_place(const Problem& problem, const Cut& cut);

/// The best cut that stores in place, if there is one: unpacking costs more than cuts along height and width
/// save.
std::optional<Cut> cheapest_cut_in_place(const Problem& problem, const ConvInstance& instance, int sm_count);

/// Whether the linear mode's epilogue applies the activation; else it is a pass of its own.
inline bool is_in_epilogue(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu;
}

/// Estimated time of the multiplication alone, cut like that.
double estimated_multiply_ms(const Problem& problem, const ConvInstance& instance, const Cut& cut,
                             int sm_count);

/// Time in ms that an H200 takes to read or write [n,channels,positions] of `bytes` each.
double tensor_ms(const Problem& problem, std::int64_t channels, double positions, std::int64_t bytes);

/// What blocks close to the choice took of a stored estimate (perf/NOTES.md, "Stored or computed twice").
double seen_of_stored(const ConvInstance& stored);

/// The plan that runs `instance`, where there is no obstacle: before(conv) is stored, then
/// normalized where that is due.
Plan sm90_plan(const Problem& problem, const Device& device, const ConvInstance& instance);

/// Why the convolution cannot be computed twice, or "". In that case `plan`, which stores before(conv), gets
/// the estimate, and becomes one that computes twice where that is quicker, or device.forced_plan asks for
/// it, or y is NDHWC and the stored plan takes several launches.
std::string consider_twice(const Problem& problem, const Device& device,
                           const std::vector<ConvInstance>& instances, Plan& plan);

}  // namespace upconv3d
