// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_few_channels_sm80: what becomes of a group's convolution. Bias and before(); then moments,
/// or normalization, after() and y.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/few_channels_moments_sm80.cuh"
#include "cuda/conv_transpose/few_channels_stage_sm80.cuh"
#include "cuda/conv_transpose/few_channels_store_sm80.cuh"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// The larger, NaN where one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

template <class Traits>
class FewEpilogue {
  using T = typename Traits::Element;
  using Accumulators = FewAccumulators<Traits>;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

 public:
  /// \param first_channel the block's first output channel
  /// \param first_row     the warp's first of the tile's rows
  __device__ FewEpilogue(const FewParams& params, char* shared, int first_channel, int first_row)
      : params_(params),
        rows_(reinterpret_cast<int2*>(shared + params.rows_at)),
        channels_(reinterpret_cast<float*>(shared + params.channels_at)),
        starts_(channels_ + (Traits::OUTPUT ? int(kStart) : kChannelParameters + int(threadIdx.x) / 32) *
                                Traits::COLUMNS),
        first_channel_(first_channel),
        first_row_(first_row + int(threadIdx.x) % 32 / 4),
        run_(int(threadIdx.x) % 4 * Traits::RUN),
        moments_(params, shared, first_channel),
        stage_(params, shared, first_channel) {}

