// SPDX-License-Identifier: Apache-2.0
/// \file
/// How group_norm_backward brings grad_y and a into registers: through a ring of stages in shared memory, which
/// cp.async fills several stages ahead, across the borders of units and phases.
///
/// A thread has kRows positions of a stage and kVector channels of each. Its share of a, and
/// of grad_y where that is NDHWC, only itself reads. A stage of grad_y NCDHW is a tile [channels, 32 words of
/// positions], whose 16-byte chunks are permuted: chunk' = chunk ^ (channel/kVector % 8). cp.async writes eight
/// consecutive chunks of a channel at a time; a warp reads words of eight vectors of channels at four
/// neighbouring words. Neither conflicts.
#pragma once

#include <cstdint>

#include "cuda/group_norm/backward_work.cuh"
#include "cuda/group_norm/steps.cuh"

namespace upconv3d::cuda {

/// How grad_y lies: NDHWC or NCDHW, and whether it can be loaded 16 bytes at a time.
enum class GradAccess { kRowVectors, kRowElements, kPlaneVectors, kPlaneElements };

template <class T_, class A_, class Out_, GradAccess kAccess_>
struct BackwardTraits {
  using T = T_;
  using A = A_;
  using Out = Out_;
  using Args = BackwardArgs<T, A, Out>;
  static constexpr GradAccess kAccess = kAccess_;
  static constexpr bool kPlanes = kAccess == GradAccess::kPlaneVectors || kAccess == GradAccess::kPlaneElements;
  static constexpr bool kWhole = kAccess == GradAccess::kRowVectors || kAccess == GradAccess::kPlaneVectors;
  static constexpr bool kSteps = std::is_same_v<A, std::uint16_t>;
  static constexpr bool kScaled = std::is_same_v<T, float> && std::is_same_v<Out, __half>;

  static constexpr int kVector = kBackwardVector;         // channels of a thread
  static constexpr int kRows = 8 / int(sizeof(T));        // positions of a thread and stage
  static constexpr int kVectorBytes = kVector * int(sizeof(T));  // of grad_y
  static constexpr int kFields = kScaled ? kAllFields : kSumFields;

  static constexpr int kGradBytes = kStreamThreads * kRows * kVectorBytes;
  static constexpr int kABytes = kVector * int(sizeof(A));  // of a thread's vector
  static constexpr int kStepsAt = kGradBytes + kStreamThreads * kRows * kABytes;
  static constexpr int kStageBytes = kStepsAt + (kSteps ? kStreamThreads * kRows * kVector : 0);
  /// Four stages ahead, two blocks per multiprocessor: 112 to 128 KB in flight, which cover 3 us of latency.
  static constexpr int kStages = 5;

  // A tile of grad_y NCDHW.
  static constexpr int kTileChannels = 64;
  static constexpr int kTileWords = kGradBytes / 4 / kTileChannels;  // of a channel
  static constexpr int kWordPositions = 4 / int(sizeof(T));
  static constexpr int kTilePositions = kTileWords * kWordPositions;
  static constexpr int kTileVectors = kTileChannels / kVector;
  static constexpr int kTileSlots = kStreamThreads / kTileVectors;
};

/// Where a thread stands in its block: vector of channels and slot of positions.
template <class Traits>
struct Place {
  int vector, slot;
  bool used;

  __device__ __forceinline__ explicit Place(const typename Traits::Args& args) {
    const int thread = threadIdx.x;
    if constexpr (Traits::kPlanes) {
      constexpr int kOctets = Traits::kTileVectors / 8;  // of vectors, each another warp's
      const int warp = thread / 32;
      vector = thread % 8 + warp % kOctets * 8;
      slot = thread % 32 / 8 + warp / kOctets * 4;
      used = true;
    } else {
      slot = thread / args.vectors;
      vector = thread - slot * args.vectors;
      used = slot < args.slots;
    }
  }

  /// Positions of a stage.
  static __device__ __forceinline__ int stage_positions(const typename Traits::Args& args) {
    return Traits::kPlanes ? Traits::kTilePositions : Traits::kRows * args.slots;
  }

  /// Of the i-th row, from the stage's first position on.
  __device__ __forceinline__ int position(const typename Traits::Args& args, int i) const {
    if constexpr (!Traits::kPlanes) {
      return slot + i * args.slots;
    } else {
      constexpr int kWord = Traits::kWordPositions;
      return (slot + i / kWord * Traits::kTileSlots) * kWord + i % kWord;
    }
  }
};

/// The elements of a word as floats, without 16-bit registers on the way, which cost as much as wide ones.
template <class T>
__device__ __forceinline__ void word_to_floats(unsigned word, float (&to)[4 / sizeof(T)]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
  } else if constexpr (std::is_same_v<T, __half>) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    to[0] = pair.x;
    to[1] = pair.y;
  } else {
    to[0] = __uint_as_float(word);
  }
}

