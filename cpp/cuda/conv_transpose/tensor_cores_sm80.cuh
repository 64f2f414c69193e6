// SPDX-License-Identifier: Apache-2.0
/// \file
/// mma.sync, and floats as what it multiplies: one word of TF32, or two for three products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace upconv3d::cuda {

/// A float as TF32, rounded to nearest.
__device__ __forceinline__ std::uint32_t to_tf32(float v) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
}

/// Four matrices of 8 x 8 16-bit values from shared memory: lane l names row l%8 of matrix l/8, 16 bytes, and
/// gets of each row l/4, columns 2*(l%4) and the next; or, kTransposed, column l/4 and those rows.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], const void* row) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
  }
}

/// d = c + a*b: 16 rows by 8 columns, 32 bytes of gemm_k. Lane l has rows l/4 and 8 more of a and d, gemm_k
/// l%4 and 4 more of floats of a and b, column l/4 of b and 2*(l%4) and the next of d.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1, const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
}

/// A thread's words of an operand.
template <int kWords, int kProducts>
struct OperandWords {
  std::uint32_t hi[kWords];

  __device__ __forceinline__ void set(const std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) hi[i] = words[i];
  }
};

/// Of three products, floats as TF32 and what that leaves over, of which the tensor cores read as many bits:
/// of four floats three are whole so, the others off by one unit of their last bit.
template <int kWords>
struct OperandWords<kWords, 3> {
  std::uint32_t hi[kWords], lo[kWords];

  __device__ __forceinline__ void set(const std::uint32_t (&words)[kWords]) {
    constexpr std::uint32_t kHalfUnit = 0x1000u, kFraction = 0x1fffu;  // of TF32's last bit
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float v = __uint_as_float(words[i]);
      // Infinity less infinity is NaN: infinity, and what TF32 would round to it, is all in lo, the latter to
      // TF32's digits. So infinity times infinity is NaN.
      constexpr float kRoundedToInfinity = 0x1.ffep127f;
      hi[i] = fabsf(v) < kRoundedToInfinity ? (words[i] + kHalfUnit) & ~kFraction : 0u;
      lo[i] = __float_as_uint(v - __uint_as_float(hi[i]));
    }
  }
};

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const OperandWords<4, 1>& a,
                                             const OperandWords<2, 1>& b, const float (&c)[4]) {
  multiply_add<T>(d, a.hi, b.hi[0], b.hi[1], c);
}

/// The small products first, and each sum of 8 inputs by itself: the tensor cores cut off what does not fit
/// beside what they add to, of a long sum every time (perf/NOTES.md, "Few channels at float32's accuracy").
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const OperandWords<4, 3>& a,
                                             const OperandWords<2, 3>& b, const float (&c)[4]) {
  constexpr float kZeros[4] = {};
  float sum[4];
  multiply_add<T>(sum, a.lo, b.hi[0], b.hi[1], kZeros);
  multiply_add<T>(sum, a.hi, b.lo[0], b.lo[1], sum);
  multiply_add<T>(sum, a.hi, b.hi[0], b.hi[1], sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = c[i] + sum[i];
}

}  // namespace upconv3d::cuda
