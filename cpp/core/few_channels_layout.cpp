// SPDX-License-Identifier: Apache-2.0
#include "core/few_channels_layout.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "core/channels.hpp"
#include "core/direct_limits.hpp"
#include "core/extents.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

constexpr std::int64_t kChunkBytes = 16;
constexpr std::int64_t kColumnTile = 8, kRowTile = 16;  // of an instruction's result
constexpr std::int64_t kMaxColumnTiles = 4;  // of two phases and 32 positions: 64 accumulators of a thread
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

// What an H200 has, and what the estimate counts with: the tiles of a block must not depend on the device.
constexpr std::int64_t kMultiprocessors = 132;
constexpr std::int64_t kSharedPerBlock = 227 * 1024;
static_assert(kSharedPerBlock <= kChunkBytes << kFewOffsetBits, "steps tell every place of a box that fits");
// Of blocks whose outputs are staged: every device from 8.0 on has that, and two such fit into an H200's
// multiprocessor, one writing while the other multiplies.
constexpr std::int64_t kStagedPerBlock = 99 * 1024;

/// A tap along one axis: the phase that it belongs to and the input that it reads there.
struct AxisTap {
  std::int64_t phase, offset;
};

AxisTap axis_tap(const Problem& p, int axis, std::int64_t tap) {
  const std::int64_t s = p.stride[axis];
  const std::int64_t at = tap * p.dilation[axis] - p.padding[axis];
  const std::int64_t phase = ((at % s) + s) % s;
  return {phase, (phase - at) / s};
}

std::int64_t chunk_elements(const Problem& p) {
  return kChunkBytes / size_of(p.dtype);
}

/// Of the tensor cores for each of the convolution's: float32's accuracy takes three of TF32.
int product_count(const Problem& p) {
  return p.is_ieee() ? 3 : 1;
}

/// What a store of 8 positions, or as many pairs, of y [N,K,Z,P,Q] takes longer because it fills sectors only
/// in part, in us: in odd rows, where even rows begin amid a sector, and where neighbours of a row are no
/// pair, of which 17 to 35e-6 were seen (perf/NOTES.md, "Few channels" and "What the limits of plans cost").
double us_of_pieces(const Problem& p, const FewChannelsLayout& layout) {
  constexpr double kOddPairs = 72e-6, kInPart = 25e-6;
  constexpr std::int64_t kSectorBytes = 32;
  if (p.y_layout != Layout::kNCDHW) return 0;
  const std::int64_t width = p.out()[2];
  if (width % 2 != 0) return kOddPairs;
  const bool fills = layout.paired == p.stride[2] && 8 * layout.paired * size_of(p.dtype) >= kSectorBytes;
  return fills && width * size_of(p.dtype) % kSectorBytes == 0 ? 0 : kInPart;
}

/// By how much longer tiles take whose warps leave a multiprocessor mostly empty: 1.5 where four have work
/// and 1.8 where two do, of 11 blocks that took 1.3 to 2.3 of what they were estimated at without it.
double idle_warps(const FewChannelsLayout& layout) {
  constexpr std::int64_t kHalf = 113 * 1024;  // of an H200's shared memory, two blocks' share
  constexpr double kPerWarp = 0.13;
  const int groups =
      std::max(1, std::min(static_cast<int>(layout.groups.size()), kFewWarps / layout.row_warps));
  const int warps = groups * layout.row_warps * (layout.shared_bytes > kHalf ? 1 : 2);
  return 1 + kPerWarp * std::max(0, kFewWarps - warps);
}

