// SPDX-License-Identifier: Apache-2.0
/// \file
/// Device memory of a case of test_group_norm_backward.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "cuda/group_norm/group_norm_backward.hpp"
#include "device_buffer.hpp"
#include "group_norm_backward_reference.hpp"

namespace upconv3d::test {

using cuda::GradOperand;
using cuda::group_norm_backward_scratch_bytes;
using cuda::GroupNormBackwardParams;
using cuda::may_overwrite_activation;

inline int multiprocessors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "counting multiprocessors");
  return count;
}

template <class Value>
void copy_in(const Buffer& to, const std::vector<Value>& from) {
  check(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(Value), cudaMemcpyHostToDevice), "uploading");
}

inline std::int64_t padded(std::int64_t k) {
  return (k + 7) / 8 * 8;
}

/// Rows of `pitch` elements from rows of k; behind those, `rest`.
template <class Value>
std::vector<Value> in_rows(const std::vector<Value>& dense, std::int64_t k, std::int64_t pitch, Value rest) {
  std::vector<Value> rows(dense.size() / k * pitch, rest);
  for (std::size_t i = 0; i < dense.size(); ++i) rows[i / k * pitch + i % k] = dense[i];
  return rows;
}

/// Device memory of a case, and the call that it makes.
struct Arena {
  std::int64_t a_pitch, grad_c_pitch;
  DType grad_c_dtype;
  Buffer grad_y, a, steps, moment_of, table, gamma, beta, slopes, grad_c, unscale, grad_gamma, grad_beta,
      grad_bias, grad_slopes, scratch;
  GroupNormBackwardParams params;
  bool in_place = false;

  /// Where grad_c is written.
  char* grad_c_memory() const { return in_place ? a.data() : grad_c.data(); }

  static GroupNormBackwardParams shape(const BackwardCase& c) {
    GroupNormBackwardParams params;
    params.n = c.n, params.k = c.k, params.positions = c.positions, params.num_groups = c.num_groups;
    params.dtype = c.dtype, params.grad_y_layout = c.layout;
    params.a_pitch = padded(c.k) + c.more_pitch;
    params.grad_c_pitch = c.in_place ? params.a_pitch : padded(c.k) + 2 * c.more_pitch;
    params.moments = c.steps ? BackwardReference::kMoments : 0;
    params.operand = c.split    ? GradOperand::kSplitFloat16
                     : c.scaled ? GradOperand::kScaledFloat16
                                : GradOperand::kOwn;
    params.sm_count = multiprocessors();
    params.before = c.before, params.after.kind = c.after;
    params.after.parameter = c.parameter, params.after.slope_step = c.slopes > 1 ? 1 : 0;
    params.signed_steps = c.signed_steps;
    return params;
  }

  static std::int64_t scratch_bytes(const BackwardCase& c) {
    GroupNormBackwardParams params = shape(c);
    int wanted;
    if (c.slopes > 0) params.grad_slopes = &wanted;
    return group_norm_backward_scratch_bytes(params);
  }

  explicit Arena(const BackwardCase& c)
      : a_pitch(shape(c).a_pitch),
        grad_c_pitch(shape(c).grad_c_pitch),
        grad_c_dtype(c.scaled && !c.split ? DType::kFloat16 : c.dtype),
        grad_y((c.n * c.k * c.positions + c.misalign) * size_of(c.dtype)),
        a(c.n * c.positions * a_pitch * (c.steps ? 2 : size_of(c.dtype))),
        steps(c.n * BackwardReference::kMoments * a_pitch),
        moment_of(c.positions * 4),
        table(c.n * c.num_groups * 16),
        gamma(c.k * size_of(c.dtype)),
        beta(c.k * size_of(c.dtype)),
        slopes(c.slopes * size_of(c.dtype)),
        grad_c(c.n * c.positions * grad_c_pitch * size_of(grad_c_dtype)),
        unscale(4),
        grad_gamma(c.k * size_of(c.dtype)),
        grad_beta(c.k * size_of(c.dtype)),
        grad_bias(c.k * size_of(c.dtype)),
        grad_slopes(c.slopes * size_of(c.dtype)),
        scratch(scratch_bytes(c)),
        params(shape(c)) {
    params.grad_y = grad_y.data() + c.misalign * size_of(c.dtype);
    params.a = a.data();
    if (c.steps) {
      params.steps = reinterpret_cast<const std::int8_t*>(steps.data());
      params.moment_of = reinterpret_cast<const std::int32_t*>(moment_of.data());
    }
    params.table = reinterpret_cast<const float*>(table.data());
    if (c.gamma != Gamma::kNull) params.gamma = gamma.data();
    in_place = c.in_place && may_overwrite_activation(params);
    if (!c.sums_only) params.grad_c = grad_c_memory();
    if (c.scaled) params.unscale = reinterpret_cast<std::int32_t*>(unscale.data());
    params.grad_gamma = grad_gamma.data();
    params.grad_beta = grad_beta.data();
    params.grad_bias = grad_bias.data();
    if (c.beta && c.after != Activation::kNone) params.beta = beta.data();
    if (c.slopes > 0) params.after.slopes = slopes.data(), params.grad_slopes = grad_slopes.data();
    params.scratch = scratch.data();
  }

  void fill(const BackwardCase& c, const BackwardReference& ref) const {
    std::vector<double> grad(ref.grad_y);
    if (c.layout == Layout::kNCDHW) {
      for (std::size_t i = 0; i < grad.size(); ++i) {
        const std::int64_t row = i / c.k, k = i % c.k;
        grad[(row / c.positions * c.k + k) * c.positions + row % c.positions] = ref.grad_y[i];
      }
    }
    upload(grad_y.data() + c.misalign * size_of(c.dtype), grad, c.dtype);
    if (c.steps) {
      copy_in(a, in_rows<std::uint16_t>(ref.bits, c.k, a_pitch, 0xffff));
      std::vector<std::int8_t> exponents(ref.steps.begin(), ref.steps.end());
      copy_in(steps, in_rows<std::int8_t>(exponents, c.k, a_pitch, -128));
      copy_in(moment_of, ref.moment_of);
    } else {
      upload(a.data(), in_rows<double>(ref.a, c.k, a_pitch, std::nan("")), c.dtype);
    }
    copy_in(table, ref.table);
    upload(gamma.data(), ref.gamma, c.dtype);
    upload(beta.data(), ref.beta, c.dtype);
    upload(slopes.data(), ref.slopes, c.dtype);
  }

  std::vector<char> outputs() const {
    std::vector<char> all;
    const Buffer* const own = in_place ? &a : &grad_c;
    for (const Buffer* buffer : {own, &unscale, &grad_gamma, &grad_beta, &grad_bias, &grad_slopes}) {
      const std::vector<char> bytes = download_bytes(buffer->data(), buffer->bytes());
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }

  bool pads_intact() const {
    const Buffer* const all[] = {&grad_y,  &a,          &steps,     &table,     &gamma,       &grad_c,
                                 &unscale, &grad_gamma, &grad_beta, &grad_bias, &grad_slopes, &scratch};
    return std::all_of(std::begin(all), std::end(all),
                       [](const Buffer* buffer) { return buffer->pads_intact(); });
  }
};

}  // namespace upconv3d::test
