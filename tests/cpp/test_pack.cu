// SPDX-License-Identifier: Apache-2.0
/// \file
/// launch_pack against a host reference in double, bit for bit. Needs a GPU; returns non-zero on a mismatch.
///
///   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -I cpp tests/cpp/test_pack.cu
///   cpp/cuda/layout/*.cu
///        cpp/cuda/check.cpp cpp/core/*.cpp -o test_pack
///   ./test_pack          checks, in seconds; also under compute-sanitizer
///   ./test_pack --time   times the headline shape and weights, L2 cold (ms, GB/s of bytes that must move)

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/channels.hpp"
#include "cuda/check.hpp"
#include "cuda/layout/pack.hpp"
#include "gpu_test.hpp"
#include "pack_case_list.hpp"
#include "pack_cases.hpp"
#include "pack_reference.hpp"

namespace {

using upconv3d::cuda::check;
using upconv3d::cuda::OperandScales;
using upconv3d::cuda::PackParams;
using namespace upconv3d::tests;
using upconv3d::DType;
using upconv3d::Layout;
using upconv3d::Problem;

/// Elements are float, or the bits of a 16-bit dtype.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t count) : count_(count) {
    check(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T)),
          "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(static_cast<std::int64_t>(host.size())) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  std::vector<T> download() const {
    std::vector<T> host(static_cast<std::size_t>(count_));
    check(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_;
};

void require(bool condition, const Case& test, const std::string& what) {
  if (!condition) throw std::runtime_error(std::string(test.label) + ": " + what);
}

void compare_value(std::uint16_t bits, double expected, const Case& test, const char* array,
                   std::int64_t index) {
  const double got = half_value(bits);
  if (std::isnan(expected) ? std::isnan(got) : got == expected) return;
  throw std::runtime_error(std::string(test.label) + ": " + array + "[" + std::to_string(index) +
                           "] must be " + std::to_string(expected) + "; got " + std::to_string(got));
}

void compare_bits(std::uint16_t bits, std::uint16_t expected, const Case& test, const char* array,
                  std::int64_t index) {
  if (bits == expected) return;
  throw std::runtime_error(std::string(test.label) + ": bits of " + array + "[" + std::to_string(index) +
                           "] must be " + std::to_string(expected) + "; got " + std::to_string(bits));
}

/// Every element of a packed tensor; `expected(row, c)` yields its two halves, of which those behind the
/// group's channels are zeros.
template <class Expected>
void compare_packed(const Case& test, const char* array, std::int64_t rows,
                    const std::vector<std::uint16_t>& hi, const std::vector<std::uint16_t>& lo,
                    const Expected& expected) {
  const std::int64_t channels = test.c / test.groups;
  const std::int64_t pitch = upconv3d::operand_channels(problem_of(test));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t c = 0; c < pitch; ++c) {
      const std::int64_t i = row * pitch + c;
      const HostSplit reference = c < channels ? expected(row, c) : HostSplit{0.0, 0.0};
      compare_value(hi[i], reference.hi, test, array, i);
      if (test.products == 3) compare_value(lo[i], reference.lo, test, array, i);
    }
  }
}

void compare_exponents(const Case& test, const char* array, const std::int32_t* device,
                       const std::vector<int>& expected, int sign) {
  std::vector<std::int32_t> got(expected.size());
  check(cudaMemcpy(got.data(), device, got.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost),
        "download");
  for (std::size_t i = 0; i < got.size(); ++i) {
    require(got[i] == sign * expected[i], test,
            std::string(array) + "[" + std::to_string(i) + "] must be " + std::to_string(sign * expected[i]) +
                "; got " + std::to_string(got[i]));
  }
}

/// What a packed buffer holds before: a NaN, so that an element never written is noticed.
constexpr std::uint16_t kPoison = 0x7fff;

/// Neither a multiple of 16 bytes nor less than a block clears.
constexpr std::int64_t kRegionBytes = 70005, kGuardBytes = 64;

void check_region(const Case& test, const std::vector<std::uint8_t>& region) {
  for (std::int64_t i = 0; i < kRegionBytes + kGuardBytes; ++i) {
    const std::uint8_t expected = test.n > 0 && i < kRegionBytes ? 0 : 0xa5;
    require(region[i] == expected, test, "byte " + std::to_string(i) + " of the cleared region differs");
  }
}

