// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/held_norm.hpp: which convolutions one launch normalizes, and how they are cut. Without torch or CUDA.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include "core/held_norm.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// A convolution with kernel 1, so that `positions` are the output's.
Problem of_size(std::int64_t n, std::int64_t k, std::int64_t positions, std::int64_t num_groups,
                DType dtype = DType::kBFloat16) {
  Problem p;
  p.n = n, p.c = 64, p.k = k, p.in = {positions, 1, 1}, p.kernel = {1, 1, 1};
  p.num_groups = num_groups;
  p.dtype = dtype;
  p.x_layout = p.y_layout = Layout::kNDHWC;
  return p;
}

/// Whether the blocks that wait for each other all fit on a card; in clusters, on GPUs that have them, with
/// room to spare.
///
/// \param parts   slabs or groups of all samples, of so many tiles each
/// \param threads of a block
template <class Held>
bool waits_well(const Held& t, std::int64_t parts, std::int64_t threads, int capability) {
  if (!t.clusters) return t.tiles == 1 || parts * t.tiles <= 128;
  return capability >= 90 && t.tiles > 1 && t.tiles <= 8 && parts * t.tiles * threads <= 12 * 8 * 512;
}

/// Tiles cover every row of every slab once, slabs are whole groups of whole vectors, and a block holds its
/// tile.
void test_tiles_of(const Problem& p, int capability) {
  const std::string what = concat("tiles on ", capability, " of ", describe(p));
  const std::optional<HeldTiles> found = held_tiles(p, capability);
  if (!found) return;
  const HeldTiles& t = *found;
  const std::int64_t lanes = 16 / size_of(p.dtype), rows = p.positions() / t.fold;
  expect(rows * t.fold == p.positions() && (t.fold == 1 || t.slabs == 1), what + ": folded rows");
  expect(t.columns * lanes * t.slabs == p.k * t.fold, what + ": columns");
  expect(p.num_groups % t.slabs == 0, what + ": whole groups");
  expect(t.tiles * t.rows >= rows && (t.tiles - 1) * t.rows < rows, what + ": rows");
  expect(t.columns * t.row_lanes <= t.threads && t.threads <= 512 && t.threads % 32 == 0, what + ": threads");
  expect(t.loads * t.row_lanes >= t.rows, what + ": loads");
  expect((p.k / p.num_groups) % t.slot_lanes == 0 && lanes % t.slot_lanes == 0, what + ": slots");
  expect(t.shared_bytes() <= held_shared_limit(capability), what + ": shared memory");
  expect(t.tiles == 1 || t.tiles * (p.num_groups / t.slabs) <= 1024, what + ": partial moments");
  expect(waits_well(t, p.n * t.slabs, t.threads, capability), what + ": blocks that wait run at once");
}

/// The same of a result that is transposed, whose tiles are whole runs of rows where that costs nothing.
/// \return whether they are
bool test_runs_of(Problem p, int capability) {
  const std::optional<HeldTiles> rows = held_tiles(p, capability);
  p.x_layout = p.y_layout = Layout::kNCDHW;
  const std::string what = concat("transposed on ", capability, " of ", describe(p));
  const std::optional<HeldTiles> t = held_tiles(p, capability);
  if (!rows || rows->fold > 1) return false;
  expect(t.has_value(), what + ": held as in NDHWC");
  if (!t) return false;
  test_tiles_of(p, capability);
  if (t->slabs == rows->slabs && t->clusters == rows->clusters) {
    expect(t->loads <= rows->loads && t->threads <= rows->threads, what + ": loads and threads");
  }
  return p.positions() % HeldTiles::kRunRows == 0 && t->rows % HeldTiles::kRunRows == 0 &&
         t->row_lanes % HeldTiles::kRunRows == 0;
}

/// Tiles cover every value of a group once, in stretches that start on the group's own vectors.
/// \return whether there are any
bool test_planes_of(Problem p, int capability) {
  p.x_layout = p.y_layout = Layout::kNCDHW;
  const std::string what = concat("planes on ", capability, " of ", describe(p));
  const std::optional<HeldPlanes> found = held_planes(p, capability);
  if (!found) return false;
  const HeldPlanes& t = *found;
  const std::int64_t lanes = 16 / size_of(p.dtype), values = p.k / p.num_groups * p.positions();
  expect(t.tiles * t.tile_values >= values && (t.tiles - 1) * t.tile_values < values, what + ": values");
  expect(t.tiles == 1 || (t.tile_values % lanes == 0 && t.teams == 1), what + ": tiles");
  expect(t.threads() <= 512 && t.team_threads >= 32 && (t.team_threads & (t.team_threads - 1)) == 0,
         what + ": threads");
  const std::int64_t offset = p.positions() % lanes == 0 ? 0 : lanes - 1;
  expect(t.loads * t.team_threads * lanes >= offset + t.tile_values, what + ": loads");
  bool has_channels = true;
  for (std::int64_t begin = 0; begin < values; begin += t.tile_values) {
    const std::int64_t last = std::min(begin + t.tile_values, values) - 1;
    has_channels = has_channels && t.channels > last / p.positions() - begin / p.positions();
  }
  expect(has_channels, what + ": channels");
  expect(t.table_bytes >= 4 * t.teams * HeldPlanes::kTableRows * t.channels &&
             t.slots_bytes >= 4 * t.threads() / 32 && t.held_bytes == t.loads * t.threads() * 16,
         what + ": parts of shared memory");
  expect(t.shared_bytes() <= held_shared_limit(capability), what + ": shared memory");
  expect(waits_well(t, p.n * p.num_groups, t.threads(), capability), what + ": blocks that wait run at once");
  return true;
}

