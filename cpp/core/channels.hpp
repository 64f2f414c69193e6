// SPDX-License-Identifier: Apache-2.0
/// \file
/// How channels lie in what the tensor-core kernel reads and stores: in rows of whole 16-byte chunks, as TMA
/// wants them, and one convolution group apart from the next.
#pragma once

#include <cstdint>

#include "core/index_math.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Channels of 16 bytes in 16 bit. float32 rows keep to the same unit: they may be stored in 16 bit.
inline constexpr std::int64_t kChannelUnit = 8;

/// Input channels of a k-block: a 128-byte row in 16 bit.
inline constexpr std::int64_t kBlockInputs = 64;

/// `channels` rounded up to whole units.
inline std::int64_t padded_channels(std::int64_t channels) {
  return ceil_div(channels, kChannelUnit) * kChannelUnit;
}

/// Input and output channels of one convolution group.
inline std::int64_t group_inputs(const Problem& problem) {
  return problem.c / problem.groups;
}
inline std::int64_t group_outputs(const Problem& problem) {
  return problem.k / problem.groups;
}

/// Channels of a row of the packed operands, x [N,groups,D,H,W,.] and w [T*R*S,K,.]: those of one group, and
/// zeros behind them. Groups of x lie apart, so that what a k-block reads beyond its group's channels is
/// zeros and not the next group's values, which may be NaN.
inline std::int64_t operand_channels(const Problem& problem) {
  return padded_channels(group_inputs(problem));
}

/// Whether the kernel reads x [N,D,H,W,C] of an operand's dtype as it lies: whole units, and whole k-blocks
/// of each group.
inline bool has_operand_channels(const Problem& problem) {
  return problem.groups == 1 ? problem.c % kChannelUnit == 0 : group_inputs(problem) % kBlockInputs == 0;
}

/// Tiles of `block_channels` output channels: none reaches from one group into the next.
inline std::int64_t channel_tiles(const Problem& problem, std::int64_t block_channels) {
  return problem.groups * ceil_div(group_outputs(problem), block_channels);
}

}  // namespace upconv3d