/// What does not depend on the tile.
FewChannelsLayout fixed_part(const Problem& p) {
  FewChannelsLayout layout;
  layout.paired = p.stride[2] % 2 == 0 ? 2 : 1;
  const std::int64_t columns =
      std::min(std::bit_ceil(static_cast<std::uint64_t>(ceil_div(group_outputs(p), kColumnTile))),
               static_cast<std::uint64_t>(kMaxColumnTiles));
  // Single phases with eight channels go with those of sixteen: a variant less to compile.
  layout.column_tiles = static_cast<int>(std::max<std::int64_t>(columns, layout.paired == 1 ? 2 : 1));
  layout.row_tiles = few_row_tiles(layout.column_tiles, layout.paired, product_count(p));
  layout.channel_blocks =
      static_cast<int>(p.groups * ceil_div(group_outputs(p), kColumnTile * layout.column_tiles));
  layout.chunks = static_cast<int>(ceil_div(group_inputs(p), chunk_elements(p)));
  layout.pitch = (layout.chunks + 1) | 1;
  Extent3 upper{};
  for (int axis = 0; axis < 3; ++axis) {
    layout.lower[axis] = std::numeric_limits<std::int64_t>::max();
    upper[axis] = std::numeric_limits<std::int64_t>::min();
    for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
      const std::int64_t offset = axis_tap(p, axis, tap).offset;
      layout.lower[axis] = std::min(layout.lower[axis], offset);
      upper[axis] = std::max(upper[axis], offset);
    }
    layout.box[axis] = upper[axis] - layout.lower[axis];  // beyond the tile
  }
  return layout;
}

/// Taps of a list of chunks, by the offset along depth, height and width that they read.
using ListTaps = std::map<std::array<std::int64_t, 3>, std::vector<std::int64_t>>;

/// The taps of each group and list: of kFewBoth two per offset, the first phase's first.
std::vector<std::array<ListTaps, kFewLists>> tap_lists(const Problem& p, int paired,
                                                       std::vector<FewGroup>& groups) {
  const std::int64_t pairs = p.stride[2] / paired;
  std::vector<std::array<ListTaps, 2>> phases(static_cast<std::size_t>(p.stride[0] * p.stride[1] * pairs));
  for (std::int64_t t = 0, tap = 0; t < p.kernel[0]; ++t) {
    for (std::int64_t r = 0; r < p.kernel[1]; ++r) {
      for (std::int64_t s = 0; s < p.kernel[2]; ++s, ++tap) {
        const AxisTap z = axis_tap(p, 0, t), h = axis_tap(p, 1, r), w = axis_tap(p, 2, s);
        const std::int64_t group = (z.phase * p.stride[1] + h.phase) * pairs + w.phase / paired;
        phases[group][w.phase % paired][{z.offset, h.offset, w.offset}].push_back(tap);
      }
    }
  }
  std::vector<std::array<ListTaps, kFewLists>> lists(phases.size());
  for (std::size_t i = 0; i < phases.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    groups.emplace_back().phase = {static_cast<int>(index / pairs / p.stride[1]),
                                   static_cast<int>(index / pairs % p.stride[1]),
                                   static_cast<int>(index % pairs * paired)};
    for (const auto& [offset, taps] : phases[i][0]) {
      const auto other = phases[i][1].find(offset);
      const bool both = other != phases[i][1].end();
      auto& to = lists[i][both ? kFewBoth : kFewFirst][offset] = taps;
      if (both) to.push_back(other->second.front());
    }
    for (const auto& [offset, taps] : phases[i][1]) {
      if (!phases[i][0].contains(offset)) lists[i][kFewSecond][offset] = taps;
    }
  }
  return lists;
}

