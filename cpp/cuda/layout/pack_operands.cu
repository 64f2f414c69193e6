// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_operands: 16-bit x and w to operand form, in one launch.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda/check.hpp"
#include "cuda/layout/input_tile.cuh"
#include "cuda/layout/ndhwc_tile.cuh"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/weight_columns.cuh"
#include "cuda/layout/weight_lines.cuh"
#include "cuda/layout/zero_region.cuh"

namespace upconv3d::cuda {
namespace {

/// What happens to x.
enum class InputPath { kStays, kCopiedByFours, kCopied, kTransposedByFours, kTransposed };

constexpr bool is_copied(InputPath path) {
  return path == InputPath::kCopied || path == InputPath::kCopiedByFours;
}

/// Elements of x that a thread loads at once.
constexpr int elements_of_load(InputPath path) {
  return path == InputPath::kCopiedByFours || path == InputPath::kTransposedByFours ? 4 : 1;
}

/// How w is read: dense ones in lines, four elements a load or one, others channel by channel.
enum class WeightPath { kLinesByFours, kLines, kGathered };

/// What a kernel of this path needs to know of w.
template <WeightPath kPath>
using WeightArgsOf = std::conditional_t<kPath == WeightPath::kGathered, WeightArgs, WeightLines>;

/// Blocks that an SM must hold, 0: any number. Two transpositions in one kernel would take registers for four
/// blocks; five have 80 KB in flight. Loaded one by one, the 32 elements of a thread need those registers to
/// be on their way together. The other kernels come to five or six unasked.
constexpr int blocks_per_sm(InputPath path) {
  return path == InputPath::kTransposedByFours ? 5 : path == InputPath::kTransposed ? 4 : 0;
}

constexpr int kCopiesPerThread = 2;  // vectors of 8 channels in flight

/// Eight packed channels of a position of x [N,D,H,W,C].
struct CopiedVector {
  std::int64_t row;
  PackedChannel from;

  /// \param vector counted from the first lane of `first_row` on
  __device__ CopiedVector(const InputArgs& args, std::int64_t first_row, std::uint32_t vector)
      : row(first_row + vector / args.lanes), from(args, vector % args.lanes * 8) {}

