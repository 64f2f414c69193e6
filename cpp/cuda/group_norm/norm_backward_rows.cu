// SPDX-License-Identifier: Apache-2.0
/// \file
/// norm_backward's two passes over memory, of rows [N*Z*P*Q, K].
///
///   c, grad_y  [N,Z,P,Q,K]          T
///   part       [N,K,tiles,8]        fp32  sums of a channel over a tile of positions, written once
///   map        [N,K,4]              fp32  from the merge
///   grad_c     [N,Z,P,Q,K]          T     may be c: a thread reads an element before it writes it
///
/// A thread owns kVector channels and walks the tile's positions; those of the same channels join at the end.
#include <cstdint>

#include "cuda/group_norm/backward_passes.cuh"
#include "cuda/group_norm/norm_backward.cuh"

namespace upconv3d::cuda {
namespace {

/// Channels of a thread, where K is a multiple: the sums of any activation's four channels would leave too
/// few registers for two blocks per multiprocessor.
template <class Tail>
constexpr int kWidest = std::is_same_v<Tail, AnyBefore> ? 2 : 4;

template <class T>
struct RowArgs {
  NormBackwardArgs<T> common;
  std::int64_t channel_blocks;  // along K
};

template <int kCount, int kVector, class Tail, class T>
__device__ __forceinline__ void add_rows(const NormBackwardArgs<T>& args,
                                         const NormChannel<Tail> (&channels)[kVector], std::int64_t at,
                                         std::int64_t step, NormSums (&sums)[kVector]) {
  Vector<T, kVector> c[kCount], grad[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    c[i] = load_vector<kVector, false>(args.c + at + i * step);
    grad[i] = load_vector<kVector, false>(args.grad_y + at + i * step);
  }
  Tail::with(args.activation.kind, [&](auto functor) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      NormSums recent;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        recent.add(channels[j], functor, to_stat(c[i].at[j]), to_stat(grad[i].at[j]));
      }
      sums[j].join(recent);
    }
  });
}

template <class T, class Tail, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) norm_backward_sums_rows(const RowArgs<T> args) {
  const NormBackwardArgs<T>& common = args.common;
  const RowTile<kVector> tile(common.shape, args.channel_blocks, blockIdx.x);
  NormChannel<Tail> channels[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) channels[j].load(common, tile.sample, tile.channel + j);
  NormSums sums[kVector];
  tile.each([&](std::int64_t at) { add_rows<kRowPositions, kVector>(common, channels, at, tile.step, sums); },
            [&](std::int64_t at) { add_rows<1, kVector>(common, channels, at, 0, sums); });
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum_slots(sums[j].at);
  if (threadIdx.y != 0 || !tile.exists) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const std::int64_t row = tile.sample * common.shape.k + tile.channel + j;
    auto* const to =
        reinterpret_cast<float4*>(common.part + (row * common.shape.tiles + tile.tile) * kNormSums);
    const auto& at = sums[j].at;
    to[0] = {at[0], at[1], at[2], at[3]};
    to[1] = {at[4], at[5], at[6], at[7]};
  }
}

template <int kCount, int kVector, class Tail, class T>
__device__ __forceinline__ void store_rows(const NormBackwardArgs<T>& args,
                                           const NormChannel<Tail> (&channels)[kVector],
                                           const float4 (&maps)[kVector], std::int64_t at,
                                           std::int64_t step) {
  Vector<T, kVector> c[kCount], grad[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    c[i] = load_once<kVector>(args.c + at + i * step);
    grad[i] = load_once<kVector>(args.grad_y + at + i * step);
  }
  Tail::with(args.activation.kind, [&](auto functor) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        grad[i].at[j] = from_stat<T>(
            conv_gradient(channels[j], maps[j], functor, to_stat(c[i].at[j]), to_stat(grad[i].at[j])));
      }
    }
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_vector<kVector>(args.grad_c + at + i * step, grad[i]);
}

template <class T, class Tail, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2) norm_backward_grad_c_rows(const RowArgs<T> args) {
  const NormBackwardArgs<T>& common = args.common;
  const RowTile<kVector> tile(common.shape, args.channel_blocks, std::int64_t{gridDim.x} - 1 - blockIdx.x);
  if (!tile.exists) return;
  NormChannel<Tail> channels[kVector];
  float4 maps[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    channels[j].load(common, tile.sample, tile.channel + j);
    maps[j] = common.map[tile.sample * common.shape.k + tile.channel + j];
  }
  tile.each(
      [&](std::int64_t at) { store_rows<kRowPositions, kVector>(common, channels, maps, at, tile.step); },
      [&](std::int64_t at) { store_rows<1, kVector>(common, channels, maps, at, 0); });
}

/// Calls visit(T tag, Tail tag, constant of the vector's channels) for what `params` name.
template <class Visit>
void with_row_types(const NormBackwardParams& params, Visit&& visit) {
  const bool aligned = is_aligned(params.c) && is_aligned(params.grad_y) && is_aligned(params.grad_c);
  with_norm_types(params, [&](auto element, auto tail) {
    constexpr int kVector = kWidest<decltype(tail)>;
    if (aligned && params.shape.k % kVector == 0) {
      return visit(element, tail, std::integral_constant<int, kVector>{});
    }
    visit(element, tail, std::integral_constant<int, 1>{});
  });
}

}  // namespace

void launch_norm_backward_sums_rows(const NormBackwardParams& params, cudaStream_t stream) {
  with_row_types(params, [&](auto element, auto tail, auto vector) {
    using T = typename decltype(element)::type;
    launch_rows("norm_backward_sums_rows", norm_backward_sums_rows<T, decltype(tail), vector()>, params.shape,
                vector(), RowArgs<T>{norm_backward_args<T>(params), 0}, stream);
  });
}

void launch_norm_backward_grad_c_rows(const NormBackwardParams& params, cudaStream_t stream) {
  with_row_types(params, [&](auto element, auto tail, auto vector) {
    using T = typename decltype(element)::type;
    launch_rows("norm_backward_grad_c_rows", norm_backward_grad_c_rows<T, decltype(tail), vector()>,
                params.shape, vector(), RowArgs<T>{norm_backward_args<T>(params), 0}, stream);
  });
}

}  // namespace upconv3d::cuda
