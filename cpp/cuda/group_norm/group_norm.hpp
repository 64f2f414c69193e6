// SPDX-License-Identifier: Apache-2.0
/// \file
/// Activation and GroupNorm in three stages, each a launcher: partial moments, finalize, normalize.
///
/// Partial moments are (mean, M2) per (sample, tile, channel). A tile is a stretch of at most tile_positions
/// positions; tile t begins at t*tile_positions, so that its count needs no storage. Merging follows Chan,
/// Golub & LeVeque (1979) in a fixed order: the same bits on every run. The SM90 plan merges moments inside
/// its convolution kernel and takes only normalize from here.
///
/// Statistics are kept in float, or in double where the activation is float64 ("stat" below).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/activation.hpp"

namespace upconv3d::cuda {

struct GroupNormShape {
  std::int64_t n = 0;               // samples
  std::int64_t k = 0;               // channels
  std::int64_t positions = 0;       // Z*P*Q
  std::int64_t num_groups = 1;      // divides k
  std::int64_t tile_positions = 0;  // positions per partial moment, at most
  std::int64_t tiles = 0;           // partial moments per (sample, channel)
};

/// activation_moments: partial moments of before(c + bias + skip), for convolutions whose epilogue is not
/// ours.
struct ActivationMomentsParams {
  GroupNormShape shape;
  DType dtype = DType::kFloat32;    // of c, bias and skip
  DType y_dtype = DType::kFloat32;  // of before.slopes
  Layout layout = Layout::kNCDHW;
  ActivationParams before = {};
  const void* c = nullptr;     // [N,K,Z,P,Q] or [N,Z,P,Q,K] dtype, dense
  const void* bias = nullptr;  // [K] dtype, or null
  const void* skip = nullptr;  // c's sizes, dtype and layout, or null
  void* part = nullptr;        // [N,tiles,K,2] stat, written
};
/// \throws std::invalid_argument for a y_dtype that normalize does not write from dtype.
void launch_activation_moments(const ActivationMomentsParams& params, cudaStream_t stream);

/// group_norm_finalize: partial moments to what normalize multiplies by,
///   y = (a - mean)*scale + shift,  scale = gamma/sqrt(var + eps),
/// with shift holding beta and the part of the mean that a float cannot.
struct FinalizeParams {
  GroupNormShape shape;
  DType dtype = DType::kFloat32;         // of gamma and beta; kFloat64 makes stat double
  const void* part = nullptr;            // [N,tiles,K,2] stat
  const void* gamma = nullptr;           // [K] dtype, or null for 1
  const void* beta = nullptr;            // [K] dtype, or null for 0
  double eps = 0.0;                      // activation units squared
  void* scratch = nullptr;               // finalize_scratch_bytes(shape)
  void* table = nullptr;                 // [3,N,K] stat, written: mean, scale, shift
  const std::int32_t* counts = nullptr;  // [tiles] positions of each tile, where they are not as said above
  float* groups = nullptr;  // [N,G,4] written, or null: mean, what it lost by rounding, 1/sqrt(var + eps), 0
};
std::int64_t finalize_scratch_bytes(const GroupNormShape& shape);
void launch_group_norm_finalize(const FinalizeParams& params, cudaStream_t stream);

/// group_norm_normalize: y = after((v - mean)*scale + shift), v = before(a + bias + skip); without a table,
/// y = after(v). One of before and after is none at least.
struct NormalizeParams {
  GroupNormShape shape;
  DType a_dtype = DType::kFloat32;  // also of bias and skip
  DType y_dtype = DType::kFloat32;  // also of slopes
  Layout a_layout = Layout::kNCDHW;
  Layout y_layout = Layout::kNCDHW;
  ActivationParams before = {}, after = {};
  std::int64_t a_pitch = 0;     // elements of a position's row of a [N,Z,P,Q,pitch], K of them channels; 0: K
  const void* a = nullptr;      // [N,K,Z,P,Q] or [N,Z,P,Q,pitch] a_dtype, dense
  const void* bias = nullptr;   // [K] a_dtype, or null
  const void* skip = nullptr;   // as a lies, a_pitch included, a_dtype, or null; not y
  const void* table = nullptr;  // [3,N,K] stat, or null: no normalization
  void* y = nullptr;            // y_layout, y_dtype; may be `a` where dtype, layout and pitch are equal
  // As y, or null: a + bias + skip is stored here too, and what is stored is activated. Only without a
  // table, from a layout and dtype to the same, and of double without an activation; may be `a` as y may.
  void* sum = nullptr;
  // Where given, a holds 16 bits each that stand for float32: a value is bits * 2^step, with signed_steps
  // (bits - 32768) * 2^step, or NaN where step is -128. Only from NDHWC, a_pitch a multiple of 8 and a
  // 16-byte aligned; with a table, and without before, bias and skip.
  const std::int8_t* steps = nullptr;  // [N,tiles,a_pitch], or null
  bool signed_steps = false;
  const std::int32_t* moment_of = nullptr;  // [Z*P*Q] partial moment of a position, below tiles; with steps
  // [N], or null. Where given, the launch may begin beside the kernel before it, on an arch from 90 on: what
  // it reads of a sample is there once the counts of this sample and of the first are at least merged_count,
  // and all is there when that kernel has ended. Only from NDHWC.
  const std::int32_t* merged = nullptr;
  std::int32_t merged_count = 0;
};
void launch_group_norm_normalize(const NormalizeParams& params, cudaStream_t stream);

/// Positions per partial moment that the library plan uses: enough tiles to fill `sm_count`
/// multiprocessors however few samples and channels there are, few enough that merging stays small.
std::int64_t activation_moments_tile_positions(std::int64_t n, std::int64_t k, std::int64_t positions,
                                               Layout layout, int sm_count);

}  // namespace upconv3d::cuda
