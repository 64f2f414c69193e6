// SPDX-License-Identifier: Apache-2.0
/// \file
/// pack_input: x to [N,D,H,W,C] in 16 bit, scaled and split where it is float32.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/check.hpp"
#include "cuda/layout/pack_stages.hpp"
#include "cuda/layout/transpose_rows.cuh"

namespace upconv3d::cuda {
namespace {

/// The rows of one sample are its positions.
template <class T>
struct InputRows {
  const T* x;                      // [C,D,H,W] T: the sample
  const PowerOfTwo* tile_factors;  // [kTileChannels] PowerOfTwo in shared memory, float32 only
  std::int64_t first_destination;  // of position 0
  std::int64_t count;              // D*H*W
  std::int64_t channels;           // C
  std::int64_t channel_stride;     // D*H*W

  __device__ const T* first(std::int64_t j) const { return x + j; }
  __device__ std::int64_t destination(std::int64_t j) const { return first_destination + j; }
  __device__ PowerOfTwo factor(std::int64_t, std::int64_t c) const { return tile_factors[c % kTileChannels]; }
};

struct PackInputArgs {
  const void* x;                // [N,C,D,H,W] or [N,D,H,W,C] float or 16 bit
  const std::int32_t* sample;   // [N] int32, float32 only
  const std::int32_t* channel;  // [C] int32, float32 only
  std::uint16_t* hi;            // [N,D,H,W,C] 16 bit
  std::uint16_t* lo;            // [N,D,H,W,C] 16 bit, three products only
  std::int64_t channels;        // C
  std::int64_t positions;       // D*H*W
  std::int64_t blocks_per_sample;
};

/// Blocks walk x backwards: its end is what the absmax pass left in L2, its beginning is what the convolution
/// reads first.
__device__ inline std::int64_t backward_block() {
  return static_cast<std::int64_t>(gridDim.x) - 1 - blockIdx.x;
}

/// pack_input_ncdhw: one block per 64 positions x 64 channels, through shared memory.
template <class T, int kProducts>
__global__ void __launch_bounds__(kTransposeThreads) pack_input_ncdhw(const PackInputArgs args) {
  const std::int64_t block = backward_block();
  const std::int64_t n = block / args.blocks_per_sample;
  const std::int64_t first_position = block % args.blocks_per_sample * kTileRows;
  const std::int64_t first_channel = static_cast<std::int64_t>(blockIdx.y) * kTileChannels;

  // The factors of a tile differ by channel only: made once, not once per element.
  __shared__ PowerOfTwo tile_factors[kTileChannels];
  if constexpr (std::is_same_v<T, float>) {
    const std::int64_t c = first_channel + threadIdx.x;
    if (threadIdx.x < kTileChannels && c < args.channels) {
      tile_factors[threadIdx.x] = power_of_two(args.sample[n] + args.channel[c]);
    }
    __syncthreads();
  }

  const InputRows<T> rows{
      .x = static_cast<const T*>(args.x) + n * args.channels * args.positions,
      .tile_factors = tile_factors,
      .first_destination = n * args.positions,
      .count = args.positions,
      .channels = args.channels,
      .channel_stride = args.positions,
  };
  transpose_tile<T, kProducts>(rows, first_position, first_channel, args.hi, args.lo);
}

constexpr int kStreamThreads = 256;
constexpr int kStreamVectors = 4;  // per thread: 128 bytes in flight cover the latency of memory

/// pack_input_ndhwc: a block per 1024 vectors; float32 that already has its channels innermost is scaled and
/// split as it streams by. kVector is 8 where C is a multiple of 8 and x is 16-byte aligned, else 1.
template <int kVector, int kProducts>
__global__ void __launch_bounds__(kStreamThreads) pack_input_ndhwc(const PackInputArgs args) {
  const std::int64_t block = backward_block();
  const std::int64_t n = block / args.blocks_per_sample;
  const std::int64_t vectors = args.channels * args.positions / kVector;  // of this sample
  const std::int64_t first = block % args.blocks_per_sample * (kStreamThreads * kStreamVectors);
  const auto channel_vectors = static_cast<std::uint32_t>(args.channels / kVector);
  const auto first_channel_vector = static_cast<std::uint32_t>(first % channel_vectors);
  const float* const x = static_cast<const float*>(args.x) + n * vectors * kVector;
  const std::int64_t out = n * vectors * kVector;
  const int sample_exponent = args.sample[n];

  float values[kStreamVectors][kVector];
#pragma unroll
  for (int i = 0; i < kStreamVectors; ++i) {
    const std::int64_t v = first + i * kStreamThreads + threadIdx.x;
    if constexpr (kVector == 8) {
      const auto* const source = reinterpret_cast<const float4*>(x) + v * 2;
      const float4 a = v < vectors ? source[0] : float4{};
      const float4 b = v < vectors ? source[1] : float4{};
      values[i][0] = a.x, values[i][1] = a.y, values[i][2] = a.z, values[i][3] = a.w;
      values[i][4] = b.x, values[i][5] = b.y, values[i][6] = b.z, values[i][7] = b.w;
    } else {
      values[i][0] = v < vectors ? x[v] : 0.0f;
    }
  }

#pragma unroll
  for (int i = 0; i < kStreamVectors; ++i) {
    const std::uint32_t step = i * kStreamThreads + threadIdx.x;
    const std::int64_t v = first + step;
    if (v >= vectors) continue;
    const std::uint32_t c = (first_channel_vector + step) % channel_vectors * kVector;
    if constexpr (kVector == 8) {
      const int4 a = *reinterpret_cast<const int4*>(args.channel + c);
      const int4 b = *reinterpret_cast<const int4*>(args.channel + c + 4);
      const int exponent[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      PowerOfTwo factor[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) factor[j] = power_of_two(sample_exponent + exponent[j]);
      const SplitVector<kProducts> packed = encode<kProducts>(values[i], factor);
      reinterpret_cast<uint4*>(args.hi + out)[v] = packed.hi;
      if constexpr (kProducts == 3) reinterpret_cast<uint4*>(args.lo + out)[v] = packed.lo;
    } else {
      const SplitValue s = split<kProducts>(values[i][0], power_of_two(sample_exponent + args.channel[c]));
      args.hi[out + v] = s.hi;
      if constexpr (kProducts == 3) args.lo[out + v] = s.lo;
    }
  }
}

template <class T, int kProducts>
void launch_ncdhw(PackInputArgs args, std::int64_t n, cudaStream_t stream) {
  args.blocks_per_sample = ceil_div(args.positions, kTileRows);
  const dim3 grid =
      grid_of(n * args.blocks_per_sample, ceil_div(args.channels, kTileChannels), "pack_input_ncdhw");
  pack_input_ncdhw<T, kProducts><<<grid, kTransposeThreads, 0, stream>>>(args);
  check_launch("pack_input_ncdhw");
}

template <int kVector, int kProducts>
void launch_ndhwc(PackInputArgs args, std::int64_t n, cudaStream_t stream) {
  const std::int64_t vectors = args.channels * args.positions / kVector;
  args.blocks_per_sample = ceil_div(vectors, kStreamThreads * kStreamVectors);
  const dim3 grid = grid_of(n * args.blocks_per_sample, 1, "pack_input_ndhwc");
  pack_input_ndhwc<kVector, kProducts><<<grid, kStreamThreads, 0, stream>>>(args);
  check_launch("pack_input_ndhwc");
}

template <int kProducts>
void launch_float32(const PackInputArgs& args, const Problem& problem, cudaStream_t stream) {
  if (problem.x_layout == Layout::kNCDHW) {
    launch_ncdhw<float, kProducts>(args, problem.n, stream);
  } else if (problem.c % 8 == 0 && reinterpret_cast<std::uintptr_t>(args.x) % sizeof(float4) == 0) {
    launch_ndhwc<8, kProducts>(args, problem.n, stream);
  } else {
    launch_ndhwc<1, kProducts>(args, problem.n, stream);
  }
}

}  // namespace

void launch_pack_input(const PackParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const PackInputArgs args{
      .x = params.x,
      .sample = params.scales.sample,
      .channel = params.scales.channel,
      .hi = static_cast<std::uint16_t*>(params.x_hi),
      .lo = static_cast<std::uint16_t*>(params.x_lo),
      .channels = problem.c,
      .positions = volume(problem.in),
      .blocks_per_sample = 0,
  };
  if (problem.dtype == DType::kFloat32) {
    params.products == 3 ? launch_float32<3>(args, problem, stream)
                         : launch_float32<1>(args, problem, stream);
  } else if (problem.x_layout == Layout::kNCDHW) {
    launch_ncdhw<std::uint16_t, 1>(args, problem.n, stream);
  } else {
    // Right in layout and dtype, x is packed only because TMA wants an aligned address.
    const std::int64_t bytes = problem.n * problem.c * args.positions * size_of(problem.dtype);
    check(cudaMemcpyAsync(params.x_hi, params.x, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                          stream),
          "copying x to an aligned address");
  }
}

}  // namespace upconv3d::cuda