/// kCount elements from shared memory as floats.
template <class T, int kCount>
__device__ __forceinline__ void read_floats(const char* from, float (&to)[kCount]) {
  constexpr int kWords = kCount * int(sizeof(T)) / 4;
  unsigned words[kWords];
  memcpy(words, __builtin_assume_aligned(from, kWords * 4), sizeof(words));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    float values[4 / sizeof(T)];
    word_to_floats<T>(words[i], values);
#pragma unroll
    for (int p = 0; p < int(4 / sizeof(T)); ++p) to[i * int(4 / sizeof(T)) + p] = values[p];
  }
}

/// Starts the copy of kBytes bytes to shared memory, or of as many zeros.
///
/// Without a cache policy: with one, cp.async is an illegal instruction on an H200, though ptxas takes it.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

/// The ring. All kStreamThreads threads call its functions together.
template <class Traits>
class StageRing {
 public:
  using T = typename Traits::T;
  using A = typename Traits::A;
  using Args = typename Traits::Args;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kRows = Traits::kRows;

  /// \param memory [kStages*kStageBytes], 16-byte aligned
  __device__ __forceinline__ StageRing(const Args& args, const Place<Traits>& place, char* memory)
      : args_(args),
        place_(place),
        memory_(memory),
        cursor_(args, Place<Traits>::stage_positions(args)) {
    find_moments();
#pragma unroll 1
    for (int i = 0; i < Traits::kStages - 1; ++i) issue(i);
  }

