// SPDX-License-Identifier: Apache-2.0
/// \file
/// How conv_transpose_few_channels_sm80 cuts a block: tiles, shared memory, and the order in which taps are
/// multiplied.
///
/// Output positions are o = j*stride + phase along each axis, and tap t of phase (t*dilation - padding) mod
/// stride reads input j + offset, offset = (phase + padding - t*dilation)/stride. A tile is a box of j, all
/// phases of which a block computes from one box of x. A warp computes one group of phases at a time: one
/// phase along the depth and the height, and along the width two neighbours where its stride is even.
///
/// Along gemm_k, 16 bytes of input channels of one offset are a chunk, and two chunks a step of the tensor
/// cores (m16n8k16, or m16n8k8 of TF32). A group's chunks come in lists: those that both phases of a pair
/// use, and those of one of them alone. Where a list is odd, its last step takes the chunk of zeros that lies
/// behind each position's channels. The leading list (kFewBoth, or kFewFirst of single phases) has a step in
/// any case, of zeros if need be: accumulators begin in it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline constexpr int kFewWarps = 8;
inline constexpr int kFewThreads = 32 * kFewWarps;
inline constexpr int kFewColumnBytes = 32, kFewFragmentPadding = 16;  // of a unit of weights
inline constexpr int kFewChannelParameters = 5;  // floats of each output channel, and one for each warp
inline constexpr int kFewMaxSteps = 512;
inline constexpr int kFewStepsAhead = 2;  // read behind the last step, and not used
inline constexpr int kFewMaxTaps = 128;
inline constexpr int kFewMaxGroups = 64;
inline constexpr int kFewOffsetBits = 14;  // of a chunk's place in a step: 256 KB of x

/// Of 16 positions each, that a warp computes together: 64 accumulators at most, half of them beside the
/// parts of three products' operands.
constexpr int few_row_tiles(int column_tiles, int paired, int products) {
  return (column_tiles * paired >= 8 ? 2 : 4) / (products == 3 ? 2 : 1);
}

/// Which phases of a pair a list of chunks belongs to.
enum FewList : std::uint8_t { kFewBoth, kFewSecond, kFewFirst, kFewLists };

/// Phases that a warp computes together, and their steps: lists one after the other.
struct FewGroup {
  std::array<int, 3> phase{};          // along the width: of the pair's first
  std::array<int, kFewLists> steps{};  // of each list
  int first_step = 0;                  // in FewChannelsLayout::steps
  int first_fragment = 0;              // in units of the weights of a step and phase
};

/// Where a tap's weights lie: chunk c of its input channels is half (first_chunk + c)%2 of step
/// (first_chunk + c)/2 of its list, whose weights begin at `fragment` and take `stride` units per step.
struct FewTap {
  std::uint16_t fragment = 0;
  std::uint16_t first_chunk = 0;
  std::uint16_t stride = 0;
};

/// A tile's outputs [channel][plane][row][position] in shared memory, where the output pass collects whole
/// rows. Planes and channels lie apart as many values more than whole chunks as in y: what begins a chunk
/// there does here.
struct FewStage {
  int plane = 0;    // values from one plane of outputs to the next
  int channel = 0;  // values from one channel to the next
  std::int64_t bytes = 0;
};

struct FewChannelsLayout {
  // The variant of the kernel.
  int column_tiles = 0;  // 1, 2 or 4: eight output channels each
  int paired = 1;        // phases along the width that a warp computes together
  int row_tiles = 0;     // 16 positions each, of a warp
  bool staged = false;   // the output pass collects its outputs

  int row_warps = 0;       // warps that share a tile's positions; kFewWarps/row_warps share its groups
  int channel_blocks = 0;  // of 8*column_tiles output channels of one convolution group
  Extent3 tile{};          // j
  Extent3 tiles{};         // of a sample
  Extent3 lower{};         // the least offset along each axis
  Extent3 box{};           // inputs that a tile reads
  int chunks = 0;          // of a position's input channels of one group
  int pitch = 0;           // chunks from one position to the next: odd, so that eight lie in different banks
  std::vector<FewGroup> groups;      // in falling order of their steps
  std::vector<std::uint32_t> steps;  // two places of kFewOffsetBits: a chunk's, from its position's first
  std::vector<FewTap> taps;          // [T*R*S]
  int fragments = 0;                 // units of 32 bytes of gemm_k by 8*column_tiles columns
  std::int64_t shared_bytes = 0;
  FewStage stage;                            // where staged
  double moments_ms = 0.0, output_ms = 0.0;  // estimated, of each pass
  /// The output pass's own where it is staged; moments are taken in tiles of this one.
  std::shared_ptr<const FewChannelsLayout> output;

  std::int64_t tile_count() const { return volume(tiles); }
  std::int64_t box_positions() const { return volume(box); }
  int rows() const { return 16 * row_tiles * row_warps; }
  const FewChannelsLayout& of_output() const { return output ? *output : *this; }
};

/// Shared memory of the parts of a block, in bytes, one behind the other in this order.
struct FewSharedBytes {
  std::int64_t weights = 0, x = 0, rows = 0, channels = 0, moments = 0, steps = 0, stage = 0;
  std::int64_t total() const { return weights + x + rows + channels + moments + steps + stage; }
};
FewSharedBytes few_shared_bytes(const FewChannelsLayout& layout);

/// Why the kernel does not take a block on any device, or "" with `layout` set.
std::string few_channels_shape_obstacle(const Problem& problem, FewChannelsLayout& layout);

/// The same, of a device: its compute capability and shared memory.
std::string few_channels_obstacle(const Problem& problem, const Device& device, FewChannelsLayout& layout);

/// The layout of a block that the kernel takes. A pure function of the problem: what moments are merged from
/// does not depend on the device. Working it out takes longer than a launch.
/// \throws std::logic_error for a block that it does not take
FewChannelsLayout few_channels_layout(const Problem& problem);

/// Estimated time in ms of both passes and of what is launched between them.
double few_channels_ms(const Problem& problem, const FewChannelsLayout& layout);

}  // namespace upconv3d
