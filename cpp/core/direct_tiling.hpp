// SPDX-License-Identifier: Apache-2.0
/// \file
/// How conv_transpose_direct cuts the output and deals it to threads.
///
/// With u = o + padding, an input i and a tap t reach the outputs u = i*stride + t*dilation. Cell c of an
/// axis is the outputs c*stride <= u < (c+1)*stride, one of each phase u - c*stride; taps of a phase read
/// inputs at fixed distances from its cell.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.hpp"

namespace upconv3d {

/// Threads of a block, whichever kernel.
inline constexpr int kDirectThreads = 128;

/// Cells along the width of a thread of the kernel for any taps.
inline constexpr int kDirectColumns = 4;

/// Threads of conv_transpose_depthwise along the channels: with four taps or channels to each, they bring a
/// row of weights to shared memory, and a block must have a thread for every part of it.
inline constexpr int kMaxDepthwiseLanes = kDirectThreads / 4;

struct DirectTiling {
  bool depthwise = false;  // conv_transpose_depthwise: all phases of a cell by one thread; else for any taps
  bool shared_inputs = false;  // the channels of a thread are of one convolution group
  int vector = 1;              // neighbouring output channels of a thread
  int lanes_c = 1;             // threads of a block along the channels, the height's runs being serial;
  int lanes_q = 1;             // along the width,
  int lanes_z = 1;             // and along the depth: powers of two, kDirectThreads together
  Extent3 first{};             // first cell of each axis
  Extent3 cells{};             // cells of each axis
  Extent3 tile{};              // cells of a tile
  Extent3 tiles{};             // tiles of a sample
  std::int64_t channel_blocks = 1;
  std::int64_t shared_bytes = 0;  // shared memory for weights and taps

  std::int64_t tile_count() const { return volume(tiles); }
};

/// The cut of a problem that direct_obstacle (core/direct_plan.hpp) has nothing against.
DirectTiling direct_tiling(const Problem& problem);

/// Shared memory beside that for weights and taps, through which a block's threads merge moments: bytes.
std::int64_t direct_moment_bytes(const DirectTiling& tiling);

/// Output positions of the largest tile.
std::int64_t direct_tile_positions(const Problem& problem, const DirectTiling& tiling);

}  // namespace upconv3d
