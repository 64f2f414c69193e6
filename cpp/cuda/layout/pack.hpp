// SPDX-License-Identifier: Apache-2.0
/// \file
/// Operands of the tensor-core convolution: x as [N,D,H,W,C] and w as [T*R*S,K,C], 16 bit. Forward stage 1
/// of 4.
///
/// 16-bit dtypes keep their bits. float32 becomes float16 (10-bit mantissa, as TF32 has) after scaling by
/// powers of two that a device-side pass over the data chooses; with three products, v = hi + lo in two
/// float16 (Ootomo & Yokota, arXiv:2203.03341). The scales are exact and are undone in the convolution's
/// epilogue:
///
///   x' = x * 2^(sample[n] + channel[c])       |x'| < 2^kOperandExponent
///   w' = w * 2^(column[k] - channel[c])       |w'| < 2^kOperandExponent
///   conv(x, w)[n,k] = conv(x', w')[n,k] * 2^(unscale_sample[n] + unscale_column[k])
///
/// The channel part cancels in the product, so it is free to even out channels of very different size; the
/// sample part does the same for samples, the column part for output channels.
///
/// What float16's range costs, against TF32: |x'| or |w'| under 2^-14 is held to 2^-24 absolute, so its
/// product is off by at most 2^-24 * 2^14 = 2^-10. Each channel's largest |x'| over all samples and each
/// column's largest |w'| lie in [2^13, 2^14), so the largest term of the column is 2^26 or more in the sample
/// where its channel is largest: an error of 2^-36 of that term, against TF32's 2^-11. Only a sample whose
/// channels stand in proportions 2^25 away from another sample's can fall behind TF32. channel[c] is *not*
/// clamped: any clamp would leave a small channel's x' in the subnormals while large weights of that channel
/// fill the column's range.
///
/// NaN and Inf take no part in choosing scales and keep their value. A nonzero value never becomes zero,
/// which would turn Inf * v into NaN. With three products a non-finite v is hi = 0, lo = v, so that exactly
/// one of the three products carries it (Inf times Inf is then NaN; every other product is as in float32).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

/// Scaled operands lie below 2^14: a factor 4 under float16's largest finite value, and their lower half
/// lo = v - hi is a normal number for every v down to 2^-16 of the largest.
inline constexpr int kOperandExponent = 14;

/// The scales and the maxima they come from, on the device. Null pointers where dtype is 16 bit (no scaling).
///
/// unscale_sample[n] + unscale_column[k] lies in [-600, 228]: more than one float factor holds. Apply it in
/// steps or with ldexpf.
struct OperandScales {
  std::uint32_t* x_absmax = nullptr;  // [N,C] uint32: bits of the largest finite |x|, 0 where there is none
  std::uint32_t* w_reach = nullptr;   // [K] uint32: biased reach of the largest w * 2^-channel[c], 0: none
  std::int32_t* sample = nullptr;     // [N] int32 in [-114, 162]
  std::int32_t* channel = nullptr;    // [C] int32 in [0, 276]
  std::int32_t* unscale_sample = nullptr;  // [N] int32: -sample[n]
  std::int32_t* unscale_column = nullptr;  // [K] int32: -column[k], in [-438, 114]
};

struct PackParams {
  Problem problem;                  // x_layout and dtype say how x lies
  DType operand = DType::kFloat16;  // dtype itself where that is 16 bit, kFloat16 for float32
  int products = 1;                 // 1, or 3 (float32 only): write lo too
  const void* x = nullptr;          // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, any alignment
  const void* w = nullptr;          // [C,K,T,R,S] dtype, any strides
  std::int64_t w_strides[5] = {};   // of w, in elements
  void* x_hi = nullptr;             // [N,D,H,W,C] operand, 16-byte aligned; null where x is used as it lies
  void* x_lo = nullptr;             // [N,D,H,W,C] operand, 16-byte aligned; products == 3 only
  void* w_hi = nullptr;             // [T*R*S,K,C] operand, 16-byte aligned
  void* w_lo = nullptr;             // [T*R*S,K,C] operand, 16-byte aligned; products == 3 only
  OperandScales scales;             // float32 only
};

/// Bytes of all arrays of OperandScales for this problem, 256-byte aligned each; 0 for 16-bit dtypes.
std::int64_t operand_scales_bytes(const Problem& problem);

/// Carves OperandScales out of `memory` (operand_scales_bytes long, 256-byte aligned); all null for 16-bit
/// dtypes.
OperandScales carve_operand_scales(const Problem& problem, void* memory);

/// Launches whatever of absmax, exponents, pack_weight and pack_input the problem needs, in order.
/// Deterministic to the bit: maxima do not depend on their order. N = 0 launches nothing.
///
///   float32: memset, absmax_input, choose_input_exponents, weight_reach, pack_weight, pack_input
///   16 bit:  pack_weight, and pack_input unless x_hi is null
///
/// \throws std::invalid_argument for a combination of dtype, operand and products that no kernel takes.
/// \throws std::runtime_error where CUDA refuses a launch.
void launch_pack(const PackParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
