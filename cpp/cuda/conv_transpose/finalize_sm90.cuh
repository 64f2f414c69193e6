// SPDX-License-Identifier: Apache-2.0
/// \file
/// GroupNorm's moments inside conv_transpose_relu_group_norm_sm90: from the partial ones of a sample's tiles
/// to what normalizes its channels.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"

#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"

namespace upconv3d::cuda {

CUTLASS_DEVICE int load_acquire(int const* counter) {
  int value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

/// One more at `counter`, after everything that this warp wrote. The whole warp calls it.
CUTLASS_DEVICE void arrive_release(int* counter) {
  __syncwarp();  // orders the other lanes' writes before lane 0's release, which thus covers them
  if (threadIdx.x % 32 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
  }
}

/// The same, and kSampleMerged more by whoever is the `last`-th: what the others wrote comes before that too.
CUTLASS_DEVICE void arrive_merged(int* counter, int last) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  if (before + 1 == last) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(kSampleMerged) : "memory");
  }
}

/// Polling a counter in L2 more often than this would take bandwidth from those who are being waited for.
inline constexpr unsigned kPollNanoseconds = 200;

/// y = (v - mean)*scale + shift of a channel, v = stored value * step. Where Stored has 16 bit, who
/// normalizes adds -mean*scale to shift.
template <class Stored>
struct ChannelMapSm90 {
  float mean, scale, shift;

  CUTLASS_DEVICE float operator()(float v) const {
    // Values of 16 bit are rounded so much more coarsely than mean*scale that one step will do.
    return sizeof(Stored) == 2 ? v * scale + shift : (v - mean) * scale + shift;
  }
};

/// \param row of table
template <class Traits>
CUTLASS_DEVICE ChannelMapSm90<typename Traits::Stored> channel_map(KernelParams<Traits> const& params,
                                                                   float4 const& row, int channel) {
  float const gamma = params.gamma ? float(params.gamma[channel]) : 1.f;
  float const beta = params.beta ? float(params.beta[channel]) : 0.f;
  ChannelMapSm90<typename Traits::Stored> map;
  map.mean = row.x;
  map.scale = gamma * row.z;
  map.shift = beta - row.y * map.scale;
  return map;
}

/// A block's share of merging: of the steps of all samples, one after the other, every tile_blocks-th. A
/// step merges the partial moments of some groups, or a part of a group's; then the last steps of a sample
/// merge the parts. Steps wait for earlier ones alone, so all of them come to their turn.
template <class Traits>
class GroupFinalizer {
 public:
  CUTLASS_DEVICE GroupFinalizer(KernelParams<Traits> const& params, ControlStorage<Traits> const& control)
      : params_(params),
        control_(control),
        next_step_(int(blockIdx.x) < params.tile_blocks ? int(blockIdx.x) : all_steps()) {}

  CUTLASS_DEVICE bool done() const { return next_step_ >= all_steps(); }

  /// Whether the block's last tile is handed out.
  CUTLASS_DEVICE bool hurries() const {
    int const tile_sample = *static_cast<int const volatile*>(&control_.tile_sample);
    return __shfl_sync(0xffffffffu, tile_sample, 0) == INT_MAX;
  }

  /// Takes all steps.
  CUTLASS_DEVICE void run() {
    while (!done()) {
      if (!step()) __nanosleep(kPollNanoseconds);
    }
  }

  /// Takes this block's next step of merging, if what it merges is there. Returns whether it did.
  CUTLASS_DEVICE bool step() {
    if (done()) return false;
    int const sample = next_step_ / params_.merge_steps;
    // A sample of which this block computes a tile has not arrived: memory need not be asked.
    int const tile_sample = *static_cast<int const volatile*>(&control_.tile_sample);
    if (__shfl_sync(0xffffffffu, tile_sample, 0) <= sample) return false;
    int const of_sample = next_step_ - sample * params_.merge_steps;
    int const part_steps = params_.merge_parts > 1 ? params_.groups * params_.merge_parts : 0;
    bool const of_parts = part_steps > 0 && of_sample >= part_steps;
    int const* const counter = (of_parts ? params_.finalized : params_.arrivals) + sample;
    int const wanted = of_parts ? part_steps : 2 * Traits::STAGE_ROUNDS * params_.tiles_per_sample.divisor;
    if (__shfl_sync(0xffffffffu, load_acquire(counter), 0) < wanted) return false;
    __syncwarp();
    if (of_parts) {
      finalize_parts(sample, of_sample - part_steps);
    } else {
      params_.merge_lanes == 1 ? finalize<1>(sample, of_sample) : finalize<32>(sample, of_sample);
    }
    arrive_merged(params_.finalized + sample, params_.merge_steps);
    next_step_ += params_.tile_blocks;
    return true;
  }

 private:
  CUTLASS_DEVICE int all_steps() const { return params_.samples * params_.merge_steps; }