  __device__ const std::uint16_t* source(const InputArgs& args) const {
    return static_cast<const std::uint16_t*>(args.x) + row * args.channels + from.channel(args);
  }
};

/// Right in layout and dtype, x [N,D,H,W,C] is packed because TMA wants an aligned address, whole 16-byte
/// chunks, or groups apart. Vectors of 8 packed channels, those of all groups side by side, are shared out
/// position by position.
///
/// \tparam kVector elements of a load: 4 where C/groups is a multiple of 4 and x is 8-byte aligned, else 1
/// \param rows positions of all samples
template <int kVector>
__device__ inline void copy_stretch(const InputArgs& args, std::int64_t rows, std::uint32_t stretch) {
  const std::int64_t first = static_cast<std::int64_t>(stretch) * (kInputThreads * kCopiesPerThread);
  const std::int64_t first_row = first / args.lanes;
  const std::uint32_t first_lane = static_cast<std::uint32_t>(first - first_row * args.lanes);
  std::uint32_t words[kCopiesPerThread][8 / kVector][kVector == 4 ? 2 : 1];
  // All loads before the first use, so that they are on their way together.
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    const CopiedVector at(args, first_row, first_lane + i * kInputThreads + threadIdx.x);
#pragma unroll
    for (int j = 0; j < 8; j += kVector) {
      const bool is_there = at.row < rows && at.from.within + j < args.group_channels;
      if constexpr (kVector == 4) {
        load_words_if(is_there, at.source(args) + j, words[i][j / kVector]);
      } else {
        load_word_if(is_there, at.source(args) + j, words[i][j][0]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    const CopiedVector at(args, first_row, first_lane + i * kInputThreads + threadIdx.x);
    if (at.row >= rows) return;
    std::uint16_t eight[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t word = kVector == 4 ? words[i][j / 4][j % 4 / 2] >> (j % 2 * 16) : words[i][j][0];
      eight[j] = static_cast<std::uint16_t>(word);
    }
    const std::int64_t n = args.groups == 1 ? 0 : at.row / args.positions;
    const std::int64_t out_row = at.row + (n * (args.groups - 1) + at.from.group) * args.positions;
    store_eight(args.hi, out_row, at.from.within, args.pitch, vector_of(encode(eight).hi));
  }
}

/// pack_operands: the first `weight_blocks` blocks pack w, the others x, beginning at x's end: what the
/// convolution reads first is then what L2 still holds.
///
/// \param rows of x, N*D*H*W
template <InputPath kPath, WeightPath kWeightPath>
__global__ void __launch_bounds__(kInputThreads, blocks_per_sm(kPath))
    pack_operands(const WeightArgsOf<kWeightPath> weight, const std::uint32_t weight_blocks,
                  const InputArgs input, const std::int64_t rows, const ZeroRegion region) {
  clear(region);
  if (blockIdx.x < weight_blocks) {
    if constexpr (kWeightPath == WeightPath::kGathered) {
      pack_weight_columns<Scaling::kNone, 1>(weight, blockIdx.x);
    } else {
      pack_weight_tile<kWeightPath == WeightPath::kLinesByFours ? 4 : 1>(weight, blockIdx.x);
    }
    return;
  }
  const std::uint32_t index = gridDim.x - 1 - blockIdx.x;
  if constexpr (is_copied(kPath)) {
    copy_stretch<elements_of_load(kPath)>(input, rows, index);
  } else if constexpr (kPath != InputPath::kStays) {
    pack_ncdhw_tile<elements_of_load(kPath)>(input, input_tile(input, index), InputRows{});
  }
}

/// What copy_stretch reads of InputArgs.
InputArgs copy_args(const PackParams& params) {
  const Problem& problem = params.problem;
  InputArgs args{};
  args.x = params.x;
  args.hi = static_cast<std::uint16_t*>(params.x_hi);
  args.channels = problem.c;
  args.positions = volume(problem.in);
  args.pitch = static_cast<std::uint32_t>(operand_channels(problem));
  args.groups = static_cast<std::uint32_t>(problem.groups);
  args.group_channels = static_cast<std::uint32_t>(group_inputs(problem));
  args.lanes = static_cast<std::uint32_t>(problem.groups * args.pitch / kChannelUnit);
  return args;
}

/// \param weight_blocks of the grid, that pack w
template <InputPath kPath, WeightPath kWeightPath>
void launch(const PackParams& params, const WeightArgsOf<kWeightPath>& weight, std::int64_t weight_blocks,
            cudaStream_t stream) {
  const Problem& problem = params.problem;
  const std::int64_t rows = problem.n * volume(problem.in);
  InputArgs input{};
  std::int64_t input_blocks = 0;
  if constexpr (is_copied(kPath)) {
    input = copy_args(params);
    input_blocks = ceil_div(rows * input.lanes, kInputThreads * kCopiesPerThread);
  } else if constexpr (kPath != InputPath::kStays) {
    input = input_args(params, elements_of_load(kPath));
    input_blocks = input_tiles(input, problem);
  }
  const unsigned grid = grid_of(weight_blocks + input_blocks, "pack_operands");
  const ZeroRegion region{params.zero, params.zero_bytes};
  pack_operands<kPath, kWeightPath><<<grid, kInputThreads, 0, stream>>>(
      weight, static_cast<std::uint32_t>(weight_blocks), input, rows, region);
  check_launch("pack_operands");
}

template <InputPath kPath>
void launch(const PackParams& params, cudaStream_t stream) {
  if (params.w == nullptr) {
    launch<kPath, WeightPath::kGathered>(params, WeightArgs{}, 0, stream);
    return;
  }
  if (const std::optional<WeightLines> lines = weight_lines(params)) {
    const std::int64_t tiles = weight_tiles(*lines);
    line_vector(*lines) == 4 ? launch<kPath, WeightPath::kLinesByFours>(params, *lines, tiles, stream)
                             : launch<kPath, WeightPath::kLines>(params, *lines, tiles, stream);
    return;
  }
  constexpr std::int64_t kSectorColumns = 16;  // 32 bytes of 16 bit
  constexpr std::int64_t kBlocks = 1;          // items are parted too: columns alone need not fill the card
  constexpr std::int64_t kItemsPerThread = 2;  // 16 loads in flight
  WeightArgs weight = weight_args(params, kSectorColumns, kBlocks);
  const std::int64_t items = weight.block_items;
  weight.block_items = std::min(items, kItemsPerThread * kInputThreads);
  const std::int64_t blocks = weight.column_blocks * ceil_div(items, weight.block_items);
  launch<kPath, WeightPath::kGathered>(params, weight, blocks, stream);
}

}  // namespace

void launch_pack_operands(const PackParams& params, cudaStream_t stream) {
  if (params.x_hi == nullptr) {
    launch<InputPath::kStays>(params, stream);
  } else if (params.problem.x_layout == Layout::kNDHWC) {
    input_vector(params) == 4 ? launch<InputPath::kCopiedByFours>(params, stream)
                              : launch<InputPath::kCopied>(params, stream);
  } else if (input_vector(params) == 4) {
    launch<InputPath::kTransposedByFours>(params, stream);
  } else {
    launch<InputPath::kTransposed>(params, stream);
  }
}

}  // namespace upconv3d::cuda