  /// Before a tile, between barriers: what its rows and channels need.
  __device__ __forceinline__ void begin(const FewItem& item) {
    bool inside = true;
    std::int64_t first = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int o = item.first[axis] * params_.stride[axis];
      inside = inside && o + params_.tile[axis] * params_.stride[axis] <= params_.out[axis];
      first = first * params_.out[axis] + o;
    }
    first_output_ = first * params_.y_position;
    // Tiles that are inside throughout have the same rows.
    if (Traits::STAGED || !inside || !inside_) locate_rows(item);
    inside_ = inside;
    if (item.sample != sample_) load_channels(item.sample);
    has_start_ = false;
    sample_ = item.sample;
    if constexpr (!Traits::OUTPUT) moments_.begin();
  }

  /// The same after the barrier.
  __device__ __forceinline__ void begin_warp() {
    const int all = few_phase_counts(params_.stride[0], params_.stride[1], params_.stride[2]);
    bool whole = true;
#pragma unroll
    for (int row = 0; row < 2 * Traits::ROW_TILES; ++row) {
      whole = whole && rows_[first_row_ + 8 * row].y == all;
    }
    whole_ = __all_sync(~0u, whole);
    if constexpr (!Traits::OUTPUT) {
      float bias[Traits::RUN];
      read_channels(kStart, bias);
      write_start(bias);
    }
  }

  /// What a group's accumulators begin with.
  __device__ __forceinline__ void start(float (&values)[Traits::RUN]) const { read_run(starts_, values); }

  /// Takes a group's start + convolution.
  __device__ __forceinline__ void finish(const FewGroupParams& group, Accumulators& acc) {
    if constexpr (Traits::OUTPUT) {
      activate_before(acc);
      if (params_.table) normalize(acc);
      if (params_.after.kind != Activation::kNone) activate(params_.after.kind, acc);
      if constexpr (Traits::STAGED) return put(group, acc);
      store(group, acc);
    } else {
      deviate(group, acc);
      if (whole_) return moments_.add_all(acc);
#pragma unroll
      for (int row = 0; row < 2 * Traits::ROW_TILES; ++row) {
        const Inside inside = inside_of(group, rows_[first_row_ + 8 * row].y);
        moments_.add(acc, row / 2, row % 2, inside.first, inside.second);
      }
    }
  }

  __device__ __forceinline__ void end() {
    float pivot[Traits::RUN];
    read_pivot(pivot);
    moments_.end(pivot);
  }
  __device__ __forceinline__ void write_moments(const FewItem& item) const { moments_.write(item); }
  __device__ __forceinline__ void write_stage(const FewItem& item) const { stage_.write(item); }

 private:
  /// kStart + kRest is the bias. In the output pass accumulators begin near their mean, or at 0 without a
  /// norm: a large bias would cost the products' sum its last digits.
  enum { kStart, kRest, kParameter, kScale, kShift, kChannelParameters };
  static_assert(kChannelParameters == kFewChannelParameters);

  __device__ __forceinline__ void locate_rows(const FewItem& item) {
    const int shift = Traits::STAGED ? stage_.shift(item) : 0;
    for (int row = threadIdx.x; row < 16 * Traits::ROW_TILES * params_.row_warps; row += kFewThreads) {
      rows_[row] = locate(item, row, shift);
    }
  }

  /// Where row's first output lies from the tile's, or in the stage, and how many phases of each axis are
  /// inside, as few_phase_counts.
  __device__ __forceinline__ int2 locate(const FewItem& item, int row, int shift) const {
    int at[3];
    at[0] = params_.tile_height.divmod(at[1], params_.tile_width.divmod(at[2], row));
    if (at[0] >= params_.tile[0]) return make_int2(0, few_phase_counts(0, 0, 0));
    unsigned offset = 0;
    int phases[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int o = at[axis] * params_.stride[axis];
      offset = offset * unsigned(params_.out[axis]) + unsigned(o);
      const int left = params_.out[axis] - item.first[axis] * params_.stride[axis] - o;
      phases[axis] = max(0, min(left, params_.stride[axis]));
    }
    const int counts = few_phase_counts(phases[0], phases[1], phases[2]);
    if constexpr (Traits::STAGED) return make_int2(stage_.place(shift, at), counts);
    return make_int2(int(offset * unsigned(params_.y_position)), counts);
  }

  /// Which phases of a group's pair are inside, of a row with these.
  struct Inside {
    bool first, second;
    __device__ __forceinline__ int count() const { return int(first) + int(second); }
  };
  __device__ __forceinline__ static Inside inside_of(const FewGroupParams& group, int phases) {
    const int first = phases - group.least_counts, second = first - few_counts_of_axis(1, 2);
    return {(~first & kFewCountGuards) == 0, Traits::PAIRED == 2 && (~second & kFewCountGuards) == 0};
  }

  __device__ __forceinline__ void load_channels(int sample) {
    const int column = int(threadIdx.x),
              channel = few_first_channel<Traits>(params_, first_channel_) + column;
    if (column >= Traits::COLUMNS) return;
    const bool is_channel = channel < few_end_channel(params_);
    const auto set = [&](int what, float value) { channels_[what * Traits::COLUMNS + column] = value; };
    const T* const from = static_cast<const T*>(params_.bias);
    const float bias = is_channel && from ? to_stat(from[channel]) : 0.f;
    const ActivationParams& activation =
        params_.before.kind != Activation::kNone ? params_.before : params_.after;
    set(kParameter, is_channel ? activation_parameter<T>(activation, channel) : 0.f);
    float rest = Traits::OUTPUT ? bias : 0.f;
    if (Traits::OUTPUT && is_channel && params_.table) {
      const std::int64_t size = std::int64_t(params_.samples) * params_.k;
      const float* const table = params_.table + std::int64_t(sample) * params_.k + channel;
      rest = table[0];
      set(kScale, table[size]);
      set(kShift, table[2 * size]);
    }
    set(kStart, bias - rest);
    set(kRest, rest);
  }

  /// What the thread's channels have of `what`.
  __device__ __forceinline__ void read_channels(int what, float (&values)[Traits::RUN]) const {
    read_run(channels_ + what * Traits::COLUMNS, values);
  }

  __device__ __forceinline__ void read_run(const float* columns, float (&values)[Traits::RUN]) const {
#pragma unroll
    for (int i = 0; i < Traits::RUN; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(columns + run_ + i);
      values[i] = pair.x, values[i + 1] = pair.y;
    }
  }

  /// Moments pass: what the warp's accumulators begin with from now on.
  __device__ __forceinline__ void write_start(const float (&values)[Traits::RUN]) {
    if (int(threadIdx.x) % 32 < 4) {
#pragma unroll
      for (int i = 0; i < Traits::RUN; ++i) starts_[run_ + i] = values[i];
    }
    __syncwarp();
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

  /// Of values as accumulators hold them in the moments pass, what has to be added.
  __device__ __forceinline__ void read_pivot(float (&pivot)[Traits::RUN]) const {
    float begun[Traits::RUN];
    read_channels(kStart, pivot), start(begun);
    // A bias of -inf is where both begin: the difference would make NaN of what ReLU makes 0.
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) pivot[i] = pivot[i] == begun[i] ? 0.f : pivot[i] - begun[i];
  }

  /// acc = before(conv + bias) - pivot.
  __device__ __forceinline__ void deviate(const FewGroupParams& group, Accumulators& acc) {
    float pivot[Traits::RUN];
    if (params_.before.kind == Activation::kRelu) {
      read_pivot(pivot);
      for_each(acc, [&](float v, int i) { return max_or_nan(v, -pivot[i]); });
    } else if (params_.before.kind != Activation::kNone) {
      read_pivot(pivot);
      for_each(acc, [&](float v, int i) { return v + pivot[i]; });
      activate(params_.before.kind, acc);
      asm volatile("" ::: "memory");  // read once more: registers are short in between
      read_pivot(pivot);
      for_each(acc, [&](float v, int i) { return v - pivot[i]; });
    }
    if (!has_start_) choose_pivot(group, acc);
  }

  /// Moments pass: from now on values are taken around the median of three of the tile's first ones, in rows
  /// of the warp that lie apart and are inside. Around an outlier all others would lose their digits: one
  /// value of x reaches neighbours alone.
  __device__ __forceinline__ void choose_pivot(const FewGroupParams& group, Accumulators& acc) {
    const int half = half_inside(group);
    const unsigned lanes = __ballot_sync(~0u, half >= 0);
    if (lanes == 0) return;
    has_start_ = true;
    const int first = __ffs(int(lanes)) - 1, last = 28 - __clz(int(lanes));
    const int middle = (first + last) / 8 * 4, between = middle + __ffs(int(lanes >> middle)) - 1;
    // Lanes of the three rows, a byte each: a shuffle takes the last five bits.
    unsigned from = unsigned(first | between << 8 | last << 16) + threadIdx.x % 4 * 0x10101u;
    __syncwarp();  // all have read what is replaced
                   // One channel at a time: registers are short beside the accumulators.
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      float value = acc.at[0][0][i / 2][i % 2];
#pragma unroll
      for (int other = 1; other < 2 * Traits::ROW_TILES; ++other) {
        // By predicate: the compiler would index accumulators, in local memory.
        asm("{.reg .pred p; setp.eq.s32 p, %2, %3; selp.f32 %0, %1, %0, p;}"
            : "+f"(value)
            : "f"(acc.at[0][other / 2][i / 2][other % 2 * 2 + i % 2]), "r"(half), "r"(other));
      }
      asm volatile("" : "+r"(from));
      const float a = __shfl_sync(~0u, value, int(from)), b = __shfl_sync(~0u, value, int(from >> 8)),
                  c = __shfl_sync(~0u, value, int(from >> 16));
      const float median = fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
      const float pivot = fabsf(median) < kInfinity ? median : 0.f;  // sums around infinity would be NaN
      if (int(threadIdx.x) % 32 < 4) starts_[run_ + i] -= pivot;
    }
    __syncwarp();
    float pivot[Traits::RUN];
    read_pivot(pivot);
    for_each(acc, [&](float v, int i) { return v - pivot[i]; });
  }

  /// Of the thread's rows, 8 from one to the next, one where one of a group's phases is inside: in the warp's
  /// first lanes the first, in its last ones the last. -1 where there is none.
  __device__ __forceinline__ int half_inside(const FewGroupParams& group) const {
    const int wanted = int(threadIdx.x) % 32 * Traits::ROW_TILES / 16;
    if (whole_) return wanted;
    int half = -1;
#pragma unroll
    for (int i = 0; i < 2 * Traits::ROW_TILES; ++i) {
      if (inside_of(group, rows_[first_row_ + 8 * i].y).count() && (half < 0 || i <= wanted)) half = i;
    }
    return half;
  }

  /// Output pass: acc = before(conv + bias), less the mean where there is a table.
  __device__ __forceinline__ void activate_before(Accumulators& acc) const {
    const Activation kind = params_.before.kind;
    if (params_.table && kind == Activation::kNone) return;
    float rest[Traits::RUN];
    read_channels(kRest, rest);
    if (params_.table && kind == Activation::kRelu) {
      for_each(acc, [&](float v, int i) { return max_or_nan(v, -rest[i]); });
      return;
    }
    for_each(acc, [&](float v, int i) { return v + rest[i]; });
    if (kind != Activation::kNone) activate(kind, acc);
    if (params_.table) for_each(acc, [&](float v, int i) { return v - rest[i]; });
  }

  __device__ __forceinline__ void activate(Activation kind, Accumulators& acc) const {
    if (kind == Activation::kRelu) {
      for_each(acc, [](float v, int) { return max_or_nan(v, 0.f); });
      return;
    }
    float parameter[Traits::RUN];
    read_channels(kParameter, parameter);
    with_activation(kind, [&](auto activation) {
      if constexpr (std::is_same_v<decltype(activation), ReluActivation>) return;
      for_each(acc, [&](float v, int i) { return activation.value(v, parameter[i]); });
    });
  }

  __device__ __forceinline__ void normalize(Accumulators& acc) const {
    float scale[Traits::RUN], shift[Traits::RUN];
    read_channels(kScale, scale), read_channels(kShift, shift);
    for_each(acc, [&](float v, int i) { return fmaf(v, scale[i], shift[i]); });
  }

  __device__ __forceinline__ void put(const FewGroupParams& group, const Accumulators& acc) const {
    stage_.put(group, acc, run_, [&](int row, int half) {
      const int2 at = rows_[first_row_ + 16 * row + 8 * half];
      return make_int2(at.x, whole_ ? Traits::PAIRED : inside_of(group, at.y).count());
    });
  }

  __device__ __forceinline__ void store(const FewGroupParams& group, const Accumulators& acc) const {
    const int first = first_channel_ + run_;
    T* const y = static_cast<T*>(params_.y) + sample_ * params_.y_sample + first_output_ +
                 std::int64_t(first) * params_.y_channel;
    const int channels = few_end_channel(params_) - first;  // from the thread's first on
    if (!params_.channels_first && params_.store_values > 1) {
      if (channels <= 0) return;
      T* const to = y + group.y_offset;
      if (params_.store_values == Traits::RUN) return store_runs<Traits::RUN>(group, acc, channels, to);
      if constexpr (Traits::RUN > 4) {
        if (params_.store_values == 4) return store_runs<4>(group, acc, channels, to);
      }
      if constexpr (Traits::RUN > 2) store_runs<2>(group, acc, channels, to);
      return;
    }
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 at = rows_[first_row_ + 16 * row + 8 * half];
        const int phases = inside_of(group, at.y).count();
        T* const to = y + (at.x + group.y_offset);
        if (params_.channels_first) {
          store_planes(acc, row, half, phases, channels, to);
        } else {
          store_values(acc, row, half, phases, channels, to);
        }
      }
    }
  }

  /// y [N,Z,P,Q,K], in runs of kRun channels, which are whole and aligned.
  /// \param channels from the thread's first on, at least 1
  /// \param y        of the thread's channels and of the group's first phase
  template <int kRun>
  __device__ __forceinline__ void store_runs(const FewGroupParams& group, const Accumulators& acc,
                                             int channels, T* y) const {
    // In bytes, and kept so: a multiply-add makes an address of each.
    std::uint64_t phases[2] = {reinterpret_cast<std::uint64_t>(y),
                               reinterpret_cast<std::uint64_t>(y + params_.y_position)};
    asm volatile("" : "+l"(phases[0]), "+l"(phases[1]));
#pragma unroll
    for (int row = 0; row < Traits::ROW_TILES; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 at = rows_[first_row_ + 16 * row + 8 * half];
        const Inside inside = inside_of(group, at.y);
#pragma unroll
        for (int phase = 0; phase < Traits::PAIRED; ++phase) {
          const std::uint64_t to = phases[phase] + std::uint64_t(std::uint32_t(at.x)) * sizeof(T);
          const bool stores = phase == 0 ? inside.first : inside.second;
#pragma unroll
          for (int run = 0; run < Traits::RUN; run += kRun) {
            float values[kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
              values[i] = acc.at[phase][row][(run + i) / 2][2 * half + i % 2];
            }
            store_run(reinterpret_cast<T*>(to) + run, values, stores && (run == 0 || run < channels));
          }
        }
      }
    }
  }

  /// y [N,Z,P,Q,K], value by value.
  __device__ __forceinline__ void store_values(const Accumulators& acc, int row, int half, int phases,
                                               int channels, T* to) const {
#pragma unroll
    for (int phase = 0; phase < Traits::PAIRED; ++phase) {
#pragma unroll
      for (int i = 0; i < Traits::RUN; ++i) {
        const float value = acc.at[phase][row][i / 2][2 * half + i % 2];
        if (phase < phases && i < channels) to[phase * params_.y_position + i] = from_stat<T>(value);
      }
    }
  }

  /// y [N,K,Z,P,Q].
  __device__ __forceinline__ void store_planes(const Accumulators& acc, int row, int half, int phases,
                                               int channels, T* to) const {
    if constexpr (Traits::PAIRED == 2) {
      if (params_.store_values != 2) return store_odd_planes(acc, row, half, phases, channels, to);
    }
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
        store_run(position, values);
      } else {
        *position = from_stat<T>(values[0]);
      }
    }
  }

  /// The same where pairs of positions may begin between two boundaries of pairs: then a lane stores its
  /// second value with the first one of the lane whose positions follow, and what is left over by itself. By
  /// all lanes of a warp.
  __device__ __forceinline__ void store_odd_planes(const Accumulators& acc, int row, int half, int phases,
                                                   int channels, T* to) const {
    constexpr int kNext = 4;  // lanes to the next position
    const int lane = int(threadIdx.x) % 32;
    const unsigned place = unsigned(reinterpret_cast<std::uintptr_t>(to) / sizeof(T));
    const unsigned next_place = __shfl_down_sync(~0u, place, kNext);
    const int next_phases = __shfl_down_sync(~0u, phases, kNext);
    const bool follows = lane < 32 - kNext && phases == 2 && next_phases > 0 && next_place == place + 2;
    const bool is_taken = __shfl_up_sync(~0u, int(follows), kNext) != 0 && lane >= kNext;
#pragma unroll
    for (int i = 0; i < Traits::RUN; ++i) {
      const float first = acc.at[0][row][i / 2][2 * half + i % 2];
      const float second = acc.at[1][row][i / 2][2 * half + i % 2];
      const float next = __shfl_down_sync(~0u, first, kNext);
      if (i >= channels || phases <= 0) continue;
      T* const position = to + std::int64_t(i) * params_.y_channel;
      const bool odd = (place + unsigned(i) * unsigned(params_.y_channel)) % 2 != 0;
      const float pair[2] = {odd ? second : first, odd ? next : second};
      if (odd ? follows : phases == 2) store_run(position + odd, pair);
      if (odd ? !is_taken : phases == 1) position[0] = from_stat<T>(first);
      if (odd && phases == 2 && !follows) position[1] = from_stat<T>(second);
    }
  }

  const FewParams& params_;
  int2* const rows_;       // [rows] place of the first output, and counts of phases, as `locate` says
  float* const channels_;  // [kChannelParameters][COLUMNS]
  float* const starts_;    // [COLUMNS] bias; in the moments pass this warp's, less its pivots
  const int first_channel_;
  const int first_row_;  // the thread's
  const int run_;        // its first column
  int sample_ = -1;
  bool inside_ = false;            // of the tile, all outputs are
  std::int64_t first_output_ = 0;  // elements from the sample's first to the tile's
  bool whole_ = false;             // of the tile, all rows and phases of this warp's are inside
  bool has_start_ = false;         // moments pass: of this sample
  FewMoments<Traits> moments_;
  FewOutputStage<Traits> stage_;
};

}  // namespace upconv3d::cuda
