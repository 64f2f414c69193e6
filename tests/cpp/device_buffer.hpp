// SPDX-License-Identifier: Apache-2.0
/// \file
/// Device memory with guarded ends, and its contents as doubles, for the programs that test GroupNorm.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/problem.hpp"
#include "cuda/check.hpp"

namespace upconv3d::test {

using cuda::check;

/// Device memory with `pad` bytes of 0xA5 on either side, which must survive.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&memory_, bytes + 2 * kPad), "allocating a test buffer");
    check(cudaMemset(memory_, 0xA5, bytes + 2 * kPad), "filling a test buffer");
  }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return static_cast<char*>(memory_) + kPad; }
  std::int64_t bytes() const { return bytes_; }

  bool pads_intact() const {
    std::vector<unsigned char> pads(2 * kPad);
    check(cudaMemcpy(pads.data(), memory_, kPad, cudaMemcpyDeviceToHost), "reading a pad");
    check(cudaMemcpy(pads.data() + kPad, data() + bytes_, kPad, cudaMemcpyDeviceToHost), "reading a pad");
    return std::all_of(pads.begin(), pads.end(), [](unsigned char byte) { return byte == 0xA5; });
  }

 private:
  static constexpr std::int64_t kPad = 256;
  void* memory_ = nullptr;
  std::int64_t bytes_;
};

inline void upload(char* to, const std::vector<double>& values, DType dtype) {
  std::vector<char> raw(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float f = static_cast<float>(values[i]);
    const __nv_bfloat16 b = __float2bfloat16_rn(f);
    const __half h = __float2half_rn(f);
    char* at = raw.data() + i * size_of(dtype);
    if (dtype == DType::kFloat32) std::memcpy(at, &f, 4);
    if (dtype == DType::kBFloat16) std::memcpy(at, &b, 2);
    if (dtype == DType::kFloat16) std::memcpy(at, &h, 2);
    if (dtype == DType::kFloat64) std::memcpy(at, &values[i], 8);
  }
  check(cudaMemcpy(to, raw.data(), raw.size(), cudaMemcpyHostToDevice), "uploading");
}

inline std::vector<char> download_bytes(const char* from, std::int64_t bytes) {
  std::vector<char> raw(bytes);
  check(cudaDeviceSynchronize(), "waiting for the kernels under test");
  check(cudaMemcpy(raw.data(), from, bytes, cudaMemcpyDeviceToHost), "downloading");
  return raw;
}

inline std::vector<double> download(const char* from, std::int64_t count, DType dtype) {
  const std::vector<char> raw = download_bytes(from, count * size_of(dtype));
  std::vector<double> values(count);
  for (std::int64_t i = 0; i < count; ++i) {
    float f = 0;
    __nv_bfloat16 b;
    __half h;
    const char* at = raw.data() + i * size_of(dtype);
    if (dtype == DType::kFloat32) std::memcpy(&f, at, 4), values[i] = f;
    if (dtype == DType::kBFloat16) std::memcpy(&b, at, 2), values[i] = __bfloat162float(b);
    if (dtype == DType::kFloat16) std::memcpy(&h, at, 2), values[i] = __half2float(h);
    if (dtype == DType::kFloat64) std::memcpy(&values[i], at, 8);
  }
  return values;
}

}  // namespace upconv3d::test
