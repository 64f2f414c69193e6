// SPDX-License-Identifier: Apache-2.0
/// \file
/// float32 x to [N,groups,D,H,W,operand_channels] in float16 by chosen scales. Seldom needed, so it is
/// simple: 8 channels of a position per thread, where x lies as it likes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/operand_scale.cuh"
#include "cuda/layout/verdict.cuh"

namespace upconv3d::cuda {

/// Channels first, a warp takes 8 positions of 4 vectors: whole sectors of x, and 64 bytes of a row.
template <bool kChannelsFirst>
inline constexpr int kRunPositions = kChannelsFirst ? 8 : 1;

/// \param item of (n, group, run of positions, vector, position in the run), those to the right side by side
template <bool kChannelsFirst, int kProducts>
__device__ inline void pack_chosen_input(const InputArgs& args, const VerdictArgs& scales,
                                         std::int64_t item) {
  constexpr int kRun = kRunPositions<kChannelsFirst>;
  const std::int64_t vectors = args.pitch / 8;
  const std::int64_t runs = (args.positions + kRun - 1) / kRun;
  const std::int64_t run = item / (kRun * vectors);
  const std::int64_t slice = run / runs;  // n * groups + group
  const std::int64_t position = run % runs * kRun + item % kRun;
  if (position >= args.positions) return;
  const std::int64_t n = slice / args.groups;
  const std::int64_t within = item / kRun % vectors * 8;
  const std::int64_t channel = slice % args.groups * args.group_channels + within;
  const std::int64_t step = kChannelsFirst ? args.positions : 1;
  const float* const source = static_cast<const float*>(args.x) +
                              (kChannelsFirst ? (n * args.channels + channel) * args.positions + position
                                              : (n * args.positions + position) * args.channels + channel);
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = within + j < args.group_channels ? __ldcs(source + j * step) : 0.0f;
  const ChannelPowers<1> scale{scales.channel, static_cast<int>(channel), static_cast<int>(args.channels - 1),
                               scales.sample[n]};
  const SplitWords<8> words = encode<kProducts>(v, scale);
  const std::int64_t row = slice * args.positions + position;
  store_eight(args.hi, row, within, args.pitch, vector_of(words.hi));
  if constexpr (kProducts == 3) store_eight(args.lo, row, within, args.pitch, vector_of(words.lo));
}

/// All of x, by a whole grid.
template <bool kChannelsFirst, int kProducts>
__device__ inline void pack_chosen_inputs(const InputArgs& args, const VerdictArgs& scales,
                                          std::int64_t thread, std::int64_t threads) {
  constexpr int kRun = kRunPositions<kChannelsFirst>;
  const std::int64_t slice_positions = (args.positions + kRun - 1) / kRun * kRun;
  const std::int64_t items = scales.samples * args.groups * slice_positions * (args.pitch / 8);
  for (std::int64_t item = thread; item < items; item += threads) {
    pack_chosen_input<kChannelsFirst, kProducts>(args, scales, item);
  }
}

}  // namespace upconv3d::cuda