  /// Positions behind partial moment `moment`; `slab` is a slab that begins at or before it.
  CUTLASS_DEVICE int moment_positions(int moment, int& slab) const {
    while (slab + 1 < params_.num_slabs && moment >= control_.first_moment[slab + 1]) ++slab;
    int const end = slab + 1 < params_.num_slabs ? control_.first_moment[slab + 1] : params_.moments;
    return moment + 1 < end ? Traits::STAGED_POS : control_.last_count[slab];
  }
  /// Whether a slab ends amid a partial moment, which then stands for fewer positions than the others.
  CUTLASS_DEVICE bool counts_differ() const {
    static_assert(kMaxSlabs <= 32, "a lane looks at a slab");
    int const lane = slab_lane<Traits>();
    return __any_sync(0xffffffffu,
                      lane < params_.num_slabs && control_.last_count[lane] != Traits::STAGED_POS);
  }

  /// Partial moments of a group, [moments][granules of the group] of part.
  struct Partials {
    float2* first;
    int row;  // K/granule
    int total;
    int part;  // how many a part of them has

    CUTLASS_DEVICE float2* at(cutlass::FastDivmod const& granules, int index) const {
      int sub;
      int const moment = granules.divmod(sub, index);
      return first + std::int64_t(moment) * row + sub;
    }
  };
  CUTLASS_DEVICE Partials partials(int sample, int group) const {
    int const per_moment = params_.group_granules.divisor;
    int const row = params_.k >> params_.granule_shift;
    int const total = params_.moments * per_moment;
    return {params_.part + std::int64_t(sample) * params_.moments * row + group * per_moment, row, total,
            cutlass::ceil_div(total, params_.merge_parts)};
  }

  /// table[sample, group] of a step's groups, or a part of a group's moments, from part: sums of count,
  /// count*mean and M2 + count*mean^2, means shifted by the first one, in double: 29 bits more than what they
  /// sum, so the shift need not be good.
  /// \tparam LANES that merge one group's moments
  template <int LANES>
  CUTLASS_DEVICE void finalize(int sample, int step) const {
    constexpr int kLoads = 8;  // in flight per lane
    int const lane = threadIdx.x % LANES;
    int const group_step = LANES == 32 ? step / params_.merge_parts : step;
    // Of the last step, lanes beyond the last group merge that one too.
    int const group = min((group_step * 32 + int(threadIdx.x % 32)) / LANES, params_.groups - 1);
    Partials const from = partials(sample, group);
    int const begin = LANES == 32 ? (step - group_step * params_.merge_parts) * from.part : 0;
    int const end = min(begin + from.part, from.total);
    float const granule = float(1 << params_.granule_shift);
    double pivot = 0, count = 0, sum = 0, sum_squares = 0;
    int slab = 0;
    auto const merge = [&](auto equal_counts) {
      for (int first = begin + lane; first - lane < end; first += LANES * kLoads) {
        float2 pair[kLoads];
        float weight[kLoads];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int const index = min(first + LANES * i, end - 1);
          int sub, positions = Traits::STAGED_POS;
          int const moment = params_.group_granules.divmod(sub, index);
          pair[i] = __ldcg(from.first + std::int64_t(moment) * from.row + sub);
          if constexpr (!equal_counts) positions = moment_positions(moment, slab);
          weight[i] = first + LANES * i < end ? granule * float(positions) : 0.f;
        }
        if (first - lane == begin) {
          pivot = LANES == 32 ? __shfl_sync(0xffffffffu, pair[0].x, 0) : pair[0].x;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (weight[i] == 0.f) continue;
          double const delta = pair[i].x - pivot;
          count += weight[i];
          sum += weight[i] * delta;
          sum_squares += pair[i].y + weight[i] * delta * delta;
        }
      }
    };
    // Most problems need a quarter of the code, which counts here: what the last sample waits for was
    // executed long ago, if ever, and has to be fetched.
    // Beside tiles that are stored in float32 both copies do not fit the registers.
    if constexpr (sizeof(typename Traits::Stored) == 4) {
      merge(std::false_type{});
    } else {
      counts_differ() ? merge(std::false_type{}) : merge(std::true_type{});
    }
    add_lanes<LANES>(count, sum, sum_squares);
    double const mean_shift = sum / count;
    double const m2 = sum_squares - sum * mean_shift;
    if (LANES == 32 && params_.merge_parts > 1) {
      __syncwarp();  // all lanes have read what is overwritten
      if (lane == 0) write_part(from, begin, pivot + mean_shift, m2 < 0 ? 0.0 : m2, count);
      return;
    }
    write_table<LANES>(sample, group, pivot + mean_shift, m2, count);
  }

  /// table[sample, group] from the group's parts.
  CUTLASS_DEVICE void finalize_parts(int sample, int group) const {
    int const lane = threadIdx.x % 32;
    Partials const from = partials(sample, group);
    double part_mean = 0, part_m2 = 0, count = 0;
    if (lane < params_.merge_parts) {
      auto const load = [&](int i) {
        return __ldcg(reinterpret_cast<double*>(from.at(params_.group_granules, lane * from.part + i)));
      };
      part_mean = load(0);
      part_m2 = load(1);
      count = load(2);
    }
    double const pivot = __shfl_sync(0xffffffffu, part_mean, 0);
    double const delta = count > 0 ? part_mean - pivot : 0.0;
    double sum = count * delta, sum_squares = part_m2 + count * delta * delta;
    add_lanes<32>(count, sum, sum_squares);
    double const mean_shift = sum / count;
    write_table<32>(sample, group, pivot + mean_shift, sum_squares - sum * mean_shift, count);
  }

  /// A part's moments, in double, in place of its first three partial ones, which nobody needs any more.
  CUTLASS_DEVICE void write_part(Partials const& of, int begin, double mean, double m2, double count) const {
    auto const store = [&](int i, double value) {
      __stcg(reinterpret_cast<double*>(of.at(params_.group_granules, begin + i)), value);
    };
    store(0, mean);
    store(1, m2);
    store(2, count);
  }

  template <int LANES>
  CUTLASS_DEVICE static void add_lanes(double& count, double& sum, double& sum_squares) {
    CUTLASS_PRAGMA_UNROLL
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
      count += __shfl_xor_sync(0xffffffffu, count, distance);
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      sum_squares += __shfl_xor_sync(0xffffffffu, sum_squares, distance);
    }
  }

  /// table[sample, group], or the group's channels of channel_table, by LANES lanes.
  template <int LANES>
  CUTLASS_DEVICE void write_table(int sample, int group, double mean, double m2, double count) const {
    int const lane = threadIdx.x % LANES;
    double const variance = m2 < 0 ? 0.0 : m2 / count;  // NaN stays NaN
    float const mean_float = float(mean);
    float4 const row_of_table =
        make_float4(mean_float, float(mean - mean_float), float(1.0 / sqrt(variance + params_.eps)), 0.f);
    if (params_.table != nullptr && lane == 0) {
      params_.table[std::int64_t(sample) * params_.groups + group] = row_of_table;
    }
    if (params_.normalizes) return;
    std::int64_t const plane = std::int64_t(params_.samples) * params_.k;
    int const channels = params_.group_channels.divisor;
    for (int i = lane; i < channels; i += LANES) {
      int const channel = group * channels + i;
      auto const map = channel_map(params_, row_of_table, channel);
      float* const to = params_.channel_table + std::int64_t(sample) * params_.k + channel;
      to[0] = map.mean;
      to[plane] = map.scale;
      to[2 * plane] = map.shift;
    }
  }

  KernelParams<Traits> const& params_;
  ControlStorage<Traits> const& control_;
  int next_step_;
};

