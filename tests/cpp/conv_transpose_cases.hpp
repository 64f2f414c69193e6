// SPDX-License-Identifier: Apache-2.0
/// \file
/// The cases of test_conv_transpose_sm90: shapes whose tiles, rows, channels and groups end where tiles do
/// not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/problem.hpp"

namespace upconv3d::tests {

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, padding;
  // Where not 0: what sample 1 begins with and no tile of sample 0 may take in. Then sample 0 alone is
  // compared.
  double next = 0.0;
  std::int64_t groups = 1;
  bool nan_group = false;  // the last group's input is NaN, and the others alone are compared
  Extent3 stride = {1, 1, 1};
  Extent3 dilation = {1, 1, 1};
  bool real = false;  // operands are no integers (see Fixture), and the moments alone are exact
  bool has_bias = true;
};

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// One 8-channel corner case, tails of every tile extent, kernels with an axis of 1, padding up to beyond the
// kernel, several channel tiles, several samples whose positions end inside a tile, groups of 8, 33 and 17*8
// channels (see group_counts), rows of eights that share loads with and without a rest.
inline const Case kCases[] = {
    {1, 8, 8, {2, 3, 4}, {1, 1, 1}, {0, 0, 0}},
    {2, 64, 128, {6, 6, 6}, {3, 3, 3}, {0, 0, 0}},
    {3, 72, 136, {5, 4, 7}, {3, 3, 3}, {1, 1, 1}},
    {2, 16, 264, {4, 9, 5}, {2, 3, 1}, {0, 2, 0}},
    {1, 128, 64, {8, 8, 8}, {5, 5, 5}, {2, 2, 2}},
    {2, 24, 40, {1, 1, 40}, {1, 1, 7}, {0, 0, 3}},
    {1, 32, 32, {12, 12, 12}, {2, 2, 2}, {1, 0, 1}},
    {2, 8, 16, {9, 9, 9}, {3, 3, 3}, {3, 3, 3}},
    {2, 136, 48, {3, 10, 24}, {2, 5, 3}, {0, 0, 1}},
    {5, 64, 272, {10, 10, 10}, {3, 3, 3}, {0, 0, 0}},
    // 14 columns: none of the first 8 is reached by the first taps, nor any of the last 6 by the last
    {2, 16, 32, {2, 3, 4}, {2, 2, 11}, {0, 0, 0}},
    // 258 positions: the last tile of every variant holds two
    {2, 64, 64, {1, 2, 129}, {1, 1, 1}, {0, 0, 0}, kNaN},
    {2, 64, 64, {1, 2, 129}, {1, 1, 1}, {0, 0, 0}, 512.0},
    // 6 rows of 48 that share loads: the last tile holds 32
    {2, 64, 64, {1, 4, 48}, {1, 3, 1}, {0, 0, 0}, kNaN},
    // channels that are no multiple of 8, of x, of y, of both
    {2, 1, 1, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}},
    {2, 3, 16, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}},
    {2, 20, 2, {5, 6, 10}, {3, 3, 3}, {0, 0, 0}},
    {1, 48, 3, {4, 5, 14}, {1, 3, 3}, {0, 0, 0}},
    {2, 100, 20, {5, 6, 7}, {2, 2, 2}, {0, 0, 0}},
    {3, 24, 100, {4, 4, 6}, {3, 3, 3}, {0, 0, 0}},
    // groups: of whole tiles and k-blocks, of part of either, of 3 and 20 input channels
    {2, 128, 256, {5, 6, 6}, {3, 3, 3}, {0, 0, 0}, 0.0, 2, true},
    {2, 128, 96, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}, 0.0, 2, true},
    {2, 32, 64, {5, 6, 14}, {3, 3, 3}, {0, 0, 0}, 0.0, 4, true},
    {2, 12, 32, {5, 6, 7}, {2, 2, 2}, {0, 0, 0}, 0.0, 4, true},
    {1, 40, 272, {4, 5, 6}, {3, 1, 3}, {0, 0, 0}, 0.0, 2, true},
    {2, 256, 512, {3, 4, 5}, {2, 2, 2}, {0, 0, 0}, 0.0, 4},
    // phases of a stride, which lie between each other
    {2, 24, 20, {4, 9, 11}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {1, 2, 3}},
    {1, 16, 136, {5, 6, 7}, {2, 3, 2}, {0, 1, 0}, 0.0, 1, false, {2, 2, 2}},
    // phases of 3 to 24 k-blocks, and whole half tiles in each
    {1, 192, 64, {6, 7, 8}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    // for k-blocks of 32: one, of whole tiles, of phases, of loads that several taps share, whose rows of 8
    // begin amid 1024 bytes, and of 48 with a rest, with taps two apart; three and five; groups of one and of
    // three
    {2, 32, 128, {8, 8, 8}, {3, 3, 3}, {0, 0, 0}},
    {2, 32, 64, {5, 6, 7}, {5, 5, 5}, {2, 2, 2}, 0.0, 1, false, {2, 2, 2}},
    {2, 32, 64, {6, 9, 8}, {2, 2, 1}, {0, 0, 0}},
    {2, 24, 72, {1, 4, 48}, {1, 3, 1}, {0, 0, 0}, kNaN},
    {2, 32, 64, {6, 7, 8}, {3, 2, 3}, {1, 0, 2}, 0.0, 1, false, {1, 1, 1}, {1, 2, 2}},
    {2, 96, 128, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}},
    {1, 160, 64, {4, 5, 6}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    {2, 64, 128, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}, 0.0, 2, true},
    {1, 192, 64, {5, 6, 7}, {2, 2, 2}, {0, 0, 0}, 0.0, 2, true},
    // a granule per channel, so that thousands of partial moments in one norm group are merged in 16 parts
    {1, 16, 257, {5, 5, 17}, {2, 2, 2}, {0, 0, 0}, 0.0, 1, false, {2, 2, 2}},
    // more phases than one launch takes, in two or three: 64 of a tap each; 32, some without a tap; 36 and
    // whole half tiles in each, and groups; a granule per channel
    {2, 64, 128, {3, 2, 5}, {4, 4, 4}, {0, 0, 0}, 0.0, 1, false, {4, 4, 4}},
    {2, 72, 136, {5, 3, 4}, {5, 6, 3}, {1, 2, 0}, 0.0, 1, false, {2, 4, 4}},
    {2, 16, 32, {5, 6, 19}, {3, 3, 4}, {0, 0, 0}, 0.0, 2, true, {3, 3, 4}},
    {1, 24, 33, {3, 4, 9}, {4, 5, 6}, {1, 0, 2}, 0.0, 1, false, {4, 4, 4}},
    // planes that end with tiles share loads inside, and borders around them do not: one and two parts along
    // the width, a row left over above or below; phases, of which all share, or those that two taps reach;
    // half k-blocks; groups
    {2, 64, 128, {3, 16, 16}, {3, 3, 3}, {0, 0, 0}},
    {2, 64, 64, {2, 16, 96}, {1, 3, 3}, {0, 1, 0}, kNaN},
    {1, 72, 136, {2, 33, 9}, {2, 4, 3}, {0, 2, 1}},
    {2, 64, 128, {2, 17, 17}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    {1, 136, 64, {2, 16, 16}, {4, 4, 4}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    {2, 32, 64, {2, 17, 18}, {3, 3, 3}, {1, 1, 1}},
    {1, 128, 256, {2, 18, 16}, {3, 3, 3}, {1, 1, 1}, 0.0, 2, true},
    // small planes, whose loads are shared along the depth: whole ones, and phases
    {2, 64, 64, {5, 8, 8}, {3, 1, 3}, {1, 0, 1}, kNaN},
    {3, 32, 64, {9, 8, 8}, {3, 1, 3}, {0, 0, 0}},
    {3, 72, 128, {4, 8, 8}, {4, 4, 4}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    // pairs of phases: along the depth, of unlike planes, with and without loads that several taps share, of
    // a stride of four; along the height; few channels
    {2, 64, 64, {3, 17, 17}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    {2, 32, 64, {3, 16, 16}, {3, 4, 4}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    {1, 96, 48, {4, 5, 9}, {5, 3, 2}, {1, 1, 0}, 0.0, 1, false, {4, 1, 1}},
    {2, 72, 40, {5, 8, 9}, {1, 4, 3}, {0, 1, 1}, 0.0, 1, false, {1, 2, 2}},
    {3, 16, 8, {4, 5, 7}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 2, 2}},
    // in more tiles than few blocks, of which some are kept; rows that are no whole chunks
    {2, 64, 64, {6, 11, 13}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 1, 1}},
    {1, 40, 20, {4, 5, 9}, {3, 3, 3}, {1, 1, 1}, 0.0, 1, false, {2, 1, 2}},
    // few output channels, of which rows of what is normalized hold 8, 3 and 2 positions, or 16, 7 and 4
    {4, 16, 8, {5, 6, 7}, {2, 2, 2}, {0, 0, 0}},
    {4, 40, 16, {4, 5, 7}, {3, 3, 3}, {0, 0, 0}},
    {3, 24, 24, {6, 7, 8}, {3, 3, 3}, {1, 1, 1}},
};

// Of one product: whole half tiles, and a rest, of so few k-blocks that consumers take their moments; a
// second channel tile or warpgroup of few channels, a last k-block that is not full.
inline const Case kRealCases[] = {
    {2, 64, 72, {6, 15, 16}, {2, 2, 2}, {0, 0, 0}, 0.0, 1, false, {1, 1, 1}, {1, 1, 1}, true},
    {1, 40, 136, {6, 15, 16}, {2, 2, 2}, {0, 0, 0}, 0.0, 1, false, {1, 1, 1}, {1, 1, 1}, true, false},
};

/// Divisors of K: layer norm, two groups, 4, 5, 8, groups of 8 channels, instance norm. With a group of NaN
/// those that keep it apart.
inline std::vector<std::int64_t> group_counts(const Case& shape) {
  const std::int64_t k = shape.k;
  std::vector<std::int64_t> counts;
  for (const std::int64_t groups :
       {std::int64_t{1}, std::int64_t{2}, std::int64_t{4}, std::int64_t{5}, std::int64_t{8}, k / 8, k}) {
    if (groups == 0 || k % groups != 0 || (shape.nan_group && groups % shape.groups != 0)) continue;
    if (std::find(counts.begin(), counts.end(), groups) == counts.end()) counts.push_back(groups);
  }
  return counts;
}

}  // namespace upconv3d::tests
