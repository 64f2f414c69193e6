// SPDX-License-Identifier: Apache-2.0
/// \file
/// The block as data: what is to be computed, said without torch and without CUDA.
///
///   y = group_norm(relu(conv_transpose3d(x, w, bias)), num_groups, gamma, beta, eps)
///
///   x [N,C,D,H,W], w [C,K/groups,T,R,S], y [N,K,Z,P,Q]
///
/// or with what core/tail.hpp says in the place of group_norm(relu(...)).
///
/// Letters follow CUTLASS's convolutions, with PyTorch's C for input and K for output channels. GEMM
/// extents are always written gemm_m, gemm_n, gemm_k.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/tail.hpp"

namespace upconv3d {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

/// Order of the axes in memory. kNCDHW is PyTorch's contiguous format, kNDHWC its channels_last_3d.
enum class Layout : std::uint8_t { kNCDHW, kNDHWC };

/// Concerns float32 input only: kIEEE gives float32's error, kTF32 at most TF32's (10-bit mantissa operands).
enum class Precision : std::uint8_t { kIEEE, kTF32 };

/// kConv is the plain convolution that a transposed one's gradient at its input is (core/grad_x_plan.hpp).
enum class Operation : std::uint8_t { kConvTranspose, kConv };

/// One value per spatial axis, outermost (depth) first: D,H,W or T,R,S or Z,P,Q.
using Extent3 = std::array<std::int64_t, 3>;

const char* name(DType dtype);
const char* name(Layout layout);
const char* name(Precision precision);

/// Bytes of one element.
std::int64_t size_of(DType dtype);

/// Product of the three extents.
inline std::int64_t volume(const Extent3& e) {
  return e[0] * e[1] * e[2];
}

struct Problem {
  std::int64_t n = 0;  // samples
  std::int64_t c = 0;  // input channels, all convolution groups together
  std::int64_t k = 0;  // output channels, all convolution groups together
  Extent3 in{};        // D,H,W
  Extent3 kernel{};    // T,R,S
  Extent3 stride{1, 1, 1};
  Extent3 padding{0, 0, 0};
  Extent3 output_padding{0, 0, 0};
  Extent3 dilation{1, 1, 1};
  std::int64_t groups = 1;      // of the convolution
  std::int64_t num_groups = 1;  // of the normalization
  double eps = 1e-5;            // added to the variance, activation units squared
  DType dtype = DType::kFloat32;
  Precision precision = Precision::kIEEE;
  Layout x_layout = Layout::kNCDHW;
  Layout y_layout = Layout::kNCDHW;
  bool x_aligned = true;  // x starts on a 16-byte boundary, as TMA requires
  bool has_bias = false;
  Operation operation = Operation::kConvTranspose;
  bool w_channels_last = false;  // w lies dense as [C,T,R,S,K/groups], and starts on a 16-byte boundary
  Tail tail;                     // what follows the convolution

  /// Z,P,Q: (in-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1, per axis. kConv: the in
  /// that this gives; output_padding inputs at the end are then none that an output's last tap needs.
  Extent3 out() const;

  /// Output positions of one sample, Z*P*Q.
  std::int64_t positions() const { return volume(out()); }

  /// Whether products are to have float32's accuracy.
  bool is_ieee() const { return dtype == DType::kFloat32 && precision == Precision::kIEEE; }

  /// Multiplications and additions that touch an input value: 2*N*(C/groups)*K*(taps that hit the output).
  double useful_flops() const;
};

/// Whether y lies as [N,Z,P,Q,K].
inline bool in_rows(const Problem& p) {
  return p.y_layout == Layout::kNDHWC;
}

/// Checks every rule on the numbers of the block: extents, channels, groups, eps, element counts.
/// \throws RuleViolation or ValueViolation (core/errors.hpp): the rule, the value it got and the remedy.
void validate(const Problem& problem);

/// The convolution and nothing behind it, with its bias where the call returns it.
Problem convolution_alone(const Problem& problem);

/// What follows the sum of a biased convolution and a skip.
Problem after_skip(const Problem& problem);

/// One line, for messages: "N=2 C=64 K=128 in=32x32x32 kernel=3x3x3 ... bfloat16 NDHWC".
std::string describe(const Problem& problem);

}  // namespace upconv3d