/// Of groups that are more than run at once, threads take more vectors each, where that was timed.
void test_narrowed_teams() {
  const auto team = [](std::int64_t n, std::int64_t k, std::int64_t positions, int capability, DType dtype) {
    Problem p = of_size(n, k, positions, k, dtype);
    p.x_layout = p.y_layout = Layout::kNCDHW;
    const std::optional<HeldPlanes> found = held_planes(p, capability);
    return found ? std::pair{found->team_threads, found->loads} : std::pair<std::int64_t, std::int64_t>{};
  };
  using Team = std::pair<std::int64_t, std::int64_t>;
  expect(team(16, 192, 1728, 90, DType::kFloat32) == Team{32, 14}, "teams of a warp");
  expect(team(16, 192, 1728, 86, DType::kFloat32) == Team{128, 4}, "not where it was not timed");
  expect(team(2, 192, 7776, 90, DType::kFloat32) == Team{256, 8}, "teams of half the threads");
  expect(team(2, 192, 7776, 90, DType::kBFloat16) == Team{256, 4}, "groups that all run at once");
  // Tables of as many channels as these have are no room for more teams.
  Problem p = of_size(4096, 2048, 1, 1);
  p.x_layout = p.y_layout = Layout::kNCDHW;
  expect(held_planes(p, 90).has_value(), "groups of many channels are held");
}

/// Of NDHWC's blocks that do not wait, likewise.
void test_narrowed_blocks() {
  const auto block = [](std::int64_t n, std::int64_t k, std::int64_t positions, int capability) {
    const std::optional<HeldTiles> found =
        held_tiles(of_size(n, k, positions, 8, DType::kBFloat16), capability);
    return found ? std::pair{found->threads, found->loads} : std::pair<std::int64_t, std::int64_t>{};
  };
  using Block = std::pair<std::int64_t, std::int64_t>;
  expect(block(64, 256, 512, 90) == Block{128, 16}, "blocks of 128 threads");
  expect(block(64, 256, 512, 80) == Block{512, 4}, "not where it was not timed");
  expect(block(32, 256, 512, 90) == Block{256, 8}, "no more than run at once");
  expect(block(16, 256, 512, 90) == Block{512, 4}, "blocks that all run at once");
  int narrowed = 0;
  for (const int capability : {90, 120}) {
    for (std::int64_t k = 8; k <= 2048; k += 8) {
      for (const std::int64_t positions : {9, 18, 27, 64, 125, 343}) {
        const Problem p = of_size(264, k, positions, 1, DType::kBFloat16);
        test_tiles_of(p, capability);
        test_runs_of(p, capability);
        const std::optional<HeldTiles> t = held_tiles(p, capability), as_before = held_tiles(p, 86);
        const std::string what = concat(capability, " of ", describe(p));
        expect(capability == 90 || t.has_value() == as_before.has_value(), "held as without it on " + what);
        const bool is_narrowed = t && as_before && t->tiles == 1 && as_before->tiles == 1 &&
                                 t->slabs == as_before->slabs && t->threads < as_before->threads;
        if (!is_narrowed) continue;
        ++narrowed;
        expect(t->loads <= 16, what + ": loads of a narrowed block");
      }
    }
  }
  expect(narrowed > 50, concat(narrowed, " narrowed blocks"));
}

/// Values stay in registers where a thread has at most 32 of them, and what is due of each is known.
void test_kept() {
  const auto is_kept = [](Problem p, Layout layout) {
    p.x_layout = p.y_layout = layout;
    const std::optional<HeldCut> cut = held_cut(p, layout, 90);
    return cut && keeps_values(*cut);
  };
  for (const Layout layout : {Layout::kNDHWC, Layout::kNCDHW}) {
    Problem p = of_size(2, 64, 1728, 8);
    expect(is_kept(p, layout), "a small block");
    p.tail.activation = Activation::kLeakyRelu;
    expect(is_kept(p, layout), "LeakyReLU before the norm");
    p.tail.activation = Activation::kSilu;
    expect(!is_kept(p, layout), "SiLU before the norm is chosen at run time");
    p.tail.order = Order::kNormAct;
    expect(is_kept(p, layout), "SiLU behind it when the kernel is compiled");
  }
  Problem p = of_size(2, 64, 1728, 8);
  p.y_layout = Layout::kNCDHW;
  const std::optional<HeldTiles> transposed = held_tiles(p, 90);
  expect(transposed && transposed->kept, "a transposed result");
  expect(!is_kept(of_size(64, 256, 512, 8), Layout::kNDHWC), "16 vectors of bfloat16");
  expect(!is_kept(of_size(16, 192, 1728, 192, DType::kFloat32), Layout::kNCDHW), "14 vectors of float32");
  expect(is_kept(of_size(2, 64, 729, 64), Layout::kNCDHW), "planes of no whole vectors, of one channel");
  expect(!is_kept(of_size(2, 64, 729, 8), Layout::kNCDHW), "and of several");
}

