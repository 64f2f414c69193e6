// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many blocks of the SM90 kernel that stores the convolution end early, to make room for
/// group_norm_normalize beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace upconv3d {

/// Blocks that end after the first sample, so that the normalization begins on their multiprocessors: as many
/// as leave the least time in all, 0 where none gain much.
///
/// \param multiply, normalize estimated ms of the two, one after the other on the whole card
/// \param steps whether 16 bits with a step are normalized
/// \param tiles of all `samples`
inline int leaving_blocks(double multiply, double normalize, bool steps, std::int64_t tiles,
                          std::int64_t samples, int sm_count) {
  if (samples == 0) return 0;
  // Of the card's bandwidth, what the normalization gets of one multiprocessor where it has few: 40 GB/s of
  // 4200 were seen of 16 bits with a step, 60 to 90 of others.
  const double bandwidth_share = (steps ? 40.0 : 60.0) / 4200.0;
  constexpr int kMostShare = 5;                // of all blocks, 1 / this
  constexpr double kWorthwhileGain = 0.97;     // of the time without
  constexpr double kWorthwhileGainMs = 0.003;  // and less by this: of small blocks, what it takes to begin
  const double later = static_cast<double>(samples - 1) / static_cast<double>(samples);  // samples of all
  const double all = static_cast<double>(tiles);
  // All blocks compute the first sample.
  const auto waves = [&](int blocks) {
    constexpr double kRounding = 1e-6;  // of the sum, which may be whole
    return std::ceil(all * (1 - later) / sm_count + all * later / (sm_count - blocks) - kRounding);
  };
  int best = 0;
  double least = std::min(kWorthwhileGain * (multiply + normalize), multiply + normalize - kWorthwhileGainMs);
  for (int blocks = 1; blocks <= sm_count / kMostShare; ++blocks) {
    const double slower = multiply * waves(blocks) / waves(0);
    const double hidden = blocks * bandwidth_share * slower * later;  // as time of normalize
    const double total = slower + normalize - std::min(hidden, normalize * later);
    if (total < least) {
      best = blocks;
      least = total;
    }
  }
  return best;
}

}  // namespace upconv3d
