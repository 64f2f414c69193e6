// SPDX-License-Identifier: Apache-2.0
/// \file
/// What test_conv_transpose_sm90 compares with and feeds the kernel: a plain convolution in double, random
/// small integers, and device memory that can be poisoned.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

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

/// Input that tap `tap` brings to output `at` along an axis, or -1.
__device__ inline std::int64_t reference_input(const Problem& problem, int axis, std::int64_t at,
                                               std::int64_t tap) {
  const std::int64_t reach = at + problem.padding[axis] - tap * problem.dilation[axis];
  const std::int64_t input = reach / problem.stride[axis];
  return reach >= 0 && reach % problem.stride[axis] == 0 && input < problem.in[axis] ? input : -1;
}

/// relu(conv_transpose(x, w) + bias) in double: x [N,D,H,W,C], w [T*R*S,K,C], y [N,Z,P,Q,K].
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
  double sum = bias[k];
  for (std::int64_t t = 0; t < problem.kernel[0]; ++t) {
    const std::int64_t d = reference_input(problem, 0, z, t);
    if (d < 0) continue;
    for (std::int64_t r = 0; r < problem.kernel[1]; ++r) {
      const std::int64_t h = reference_input(problem, 1, p, r);
      if (h < 0) continue;
      for (std::int64_t s = 0; s < problem.kernel[2]; ++s) {
        const std::int64_t v = reference_input(problem, 2, q, s);
        if (v < 0) continue;
        const double* pixel =
            x + (((n * problem.in[0] + d) * problem.in[1] + h) * problem.in[2] + v) * problem.c;
        const double* tap =
            w + (((t * problem.kernel[1] + r) * problem.kernel[2] + s) * problem.k + k) * problem.c;
        for (std::int64_t c = 0; c < problem.c; ++c) sum += pixel[c] * tap[c];
      }
    }
  }
  y[index] = sum < 0 ? 0 : sum;
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

}  // namespace upconv3d::tests
