// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: how x and w come into shared memory.
///
/// x: a box of positions, `pitch` chunks of 16 bytes each: the position's channels, then zeros. Floats that
/// are multiplied as TF32 are rounded there, once for all taps that read them.
/// w: in the order in which the tensor cores take it. A unit is 32 bytes of gemm_k by COLUMNS output
/// channels, of one step and phase: [1 or 2][32 lanes][2 or 4] words, a lane's words of up to two column
/// tiles together. Column c of tile i is output channel c/2*RUN + 2*i + c%2, so that a thread's results are
/// neighbours.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/conv_transpose/few_channels_params_sm80.cuh"
#include "cuda/conv_transpose/tensor_cores_sm80.cuh"

namespace upconv3d::cuda {

/// A chunk's elements as words.
template <class T, int kChunk>
__device__ __forceinline__ uint4 chunk_words(const T (&elements)[kChunk]) {
  uint4 words;
  static_assert(sizeof(words) == sizeof(elements));
  memcpy(&words, elements, sizeof(words));
  return words;
}

/// 16 bytes to shared memory, zeros unless `inside`.
__device__ __forceinline__ void copy_chunk_async(std::uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// Zeros behind every position's channels, which no load overwrites.
__device__ __forceinline__ void clear_padding(const FewParams& params, char* x) {
  const int chunks = params.chunks.divisor, padding = params.pitch_bytes / 16 - chunks;
  const int positions = params.box.divisor;
  for (int i = threadIdx.x; i < positions * padding; i += kFewThreads) {
    const int position = i / padding, chunk = chunks + i - position * padding;
    *reinterpret_cast<uint4*>(x + position * params.pitch_bytes + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
}

/// The first `count` elements, `step` apart, and zeros. Few channels are most of what is gathered: of those
/// that no position has, the second half costs one comparison.
template <class T, int kChunk>
__device__ __forceinline__ void gather_elements(const T* from, int step, int count, T (&elements)[kChunk]) {
#pragma unroll
  for (int half = 0; half < kChunk; half += kChunk / 2) {
#pragma unroll
    for (int e = half; e < half + kChunk / 2; ++e) elements[e] = T(0.f);
    if (half > 0 && count <= half) continue;
#pragma unroll
    for (int e = half; e < half + kChunk / 2; ++e) {
      if (e < count) elements[e] = from[std::int64_t(e) * step];
    }
  }
}

/// A thread's chunks of a box, one after the other.
/// \tparam kChunksFirst neighbouring threads have chunks of one position, else positions: what lies together
template <bool kChunksFirst>
class FewBoxWalk {
 public:
  __device__ __forceinline__ explicit FewBoxWalk(const FewParams& params) : params_(params) {
    int position;
    if constexpr (kChunksFirst) {
      position = params.chunks.divmod(at_.chunk, int(threadIdx.x));
    } else {
      at_.chunk = params.box.divmod(position, int(threadIdx.x));
    }
    at_.depth = params.box_height.divmod(at_.height, params.box_width.divmod(at_.width, position));
  }

  __device__ __forceinline__ const FewBoxPlace& at() const { return at_; }

  /// Digit by digit: divisions would take most of what a chunk takes.
  __device__ __forceinline__ void advance() {
    const FewBoxPlace& step = params_.box_step;
    bool carry = false;
    if constexpr (kChunksFirst) carry = add(at_.chunk, step.chunk, false, params_.chunks.divisor);
    carry = add(at_.width, step.width, carry, params_.box_width.divisor);
    carry = add(at_.height, step.height, carry, params_.box_height.divisor);
    at_.depth += step.depth + int(carry);
    if constexpr (!kChunksFirst) {
      const int depths = params_.box_depth;
      carry = at_.depth >= depths;
      at_.depth -= carry ? depths : 0;
      at_.chunk += step.chunk + int(carry);
    }
  }

 private:
  __device__ __forceinline__ static bool add(int& digit, int step, bool carry, int radix) {
    digit += step + int(carry);
    const bool over = digit >= radix;
    digit -= over ? radix : 0;
    return over;
  }

  const FewParams& params_;
  FewBoxPlace at_;
};

/// Where the chunk that `at` names lies in a box.
__device__ __forceinline__ int box_place(const FewParams& params, const FewBoxPlace& at) {
  const int row = at.depth * params.box_height.divisor + at.height;
  return (row * params.box_width.divisor + at.width) * params.pitch_bytes + at.chunk * 16;
}

/// Rounds to TF32 what the thread's own copies have brought, which it alone may read before a barrier.
__device__ __forceinline__ void round_copies(const FewParams& params, char* x) {
  const int total = params.box.divisor * params.chunks.divisor;
  FewBoxWalk<true> walk(params);
#pragma unroll 1
  for (int i = threadIdx.x; i < total; i += kFewThreads, walk.advance()) {
    uint4* const chunk = reinterpret_cast<uint4*>(x + box_place(params, walk.at()));
    uint4 words = *chunk;
    words.x = to_tf32(__uint_as_float(words.x)), words.y = to_tf32(__uint_as_float(words.y));
    words.z = to_tf32(__uint_as_float(words.z)), words.w = to_tf32(__uint_as_float(words.w));
    *chunk = words;
  }
}

/// Loads the box of x that a tile reads, zeros outside of the volume. Copies are under way when it returns.
/// \tparam kCopies params.copies
template <class Traits, bool kCopies>
__device__ __forceinline__ void load_box_as(const FewParams& params, const FewItem& item, char* to) {
  using T = typename Traits::Element;
  const int group = params.channel_blocks.div(int(blockIdx.y));
  const T* const x = static_cast<const T*>(params.x) + item.sample * params.x_sample +
                     std::int64_t(group) * params.channels * params.x_channel;
  const int total = params.box.divisor * params.chunks.divisor;
  const std::uint32_t to_shared = shared_address(to);
  const int depth = item.first[0] + params.lower[0], height = item.first[1] + params.lower[1];
  const int width = item.first[2] + params.lower[2];
  FewBoxWalk<kCopies> walk(params);
#pragma unroll kCopies ? 1 : 2  // gathered elements are waited for
  for (int i = threadIdx.x; i < total; i += kFewThreads, walk.advance()) {
    const FewBoxPlace& at = walk.at();
    const int z = depth + at.depth, h = height + at.height, w = width + at.width;
    const bool inside = unsigned(z) < unsigned(params.in[0]) && unsigned(h) < unsigned(params.in[1]) &&
                        unsigned(w) < unsigned(params.in[2]);
    const int offset = ((z * params.in[1] + h) * params.in[2] + w) * params.x_position +
                       at.chunk * Traits::CHUNK * params.x_channel;
    const int place = box_place(params, at);
    if constexpr (kCopies) {
      copy_chunk_async(to_shared + place, x + (inside ? offset : 0), inside);
    } else {
      T elements[Traits::CHUNK];
      const int count = inside ? params.channels - at.chunk * Traits::CHUNK : 0;
      gather_elements(x + offset, params.x_channel, count, elements);
      if constexpr (Traits::ROUNDS) {
#pragma unroll
        for (T& element : elements) element = __uint_as_float(to_tf32(element));
      }
      *reinterpret_cast<uint4*>(to + place) = chunk_words(elements);
    }
  }
}

/// Waits for the copies of the thread's share of a box, and rounds them if need be. A barrier later the box
/// is there.
template <class Traits>
__device__ __forceinline__ void finish_box(const FewParams& params, char* x) {
  wait_for_copies();
  if constexpr (Traits::ROUNDS) {
    if (params.copies) round_copies(params, x);
  }
}

/// The same for either way of loading.
template <class Traits>
__device__ __forceinline__ void load_box(const FewParams& params, const FewItem& item, char* to) {
  if (params.copies) {
    load_box_as<Traits, true>(params, item, to);
  } else {
    load_box_as<Traits, false>(params, item, to);
  }
}

/// Loads the weights of a block's output channels. `weights` was cleared before.
template <class Traits>
__device__ __forceinline__ void load_weights(const FewParams& params, char* weights) {
  using T = typename Traits::Element;
  const FewChannelBlock block = few_channel_block(params, Traits::COLUMNS, int(blockIdx.y));
  const int channels = min(Traits::COLUMNS, params.group_outputs - block.in_group);
  const T* const w = static_cast<const T*>(params.w) + block.in_group * params.w_strides[1] +
                     std::int64_t(block.group) * params.channels * params.w_strides[0];
  for (int i = threadIdx.x; i < channels * params.taps; i += kFewThreads) {
    const int tap = params.taps_first ? i % params.taps : i / channels;
    const int channel = params.taps_first ? i / params.taps : i - tap * channels;
    const int plane = tap / params.kernel[2], s = tap - plane * params.kernel[2];
    const int t = plane / params.kernel[1], r = plane - t * params.kernel[1];
    const T* next = w + channel * params.w_strides[1] + t * params.w_strides[2] + r * params.w_strides[3] +
                    s * params.w_strides[4];
    const int column_tile = channel % Traits::RUN / 2;
    const int column = channel / Traits::RUN * 2 + channel % 2;
    constexpr int kWords = Traits::COLUMN_TILES == 1 ? 2 : 4;  // of a lane
    char* const lanes =
        weights + ((column_tile / 2 * 32 + column * 4) * kWords + column_tile % 2 * 2) * int(sizeof(int));
    const FewTap place = params.tap[tap];
#pragma unroll 4
    for (int chunk = 0; chunk < params.chunks.divisor; ++chunk) {
      T elements[Traits::CHUNK];
#pragma unroll
      for (int e = 0; e < Traits::CHUNK; ++e, next += params.w_strides[0]) {
        elements[e] = chunk * Traits::CHUNK + e < params.channels ? *next : T(0.f);
        if constexpr (Traits::ROUNDS) elements[e] = __uint_as_float(to_tf32(elements[e]));
      }
      const int number = place.first_chunk + chunk;
      const int fragment = place.fragment + number / 2 * place.stride;
      std::uint32_t* const to =
          reinterpret_cast<std::uint32_t*>(lanes + fragment * Traits::FRAGMENT_BYTES) + number % 2;
      const uint4 words = chunk_words(elements);
      to[0 * kWords] = words.x, to[1 * kWords] = words.y, to[2 * kWords] = words.z, to[3 * kWords] = words.w;
    }
  }
}

}  // namespace upconv3d::cuda
