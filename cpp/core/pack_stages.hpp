// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which kernels pack the operands of our convolutions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/channels.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Whether float32 operands are so small that one launch packs them, of blocks that wait for each other,
/// instead of three: a launch takes an H200's host 5 us.
///
/// Of x as many values as come to one tile for each block that fits on the card, 8 MB; of its maxima as many
/// as every block reads by itself in no time; and of w as much as 256 threads a column pack in a few turns.
inline bool packs_at_once(const Problem& problem) {
  constexpr std::int64_t kMaxInputs = std::int64_t{1} << 21;
  constexpr std::int64_t kMaxMaxima = std::int64_t{1} << 12;
  constexpr std::int64_t kMaxColumn = std::int64_t{1} << 13;
  constexpr std::int64_t kMaxWeights = std::int64_t{1} << 22;
  const std::int64_t maxima = problem.n * problem.c;
  const std::int64_t column = volume(problem.kernel) * operand_channels(problem);
  return problem.dtype == DType::kFloat32 && maxima <= kMaxMaxima &&
         maxima * volume(problem.in) <= kMaxInputs && column <= kMaxColumn &&
         column * problem.k <= kMaxWeights;
}

/// Whether the SM90 kernel that stores before(conv) can read w as it lies: wgmma takes operands of 16 bits
/// whose output channels are contiguous, and TMA rows of whole 16-byte chunks.
inline bool reads_w_in_place(const Problem& problem) {
  return problem.dtype != DType::kFloat32 && problem.operation == Operation::kConvTranspose &&
         problem.w_channels_last && problem.groups == 1 && problem.k % kChannelUnit == 0;
}

/// By name, in launch order.
std::vector<std::string> pack_stages(const Problem& problem);

}  // namespace upconv3d