/// Steps, taps and groups for the box that the layout has.
void set_steps(const Problem& p, FewChannelsLayout& layout) {
  std::vector<FewGroup> groups;
  const auto lists = tap_lists(p, layout.paired, groups);
  layout.taps.assign(static_cast<std::size_t>(volume(p.kernel)), {});
  layout.steps.clear();
  int fragment = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].first_step = static_cast<int>(layout.steps.size());
    groups[i].first_fragment = fragment;
    for (int list = 0; list < kFewLists; ++list) {
      const int stride = list == kFewBoth ? 2 : 1;
      std::vector<std::uint32_t> places;
      for (const auto& [offset, taps] : lists[i][list]) {
        std::int64_t at = 0;
        for (int axis = 0; axis < 3; ++axis) at = at * layout.box[axis] + offset[axis] - layout.lower[axis];
        for (std::size_t slot = 0; slot < taps.size(); ++slot) {
          layout.taps[taps[slot]] = {static_cast<std::uint16_t>(fragment + static_cast<int>(slot)),
                                     static_cast<std::uint16_t>(places.size()),
                                     static_cast<std::uint16_t>(stride)};
        }
        for (int chunk = 0; chunk < layout.chunks; ++chunk) {
          places.push_back(static_cast<std::uint32_t>(at * layout.pitch + chunk));
        }
      }
      // The chunk of zeros behind the channels of the position itself.
      const auto zeros = static_cast<std::uint32_t>(layout.chunks);
      if (places.size() % 2 != 0) places.push_back(zeros);
      const bool leads = list == (layout.paired == 2 ? kFewBoth : kFewFirst);
      if (leads && places.empty()) places = {zeros, zeros};
      groups[i].steps[list] = static_cast<int>(places.size() / 2);
      for (std::size_t at = 0; at < places.size(); at += 2) {
        layout.steps.push_back(places[at] | places[at + 1] << kFewOffsetBits);
      }
      fragment += groups[i].steps[list] * stride;
    }
  }
  layout.fragments = fragment;
  const auto work = [](const FewGroup& group) {
    return 2 * group.steps[kFewBoth] + group.steps[kFewFirst] + group.steps[kFewSecond];
  };
  std::stable_sort(groups.begin(), groups.end(),
                   [&work](const FewGroup& a, const FewGroup& b) { return work(a) > work(b); });
  layout.groups = std::move(groups);
}

/// What a tile takes, in counts.
struct TileWork {
  double products = 0;  // instructions of the tensor cores
  double values = 0;
  double chunks = 0;  // of x, loaded

  explicit TileWork(const FewChannelsLayout& layout) {
    for (const FewGroup& group : layout.groups) {
      products += 2 * group.steps[kFewBoth] + group.steps[kFewFirst] + group.steps[kFewSecond];
    }
    products *= static_cast<double>(layout.column_tiles * layout.row_tiles * layout.row_warps);
    values = static_cast<double>(layout.rows() * layout.column_tiles * kColumnTile * layout.paired) *
             static_cast<double>(layout.groups.size());
    chunks = static_cast<double>(layout.box_positions() * layout.chunks);
  }
};

/// Estimated times of both passes: us of an H200 with L2 cold, fitted to 23 blocks in two dtypes and both
/// orders; off by 13 % as a rule, by 35 % at most (perf/NOTES.md, "Few channels"). What three products take
/// was fitted to 16 blocks in both orders, which both passes together took 0.89 to 1.17 of (there, "Few
/// channels at float32's accuracy").
void set_estimate(const Problem& p, FewChannelsLayout& layout) {
  constexpr double kPerMs = 1e3;
  const bool is_float = p.dtype == DType::kFloat32, splits = p.is_ieee();
  const bool rows = p.y_layout == Layout::kNDHWC;
  const bool copies = p.x_layout == Layout::kNDHWC && group_inputs(p) % chunk_elements(p) == 0 && p.x_aligned;
  const TileWork tile(layout);
  // Tiles of the multiprocessor that gets most.
  const double tiles =
      static_cast<double>(ceil_div(p.n * layout.tile_count() * layout.channel_blocks, kMultiprocessors));
  const double units = static_cast<double>(layout.fragments * layout.column_tiles);  // of weights
  const double of_product = splits ? 5.7e-3 : is_float ? 1.98e-3 : 1.53e-3;
  const double of_output_product = splits ? 4.9e-3 : is_float ? 1.87e-3 : 1.37e-3;
  const double moments_of_tile = 0.7 + of_product * tile.products +
                                 (is_float ? 0.026e-3 : 0.039e-3) * tile.values +
                                 (copies ? 0.27e-3 : 1.38e-3) * tile.chunks;
  // 32 columns, of half the positions per warp, took 1.04 to 1.5 of the rest.
  const double wide = layout.column_tiles == 4 ? 1.12 : 1.0;
  const double idle = idle_warps(layout);
  layout.moments_ms = wide * (6.5 + 0.044 * units + tiles * idle * moments_of_tile) / kPerMs;
  // Pieces of y that share sectors: of 8 positions or pairs, or where staged of whole rows, whose values go
  // through shared memory for that. kStaged was not measured by itself.
  constexpr double kRun = 72e-6, kStaged = 0.025e-3;
  const double piece_values = 8.0 * layout.paired;
  double pieces = 0;
  if (layout.staged) {
    pieces = kRun * static_cast<double>(p.n * p.k) * static_cast<double>(p.out()[0] * layout.tiles[1]) +
             tiles * kStaged * tile.values;
  } else {
    pieces = us_of_pieces(p, layout) / piece_values * static_cast<double>(p.n * p.k) *
             static_cast<double>(p.positions());
  }
  const double of_value = is_float ? 0.093e-3 : rows ? 0.043e-3 : 0.077e-3;
  const double output_of_tile = 0.5 + of_output_product * tile.products + of_value * tile.values +
                                (copies ? 0.1e-3 : 1.03e-3) * tile.chunks;
  layout.output_ms = wide * (9.2 + 0.0145 * units + pieces + tiles * idle * output_of_tile) / kPerMs;
}

}  // namespace

