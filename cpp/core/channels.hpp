// SPDX-License-Identifier: Apache-2.0
/// \file
/// How channels lie in what the tensor-core kernel reads and stores: in rows of whole 16-byte chunks, as TMA
/// wants them, and one convolution group apart from the next.
#pragma once

#include <cstdint>

#include "core/index_math.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Bytes of a thread's widest load or store.
inline constexpr std::int64_t kVectorBytes = 16;

/// Channels of 16 bytes in 16 bit. float32 rows keep to the same unit: they may be stored in 16 bit.
inline constexpr std::int64_t kChannelUnit = 8;

/// Channels of a 32-byte sector of memory in 16 bit.
inline constexpr std::int64_t kSectorChannels = 16;

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
///
/// Rows of whole 32-byte sectors, and whole k-blocks beyond one: of rows that begin amid a sector, or have to
/// be filled up, TMA brings up to a third as many per cycle. On an H200 a block of 24 input channels took
/// 0.164 ms with rows of 24, 0.105 with 32, 0.098 with 64; one of 72 took 0.267 with 72, 0.214 with 80, 0.192
/// with 128. What packing costs is in those times.
inline std::int64_t operand_channels(const Problem& problem) {
  const std::int64_t channels = group_inputs(problem);
  return channels <= kSectorChannels ? kSectorChannels : ceil_div(channels, kBlockInputs) * kBlockInputs;
}

/// Whether the kernel reads x [N,D,H,W,C] of an operand's dtype as it lies: whole sectors, and of several
/// groups whole k-blocks each.
inline bool has_operand_channels(const Problem& problem) {
  return problem.groups == 1 ? problem.c % kSectorChannels == 0 : group_inputs(problem) % kBlockInputs == 0;
}

/// A row of float32 as two float16 of each channel, v = hi + lo, in the memory of the floats: of channels
/// that are whole k-blocks, 64 hi and then 64 lo of each block, which thus lie where its floats lay; of
/// others all hi, then all lo.
struct SplitRow {
  std::int64_t channels;  // a multiple of kChannelUnit
  std::int64_t lo_step;   // elements from a channel's hi to its lo

  explicit SplitRow(std::int64_t channels_)
      : channels(channels_), lo_step(channels_ % kBlockInputs == 0 ? kBlockInputs : channels_) {}

  std::int64_t elements() const { return 2 * channels; }
  /// Elements from the first channel's hi to behind the last one's; of lo as many.
  std::int64_t extent() const { return elements() - lo_step; }
  /// Elements from the hi of a k-block to that of the next.
  std::int64_t block_step() const { return lo_step == kBlockInputs ? 2 * kBlockInputs : kBlockInputs; }
};

/// Tiles of `block_channels` output channels: none reaches from one group into the next.
inline std::int64_t channel_tiles(const Problem& problem, std::int64_t block_channels) {
  return problem.groups * ceil_div(group_outputs(problem), block_channels);
}

}  // namespace upconv3d
