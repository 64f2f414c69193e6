// SPDX-License-Identifier: Apache-2.0
/// \file
/// How group_norm_backward brings grad_y and a into registers: through a ring of stages in shared memory,
/// which cp.async fills several stages ahead, across the borders of units and phases.
///
/// A thread has kRows positions of a stage and kVector channels of each. Its share of a, and
/// of grad_y where that is NDHWC, only itself reads. A stage of grad_y NCDHW is a tile [64 channels, 32 words
/// of positions], or [16, 128], whose 16-byte chunks are permuted: chunk' = chunk ^ (channel/kVector % 8), or
/// chunk ^ (channel/kVector % 4 * 2). cp.async writes eight consecutive chunks of a channel at a time; a warp
/// reads words of eight vectors of channels at four neighbouring words, or of four at eight. Neither
/// conflicts.
#pragma once

#include <cstdint>

#include "cuda/group_norm/async_copy.cuh"
#include "cuda/group_norm/backward_work.cuh"
#include "cuda/group_norm/steps.cuh"

namespace upconv3d::cuda {

/// How grad_y lies: NDHWC or NCDHW, and whether it can be loaded 16 bytes at a time. Tiles of narrow planes
/// have fewer channels.
enum class GradAccess {
  kRowVectors,
  kRowElements,
  kPlaneVectors,
  kPlaneElements,
  kNarrowPlaneVectors,
  kNarrowPlaneElements
};

/// \tparam kAnyTail_ whatever activation is behind the normalization, and relu or nothing before it; else
/// relu
///                   before it and nothing behind
template <class T_, class A_, class Out_, GradAccess kAccess_, bool kAnyTail_>
struct BackwardTraits {
  using T = T_;
  using A = A_;
  using Out = Out_;
  using Args = BackwardArgs<T, A, Out>;
  static constexpr GradAccess kAccess = kAccess_;
  static constexpr bool kAnyTail = kAnyTail_;
  static constexpr bool kNarrow =
      kAccess == GradAccess::kNarrowPlaneVectors || kAccess == GradAccess::kNarrowPlaneElements;
  static constexpr bool kPlanes =
      kNarrow || kAccess == GradAccess::kPlaneVectors || kAccess == GradAccess::kPlaneElements;
  static constexpr bool kWhole = kAccess == GradAccess::kRowVectors || kAccess == GradAccess::kPlaneVectors ||
                                 kAccess == GradAccess::kNarrowPlaneVectors;
  static constexpr bool kSteps = std::is_same_v<A, std::uint16_t>;
  static constexpr bool kSplit = std::is_same_v<Out, SplitHalf>;
  static constexpr bool kScaled = kSplit || (std::is_same_v<T, float> && std::is_same_v<Out, __half>);
  using Stored = std::conditional_t<kSplit, __half, Out>;  // elements of a row of grad_c
  static constexpr int kOutElements = kSplit ? 2 : 1;      // of a channel

  static constexpr int kVector = kBackwardVector;                // channels of a thread
  static constexpr int kRows = 8 / int(sizeof(T));               // positions of a thread and stage
  static constexpr int kVectorBytes = kVector * int(sizeof(T));  // of grad_y
  static constexpr int kSums = kSumFields + (kAnyTail ? 1 : 0);  // fields of a channel
  static constexpr int kMaxGrad = kSums, kMaxDeviation = kSums + 1;
  static constexpr int kFields = kSums + (kScaled ? 2 : 0);
  static_assert(kFields <= kPartFields);

  static constexpr int kGradBytes = kStreamThreads * kRows * kVectorBytes;
  static constexpr int kABytes = kVector * int(sizeof(A));  // of a thread's vector
  static constexpr int kStepsAt = kGradBytes + kStreamThreads * kRows * kABytes;
  static constexpr int kStageBytes = kStepsAt + (kSteps ? kStreamThreads * kRows * kVector : 0);
  /// Four stages ahead, two blocks per multiprocessor: 112 to 128 KB in flight, which cover 3 us of latency.
  static constexpr int kStages = 5;

