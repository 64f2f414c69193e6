// SPDX-License-Identifier: Apache-2.0
/// \file
/// How conv_transpose_grad_w_sm90 computes the gradient of the weight:
///
///   grad_w[c,k,t,r,s] = sum over n,i of x[n,c,i] * grad_c[n,k,i*stride - padding + tap*dilation]
///
/// An implicit GEMM that is reduced over positions (gemm_k). Its rows and columns are pairs of a tap and 64
/// channels ("chunks") of the two operands x and grad_c, in either role. Along each axis the taps move one of
/// the operands, while the other is read position by position:
///
///   taps move grad_c   positions are x's, any stride
///   taps move x        positions are grad_c's, stride 1 only
///
/// The taps of an axis belong to the chunks of the operand that they move, so a choice per axis, together
/// with that of roles, decides how well tiles are filled, and how many positions meet but padding.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Channels of a chunk: 128 bytes in 16 bit, what TMA swizzles.
inline constexpr std::int64_t kGradWChunk = 64;

/// Positions of a k-block.
inline constexpr std::int64_t kGradWBlock = 64;

/// One compiled variant of conv_transpose_grad_w_sm90, as listed in cpp/instances.cmake.
struct GradWInstance {
  const char* name;   // "conv_transpose_grad_w_sm90_bf16x1_128x256"
  DType operand;      // what the tensor cores multiply: kBFloat16 or kFloat16
  int products;       // 1, or 3 for the hi/lo split that carries float32's accuracy
  int row_chunks;     // of a tile: 2, one for each consumer warpgroup, or 1 for both
  int column_chunks;  // of a tile: those of both warpgroups, or, of tiles with 1 row chunk, half of them each
  bool compiled;      // false in a build without arch 90a
};

/// Columns chunks that one consumer warpgroup multiplies.
constexpr int warpgroup_columns(int row_chunks, int column_chunks) {
  return row_chunks == 2 ? column_chunks : column_chunks / 2;
}

/// Every variant of instances.cmake, compiled or not.
const std::vector<GradWInstance>& grad_w_instances();

/// How an operand [N,extent...,channels] is read for all positions: position i of an axis reads
/// i*step + lower + (offset of a tap in [0, (taps-1)*dilation]).
struct GradWOperand {
  std::int64_t channels = 0;
  Extent3 extent{};          // of the tensor
  Extent3 lower{}, upper{};  // corners of the box that position 0 and the last one open, as TMA im2col
                             // counts: from the first and from the last element
  Extent3 step{};
  Extent3 taps{};  // 1 along axes whose taps move the other operand

  /// Pairs of a tap and 64 channels.
  std::int64_t chunks() const;
};

struct GradWPlan {
  std::string obstacle;  // why the kernel cannot run, or "": then the rest is set
  std::optional<GradWInstance> instance;
  bool rows_are_x = false;        // else grad_c's chunks are rows and x's columns
  std::array<bool, 3> moves_x{};  // along T,R,S: taps move x, else grad_c
  Extent3 positions{};            // of a sample, those that are summed over
  std::int64_t k_blocks = 0;      // of 64 positions, all samples
  std::int64_t row_tiles = 0;
  std::int64_t column_tiles = 0;
  std::int64_t splits = 0;   // of the k-blocks, summed up in a second launch
  bool pack_x = false;       // x is copied into operand form first
  std::int64_t x_pitch = 0;  // channels of a row of x as the kernel reads it
  // Of float32's accuracy: rows of grad_c are SplitRows (core/channels.hpp).
  bool split_grad_c() const { return instance->products == 3; }
  double estimated_cycles = 0;  // without packing

  std::int64_t tiles() const { return row_tiles * column_tiles; }
  /// Floats of partial sums: [splits,tiles] of as many as a tile has elements.
  std::int64_t partial_floats() const;
};

/// x, or grad_c, as read where the taps of the axes in `moves_x` move x and those of the others grad_c.
GradWOperand grad_w_operand(const Problem& problem, const std::array<bool, 3>& moves_x, bool of_x);

/// Every choice of roles and tile that can run, each with the splits that suit it; none where there is an
/// obstacle.
///
/// \param instances the variants that may be named; only those with `compiled` set are.
std::vector<GradWPlan> grad_w_candidates(const Problem& problem, const Device& device,
                                         const std::vector<GradWInstance>& instances = grad_w_instances());

/// The candidate that is estimated to take least time. A pure function; depends on the device's kind and
/// multiprocessors alone, so that results repeat.
GradWPlan grad_w_plan(const Problem& problem, const Device& device,
                      const std::vector<GradWInstance>& instances = grad_w_instances());

/// One line for people.
std::string describe(const GradWPlan& plan);

}  // namespace upconv3d