FewSharedBytes few_shared_bytes(const FewChannelsLayout& layout) {
  FewSharedBytes bytes;
  const std::int64_t columns = kColumnTile * layout.column_tiles;
  bytes.weights = layout.fragments * (columns * kFewColumnBytes + kFewFragmentPadding);
  bytes.x = layout.box_positions() * layout.pitch * kChunkBytes;
  bytes.rows = layout.rows() * 8;
  bytes.channels = (kFewChannelParameters + kFewWarps) * columns * 4;
  bytes.moments = kFewWarps * (columns + 1) * 8;
  bytes.steps = ceil_div(static_cast<std::int64_t>(layout.steps.size()) + kFewStepsAhead, 2) * 16;
  bytes.stage = layout.staged ? layout.stage.bytes : 0;
  return bytes;
}

namespace {

/// How many of a warp's 32 stores to the stage go to one bank at most: of 8 positions and 4 threads'
/// channels.
int bank_conflicts(const Problem& p, const FewChannelsLayout& layout, std::int64_t channel) {
  constexpr std::int64_t kBanks = 32, kBankBytes = 4, kPositions = 8, kThreads = 4;
  std::array<std::int64_t, kPositions * kThreads> words{};
  std::size_t count = 0;
  for (std::int64_t position = 0; position < kPositions; ++position) {
    for (std::int64_t thread = 0; thread < kThreads; ++thread) {
      const std::int64_t value = position * p.stride[2] + thread * 2 * layout.column_tiles * channel;
      words[count++] = value * size_of(p.dtype) / kBankBytes;
    }
  }
  std::sort(words.begin(), words.end());
  const auto end = std::unique(words.begin(), words.end());
  std::array<int, kBanks> stores{};
  std::for_each(words.begin(), end, [&](std::int64_t word) { ++stores[word % kBanks]; });
  return *std::max_element(stores.begin(), stores.end());
}

/// Where the tile's outputs lie in shared memory.
void set_stage(const Problem& p, FewChannelsLayout& layout) {
  const std::int64_t chunk = chunk_elements(p);
  const auto congruent = [chunk](std::int64_t least, std::int64_t to) {
    return least + ((to - least) % chunk + chunk) % chunk;
  };
  const Extent3 out = p.out();
  const std::int64_t planes = std::min(layout.tile[0] * p.stride[0], out[0]);
  const std::int64_t run = std::min(layout.tile[1] * p.stride[1], out[1]) * out[2];
  const std::int64_t plane = congruent(run, out[1] * out[2]);
  const std::int64_t least = congruent(planes * plane, p.positions());
  // Two are as few as there can be of pairs: what lies between channels is no choice, up to whole chunks.
  constexpr int kFewConflicts = 2, kPaddings = 8;  // all banks' worth of chunks
  std::int64_t channel = least;
  int conflicts = bank_conflicts(p, layout, channel);
  for (int padding = 1; padding < kPaddings && conflicts > kFewConflicts; ++padding) {
    const int others = bank_conflicts(p, layout, least + padding * chunk);
    if (others < conflicts) channel = least + padding * chunk, conflicts = others;
  }
  const std::int64_t channels = kColumnTile * layout.column_tiles;
  // The first value lies less than a chunk behind the beginning.
  const std::int64_t values = chunk - 1 + (channels - 1) * channel + (planes - 1) * plane + run;
  layout.stage = {static_cast<int>(plane), static_cast<int>(channel),
                  ceil_div(values * size_of(p.dtype), kChunkBytes) * kChunkBytes};
}

/// The layout with another tile, all but its steps: those of a tile and its halo depend on the box.
void set_tile(const Problem& p, const Extent3& halo, const Extent3& tile, FewChannelsLayout& layout) {
  const Extent3 out = p.out();
  layout.tile = tile;
  for (int axis = 0; axis < 3; ++axis) {
    layout.box[axis] = halo[axis] + tile[axis];
    layout.tiles[axis] = ceil_div(ceil_div(out[axis], p.stride[axis]), tile[axis]);
  }
  const std::int64_t row_tiles = ceil_div(volume(tile), kRowTile * layout.row_tiles);
  layout.row_warps = static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(row_tiles)));
  if (layout.staged) set_stage(p, layout);
  layout.shared_bytes = few_shared_bytes(layout).total();
}

