// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile_kernels.hpp"

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define UPCONV3D_ELEMENTWISE _Pragma("GCC ivdep")
#elif defined(__clang__)
#define UPCONV3D_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define UPCONV3D_ELEMENTWISE
#endif

#if defined(__GNUC__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define UPCONV3D_VECTOR_SHUFFLES 1
#endif
#endif
#ifndef UPCONV3D_VECTOR_SHUFFLES
#define UPCONV3D_VECTOR_SHUFFLES 0
#endif

namespace upconv3d::cpu {

namespace baseline {
#define UPCONV3D_ISA
#define UPCONV3D_F16C 0
#include "cpu/tile_kernels.inc"
#undef UPCONV3D_F16C
#undef UPCONV3D_ISA
}  // namespace baseline

#if defined(__GNUC__) && defined(__x86_64__)

#define UPCONV3D_F16C 1

namespace avx2 {
#define UPCONV3D_ISA __attribute__((target("avx2,fma,f16c")))
#include "cpu/tile_kernels.inc"
#undef UPCONV3D_ISA
}  // namespace avx2

namespace avx512 {
#define UPCONV3D_ISA __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#include "cpu/tile_kernels.inc"
#undef UPCONV3D_ISA
}  // namespace avx512

#undef UPCONV3D_F16C

namespace {

template <class T>
const TileKernels<T>& choose() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return avx512::kTileKernels<T>;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return avx2::kTileKernels<T>;
  }
  return baseline::kTileKernels<T>;
}

}  // namespace

#else

namespace {

template <class T>
const TileKernels<T>& choose() {
  return baseline::kTileKernels<T>;
}

}  // namespace

#endif

template <class T>
const TileKernels<T>& tile_kernels() {
  static const TileKernels<T>& kernels = choose<T>();
  return kernels;
}

template const TileKernels<float>& tile_kernels();
template const TileKernels<double>& tile_kernels();
template const TileKernels<BFloat16>& tile_kernels();
template const TileKernels<Float16>& tile_kernels();

}  // namespace upconv3d::cpu
