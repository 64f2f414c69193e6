// SPDX-License-Identifier: Apache-2.0
/// \file
/// What both forms of activation_group_norm_held share: sums over threads, and the merging of tiles.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "core/held_norm.hpp"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {

/// Elements of a 16-byte vector.
template <class T>
constexpr int kLanes = kAccessBytes / sizeof(T);

/// Vectors of a thread that its registers keep.
template <class T>
inline constexpr int kKeptVectors = kept_vectors(sizeof(T));

/// Sum over `lanes` neighbouring threads, a power of two of them.
template <class Value>
__device__ __forceinline__ Value lanes_sum(Value value, int lanes) {
#pragma unroll 1
  for (int other = lanes / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
  return value;
}

/// 1/sqrt(value) to a double's accuracy but for its last bits: a float's, then one step of Newton's.
__device__ __forceinline__ double inverse_root(double value) {
  const double root = rsqrtf(static_cast<float>(value));
  return root == 0.0 ? 0.0 : root * (1.5 - 0.5 * value * root * root);  // of infinity 0, not NaN
}

/// Of a channel, from gamma and beta to what (v - rounded)*scale + shift multiplies by; shift holds the part
/// of the mean that a float cannot.
/// \param rounded mean as a float
__device__ __forceinline__ void finish_channel(double mean, float rounded, double rstd, float& scale,
                                               float& shift) {
  const double product = scale * rstd;
  scale = static_cast<float>(product);
  shift = static_cast<float>(shift - (mean - static_cast<double>(rounded)) * product);
}

/// What is known of a group's tiles: all but the last have the same number of values.
struct TileCounts {
  float tile_count, last_count;  // values of a group in a tile, and in the last one
  float tile_share, last_share;  // their inverses
  double group_share;            // that of all values of a group
  int tiles;                     // of a group

  /// \param values of a tile, of the last one and of a group
  static TileCounts of(double tile, double last, double group, int tiles) {
    const auto narrow = [](double value) { return static_cast<float>(value); };
    return {narrow(tile), narrow(last), narrow(1 / tile), narrow(1 / last), 1 / group, tiles};
  }
  __device__ __forceinline__ float share(int tile) const {
    return tile == tiles - 1 ? last_share : tile_share;
  }
  __device__ __forceinline__ float count(int tile) const {
    return tile == tiles - 1 ? last_count : tile_count;
  }
};

struct GroupMoments {
  double mean, m2;
};

/// Whether `count` values lie so close together that the rounding of their mean is much of their deviation:
/// as a rule one value throughout, where every tap reads padding. 1/sqrt(eps) would magnify that rounding.
__device__ __forceinline__ bool are_alike(float mean, float m2, float count) {
  // A sum of thousands of equal values is off by some 2^-21 of itself. Other data lie far above 2^-17.
  constexpr float kDeviation = 1.f / (1 << 17);
  const float bound = mean * kDeviation;
  return m2 > 0.f && m2 <= count * bound * bound;
}

/// The moments about a mean that values' distances from `mean` correct.
/// \param distances their sum: of equal values a few roundings each, so that it is exact
__device__ __forceinline__ GroupMoments corrected(float mean, float m2, float distances, float count) {
  const double rest = static_cast<double>(distances) / count;  // a float's inverse would be off
  return {mean + rest, fmax(m2 - distances * rest, 0.0)};
}

/// Until the partial moments are there that the block's other tiles' blocks write.
/// \param clusters whether those are the block's cluster; else all
__device__ __forceinline__ void wait_for_tiles([[maybe_unused]] bool clusters) {
#if __CUDA_ARCH__ >= 900
  if (clusters) {
    __syncwarp();  // warps arrive as one
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  cooperative_groups::this_grid().sync();
}

/// Merges the tiles of a group by `lanes` neighbouring threads, all of which get the result. What is added up
/// are distances from the first tile's mean, so that a mean far from 0 costs no digits.
/// \param from [tiles] mean, M2; or null, of threads for which there is no group
__device__ __forceinline__ GroupMoments merge_tiles(const float2* from, const TileCounts& counts, int lane,
                                                    int lanes) {
  // In double: where the first tile is the outlier, all others' squares about its mean cancel.
  double sum = 0, squares = 0;
  float pivot = 0;
  if (from != nullptr) {
    pivot = from->x;
#pragma unroll 1
    for (int first = lane; first < counts.tiles; first += kLoadsInFlight * lanes) {
      float2 part[kLoadsInFlight];
      const int left = counts.tiles - (first - lane);  // the same for all lanes
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i * lanes < left) part[i] = from[min(first + i * lanes, counts.tiles - 1)];
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i * lanes >= left) break;
        const int at = first + i * lanes;
        const float count = at == counts.tiles - 1 ? counts.last_count : counts.tile_count;
        const double distance = static_cast<double>(part[i].x) - pivot;
        // A part behind the last one, which was read twice, must not count, were it infinite.
        sum += at < counts.tiles ? count * distance : 0.0;
        squares += at < counts.tiles ? part[i].y + (count * distance) * distance : 0.0;
      }
    }
  }
#pragma unroll 1
  for (int other = lanes / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
    squares += __shfl_xor_sync(0xffffffffu, squares, other);
  }
  const double distance = sum * counts.group_share;
  return {pivot + distance, squares - sum * distance};
}

/// 1/sqrt(variance + eps) of a group.
__device__ __forceinline__ double inverse_deviation(double m2, const TileCounts& counts, double eps) {
  return inverse_root(fmax(m2, 0.0) * counts.group_share + eps);
}

}  // namespace upconv3d::cuda
