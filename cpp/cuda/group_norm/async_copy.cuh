// SPDX-License-Identifier: Apache-2.0
/// \file
/// cp.async, by which a thread has memory copied to shared memory while it does something else.
#pragma once

namespace upconv3d::cuda {

/// Starts the copy of kBytes bytes to shared memory, or of as many zeros.
///
/// Without a cache policy: with one, cp.async is an illegal instruction on an H200, though ptxas takes it.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}

/// Makes a group of the copies that this thread has started since the last one, also of none.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits for all of this thread's groups but the last kOpen.
template <int kOpen>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

}  // namespace upconv3d::cuda
