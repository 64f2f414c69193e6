// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks launch_columns and launch_col2im, of each order of x, w and y, against sums in double on the host.
/// Plain CUDA, no torch.
///
///   test_col2im   a second, also under compute-sanitizer
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "comparisons.hpp"
#include "core/col2im_plan.hpp"
#include "core/text.hpp"
#include "cuda/conv_transpose/col2im.hpp"
#include "cuda/conv_transpose/conv_transpose_columns_sm80.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

/// A tensor's extents and strides in elements: [N,C,D,H,W], [C,K,T,R,S] or [N,K,Z,P,Q], in either order.
struct View {
  std::int64_t extent[5], stride[5];

  View(std::int64_t a, std::int64_t b, const Extent3& e, bool channels_last)
      : extent{a, b, e[0], e[1], e[2]} {
    const std::int64_t inner = channels_last ? b : 1;
    stride[4] = inner, stride[3] = e[2] * inner, stride[2] = e[1] * stride[3];
    stride[1] = channels_last ? 1 : volume(e), stride[0] = b * volume(e);
  }
  std::int64_t count() const { return extent[0] * stride[0]; }
  std::int64_t at(std::int64_t a, std::int64_t b, const Extent3& e) const {
    return a * stride[0] + b * stride[1] + e[0] * stride[2] + e[1] * stride[3] + e[2] * stride[4];
  }
};

template <class Visit>
void for_each(const Extent3& extents, const Visit& visit) {
  Extent3 e;
  for (e[0] = 0; e[0] < extents[0]; ++e[0]) {
    for (e[1] = 0; e[1] < extents[1]; ++e[1]) {
      for (e[2] = 0; e[2] < extents[2]; ++e[2]) visit(e);
    }
  }
}

/// Each of `dtype` exactly, 16 bit as multiples of 1/128.
std::vector<double> random_values(std::int64_t count, std::uint32_t seed, DType dtype) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(seed) * 0x1p-31);
    if (dtype != DType::kFloat32) value = std::round(value * 128) / 128;
  }
  return values;
}

/// By how much of the sum of the products' sizes a result may be off. Of float32 two last bits that TF32's
/// second word may lack, the product of two such words, and rounding; or two roundings to TF32. Of 16 bit
/// rounding the result.
double limit_of(DType dtype, Precision precision) {
  constexpr double kSums = 8 * 0x1p-24;
  if (dtype == DType::kBFloat16) return 0x1p-8 + kSums;
  if (dtype == DType::kFloat16) return 0x1p-11 + kSums;
  return precision == Precision::kIEEE ? kSums : 2 * 0x1p-11;
}

/// The convolution, and the sum of its products' sizes, which its error is measured by.
void convolve(const Problem& p, const View& xv, const std::vector<double>& x, const View& wv,
              const std::vector<double>& w, const View& yv, std::vector<double>& y,
              std::vector<double>& size) {
  const Extent3 out = p.out();
  for (std::int64_t n = 0; n < p.n; ++n) {
    for_each(p.in, [&](const Extent3& i) {
      for_each(p.kernel, [&](const Extent3& t) {
        Extent3 o;
        bool inside = true;
        for (std::size_t axis = 0; axis < 3; ++axis) {
          o[axis] = i[axis] * p.stride[axis] + t[axis] * p.dilation[axis] - p.padding[axis];
          inside = inside && o[axis] >= 0 && o[axis] < out[axis];
        }
        if (!inside) return;
        for (std::int64_t k = 0; k < p.k; ++k) {
          const auto to = static_cast<std::size_t>(yv.at(n, k, o));
          for (std::int64_t c = 0; c < p.c; ++c) {
            const double product =
                x[static_cast<std::size_t>(xv.at(n, c, i))] * w[static_cast<std::size_t>(wv.at(c, k, t))];
            y[to] += product, size[to] += std::abs(product);
          }
        }
      });
    });
  }
}

struct Case {
  std::int64_t n, c, k;
  Extent3 in, kernel, stride, padding, output_padding, dilation;
};

constexpr Extent3 kOnes = {1, 1, 1}, kTwos = {2, 2, 2}, kZeros = {0, 0, 0};

