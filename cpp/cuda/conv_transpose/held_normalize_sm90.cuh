// SPDX-License-Identifier: Apache-2.0
/// \file
/// What conv_transpose_held_sm90 does when all blocks have written their partial moments: it merges those of
/// its tiles' norm groups, and normalizes what it holds.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/after_sm90.cuh"
#include "cuda/conv_transpose/held_params_sm90.cuh"
#include "cuda/conv_transpose/staged_tile_sm90.cuh"

namespace upconv3d::cuda {

/// The least power of two that is not below `count`, 1 or more.
CUTLASS_DEVICE int next_power_of_two(int count) {
  return count > 1 ? 1 << (32 - __clz(count - 1)) : 1;
}

CUTLASS_DEVICE void load_four(float const* from, float* to) {
  float4 const four = *reinterpret_cast<float4 const*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

/// Waits for the other warps of the warpgroup.
CUTLASS_DEVICE void sync_held_warpgroup() {
  cutlass::arch::NamedBarrier::sync(128, 0);
}

/// A tile as rows of y: a thread has the same 16 bytes of every few of them,
/// whether they lie in shared memory or in y.
template <class Traits>
class HeldRows {
 public:
  using Output = typename Traits::Output;
  static constexpr int kVector = 16 / int(sizeof(Output));
  static constexpr int kChunks = 64 / kVector;  // of a row
  static constexpr int kRows = 128 / kChunks;   // that the warpgroup takes at once
  // Of a thread, side by side. Code comes cold from memory, at some 14 cycles an instruction: no more than it
  // takes for loads not to wait for each other.
  static constexpr int kBatch = 2;
  static_assert(Traits::BLK_POS % (kRows * kBatch) == 0);

  CUTLASS_DEVICE HeldRows(HeldParams<Traits> const& params, HeldSlab const& slab, HeldTile const& tile)
      : params_(params), slab_(slab), position_(tile.position) {
    int const thread = threadIdx.x % 128;
    chunk_ = thread % kChunks;
    row_ = thread / kChunks;
    channel_ = tile.channel + chunk_ * kVector;
    // K is a multiple of kVector.
    valid_ = channel_ < params.k ? min(slab_.positions - tile.position, Traits::BLK_POS) : 0;
    y_ = params.y + std::int64_t(tile.n) * params.positions * params.k + channel_;
  }

  /// First of the thread's kVector channels.
  CUTLASS_DEVICE int channel() const { return channel_; }

  /// What is held, to y, as it is; then its room is free. The whole warpgroup calls it.
  CUTLASS_DEVICE void move_to_y(char const* from) const {
    sync_held_warpgroup();
    for_each_batch([&](int const(&row)[kBatch]) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] < valid_) *at(row[i]) = *held(from, row[i]);
      }
    });
    sync_held_warpgroup();
  }

  /// y = function(what is held, as floats), Output of each.
  /// \param from where it is held, or null: in y
  template <class Function>
  CUTLASS_DEVICE void transform(char const* from, Function const& function) const {
    for_each_batch([&](int const(&row)[kBatch]) {
      uint4 in[kBatch];
      uint4* to[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] >= valid_) continue;
        to[i] = at(row[i]);
        in[i] = from ? *held(from, row[i]) : *to[i];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] >= valid_) continue;
        auto const& values = reinterpret_cast<cutlass::Array<Output, kVector> const&>(in[i]);
        auto const out = function(cutlass::NumericArrayConverter<float, Output, kVector>{}(values));
        *to[i] = reinterpret_cast<uint4 const&>(out);
      }
    });
  }

 private:
  template <class Visit>
  CUTLASS_DEVICE void for_each_batch(Visit const& visit) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = row_; first < valid_; first += kRows * kBatch) {
      int row[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) row[i] = first + i * kRows;
      visit(row);
    }
  }
  CUTLASS_DEVICE uint4* at(int row) const {
    std::int64_t const pixel = slab_.pixel(params_.out, position_ + row);
    return reinterpret_cast<uint4*>(y_ + pixel * params_.k);
  }
  CUTLASS_DEVICE uint4 const* held(char const* from, int row) const {
    return reinterpret_cast<uint4 const*>(from + staged_chunk<Output>(row, chunk_));
  }

  HeldParams<Traits> const& params_;
  HeldSlab const& slab_;
  int position_, chunk_, row_, channel_, valid_;
  Output* y_;
};