/// launch_pack_x and launch_pack_w where launch_pack has been: the same operands once more, out of poison.
void check_alone(const Case& test, PackParams params, const DeviceArray<std::uint16_t>& x_hi,
                 const DeviceArray<std::uint16_t>& w_hi) {
  const std::vector<std::uint16_t> x = x_hi.download(), w = w_hi.download();
  check(cudaMemset(x_hi.get(), 0x7f, x.size() * sizeof(std::uint16_t)), "poisoning x");
  check(cudaMemset(w_hi.get(), 0x7f, w.size() * sizeof(std::uint16_t)), "poisoning w");
  upconv3d::cuda::launch_pack_x(params, nullptr);
  params.assumed_channel = upconv3d::cuda::assumed_exponent(test.products);
  params.x_hi = nullptr;
  upconv3d::cuda::launch_pack_w(params, nullptr);
  check(cudaDeviceSynchronize(), test.label);
  require(x_hi.download() == x, test, "x packed alone must be as it is beside w");
  require(test.rejects || w_hi.download() == w, test, "w packed alone must be as it is beside x");
}

template <class T>
void run_case(const Case& test, std::mt19937& random) {
  const Problem problem = problem_of(test);
  const std::int64_t positions = upconv3d::volume(test.in), taps = upconv3d::volume(test.kernel);
  const std::int64_t channels = test.c / test.groups, pitch = upconv3d::operand_channels(problem);
  const std::int64_t x_count = test.n * test.groups * positions * pitch, w_count = test.k * taps * pitch;
  PackParams params;
  std::vector<T> x(test.n * test.c * positions), w(weight_strides(test, params.w_strides));
  fill(x, test, random);
  fill(w, test, random);
  if constexpr (std::is_same_v<T, float>) {
    if (test.content == Content::kSpecial) place_special_inputs(test, x);
    if (test.content == Content::kSpecial || test.content == Content::kSpecialWeights) {
      place_special_weights(test, params.w_strides, w);
    }
    place_limits(test, x);
  }
  std::vector<T> shifted(x.size() + test.x_offset);
  std::copy(x.begin(), x.end(), shifted.begin() + test.x_offset);
  std::vector<T> shifted_w(w.size() + test.w_offset);
  std::copy(w.begin(), w.end(), shifted_w.begin() + test.w_offset);

  const DeviceArray<T> device_x(shifted), device_w(shifted_w);
  const DeviceArray<std::uint16_t> x_hi(std::vector<std::uint16_t>(x_count, kPoison)), x_lo(x_hi.download());
  const DeviceArray<std::uint16_t> w_hi(std::vector<std::uint16_t>(w_count, kPoison)), w_lo(w_hi.download());
  const DeviceArray<std::uint8_t> memory(
      std::vector<std::uint8_t>(upconv3d::cuda::operand_scales_bytes(problem), 0xa5));
  params.problem = problem;
  params.operand = std::is_same_v<T, float> ? DType::kFloat16 : test.dtype;
  params.products = test.products;
  params.x = device_x.get() + test.x_offset;
  params.w = device_w.get() + test.w_offset;
  params.x_hi = test.pack_x ? x_hi.get() : nullptr;
  params.x_lo = test.products == 3 ? x_lo.get() : nullptr;
  params.w_hi = w_hi.get();
  params.w_lo = test.products == 3 ? w_lo.get() : nullptr;
  params.scales = upconv3d::cuda::carve_operand_scales(problem, memory.get());
  const DeviceArray<std::uint8_t> region(std::vector<std::uint8_t>(kRegionBytes + kGuardBytes, 0xa5));
  params.zero = region.get();
  params.zero_bytes = kRegionBytes;
  upconv3d::cuda::launch_pack(params, nullptr);
  upconv3d::cuda::launch_pack(params, nullptr);  // once more: no call may depend on what another left behind
  check(cudaDeviceSynchronize(), test.label);
  check_region(test, region.download());
  if (test.n == 0) {
    require(w_hi.download() == std::vector<std::uint16_t>(w_count, kPoison), test, "nothing may be launched");
    return;
  }

  // Rows of packed x are (sample, group, position), of packed w (tap, output channel); c is within the group.
  const auto x_channel = [&](std::int64_t row, std::int64_t c) {
    return row / positions % test.groups * channels + c;
  };
  const auto w_channel = [&](std::int64_t row, std::int64_t c) {
    return group_channel(test, row % test.k) + c;
  };
  const auto x_at = [&](std::int64_t row, std::int64_t c) {
    return x[x_index(test, row / positions / test.groups, x_channel(row, c), row % positions)];
  };
  const auto w_at = [&](std::int64_t row, std::int64_t c) {
    return w[w_index(test, params.w_strides, w_channel(row, c), row % test.k, row / test.k)];
  };
  if constexpr (std::is_same_v<T, float>) {
    const HostScales scales = reference_scales(test, params.w_strides, x, w);
    require(scales.rejected == test.rejects, test,
            std::string("the assumed scales must ") + (test.rejects ? "not " : "") + "fit this case");
    compare_exponents(test, "sample", params.scales.sample, scales.sample, 1);
    compare_exponents(test, "channel", params.scales.channel, scales.channel, 1);
    compare_exponents(test, "unscale_sample", params.scales.unscale_sample, scales.sample, -1);
    compare_exponents(test, "unscale_column", params.scales.unscale_column, scales.column, -1);
    compare_packed(test, "x", test.n * test.groups * positions, x_hi.download(), x_lo.download(),
                   [&](std::int64_t row, std::int64_t c) {
                     return split(
                         x_at(row, c),
                         scales.sample[row / positions / test.groups] + scales.channel[x_channel(row, c)],
                         test.products);
                   });
    compare_packed(
        test, "w", taps * test.k, w_hi.download(), w_lo.download(), [&](std::int64_t row, std::int64_t c) {
          return split(w_at(row, c), scales.column[row % test.k] - scales.channel[w_channel(row, c)],
                       test.products);
        });
    check_alone(test, params, x_hi, w_hi);
  } else {
    const std::vector<std::uint16_t> packed_x = x_hi.download(), packed_w = w_hi.download();
    for (std::int64_t i = 0; i < x_count; ++i) {
      const std::uint16_t value = i % pitch < channels ? x_at(i / pitch, i % pitch) : 0;
      compare_bits(packed_x[i], test.pack_x ? value : kPoison, test, "x", i);
    }
    for (std::int64_t i = 0; i < w_count; ++i) {
      const std::uint16_t value = i % pitch < channels ? w_at(i / pitch, i % pitch) : 0;
      compare_bits(packed_w[i], value, test, "w", i);
    }
  }
}

