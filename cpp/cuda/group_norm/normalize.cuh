// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the normalize kernels share: arguments, the map of a channel's values, and the kernels' host entry
/// points.
#pragma once

#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/pending.cuh"

namespace upconv3d::cuda {

template <class A, class Y>
struct NormalizeArgs {
  GroupNormShape shape;
  const A* a;            // [N,K,Z,P,Q] or [N,Z,P,Q,a_pitch] A
  const A* bias;         // [K] A, or null
  const A* skip;         // as a lies, or null; read with AnyPending alone
  const Stat<A>* table;  // [3,N,K] stat; null with AnyPending alone
  Y* y;                  // [N,K,Z,P,Q] or [N,Z,P,Q,K] Y, may be a where type, layout and pitch are equal
  // With AnyPending alone: the only activation, and whether the normalization precedes it.
  ActivationParams activation;
  Stat<A> parameter;  // activation.parameter
  bool norm_first;
  std::int64_t a_pitch;  // elements of a position's row of a; [N,Z,P,Q,a_pitch] only
  bool table_vectors;    // the table's rows take vector loads at every kLanes-th channel
  // The launch's partition of the work; each kernel says which of these it reads.
  std::int64_t channel_blocks;   // blocks along K
  std::int64_t position_blocks;  // blocks along the positions of one sample
  std::int64_t position_steps;   // positions, or tiles of positions, per block
  bool vector_out;               // transposing kernel: y takes 16-byte stores
};

/// From a to y for the values of kLanes channels, in registers: y = (v - mean)*scale + shift, v = Input(a,
/// bias); with AnyPending, all that NormalizeParams can say.
template <class A, class Input, int kLanes>
struct ChannelMap {
  using S = Stat<A>;
  static constexpr bool kReadsSkip = Input::kDecidesLater;
  S mean[kLanes], scale[kLanes], shift[kLanes], bias[kLanes];

  /// Takes the row of `channel` into one lane.
  template <class Y>
  __device__ __forceinline__ void load(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                       std::int64_t channel, int lane) {
    load_bias(args, channel, lane);
    if (Input::kDecidesLater && args.table == nullptr) return;
    const std::int64_t plane = args.shape.n * args.shape.k;
    const S* from = args.table + sample * args.shape.k + channel;
    mean[lane] = from[0];
    scale[lane] = from[plane];
    shift[lane] = from[2 * plane];
  }

  template <class Y>
  __device__ __forceinline__ void load_bias(const NormalizeArgs<A, Y>& args, std::int64_t channel, int lane) {
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
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) load_bias(args, channel + lane, lane);
    if (Input::kDecidesLater && args.table == nullptr) return;
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
    }
  }

  /// kCount elements, the j-th of them of channel channel_of(j), which lane lane_of(j) has.
  /// \param skip with AnyPending alone
  /// \param channel_of below K
  template <class Y, int kCount, class LaneOf, class ChannelOf>
  __device__ __forceinline__ Vector<Y, kCount> apply(const NormalizeArgs<A, Y>& args,
                                                     const Vector<A, kCount>& a,
                                                     const Vector<A, kCount>& skip, LaneOf lane_of,
                                                     ChannelOf channel_of) const {
    S v[kCount];
    if constexpr (Input::kDecidesLater) {
      add_pending(a, bias, args.skip != nullptr, skip, v, lane_of);
      const bool has_norm = args.table != nullptr;
      if (has_norm && args.norm_first) normalize(v, lane_of);
      activate(args.activation, args.parameter, v,
               [&](int j) { return activation_parameter<Y>(args.activation, channel_of(j)); });
      if (has_norm && !args.norm_first) normalize(v, lane_of);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = Input{}(to_stat(a.at[j]), bias[lane_of(j)]);
      normalize(v, lane_of);
    }
    Vector<Y, kCount> y;
#pragma unroll
    for (int j = 0; j < kCount; ++j) y.at[j] = from_stat<Y>(v[j]);
    return y;
  }

 private:
  template <int kCount, class LaneOf>
  __device__ __forceinline__ void normalize(S (&v)[kCount], LaneOf lane_of) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      v[j] = (v[j] - mean[lane_of(j)]) * scale[lane_of(j)] + shift[lane_of(j)];
    }
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

/// The arguments that no launch decides.
template <class A, class Y>
NormalizeArgs<A, Y> normalize_args(const NormalizeParams& params) {
  NormalizeArgs<A, Y> args{};
  args.shape = params.shape;
  args.a = static_cast<const A*>(params.a);
  args.bias = static_cast<const A*>(params.bias);
  args.skip = static_cast<const A*>(params.skip);
  args.table = static_cast<const Stat<A>*>(params.table);
  args.y = static_cast<Y*>(params.y);
  args.norm_first = params.before.kind == Activation::kNone;
  args.activation = args.norm_first ? params.after : params.before;
  args.parameter = static_cast<Stat<A>>(args.activation.parameter);
  args.a_pitch = row_pitch(params);
  return args;
}

/// Calls visit(A tag, Y tag, Input tag) for the types that `params` names.
/// \throws std::invalid_argument for a pair of dtypes that has no kernel.
template <class Visit>
void with_normalize_types(const NormalizeParams& params, Visit&& visit) {
  with_element(params.a_dtype, [&](auto a) {
    const auto with_input = [&](auto y) {
      const bool is_plain =
          params.table != nullptr && params.skip == nullptr && params.after.kind == Activation::kNone;
      if (is_plain && params.before.kind == Activation::kRelu) {
        return visit(a, y, std::type_identity<AfterBias<ReluActivation>>{});
      }
      if (is_plain && params.before.kind == Activation::kNone && params.bias == nullptr) {
        return visit(a, y, std::type_identity<AsStored>{});
      }
      return visit(a, y, std::type_identity<AnyPending>{});
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
