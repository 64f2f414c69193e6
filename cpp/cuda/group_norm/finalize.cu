// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_finalize: forward stage 3 of 4.
///
///   part  [N,tiles,K,2]  stat   (mean, M2) per sample, tile and channel
///   table [3,N,K]        stat   mean, scale, shift: y = (v - mean)*scale + shift
///
/// A group's moments are the merged moments of tiles*(K/G) partials, all in double: per thread in chunks that
/// stay in registers, then across the team as one many-way merge, mean = sum(count*mean)/sum(count) first
/// and M2 = sum(M2 + count*(mean_i - mean)^2) second. Counts follow from the tile's index. Each order is
/// fixed.
///
/// A team of threads per (sample, group): a warp where partials are few, else a block, where that is quick;
/// else a group's partials are cut into segments, one block each, and a second kernel merges the segments'
/// moments, kept in `scratch`.
#include <algorithm>
#include <cstdint>

#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/launch.cuh"

namespace upconv3d::cuda {
namespace {

/// Threads of a block: a group of the headline shape (158 tiles x 16 channels) is one chunk of loads.
constexpr int kThreadsLarge = 512;

/// Threads where a group has few partials, as with one group per channel: small blocks share a
/// multiprocessor.
constexpr int kThreadsSmall = 128;

/// Threads where it has fewer, one chunk of them each: warps that wait for no others. (Of 128 samples of 32
/// groups blocks of 128 took 18 us.)
constexpr int kWarp = 32;

/// Partials that a thread loads before it uses the first: one trip to memory instead of eight.
constexpr int kChunk = 8;

/// Partials worth a block of their own: one chunk per thread.
constexpr std::int64_t kSegmentPartials = std::int64_t{kThreadsLarge} * kChunk;

/// Blocks beyond which more segments gain nothing: four for each multiprocessor of a large card.
constexpr std::int64_t kBlocksWanted = 512;

template <class T>
struct FinalizeArgs {
  GroupNormShape shape;
  std::int64_t channels;       // of a group, K/G
  std::int64_t segments;       // per group
  const Stat<T>* part;         // [N,tiles,K,2] stat
  const std::int32_t* counts;  // [tiles], or null: tile_positions each, the last one what is left
  const T* gamma;              // [K] T, or null
  const T* beta;               // [K] T, or null
  double eps;                  // activation units squared
  double* scratch;             // [N,G,segments,3] double, or null where segments is 1
  Stat<T>* table;              // [3,N,K] stat
  float4* groups;              // [N,G] mean, rest of the mean, rstd, unused; or null
};

struct DoubleMoments {
  double count = 0;
  double mean = 0;
  double m2 = 0;
};

/// Segments of a group's partials; 1 where one block per group fills the card or the group is small.
std::int64_t segments_of(const GroupNormShape& shape) {
  const std::int64_t partials = shape.tiles * (shape.k / shape.num_groups);
  const std::int64_t groups = std::max<std::int64_t>(shape.n * shape.num_groups, 1);
  return std::clamp<std::int64_t>(kBlocksWanted / groups, 1, ceil_div(partials, kSegmentPartials));
}

/// First partial of a segment; partials are numbered tile*channels + channel within a group.
template <class T>
__device__ __forceinline__ std::int64_t segment_begin(const FinalizeArgs<T>& args, std::int64_t segment) {
  const std::int64_t partials = args.shape.tiles * args.channels;
  const std::int64_t share = partials / args.segments, extra = partials - share * args.segments;
  return segment * share + min(segment, extra);
}

/// The share of thread `lane` of a team's in the partials [begin, end) of a group.
template <int kTeam, class T>
__device__ DoubleMoments merge_partials(const FinalizeArgs<T>& args, std::int64_t sample, std::int64_t group,
                                        std::int64_t begin, std::int64_t end, int lane) {
  using Pair = std::conditional_t<std::is_same_v<Stat<T>, double>, double2, float2>;
  const std::int64_t tiles = args.shape.tiles, k = args.shape.k;
  const Pair* part = reinterpret_cast<const Pair*>(args.part) + sample * tiles * k + group * args.channels;
  const double tile_count = static_cast<double>(args.shape.tile_positions);
  const double last_count =
      static_cast<double>(args.shape.positions - (tiles - 1) * args.shape.tile_positions);

  // The quotient is taken once; from there on tile and channel advance together.
  const std::int64_t step_tile = kTeam / args.channels, step_channel = kTeam - step_tile * args.channels;
  std::int64_t partial = begin + lane;
  std::int64_t tile = partial / args.channels, channel = partial - tile * args.channels;

  DoubleMoments own;
  while (partial < end) {
    Pair pair[kChunk];
    double count[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i, partial += kTeam) {
      const bool valid = partial < end;
      pair[i] = valid ? part[tile * k + channel] : Pair{};
      if (args.counts == nullptr) {
        count[i] = valid ? (tile == tiles - 1 ? last_count : tile_count) : 0.0;
      } else {
        count[i] = valid ? static_cast<double>(args.counts[tile]) : 0.0;
      }
      tile += step_tile;
      channel += step_channel;
      if (channel >= args.channels) {
        channel -= args.channels;
        ++tile;
      }
    }
    DoubleMoments chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk.count += count[i];
      chunk.mean += count[i] * pair[i].x;
    }
    chunk.mean /= chunk.count;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const double delta = pair[i].x - chunk.mean;
      chunk.m2 += pair[i].y + (count[i] * delta) * delta;
    }
    if (own.count == 0) {
      own = chunk;
      continue;
    }
    const double total = own.count + chunk.count, share = chunk.count / total, delta = chunk.mean - own.mean;
    own.mean += delta * share;
    own.m2 += chunk.m2 + (delta * own.count * share) * delta;
    own.count = total;
  }
  return own;
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

/// Sum over the team, the same bits in every thread. `warp_sums` [kTeam/32] double, shared, used once, where
/// the team is a block.
template <int kTeam>
__device__ __forceinline__ double team_sum(double value, double* warp_sums) {
  value = warp_sum(value);
  if constexpr (kTeam == kWarp) return value;
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % kWarp < kTeam / kWarp ? warp_sums[threadIdx.x % kWarp] : 0.0);
}