/// Median time of launch_pack with nothing of its own in L2, and the bandwidth of what it must read and
/// write.
///
/// \param x_byte every byte of x: 0x3f makes floats of 0.75, which the assumed scales fit, 1 such of 2^-125
void time_pack(const char* label, const Case& test, int x_byte = 0x3f) {
  constexpr int kRuns = 50;
  constexpr std::int64_t kColdBytes = 256 << 20;  // written before each run: several times an L2
  static const DeviceArray<std::uint8_t> cold(kColdBytes);
  const Problem problem = problem_of(test);
  const std::int64_t x_count = test.n * test.c * upconv3d::volume(test.in);
  const std::int64_t w_count = test.c * test.k * upconv3d::volume(test.kernel);
  const std::int64_t size = upconv3d::size_of(test.dtype);
  const DeviceArray<std::uint8_t> x(x_count * size), w(w_count * size),
      memory(upconv3d::cuda::operand_scales_bytes(problem));
  check(cudaMemset(x.get(), x_byte, x_count * size), "filling x");
  check(cudaMemset(w.get(), 0x3f, w_count * size), "filling w");
  const std::int64_t pitch = upconv3d::operand_channels(problem);
  const std::int64_t x_packed = test.n * upconv3d::volume(test.in) * pitch;
  const std::int64_t w_packed = test.k * upconv3d::volume(test.kernel) * pitch;
  const DeviceArray<std::uint16_t> x_hi(x_packed), x_lo(x_packed), w_hi(w_packed), w_lo(w_packed);
  PackParams params;
  weight_strides(test, params.w_strides);
  params.problem = problem;
  params.operand = test.dtype == DType::kFloat32 ? DType::kFloat16 : test.dtype;
  params.products = test.products;
  params.x = x.get(), params.w = w.get();
  params.x_hi = x_hi.get(), params.x_lo = x_lo.get(), params.w_hi = w_hi.get(), params.w_lo = w_lo.get();
  params.scales = upconv3d::cuda::carve_operand_scales(problem, memory.get());

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times(kRuns);
  for (float& ms : times) {
    check(cudaMemsetAsync(cold.get(), 0, kColdBytes), "clearing L2");
    check(cudaEventRecord(begin), "cudaEventRecord");
    upconv3d::cuda::launch_pack(params, nullptr);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), label);
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  const std::int64_t halves = test.products == 3 ? 2 : 1;
  const double bytes = static_cast<double>((x_count + w_count) * size + (x_packed + w_packed) * 2 * halves);
  std::printf("%-40s %.4f ms  %.0f GB/s\n", label, times[kRuns / 2], bytes / times[kRuns / 2] * 1e-6);
}