/// Of at most this many groups each has a warp of its own to merge its moments.
inline constexpr int kWarpMergedGroups = 16;

/// Parts that a group's partial moments are merged in, by as many warps at once, before another warp merges
/// the parts: nothing hides the last sample's merging, and one warp takes 2.5 us for each 256 partials.
inline int merge_parts(const Problem& problem, std::int64_t partials) {
  constexpr std::int64_t kPartials = 128;  // of a part, where the groups leave enough warps
  // From which on it was measured quicker: at 2200 by 6 us of 260, while at 300 a second step cost 3 of 70.
  constexpr std::int64_t kLeast = 1536;
  constexpr std::int64_t kWarps = 128;  // about one per multiprocessor
  constexpr std::int64_t kMaxParts = 16;
  constexpr std::int64_t kMaxSamples = 1 << 16;  // keeps the steps of all samples within int
  if (partials < kLeast || problem.n > kMaxSamples) return 1;
  const std::int64_t parts = std::min(ceil_div(partials, kPartials), kWarps / problem.num_groups);
  return static_cast<int>(std::clamp<std::int64_t>(parts, 1, kMaxParts));
}

/// How GroupNorm's moments are merged; after the slabs, which count them.
template <class Traits>
void fill_group_norm(const Problem& problem, KernelParams<Traits>& to) {
  to.eps = problem.eps;
  to.granule_shift = moment_granule_shift(problem);
  to.groups = static_cast<int>(problem.num_groups);
  const std::int64_t group_channels = problem.k / problem.num_groups;
  to.group_channels = cutlass::FastDivmod(static_cast<int>(group_channels));
  to.group_granules = cutlass::FastDivmod(static_cast<int>(group_channels >> to.granule_shift));
  // A lane each for groups of few partial moments: of many such groups, or of samples of few tiles, of which
  // there may be many, a warp each would take long.
  const std::int64_t partials = std::int64_t{to.moments} * to.group_granules.divisor;
  const std::int64_t warps = std::min<std::int64_t>(kWarpMergedGroups, to.tiles_per_sample.divisor);
  to.merge_lanes = partials <= 32 && problem.num_groups > warps ? 1 : 32;
  to.merge_parts = merge_parts(problem, partials);
  to.merge_steps = to.merge_parts > 1 ? to.groups * (to.merge_parts + 1)
                                      : static_cast<int>(ceil_div(problem.num_groups * to.merge_lanes, 32));
}

}  // namespace upconv3d::cuda
