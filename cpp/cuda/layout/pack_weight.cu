// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_weight: w, however it lies, to [T*R*S,K,C] in 16 bit, scaled and split where it is float32.

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/transpose_rows.cuh"
#include "cuda/layout/weight_rows.cuh"

namespace upconv3d::cuda {
namespace {

template <class T>
struct WeightRows {
  const T* w;                    // [C,K,T,R,S] T, strides in order
  const std::uint32_t* w_reach;  // [K] uint32, float32 only
  const std::int32_t* channel;   // [C] int32, float32 only
  WeightOrder order;
  std::int64_t count;     // K*T*R*S
  std::int64_t channels;  // C
  std::int64_t channel_stride;

  __device__ const T* first(std::int64_t j) const { return w + order.offset(j); }
  __device__ std::int64_t destination(std::int64_t j) const {
    return order.tap_of(j) * order.k + order.k_of(j);
  }
  __device__ int column(std::int64_t j) const { return column_exponent(w_reach[order.k_of(j)]); }
  __device__ PowerOfTwo factor(std::int64_t j, std::int64_t c) const {
    return power_of_two(column(j) - channel[c]);
  }
};

/// pack_weight: one block per 64 rows x 64 channels.
///
/// \param hi             [T*R*S,K,C] 16 bit
/// \param lo             [T*R*S,K,C] 16 bit, three products only
/// \param unscale_column [K] int32, float32 only: written by the blocks of the first channels
template <class T, int kProducts>
__global__ void __launch_bounds__(kTransposeThreads)
    pack_weight(const WeightRows<T> rows, std::uint16_t* hi, std::uint16_t* lo,
                std::int32_t* unscale_column) {
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kTileRows;
  if (unscale_column != nullptr && blockIdx.y == 0 && threadIdx.x < kTileRows) {
    const std::int64_t row = first_row + threadIdx.x;
    if (row < rows.count && rows.order.tap_of(row) == 0) {
      unscale_column[rows.order.k_of(row)] = -rows.column(row);
    }
  }
  const std::int64_t first_channel = static_cast<std::int64_t>(blockIdx.y) * kTileChannels;
  transpose_tile<T, kProducts>(rows, first_row, first_channel, hi, lo);
}

template <class T, int kProducts>
void launch(const PackParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const WeightRows<T> rows{
      .w = static_cast<const T*>(params.w),
      .w_reach = params.scales.w_reach,
      .channel = params.scales.channel,
      .order = weight_order(params),
      .count = problem.k * volume(problem.kernel),
      .channels = problem.c,
      .channel_stride = params.w_strides[0],
  };
  const dim3 grid =
      grid_of(ceil_div(rows.count, kTileRows), ceil_div(problem.c, kTileChannels), "pack_weight");
  pack_weight<T, kProducts><<<grid, kTransposeThreads, 0, stream>>>(
      rows, static_cast<std::uint16_t*>(params.w_hi), static_cast<std::uint16_t*>(params.w_lo),
      params.scales.unscale_column);
  check_launch("pack_weight");
}

}  // namespace

void launch_pack_weight(const PackParams& params, cudaStream_t stream) {
  if (params.problem.dtype != DType::kFloat32) {
    launch<std::uint16_t, 1>(params, stream);
  } else if (params.products == 3) {
    launch<float, 3>(params, stream);
  } else {
    launch<float, 1>(params, stream);
  }
}

}  // namespace upconv3d::cuda
