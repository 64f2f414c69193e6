// SPDX-License-Identifier: Apache-2.0
/// \file
/// What follows the normalization inside the SM90 kernels, where values are in registers: nothing, ReLU or a
/// slope below 0. A kernel branches once for many values, since a launch has one of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"

namespace upconv3d::cuda {

/// ReLU of two floats as Output of 16 bit, the first in the lower half: the conversion takes it along. NaN
/// stays NaN.
template <class Output>
CUTLASS_DEVICE std::uint32_t relu_pair(float first, float second) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Output, cutlass::half_t>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  } else {
    static_assert(std::is_same_v<Output, cutlass::bfloat16_t>);
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  }
  return packed;
}

/// after(values) as Output. \tparam After NoActivation, ReluActivation or SlopeActivation
/// \param slope of each value, SlopeActivation only
template <class After, class Output, int N>
CUTLASS_DEVICE cutlass::Array<Output, N> activated(cutlass::Array<float, N> values,
                                                   [[maybe_unused]] float const (&slope)[N]) {
  if constexpr (std::is_same_v<After, ReluActivation> && sizeof(Output) == 2) {
    cutlass::Array<Output, N> result;
    auto* const words = reinterpret_cast<std::uint32_t*>(&result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; i += 2) words[i / 2] = relu_pair<Output>(values[i], values[i + 1]);
    return result;
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (std::is_same_v<After, ReluActivation>) {
        values[i] = FloorActivation{0.f}(values[i]);
      } else {
        values[i] = After{}.value(values[i], slope[i]);
      }
    }
    return cutlass::NumericArrayConverter<Output, float, N>{}(values);
  }
}

}  // namespace upconv3d::cuda
