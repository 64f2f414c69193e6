// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/few_channels_layout.hpp: the steps of a layout, walked as the kernel walks them, are the convolution;
/// tiles cover the output once; what is refused, and where the kernel is chosen. Without torch or CUDA.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/direct_plan.hpp"
#include "core/few_channels_layout.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// Last up-block of a 3-D U-Net: kernel 3, stride 2, doubling.
Problem up_block(std::int64_t c, std::int64_t k, const Extent3& in) {
  Problem p;
  p.n = 2, p.c = c, p.k = k, p.num_groups = 1;
  p.in = in;
  p.kernel = {3, 3, 3}, p.stride = {2, 2, 2}, p.padding = {1, 1, 1}, p.output_padding = {1, 1, 1};
  p.dtype = DType::kBFloat16, p.precision = Precision::kTF32;
  p.x_layout = p.y_layout = Layout::kNDHWC;
  return p;
}

Problem with(Problem p, const Extent3& kernel, const Extent3& stride, const Extent3& padding,
             const Extent3& dilation = {1, 1, 1}) {
  p.kernel = kernel, p.stride = stride, p.padding = padding, p.dilation = dilation;
  p.output_padding = {0, 0, 0};
  return p;
}

/// Every tap multiplies the input that the definition says, once for each chunk of channels, by weights
/// that no other product has; what is left of a step is zeros of x.
void test_steps(const Problem& p) {
  const std::string what = describe(p);
  const FewChannelsLayout moments = few_channels_layout(p), &layout = moments.of_output();
  std::vector<int> used(static_cast<std::size_t>(layout.fragments * 2), 0);
  // What is read by which unit and phase: the unit's half to the place in the box.
  std::map<std::pair<int, int>, std::pair<int, Extent3>> reads;
  for (const FewGroup& group : layout.groups) {
    int step = group.first_step, unit = group.first_fragment;
    for (int list = 0; list < kFewLists; ++list) {
      for (int i = 0; i < group.steps[list]; ++i, ++step) {
        const int phases = list == kFewBoth ? 2 : 1;
        for (int slot = 0; slot < phases; ++slot, ++unit) {
          const bool second = list == kFewSecond || slot == 1;
          const Extent3 phase = {group.phase[0], group.phase[1], group.phase[2] + (second ? 1 : 0)};
          for (int half = 0; half < 2; ++half) {
            const std::uint32_t place = layout.steps[step] >> half * kFewOffsetBits;
            reads[{unit, half}] = {static_cast<int>(place & ((1u << kFewOffsetBits) - 1)), phase};
          }
        }
      }
    }
  }
  expect(reads.size() == used.size(), what + ": all units are used");
  for (std::int64_t tap = 0; tap < volume(p.kernel); ++tap) {
    const Extent3 at = {tap / p.kernel[2] / p.kernel[1], tap / p.kernel[2] % p.kernel[1], tap % p.kernel[2]};
    const FewTap& from = layout.taps[tap];
    for (int chunk = 0; chunk < layout.chunks; ++chunk) {
      const int number = from.first_chunk + chunk;
      const int unit = from.fragment + number / 2 * from.stride;
      ++used[unit * 2 + number % 2];
      const auto& [place, phase] = reads.at({unit, number % 2});
      const int position = place / layout.pitch;
      expect(place % layout.pitch == chunk, what + ": the chunk of channels");
      const Extent3 in = {position / layout.box[2] / layout.box[1], position / layout.box[2] % layout.box[1],
                          position % layout.box[2]};
      for (int axis = 0; axis < 3; ++axis) {
        // Output j*stride + phase of j = 0 reads this input through this tap.
        const std::int64_t input = in[axis] + layout.lower[axis];
        expect(input * p.stride[axis] - p.padding[axis] + at[axis] * p.dilation[axis] == phase[axis],
               concat(what, ": tap ", tap, " along axis ", axis));
      }
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    const int place = reads.at({static_cast<int>(i / 2), static_cast<int>(i % 2)}).first;
    expect(used[i] == (place == layout.chunks ? 0 : 1), what + ": weights once, or zeros of x");
  }
}

void test_tiles(const Problem& p) {
  const FewChannelsLayout moments = few_channels_layout(p), &layout = moments.of_output();
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t each = layout.tile[axis] * p.stride[axis];
    expect(layout.tiles[axis] * each >= out[axis] && (layout.tiles[axis] - 1) * each < out[axis],
           describe(p) + ": tiles cover an axis");
  }
  expect(volume(layout.tile) <= layout.rows() && kFewWarps % layout.row_warps == 0, "rows of a tile");
  const FewSharedBytes bytes = few_shared_bytes(layout);
  expect(bytes.total() == layout.shared_bytes, "shared memory");
  expect(layout.shared_bytes <= (layout.staged ? 99 : 227) * 1024, describe(p) + ": a block has that much");
  // Two places each.
  expect(bytes.steps >= 8 * (static_cast<std::int64_t>(layout.steps.size()) + kFewStepsAhead),
         describe(p) + ": steps, and those that are read ahead");
  expect(layout.pitch % 2 == 1 && layout.pitch > layout.chunks, "positions in different banks, and zeros");
}

