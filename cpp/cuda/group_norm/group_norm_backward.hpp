// SPDX-License-Identifier: Apache-2.0
/// \file
/// Backward of y = after(gamma*xhat + beta), xhat of a = before(c): from grad_y to grad_c, the gradient at
/// the convolution's output, in the form that the tensor-core convolutions multiply; and the gradients of
/// gamma, beta, the bias, and the slopes of prelu.
///
///   xhat = (a - mean)*rstd, per (sample, group); m = positions*K/G
///   u = gamma*xhat + beta, g = grad_y*after'(u)
///   s1[n,k] = sum(g), s2[n,k] = sum(g*xhat)
///   c1[n,g] = sum of gamma*s1 over the group / m, c2[n,g] = the same of s2
///   grad_c = rstd*(gamma*g - c1 - xhat*c2); where before is relu: that where !(a <= 0), else 0
///   grad_beta = sum of s1 over n, grad_gamma = sum of s2 over n, grad_bias = sum of grad_c over n, positions
///   grad_slopes = sum of grad_y*u where !(u > 0), per channel, or over all where there is one slope
///
/// One cooperative launch. The same bits on every run: no floating-point atomics, sums in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

/// What grad_c is written as.
enum class GradOperand : std::uint8_t {
  kOwn,            // grad_y's dtype
  kScaledFloat16,  // float32 only: float16(grad_c * 2^-unscale), |grad_c * 2^-unscale| < 2^15
  // float32 with a in float32 only: the same as hi + lo in float16 each, in rows that are SplitRows
  // (core/channels.hpp) of grad_c_pitch channels. One power of two for all: values down to 2^-16 of the
  // bound on the largest are held to 2^-23 of themselves, smaller ones to 2^-39 of it, 2^-15 of what float32
  // does to the largest. So what is summed from all of grad_c is as exact as from float32 wherever values
  // near the largest take part, as they do in the rms of a tensor's error; the gradients of a sample or
  // channel whose own largest lies 2^-16 below are less exact than from float32. What is not finite has hi =
  // 0.
  kSplitFloat16,
};

struct GroupNormBackwardParams {
  std::int64_t n = 0;             // samples
  std::int64_t k = 0;             // channels
  std::int64_t positions = 0;     // Z*P*Q, below 2^30
  std::int64_t num_groups = 1;    // divides k
  DType dtype = DType::kFloat32;  // of grad_y, gamma and their gradients: float32, bfloat16 or float16
  Layout grad_y_layout = Layout::kNCDHW;
  const void* grad_y = nullptr;  // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, dense, any alignment
  const void* a = nullptr;       // [N,Z,P,Q,a_pitch] dtype, or uint16 with steps; 16-byte aligned
  std::int64_t a_pitch = 0;  // elements of a position's row, a multiple of 8; what lies behind K is not used
  // Where given, a holds 16 bits each that stand for float32: bits * 2^step, or NaN where step is -128.
  // With signed_steps (bits - 32768) * 2^step.
  const std::int8_t* steps = nullptr;       // [N,moments,a_pitch], 4-byte aligned, or null
  const std::int32_t* moment_of = nullptr;  // [Z*P*Q] whose steps a position has; with steps
  std::int64_t moments = 0;                 // with steps
  bool signed_steps = false;                // with steps
  const float* table = nullptr;             // [N,G,4] mean, what the mean lost by rounding, rstd, unused
  const void* gamma = nullptr;              // [K] dtype, or null for 1
  const void* beta = nullptr;               // [K] dtype, or null for 0; read only where `after` is not none
  Activation before = Activation::kRelu;    // or none
  ActivationParams after;

  GradOperand operand = GradOperand::kOwn;
  void* grad_c = nullptr;           // [N,Z,P,Q,grad_c_pitch] operand, zeros behind K; or null: sums only
  std::int64_t grad_c_pitch = 0;    // at least k, a multiple of 8; grad_c is 16-byte aligned
  std::int32_t* unscale = nullptr;  // [1] written: grad_c = operand * 2^unscale, in [-163, 113]; not for kOwn
  void* grad_gamma = nullptr;       // [K] dtype, or null
  void* grad_beta = nullptr;        // [K] dtype, or null
  void* grad_bias = nullptr;        // [K] dtype, or null
  void* grad_slopes = nullptr;      // [1] or [K] dtype, as after.slope_step says, or null; with prelu

  void* scratch = nullptr;        // group_norm_backward_scratch_bytes, 256-byte aligned
  bool counters_cleared = false;  // the first group_norm_backward_counter_bytes of scratch are 0 already
  int sm_count = 0;               // multiprocessors of the device
};

/// Bytes at the beginning of scratch that must be 0 when the kernel begins.
std::int64_t group_norm_backward_counter_bytes(const GroupNormBackwardParams& params);

/// Bytes of scratch; pointers of `params` are not looked at, except for whether there are steps and whether
/// grad_slopes are wanted.
std::int64_t group_norm_backward_scratch_bytes(const GroupNormBackwardParams& params);

/// Whether grad_c may be written over a, which must have rows of as many bytes. Blocks read what others have
/// not yet written over; so their channels' SplitRow must lie where their floats do.
bool may_overwrite_activation(const GroupNormBackwardParams& params);

/// N = 0 writes zeros to the parameters' gradients, and unscale.
/// \throws std::invalid_argument for dtypes, pitches or alignments that no kernel takes.
void launch_group_norm_backward(const GroupNormBackwardParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
