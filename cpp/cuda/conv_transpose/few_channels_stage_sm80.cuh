// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80, output pass: how rows of y [N,K,Z,P,Q] are written that begin amid a
/// sector of memory, or whose neighbours are other phases'.
///
/// What a warp has of a row begins and ends between two boundaries of sectors, which take longer to write in
/// part than as a whole. A tile of whole rows is, of each channel and plane, one run of values in y. The
/// block's warps collect it in shared memory, in the same order and as far behind a boundary of 16 bytes as
/// in y, and write it as whole chunks, the values before and behind them one by one.
///
/// FewStage of core/few_channels_layout.hpp says how far planes and channels lie apart: as many values more
/// than whole chunks as in y.
#pragma once

#include <cstdint>

#include "cuda/conv_transpose/few_channels_mainloop_sm80.cuh"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

template <class Traits>
class FewOutputStage {
  using T = typename Traits::Element;
  static constexpr unsigned kChunk = Traits::CHUNK;

 public:
  /// \param first_channel the block's first output channel
  __device__ FewOutputStage(const FewParams& params, char* shared, int first_channel)
      : params_(params),
        stage_(reinterpret_cast<T*>(shared + params.stage_at)),
        first_channel_(first_channel) {}

  /// Values from the boundary of 16 bytes before a tile's first output to that output.
  __device__ __forceinline__ int shift(const FewItem& item) const {
    return int(reinterpret_cast<std::uintptr_t>(first_output(item)) / sizeof(T) % kChunk);
  }

  /// Where the outputs of a position of the tile begin, of the block's first channel.
  /// \param at within the tile
  __device__ __forceinline__ int place(int shift, const int (&at)[3]) const {
    return shift +
           phase_offset(at[0] * params_.stride[0], at[1] * params_.stride[1], at[2] * params_.stride[2]);
  }

  /// Takes a group's values, also of columns that are no channels. A phase outside of the volume must not be
  /// stored: the next row begins there.
  /// \param run      the thread's first column
  /// \param place_of (row, half) -> int2: where the row's outputs begin, and how many of the group's pair
  ///                 are inside
  template <class PlaceOf>
  __device__ __forceinline__ void put(const FewGroupParams& group, const FewAccumulators<Traits>& acc,
                                      int run, const PlaceOf& place_of) const {
    T* const of_group =
        stage_ + run * params_.stage_channel + phase_offset(group.phase[0], group.phase[1], group.phase[2]);
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 at = place_of(row, half);
        T* to = of_group + at.x;
#pragma unroll
        for (int i = 0; i < Traits::RUN; ++i, to += params_.stage_channel) {
#pragma unroll
          for (int phase = 0; phase < Traits::PAIRED; ++phase) {
            if (phase < at.y) to[phase] = from_stat<T>(acc.at[phase][row][i / 2][2 * half + i % 2]);
          }
        }
      }
    }
  }

  /// Writes the tile: a warp one run of a channel and plane after the other. After a barrier, and before one.
  __device__ __forceinline__ void write(const FewItem& item) const {
    const int planes =
        params_.out[0] - item.first[0] * params_.stride[0];  // inside, or more than the tile has
    const int rows =
        min(params_.tile[1] * params_.stride[1], params_.out[1] - item.first[1] * params_.stride[1]);
    const int length = rows * params_.out[2], plane_values = params_.out[1] * params_.out[2];
    const int runs =
        min(Traits::COLUMNS, few_end_channel(params_) - first_channel_) * params_.stage_planes.divisor;
    T* const y = first_output(item);
    const int begin = shift(item);
    for (int run = int(threadIdx.x) / 32; run < runs; run += kFewWarps) {
      int plane;
      const int channel = params_.stage_planes.divmod(plane, run);
      if (plane >= planes) continue;
      const int from = begin + channel * params_.stage_channel + plane * params_.stage_plane;
      write_run(unsigned(from), unsigned(from + length),
                y + (std::int64_t(channel) * params_.y_channel + plane * plane_values));
    }
  }

 private:
  __device__ __forceinline__ T* first_output(const FewItem& item) const {
    const std::int64_t row =
        std::int64_t(item.first[0]) * params_.stride[0] * params_.out[1] + item.first[1] * params_.stride[1];
    return static_cast<T*>(params_.y) + item.sample * params_.y_sample +
           std::int64_t(first_channel_) * params_.y_channel + row * params_.out[2];
  }

  __device__ __forceinline__ int phase_offset(int depth, int height, int width) const {
    return depth * params_.stage_plane + height * params_.out[2] + width;
  }

  /// Values from `from` to before `end` of the stage, by a warp.
  /// \param to where the first of them belongs
  __device__ __forceinline__ void write_run(unsigned from, unsigned end, T* to) const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned chunks = (from + kChunk - 1) / kChunk * kChunk, chunks_end = end / kChunk * kChunk;
    // What is in no whole chunk: fewer than kChunk values on either side, of one lane each.
    const unsigned head_end = min(chunks, end), tail = max(chunks_end, head_end);
    const bool in_head = lane < kChunk;
    const unsigned single = in_head ? from + lane : tail + lane - kChunk;
    if (single < (in_head ? head_end : end)) to[single - from] = stage_[single];
    unsigned at = chunks + lane * kChunk;
    const uint4* in = reinterpret_cast<const uint4*>(stage_ + at);
    uint4* out = reinterpret_cast<uint4*>(to + (at - from));
#pragma unroll 2
    for (; at < chunks_end; at += 32 * kChunk, in += 32, out += 32) __stcs(out, *in);
  }

  const FewParams& params_;
  T* const stage_;  // [channels][planes][rows*Q], as FewStage says
  const int first_channel_;
};

}  // namespace upconv3d::cuda