/// y [N,K,Z,P,Q] of p's shape, whose output pass may have tiles of its own.
Problem planes(Problem p) {
  p.x_layout = p.y_layout = Layout::kNCDHW;
  return p;
}

/// Every output of a tile has a place of its own in the stage, and whole chunks of y are whole chunks there.
void test_stage(const Problem& p) {
  const std::string what = describe(p) + ": the stage";
  const FewChannelsLayout moments = few_channels_layout(p);
  expect(moments.output != nullptr, what + " is chosen");
  if (!moments.output) return;
  const FewChannelsLayout& layout = *moments.output;
  const Extent3 out = p.out();
  expect(layout.tile[2] * p.stride[2] >= out[2] && layout.tiles[2] == 1, what + " has whole rows");
  expect(layout.output_ms == moments.output_ms, what + ": the estimate counts with it");
  for (int axis = 0; axis < 3; ++axis) {
    expect(layout.box[axis] - layout.tile[axis] == moments.box[axis] - moments.tile[axis],
           what + ": the halo");
  }
  const std::int64_t chunk = 16 / size_of(p.dtype), channels = 8 * layout.column_tiles;
  std::vector<bool> taken(static_cast<std::size_t>(layout.stage.bytes / size_of(p.dtype)), false);
  const std::int64_t planes = std::min(layout.tile[0] * p.stride[0], out[0]);
  const std::int64_t rows = std::min(layout.tile[1] * p.stride[1], out[1]);
  for (std::int64_t channel = 0; channel < channels; ++channel) {
    for (std::int64_t plane = 0; plane < planes; ++plane) {
      const std::int64_t first = channel * layout.stage.channel + plane * layout.stage.plane;
      const std::int64_t in_y = (channel * out[0] + plane) * out[1] * out[2];
      expect((first - in_y) % chunk == 0, what + ": chunks");
      for (std::int64_t i = 0; i < rows * out[2]; ++i) {
        // Behind a boundary as far as can be.
        const auto place = static_cast<std::size_t>(chunk - 1 + first + i);
        expect(place < taken.size() && !taken[place], what + ": places");
        if (place < taken.size()) taken[place] = true;
      }
    }
  }
}

void test_stages() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t width : {3, 5, 16, 32, 48}) {
      Problem p = planes(with(up_block(8, 20, {9, 12, width}), {3, 3, 3}, {2, 2, 2}, {1, 1, 1}));
      p.dtype = dtype;
      test_stage(p);
      test_steps(p);
      test_tiles(p);
      p.k = 7;
      test_stage(p);
    }
    Problem p = planes(with(up_block(8, 16, {9, 20, 63}), {3, 3, 3}, {1, 1, 1}, {1, 1, 1}));
    p.dtype = dtype;
    test_stage(p);
    expect(!few_channels_layout(planes(up_block(8, 16, {9, 20, 64}))).output, "not of rows of whole sectors");
    expect(few_channels_layout(planes(up_block(8, 16, {9, 20, 63}))).output != nullptr,
           "of rows that begin amid a sector");
    p.y_layout = Layout::kNDHWC;
    expect(!few_channels_layout(p).output, "not of channels_last_3d");
  }
}