void time_all() {
  const upconv3d::Extent3 cube{32, 32, 32}, k3{3, 3, 3};
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    for (const int products : {1, 3}) {
      const std::string label =
          std::string("headline f32 ") + upconv3d::name(layout) + " x" + std::to_string(products);
      time_pack(label.c_str(), {"", 16, 64, 128, cube, k3, DType::kFloat32, products, layout,
                                WeightLayout::kContiguous, Content::kUniform, 0});
    }
  }
  for (const Layout layout : {Layout::kNCDHW, Layout::kNDHWC}) {
    const std::string label = std::string("headline f32 ") + upconv3d::name(layout) + " x1, repacked";
    time_pack(label.c_str(),
              {"", 16, 64, 128, cube, k3, DType::kFloat32, 1, layout, WeightLayout::kContiguous,
               Content::kUniform, 0},
              1);
  }
  time_pack("headline bf16 NCDHW", {"", 16, 64, 128, cube, k3, DType::kBFloat16, 1, Layout::kNCDHW,
                                    WeightLayout::kContiguous, Content::kUniform, 0});
  time_pack("f32 NCDHW 2x256x32^3", {"", 2, 256, 128, cube, k3, DType::kFloat32, 1, Layout::kNCDHW,
                                     WeightLayout::kContiguous, Content::kUniform, 0});
  struct Weight {
    const char* label;
    std::int64_t c, k;
    upconv3d::Extent3 kernel;
  };
  for (const Weight& weight :
       {Weight{"512x256x4^3", 512, 256, {4, 4, 4}}, Weight{"512x512x3^3", 512, 512, k3},
        Weight{"511x255x3^3", 511, 255, k3}, Weight{"256x128x3^3", 256, 128, k3},
        Weight{"64x128x3^3", 64, 128, k3}, Weight{"16x32x3^3", 16, 32, k3}}) {
    for (const WeightLayout w : {WeightLayout::kContiguous, WeightLayout::kChannelsLast}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const std::string label = std::string("w ") + weight.label + ' ' + upconv3d::name(dtype) +
                                  (w == WeightLayout::kContiguous ? " contiguous" : " channels_last_3d");
        time_pack(label.c_str(), {"",
                                  1,
                                  weight.c,
                                  weight.k,
                                  {1, 1, 1},
                                  weight.kernel,
                                  dtype,
                                  1,
                                  Layout::kNCDHW,
                                  w,
                                  Content::kUniform,
                                  0});
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  try {
    if (argc > 1 && std::strcmp(argv[1], "--time") == 0) {
      time_all();
      return 0;
    }
    std::mt19937 random(20240607);
    std::vector<Case> all = cases();
    for (const std::vector<Case>& more : {weight_cases(), scaled_weight_cases()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    for (const Case& test : all) {
      if (test.dtype == DType::kFloat32) {
        run_case<float>(test, random);
      } else {
        run_case<std::uint16_t>(test, random);
      }
    }
    std::printf("test_pack: %zu cases agree with the host reference\n", all.size());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "test_pack: %s\n", error.what());
    return 1;
  }
}
