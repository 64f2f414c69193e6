// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: what becomes of a group's convolution. Bias and before(); then moments,
/// or normalization, after() and y.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/few_channels_moments_sm80.cuh"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// kCount neighbours of y, to memory that the second pass does not read again.
template <class T, int kCount>
__device__ __forceinline__ void store_run(T* to, const float (&values)[kCount]) {
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
      __stcs(reinterpret_cast<uint4*>(to) + i,
             make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
    }
  } else if constexpr (kBytes == 8) {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(words[0], words[1]));
  } else {
    static_assert(kBytes == 4);
    __stcs(reinterpret_cast<unsigned*>(to), words[0]);
  }
}

template <class Traits>
class FewEpilogue {
  using T = typename Traits::Element;
  using Accumulators = FewAccumulators<Traits>;

 public:
  /// \param first_channel the block's first output channel
  /// \param first_row     the warp's first of the tile's rows
  __device__ FewEpilogue(const FewParams& params, char* shared, int first_channel, int first_row)
      : params_(params),
        rows_(reinterpret_cast<int2*>(shared + params.rows_at)),
        channels_(reinterpret_cast<float*>(shared + params.channels_at)),
        first_channel_(first_channel),
        first_row_(first_row + int(threadIdx.x) % 32 / 4),
        run_(int(threadIdx.x) % 4 * Traits::RUN),
        moments_(params, shared, first_channel) {}

  /// Before a tile, between barriers: what its rows and channels need.
  __device__ __forceinline__ void begin(const FewItem& item) {
    for (int row = threadIdx.x; row < 16 * Traits::ROW_TILES * params_.row_warps; row += kFewThreads) {
      rows_[row] = locate(item, row);
    }
    if (item.sample != sample_) load_channels(item.sample);
    sample_ = item.sample;
    if constexpr (!Traits::OUTPUT) moments_.begin();
  }

  /// Takes the convolution of a group.
  __device__ __forceinline__ void finish(const FewGroupParams& group, Accumulators& acc) {
    add_bias(acc);
    if (params_.before.kind != Activation::kNone) activate(params_.before.kind, acc);
    const auto valid_of = [&](int row, int half) {
      return valid(group, rows_[first_row_ + 16 * row + 8 * half].y);
    };
    if constexpr (Traits::OUTPUT) {
      if (params_.table) normalize(acc);
      if (params_.after.kind != Activation::kNone) activate(params_.after.kind, acc);
      store(group, acc);
    } else {
      moments_.add(acc, valid_of);
    }
  }

  __device__ __forceinline__ void end() { moments_.end(); }
  __device__ __forceinline__ void write_moments(const FewItem& item) const { moments_.write(item); }

 private:
  enum { kBias, kParameter, kMean, kScale, kShift };