/// Merges the moments of a team's threads; every thread gets the result.
template <int kTeam>
__device__ __forceinline__ DoubleMoments merge_team(const DoubleMoments& own) {
  __shared__ double counts[kTeam / kWarp];
  __shared__ double mean_sums[kTeam / kWarp];
  __shared__ double m2_sums[kTeam / kWarp];
  DoubleMoments merged;
  merged.count = team_sum<kTeam>(own.count, counts);
  merged.mean = team_sum<kTeam>(own.count * own.mean, mean_sums) / merged.count;
  const double delta = own.mean - merged.mean;
  merged.m2 = team_sum<kTeam>(own.m2 + (own.count * delta) * delta, m2_sums);
  return merged;
}

/// Writes mean, scale and shift of the group's channels, as thread `lane` of its team.
template <int kTeam, class T>
__device__ __forceinline__ void write_table(const FinalizeArgs<T>& args, std::int64_t sample,
                                            std::int64_t group, const DoubleMoments& moments, int lane) {
  using S = Stat<T>;
  const double rstd = 1.0 / sqrt(moments.m2 / moments.count + args.eps);
  const S mean = static_cast<S>(moments.mean);
  const double mean_rest = moments.mean - static_cast<double>(mean);
  const std::int64_t plane = args.shape.n * args.shape.k;
  if (args.groups != nullptr && lane == 0) {
    args.groups[sample * args.shape.num_groups + group] = {
        static_cast<float>(mean), static_cast<float>(mean_rest), static_cast<float>(rstd), 0.f};
  }
  for (std::int64_t i = lane; i < args.channels; i += kTeam) {
    const std::int64_t channel = group * args.channels + i;
    const double gamma = args.gamma != nullptr ? static_cast<double>(to_stat(args.gamma[channel])) : 1.0;
    const double beta = args.beta != nullptr ? static_cast<double>(to_stat(args.beta[channel])) : 0.0;
    const double scale = gamma * rstd;
    S* to = args.table + sample * args.shape.k + channel;
    to[0] = mean;
    to[plane] = static_cast<S>(scale);
    to[2 * plane] = static_cast<S>(beta - mean_rest * scale);
  }
}

template <class T, int kTeam, int kThreads>
__global__ void __launch_bounds__(kThreads) group_norm_finalize_groups(const FinalizeArgs<T> args) {
  static_assert(kTeam == kWarp || kTeam == kThreads);
  let_next_begin();
  const std::int64_t sample_group = blockIdx.x * std::int64_t{kThreads / kTeam} + threadIdx.x / kTeam;
  if (sample_group >= args.shape.n * args.shape.num_groups) return;  // a warp of the last block
  const std::int64_t sample = sample_group / args.shape.num_groups,
                     group = sample_group - sample * args.shape.num_groups;
  const int lane = threadIdx.x % kTeam;
  const std::int64_t partials = args.shape.tiles * args.channels;
  const DoubleMoments own = merge_partials<kTeam>(args, sample, group, 0, partials, lane);
  write_table<kTeam>(args, sample, group, merge_team<kTeam>(own), lane);
}

