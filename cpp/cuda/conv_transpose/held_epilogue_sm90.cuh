// SPDX-License-Identifier: Apache-2.0
/// \file
/// From accumulators to what conv_transpose_held_sm90 holds: bias, before(), partial moments, conversion, and
/// the way into shared memory.
///
/// A thread holds two rows, output channels (accumulator_row and 8 further), and in each block of 8 positions
/// the pair at 2*(lane%4). All values of a tile are there at once, so its moments take two turns: the mean,
/// then squares about it.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"

#include "cuda/conv_transpose/held_params_sm90.cuh"
#include "cuda/conv_transpose/relu_epilogue_sm90.cuh"
#include "cuda/conv_transpose/running_moments_sm90.cuh"
#include "cuda/conv_transpose/staged_tile_sm90.cuh"

namespace upconv3d::cuda {

template <class Traits>
struct HeldEpilogue {
  using Output = typename Traits::Output;
  static constexpr int kBlocks = Traits::BLK_POS / 8;  // blocks of 8 positions, wgmma's column unit

  /// Consumes acc ((2,2,BLK_POS/8),1,1).
  /// \param to [SHAPE.tile_bytes] written
  template <class Accumulator>
  CUTLASS_DEVICE static void keep(HeldParams<Traits> const& params, HeldSlab const& slab,
                                  HeldTile const& tile, Accumulator& acc, char* to) {
    int const valid = min(slab.positions - tile.position, Traits::BLK_POS);
    apply_terms(params, tile.channel, acc);
    StagedTile<Output>::template stage<0, kBlocks>(acc, to);
    RunningMoments row[2];
    take_moments(valid, acc, row);
    std::int64_t const moment =
        std::int64_t(tile.n) * params.moments + slab.first_moment + tile.position / Traits::BLK_POS;
    write_granules(params, moment * (params.k >> params.granule_shift), tile.channel, row);
  }

 private:
  /// acc = acc + bias, raised to the floor. Rows beyond K are like the last one, and never used.
  template <class Accumulator>
  CUTLASS_DEVICE static void apply_terms(HeldParams<Traits> const& params, int channel0, Accumulator& acc) {
    FloorActivation const before{params.floor};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const channel = min(channel0 + accumulator_row() + 8 * j, params.k - 1);
      float const bias = params.bias ? float(params.bias[channel]) : 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& v = acc(i + 2 * j + 4 * block);
          // Moments are those of what is normalized: else a volume of one value would be off by its rounding,
          // magnified by up to 1/sqrt(eps).
          v = float(Output(before(v + bias)));
        }
      }
    }
  }

  CUTLASS_DEVICE static float of_row(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
  }

  /// Moments of the thread's two rows, in all of their four lanes.
  template <class Accumulator>
  CUTLASS_DEVICE static void take_moments(int valid, Accumulator& acc, RunningMoments (&row)[2]) {
    float const zeros[2] = {0.f, 0.f};
    if (valid < Traits::BLK_POS) fill_beyond<kBlocks>(valid, zeros, acc);
    float const count = float(valid), inverse = inverse_of_count(count);
    float mean[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        sum += acc(2 * j + 4 * block) + acc(1 + 2 * j + 4 * block);
      }
      mean[j] = of_row(sum) * inverse;
    }
    if (valid < Traits::BLK_POS) fill_beyond<kBlocks>(valid, mean, acc);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float squares = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float const delta = acc(i + 2 * j + 4 * block) - mean[j];
          squares += delta * delta;
        }
      }
      row[j] = {count, mean[j], of_row(squares)};
    }
  }

  /// Of as many values each, the same bits whichever is which.
  CUTLASS_DEVICE static void merge_equal(RunningMoments& a, RunningMoments const& b) {
    float const delta = b.mean - a.mean;
    a.mean = 0.5f * (a.mean + b.mean);
    a.m2 = (a.m2 + b.m2) + delta * (0.5f * a.count) * delta;
    a.count += a.count;
  }

  /// Merges a granule's rows, and writes its moments.
  /// \param first index of the moment's first granule in part
  CUTLASS_DEVICE static void write_granules(HeldParams<Traits> const& params, std::int64_t first,
                                            int channel0, RunningMoments (&row)[2]) {
    int const shift = params.granule_shift;
    CUTLASS_PRAGMA_UNROLL
    for (int bit = 0; bit < 3; ++bit) {
      if (bit >= shift) break;
      merge_equal(row[0], row[0].from_lane(4 << bit));
      merge_equal(row[1], row[1].from_lane(4 << bit));
    }
    if (shift == 4) merge_equal(row[0], row[1]);
    int const own = accumulator_row();
    if (threadIdx.x % 4 != 0 || own % 8 % (1 << min(shift, 3)) != 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const channel = channel0 + own + 8 * j;
      if (channel >= params.k || (j == 1 && shift == 4)) continue;
      params.part[first + (channel >> shift)] = make_float4(row[j].mean, row[j].m2, row[j].count, 0.f);
    }
  }
};

}  // namespace upconv3d::cuda
