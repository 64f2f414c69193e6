// SPDX-License-Identifier: Apache-2.0
/// \file
/// What test_pack runs: every layout, dtype, number of products and way of reading, at extents that end amid
/// tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "pack_cases.hpp"

namespace upconv3d::tests {

inline Case grouped(std::int64_t groups, Case test) {
  test.groups = groups;
  return test;
}

/// 16-bit weights whose output channels or taps are innermost: more than a wave of tiles, and tiles that end
/// amid lines, channels and vectors. Beside them x is transposed, copied or left alone in turn.
inline std::vector<Case> weight_cases() {
  constexpr DType kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  struct Weight {
    const char* contiguous;
    const char* k_last;
    std::int64_t c, k;
    Extent3 kernel;
    DType dtype;
    std::int64_t groups = 1;
    std::int64_t w_offset = 0;
  };
  std::vector<Case> all;
  for (const Weight& w : {
           Weight{"w 512x256x64", "w 512x256x64, K last", 512, 256, {4, 4, 4}, kBF16},
           Weight{"w 131x255x27", "w 131x255x27, K last", 131, 255, {3, 3, 3}, kBF16},
           Weight{"w 64x20x27", "w 64x20x27, K last", 64, 20, {3, 3, 3}, kF16},
           Weight{"w 130x1x125", "w 130x1x125, K last", 130, 1, {5, 5, 5}, kBF16},
           Weight{"w 1x900x1", "w 1x900x1, K last", 1, 900, {1, 1, 1}, kBF16},
           Weight{"w 8x128x6", "w 8x128x6, K last", 8, 128, {1, 1, 6}, kBF16},
           Weight{"w 16x64x8", "w 16x64x8, K last", 16, 64, {2, 1, 4}, kF16},
           Weight{"w off by 1", "w off by 1, K last", 72, 64, {3, 3, 3}, kBF16, 1, 1},
           Weight{"w off by 2", "w off by 2, K last", 80, 33, {3, 2, 2}, kBF16, 1, 2},
           Weight{"w off by 4", "w off by 4, K last", 72, 64, {3, 3, 3}, kBF16, 1, 4},
           Weight{"w 270x34x9, 3 groups", "w 270x34x9, 3 groups, K last", 270, 102, {3, 3, 1}, kBF16, 3},
           Weight{"w 34x21x9, 2 groups", "w 34x21x9, 2 groups, K last", 34, 42, {1, 3, 3}, kF16, 2},
       }) {
    for (const bool k_last : {false, true}) {
      const std::size_t turn = all.size() % 3;
      all.push_back({
          .label = k_last ? w.k_last : w.contiguous,
          .n = 2,
          .c = w.c,
          .k = w.k,
          .in = {2, 3, 4},
          .kernel = w.kernel,
          .dtype = w.dtype,
          .products = 1,
          .x_layout = turn == 0 ? Layout::kNCDHW : Layout::kNDHWC,
          .w_layout = k_last ? WeightLayout::kChannelsLast : WeightLayout::kContiguous,
          .content = Content::kUniform,
          .x_offset = 0,
          .pack_x = turn != 2,
          .groups = w.groups,
          .w_offset = w.w_offset,
      });
    }
  }
  return all;
}

/// float32 weights so many that they go by tiles: more and fewer tiles than blocks, tiles that end amid
/// lines, columns, channels and vectors; and an x of more tiles than blocks.
inline std::vector<Case> scaled_weight_cases() {
  constexpr DType kF32 = DType::kFloat32;
  constexpr WeightLayout kDense = WeightLayout::kContiguous, kWLast = WeightLayout::kChannelsLast;
  constexpr Layout kFirst = Layout::kNCDHW, kLast = Layout::kNDHWC;
  constexpr Content kUniform = Content::kUniform, kWeights = Content::kSpecialWeights;
  const Extent3 small{2, 3, 4}, cube{32, 32, 32}, k3{3, 3, 3}, k4{4, 4, 4};
  return {
      {"f32 w 512x256x64", 2, 512, 256, small, k4, kF32, 1, kFirst, kDense, kWeights, 0},
      {"f32 w 512x256x64, K last", 2, 512, 256, small, k4, kF32, 1, kLast, kWLast, kWeights, 0},
      {"f32 w 512x256x64, 3 products", 1, 512, 256, small, k4, kF32, 3, kLast, kDense, kUniform, 0},
      {"f32 w 130x256x27", 2, 130, 256, small, k3, kF32, 3, kFirst, kDense, kWeights, 0},
      {"f32 w 130x256x27, K last", 2, 130, 256, small, k3, kF32, 3, kFirst, kWLast, kWeights, 0},
      {"f32 w 256x257x8", 2, 256, 257, small, {2, 2, 2}, kF32, 1, kLast, kDense, kWeights, 0},
      {"f32 w 256x260x8, K last", 2, 256, 260, small, {2, 2, 2}, kF32, 1, kLast, kWLast, kWeights, 0},
      {"f32 w 1024x516x1", 2, 1024, 516, small, {1, 1, 1}, kF32, 1, kFirst, kDense, kWeights, 0},
      {"f32 w 515x510x2", 2, 515, 510, small, {1, 1, 2}, kF32, 1, kFirst, kDense, kWeights, 0},
      {"f32 w 131x255x27", 2, 131, 255, small, k3, kF32, 1, kFirst, kDense, kWeights, 0},
      {"f32 w 130x256x27, x unfit", 2, 130, 256, small, k3, kF32, 1, kFirst, kWLast, Content::kTooSmall, 0,
       true},
      grouped(2, {"f32 w 200x400x27, 2 groups", 2, 200, 400, small, k3, kF32, 1, kLast, kDense, kWeights, 0}),
      grouped(4, {"f32 w 144x640x27, of 36", 2, 144, 640, small, k3, kF32, 3, kLast, kWLast, kWeights, 0}),
      {"f32 NCDHW 2x16x32^3", 2, 16, 8, cube, k3, kF32, 1, kFirst, kDense, kUniform, 0},
      {"f32 NCDHW 2x16x32^3, 3 products", 2, 16, 8, cube, k3, kF32, 3, kFirst, kDense, kUniform, 1},
      {"f32 NCDHW 2x16x32^3, too small", 2, 16, 8, cube, k3, kF32, 1, kFirst, kDense, Content::kTooSmall, 0,
       true},
      {"f32 NDHWC 2x64x32^3", 2, 64, 8, cube, k3, kF32, 1, kLast, kDense, kUniform, 0},
      {"f32 NDHWC 2x36x32^3, too large", 2, 36, 8, cube, k3, kF32, 1, kLast, kDense, Content::kTooLarge, 1,
       true},
  };
}

inline std::vector<Case> cases() {
  constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  constexpr Layout kFirst = Layout::kNCDHW, kLast = Layout::kNDHWC;
  constexpr WeightLayout kDense = WeightLayout::kContiguous, kWLast = WeightLayout::kChannelsLast,
                         kSliced = WeightLayout::kSliced;
  constexpr Content kUniform = Content::kUniform, kMany = Content::kManyMagnitudes,
                    kSpecial = Content::kSpecial, kFitting = Content::kFitting, kLarge = Content::kTooLarge,
                    kSmall = Content::kTooSmall, kSample = Content::kSmallSample,
                    kChannel = Content::kSmallChannel;
  return {
      {"f32 NCDHW", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 1, kFirst, kDense, kUniform, 0},
      {"f32 NCDHW, 3 products", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 3, kFirst, kDense, kUniform, 0},
      {"f32 NCDHW, long rows", 1, 8, 8, {16, 16, 12}, {2, 2, 2}, kF32, 1, kFirst, kDense, kMany, 0, true},
      {"f32 NCDHW, odd extents", 3, 72, 40, {3, 5, 7}, {3, 2, 1}, kF32, 3, kFirst, kWLast, kMany, 0, true},
      {"f32 NCDHW, misaligned", 2, 16, 24, {4, 4, 4}, {1, 1, 1}, kF32, 1, kFirst, kSliced, kMany, 1, true},
      {"f32 NCDHW, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kF32, 3, kFirst, kSliced, kMany, 3, true},
      {"f32 NCDHW, special", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 1, kFirst, kDense, kSpecial, 0, true},
      {"f32 NCDHW, special, 3", 3, 24, 16, {3, 4, 4}, {3, 3, 3}, kF32, 3, kFirst, kWLast, kSpecial, 0, true},
      {"f32 NDHWC", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kF32, 1, kLast, kWLast, kUniform, 0},
      {"f32 NDHWC, 3 products", 3, 72, 40, {5, 5, 7}, {3, 2, 1}, kF32, 3, kLast, kDense, kMany, 0, true},
      {"f32 NDHWC, many channels", 1, 264, 8, {2, 3, 5}, {1, 2, 3}, kF32, 1, kLast, kSliced, kMany, 0, true},
      {"f32 NDHWC, misaligned", 2, 16, 24, {4, 4, 4}, {2, 2, 2}, kF32, 3, kLast, kDense, kMany, 1, true},
      {"f32 NDHWC, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kF32, 1, kLast, kSliced, kMany, 3, true},
      {"f32 NDHWC, special", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 1, kLast, kSliced, kSpecial, 0, true},
      {"f32 NDHWC, special, 3", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 3, kLast, kDense, kSpecial, 0, true},
      {"f32, more samples than warps",
       37,
       8,
       8,
       {1, 2, 3},
       {1, 1, 2},
       kF32,
       1,
       kFirst,
       kDense,
       kMany,
       0,
       true},
      {"f32 NCDHW, fitting", 2, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 1, kFirst, kDense, kFitting, 0},
      {"f32 NCDHW, fitting, 3", 1, 24, 16, {3, 3, 5}, {3, 3, 3}, kF32, 3, kFirst, kWLast, kFitting, 0},
      {"f32 NDHWC, fitting", 1, 136, 16, {5, 5, 5}, {1, 1, 1}, kF32, 1, kLast, kWLast, kFitting, 0},
      {"f32 NDHWC, fitting, 3", 3, 24, 16, {3, 4, 5}, {3, 3, 3}, kF32, 3, kLast, kDense, kFitting, 1},
      {"f32 NCDHW, too large", 3, 72, 8, {5, 6, 7}, {1, 2, 1}, kF32, 1, kFirst, kDense, kLarge, 0, true},
      {"f32 NDHWC, too large, 3", 2, 72, 8, {5, 6, 7}, {1, 2, 1}, kF32, 3, kLast, kDense, kLarge, 0, true},
      {"f32 NCDHW, too small, 3", 3, 72, 8, {5, 6, 7}, {1, 2, 1}, kF32, 3, kFirst, kWLast, kSmall, 0, true},
      {"f32 NDHWC, too small", 2, 72, 8, {5, 6, 7}, {1, 2, 1}, kF32, 1, kLast, kWLast, kSmall, 0, true},
      {"f32, small sample", 3, 16, 8, {4, 4, 4}, {2, 2, 2}, kF32, 1, kFirst, kDense, kSample, 0, true},
      {"f32, small channel", 3, 16, 8, {4, 4, 4}, {2, 2, 2}, kF32, 3, kLast, kDense, kChannel, 0, true},
      {"f32 NDHWC, 2 channel tiles", 2, 1032, 8, {3, 3, 3}, {1, 1, 1}, kF32, 3, kLast, kDense, kUniform, 0},
      {"f32, many columns", 1, 16, 1000, {4, 4, 4}, {1, 1, 3}, kF32, 1, kFirst, kDense, kUniform, 0},
      {"f32, many columns, K last",
       1,
       72,
       1064,
       {4, 4, 4},
       {3, 3, 3},
       kF32,
       3,
       kLast,
       kWLast,
       kMany,
       0,
       true},
      {"bf16, large weight, x stays",
       1,
       136,
       72,
       {4, 4, 4},
       {3, 3, 3},
       kBF16,
       1,
       kLast,
       kDense,
       kUniform,
       0,
       false,
       false},
      {"bf16 NCDHW", 2, 64, 32, {4, 6, 8}, {3, 3, 3}, kBF16, 1, kFirst, kDense, kUniform, 0},
      {"f16 NCDHW, odd extents", 3, 72, 40, {3, 5, 7}, {3, 2, 1}, kF16, 1, kFirst, kWLast, kUniform, 0},
      {"bf16 NCDHW, C not of 8", 2, 13, 9, {3, 3, 5}, {2, 3, 2}, kBF16, 1, kFirst, kSliced, kUniform, 1},
      {"bf16 NDHWC, misaligned", 2, 16, 24, {4, 4, 4}, {2, 2, 2}, kBF16, 1, kLast, kWLast, kUniform, 3},
      {"f16 NDHWC, x stays",
       2,
       16,
       24,
       {4, 4, 4},
       {2, 2, 2},
       kF16,
       1,
       kLast,
       kDense,
       kUniform,
       0,
       false,
       false},
      {"f32 NCDHW, C 1, K 1", 2, 1, 1, {3, 4, 5}, {3, 3, 3}, kF32, 1, kFirst, kDense, kUniform, 0},
      {"f32 NDHWC, C 3", 2, 3, 20, {3, 4, 5}, {3, 3, 3}, kF32, 3, kLast, kWLast, kMany, 0, true},
      {"f32 NDHWC, C 20", 2, 20, 2, {3, 4, 5}, {3, 3, 3}, kF32, 1, kLast, kDense, kUniform, 0},
      {"f32 NCDHW, C 100", 2, 100, 3, {3, 4, 5}, {1, 2, 3}, kF32, 3, kFirst, kDense, kMany, 0, true},
      {"bf16 NDHWC, C 1", 2, 1, 3, {3, 4, 5}, {3, 3, 3}, kBF16, 1, kLast, kDense, kUniform, 0},
      {"bf16 NDHWC, C 20", 3, 20, 100, {3, 4, 5}, {2, 2, 2}, kBF16, 1, kLast, kWLast, kUniform, 0},
      {"f16 NDHWC, C 100, misaligned", 2, 100, 8, {7, 4, 5}, {1, 1, 1}, kF16, 1, kLast, kDense, kUniform, 1},
      {"bf16 NCDHW, C 3", 3, 3, 20, {3, 4, 5}, {3, 3, 3}, kBF16, 1, kFirst, kDense, kUniform, 0},
      grouped(
          2, {"f32 first, 2 groups", 2, 144, 32, {5, 5, 6}, {3, 2, 1}, kF32, 3, kFirst, kDense, kUniform, 0}),
      grouped(4,
              {"f32 first, of 3", 3, 12, 32, {3, 5, 6}, {3, 2, 1}, kF32, 1, kFirst, kSliced, kMany, 3, true}),
      grouped(2, {"f32, 2 groups", 3, 72, 16, {3, 5, 6}, {3, 2, 1}, kF32, 1, kLast, kWLast, kMany, 0, true}),
      grouped(4,
              {"f32, 4 groups of 5", 2, 20, 64, {3, 5, 6}, {1, 2, 3}, kF32, 3, kLast, kDense, kUniform, 0}),
      grouped(
          2,
          {"f32, 2 groups of 516", 2, 1032, 16, {3, 3, 3}, {1, 1, 1}, kF32, 1, kLast, kDense, kUniform, 0}),
      grouped(2, {"f32, 2 groups, small",
                  3,
                  24,
                  16,
                  {3, 4, 5},
                  {3, 3, 3},
                  kF32,
                  3,
                  kLast,
                  kDense,
                  kSample,
                  0,
                  true}),
      grouped(
          2,
          {"bf16 first, 2 groups", 2, 144, 32, {5, 5, 6}, {3, 2, 1}, kBF16, 1, kFirst, kWLast, kUniform, 0}),
      grouped(4,
              {"bf16, 4 groups of 8", 3, 32, 64, {5, 5, 6}, {3, 2, 1}, kBF16, 1, kLast, kDense, kUniform, 0}),
      grouped(3,
              {"f16, 3 groups of 5", 3, 15, 24, {5, 5, 6}, {1, 2, 1}, kF16, 1, kLast, kSliced, kUniform, 0}),
      {"f32, no samples", 0, 16, 24, {4, 4, 4}, {2, 2, 2}, kF32, 1, kLast, kDense, kUniform, 0, false, true},
  };
}

}  // namespace upconv3d::tests
