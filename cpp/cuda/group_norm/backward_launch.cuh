// SPDX-License-Identifier: Apache-2.0
/// \file
/// launch_backward of one combination of types, for the files that instantiate it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/channels.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/group_norm/backward_launch.hpp"
#include "cuda/group_norm/group_norm_backward.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {

/// Units of a sample's channel block, at least: blocks beyond the last whole sample's units have nothing to
/// do.
///
/// Steps are as large as that allows. With a step per sample, its apply phase would find it in L2, which
/// spares 40 % of the traffic; but on an H200 the phases' ends, in which memory rests, took 9 us per step: 16
/// samples [128,34^3] bf16 took 0.30 ms, two to a step 0.24 ms.
inline constexpr int kLeastShares = 8;

template <class T, class A, class Out>
BackwardArgs<T, A, Out> backward_args(const GroupNormBackwardParams& params) {
  BackwardArgs<T, A, Out> args{};
  args.n = static_cast<int>(params.n);
  args.k = static_cast<int>(params.k);
  args.positions = static_cast<int>(params.positions);
  args.num_groups = static_cast<int>(params.num_groups);
  args.grad_y = static_cast<const T*>(params.grad_y);
  args.a = static_cast<const A*>(params.a);
  args.steps = params.steps;
  args.moment_of = params.moment_of;
  args.table = reinterpret_cast<const float4*>(params.table);
  args.gamma = static_cast<const T*>(params.gamma);
  args.grad_c = static_cast<Out*>(params.grad_c);
  args.unscale = params.unscale;
  args.grad_gamma = static_cast<T*>(params.grad_gamma);
  args.grad_beta = static_cast<T*>(params.grad_beta);
  args.grad_bias = static_cast<T*>(params.grad_bias);
  args.a_pitch = static_cast<int>(params.a_pitch);
  args.grad_c_pitch = static_cast<int>(params.grad_c_pitch);
  args.moments = static_cast<int>(params.moments);
  args.lo_step = std::is_same_v<Out, SplitHalf> ? static_cast<int>(SplitRow(params.grad_c_pitch).lo_step) : 0;

  const BackwardScratch scratch(params, params.scratch);
  args.arrivals = static_cast<int*>(scratch.counters);
  args.ready = args.arrivals + params.n;
  args.largest = args.ready + params.n;
  args.tickets = args.largest + 1;
  args.part = static_cast<float*>(scratch.part);
  args.sums = static_cast<ChannelSums*>(scratch.sums);
  args.terms = static_cast<GroupTerms*>(scratch.terms);
  args.after = params.after;
  args.beta = params.after.kind == Activation::kNone ? nullptr : static_cast<const T*>(params.beta);
  args.grad_slopes = static_cast<T*>(params.grad_slopes);
  args.slope_sums = params.grad_slopes != nullptr ? static_cast<double*>(scratch.slope_sums) : nullptr;
  args.closed = params.before == Activation::kRelu ? 0.f : std::numeric_limits<float>::quiet_NaN();
  args.stored_origin = stored_origin(params.signed_steps);
  args.group_channels.set(params.k / params.num_groups);
  const BackwardShape shape = backward_shape(params);
  args.vectors = shape.vectors;
  args.slots = shape.slots;
  args.block_channels = shape.block_channels;
  args.channel_blocks = shape.channel_blocks;
  return args;
}

template <class Traits>
void launch_backward_kernel(const GroupNormBackwardParams& params, cudaStream_t stream) {
  auto args = backward_args<typename Traits::T, typename Traits::A, typename Traits::Out>(params);
  const auto prepare = [&](int blocks) {
    // As many samples as leave each block one unit, and few blocks without one; equally many in each step.
    const std::int64_t most = std::max(1, blocks / (kLeastShares * args.channel_blocks));
    const std::int64_t steps = ceil_div(params.n, most);
    args.step_samples = static_cast<int>(ceil_div(params.n, steps));
    args.num_steps = static_cast<int>(ceil_div(params.n, args.step_samples));
    const std::int64_t granules = ceil_div(params.positions, kPositionGranule);
    const auto shares = [&](std::int64_t samples) {
      const std::int64_t fair = std::max<std::int64_t>(1, blocks / (samples * args.channel_blocks));
      return static_cast<int>(std::min(granules, fair));
    };
    args.step_shares = shares(args.step_samples);
    args.last_shares = shares(params.n - std::int64_t{args.num_steps - 1} * args.step_samples);
  };
  constexpr const char* kName = "group_norm_backward";
  const void* const kernel = reinterpret_cast<const void*>(group_norm_backward<Traits>);
  static ReservedSharedMemory reserved;
  reserved.ensure(kName, kernel, kBackwardSharedBytes<Traits>);
  launch_cooperative(kName, kernel, &args,
                     {backward_shape(params).max_blocks, kStreamThreads, kBackwardSharedBytes<Traits>},
                     stream, prepare);
}

template <class T, class A, class Out, bool kAnyTail>
void launch_backward_access(const GroupNormBackwardParams& params, cudaStream_t stream) {
  using enum GradAccess;
  const bool rows = params.grad_y_layout == Layout::kNDHWC;
  const bool whole =
      is_aligned(params.grad_y) &&
      (rows ? params.k % kBackwardVector : params.positions * std::int64_t{sizeof(T)} % kAccessBytes) == 0;
  if (rows) {
    whole ? launch_backward_kernel<BackwardTraits<T, A, Out, kRowVectors, kAnyTail>>(params, stream)
          : launch_backward_kernel<BackwardTraits<T, A, Out, kRowElements, kAnyTail>>(params, stream);
  } else if (backward_shape(params).block_channels == kNarrowTileChannels) {
    whole ? launch_backward_kernel<BackwardTraits<T, A, Out, kNarrowPlaneVectors, kAnyTail>>(params, stream)
          : launch_backward_kernel<BackwardTraits<T, A, Out, kNarrowPlaneElements, kAnyTail>>(params, stream);
  } else {
    whole ? launch_backward_kernel<BackwardTraits<T, A, Out, kPlaneVectors, kAnyTail>>(params, stream)
          : launch_backward_kernel<BackwardTraits<T, A, Out, kPlaneElements, kAnyTail>>(params, stream);
  }
}

template <class T, class A, class Out>
void launch_backward(const GroupNormBackwardParams& params, cudaStream_t stream) {
  is_relu_group_norm(params) ? launch_backward_access<T, A, Out, false>(params, stream)
                             : launch_backward_access<T, A, Out, true>(params, stream);
}

}  // namespace upconv3d::cuda
