// SPDX-License-Identifier: Apache-2.0
/// \file
/// The way of conv_transpose_twice_sm90's result to y [N,K,Z,P,Q], straight from registers.
///
/// Two phases along the width are stacked so that a thread's two rows are one channel's
/// (core/twice_layout.hpp): of a pair of neighbouring positions it holds four neighbours of y, and the four
/// threads of a row 16: 64 bytes of float32, whole sectors without a detour through shared memory.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

#include "cuda/conv_transpose/twice_params_sm90.cuh"

namespace upconv3d::cuda {

/// Two values in 16 bits each, the first in the lower half.
template <class Output>
CUTLASS_DEVICE std::uint32_t pack_neighbours(float a, float b) {
  cutlass::Array<float, 2> const pair{a, b};
  auto const rounded = cutlass::NumericArrayConverter<Output, float, 2>{}(pair);
  return reinterpret_cast<std::uint32_t const&>(rounded);
}

/// Stores values at y + at, evict first, since nobody reads them again; nothing where `at` is negative.
/// Predicated, not branched: the lanes shuffle before the next store. The address in one instruction.
CUTLASS_DEVICE void store_neighbours(float* y, int at, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .pred inside;\n.reg .b64 to;\nsetp.ge.s32 inside, %1, 0;\nmad.wide.s32 to, %1, 4, %0;\n"
      "@inside st.global.cs.v4.f32 [to], {%2, %3, %4, %5};\n}"
      :
      : "l"(y), "r"(at), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}
CUTLASS_DEVICE void store_neighbours(float* y, int at, float a, float b) {
  asm volatile(
      "{\n.reg .pred inside;\n.reg .b64 to;\nsetp.ge.s32 inside, %1, 0;\nmad.wide.s32 to, %1, 4, %0;\n"
      "@inside st.global.cs.v2.f32 [to], {%2, %3};\n}"
      :
      : "l"(y), "r"(at), "f"(a), "f"(b)
      : "memory");
}
template <class Output>
CUTLASS_DEVICE void store_neighbours(Output* y, int at, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .pred inside;\n.reg .b64 to;\nsetp.ge.s32 inside, %1, 0;\nmad.wide.s32 to, %1, 2, %0;\n"
      "@inside st.global.cs.v2.b32 [to], {%2, %3};\n}"
      :
      : "l"(y), "r"(at), "r"(pack_neighbours<Output>(a, b)), "r"(pack_neighbours<Output>(c, d))
      : "memory");
}
template <class Output>
CUTLASS_DEVICE void store_neighbours(Output* y, int at, float a, float b) {
  asm volatile(
      "{\n.reg .pred inside;\n.reg .b64 to;\nsetp.ge.s32 inside, %1, 0;\nmad.wide.s32 to, %1, 2, %0;\n"
      "@inside st.global.cs.b32 [to], %2;\n}"
      :
      : "l"(y), "r"(at), "r"(pack_neighbours<Output>(a, b))
      : "memory");
}

/// Where a tile's positions of the thread's channel lie.
struct TwicePlane {
  std::int64_t channel;  // of all samples'
  int begin, end;        // the tile's first position within the view; the view's number of them
};

/// Stores a warp's tile, kUnit positions at a time, which are neighbours within a row of the view.
///
/// \param acc ((2,2,BLK_POS/8),1,1) with the two in the middle of every four exchanged: both phases of a
/// position lie side by side
template <int kUnit, class Traits, class Accumulator>
CUTLASS_DEVICE void store_units(TwiceParams<Traits> const& params, TwiceView const& view,
                                TwicePlane const& plane, Accumulator const& acc) {
  int const(&out)[3] = params.view_out;
  auto* const channel = params.y + plane.channel * (std::int64_t(out[0]) * out[1] * out[2] * 2);
  constexpr int kLanes = 32;
  constexpr int kUnits = Traits::BLK_POS / kUnit;
  constexpr int kBlockUnits = 8 / kUnit;  // of wgmma's column unit
  int const lane = threadIdx.x % kLanes;
  // Addresses are divided among the lanes: they are the same for all channels.
  int offset[kUnits / kLanes];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kUnits / kLanes; ++i) {
    int const position = plane.begin + (i * kLanes + lane) * kUnit;
    offset[i] = position < plane.end ? 2 * view.pixel(out, position) : -1;
  }
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < Traits::BLK_POS / 8; ++block) {
    int const first = block * kBlockUnits;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 / kUnit; ++i) {
      int const from = first % kLanes + lane % 4 * (2 / kUnit) + i;
      int const at = __shfl_sync(0xffffffffu, offset[first / kLanes], from);
      int const v = 4 * block + 2 * i;
      if constexpr (kUnit == 2) {
        store_neighbours(channel, at, acc(v), acc(v + 1), acc(v + 2), acc(v + 3));
      } else {
        store_neighbours(channel, at, acc(v), acc(v + 1));
      }
    }
  }
}

/// Stores a warp's tile: pairs of positions, or single ones where rows are of odd length.
template <class Traits, class Accumulator>
CUTLASS_DEVICE void store_channels_first(TwiceParams<Traits> const& params, TwiceView const& view,
                                         TwicePlane const& plane, Accumulator const& acc) {
  if (view.width.divisor % 2 == 0) {
    store_units<2>(params, view, plane, acc);
  } else {
    store_units<1>(params, view, plane, acc);
  }
}

}  // namespace upconv3d::cuda
