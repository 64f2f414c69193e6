// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the normalize kernels share: arguments, a channel's affine map, and the kernels' host entry points.
#pragma once

#include "cuda/group_norm/activation.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/group_norm.hpp"

namespace upconv3d::cuda {

template <class A, class Y>
struct NormalizeArgs {
  GroupNormShape shape;
  const A* a;            // [N,K,Z,P,Q] or [N,Z,P,Q,a_pitch] A
  const A* bias;         // [K] A, or null
  const Stat<A>* table;  // [3,N,K] stat
  Y* y;                  // [N,K,Z,P,Q] or [N,Z,P,Q,K] Y, may be a where type, layout and pitch are equal
  std::int64_t a_pitch;  // elements of a position's row of a; [N,Z,P,Q,a_pitch] only
  bool table_vectors;    // the table's rows take vector loads at every kLanes-th channel
  // The launch's partition of the work; each kernel says which of these it reads.
  std::int64_t channel_blocks;   // blocks along K
  std::int64_t position_blocks;  // blocks along the positions of one sample
  std::int64_t position_steps;   // positions, or tiles of positions, per block
  bool vector_out;               // transposing kernel: y takes 16-byte stores
};

/// y = (v - mean)*scale + shift for kLanes values, v = Input(a, bias), in registers.
template <class A, class Input, int kLanes>
struct ChannelMap {
  using S = Stat<A>;
  S mean[kLanes], scale[kLanes], shift[kLanes], bias[kLanes];

  /// Takes the row of `channel` into one lane.
  template <class Y>
  __device__ __forceinline__ void load(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                       std::int64_t channel, int lane) {
    const std::int64_t plane = args.shape.n * args.shape.k;
    const S* from = args.table + sample * args.shape.k + channel;
    mean[lane] = from[0];
    scale[lane] = from[plane];
    shift[lane] = from[2 * plane];
    bias[lane] = Input::kReadsBias && args.bias != nullptr ? to_stat(args.bias[channel]) : S(0);
  }

  /// Takes the rows of kLanes consecutive channels, as many of them as there are.
  template <class Y>
  __device__ __forceinline__ void load_consecutive(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                                   std::int64_t channel) {
    if (args.table_vectors) {
      load_vectors(args, sample, channel);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (channel + lane < args.shape.k) load(args, sample, channel + lane, lane);
    }
  }

  /// Takes the rows of kLanes consecutive channels; the table must allow vector loads at `channel`.
  template <class Y>
  __device__ __forceinline__ void load_vectors(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                               std::int64_t channel) {
    const std::int64_t plane = args.shape.n * args.shape.k;
    const S* from = args.table + sample * args.shape.k + channel;
    const auto means = load_vector<kLanes, false>(from);
    const auto scales = load_vector<kLanes, false>(from + plane);
    const auto shifts = load_vector<kLanes, false>(from + 2 * plane);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      mean[lane] = means.at[lane];
      scale[lane] = scales.at[lane];
      shift[lane] = shifts.at[lane];
      bias[lane] = Input::kReadsBias && args.bias != nullptr ? to_stat(args.bias[channel + lane]) : S(0);
    }
  }

  __device__ __forceinline__ S operator()(A a, int lane) const {
    return (Input{}(to_stat(a), bias[lane]) - mean[lane]) * scale[lane] + shift[lane];
  }
};

/// Elements of a position's row of a, where a_layout is NDHWC.
inline std::int64_t row_pitch(const NormalizeParams& params) {
  return params.a_pitch != 0 ? params.a_pitch : params.shape.k;
}

/// Blocks run from the last sample to the first: the convolution wrote the last one just now, and it is still
/// in L2.
__device__ __forceinline__ std::int64_t reversed_block() {
  return static_cast<std::int64_t>(gridDim.x) - 1 - static_cast<std::int64_t>(blockIdx.x);
}

/// Calls visit(A tag, Y tag, Input tag) for the types that `params` names.
/// \throws std::invalid_argument for a pair of dtypes that has no kernel.
template <class Visit>
void with_normalize_types(const NormalizeParams& params, Visit&& visit) {
  with_element(params.a_dtype, [&](auto a) {
    const auto with_input = [&](auto y) {
      if (params.apply_relu) return visit(a, y, std::type_identity<AfterBias<Relu>>{});
      return visit(a, y, std::type_identity<AsStored>{});
    };
    if (params.y_dtype == params.a_dtype) return with_input(a);
    constexpr bool kIs16Bit = sizeof(typename decltype(a)::type) == 2;
    if constexpr (kIs16Bit) {
      if (params.y_dtype == DType::kFloat32) return with_input(std::type_identity<float>{});
    }
    throw std::invalid_argument(
        "upconv3d: normalize writes the dtype it reads, or float32 from 16 bit; got a_dtype=" +
        std::string(name(params.a_dtype)) + ", y_dtype=" + name(params.y_dtype) +
        ". Store the activation in y's dtype.");
  });
}

/// a and y in the same layout.
void launch_normalize_in_layout(const NormalizeParams& params, cudaStream_t stream);

/// a [N,Z,P,Q,a_pitch] in 16 bits with steps, y [N,K,Z,P,Q] or [N,Z,P,Q,K] float32.
/// \throws std::invalid_argument where params say otherwise.
void launch_normalize_steps(const NormalizeParams& params, cudaStream_t stream);

/// a and y in different layouts.
void launch_normalize_transpose(const NormalizeParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
