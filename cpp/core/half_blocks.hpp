// SPDX-License-Identifier: Apache-2.0
/// \file
/// For whom there are SM90 kernels with k-blocks of half as many input channels: rows of 64 bytes instead of
/// 128. Operands lie in memory as they do for the others.
#pragma once

#include <cstdint>

#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr std::int64_t kHalfBlockInputs = kBlockInputs / 2;

/// Whether one half k-block holds all of a group's input channels. Three of them, for 96, are not expected to
/// take less than two whole ones: loads bound them. Rows of hi and lo are read by whole blocks: of three
/// products there are no such kernels.
inline bool fits_half_block(const Problem& problem) {
  return group_inputs(problem) <= kHalfBlockInputs;
}

}  // namespace upconv3d
