// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which kernel packs the operands of our convolutions.
#pragma once

#include <string>
#include <vector>

#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether the SM90 kernel that stores before(conv) can read w as it lies: wgmma takes operands of 16 bits
/// whose output channels are contiguous, and TMA rows of whole 16-byte chunks.
inline bool reads_w_in_place(const Problem& problem) {
  return problem.dtype != DType::kFloat32 && problem.operation == Operation::kConvTranspose &&
         problem.w_channels_last && problem.groups == 1 && problem.k % kChannelUnit == 0;
}

/// By name, in launch order.
std::vector<std::string> pack_stages(const Problem& problem);

}  // namespace upconv3d