void test_tiles() {
  int held = 0, waiting = 0, clusters = 0, planes = 0, runs = 0;
  for (const std::int64_t n : {1, 2, 64}) {
    for (const std::int64_t k : {1, 2, 8, 12, 20, 64, 128, 320, 1024, 4096}) {
      for (const std::int64_t groups : {1, 2, 4, 8, 32, 320, 1024}) {
        if (k % groups != 0) continue;
        for (const std::int64_t positions : {1, 7, 64, 1000, 4096, 39304, 110592}) {
          for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
            for (const int capability : {80, 86, 90}) {
              const Problem p = of_size(n, k, positions, groups, dtype);
              test_tiles_of(p, capability);
              planes += test_planes_of(p, capability);
              runs += test_runs_of(p, capability);
              const auto tiles = held_tiles(p, capability);
              held += tiles.has_value(), waiting += tiles && tiles->tiles > 1 && !tiles->clusters;
              clusters += tiles && tiles->clusters;
            }
          }
        }
      }
    }
  }
  expect(planes > held / 2, concat(planes, " held in NCDHW"));
  expect(runs > held / 4, concat(runs, " of ", held, " held are transposed in runs"));
  expect(waiting > 100 && clusters > 100 && held - waiting - clusters > 100,
         concat(held, " held, ", waiting, " of them waiting for all blocks, ", clusters, " for clusters"));
}

void test_what_is_held() {
  const auto is_held = [](const Problem& p, Layout layout = Layout::kNDHWC, int capability = 90) {
    return held_cut(p, layout, capability).has_value();
  };
  const auto in_planes = [](Problem p) {
    p.x_layout = p.y_layout = Layout::kNCDHW;
    return p;
  };
  const Problem small = of_size(2, 64, 4096, 8);
  expect(is_held(small), "a small block");
  expect(!is_held(small, Layout::kNCDHW), "a result in NCDHW that y is to have in the other order");
  expect(is_held(in_planes(small), Layout::kNCDHW), "NCDHW");
  expect(is_held(in_planes(small)), "NDHWC that y is to have in NCDHW");
  expect(is_held(in_planes(of_size(2, 12, 4097, 3)), Layout::kNCDHW),
         "channels of no whole vectors in NCDHW");
  expect(!is_held(in_planes(of_size(2, 12, 4096, 3))),
         "channels that end within a vector are not transposed");
  expect(!is_held(small, Layout::kNDHWC, 75), "before 8.0");
  expect(!is_held(of_size(2, 64, 4096 * 32, 8)), "33 MB");
  expect(!is_held(of_size(2, 12, 4097, 3)),
         "12 channels are no whole vectors, nor are two positions of 4097");
  expect(is_held(of_size(2, 12, 4096, 3)), "two positions of 12 channels are three vectors");
  expect(!is_held(of_size(2, 64, 4096, 8, DType::kFloat64)), "float64");
  Problem p = small;
  p.tail.has_skip = true;
  expect(!is_held(p), "a skip");
  p = small;
  p.tail.norm = false;
  expect(!is_held(p), "no norm");
  p = small;
  p.tail.activation = Activation::kGelu;
  p.tail.order = Order::kNormAct;
  expect(is_held(p), "gelu after the normalization");
  const auto instance_norm = held_tiles(of_size(2, 320, 512, 320), 90);
  expect(instance_norm && instance_norm->tiles == 1 && instance_norm->slabs == 20,
         "groups of one channel, in slabs whose blocks need not wait");
  const auto many_groups = held_tiles(of_size(1, 24, 73728, 24), 90);
  expect(many_groups && many_groups->slabs == 1 && many_groups->tiles == 42,
         "as many tiles as keep what every block merges within 1024 partial moments");
  const auto narrow = held_tiles(of_size(1, 64, 18432, 64), 90);
  expect(narrow && narrow->slabs == 4 && narrow->tiles == 32 && !narrow->clusters,
         "of so many groups, narrower slabs have more blocks");
  const auto wide = held_tiles(of_size(1, 64, 18432, 8), 90);
  expect(wide && wide->slabs == 1 && wide->tiles == 128, "of few groups the widest have as many");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_tiles();
    upconv3d::test_narrowed_teams();
    upconv3d::test_narrowed_blocks();
    upconv3d::test_kept();
    upconv3d::test_what_is_held();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "held_norm: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
