// SPDX-License-Identifier: Apache-2.0
/// \file
/// SplitRows (core/channels.hpp) as the tests of three products hand them to kernels, and read them back.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/channels.hpp"
#include "cuda/check.hpp"

namespace upconv3d::tests {

/// Element of a channel's hi in its row.
__host__ __device__ inline std::int64_t hi_element(std::int64_t channel, std::int64_t block_step) {
  return channel / 64 * block_step + channel % 64;
}

/// Rows of `pitch` values times `scale`, in the memory of as many floats.
inline std::vector<float> split_rows(const std::vector<double>& rows, std::int64_t pitch, double scale) {
  const SplitRow row(pitch);
  std::vector<__half> halves(2 * rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double v = rows[i] * scale;
    const __half hi = __float2half_rn(float(v));
    const std::int64_t at =
        std::int64_t(i) / pitch * row.elements() + hi_element(i % pitch, row.block_step());
    halves[at] = hi;
    halves[at + row.lo_step] = __float2half_rn(float(v - double(__half2float(hi))));
  }
  std::vector<float> memory(rows.size());
  std::memcpy(memory.data(), halves.data(), memory.size() * sizeof(float));
  return memory;
}

/// What the memory of rows of `pitch` channels stands for: hi + lo.
inline std::vector<double> joined_rows(const std::vector<char>& memory, std::int64_t pitch) {
  const SplitRow row(pitch);
  std::vector<__half> halves(memory.size() / sizeof(__half));
  std::memcpy(halves.data(), memory.data(), memory.size());
  std::vector<double> values(halves.size() / 2);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t at =
        std::int64_t(i) / pitch * row.elements() + hi_element(i % pitch, row.block_step());
    values[i] = double(__half2float(halves[at])) + double(__half2float(halves[at + row.lo_step]));
  }
  return values;
}

static __global__ void split_rows_kernel(const float* rows, __half* to, std::int64_t count,
                                         std::int64_t pitch, std::int64_t block_step, std::int64_t lo_step,
                                         float scale) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float v = rows[i] * scale;
  const std::int64_t at = i / pitch * (2 * pitch) + hi_element(i % pitch, block_step);
  to[at] = __float2half_rn(v);
  to[at + lo_step] = __float2half_rn(v - __half2float(to[at]));
}

/// The same on the device, into memory of its own.
inline void split_on_device(const float* rows, void* to, std::int64_t count, std::int64_t pitch,
                            float scale) {
  const SplitRow row(pitch);
  split_rows_kernel<<<unsigned((count + 255) / 256), 256>>>(rows, static_cast<__half*>(to), count, pitch,
                                                            row.block_step(), row.lo_step, scale);
  cuda::check_launch("split_rows_kernel");
}

}  // namespace upconv3d::tests
