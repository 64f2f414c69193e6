// SPDX-License-Identifier: Apache-2.0
/// \file
/// Elements in memory and in registers: conversion to the statistics' type, 16-byte vectors, the types that
/// a DType stands for, and the one way in which this directory launches a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/index_math.hpp"
#include "core/problem.hpp"
#include "cuda/launch.cuh"

namespace upconv3d::cuda {

/// Bytes of the widest global memory access of one thread.
inline constexpr int kAccessBytes = 16;

/// Threads per block of the streaming kernels. Eight warps: a block's tail is short and, at up to 80
/// registers, three blocks or more share a multiprocessor, so that some load while others compute.
inline constexpr int kStreamThreads = 256;

/// Independent 16-byte loads that a thread has in flight. Little's law: 4.3 TB/s at 0.8 us want 26 KB in
/// flight per multiprocessor; three blocks of 256 threads with 64 bytes each have 48 KB.
inline constexpr int kLoadsInFlight = 4;

/// What statistics of T are kept in.
template <class T>
using Stat = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
__device__ __forceinline__ Stat<T> to_stat(T value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else {
    return value;
  }
}

template <class T>
__device__ __forceinline__ T from_stat(Stat<T> value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}

/// kCount consecutive elements in registers.
template <class T, int kCount>
struct Vector {
  T at[kCount];
};

/// The machine word in which kBytes consecutive bytes travel; several of them beyond 16 bytes.
template <int kBytes>
using Word = std::conditional_t<
    kBytes % 16 == 0, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;

/// Reads a vector. kOnce says that no one reads it again: evict-first leaves the L2 to what is still to come.
/// \param from [kCount] T, aligned to min(16, kCount*sizeof(T)) bytes
template <int kCount, bool kOnce, class T>
__device__ __forceinline__ Vector<T, kCount> load_vector(const T* from) {
  using W = Word<kCount * sizeof(T)>;
  constexpr int kWords = kCount * sizeof(T) / sizeof(W);
  static_assert(kWords * sizeof(W) == kCount * sizeof(T));
  W words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const W* word = reinterpret_cast<const W*>(from) + i;
    words[i] = kOnce ? __ldcs(word) : *word;
  }
  Vector<T, kCount> vector;
  memcpy(&vector, words, sizeof(vector));
  return vector;
}

template <int kCount, class T>
__device__ __forceinline__ Vector<T, kCount> load_once(const T* from) {
  return load_vector<kCount, true>(from);
}

/// Writes a vector, evict-first: y is not read again here.
/// \param to [kCount] T, aligned to min(16, kCount*sizeof(T)) bytes
template <int kCount, class T>
__device__ __forceinline__ void store_once(T* to, const Vector<T, kCount>& vector) {
  using W = Word<kCount * sizeof(T)>;
  constexpr int kWords = kCount * sizeof(T) / sizeof(W);
  static_assert(kWords * sizeof(W) == kCount * sizeof(T));
  W words[kWords];
  memcpy(words, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < kWords; ++i) __stcs(reinterpret_cast<W*>(to) + i, words[i]);
}

/// Whether 16-byte accesses may start at `pointer`.
inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kAccessBytes == 0;
}

/// Calls visit(std::type_identity<T>{}) with the element type T that `dtype` stands for.
template <class Visit>
void with_element(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(std::type_identity<float>{});
    case DType::kBFloat16:
      return visit(std::type_identity<__nv_bfloat16>{});
    case DType::kFloat16:
      return visit(std::type_identity<__half>{});
    case DType::kFloat64:
      return visit(std::type_identity<double>{});
  }
  throw std::invalid_argument(
      "upconv3d: a kernel was asked for a dtype that is none of float32, bfloat16, float16, "
      "float64; got DType=" +
      std::to_string(static_cast<int>(dtype)) + ". Convert the tensor first.");
}

/// Launches `blocks` blocks in one dimension, the only one that is not limited to 65535.
/// \param beside as for launch_kernel
/// \param shared_bytes of dynamic shared memory, reserved where that is more than kernels get unasked
/// \throws std::invalid_argument beyond 2^31 - 1 blocks, std::runtime_error where CUDA refuses.
template <class Args>
void launch(const char* name, void (*kernel)(Args), std::int64_t blocks, dim3 threads, cudaStream_t stream,
            const Args& args, bool beside = false, int shared_bytes = 0) {
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("upconv3d: a kernel runs at most 2147483647 blocks; " + std::string(name) +
                                " would need " + std::to_string(blocks) + ". Split the batch.");
  }
  launch_kernel(name, kernel,
                {dim3(static_cast<unsigned>(blocks)), threads, static_cast<std::size_t>(shared_bytes)},
                stream, args, beside);
}

}  // namespace upconv3d::cuda