  /// Where row's first output lies in its sample, and how many phases of each axis are inside: 8 bits each.
  __device__ __forceinline__ int2 locate(const FewItem& item, int row) const {
    int at[3];
    at[0] = params_.tile_height.divmod(at[1], params_.tile_width.divmod(at[2], row));
    if (at[0] >= params_.tile[0]) return make_int2(0, 0);
    unsigned offset = 0, phases = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int o = (item.first[axis] + at[axis]) * params_.stride[axis];
      offset = offset * unsigned(params_.out[axis]) + unsigned(o);
      phases |= unsigned(max(0, min(params_.out[axis] - o, params_.stride[axis]))) << 8 * axis;
    }
    return make_int2(int(offset * unsigned(params_.y_position)), int(phases));
  }

  /// Phases of a group's pair that are inside, of a row with these.
  __device__ __forceinline__ static int valid(const FewGroupParams& group, int phases) {
    const bool inside = group.phase[0] < (phases & 255) && group.phase[1] < (phases >> 8 & 255);
    return inside ? (phases >> 16) - group.phase[2] : 0;
  }

  __device__ __forceinline__ void load_channels(int sample) {
    const int column = int(threadIdx.x), channel = first_channel_ + column;
    if (column >= Traits::COLUMNS) return;
    const bool is_channel = channel < params_.k;
    const T* const bias = static_cast<const T*>(params_.bias);
    channels_[kBias * Traits::COLUMNS + column] = is_channel && bias ? to_stat(bias[channel]) : 0.f;
    const ActivationParams& activation =
        params_.before.kind != Activation::kNone ? params_.before : params_.after;
    channels_[kParameter * Traits::COLUMNS + column] =
        is_channel ? activation_parameter<T>(activation, channel) : 0.f;
    if (!Traits::OUTPUT || !params_.table) return;
    const std::int64_t size = std::int64_t(params_.samples) * params_.k;
    const float* const from = params_.table + std::int64_t(sample) * params_.k + channel;
    for (int i = 0; i < 3; ++i) {
      channels_[(kMean + i) * Traits::COLUMNS + column] = is_channel ? from[i * size] : 0.f;
    }
  }

  /// What the thread's channels have of `what`.
  __device__ __forceinline__ void read_channels(int what, float (&values)[Traits::RUN]) const {
    const float* const from = channels_ + what * Traits::COLUMNS + run_;
#pragma unroll
    for (int i = 0; i < Traits::RUN; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from + i);
      values[i] = pair.x, values[i + 1] = pair.y;
    }
  }

  /// v = change(v, channel of the thread's run) for all values.
  template <class Change>
  __device__ __forceinline__ static void for_each(Accumulators& acc, const Change& change) {
#pragma unroll
    for (int phase = 0; phase < Traits::PAIRED; ++phase) {
#pragma unroll
      for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
        for (int i = 0; i < 4 * Traits::COLUMN_TILES; ++i) {
          float& v = acc.at[phase][row][i / 4][i % 4];
          v = change(v, i / 4 * 2 + i % 2);
        }
      }
    }
  }

  __device__ __forceinline__ void add_bias(Accumulators& acc) const {
    if (!params_.bias) return;
    float bias[Traits::RUN];
    read_channels(kBias, bias);
    for_each(acc, [&](float v, int i) { return v + bias[i]; });
  }

  __device__ __forceinline__ void activate(Activation kind, Accumulators& acc) const {
    float parameter[Traits::RUN];
    read_channels(kParameter, parameter);
    with_activation(kind, [&](auto activation) {
      for_each(acc, [&](float v, int i) { return activation.value(v, parameter[i]); });
    });
  }

  __device__ __forceinline__ void normalize(Accumulators& acc) const {
    float mean[Traits::RUN], scale[Traits::RUN], shift[Traits::RUN];
    read_channels(kMean, mean), read_channels(kScale, scale), read_channels(kShift, shift);
    for_each(acc, [&](float v, int i) { return (v - mean[i]) * scale[i] + shift[i]; });
  }

  __device__ __forceinline__ void store(const FewGroupParams& group, const Accumulators& acc) const {
    const int first = first_channel_ + run_;
    T* const y =
        static_cast<T*>(params_.y) + sample_ * params_.y_sample + std::int64_t(first) * params_.y_channel;
    const int offset =
        ((group.phase[0] * params_.out[1] + group.phase[1]) * params_.out[2] + group.phase[2]) *
        params_.y_position;
    const int channels = params_.k - first;  // from the thread's first on
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 at = rows_[first_row_ + 16 * row + 8 * half];
        const int phases = valid(group, at.y);
        T* const to = y + (at.x + offset);
        if (params_.channels_first) {
          store_planes(acc, row, half, phases, channels, to);
        } else {
          store_rows(acc, row, half, phases, channels, to);
        }
      }
    }
  }

  /// y [N,Z,P,Q,K].
  __device__ __forceinline__ void store_rows(const Accumulators& acc, int row, int half, int phases,
                                             int channels, T* to) const {
#pragma unroll
    for (int phase = 0; phase < Traits::PAIRED; ++phase) {
      if (phase >= phases || channels <= 0) continue;
      float values[Traits::RUN];
#pragma unroll
      for (int i = 0; i < Traits::RUN; ++i) values[i] = acc.at[phase][row][i / 2][2 * half + i % 2];
      T* const position = to + phase * params_.y_position;
      if (params_.whole_runs) {
        store_run(position, values);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Traits::RUN; ++i) {
        if (i < channels) position[i] = from_stat<T>(values[i]);
      }
    }
  }

  /// y [N,K,Z,P,Q].
  __device__ __forceinline__ void store_planes(const Accumulators& acc, int row, int half, int phases,
                                               int channels, T* to) const {
    if (phases <= 0) return;
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      if (i >= channels) continue;
      float values[Traits::PAIRED];
#pragma unroll
      for (int phase = 0; phase < Traits::PAIRED; ++phase) {
        values[phase] = acc.at[phase][row][i / 2][2 * half + i % 2];
      }
      T* const position = to + std::int64_t(i) * params_.y_channel;
      if constexpr (Traits::PAIRED == 2) {
        if (params_.whole_runs) {
          store_run(position, values);
          continue;
        }
      }
#pragma unroll
      for (int phase = 0; phase < Traits::PAIRED; ++phase) {
        if (phase < phases) position[phase] = from_stat<T>(values[phase]);
      }
    }
  }

  const FewParams& params_;
  int2* const rows_;       // [rows] offset and phases
  float* const channels_;  // [5][COLUMNS]
  const int first_channel_;
  const int first_row_;  // the thread's
  const int run_;        // its first column
  int sample_ = -1;
  FewMoments<Traits> moments_;
};

}  // namespace upconv3d::cuda