/// Among which tiles the best is looked for.
struct TileChoice {
  std::span<const std::int64_t> widths;
  std::int64_t least;   // positions
  std::int64_t shared;  // bytes of a block, at most
};

/// Sets the tile that is estimated quickest, in both passes or where staged in that one; false where none
/// fits.
/// \param halo what a box has beyond its tile
bool set_best_tile(const Problem& p, const Extent3& halo, const TileChoice& choice,
                   FewChannelsLayout& layout) {
  constexpr std::int64_t kDepths[] = {1, 2, 4, 8}, kHeights[] = {1, 2, 4, 8, 16};
  const std::int64_t most = kRowTile * layout.row_tiles * kFewWarps;
  double best_ms = std::numeric_limits<double>::infinity();
  std::optional<Extent3> best;
  for (const std::int64_t depth : kDepths) {
    for (const std::int64_t height : kHeights) {
      for (const std::int64_t width : choice.widths) {
        const std::int64_t positions = depth * height * width;
        if (positions > most || positions < choice.least) continue;
        set_tile(p, halo, {depth, height, width}, layout);
        if (layout.shared_bytes > choice.shared) continue;
        set_estimate(p, layout);
        const double ms = layout.output_ms + (layout.staged ? 0 : layout.moments_ms);
        if (ms >= best_ms) continue;
        best_ms = ms, best = layout.tile;
      }
    }
  }
  if (!best) return false;
  set_tile(p, halo, *best, layout);
  set_estimate(p, layout);
  return true;
}

bool set_tile_of_both(const Problem& p, FewChannelsLayout& layout) {
  constexpr std::int64_t kWidths[] = {1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64};
  constexpr std::int64_t kLeast = 64;  // smaller ones read mostly halo
  const Extent3 halo = layout.box;
  return set_best_tile(p, halo, {kWidths, kLeast, kSharedPerBlock}, layout);
}

/// Gives the output pass tiles of whole rows where that is estimated to be quicker.
void set_staged_output(const Problem& p, FewChannelsLayout& layout) {
  if (us_of_pieces(p, layout) == 0) return;
  Extent3 halo{};
  for (int axis = 0; axis < 3; ++axis) halo[axis] = layout.box[axis] - layout.tile[axis];
  const std::int64_t width[] = {ceil_div(p.out()[2], p.stride[2])};
  FewChannelsLayout staged = layout;
  staged.staged = true;
  if (!set_best_tile(p, halo, {width, 1, kStagedPerBlock}, staged)) return;
  if (staged.output_ms >= layout.output_ms) return;
  set_steps(p, staged);
  layout.output_ms = staged.output_ms;
  layout.output = std::make_shared<const FewChannelsLayout>(std::move(staged));
}

}  // namespace

