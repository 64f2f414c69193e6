// SPDX-License-Identifier: Apache-2.0
/// \file
/// The cases of test_grad_x_sm90: blocks whose gradient meets every way in which strides, padding, dilation
/// and channels can fall beside tiles, planes and rows.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::tests {

struct GradXCase {
  std::int64_t n, c, k;
  Extent3 in, kernel;
  Extent3 stride = {1, 1, 1}, padding = {0, 0, 0}, output_padding = {0, 0, 0}, dilation = {1, 1, 1};
};

inline const GradXCase kGradXCases[] = {
    // planes of whole tiles, whose loads are shared: without padding, with it, beyond the kernel
    {2, 64, 128, {4, 8, 32}, {3, 3, 3}},
    {1, 64, 64, {3, 16, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}},
    {2, 40, 48, {2, 16, 32}, {3, 2, 3}, {1, 1, 1}, {0, 1, 0}},
    {1, 136, 16, {2, 32, 8}, {2, 5, 3}, {1, 1, 1}, {1, 6, 1}},
    // tiles that end amid planes, several channel tiles and k-blocks, several samples
    {3, 72, 136, {5, 4, 7}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}},
    {5, 264, 64, {6, 5, 9}, {2, 3, 1}, {1, 1, 1}, {0, 2, 0}},
    {1, 64, 64, {1, 2, 129}, {1, 1, 1}},
    // strides 2 and 3, mixed, with the output padding that each allows
    {2, 24, 20, {4, 5, 6}, {3, 3, 3}, {1, 2, 3}, {1, 1, 1}, {0, 1, 2}},
    {1, 128, 64, {6, 6, 6}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}},
    {2, 256, 40, {3, 4, 5}, {2, 2, 2}, {2, 2, 2}},
    {2, 48, 256, {8, 9, 10}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}},
    {2, 24, 40, {1, 1, 40}, {1, 1, 7}, {1, 1, 2}, {0, 0, 3}},
    // kernels shorter than the stride; none of the taps reaches along the depth
    {1, 16, 32, {4, 4, 5}, {1, 1, 2}, {3, 2, 3}},
    {1, 8, 8, {2, 4, 5}, {1, 3, 3}, {3, 1, 1}, {1, 0, 0}},
    // dilation, also together with an output padding as large as the stride
    {1, 32, 32, {6, 5, 7}, {3, 3, 3}, {2, 1, 2}, {1, 2, 1}, {0, 0, 1}, {2, 3, 1}},
    {1, 16, 16, {5, 5, 5}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {2, 2, 2}},
    // padding beyond the kernel
    {2, 16, 24, {9, 9, 9}, {3, 3, 3}, {1, 1, 1}, {3, 3, 3}},
    // channels that are no multiple of 8 of x, of y, of both
    {1, 20, 3, {5, 6, 7}, {3, 1, 4}, {3, 1, 2}, {0, 0, 3}},
    {2, 3, 16, {5, 6, 7}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}},
    {2, 100, 20, {5, 6, 8}, {2, 2, 2}},
    {2, 1, 1, {5, 6, 7}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}},
};

}  // namespace upconv3d::tests
