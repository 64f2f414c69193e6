// SPDX-License-Identifier: Apache-2.0
/// \file
/// Rings of shared-memory slots between warps: a full and an empty barrier per slot. The number of slots is a
/// run-time value, because how shared memory is best divided depends on the problem.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"

namespace upconv3d::cuda {

/// A place in a ring, and the parity of the barriers' phase there.
struct RingCursor {
  int slot = 0;
  std::uint32_t phase = 0;

  CUTLASS_DEVICE void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

/// Barriers of a ring of at most kMaxSlots slots.
template <int kMaxSlots>
struct RingBarriers {
  std::uint64_t full[kMaxSlots];
  std::uint64_t empty[kMaxSlots];

  /// One thread, before any other use. A slot is full after `producers` arrivals (and all bytes that those
  /// announced), empty again after `consumers`.
  CUTLASS_DEVICE void init(int producers, int consumers) {
    for (int slot = 0; slot < kMaxSlots; ++slot) {
      cutlass::arch::ClusterBarrier::init(&full[slot], producers);
      cutlass::arch::ClusterBarrier::init(&empty[slot], consumers);
    }
  }

  CUTLASS_DEVICE void wait_full(RingCursor const& at) const {
    cutlass::arch::ClusterBarrier::wait(&full[at.slot], at.phase);
  }
  /// Whether wait_full would return at once, as lane 0 sees it: the same answer for the whole warp.
  CUTLASS_DEVICE bool is_full(RingCursor const& at) const {
    return __shfl_sync(0xffffffffu,
                       int(cutlass::arch::ClusterBarrier::test_wait(&full[at.slot], at.phase, 1)), 0) != 0;
  }
  /// All slots start empty: the phase before the first counts as complete.
  CUTLASS_DEVICE void wait_empty(RingCursor const& at) const {
    cutlass::arch::ClusterBarrier::wait(&empty[at.slot], at.phase ^ 1);
  }
  CUTLASS_DEVICE void arrive_full(int slot) const { cutlass::arch::ClusterBarrier::arrive(&full[slot]); }
  CUTLASS_DEVICE void arrive_empty(int slot) const { cutlass::arch::ClusterBarrier::arrive(&empty[slot]); }
  /// The slot's one producer arrives and announces what TMA will bring. Returns the barrier TMA counts on.
  CUTLASS_DEVICE std::uint64_t* expect(int slot, std::uint32_t bytes) {
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&full[slot], bytes);
    return &full[slot];
  }
};

}  // namespace upconv3d::cuda