  // A tile of grad_y NCDHW.
  static constexpr int kTileChannels = kNarrow ? kNarrowTileChannels : kPlaneTileChannels;
  static constexpr int kTileWords = kGradBytes / 4 / kTileChannels;  // of a channel
  static constexpr int kWordPositions = 4 / int(sizeof(T));
  static constexpr int kTilePositions = kTileWords * kWordPositions;
  static constexpr int kTileVectors = kTileChannels / kVector;
  static constexpr int kTileSlots = kStreamThreads / kTileVectors;
  static constexpr int kWarpVectors = kTileVectors < 8 ? kTileVectors : 8;  // that a warp reads side by side
};

/// Where a thread stands in its block: vector of channels and slot of positions.
template <class Traits>
struct Place {
  int vector, slot;
  bool used;

  __device__ __forceinline__ explicit Place(const typename Traits::Args& args) {
    const int thread = threadIdx.x;
    if constexpr (Traits::kPlanes) {
      constexpr int kVectors = Traits::kWarpVectors, kSlots = 32 / kVectors;  // of a warp
      constexpr int kAcross = Traits::kTileVectors / kVectors;                // warps
      const int warp = thread / 32;
      vector = thread % kVectors + warp % kAcross * kVectors;
      slot = thread % 32 / kVectors + warp / kAcross * kSlots;
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
  __device__ __forceinline__ StageRing(const Args& args, const Place<Traits>& place, const FirstUnits& first,
                                       char* memory)
      : args_(args),
        place_(place),
        memory_(memory),
        cursor_(args, first, Place<Traits>::stage_positions(args)) {
    find_moments();
#pragma unroll 1
    for (int i = 0; i < Traits::kStages - 1; ++i) issue(i);
  }

  /// Waits for the next stage and starts the load of one further ahead. The stage before may be overwritten.
  __device__ __forceinline__ void next() {
    await_copies<Traits::kStages - 2>();
    if constexpr (Traits::kPlanes) __syncthreads();
    issue(front_);  // the slot of the stage before
    front_ = front_ + 1 == Traits::kStages ? 0 : front_ + 1;
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
      for (int j = 0; j < kVector; ++j) {
        const float origin = Traits::kAnyTail ? args_.stored_origin : stored_origin(false);
        a[j] = stored_bits(j < 2 ? words.x : words.y, j % 2, origin) * steps.at(j);
      }
    } else {
      read_floats<A>(own, a);
    }
  }

 private:
  __device__ __forceinline__ static int own_chunk(int i) { return i * kStreamThreads + threadIdx.x; }

  /// Word of a tile's stage where word `word` of a channel lies.
  __device__ __forceinline__ static int tile_word(int channel, int word) {
    constexpr int kVectors = Traits::kWarpVectors;
    const int permutation = channel / kVector % kVectors * (8 / kVectors);
    return channel * Traits::kTileWords + (((word / 4) ^ permutation) * 4 + word % 4);
  }

  /// Starts the next stage's load into slot `back`, if there is one.
  __device__ __forceinline__ void issue(int back) {
    if (!cursor_.done()) {
      char* const stage = memory_ + back * Traits::kStageBytes;
      const unsigned valid = valid_rows();
      if constexpr (Traits::kPlanes) {
        issue_planes(stage);
      } else {
        issue_rows(stage, valid);
      }
      issue_a(stage, valid);
      cursor_.advance();
      find_moments();
    }
    end_copies();
  }

  /// Whether this thread's i-th row of the next stage is inside its unit, for each i; bits of the result.
  __device__ __forceinline__ unsigned valid_rows() const {
    const Unit& unit = cursor_.unit();
    const bool inside = place_.used && unit.channel + place_.vector * kVector < args_.k;
    const int left = inside ? unit.end - cursor_.position() - place_.position(args_, 0) : 0;
    unsigned valid = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      valid |= (place_.position(args_, i) - place_.position(args_, 0) < left ? 1u : 0u) << i;
    }
    return valid;
  }

  /// Element offset of this thread's first row of the next stage in [N,Z,P,Q,pitch]. It may lie outside: what
  /// is not valid is not read.
  __device__ __forceinline__ std::int64_t first_offset(int pitch) const {
    const Unit& unit = cursor_.unit();
    const std::int64_t row = std::int64_t{unit.sample} * args_.positions + cursor_.position();
    return row * pitch + unit.channel + (place_.position(args_, 0) * pitch + place_.vector * kVector);
  }

