// SPDX-License-Identifier: Apache-2.0
/// \file
/// The inner loops of relu_group_norm, compiled once per instruction set and chosen at run time.
///
/// Below, T is the stored dtype, A = compute_t<T>, and v = relu(c + bias). A "row" is one channel's run of
/// positions (NCDHW); "columns" are channels side by side (NDHWC).
#pragma once

#include <cstdint>

#include "cpu/float_types.hpp"

namespace upconv3d::cpu {

/// Sums of d = v - shift: what turns a rough mean into the moments of a tile.
struct Deviation {
  double sum = 0.0;          // of d
  double sum_squares = 0.0;  // of d*d
};

/// Per channel (rows) or per column: y = (v - mean)*scale + shift.
template <class A>
struct Affine {
  const A* bias;   // [channels or width] A
  const A* mean;   // [channels or width] A
  const A* scale;  // [channels or width] A
  const A* shift;  // [channels or width] A

  Affine from(std::int64_t first) const { return {bias + first, mean + first, scale + first, shift + first}; }
};

/// Elements [begin, end) of a stack of rows that lie one behind the other, `positions` elements each.
struct Run {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t positions = 1;
};

/// Rows and columns of a tile; strides in elements.
struct TileExtent {
  std::int64_t rows = 0;
  std::int64_t width = 0;
};

template <class T>
struct TileKernels {
  using A = compute_t<T>;

  /// out [n] A = values [n] T.
  void (*convert)(const T* values, A* out, std::int64_t n);

  /// Sum of v over a run of c [channels,positions] T; bias [channels] A.
  double (*row_sum)(const T* c, Run run, const A* bias);

  /// Deviations from `shift` over a run of c [channels,positions] T; bias [channels] A.
  Deviation (*row_deviation)(const T* c, Run run, const A* bias, A shift);

  /// sum [width] A = column sums of v over c [rows,width] T, dense; bias [width] A.
  void (*column_sum)(const T* c, TileExtent extent, const A* bias, A* sum);

  /// d [width] A, d2 [width] A: column sums of v - shift and of its square; bias, shift [width] A.
  void (*column_deviation)(const T* c, TileExtent extent, const A* bias, const A* shift, A* d, A* d2);

  /// A run of y [channels,positions] T from the same run of c; y may be c.
  void (*normalize_rows)(const T* c, T* y, Run run, Affine<A> affine);

  /// y [rows,width] T with row stride y_stride from c [rows,width] T with row stride c_stride; y may be c.
  void (*normalize_columns)(const T* c, std::int64_t c_stride, T* y, std::int64_t y_stride, TileExtent extent,
                            Affine<A> affine);

  /// y [width,rows] T with row stride y_stride from a [rows,width] T with row stride a_stride.
  void (*transpose)(const T* a, std::int64_t a_stride, T* y, std::int64_t y_stride, TileExtent extent);
};

/// The kernels for this machine: AVX-512, AVX2 or what the compiler targets. T is float, double, BFloat16 or
/// Float16.
template <class T>
const TileKernels<T>& tile_kernels();

}  // namespace upconv3d::cpu
