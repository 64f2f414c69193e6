// SPDX-License-Identifier: Apache-2.0
/// \file
/// How full a block's channels leave the SM90 kernels' tiles, and from when on they are worth it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/channels.hpp"
#include "core/index_math.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Output channels up to which there are few: of more, y is most of what a block of few inputs moves.
inline constexpr std::int64_t kFewOutputs = 64;

/// Share of the tensor cores' products that are wanted: of k-blocks and tiles of 64 channels, the rest is
/// padding.
inline double channel_share(const Problem& p) {
  constexpr std::int64_t kSmallestTile = 64;
  const auto filled = [](std::int64_t channels, std::int64_t block) {
    return static_cast<double>(channels) / static_cast<double>(ceil_div(channels, block) * block);
  };
  return filled(group_inputs(p), kBlockInputs) * filled(group_outputs(p), kSmallestTile);
}

/// Whether cuDNN has kernels for convolution groups of that size: of as many outputs as inputs, a power of
/// two. Others take it up to eight times as long (perf/NOTES.md, "Groups that cuDNN has no kernels for");
/// larger ones were not timed, and count as others.
inline bool are_groups_of_cudnn(const Problem& p) {
  constexpr std::int64_t kLargest = 256;
  const std::int64_t inputs = group_inputs(p);
  return inputs == group_outputs(p) && inputs <= kLargest &&
         std::has_single_bit(static_cast<std::uint64_t>(inputs));
}

/// The share from which the SM90 kernel was quicker than cuDNN's convolution and our normalization on an
/// H200, between the shapes on either side that were timed. Not asked in inference where has_times
/// (plan_times.hpp).
/// \param trains whether a backward pass follows, or this is part of one
inline double least_channel_share(const Problem& p, bool trains) {
  // Times of ours over the library plan's, for bfloat16 channels_last_3d, tf32, ieee:
  //   one group,  20 > 100 channels, share 0.24    0.61  0.83  0.45
  //               24 >   3                 0.018   1.5   1.3   3.0
  //               32 >   2, stride 2       0.016   2.3   2.0   3.5
  //   groups of   64 >  64                 1       0.94  0.58  0.13
  //               32 >  32                 0.25    2.0   0.97  0.26
  //               16 >  16                 0.06    3.9   2.0   0.49
  //               64 >  64, stride 2       1       0.03  0.12  0.16
  //               16 >  16, stride 2       0.06    2.2   0.45  0.63
  // In inference, before a norm, for bfloat16 NCDHW and channels_last_3d, tf32 of both:
  //   groups of   80 >  16                 0.16    0.64  0.41  0.35  0.33
  //               24 >  24                 0.14    0.94  0.65  0.84  0.76
  //               64 >  16                 0.25    0.74  0.63  0.58  0.57
  //               32 >  32                 0.25    1.14  1.8   1.01  1.37
  //               16 >  16                 0.06    1.4   2.4   1.4   2.0
  //               80 >  16, stride 2       0.16    0.16  0.14  0.52  0.53
  //               24 >  24, stride 2       0.14    0.88  0.61  0.39  0.39
  //               32 >  32, stride 2       0.25    0.78  1.2   0.29  0.27
  //               16 >  16, stride 2       0.06    1.6   2.4   0.50  0.51
  // In multiples of 8, channels of one group have not been compared and always run here; so do, in inference,
  // few inputs of many outputs, whose volume is y: 1 > 96, 1 > 256, 1 > 512 and 2 > 96 took 0.2 to 1.1 of the
  // library plan's time in bfloat16 and tf32, mostly 0.3 to 0.6; trained 0.7 to 1.4.
  const bool many_outputs = p.c < kChannelUnit && p.k > kFewOutputs && p.tail.norm && !p.is_ieee();
  if (p.groups == 1 && !trains && many_outputs) return 0.0;
  if (p.groups == 1) return std::min(p.c, p.k) < kChannelUnit ? 1.0 / 32 : 0.0;
  const bool has_phases = p.stride != Extent3{1, 1, 1};
  if (p.is_ieee()) return 1.0 / 32;
  // Of these, kernels of 3 before a norm were timed; others keep to the first table.
  const bool is_timed = !trains && p.tail.norm && volume(p.kernel) > 1;
  if (!is_timed) return p.dtype != DType::kFloat32 ? 3.0 / 8 : has_phases ? 1.0 / 32 : 1.0 / 4;
  if (!are_groups_of_cudnn(p)) return 9.0 / 64;  // the least that was timed: of less, nothing is known
  if (!has_phases) return 3.0 / 8;
  return p.dtype == DType::kFloat32 ? 1.0 / 32 : p.x_layout == Layout::kNCDHW ? 1.0 / 4 : 3.0 / 8;
}

}  // namespace upconv3d