/// \param offset of x and w from 16 bytes, in values
void run(const Case& c, DType dtype, Precision precision, bool x_last, bool w_last, bool y_last, int offset) {
  Problem p;
  p.n = c.n, p.c = c.c, p.k = c.k, p.in = c.in, p.kernel = c.kernel, p.stride = c.stride;
  p.padding = c.padding, p.output_padding = c.output_padding, p.dilation = c.dilation;
  p.dtype = dtype, p.precision = precision;
  p.x_layout = x_last ? Layout::kNDHWC : Layout::kNCDHW;
  p.y_layout = y_last ? Layout::kNDHWC : Layout::kNCDHW;
  p.w_channels_last = w_last && offset == 0;
  const std::string what = concat(describe(p), w_last ? " w last" : "", " offset ", offset);
  const View xv(p.n, p.c, p.in, x_last), wv(p.c, p.k, p.kernel, w_last), yv(p.n, p.k, p.out(), y_last);
  const std::vector<double> x = random_values(xv.count(), 1, dtype), w = random_values(wv.count(), 2, dtype),
                            bias = random_values(p.k, 3, dtype);
  std::vector<double> expected(static_cast<std::size_t>(yv.count())), size(expected.size());
  convolve(p, xv, x, wv, w, yv, expected, size);

  const std::int64_t size_of_value = size_of(dtype);
  Buffer x_buffer((xv.count() + offset) * size_of_value), w_buffer((wv.count() + offset) * size_of_value);
  Buffer bias_buffer(p.k * size_of_value), y_buffer(yv.count() * size_of_value);
  Buffer columns(ColumnsLayout(p).values() * static_cast<std::int64_t>(sizeof(float)));
  upload(x_buffer.data() + offset * size_of_value, x, dtype);
  upload(w_buffer.data() + offset * size_of_value, w, dtype);
  upload(bias_buffer.data(), bias, dtype);
  ConvTransposeColumnsParams product;
  product.problem = p;
  product.x = x_buffer.data() + offset * size_of_value;
  product.w = w_buffer.data() + offset * size_of_value;
  for (int axis = 0; axis < 5; ++axis) product.w_strides[axis] = wv.stride[axis];
  product.columns = columns.data();
  Col2imParams gather;
  gather.problem = p;
  gather.columns = columns.data();
  gather.bias = bias_buffer.data();
  gather.y = y_buffer.data();
  // What memory held before must not show: NaN, then what the first run left.
  check(cudaMemset(columns.data(), 0xff, static_cast<std::size_t>(columns.bytes())), "poisoning");
  check(cudaMemset(y_buffer.data(), 0xff, static_cast<std::size_t>(y_buffer.bytes())), "poisoning");
  launch_columns(product, nullptr);
  launch_col2im(gather, nullptr);
  const std::vector<double> y = download(y_buffer.data(), yv.count(), dtype);
  launch_columns(product, nullptr);
  launch_col2im(gather, nullptr);
  expect(y == download(y_buffer.data(), yv.count(), dtype), what + ": the same bits again");

  double worst = 0;
  const Extent3 out = p.out();
  for (std::int64_t n = 0; n < p.n; ++n) {
    for (std::int64_t k = 0; k < p.k; ++k) {
      for_each(out, [&](const Extent3& o) {
        const auto at = static_cast<std::size_t>(yv.at(n, k, o));
        const double b = bias[static_cast<std::size_t>(k)];
        const double error = std::abs(y[at] - expected[at] - b) / (size[at] + std::abs(b) + 1e-30);
        worst = error <= worst ? worst : error;  // NaN is worse
      });
    }
  }
  expect(worst <= limit_of(dtype, precision), concat(what, ": error ", worst, " of the products' sizes"));
  expect(x_buffer.pads_intact() && w_buffer.pads_intact() && y_buffer.pads_intact() && columns.pads_intact(),
         what + ": wrote outside a buffer");
}