/// By `team` threads, a power of two of a warpgroup's: the moments of a norm group of sample n, merged, as
/// all of them get them. The whole warpgroup calls it.
/// \param member of its team
template <class Traits>
CUTLASS_DEVICE HeldRow merge_held_group(HeldParams<Traits> const& params, HeldControl<Traits>& control, int n,
                                        int group, int team, int member) {
  constexpr int kLoads = 4;  // on their way at once
  int const per_moment = params.group_granules.divisor, total = params.moments * per_moment;
  int const granules = params.k >> params.granule_shift;
  float4 const* const part =
      params.part + std::int64_t(n) * params.moments * granules + std::int64_t(group) * per_moment;
  auto const load = [&](int index) {
    int sub;
    int const moment = params.group_granules.divmod(sub, index);
    return __ldcg(part + std::int64_t(moment) * granules + sub);
  };
  // Sums of count*mean and M2 + count*mean^2, means shifted by the first one, in double: 29 bits more than
  // what they sum, so the shift need not be good.
  double const pivot = load(0).x;
  double sum = 0, squares = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int first = member; first < total; first += kLoads * team) {
    float4 of[kLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      bool const is_inside = first + i * team < total;
      of[i] = load(is_inside ? first + i * team : 0);
      if (!is_inside) of[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      double const weighted = of[i].z == 0.f ? 0.0 : of[i].z * (of[i].x - pivot);
      sum += weighted;
      squares += of[i].y + (of[i].z == 0.f ? 0.0 : weighted * (of[i].x - pivot));
    }
  }
  CUTLASS_PRAGMA_NO_UNROLL
  for (int mask = min(team, 32) / 2; mask > 0; mask /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    squares += __shfl_xor_sync(0xffffffffu, squares, mask);
  }
  if (team > 32) {
    double (&warps)[4][2] = control.sums;
    int const warp = threadIdx.x % 128 / 32, first_warp = warp / (team / 32) * (team / 32);
    sync_held_warpgroup();  // the sums of the group before have been read
    if (threadIdx.x % 32 == 0) warps[warp][0] = sum, warps[warp][1] = squares;
    sync_held_warpgroup();
    sum = squares = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = first_warp; i < first_warp + team / 32; ++i) {
      sum += warps[i][0];
      squares += warps[i][1];
    }
  }
  double const shift = sum * params.inverse_count, exact = pivot + shift;
  double const m2 = squares - sum * shift;
  double const variance = m2 < 0 ? 0.0 : m2 * params.inverse_count;  // NaN stays NaN
  float const mean = float(exact);
  return make_float4(mean, float(exact - mean), rsqrtf(float(variance + params.eps)), 0.f);
}

/// By all blocks' warpgroups: params.table, each group once.
template <class Traits>
CUTLASS_DEVICE void write_held_table(HeldParams<Traits> const& params, HeldControl<Traits>& control) {
  int const warpgroups = gridDim.x, thread = threadIdx.x % 128;
  // A warpgroup for each, or a warp where they are many.
  int const team = params.groups_of_all > warpgroups ? 32 : 128, teams = warpgroups * (128 / team);
  int const first = blockIdx.x * (128 / team) + thread / team;
  int const rounds = (params.groups_of_all + teams - 1) / teams;
  for (int round = 0; round < rounds; ++round) {
    int const index = first + round * teams, at = min(index, params.groups_of_all - 1);
    int const n = at / params.groups;
    HeldRow const row = merge_held_group(params, control, n, at - n * params.groups, team, thread % team);
    if (index == at && thread % team == 0) params.table[index] = row;
  }
}

