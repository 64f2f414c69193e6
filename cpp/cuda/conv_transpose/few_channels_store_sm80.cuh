// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: stores of neighbouring values.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// kCount neighbours of y where `stores`, to memory that the second pass does not read again. By predicate:
/// ptxas would branch around each of a thread's stores.
template <class T, int kCount>
__device__ __forceinline__ void store_run(T* to, const float (&values)[kCount], bool stores = true) {
  constexpr int kBytes = kCount * int(sizeof(T));
  std::uint32_t words[kBytes / 4];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      words[i] = __float_as_uint(values[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      memcpy(&words[i], &pair, sizeof(pair));
    } else {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      memcpy(&words[i], &pair, sizeof(pair));
    }
  }
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(
              reinterpret_cast<uint4*>(to) + i),
          "r"(words[4 * i]), "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3]),
          "r"(int(stores))
          : "memory");
    }
  } else if constexpr (kBytes == 8) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.cs.v2.b32 [%0], {%1, %2};}" ::"l"(to),
                 "r"(words[0]), "r"(words[1]), "r"(int(stores))
                 : "memory");
  } else {
    static_assert(kBytes == 4);
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.cs.b32 [%0], %1;}" ::"l"(to),
                 "r"(words[0]), "r"(int(stores))
                 : "memory");
  }
}

}  // namespace upconv3d::cuda