void test_layouts() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t c : {1, 3, 8, 16, 24, 33}) {
      Problem p = up_block(c, 16, {9, 10, 11});
      p.dtype = dtype;
      for (const Problem& q :
           {p, with(p, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}), with(p, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}),
            with(p, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}), with(p, {3, 2, 5}, {1, 3, 4}, {0, 1, 2}),
            with(p, {2, 3, 2}, {2, 1, 2}, {0, 2, 1}, {3, 2, 1}), with(p, {1, 1, 1}, {2, 2, 2}, {0, 0, 0})}) {
        test_steps(q);
        test_tiles(q);
        Problem grouped = q;
        grouped.groups = 4, grouped.c *= 4, grouped.k *= 4;
        const FewChannelsLayout of_groups = few_channels_layout(grouped), of_one = few_channels_layout(q);
        expect(of_groups.fragments == of_one.fragments && of_groups.chunks == of_one.chunks &&
                   of_groups.channel_blocks == 4 * of_one.channel_blocks,
               "a block has one convolution group");
      }
    }
  }
}

void test_obstacles() {
  const auto refuses = [](const Problem& p, const char* part) {
    FewChannelsLayout layout;
    const std::string obstacle = few_channels_obstacle(p, hopper(), layout);
    expect(has_part(obstacle, part), concat("obstacle \"", obstacle, "\" has \"", part, "\""));
  };
  const Problem p = up_block(32, 16, {9, 10, 11});
  refuses(p, "");
  Problem q = p;
  q.groups = 2;
  refuses(q, "");
  for (const Precision precision : {Precision::kIEEE, Precision::kTF32}) {
    q = p, q.dtype = DType::kFloat32, q.precision = precision;
    refuses(q, "");
  }
  q = p, q.dtype = DType::kFloat64;
  refuses(q, "float64");
  q = p, q.tail.norm = false;
  refuses(q, "nothing is normalized");
  q = p, q.tail.has_skip = true;
  refuses(q, "skip");
  q = p, q.tail.returns_conv = true;
  refuses(q, "to be stored");
  refuses(with(p, {6, 6, 6}, {2, 2, 2}, {0, 0, 0}), "216 taps");
  refuses(up_block(512, 64, {9, 10, 11}), "steps");
  refuses(up_block(128, 32, {9, 10, 11}), "shared memory");
  refuses(up_block(32, 16, {1000, 1000, 1000}), "32-bit");
  q = up_block(1, 8, {8, 8, 8}), q.n = 1 << 18;
  refuses(q, "32-bit");
  refuses(with(up_block(1, 8, {9, 10, 11}), {1, 1, 128}, {1, 1, 1}, {0, 0, 0}), "");
  refuses(with(up_block(1, 8, {9, 10, 11}), {1, 3, 43}, {1, 1, 1}, {0, 0, 0}), "129 taps");
  refuses(up_block(1, 65536, {2, 2, 2}), "more than 65535");
  // Products of these would wrap.
  constexpr std::int64_t kStride = 1 << 22, kDilation = 1 << 28, kApart = 1 << 14;
  const Problem voxel = up_block(16, 8, {1, 1, 1});
  refuses(with(voxel, {1, 1, 1}, {kStride, kStride, kStride}, {0, 0, 0}), "groups of phases");
  refuses(with(voxel, {2, 2, 2}, {1, 1, 1}, {kDilation / 2, kDilation / 2, kDilation / 2},
               {kDilation, kDilation, kDilation}),
          "32-bit");
  const auto apart = [&](std::int64_t distance) {
    return with(voxel, {2, 2, 2}, {1, 1, 1}, {distance / 2, distance / 2, distance / 2},
                {distance, distance, distance});
  };
  refuses(apart(kApart), "16384 apart");
  refuses(apart(kApart / 2), "shared memory");
  FewChannelsLayout layout;
  Device volta = hopper();
  volta.compute_capability = 70;
  expect(has_part(few_channels_obstacle(p, volta, layout), "below 8.0"), "Ampere and later");
  Device ada = hopper();
  ada.compute_capability = 89;
  expect(has_part(few_channels_obstacle(up_block(64, 32, {24, 16, 20}), ada, layout), "shared memory"),
         "less shared memory");
}

