// SPDX-License-Identifier: Apache-2.0
/// \file
/// norm_backward's two passes over memory, of planes [N*K, Z*P*Q].
///
///   c, grad_y  [N,K,Z,P,Q]          T
///   part       [N,K,tiles,8]        fp32  sums of a tile of a plane, written once
///   map        [N,K,4]              fp32  from the merge
///   grad_c     [N,K,Z,P,Q]          T     may be c: a thread reads an element before it writes it
///
/// The threads of a row of the block share a tile of one plane, 16 bytes each; planes shorter than that share
/// a block. Planes start anywhere, at the same place in all tensors: what is not aligned is peeled off either
/// end.
#include <cstdint>

#include "cuda/group_norm/backward_passes.cuh"
#include "cuda/group_norm/norm_backward.cuh"

namespace upconv3d::cuda {
namespace {

/// Sums of kCount vectors, `step` elements apart, added to `sums` as one: sums of a few values each have a
/// fraction of the error that one long sum has.
template <int kCount, int kVector, class Tail, class T>
__device__ __forceinline__ void add_vectors(const NormBackwardArgs<T>& args, const NormChannel<Tail>& channel,
                                            std::int64_t at, std::int64_t step, NormSums& sums) {
  Vector<T, kVector> c[kCount], grad[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    c[i] = load_vector<kVector, false>(args.c + at + i * step);
    grad[i] = load_vector<kVector, false>(args.grad_y + at + i * step);
  }
  NormSums recent;
  Tail::with(args.activation.kind, [&](auto functor) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        recent.add(channel, functor, to_stat(c[i].at[j]), to_stat(grad[i].at[j]));
      }
    }
  });
  sums.join(recent);
}

/// Blocks are ordered tile fastest, then blockDim.y planes at a time.
template <class T, class Tail, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2)
    norm_backward_sums_planes(const NormBackwardArgs<T> args) {
  const PlaneTile<kVector> tile(args.shape, blockIdx.x);
  NormChannel<Tail> channel;
  channel.load(args, tile.sample, tile.channel);
  NormSums sums;
  tile.each([&](std::int64_t at,
                std::int64_t step) { add_vectors<kPlanePairs, kVector>(args, channel, at, step, sums); },
            [&](std::int64_t at) { add_vectors<1, kVector>(args, channel, at, 0, sums); },
            [&](std::int64_t at) { add_vectors<1, 1>(args, channel, at, 0, sums); });
  sum_row(sums.at);
  if (threadIdx.x != 0 || !tile.exists) return;
  auto* const to =
      reinterpret_cast<float4*>(args.part + (tile.row * args.shape.tiles + tile.tile) * kNormSums);
  to[0] = {sums.at[0], sums.at[1], sums.at[2], sums.at[3]};
  to[1] = {sums.at[4], sums.at[5], sums.at[6], sums.at[7]};
}

/// grad_c of kCount vectors, `step` elements apart.
template <int kCount, int kVector, class Tail, class T>
__device__ __forceinline__ void store_vectors(const NormBackwardArgs<T>& args,
                                              const NormChannel<Tail>& channel, const float4& map,
                                              std::int64_t at, std::int64_t step) {
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
        grad[i].at[j] =
            from_stat<T>(conv_gradient(channel, map, functor, to_stat(c[i].at[j]), to_stat(grad[i].at[j])));
      }
    }
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_vector<kVector>(args.grad_c + at + i * step, grad[i]);
}

/// Blocks run from the last tile to the first: that is what is still in L2.
template <class T, class Tail, int kVector>
__global__ void __launch_bounds__(kStreamThreads, 2)
    norm_backward_grad_c_planes(const NormBackwardArgs<T> args) {
  const PlaneTile<kVector> tile(args.shape, std::int64_t{gridDim.x} - 1 - blockIdx.x);
  if (!tile.exists) return;
  NormChannel<Tail> channel;
  channel.load(args, tile.sample, tile.channel);
  const float4 map = args.map[tile.row];
  tile.each([&](std::int64_t at,
                std::int64_t step) { store_vectors<kPlanePairs, kVector>(args, channel, map, at, step); },
            [&](std::int64_t at) { store_vectors<1, kVector>(args, channel, map, at, 0); },
            [&](std::int64_t at) { store_vectors<1, 1>(args, channel, map, at, 0); });
}

/// Calls visit(T tag, Tail tag, constant of the vector's elements) for what `params` name.
template <class Visit>
void with_plane_types(const NormBackwardParams& params, Visit&& visit) {
  const bool aligned = is_aligned(params.c) && is_aligned(params.grad_y) && is_aligned(params.grad_c);
  with_norm_types(params, [&](auto element, auto tail) {
    constexpr int kWidest = kAccessBytes / sizeof(typename decltype(element)::type);
    if (aligned) return visit(element, tail, std::integral_constant<int, kWidest>{});
    visit(element, tail, std::integral_constant<int, 1>{});
  });
}

}  // namespace

void launch_norm_backward_sums_planes(const NormBackwardParams& params, cudaStream_t stream) {
  with_plane_types(params, [&](auto element, auto tail, auto vector) {
    using T = typename decltype(element)::type;
    launch_planes("norm_backward_sums_planes", norm_backward_sums_planes<T, decltype(tail), vector()>,
                  params.shape, vector(), norm_backward_args<T>(params), stream);
  });
}

void launch_norm_backward_grad_c_planes(const NormBackwardParams& params, cudaStream_t stream) {
  with_plane_types(params, [&](auto element, auto tail, auto vector) {
    using T = typename decltype(element)::type;
    launch_planes("norm_backward_grad_c_planes", norm_backward_grad_c_planes<T, decltype(tail), vector()>,
                  params.shape, vector(), norm_backward_args<T>(params), stream);
  });
}

}  // namespace upconv3d::cuda
