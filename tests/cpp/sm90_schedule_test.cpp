// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/sm90_schedule.hpp: on which tiles the SM90 kernel runs, and how the output is cut. Without torch or
/// CUDA.

#include "core/sm90_schedule.hpp"

#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/cut.hpp"
#include "core/im2col_limits.hpp"
#include "core/phase_pairs.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/ring_shape.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

constexpr int kSms = 132;

/// Stride 1 in bfloat16 channels_last_3d, a cube.
Problem cube(std::int64_t n, std::int64_t c, std::int64_t k, std::int64_t extent, std::int64_t kernel,
             std::int64_t padding) {
  Problem p;
  p.n = n, p.c = c, p.k = k;
  p.in = {extent, extent, extent}, p.kernel = {kernel, kernel, kernel};
  p.padding = {padding, padding, padding};
  p.dtype = DType::kBFloat16;
  p.x_layout = p.y_layout = Layout::kNDHWC;
  return p;
}

ConvInstance variant(int channels, int positions, const std::string& name = "bf16x1_bf16_") {
  for (const ConvInstance& instance : all_compiled()) {
    if (instance.arch == 90 && !instance.twice && instance.block_inputs == kBlockInputs &&
        instance.block_channels == channels && instance.block_positions == positions &&
        std::string(instance.name).find(name) != std::string::npos) {
      return instance;
    }
  }
  throw std::logic_error(concat("instances.cmake has no such variant: ", channels, " x ", positions));
}

Schedule chosen(const Problem& p) {
  return cheapest_schedule(p, variant(128, 256), all_compiled(), kSms);
}

/// A cut that leaves tiles as they are gains nothing where all tiles run at once.
void test_one_wave() {
  const Problem p = cube(2, 320, 64, 24, 4, 2);
  const Schedule found = chosen(p);
  expect(tile_count(p, found.instance) <= kSms, "one wave: tiles");
  expect(!found.cut.share_taps && found.cut.split_axes == 0, "one wave: no cut");
  expect(chosen(headline()).cut.share_taps, "many waves: loads are shared");
}

/// Phases of a stride of which only some share loads of x leave it on tiles of 128 x 256; where all do, they
/// do.
void test_phases_share_without_cuts() {
  const auto strided = [](std::int64_t n, std::int64_t c, std::int64_t k, std::int64_t extent,
                          std::int64_t kernel, std::int64_t output_padding) {
    Problem p = cube(n, c, k, extent, kernel, 1);
    p.stride = {2, 2, 2};
    p.output_padding = {output_padding, output_padding, output_padding};
    return p;
  };
  expect(!chosen(strided(2, 256, 128, 32, 3, 1)).cut.share_taps, "too few phases of 32 x 32 share");
  expect(chosen(strided(8, 256, 32, 16, 4, 0)).cut.share_taps, "all phases of 16 x 16 share");
}

/// Tiles of 64 channels where those of 128 would be half empty.
void test_channels_fill_tiles() {
  expect(chosen(cube(2, 128, 192, 48, 3, 1)).instance.block_channels == 64, "192 channels: three tiles");
  expect(chosen(cube(4, 64, 256, 48, 3, 0)).instance.block_channels == 128, "256 channels: two tiles");
  expect(chosen(cube(2, 128, 64, 32, 3, 1)).instance.block_channels == 64, "64 channels: one tile");
}

/// The choice takes no longer, by its own estimate, than the variant it began with or any other.
void test_choice_is_the_least() {
  const std::int64_t sizes[][6] = {{2, 128, 192, 40, 3, 1}, {1, 256, 128, 24, 5, 1}, {8, 64, 96, 20, 3, 0},
                                   {16, 64, 128, 32, 3, 0}, {1, 32, 512, 9, 2, 0},   {3, 100, 72, 17, 3, 2}};
  for (const auto& [n, c, k, extent, kernel, padding] : sizes) {
    const Problem p = cube(n, c, k, extent, kernel, padding);
    const double least = chosen(p).multiply_ms;
    for (const auto& [channels, positions] : {std::pair{128, 256}, {128, 128}, {64, 256}}) {
      const ConvInstance instance = variant(channels, positions);
      expect(least <= cheapest_cut(p, instance, kSms).multiply_ms, concat("least of ", describe(p)));
    }
    expect(least > 0, concat("takes time: ", describe(p)));
  }
}

/// Where the handing out of tiles is replaced by its average, the estimate does not jump.
void test_many_tiles_are_averaged() {
  double before = 0;
  for (std::int64_t n = 1; n <= 64; ++n) {
    const Problem p = cube(n, 64, 128, 24, 3, 0);
    const double ms = scheduled_multiply_ms(p, variant(128, 256), {}, kSms);
    expect(ms >= before, concat("a sample more takes no less: ", n));
    const double tiles = static_cast<double>(tile_count(p, variant(128, 256)));
    if (tiles > 8 * kSms) expect(ms < 1.15 * before, concat("nor much more: ", n));
    before = ms;
  }
}

/// Without a norm, tiles are chosen for a cut that stores the result where it belongs.
void test_linear() {
  Problem p = cube(2, 192, 128, 20, 5, 0);
  p.x_layout = p.y_layout = Layout::kNCDHW;
  p.tail.norm = false;
  const Schedule found = chosen(p);
  expect(stores_in_place(p, found.cut), "linear: in place");
  for (const auto& [channels, positions] : {std::pair{128, 256}, {128, 128}, {64, 256}}) {
    const Schedule other = cheapest_cut_in_place(p, variant(channels, positions), kSms);
    expect(found.multiply_ms <= other.multiply_ms, concat("linear: no slower than ", other.instance.name));
  }
}