void test_choice() {
  const auto chosen = [](const Problem& p) {
    const Plan plan = select_plan(p, hopper(), all_compiled());
    return plan.algorithm == Algorithm::kCudaDirect && plan.few_channels;
  };
  // As measured on an H200, in bfloat16 channels_last_3d.
  expect(!chosen(up_block(32, 16, {48, 48, 48})), "85 us, the SM90 plan 80");
  Problem mvsnet = up_block(16, 8, {96, 64, 80});
  mvsnet.n = 1;
  expect(chosen(mvsnet), "79 us, the SM90 plan 199");
  expect(chosen(up_block(32, 2, {48, 48, 48})), "65 us, the library plan 182");
  expect(!chosen(up_block(64, 32, {64, 64, 64})), "508 us, the SM90 plan 292");
  expect(!chosen(with(up_block(64, 32, {64, 64, 64}), {2, 2, 2}, {2, 2, 2}, {0, 0, 0})),
         "256 us, the SM90 plan 171");
  Problem vnet = with(up_block(32, 16, {56, 56, 40}), {2, 2, 2}, {2, 2, 2}, {0, 0, 0});
  vnet.n = 4;
  expect(!chosen(vnet), "107 us, the SM90 plan 103");
  Problem head = with(up_block(20, 3, {64, 64, 64}), {3, 3, 3}, {1, 1, 1}, {1, 1, 1});
  head.n = 1;
  expect(chosen(head), "86 us, the library plan 170");
  // As measured in other layouts and dtypes (perf/NOTES.md, "Few channels by either plan").
  const auto as = [](Problem block, DType dtype, Layout layout, std::int64_t n) {
    block.n = n, block.dtype = dtype, block.x_layout = block.y_layout = layout;
    return block;
  };
  constexpr Layout kFirst = Layout::kNCDHW, kLast = Layout::kNDHWC;
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kBFloat16;
  const auto ieee = [&](const Problem& block, Layout layout) {
    Problem q = as(block, kFloat, layout, block.n);
    q.precision = Precision::kIEEE;
    return q;
  };
  // As measured at float32's accuracy (perf/NOTES.md, "Few channels at float32's accuracy").
  expect(chosen(ieee(vnet, kFirst)), "321 us, the SM90 plan 1632");
  expect(chosen(ieee(mvsnet, kLast)), "249 us, the SM90 plan 1606");
  expect(chosen(ieee(up_block(32, 16, {48, 48, 48}), kFirst)), "425 us, the SM90 plan 704");
  expect(!chosen(ieee(up_block(32, 2, {48, 48, 48}), kFirst)), "236 us, the library plan 223");
  expect(!chosen(ieee(up_block(64, 32, {64, 64, 64}), kFirst)), "weights of 27 taps do not fit");
  const auto doubled = [&](std::int64_t c, std::int64_t k, const Extent3& in) {
    Problem q = with(up_block(c, k, in), {2, 2, 2}, {2, 2, 2}, {0, 0, 0});
    q.n = 1;
    return ieee(q, kFirst);
  };
  // On an H100.
  expect(!chosen(doubled(128, 16, {48, 48, 48})), "344 us, the SM90 plan 468; col2im is expected at 222");
  Problem sixtyfour = doubled(16, 64, {48, 48, 48});
  sixtyfour.n = 2;
  expect(chosen(sixtyfour), "409 us, the SM90 plan 1314");
  expect(!chosen(doubled(256, 8, {32, 32, 32})), "184 us, estimated 126");
  expect(!chosen(doubled(96, 3, {48, 48, 48})), "as many inputs of few outputs");
  expect(!chosen(ieee(with(up_block(64, 16, {48, 48, 48}), {3, 3, 3}, {1, 1, 1}, {1, 1, 1}), kFirst)),
         "578 us, estimated 413");
  expect(chosen(doubled(8, 16, {96, 96, 96})) && !chosen(doubled(7, 16, {96, 96, 96})),
         "eight products of an output show no operand's last bits");
  Device ada = hopper();
  ada.compute_capability = 89;
  const Plan elsewhere = select_plan(ieee(vnet, kFirst), ada, all_compiled());
  expect(!elsewhere.few_channels, "TF32 is at most twice as quick as float32 there");
  const Problem plain = with(up_block(16, 16, {64, 64, 64}), {3, 3, 3}, {1, 1, 1}, {1, 1, 1});
  expect(chosen(as(plain, kFloat, kLast, 2)), "165 us, the SM90 plan 238");
  expect(chosen(as(plain, kFloat, kFirst, 2)), "202 us, the SM90 plan 231");
  // Longer kernels and strides, dilation and groups ("What the limits of plans cost").
  const auto spread = [](std::int64_t c, std::int64_t k, const Extent3& in, std::int64_t taps,
                         std::int64_t stride, std::int64_t padding) {
    return with(up_block(c, k, in), {taps, taps, taps}, {stride, stride, stride},
                {padding, padding, padding});
  };
  const Problem k5s2 = spread(16, 8, {31, 42, 43}, 5, 2, 2), k3s3 = spread(20, 8, {18, 25, 25}, 3, 3, 0);
  expect(chosen(as(k5s2, kHalf, kLast, 2)), "66 us, the library plan 340");
  expect(chosen(as(k5s2, kFloat, kFirst, 2)), "145 us, the SM90 plan 315");
  expect(chosen(ieee(as(k3s3, kFloat, kLast, 4), kLast)), "124 us, the SM90 plan 566");
  expect(chosen(as(k3s3, kHalf, kFirst, 4)), "75 us, the SM90 plan 205");
  expect(!chosen(as(spread(64, 32, {20, 20, 20}, 3, 3, 0), kHalf, kLast, 1)), "54 us, the SM90 plan 32");
  Problem dilated = spread(16, 16, {48, 48, 48}, 3, 1, 2);
  dilated.dilation = {2, 2, 2};
  expect(chosen(as(dilated, kHalf, kLast, 1)), "35 us, the SM90 plan 87");
  Problem grouped = spread(64, 100, {18, 37, 37}, 2, 2, 0);
  grouped.groups = 4, grouped.num_groups = 100;
  expect(chosen(as(grouped, kHalf, kLast, 3)), "the library plan takes 1077 us");
  const Problem wide = with(up_block(32, 32, {64, 64, 64}), {2, 2, 2}, {2, 2, 2}, {0, 0, 0});
  expect(!chosen(as(wide, kFloat, kLast, 1)), "216 us, the SM90 plan 161");
  expect(!chosen(as(vnet, kFloat, kLast, 4)), "184 us, the SM90 plan 183");
  expect(!chosen(as(vnet, kFloat, kFirst, 4)), "244 us, the SM90 plan 181");
  expect(!chosen(as(vnet, kHalf, kFirst, 4)), "166 us, the SM90 plan 132");
  const Problem gan = with(up_block(32, 16, {32, 32, 32}), {4, 4, 4}, {2, 2, 2}, {1, 1, 1});
  expect(!chosen(as(gan, kFloat, kLast, 4)), "211 us, the SM90 plan 151 in half k-blocks");
  expect(!chosen(as(gan, kFloat, kFirst, 4)), "272 us, the SM90 plan 144");
  const Problem training = up_block(32, 16, {48, 48, 48});
  expect(select_training_plan(training, hopper(), all_compiled()).algorithm == Algorithm::kSm90ImplicitGemm,
         "training keeps what it has");
  // What cuDNN takes for 343 taps was not compared, so that nothing is expected to be quicker where that is
  // all there is to compare with.
  const Problem taps = with(up_block(1, 8, {64, 64, 64}), {7, 7, 7}, {1, 1, 1}, {3, 3, 3});
  expect(!beats_library(taps, hopper(), direct_plan(taps, hopper())), "of 343 taps");
  expect(select_plan(ieee(taps, kLast), hopper(), all_compiled()).algorithm == Algorithm::kCudaLibrary,
         "of 343 taps at float32's accuracy");
}

}  // namespace
}  // namespace upconv3d

int main() {
  upconv3d::test_layouts();
  upconv3d::test_stages();
  upconv3d::test_obstacles();
  upconv3d::test_choice();
  if (upconv3d::failures == 0) std::cout << "few channels: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