template <class T>
__global__ void __launch_bounds__(kThreadsLarge) group_norm_merge_segments(const FinalizeArgs<T> args) {
  const std::int64_t sample_group = blockIdx.x / args.segments,
                     segment = blockIdx.x - sample_group * args.segments;
  const std::int64_t sample = sample_group / args.shape.num_groups;
  const std::int64_t begin = segment_begin(args, segment), end = segment_begin(args, segment + 1);
  const DoubleMoments own = merge_partials<kThreadsLarge>(
      args, sample, sample_group - sample * args.shape.num_groups, begin, end, static_cast<int>(threadIdx.x));
  const DoubleMoments merged = merge_team<kThreadsLarge>(own);
  if (threadIdx.x != 0) return;
  double* to = args.scratch + blockIdx.x * std::int64_t{3};
  to[0] = merged.count;
  to[1] = merged.mean;
  to[2] = merged.m2;
}

template <class T>
__global__ void __launch_bounds__(kThreadsLarge, 1) group_norm_finalize_segments(const FinalizeArgs<T> args) {
  let_next_begin();
  // segments_of never yields more segments than a block has threads.
  static_assert(kBlocksWanted <= kThreadsLarge);
  const std::int64_t sample = blockIdx.x / args.shape.num_groups,
                     group = blockIdx.x - sample * args.shape.num_groups;
  DoubleMoments own;
  if (threadIdx.x < args.segments) {
    const double* from = args.scratch + (blockIdx.x * args.segments + threadIdx.x) * 3;
    own.count = from[0];
    own.mean = from[1];
    own.m2 = from[2];
  }
  write_table<kThreadsLarge>(args, sample, group, merge_team<kThreadsLarge>(own),
                             static_cast<int>(threadIdx.x));
}

}  // namespace

std::int64_t finalize_scratch_bytes(const GroupNormShape& shape) {
  const std::int64_t segments = segments_of(shape);
  if (segments == 1) return 0;
  return shape.n * shape.num_groups * segments * 3 * static_cast<std::int64_t>(sizeof(double));
}

void launch_group_norm_finalize(const FinalizeParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  if (shape.n == 0) return;
  with_element(params.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    FinalizeArgs<T> args;
    args.shape = shape;
    args.channels = shape.k / shape.num_groups;
    args.segments = segments_of(shape);
    args.part = static_cast<const Stat<T>*>(params.part);
    args.counts = params.counts;
    args.gamma = static_cast<const T*>(params.gamma);
    args.beta = static_cast<const T*>(params.beta);
    args.eps = params.eps;
    args.scratch = static_cast<double*>(params.scratch);
    args.table = static_cast<Stat<T>*>(params.table);
    args.groups = reinterpret_cast<float4*>(params.groups);
    const std::int64_t groups = shape.n * shape.num_groups;
    if (args.segments == 1) {
      const auto launch_teams = [&](auto kernel, std::int64_t blocks, int threads) {
        launch("group_norm_finalize_groups", kernel, blocks, dim3(static_cast<unsigned>(threads)), stream,
               args);
      };
      const std::int64_t partials = shape.tiles * args.channels;
      if (partials <= kWarp * kChunk) {
        launch_teams(group_norm_finalize_groups<T, kWarp, kThreadsSmall>,
                     ceil_div(groups, kThreadsSmall / kWarp), kThreadsSmall);
      } else if (partials <= kThreadsSmall * kChunk) {
        launch_teams(group_norm_finalize_groups<T, kThreadsSmall, kThreadsSmall>, groups, kThreadsSmall);
      } else {
        launch_teams(group_norm_finalize_groups<T, kThreadsLarge, kThreadsLarge>, groups, kThreadsLarge);
      }
      return;
    }
    launch("group_norm_merge_segments", group_norm_merge_segments<T>, groups * args.segments,
           dim3(kThreadsLarge), stream, args);
    launch("group_norm_finalize_segments", group_norm_finalize_segments<T>, groups, dim3(kThreadsLarge),
           stream, args);
  });
}

}  // namespace upconv3d::cuda