/// Rows of NCDHW are stored in place where every slab's planes begin with 16 bytes.
void test_in_place() {
  Problem p = cube(1, 64, 64, 8, 3, 1);
  p.x_layout = p.y_layout = Layout::kNCDHW;
  expect(stores_in_place(p, {}) && stores_in_place(p, {1, false}), "planes of 64 values");
  expect(!stores_in_place(p, {2, false}), "rows apart");
  p.in = {8, 3, 3};
  expect(stores_in_place(p, {}) && !stores_in_place(p, {1, false}), "planes of 9 values");
  p.in = {7, 3, 3};
  expect(!stores_in_place(p, {}), "samples of 63 values");
}

/// The rings of every variant, whatever the rows that a load of x has beyond a tile: in the memory that there
/// is, on 1024 bytes, as many units as the kernel has barriers for, and enough for a consumer that holds one
/// of each while it waits for the next.
void test_rings() {
  for (const ConvInstance& instance : all_compiled()) {
    if (instance.arch != 90 || instance.twice) continue;
    const int splits = instance.products == 1 ? 1 : 2, row_bytes = 2 * instance.block_inputs;
    // Three products share no loads.
    for (int rows = 0; rows <= (splits == 1 ? static_cast<int>(kMaxSharedRows) : 0); ++rows) {
      const RingNeeds needs = {
          .bytes = ring_bytes(instance.block_channels, instance.block_positions, instance.stored_bits),
          .x_rows = instance.block_positions + rows,
          .shares_taps = rows > 0,
          .row_bytes = row_bytes,
          .w_bytes = instance.block_channels * row_bytes,
          .splits = splits};
      const RingShape rings = ring_shape(needs);
      const std::string what = concat(instance.name, " with ", rows, " rows more: ");
      expect(rings.x_units * rings.x_unit_bytes + rings.w_units * needs.w_bytes <= needs.bytes,
             what + "bytes");
      expect(rings.x_unit_bytes % 1024 == 0 && rings.x_unit_bytes >= needs.x_rows * row_bytes, what + "unit");
      expect(rings.x_units <= kMaxXUnits && rings.w_units <= kMaxWUnits, what + "barriers");
      expect(rings.x_units >= 2 * splits && rings.w_units >= 2 * splits, what + "two of each");
      expect(rows == 0 || rings.x_units <= 4 * kBlockInputs / instance.block_inputs, what + "at most four");
    }
  }
}

/// Phases of up to 64 output channels go in pairs where that gains; not of more channels or groups, nor with
/// three products.
void test_pairs() {
  Problem p = cube(2, 128, 64, 40, 3, 1);
  p.stride = {2, 2, 2}, p.output_padding = {1, 1, 1};
  const Schedule found = chosen(p);
  expect(found.cut.pair_phases && found.instance.block_channels == 128, "pairs of phases");
  const Problem plain = cube(2, 128, 64, 40, 3, 1);
  expect(!chosen(plain).cut.pair_phases, "no phases, no pairs");
  Problem wide = p;
  wide.k = 72;
  expect(!chosen(wide).cut.pair_phases, "more channels than a warpgroup has rows");
  Problem grouped = p;
  grouped.groups = 2;
  expect(!chosen(grouped).cut.pair_phases, "groups");
  Problem exact = p;
  exact.dtype = DType::kFloat32, exact.precision = Precision::kIEEE;
  const ConvInstance three = variant(64, 128, "f16x3_f32_");
  expect(!cheapest_schedule(exact, three, all_compiled(), kSms).cut.pair_phases, "three products");
  Problem few = p;
  few.in = {6, 6, 6};
  expect(!chosen(few).cut.pair_phases, "a few tiles are not worth it");
}

/// What no launch takes is not chosen, however quick it is expected to be.
void test_possible_cuts() {
  Problem p = cube(8, 256, 512, 16, 5, 2);
  p.stride = {2, 2, 2};
  expect(border_slabs(p, 3).size() > std::size_t{kMaxSlabs} &&
             plan_slabs(p, chosen(p).cut).size() <= std::size_t{kMaxSlabs},
         "32 slabs");
  // Either of two phases reads by 31 taps, both of them by 32.
  p = cube(4, 128, 64, 24, 1, 0);
  p.in[0] = 80, p.stride[0] = 2, p.kernel[0] = 62, p.padding[0] = 31;
  expect(within_im2col(p, border_slabs(p, 0)) && !within_im2col(p, reads_of_pairs(pair_phases(p))) &&
             !chosen(p).cut.pair_phases,
         "pairs beyond the limits of im2col");
}

/// What was not compared keeps the variant that it began with.
void test_uncompared_families() {
  Problem exact = cube(2, 128, 192, 40, 3, 1);
  exact.dtype = DType::kFloat32, exact.precision = Precision::kIEEE;
  const ConvInstance three = variant(128, 128, "f16x3_f32_");
  expect(cheapest_schedule(exact, three, all_compiled(), kSms).instance.name == three.name, "three products");
  Problem few = cube(2, 32, 192, 40, 3, 1);
  for (const ConvInstance& instance : all_compiled()) {
    if (instance.arch != 90 || instance.twice || instance.block_inputs == kBlockInputs) continue;
    expect(cheapest_schedule(few, instance, all_compiled(), kSms).instance.name == instance.name,
           concat("half k-blocks: ", instance.name));
  }
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_one_wave();
    upconv3d::test_phases_share_without_cuts();
    upconv3d::test_channels_fill_tiles();
    upconv3d::test_choice_is_the_least();
    upconv3d::test_many_tiles_are_averaged();
    upconv3d::test_linear();
    upconv3d::test_in_place();
    upconv3d::test_rings();
    upconv3d::test_pairs();
    upconv3d::test_possible_cuts();
    upconv3d::test_uncompared_families();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "sm90_schedule: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
