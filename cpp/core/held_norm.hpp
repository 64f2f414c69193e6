// SPDX-License-Identifier: Apache-2.0
/// \file
/// How one launch normalizes a convolution that all multiprocessors together can hold: the partition of its
/// values among blocks, which follows from the problem and the compute capability, so that the order of
/// merging does too.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "core/problem.hpp"

namespace upconv3d {

/// Values that registers of a thread keep from the first sum to the result, where it has no more: with what
/// else such a kernel needs they take 78 to 108 registers.
inline constexpr int kKeptValues = 32;
/// 16-byte vectors of them, of elements of `bytes` bytes.
constexpr int kept_vectors(int bytes) {
  return kKeptValues * bytes / 16;
}

/// Threads of a block that normalizes, at most: so many may have the 128 registers that some forms take.
inline constexpr int kMaxHeldThreads = 512;

/// Bytes of shared memory that a kernel gets without being asked.
inline constexpr std::int64_t kUnaskedSharedBytes = 48 * 1024;

/// Of NDHWC. A block's tile is a slab of whole norm groups over some rows of one sample. A row is what `fold`
/// neighbouring positions have of a slab, a whole number of 16-byte vectors.
struct HeldTiles {
  std::int64_t fold = 1;        // positions of a row; more than 1 where K channels are no whole vectors
  std::int64_t slabs = 1;       // of a sample's channels
  std::int64_t tiles = 1;       // of a slab's rows; with more than one, blocks wait for each other,
  bool clusters = false;        // those of a slab, which are a cluster; else all
  std::int64_t rows = 0;        // of a tile, at most
  std::int64_t columns = 0;     // vectors of a row
  std::int64_t row_lanes = 0;   // rows that a block takes in at once
  std::int64_t threads = 0;     // of a block, at least columns * row_lanes
  std::int64_t loads = 0;       // vectors of a thread, at most
  std::int64_t slot_lanes = 1;  // neighbouring values of a vector that are always of one group
  bool kept = false;            // whether values stay in registers, where not all blocks wait

  std::int64_t slot_rows = 0;  // sums that a block takes of each lane of a row

  /// Rows whose values a thread stores together where y lies in planes and tiles and row_lanes are whole runs
  /// of them, as they are unless that takes more threads or loads. (Of four rows, registers spill.)
  static constexpr std::int64_t kRunRows = 2;

  // Of a block's shared memory, in this order:
  std::int64_t held_bytes = 0;                   // [loads,threads] vectors
  std::int64_t slots_bytes = 0;                  // [columns*lanes/slot_lanes,slot_rows] float
  std::int64_t table_bytes = 0;                  // [kTableRows, channels of a slab] float
  static constexpr std::int64_t kTableRows = 6;  // mean, scale, shift, bias, slope and M2

  /// Whether several rows share a warp, whose threads add them up first.
  bool shares_warps() const { return columns <= 16 && (columns & (columns - 1)) == 0; }
  std::int64_t shared_bytes() const { return held_bytes + slots_bytes + table_bytes; }
};

/// Of NCDHW, where a norm group of a sample is contiguous but need not start on a 16-byte boundary. A tile is
/// a stretch of one group; a block takes one tile, or some whole groups, each by a team of its threads.
struct HeldPlanes {
  std::int64_t tiles = 1;         // of a group; with more than one, blocks wait for each other,
  bool clusters = false;          // those of a group, which are a cluster; else all
  std::int64_t tile_values = 0;   // of a tile, at most; a whole number of 16-byte vectors where tiles > 1
  std::int64_t teams = 1;         // of a block; 1 where tiles > 1
  std::int64_t team_threads = 0;  // a power of two, at least a warp
  std::int64_t loads = 0;         // vectors of a thread, at most
  std::int64_t channels = 0;      // of a tile, at most
  bool kept = false;              // as HeldTiles::kept

  // Of a block's shared memory, in this order:
  std::int64_t held_bytes = 0;                   // [loads,threads] vectors
  std::int64_t slots_bytes = 0;                  // [threads/32] float
  std::int64_t table_bytes = 0;                  // [teams,kTableRows,channels] float
  static constexpr std::int64_t kTableRows = 4;  // scale, shift, bias and slope

  /// Threads of a block that keep their values, at most: of 80 registers each, three such blocks fill a
  /// multiprocessor.
  static constexpr std::int64_t kKeptThreads = 256;

  std::int64_t threads() const { return teams * team_threads; }
  std::int64_t shared_bytes() const { return held_bytes + slots_bytes + table_bytes; }
};

using HeldCut = std::variant<HeldTiles, HeldPlanes>;

/// Whether held norms have kernels of their own for an activation before the normalization. Those that decide
/// at run time are long, and a short launch waits for its code (12 us, where LeakyReLU's own takes half).
inline bool has_held_kernel(Activation before) {
  return is_floor(before) || before == Activation::kLeakyRelu;
}

/// Whether the launch of this cut is one whose values stay in registers.
inline bool keeps_values(const HeldCut& cut) {
  return std::visit([](const auto& of) { return of.kept && (of.tiles == 1 || of.clusters); }, cut);
}

/// Shared memory that a block may take on a device of this compute capability; 0 where this kernel cannot
/// run.
std::int64_t held_shared_limit(int compute_capability);

/// The tiles of `p`'s convolution in NDHWC, or nothing where it is too large, where its channels do not fall
/// into vectors (of one position, for y in NCDHW), or where what follows it takes the three passes: a skip,
/// float64.
std::optional<HeldTiles> held_tiles(const Problem& p, int compute_capability);

/// The same in NCDHW, which y must be as well.
std::optional<HeldPlanes> held_planes(const Problem& p, int compute_capability);

/// Whichever of them a convolution in the order `layout` has.
std::optional<HeldCut> held_cut(const Problem& p, Layout layout, int compute_capability);

}  // namespace upconv3d
