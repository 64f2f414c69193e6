// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the tests of the convolution's kernels compare with and feed them: a plain convolution in double,
/// which partial moment a position has, random numbers, and device memory that can be poisoned.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/index_math.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"

namespace upconv3d::tests {

using cuda::check;

/// `count` values of T in device memory.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "allocating a test buffer");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void upload(const std::vector<T>& host) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "uploading");
  }
  void poison() { check(cudaMemset(data_, 0xff, count_ * sizeof(T)), "poisoning"); }  // NaN in every format
  std::vector<T> download() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "downloading");
    return host;
  }
  void clear() { check(cudaMemset(data_, 0, count_ * sizeof(T)), "clearing"); }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// Input coordinate that a tap brings to output coordinate `at` along an axis, or -1: by the definition,
/// input i reaches at = i*stride - padding + tap*dilation.
static __device__ std::int64_t input_of(const Problem& problem, int axis, std::int64_t at, std::int64_t tap) {
  const std::int64_t reach = at + problem.padding[axis] - tap * problem.dilation[axis];
  if (reach < 0 || reach % problem.stride[axis] != 0) return -1;
  const std::int64_t i = reach / problem.stride[axis];
  return i < problem.in[axis] ? i : -1;
}

/// conv_transpose(x, w) + bias in double: x [N,D,H,W,C], w [T*R*S,K,C/groups], y [N,Z,P,Q,K].
static __global__ void reference_kernel(const double* x, const double* w, const double* bias, double* y,
                                        Problem problem, Extent3 out) {
  const std::int64_t index = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= problem.n * out[0] * out[1] * out[2] * problem.k) return;
  const std::int64_t k = index % problem.k;
  std::int64_t rest = index / problem.k;
  const std::int64_t q = rest % out[2];
  rest /= out[2];
  const std::int64_t p = rest % out[1];
  rest /= out[1];
  const std::int64_t z = rest % out[0];
  const std::int64_t n = rest / out[0];
  const std::int64_t channels = problem.c / problem.groups;
  const std::int64_t first_channel = k / (problem.k / problem.groups) * channels;
  double sum = bias[k];
  for (std::int64_t t = 0; t < problem.kernel[0]; ++t) {
    const std::int64_t d = input_of(problem, 0, z, t);
    if (d < 0) continue;
    for (std::int64_t r = 0; r < problem.kernel[1]; ++r) {
      const std::int64_t h = input_of(problem, 1, p, r);
      if (h < 0) continue;
      for (std::int64_t s = 0; s < problem.kernel[2]; ++s) {
        const std::int64_t v = input_of(problem, 2, q, s);
        if (v < 0) continue;
        const double* pixel =
            x + (((n * problem.in[0] + d) * problem.in[1] + h) * problem.in[2] + v) * problem.c +
            first_channel;
        const double* tap =
            w + (((t * problem.kernel[1] + r) * problem.kernel[2] + s) * problem.k + k) * channels;
        for (std::int64_t c = 0; c < channels; ++c) sum += pixel[c] * tap[c];
      }
    }
  }
  y[index] = sum;
}

/// ReLU of all values; NaN stays NaN.
inline std::vector<double> rectified(std::vector<double> values) {
  for (double& v : values) v = v < 0 ? 0 : v;
  return values;
}

/// [Z*P*Q] index of the partial moment of a position: slab by slab, `moment_positions` of a slab's each.
inline std::vector<std::int32_t> moments_of_positions(const Problem& problem, const std::vector<Slab>& slabs,
                                                      std::int64_t moment_positions) {
  const Extent3 out = problem.out();
  std::vector<std::int32_t> moments(problem.positions(), -1);
  std::int64_t first = 0;
  for (const Slab& slab : slabs) {
    for (std::int64_t i = 0; i < slab.positions(); ++i) {
      const Extent3 index = {i / slab.extent[2] / slab.extent[1], i / slab.extent[2] % slab.extent[1],
                             i % slab.extent[2]};
      Extent3 at;
      for (int axis = 0; axis < 3; ++axis) at[axis] = slab.origin[axis] + index[axis] * slab.step[axis];
      moments[(at[0] * out[1] + at[1]) * out[2] + at[2]] = std::int32_t(first + i / moment_positions);
    }
    first += ceil_div(slab.positions(), moment_positions);
  }
  return moments;
}

/// Rows [rows,groups,channels] as [outer,groups,rows/outer,pitch], zeros behind each row's channels.
inline std::vector<double> packed(const std::vector<double>& from, std::int64_t outer, std::int64_t groups,
                                  std::int64_t channels, std::int64_t pitch) {
  const std::int64_t rows = static_cast<std::int64_t>(from.size()) / (groups * channels),
                     inner = rows / outer;
  std::vector<double> to(rows * groups * pitch);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(from.size()); ++i) {
    const std::int64_t row = i / (groups * channels), group = i / channels % groups;
    to[((row / inner * groups + group) * inner + row % inner) * pitch + i % channels] = from[i];
  }
  return to;
}

/// [rows,columns] as [columns,rows].
inline std::vector<double> transposed(const std::vector<double>& from, std::int64_t columns) {
  const std::int64_t rows = static_cast<std::int64_t>(from.size()) / columns;
  std::vector<double> to(from.size());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(from.size()); ++i) {
    to[i % columns * rows + i / columns] = from[i];
  }
  return to;
}

inline std::uint64_t next_random(std::uint64_t& state) {  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

inline std::vector<double> small_integers(std::size_t count, int magnitude, std::uint64_t& state) {
  std::vector<double> values(count);
  for (double& v : values) v = double(int(next_random(state) % (2 * magnitude + 1)) - magnitude);
  return values;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& values, double factor = 1.0) {
  std::vector<T> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) result[i] = T(float(values[i] * factor));
  return result;
}

/// Multiples of 2^-10 between -1 and 1 as T has them, times a power of two.
template <class T>
std::vector<double> reals(std::size_t count, double scale, std::uint64_t& state) {
  std::vector<double> values = small_integers(count, 1023, state);
  for (double& v : values) v = double(float(T(float(v * 0x1p-10)))) * scale;
  return values;
}

}  // namespace upconv3d::tests
