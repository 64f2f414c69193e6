// SPDX-License-Identifier: Apache-2.0
/// Checks every compiled variant of conv_transpose_relu_moments_sm90 on its own against a plain
/// double-precision convolution: exactly on small integers (conv + bias + ReLU), moments to float accuracy,
/// NaN where nothing may be left unwritten. Needs a GPU of compute capability 9.0. Exit code 0: all passed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cutlass/numeric_types.h"
#include "gpu_test.hpp"

namespace {

using upconv3d::border_slabs;
using upconv3d::ConvInstance;
using upconv3d::DType;
using upconv3d::Extent3;
using upconv3d::Problem;
using upconv3d::Slab;
using upconv3d::slab_tiles;
using upconv3d::volume;
using upconv3d::cuda::check;

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, count * sizeof(T)), "allocating a test buffer");
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
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// relu(conv_transpose(x, w) + bias) in double: x [N,D,H,W,C], w [T*R*S,K,C], y [N,Z,P,Q,K].
__global__ void reference_kernel(const double* x, const double* w, const double* bias, double* y,
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
    const std::int64_t d = z + problem.padding[0] - t;
    if (d < 0 || d >= problem.in[0]) continue;
    for (std::int64_t r = 0; r < problem.kernel[1]; ++r) {
      const std::int64_t h = p + problem.padding[1] - r;
      if (h < 0 || h >= problem.in[1]) continue;
      for (std::int64_t s = 0; s < problem.kernel[2]; ++s) {
        const std::int64_t v = q + problem.padding[2] - s;
        if (v < 0 || v >= problem.in[2]) continue;
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

std::uint64_t next_random(std::uint64_t& state) {  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

std::vector<double> small_integers(std::size_t count, int magnitude, std::uint64_t& state) {
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

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, padding;
  bool next_is_nan = false;  // sample 1 begins with NaN, which a tile of sample 0 must not take in
};

// One 8-channel corner case, tails of every tile extent, kernels with an axis of 1, padding up to beyond the
// kernel, several channel tiles, several samples whose positions end inside a tile.
const Case kCases[] = {
    {1, 8, 8, {2, 3, 4}, {1, 1, 1}, {0, 0, 0}},
    {2, 64, 128, {6, 6, 6}, {3, 3, 3}, {0, 0, 0}},
    {3, 72, 136, {5, 4, 7}, {3, 3, 3}, {1, 1, 1}},
    {2, 16, 264, {4, 9, 5}, {2, 3, 1}, {0, 2, 0}},
    {1, 128, 64, {8, 8, 8}, {5, 5, 5}, {2, 2, 2}},
    {2, 24, 40, {1, 1, 40}, {1, 1, 7}, {0, 0, 3}},
    {1, 32, 32, {12, 12, 12}, {2, 2, 2}, {1, 0, 1}},
    {2, 8, 16, {9, 9, 9}, {3, 3, 3}, {3, 3, 3}},
    // 258 positions: the last tile of every variant holds two
    {2, 64, 64, {1, 2, 129}, {1, 1, 1}, {0, 0, 0}, true},
};

/// Scaling x by 2^3 and w by 2^-2 and undoing it with unscale exponents exercises the float epilogue.
constexpr int kSampleExponent = 3;
constexpr int kColumnExponent = -2;

/// Index in a [N,Z,P,Q,K] of position `p` of a slab.
std::int64_t element(const Problem& problem, const Slab& slab, std::int64_t n, std::int64_t k,
                     std::int64_t p) {
  const Extent3 out = problem.out();
  const std::int64_t q = slab.origin[2] + p % slab.extent[2];
  const std::int64_t row = slab.origin[1] + p / slab.extent[2] % slab.extent[1];
  const std::int64_t z = slab.origin[0] + p / slab.extent[2] / slab.extent[1];
  return (((n * out[0] + z) * out[1] + row) * out[2] + q) * problem.k + k;
}

template <class Operand, class Activation>
std::string run_case(const ConvInstance& instance, const Case& shape, int split_axes, std::uint64_t& state) {
  Problem problem;
  problem.n = shape.n, problem.c = shape.c, problem.k = shape.k;
  problem.in = shape.in, problem.kernel = shape.kernel, problem.padding = shape.padding;
  problem.dtype = instance.activation;
  problem.has_bias = true;
  const Extent3 out = problem.out();
  const std::vector<Slab> slabs = border_slabs(problem, split_axes);
  const std::int64_t positions = problem.positions();
  // Small enough that every sum is exact in a 16-bit activation: at most 2^8 in bfloat16.
  const int magnitude = 1;
  auto x = small_integers(problem.n * volume(problem.in) * problem.c, magnitude, state);
  auto w = small_integers(volume(problem.kernel) * problem.k * problem.c, magnitude, state);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (next_random(state) % 16 != 0) x[i] = 0.0;  // sparse, which keeps the sums small
  }
  if (shape.next_is_nan) {
    const std::size_t sample = x.size() / 2;
    std::fill(x.begin() + sample, x.begin() + sample + 64 * problem.c, std::nan(""));
  }
  const std::int64_t samples = shape.next_is_nan ? 1 : problem.n;  // that are compared
  const auto bias = small_integers(problem.k, 3, state);
  const bool split = instance.products == 3;
  const bool scaled = std::is_same_v<Activation, float>;

  DeviceBuffer<double> x64(x.size()), w64(w.size()), bias64(bias.size());
  DeviceBuffer<double> reference(problem.n * positions * problem.k);
  x64.upload(x), w64.upload(w), bias64.upload(bias);
  const std::int64_t elements = problem.n * positions * problem.k;
  reference_kernel<<<unsigned((elements + 127) / 128), 128>>>(x64.get(), w64.get(), bias64.get(),
                                                              reference.get(), problem, out);
  upconv3d::cuda::check_launch("reference_kernel");

  DeviceBuffer<Operand> x_hi(x.size()), w_hi(w.size()), x_lo(x.size()), w_lo(w.size());
  const double x_scale = scaled ? std::ldexp(1.0, -kSampleExponent) : 1.0;
  const double w_scale = scaled ? std::ldexp(1.0, -kColumnExponent) : 1.0;
  // hi and lo of integers that make w_hi*x_lo + w_lo*x_hi + w_hi*x_hi = w*x and use every product:
  // x = (3x, -2x), w = (-2w, w).
  x_hi.upload(rounded<Operand>(x, x_scale * (split ? 3 : 1)));
  w_hi.upload(rounded<Operand>(w, w_scale * (split ? -2 : 1)));
  x_lo.upload(rounded<Operand>(x, x_scale * -2));
  w_lo.upload(rounded<Operand>(w, w_scale));
  DeviceBuffer<Activation> bias_device(problem.k), a(elements);
  bias_device.upload(rounded<Activation>(bias));
  a.poison();
  const std::int64_t tile = moment_positions(instance);
  const std::int64_t tiles = slab_tiles(slabs, tile);
  DeviceBuffer<float> part(problem.n * tiles * problem.k * 2);
  part.poison();
  DeviceBuffer<std::int32_t> unscale_sample(problem.n), unscale_column(problem.k);
  unscale_sample.upload(std::vector<std::int32_t>(problem.n, kSampleExponent));
  unscale_column.upload(std::vector<std::int32_t>(problem.k, kColumnExponent));

  upconv3d::cuda::ConvTransposeParams params;
  params.problem = problem;
  params.x_hi = x_hi.get(), params.x_lo = x_lo.get(), params.w_hi = w_hi.get(), params.w_lo = w_lo.get();
  params.bias = bias_device.get();
  if (scaled) params.unscale_sample = unscale_sample.get(), params.unscale_column = unscale_column.get();
  DeviceBuffer<std::int32_t> counts(tiles);
  counts.poison();
  params.a = a.get(), params.part = part.get(), params.counts = counts.get();
  params.split_axes = split_axes;
  params.sm_count = 5;  // few blocks, so that each walks several tiles
  upconv3d::cuda::find_conv_transpose_launcher(instance.name)(params, nullptr);
  check(cudaDeviceSynchronize(), instance.name);

  const auto expected = reference.download();
  const auto got = a.download();
  for (std::int64_t i = 0; i < samples * positions * problem.k; ++i) {
    if (double(float(got[i])) != expected[i]) {
      return "a[" + std::to_string(i) + "] is " + std::to_string(float(got[i])) + ", expected " +
             std::to_string(expected[i]);
    }
  }
  const auto moments = part.download();
  const auto tile_counts = counts.download();
  std::int64_t t = 0;
  for (const Slab& slab : slabs) {
    for (std::int64_t begin = 0; begin < slab.positions(); begin += tile, ++t) {
      const std::int64_t count = std::min(tile, slab.positions() - begin);
      if (tile_counts[t] != count)
        return "counts[" + std::to_string(t) + "] is " + std::to_string(tile_counts[t]);
      for (std::int64_t nk = 0; nk < samples * problem.k; ++nk) {
        const std::int64_t n = nk / problem.k, k = nk % problem.k;
        double mean = 0, m2 = 0;
        for (std::int64_t p = begin; p < begin + count; ++p)
          mean += expected[element(problem, slab, n, k, p)];
        mean /= double(count);
        for (std::int64_t p = begin; p < begin + count; ++p) {
          const double delta = expected[element(problem, slab, n, k, p)] - mean;
          m2 += delta * delta;
        }
        const float* pair = &moments[((n * tiles + t) * problem.k + k) * 2];
        if (!(std::abs(pair[0] - mean) <= 1e-5 * (1 + std::abs(mean))) ||
            !(std::abs(pair[1] - m2) <= 1e-4 * (1 + m2))) {
          return "part of n=" + std::to_string(n) + " tile=" + std::to_string(t) + " k=" + std::to_string(k) +
                 " is (" + std::to_string(pair[0]) + ", " + std::to_string(pair[1]) + "), expected (" +
                 std::to_string(mean) + ", " + std::to_string(m2) + ")";
        }
      }
    }
  }
  return "";
}

std::string run_case(const ConvInstance& instance, const Case& shape, int split_axes, std::uint64_t& state) {
  if (instance.operand == DType::kBFloat16) {
    return run_case<cutlass::bfloat16_t, cutlass::bfloat16_t>(instance, shape, split_axes, state);
  }
  if (instance.activation == DType::kFloat16) {
    return run_case<cutlass::half_t, cutlass::half_t>(instance, shape, split_axes, state);
  }
  return run_case<cutlass::half_t, float>(instance, shape, split_axes, state);
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(90)) return upconv3d::tests::kSkipped;
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  int passed = 0, failed = 0;
  for (const ConvInstance& instance : upconv3d::conv_instances()) {
    if (!instance.compiled) continue;
    for (int index = 0; index < 4 * int(std::size(kCases)); ++index) {
      const Case& shape = kCases[index / 4];
      const int split_axes = index % 4;
      std::string problem;
      try {
        problem = run_case(instance, shape, split_axes, state);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      problem.empty() ? ++passed : ++failed;
      if (!problem.empty()) {
        std::printf("FAILED %s N=%lld C=%lld K=%lld: %s\n", instance.name, (long long)shape.n,
                    (long long)shape.c, (long long)shape.k, problem.c_str());
      }
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
