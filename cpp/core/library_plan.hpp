// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where the library plan is expected to be quicker than the SM90 kernels: by plan_times.hpp, and at
/// float32's accuracy by what was compared there.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Why the library plan is expected to be quicker than another, or "", and what it is then expected to take.
struct LibraryAdvantage {
  std::string reason;
  double us = 0;
};

/// \param sm90 the SM90 plan
LibraryAdvantage library_advantage(const Problem& problem, const Device& device, const Plan& sm90);

/// Expected time of all of the SM90 plan's launches, in us.
double sm90_us(const Problem& problem, const Plan& sm90);

/// Whether the SM90 plan is expected to take the device no longer than PyTorch's convolution, with what goes
/// before and after it, takes the host: who waits for the host is no slower with it, however quick cuDNN is.
bool sm90_spares_host(const Problem& problem, const Plan& sm90);

/// What cuDNN's convolution without groups takes at least for a million positions of its result, in us on an
/// H200: channels fill its tiles as they do ours, and few of them take as long as 32.
double library_us_per_million_positions(const Problem& problem);

/// Whether cuDNN's deterministic kernels take far more than the estimates say: under "tf32", where one axis
/// has a single voxel, of kernels of 5 and more with a stride along another, convolutions took 63 and 297 us,
/// and a block 289, where 31 to 36 were expected (perf/results/h200_peers_found.txt, parts 3 and 5).
bool is_flat_and_long(const Problem& problem);

/// Whether cuDNN's deterministic kernels take no longer than any of its kernels, within an eighth, by what
/// was timed (perf/NOTES.md, "Deterministic kernels of cuDNN"): of others they took up to 370 times as long.
bool has_quick_deterministic_kernels(const Problem& problem);

/// Whether a library plan in NCDHW is expected to be quicker with x and w copied channels last first, and the
/// result transposed by the launch that normalizes it, than with cuDNN's own copies.
bool library_copies_operands(const Problem& problem, const Device& device);

/// Whether this plan does that.
inline bool copies_operands(const Problem& problem, const Plan& plan) {
  return plan.algorithm == Algorithm::kCudaLibrary && plan.conv_layout == Layout::kNDHWC &&
         problem.y_layout == Layout::kNCDHW;
}

}  // namespace upconv3d