  /// From the row before to the i-th one.
  __device__ __forceinline__ int row_step(int i, int pitch) const {
    return (place_.position(args_, i) - place_.position(args_, i - 1)) * pitch;
  }

  __device__ __forceinline__ void issue_a(char* stage, unsigned valid) const {
    const A* from = args_.a + first_offset(args_.a_pitch);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool own = valid >> i & 1;
      if (i > 0) from += row_step(i, args_.a_pitch);
      copy_async<Traits::kABytes>(stage + Traits::kGradBytes + own_chunk(i) * Traits::kABytes, from, own);
      if constexpr (Traits::kSteps) {
        const Unit& unit = cursor_.unit();
        const std::int64_t moment = std::int64_t{unit.sample} * args_.moments + moment_[i];
        const std::int8_t* const steps = args_.steps + moment * args_.a_pitch + unit.channel;
        copy_async<kVector>(stage + Traits::kStepsAt + own_chunk(i) * kVector,
                            steps + place_.vector * kVector, own);
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

  __device__ __forceinline__ void issue_rows(char* stage, unsigned valid) const {
    const T* from = args_.grad_y + first_offset(args_.k);
    const int channels =
        args_.k - cursor_.unit().channel - place_.vector * kVector;  // from the thread's first on
#pragma unroll(Traits::kWhole ? kRows : 1)
    for (int i = 0; i < kRows; ++i) {
      if (i > 0) from += row_step(i, args_.k);
      char* const to = stage + own_chunk(i) * Traits::kVectorBytes;
      const bool own = valid >> i & 1;
      if constexpr (Traits::kWhole) {
        copy_async<Traits::kVectorBytes>(to, from, own);
      } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) copy_async<4>(to + 4 * j, from + j, own && j < channels);
      } else {
        Vector<T, kVector> vector;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          vector.at[j] = own && j < channels ? __ldcg(from + j) : from_stat<T>(0.f);
        }
        memcpy(__builtin_assume_aligned(to, Traits::kVectorBytes), &vector, Traits::kVectorBytes);
      }
    }
  }

  __device__ __forceinline__ void issue_planes(char* stage) const {
    const Unit& unit = cursor_.unit();
    const std::int64_t plane = std::int64_t{unit.sample} * args_.k + unit.channel;
    const T* const tile = args_.grad_y + plane * args_.positions + cursor_.position();
    const int channels = args_.k - unit.channel, left = unit.end - cursor_.position();
    if constexpr (Traits::kWhole) {
      constexpr int kChunks = Traits::kTileWords / 4;  // of a channel
      constexpr int kChannelStep = kStreamThreads / kChunks;
      const int channel = threadIdx.x / kChunks, word = threadIdx.x % kChunks * 4;
      const T* const from = tile + std::int64_t{channel} * args_.positions + word * Traits::kWordPositions;
      const int own = word * Traits::kWordPositions < left ? channels - channel : 0;
#pragma unroll
      for (int i = 0; i < Traits::kTileChannels / kChannelStep; ++i) {
        copy_async<kAccessBytes>(stage + tile_word(channel + i * kChannelStep, word) * 4,
                                 from + std::int64_t{i * kChannelStep} * args_.positions,
                                 i * kChannelStep < own);
      }
    } else {
      // Neighbouring threads load neighbouring elements of a channel.
#pragma unroll(sizeof(T) == 2 ? 8 : 2)
      for (int i = 0; i < kRows * kVector; ++i) {
        const int index = own_chunk(i);
        const int channel = index / Traits::kTilePositions, offset = index % Traits::kTilePositions;
        const T* const from = tile + std::int64_t{channel} * args_.positions + offset;
        char* const to = stage + tile_word(channel, offset / Traits::kWordPositions) * 4 +
                         offset % Traits::kWordPositions * sizeof(T);
        const bool own = channel < channels && offset < left;
        if constexpr (sizeof(T) == 4) {
          copy_async<4>(to, from, own);
        } else {
          *reinterpret_cast<T*>(to) = own ? __ldcg(from) : from_stat<T>(0.f);
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