  /// Waits for the next stage and starts the load of one further ahead. The stage before may be overwritten.
  __device__ __forceinline__ void next() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Traits::kStages - 2) : "memory");
    if constexpr (Traits::kPlanes) stream_barrier();
    issue(front_);  // the slot of the stage before
    front_ = front_ + 1 == Traits::kStages ? 0 : front_ + 1;
  }

  /// Barrier of the threads that stream, not of the whole block.
  static __device__ __forceinline__ void stream_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(kStreamThreads) : "memory");
  }

  /// grad_y of this thread's i-th row in the current stage.
  __device__ __forceinline__ void read_grad(int i, float (&grad)[kVector]) const {
    const char* const stage = memory_ + front_ * Traits::kStageBytes;
    if constexpr (!Traits::kPlanes) {
      read_floats<T>(stage + own_chunk(i) * Traits::kVectorBytes, grad);
    } else {
      const int word = place_.slot + i / Traits::kWordPositions * Traits::kTileSlots;
      const char* const from = stage + tile_word(place_.vector * kVector, word) * 4;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        // Both positions of a word, of which one is used: they are this thread's, one after the other.
        float values[Traits::kWordPositions];
        word_to_floats<T>(*reinterpret_cast<const unsigned*>(from + j * Traits::kTileWords * 4), values);
        grad[j] = values[i % Traits::kWordPositions];
      }
    }
  }

  /// a of this thread's i-th row in the current stage.
  __device__ __forceinline__ void read_a(int i, float (&a)[kVector]) const {
    const char* const stage = memory_ + front_ * Traits::kStageBytes;
    const char* const own = stage + Traits::kGradBytes + own_chunk(i) * Traits::kABytes;
    if constexpr (Traits::kSteps) {
      StepValues steps;
      steps.set(*reinterpret_cast<const unsigned*>(stage + Traits::kStepsAt + own_chunk(i) * kVector));
      const uint2 words = *reinterpret_cast<const uint2*>(own);
#pragma unroll
      for (int j = 0; j < kVector; ++j) a[j] = stored_bits(j < 2 ? words.x : words.y, j % 2) * steps.at(j);
    } else {
      read_floats<A>(own, a);
    }
  }

 private:
  __device__ __forceinline__ static int own_chunk(int i) { return i * kStreamThreads + threadIdx.x; }

  /// Word of a tile's stage where word `word` of a channel lies.
  __device__ __forceinline__ static int tile_word(int channel, int word) {
    return channel * Traits::kTileWords + (((word / 4) ^ (channel / kVector % 8)) * 4 + word % 4);
  }

  /// Starts the next stage's load into slot `back`, if there is one.
  __device__ __forceinline__ void issue(int back) {
    if (!cursor_.done()) {
      char* const stage = memory_ + back * Traits::kStageBytes;
      if constexpr (Traits::kPlanes) {
        issue_planes(stage);
      } else {
        issue_rows(stage);
      }
      issue_a(stage);
      cursor_.advance();
      find_moments();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ __forceinline__ void issue_a(char* stage) const {
    const Unit& unit = cursor_.unit();
    const int channel = unit.channel + place_.vector * kVector;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int position = cursor_.position() + place_.position(args_, i);
      const bool valid = place_.used && position < unit.end && channel < args_.k;
      const std::int64_t row = std::int64_t{unit.sample} * args_.positions + position;
      const A* const from = args_.a + (valid ? row * args_.a_pitch + channel : 0);
      copy_async<Traits::kABytes>(stage + Traits::kGradBytes + own_chunk(i) * Traits::kABytes, from, valid);
      if constexpr (Traits::kSteps) {
        const std::int64_t moment = std::int64_t{unit.sample} * args_.moments + moment_[i];
        const std::int8_t* const steps = args_.steps + (valid ? moment * args_.a_pitch + channel : 0);
        copy_async<kVector>(stage + Traits::kStepsAt + own_chunk(i) * kVector, steps, valid);
      }
    }
  }

  /// Whose steps the positions of the stage that comes next have: on its way before it is needed.
  __device__ __forceinline__ void find_moments() {
    if constexpr (Traits::kSteps) {
      if (cursor_.done()) return;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int position = cursor_.position() + place_.position(args_, i);
        moment_[i] = __ldg(args_.moment_of + min(position, args_.positions - 1));
      }
    }
  }

  __device__ __forceinline__ void issue_rows(char* stage) const {
    const Unit& unit = cursor_.unit();
    const int channel = unit.channel + place_.vector * kVector;
#pragma unroll(Traits::kWhole ? kRows : 1)
    for (int i = 0; i < kRows; ++i) {
      const int position = cursor_.position() + place_.position(args_, i);
      const bool valid = place_.used && position < unit.end && channel < args_.k;
      const std::int64_t row = std::int64_t{unit.sample} * args_.positions + position;
      const T* const from = args_.grad_y + (valid ? row * args_.k + channel : 0);
      char* const to = stage + own_chunk(i) * Traits::kVectorBytes;
      if constexpr (Traits::kWhole) {
        copy_async<Traits::kVectorBytes>(to, from, valid);
      } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const bool own = valid && channel + j < args_.k;
          copy_async<4>(to + 4 * j, own ? from + j : from, own);
        }
      } else {
        Vector<T, kVector> vector;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          vector.at[j] = valid && channel + j < args_.k ? __ldcg(from + j) : from_stat<T>(0.f);
        }
        memcpy(__builtin_assume_aligned(to, Traits::kVectorBytes), &vector, Traits::kVectorBytes);
      }
    }
  }

  __device__ __forceinline__ void issue_planes(char* stage) const {
    const Unit& unit = cursor_.unit();
    const T* const sample = args_.grad_y + std::int64_t{unit.sample} * args_.k * args_.positions;
    if constexpr (Traits::kWhole) {
      constexpr int kChunks = Traits::kTileWords / 4;  // of a channel
#pragma unroll
      for (int i = 0; i < Traits::kGradBytes / kAccessBytes / kStreamThreads; ++i) {
        const int index = own_chunk(i), channel = index / kChunks, word = index % kChunks * 4;
        const int position = cursor_.position() + word * Traits::kWordPositions;
        const bool valid = unit.channel + channel < args_.k && position < unit.end;
        const T* const from =
            sample + (valid ? std::int64_t{unit.channel + channel} * args_.positions + position : 0);
        copy_async<kAccessBytes>(stage + tile_word(channel, word) * 4, from, valid);
      }
    } else {
      // Neighbouring threads load neighbouring elements of a channel.
#pragma unroll 2
      for (int i = 0; i < kRows * kVector; ++i) {
        const int index = own_chunk(i);
        const int channel = index / Traits::kTilePositions, offset = index % Traits::kTilePositions;
        const int position = cursor_.position() + offset;
        const bool valid = unit.channel + channel < args_.k && position < unit.end;
        const T* const from =
            sample + (valid ? std::int64_t{unit.channel + channel} * args_.positions + position : 0);
        char* const to = stage + tile_word(channel, offset / Traits::kWordPositions) * 4 +
                         offset % Traits::kWordPositions * sizeof(T);
        if constexpr (sizeof(T) == 4) {
          copy_async<4>(to, from, valid);
        } else {
          *reinterpret_cast<T*>(to) = valid ? __ldcg(from) : from_stat<T>(0.f);
        }
      }
    }
  }

  const Args& args_;
  const Place<Traits> place_;
  char* memory_;
  StageCursor<Args, Traits::kScaled> cursor_;  // of the stage to load next
  int front_ = Traits::kStages - 1;            // slot of the stage that is read
  int moment_[kRows] = {};                     // of that stage's positions
};

}  // namespace upconv3d::cuda