std::string few_channels_shape_obstacle(const Problem& p, FewChannelsLayout& layout) {
  if (p.operation != Operation::kConvTranspose) return "it is a plain convolution";
  if (p.dtype == DType::kFloat64) return "tensor cores have no float64 of this kind";
  if (!p.tail.norm) return "nothing is normalized";
  if (p.tail.has_skip) return "a skip is added to the convolution";
  if (p.tail.returns_conv) return "the convolution is to be stored";
  const std::int64_t taps = saturating_product(p.kernel[0], p.kernel[1], p.kernel[2]);
  if (taps > kFewMaxTaps) return concat("the kernel's ", taps, " taps are more than ", kFewMaxTaps);
  // Half of what 32 bits count, since tiles reach beyond the volume.
  if (!fits_32_bits(p) || saturating_product(p.k, p.positions()) > kMaxCount / 2 ||
      saturating_product(p.c, volume(p.in)) > kMaxCount / 2 ||
      saturating_product(p.n, p.positions()) > kMaxCount / 2) {
    return "an extent, its positions or a sample's elements exceed 32-bit counters";
  }
  constexpr std::int64_t kMostBlocks = 65535;  // of a grid's y
  if (p.k > kMostBlocks) return concat("output channels ", p.k, " are more than ", kMostBlocks);
  FewChannelsLayout fixed = fixed_part(p);
  const std::int64_t phases = saturating_product(p.stride[0], p.stride[1], p.stride[2]);
  if (phases / fixed.paired > kFewMaxGroups) {
    return concat("the stride ", triple_text(p.stride), " has more than ", kFewMaxGroups,
                  " groups of phases");
  }
  const std::int64_t groups = phases / fixed.paired;
  const std::int64_t halo = longest(fixed.box);
  if (halo >= 1 << kFewOffsetBits) {
    return concat("its taps read inputs ", halo, " apart along an axis, of which a box has less than ",
                  1 << kFewOffsetBits);
  }
  // A list's last step may lack a chunk, and a leading list without taps gets a step of zeros.
  if (saturating_sum(saturating_product(volume(p.kernel), fixed.chunks), groups * (kFewLists + 1)) >
      2 * kFewMaxSteps) {
    return concat("its taps and channels, ", volume(p.kernel), " and ", group_inputs(p), ", take more than ",
                  kFewMaxSteps, " steps");
  }
  layout = std::move(fixed);
  set_steps(p, layout);  // for their number
  if (!set_tile_of_both(p, layout)) {
    return "its weights and a box of x do not fit into a block's shared memory";
  }
  set_steps(p, layout);
  set_staged_output(p, layout);
  return "";
}

std::string few_channels_obstacle(const Problem& p, const Device& device, FewChannelsLayout& layout) {
  constexpr int kAmpere = 80;
  if (device.compute_capability < kAmpere) {
    return concat("compute capability ", device.compute_capability / 10, '.', device.compute_capability % 10,
                  " is below 8.0");
  }
  const std::string obstacle = few_channels_shape_obstacle(p, layout);
  if (!obstacle.empty()) return obstacle;
  const std::int64_t available = shared_bytes_per_block(device.compute_capability);
  if (layout.shared_bytes > available) {
    return concat("its tiles take ", layout.shared_bytes, " bytes of shared memory, of which a block has ",
                  available);
  }
  return "";
}

FewChannelsLayout few_channels_layout(const Problem& p) {
  FewChannelsLayout layout;
  const std::string obstacle = few_channels_shape_obstacle(p, layout);
  if (!obstacle.empty()) {
    throw std::logic_error(
        concat("upconv3d: conv_transpose_few_channels_sm80 must be able to run the block; got ", describe(p),
               ", but ", obstacle, ". select_plan must choose another plan."));
  }
  return layout;
}

double few_channels_ms(const Problem&, const FewChannelsLayout& layout) {
  constexpr double kBetweenMs = 0.008;  // group_norm_finalize
  return layout.moments_ms + layout.output_ms + kBetweenMs;
}

}  // namespace upconv3d
