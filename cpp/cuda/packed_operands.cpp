// SPDX-License-Identifier: Apache-2.0
#include "cuda/packed_operands.hpp"

#include "core/channels.hpp"
#include "cuda/stage_range.hpp"

namespace upconv3d::cuda {

PackedOperands::PackedOperands(const Problem& problem, const Plan& plan, Carver& carver) {
  const bool split = plan.instance->products == 3;
  const std::int64_t row_bytes = operand_channels(problem) * size_of(plan.instance->operand);
  const std::int64_t x_bytes = plan.pack_x ? problem.n * problem.groups * volume(problem.in) * row_bytes : 0;
  const std::int64_t w_bytes = plan.w_in_place ? 0 : problem.k * volume(problem.kernel) * row_bytes;
  x_hi = carver.take(x_bytes);
  x_lo = carver.take(split ? x_bytes : 0);
  w_hi = carver.take(w_bytes);
  w_lo = carver.take(split ? w_bytes : 0);
  scales = carver.take(operand_scales_bytes(problem));
}

OperandScales PackedOperands::pack(const Problem& problem, const Plan& plan, const ForwardTensors& tensors,
                                   ClearedMemory cleared, cudaStream_t stream) const {
  if (packs_nothing(plan)) return {};
  PackParams params;
  params.problem = problem;
  params.operand = plan.instance->operand;
  params.products = plan.instance->products;
  params.x = tensors.x;
  params.w = plan.w_in_place ? nullptr : tensors.w;
  for (int axis = 0; axis < 5; ++axis) params.w_strides[axis] = tensors.w_strides[axis];
  params.x_hi = x_hi;
  params.x_lo = x_lo;
  params.w_hi = w_hi;
  params.w_lo = w_lo;
  if (scales) params.scales = carve_operand_scales(problem, scales);
  params.zero = cleared.data;
  params.zero_bytes = cleared.bytes;
  const StageRange range("upconv3d::pack");
  launch_pack(params, stream);
  return params.scales;
}

}  // namespace upconv3d::cuda
