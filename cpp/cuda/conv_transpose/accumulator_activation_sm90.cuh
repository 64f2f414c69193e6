// SPDX-License-Identifier: Apache-2.0
/// \file
/// An activation of what wgmma accumulated, in the registers where it lies.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"

#include "cuda/activation.cuh"

namespace upconv3d::cuda {

/// acc = activation(acc), written out: a few instructions for each value.
template <class Activated, class Accumulator>
CUTLASS_DEVICE void activate_unrolled(Activated const& activation, float const (&parameter)[2],
                                      Accumulator& acc) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) acc(i) = activation.value(acc(i), parameter[i / 2 % 2]);
}

/// The same kAtOnce registers at a time, through which all of them pass in turn. Written out, an exponential
/// of 128 values is 40 KB of code, whose way from memory took a launch 20 us where L2 did not hold it.
template <int kAtOnce, class Activated, class Accumulator>
CUTLASS_DEVICE void activate_in_turn(Activated const& activation, float const (&parameter)[2],
                                     Accumulator& acc) {
  constexpr int kAll = decltype(cute::size(acc))::value;
  static_assert(kAll % kAtOnce == 0 && kAtOnce % 4 == 0, "rows come back to where they were");
  CUTLASS_PRAGMA_NO_UNROLL
  for (int turn = 0; turn < kAll / kAtOnce; ++turn) {
    float activated[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) activated[i] = activation.value(acc(i), parameter[i / 2 % 2]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = kAtOnce; i < kAll; ++i) acc(i - kAtOnce) = acc(i);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) acc(kAll - kAtOnce + i) = activated[i];
  }
}

/// acc = activation(acc), by a consumer warpgroup.
///
/// \tparam Output what slopes are stored as
/// \tparam kExact to float's accuracy; else to that of products of 11 bits
/// \tparam kAtOnce registers that the caller can spare, a multiple of 4
/// \param channels of the thread's two rows of acc ((2,2,positions/8),1,1)
template <class Output, bool kExact, int kAtOnce, class Accumulator>
CUTLASS_DEVICE void activate_accumulator(ActivationParams const& params, int const (&channels)[2],
                                         Accumulator& acc) {
  float const parameter[2] = {activation_parameter<Output>(params, channels[0]),
                              activation_parameter<Output>(params, channels[1])};
  with_activation(params.kind, [&](auto activation) {
    using Activated = decltype(activation);
    constexpr bool kFew =
        std::is_same_v<Activated, ReluActivation> || std::is_same_v<Activated, SlopeActivation>;
    if constexpr (kFew) {
      activate_unrolled(activation, parameter, acc);
    } else if constexpr (std::is_same_v<Activated, EluActivation> && !kExact) {
      activate_in_turn<kAtOnce>(CoarseEluActivation{}, parameter, acc);
    } else if constexpr (!std::is_same_v<Activated, NoActivation>) {
      activate_in_turn<kAtOnce>(activation, parameter, acc);
    }
  });
}

}  // namespace upconv3d::cuda
