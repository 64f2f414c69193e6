// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where the library plan is expected to be quicker than the SM90 kernels.
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

/// Where PyTorch's convolution and one launch after it are expected to be quicker than the SM90 plan: of
/// small blocks, whose time is mostly what that plan takes beside its estimate.
/// \param sm90 the SM90 plan
LibraryAdvantage library_advantage(const Problem& problem, const Device& device, const Plan& sm90);

/// The same of convolutions of any length that are stride 1, 16 bit and channels_last_3d: where tiles leave
/// much of the last wave idle, or cuDNN's kernels are at their best. For where the direct plan has been
/// considered.
LibraryAdvantage library_advantage_at_length(const Problem& problem, const Device& device, const Plan& sm90);

/// The same of blocks that are only near those whose times the estimates were fitted to, by estimates on the
/// slow side. For where the direct plan has been considered: of few channels it is the quickest.
LibraryAdvantage near_library_advantage(const Problem& problem, const Device& device, const Plan& sm90);

/// Expected time of all of the SM90 plan's launches, in us: as small blocks were compared with others.
double sm90_us(const Problem& problem, const Plan& sm90);

/// Whether the SM90 plan is expected to take the device no longer than PyTorch's convolution, with what goes
/// before and after it, takes the host: who waits for the host is no slower with it, however quick cuDNN is.
bool sm90_spares_host(const Problem& problem, const Plan& sm90);

/// What near_library_advantage expects of the library plan, in us; infinity where it expects no advantage.
double near_library_us(const Problem& problem, const Device& device, const Plan& sm90);

/// Expected time of PyTorch's convolution alone, with the copies that it makes, in us on an H200: where such
/// convolutions, or ones near them, were timed, then by an estimate on the slow side; else infinity.
double library_convolution_us(const Problem& problem);

/// What cuDNN's convolution without groups takes at least for a million positions of its result, in us on an
/// H200: channels fill its tiles as they do ours, and few of them take as long as 32.
double library_us_per_million_positions(const Problem& problem);

/// Whether a library plan in NCDHW is expected to be quicker with x and w copied channels last first, and the
/// result transposed by the launch that normalizes it, than with cuDNN's own copies.
bool library_copies_operands(const Problem& problem, const Device& device);

/// Whether this plan does that.
inline bool copies_operands(const Problem& problem, const Plan& plan) {
  return plan.algorithm == Algorithm::kCudaLibrary && plan.conv_layout == Layout::kNDHWC &&
         problem.y_layout == Layout::kNCDHW;
}

}  // namespace upconv3d
