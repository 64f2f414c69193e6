// SPDX-License-Identifier: Apache-2.0
/// \file
/// Operands of the tensor-core convolution, 16 bit: x as [N,groups,D,H,W,channels] and w as
/// [T*R*S,K,channels], where channels are those of one convolution group, then zeros up to
/// operand_channels (core/channels.hpp). Forward stage 1 of 4.
///
/// 16-bit dtypes keep their bits. float32 becomes float16 (10-bit mantissa, as TF32 has) after scaling by
/// powers of two; with three products, v = hi + lo in two float16 (Ootomo & Yokota, arXiv:2203.03341). The
/// scales are exact and are undone in the convolution's epilogue:
///
///   x' = x * 2^(sample[n] + channel[c])       |x'| < 2^kInputExponent
///   w' = w * 2^(column[k] - channel[c])       |w'| < 2^kOperandExponent
///   conv(x, w)[n,k] = conv(x', w')[n,k] * 2^(unscale_sample[n] + unscale_column[k])
///
/// **Assumed, then verified.** Choosing exponents by x takes a pass over x before the pass that packs it. So
/// launch_pack takes sample[n] = 0 and channel[c] = assumed_exponent(products) for granted and measures each
/// (sample, channel)'s largest |x| as it packs. Where all of those lie in
/// [2^smallest_reach(products), 2^kInputExponent) after scaling, zero maxima apart, the packed x stands;
/// otherwise x and w are packed again with exponents chosen by the maxima. column[k] is always chosen: it
/// brings the column's largest |w'| into [2^13, 2^14).
///
/// What float16's range costs where the assumption holds. A value under 2^-14 is held to 2^-24 absolute, and
/// with three products one under 2^-3 to 2^-25 (its lo is subnormal).
///   x, 1 product:  2^-24 against a largest |x'| of 2^-10 or more in the same sample and channel:
///                  2^-14 of it, an eighth of what TF32's rounding (2^-11) does to the largest itself.
///   x, 3 products: 2^-25 against 2^2 or more: 2^-27 of the largest, an eighth of float32's rounding (2^-24).
///   w, 1 product:  2^-24 times |x'| < 2^15 makes 2^-9; the column's largest weight meets an |x'| of
///                  2^-10 or more, a term of 2^13 * 2^-10 = 2^3. So 2^-12 of the largest term, half of
///                  TF32's rounding.
///   w, 3 products: 2^-25 * 2^15 = 2^-10 against 2^13 * 2^2 = 2^15: 2^-25 of the largest term, half of
///                  float32's rounding.
/// The last two need the column's largest weights to meet a channel that is not zero throughout the sample.
/// Only a column whose other weights are smaller than those by 2^27 (2^16 with three products) can fall
/// behind TF32 (float32) there.
///
/// Where the exponents are chosen, each channel's largest |x'| over all samples and each column's largest
/// |w'| lie in [2^13, 2^14), so the largest term of the column is 2^26 or more in the sample where its
/// channel is largest: an error of 2^-24 * 2^14 = 2^-10 is 2^-36 of that term. Only a sample whose channels
/// stand in proportions 2^25 away from another sample's can fall behind TF32. The channel part cancels in the
/// product, so it is free to even out channels of very different size. channel[c] is *not* clamped: any clamp
/// would leave a small channel's x' in the subnormals while large weights of that channel fill the column's
/// range.
///
/// NaN and Inf take no part in choosing scales and keep their value. A nonzero value never becomes zero,
/// which would turn Inf * v into NaN. With three products a non-finite v is hi = 0, lo = v, so that exactly
/// one of the three products carries it (Inf times Inf is then NaN; every other product is as in float32).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace upconv3d::cuda {

/// Chosen scales bring operands below 2^14: a factor 4 under float16's largest finite value, and their lower
/// half lo = v - hi is a normal number for every v down to 2^-16 of the largest. w' always lies below it.
inline constexpr int kOperandExponent = 14;

/// x' lies below 2^15 in either case: its largest still rounds to a finite float16.
inline constexpr int kInputExponent = 15;

/// What channel[c] is assumed to be; sample[n] is assumed to be 0. Accepts |x| in [2^-14, 2^11) as the
/// largest of a sample and channel, with three products [2^-6, 2^7): activations stand in the middle of
/// either.
constexpr int assumed_exponent(int products) {
  return products == 3 ? 8 : 4;
}