/// By a warpgroup: what its 64 channels from `channel0` on of sample n are normalized by, into control.maps:
/// y = v * scale + shift. Values of 16 bit are rounded so much more coarsely than mean*scale that one step
/// will do.
template <class Traits>
CUTLASS_DEVICE void map_held_channels(HeldParams<Traits> const& params, HeldControl<Traits>& control, int n,
                                      int channel0) {
  int const first_group = params.group_channels.div(channel0), thread = threadIdx.x % 128;
  HeldRow const* rows = control.rows;
  if (params.table != nullptr) {
    rows = params.table + std::int64_t(n) * params.groups + first_group;
  } else {
    int const last_group = params.group_channels.div(min(channel0 + 64, params.k) - 1);
    int const groups = last_group - first_group + 1;
    int const team = 128 / next_power_of_two(groups);  // 2 to 128
    int const group = min(thread / team, groups - 1);
    HeldRow const row = merge_held_group(params, control, n, first_group + group, team, thread % team);
    if (thread / team < groups && thread % team == 0) control.rows[group] = row;
  }
  sync_held_warpgroup();  // and the maps of the tile before have been read
  int const channel = channel0 + thread;
  if (thread < 64 && channel < params.k) {
    HeldRow const row = rows[params.group_channels.div(channel) - first_group];
    float const scale = (params.gamma ? float(params.gamma[channel]) : 1.f) * row.z;
    float const beta = params.beta ? float(params.beta[channel]) : 0.f;
    float (&maps)[2][64] = control.maps;
    maps[0][thread] = scale;
    maps[1][thread] = beta - row.x * scale - row.y * scale;
  }
  sync_held_warpgroup();
}

/// By a warpgroup, its channels of all tiles.
template <class After, class Traits>
CUTLASS_DEVICE void normalize_held_tiles_before(HeldParams<Traits> const& params,
                                                HeldShared<Traits> const& shared) {
  using Output = typename Traits::Output;
  constexpr int kVector = HeldRows<Traits>::kVector;
  int mapped_n = -1, mapped_channel = -1;
  float scale[kVector], shift[kVector], slope[kVector] = {};
  for_each_held_tile(params, [&](int round, HeldTile const& tile, bool is_last) {
    int const channel0 = tile.channel;
    HeldRows<Traits> const rows(params, params.slabs[tile.slab], tile);
    if (tile.n != mapped_n || channel0 != mapped_channel) {
      mapped_n = tile.n;
      mapped_channel = channel0;
      map_held_channels(params, *shared.control, tile.n, channel0);
      float const(&maps)[2][64] = shared.control->maps;
      int const first = rows.channel() - channel0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; i += 4) {
        load_four(maps[0] + first + i, scale + i);
        load_four(maps[1] + first + i, shift + i);
      }
      if constexpr (std::is_same_v<After, SlopeActivation>) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) {
          slope[i] = activation_parameter<Output>(params.after, min(rows.channel() + i, params.k - 1));
        }
      }
    }
    bool const waits_in_y = round >= params.slots - 1 && !is_last;
    rows.transform(waits_in_y ? nullptr : shared.tile(params, round),
                   [&](cutlass::Array<float, kVector> values) {
                     CUTLASS_PRAGMA_UNROLL
                     for (int i = 0; i < kVector; ++i) values[i] = values[i] * scale[i] + shift[i];
                     return activated<After, Output>(values, slope);
                   });
  });
}

template <class Traits>
CUTLASS_DEVICE void normalize_held_tiles(HeldParams<Traits> const& params, HeldShared<Traits> const& shared) {
  Activation const after = params.after.kind;
  if (after == Activation::kNone) {
    normalize_held_tiles_before<NoActivation>(params, shared);
  } else if (after == Activation::kRelu) {
    normalize_held_tiles_before<ReluActivation>(params, shared);
  } else {
    normalize_held_tiles_before<SlopeActivation>(params, shared);
  }
}

}  // namespace upconv3d::cuda