void run_cases() {
  const Case cases[] = {
      {2, 40, 8, {3, 4, 5}, {3, 3, 3}, kOnes, kOnes, kZeros, kOnes},
      {3, 24, 12, {4, 5, 6}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes},
      {1, 16, 70, {4, 4, 8}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {2, 5, 7, {3, 4, 7}, {1, 3, 4}, {1, 2, 3}, {0, 1, 2}, {0, 1, 0}, kOnes},
      {1, 9, 1, {5, 9, 11}, {3, 3, 3}, kOnes, kOnes, kZeros, kOnes},
      {1, 8, 3, {5, 6, 9}, {3, 3, 3}, kOnes, {2, 1, 0}, kZeros, {2, 1, 3}},
      {1, 8, 4, {3, 4, 5}, {3, 3, 3}, {4, 4, 4}, {3, 3, 3}, kZeros, {6, 6, 6}},
      {2, 4, 4, {2, 3, 3}, kOnes, {3, 3, 3}, kZeros, kTwos, kOnes},
      {1, 4, 4, {6, 7, 5}, {3, 3, 3}, kTwos, {3, 2, 4}, kOnes, kOnes},
      // A dilation that reaches over the whole volume, and one voxel.
      {1, 4, 4, {3, 2, 3}, {2, 2, 2}, kOnes, kZeros, kZeros, {7, 9, 100}},
      {4, 33, 20, kOnes, {3, 3, 3}, kTwos, kOnes, kZeros, kOnes},
      // Sums of nine k-blocks, more than any ring of stages has, in tiles of 32, 64 and 128 rows.
      {1, 130, 1, {9, 10, 11}, {3, 3, 3}, kOnes, kOnes, kZeros, kOnes},
      {1, 130, 24, {5, 6, 7}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {2, 130, 64, kOnes, {3, 3, 3}, kTwos, kOnes, kZeros, kOnes},
      // The same of 16 bit, whose k-blocks are twice as long; an odd number of inputs.
      {1, 261, 3, {5, 7, 9}, {3, 3, 3}, kOnes, kOnes, kZeros, kOnes},
      {1, 264, 24, {4, 6, 7}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {2, 258, 64, kOnes, {3, 3, 3}, kTwos, kOnes, kZeros, kOnes},
      // Enough outputs for lanes of eight channels: 40, 20, 12 and 6 of them.
      {1, 4, 40, {16, 16, 32}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {1, 4, 20, {16, 32, 32}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {1, 4, 12, {24, 32, 32}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {1, 4, 6, {32, 32, 32}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {1, 4, 8, {24, 26, 28}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes},
      // And for lanes of four, of one tap and of up to eight.
      {1, 4, 3, {36, 35, 37}, kTwos, kTwos, kZeros, kZeros, kOnes},
      {1, 4, 4, {32, 33, 34}, {3, 3, 3}, kTwos, kOnes, kOnes, kOnes},
      // One output of one tap, of up to two, four and eight.
      {2, 8, 1, {5, 6, 7}, {2, 3, 2}, {2, 3, 2}, kZeros, kZeros, kOnes},
      {2, 8, 1, {5, 6, 7}, {1, 1, 3}, {1, 1, 2}, {0, 0, 1}, {0, 0, 1}, kOnes},
      {2, 8, 1, {5, 6, 7}, {1, 3, 3}, {1, 2, 2}, {0, 1, 1}, {0, 1, 1}, kOnes},
      {2, 8, 1, {5, 6, 7}, {4, 4, 4}, kTwos, kOnes, kZeros, kOnes},
  };
  struct Kind {
    DType dtype;
    Precision precision;
  };
  const Kind kinds[] = {{DType::kFloat32, Precision::kIEEE},
                        {DType::kFloat32, Precision::kTF32},
                        {DType::kBFloat16, Precision::kIEEE},
                        {DType::kFloat16, Precision::kIEEE}};
  for (const Case& c : cases) {
    for (const auto& [dtype, precision] : kinds) {
      for (int order = 0; order < 8; ++order) {
        run(c, dtype, precision, (order & 1) != 0, (order & 2) != 0, (order & 4) != 0, 0);
      }
      for (const int offset : {1, 2}) {
        run(c, dtype, precision, false, false, false, offset);
        run(c, dtype, precision, true, true, true, offset);
      }
    }
  }
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(80)) return upconv3d::tests::kSkipped;
  try {
    run_cases();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("col2im: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