/// The assumption fails where a largest nonzero |x'| lies below 2^this. See the errors above.
constexpr int smallest_reach(int products) {
  return products == 3 ? 2 : -10;
}

/// The scales and the maxima they come from, on the device. Null pointers where dtype is 16 bit (no scaling).
///
/// unscale_sample[n] + unscale_column[k] lies in [-600, 228]: more than one float factor holds. Apply it in
/// steps or with ldexpf.
///
/// The first five are accumulators, and lie one after the other: a launch clears them before it raises them.
struct OperandScales {
  std::uint32_t* x_absmax = nullptr;       // [N,C] uint32: bits of the largest finite |x|, 0: there is none
  std::uint32_t* channel_reach = nullptr;  // [C] uint32: biased reach of the largest x * 2^(own sample's
                                           // chosen exponent), 0: none
  std::uint32_t* suspect = nullptr;        // [1] uint32: 0 where all of x is seen to fit the assumption
  std::uint32_t* tickets = nullptr;        // [1] uint32: tiles of x that were dealt out
  std::uint32_t* column_absmax = nullptr;  // [K] uint32: bits of the largest finite |w|, 0: there is none
  std::int32_t* sample = nullptr;          // [N] int32 in [-114, 162]
  std::int32_t* channel = nullptr;         // [C] int32 in [0, 276]
  std::int32_t* unscale_sample = nullptr;  // [N] int32: -sample[n]
  std::int32_t* unscale_column = nullptr;  // [K] int32: -column[k], in [-438, 114]
};

struct PackParams {
  Problem problem;                  // x_layout and dtype say how x lies
  DType operand = DType::kFloat16;  // dtype itself where that is 16 bit, kFloat16 for float32
  int products = 1;                 // 1, or 3 (float32 only): write lo too
  const void* x = nullptr;          // [N,C,D,H,W] or [N,D,H,W,C] dtype, dense, any alignment
  const void* w = nullptr;          // [C,K/groups,T,R,S] dtype, any strides; 16 bit: null where w is used as
                                    // it lies
  std::int64_t w_strides[5] = {};   // of w, in elements
  void* x_hi = nullptr;             // [N,groups,D,H,W,operand_channels] operand, 16-byte aligned; null where
                                    // x is used as it lies
  void* x_lo = nullptr;             // as x_hi, products == 3 only
  void* w_hi = nullptr;             // [T*R*S,K,operand_channels] operand, 16-byte aligned
  void* w_lo = nullptr;             // as w_hi, products == 3 only
  OperandScales scales;             // float32 only
  void* zero = nullptr;             // [zero_bytes] bytes, 16-byte aligned: cleared by the first launch, for
  std::int64_t zero_bytes = 0;      // counters of later kernels; 0: nothing to clear
  // float32: what launch_pack_w takes for granted of every channel[c]. launch_pack takes assumed_exponent
  // instead, whatever stands here.
  int assumed_channel = 0;
  bool shared_samples = false;  // sample[n] = 0: x' is scaled by channel alone, for sums over samples
};

/// Bytes of all arrays of OperandScales for this problem, 256-byte aligned each; 0 for 16-bit dtypes.
std::int64_t operand_scales_bytes(const Problem& problem);

/// Carves OperandScales out of `memory` (operand_scales_bytes long, 256-byte aligned); all null for 16-bit
/// dtypes.
OperandScales carve_operand_scales(const Problem& problem, void* memory);

/// One launch, which clears params.zero too. Deterministic to the bit: maxima do not depend on their order.
/// N = 0 launches nothing, and clears nothing.
///
///   float32: pack_scaled_operands, of blocks that wait for each other
///   16 bit:  pack_operands (w unless it is null, and x unless x_hi is null)
///
/// \throws std::invalid_argument for a combination of dtype, operand and products that no kernel takes.
/// \throws std::runtime_error where CUDA refuses a launch.
void launch_pack(const PackParams& params, cudaStream_t stream);

/// The same of w alone, by pack_weight where it is float32, for an x that someone else has packed with
/// channel[c] = assumed_channel. Of the scales, float32 takes just unscale_column, which is written.
void launch_pack_w(const PackParams& params, cudaStream_t stream);

/// x alone: takes no w, writes no w_hi, w_lo and unscale_column, and clears nothing of the caller's.
void launch_pack_x(const PackParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
