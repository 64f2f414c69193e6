// SPDX-License-Identifier: Apache-2.0
/// \file
/// launch_pack: which stages run, and in which order; and the memory of the scales.

#include "cuda/layout/pack.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "cuda/check.hpp"
#include "cuda/layout/pack_stages.hpp"

namespace upconv3d::cuda {
namespace {

/// Each array begins where 16-byte accesses may, and shares no L2 line with its neighbour.
constexpr std::int64_t kAlignment = 256;

std::int64_t padded_bytes(std::int64_t count) {
  return ceil_div(count * static_cast<std::int64_t>(sizeof(std::int32_t)), kAlignment) * kAlignment;
}

bool is_scaled(const Problem& problem) {
  return problem.dtype == DType::kFloat32;
}

void require_packable(const PackParams& params, bool with_x) {
  const DType dtype = params.problem.dtype;
  if (dtype == DType::kFloat32) {
    const bool known = params.operand == DType::kFloat16 && (params.products == 1 || params.products == 3);
    if (known && with_x == (params.x_hi != nullptr)) return;
    throw std::invalid_argument(
        std::string("upconv3d: float32 is packed to float16 operands with 1 or 3 products; got ") +
        name(params.operand) + " with " + std::to_string(params.products) + " products and " +
        (params.x_hi == nullptr ? "no" : "a") + " destination for x. Choose another plan.");
  }
  const bool is_16_bit = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (is_16_bit && params.operand == dtype && params.products == 1) return;
  throw std::invalid_argument(std::string("upconv3d: 16-bit input is packed as it is, with 1 product; got ") +
                              name(dtype) + " to " + name(params.operand) + " with " +
                              std::to_string(params.products) + " products. Choose another plan.");
}

/// x_absmax, channel_reach, sample_done and verdict: see carve_operand_scales.
std::int64_t accumulator_bytes(const Problem& problem) {
  return padded_bytes(problem.n * problem.c) + padded_bytes(problem.c) + padded_bytes(problem.n) +
         padded_bytes(2);
}

}  // namespace

std::int64_t operand_scales_bytes(const Problem& problem) {
  if (!is_scaled(problem)) return 0;
  return accumulator_bytes(problem) + 2 * padded_bytes(problem.n) + padded_bytes(problem.c) +
         padded_bytes(problem.k);
}

OperandScales carve_operand_scales(const Problem& problem, void* memory) {
  OperandScales scales;
  if (!is_scaled(problem)) return scales;
  auto* next = static_cast<std::byte*>(memory);
  const auto take = [&next](std::int64_t count) {
    std::byte* const begin = next;
    next += padded_bytes(count);
    return static_cast<void*>(begin);
  };
  scales.x_absmax = static_cast<std::uint32_t*>(take(problem.n * problem.c));
  scales.channel_reach = static_cast<std::uint32_t*>(take(problem.c));
  scales.sample_done = static_cast<std::uint32_t*>(take(problem.n));
  scales.verdict = static_cast<std::uint32_t*>(take(2));
  scales.sample = static_cast<std::int32_t*>(take(problem.n));
  scales.channel = static_cast<std::int32_t*>(take(problem.c));
  scales.unscale_sample = static_cast<std::int32_t*>(take(problem.n));
  scales.unscale_column = static_cast<std::int32_t*>(take(problem.k));
  return scales;
}

void launch_pack(const PackParams& params, cudaStream_t stream) {
  require_packable(params, true);
  if (params.problem.n == 0) return;
  if (is_scaled(params.problem) && params.at_once) {
    launch_pack_scaled_operands(params, accumulator_bytes(params.problem), stream);
  } else if (is_scaled(params.problem)) {
    PackParams assumed = params;
    assumed.assumed_channel = assumed_exponent(params.products);
    launch_pack_weight(assumed, accumulator_bytes(params.problem), stream);
    launch_pack_input(params, stream);
    launch_repack(params, stream);
  } else {
    launch_pack_operands(params, stream);
  }
}

void launch_pack_w(const PackParams& params, cudaStream_t stream) {
  require_packable(params, false);
  if (params.problem.n == 0) return;
  PackParams alone = params;
  alone.x_hi = nullptr;
  if (is_scaled(params.problem)) {
    launch_pack_weight(alone, 0, stream);
  } else {
    launch_pack_operands(alone, stream);
  }
}

void launch_pack_x(const PackParams& params, cudaStream_t stream) {
  require_packable(params, true);
  if (params.problem.n == 0) return;
  PackParams x_alone = params;
  x_alone.w = nullptr;
  x_alone.zero_bytes = 0;
  if (is_scaled(params.problem) && params.at_once) {
    launch_pack_scaled_operands(x_alone, accumulator_bytes(params.problem), stream);
  } else if (is_scaled(params.problem)) {
    check(cudaMemsetAsync(params.scales.x_absmax, 0,
                          static_cast<std::size_t>(accumulator_bytes(params.problem)), stream),
          "clearing the maxima of pack_input");
    launch_pack_input(x_alone, stream);
    launch_repack(x_alone, stream);
  } else {
    launch_pack_operands(x_alone, stream);
  }
}

}  // namespace upconv3d::cuda
