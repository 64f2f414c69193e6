// SPDX-License-Identifier: Apache-2.0
/// \file
/// The epilogue's first half, by the consumer warps: unscale, bias, before(), conversion, the moments of
/// tiles of few k-blocks or with a step, and the way into shared memory, where drain_sm90.cuh takes over.
///
/// A consumer warpgroup holds 64 output channels x WG_POS output positions in wgmma's accumulator layout: a
/// thread owns two channels (rows lane/4 and lane/4 + 8 of its warp's 16) and, in each block of 8 positions,
/// the pair at 2*(lane%4).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/numeric_conversion.h"

#include "cuda/conv_transpose/accumulator_activation_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/matrix_moments_sm90.cuh"
#include "cuda/conv_transpose/running_moments_sm90.cuh"
#include "cuda/conv_transpose/staged_tile_sm90.cuh"

namespace upconv3d::cuda {

/// ReLU that lets NaN through, as torch.relu does; or, with a floor of -infinity, nothing at all: an operand
/// in place of a branch.
struct FloorActivation {
  float floor;

  CUTLASS_DEVICE float operator()(float v) const {
    return cutlass::epilogue::thread::ReLu<float>{}(floor, v);
  }
};

/// 2^e for e within float's normal range, the nearest end of it otherwise.
CUTLASS_DEVICE float clamped_power_of_two(int e) {
  return __int_as_float((max(-126, min(127, e)) + 127) << 23);
}

/// Exponent that Stepped16 uses for "not finite".
inline constexpr int kNoStep = -128;

/// 2^step of Stepped16; NaN where the values were not finite, so that the whole group becomes NaN as in
/// PyTorch.
CUTLASS_DEVICE float step_value(int step) {
  return step == kNoStep ? __int_as_float(0x7fc00000) : clamped_power_of_two(step);
}

/// Moments of Stepped16's integers to those of the values.
CUTLASS_DEVICE void scale_by_step(RunningMoments& moments, int step) {
  float const value = step_value(step);
  moments.mean *= value;
  moments.m2 = moments.m2 * value * value;
}

template <class Traits>
struct ReluEpilogue {
  using Stored = typename Traits::Stored;
  static constexpr int WG_POS = Traits::WG_POS;
  static constexpr int kBlocks = WG_POS / 8;  // blocks of 8 positions, wgmma's column unit

  using Output = typename Traits::Output;

  /// Of values that are rounded to 16 bit ReLU comes with that.
  static constexpr bool ROUNDS = sizeof(Output) == 2;
  /// Whether tensor cores add up the channels' values, as they are staged.
  static constexpr bool SUMS_BY_MATRIX = Traits::TAKES_ROW_MOMENTS && ROUNDS;

  /// What applies to the thread's two channels, as it comes from memory.
  struct Terms {
    Output bias[2];
    std::int32_t unscale_sample, unscale_column[2];  // exponents; float32 output only
  };

  /// \param channel0 first of the warpgroup's 64
  CUTLASS_DEVICE static Terms load_terms(KernelParams<Traits> const& params, int n, int channel0) {
    Terms terms{};
    if constexpr (sizeof(Output) == 4) terms.unscale_sample = params.unscale_sample[n * params.unscale_step];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      // Rows beyond K are computed like the last one and never stored: no branch in which warps diverge may
      // come between wgmma and the use of its result.
      int const channel = min(channel0 + accumulator_row() + 8 * j, params.k - 1);
      if (params.bias) terms.bias[j] = params.bias[channel];
      if constexpr (sizeof(Output) == 4) terms.unscale_column[j] = params.unscale_column[channel];
    }
    return terms;
  }

  /// Makes of acc ((2,2,WG_POS/8),1,1) what is to be staged, of 16 bit but for ReLU.
  /// \param valid positions inside the slab; those beyond belong to the next sample
  /// \param step  written: exponents of the thread's two channels, Stepped16 only
  /// \param rows  [64] written by Stepped16, by others in `stage`, unless null: (mean, M2) of the channels;
  ///              some position is valid then
  template <class Accumulator>
  CUTLASS_DEVICE static void prepare(KernelParams<Traits> const& params, Terms const& terms,
                                     [[maybe_unused]] int channel0, [[maybe_unused]] int valid,
                                     Accumulator& acc, [[maybe_unused]] int (&step)[2],
                                     [[maybe_unused]] float2* rows) {
    Terms left = terms;
    if constexpr (ROUNDS) {
      if (params.bias != nullptr) add_bias(terms, acc);
    } else if constexpr (!Traits::QUANTIZED || Traits::CURVED) {
      add_terms(params, terms, acc);
      left = {};
    }
    if constexpr (Traits::CURVED) {
      // Always so. Without a branch ptxas spills four bytes.
      if (params.before.kind != Activation::kNone) activate(params, channel0, acc);
    }
    if constexpr (Traits::QUANTIZED) {
      Traits::CURVED || params.floor < 0.f ? quantize<true>(params, left, valid, acc, step, rows)
                                           : quantize<false>(params, left, valid, acc, step, rows);
    } else if (SUMS_BY_MATRIX && rows != nullptr && valid < WG_POS) {
      float const zeros[2] = {0.f, 0.f};
      fill_beyond<kBlocks>(valid, zeros, acc);
    }
  }

  /// Stages the first STAGED_POS positions of a prepared acc.
  ///
  /// \param valid   as above
  /// \param step    exponents of the thread's two channels, Stepped16 only
  /// \param rows    as above
  /// \param staging [64 channels x STAGED_POS positions] Stored, this warpgroup's
  /// \param steps   [64] written: exponents of the channels, Stepped16 only
  template <class Accumulator>
  CUTLASS_DEVICE static void stage(KernelParams<Traits> const& params, [[maybe_unused]] int valid,
                                   Accumulator& acc, [[maybe_unused]] int const (&step)[2],
                                   [[maybe_unused]] float2* rows, char* staging,
                                   [[maybe_unused]] std::int8_t* steps) {
    if constexpr (SUMS_BY_MATRIX) {
      MatrixMoments<Stored> sums;
      bool const wanted = rows != nullptr;
      stage_round<0>(params, acc, staging,
                     [&](std::uint32_t const(&packed)[4]) { sums.add(wanted, packed); });
      if (wanted) write_matrix_moments(params, valid, acc, sums, rows);
    } else {
      stage_round<0>(params, acc, staging);
    }
    if constexpr (Traits::QUANTIZED) {
      if (threadIdx.x % 4 == 0) {
        steps[accumulator_row()] = std::int8_t(step[0]);
        steps[accumulator_row() + 8] = std::int8_t(step[1]);
      }
    }
  }

  /// Stages positions kRound * STAGED_POS on of a prepared acc. \param see as StagedTile::stage has it
  template <int kRound, class Accumulator, class See = NobodySees>
  CUTLASS_DEVICE static void stage_round(KernelParams<Traits> const& params, Accumulator const& acc,
                                         char* staging, See const& see = {}) {
    if constexpr (ROUNDS) {
      if (params.floor < 0.f) {
        stage_blocks<kRound, false>(params, acc, staging, see);
      } else {
        stage_blocks<kRound, true>(params, acc, staging, see);
      }
    } else {
      stage_blocks<kRound, false>(params, acc, staging, see);
    }
  }

 private:
  template <int kRound, bool kRelu, class Accumulator, class See>
  CUTLASS_DEVICE static void stage_blocks(KernelParams<Traits> const& params, Accumulator const& acc,
                                          char* staging, See const& see) {
    constexpr int kStaged = Traits::STAGED_POS / 8, kFirst = kRound * kStaged;
    if constexpr (!Traits::QUANTIZED) {
      if (params.channels_first) {
        StagedTile<Stored>::template stage_channels_first<kFirst, kStaged, kRelu>(acc, staging);
        return;
      }
    }
    StagedTile<Stored>::template stage<kFirst, kStaged, kRelu>(acc, staging, see);
  }

  /// acc += bias.
  template <class Accumulator>
  CUTLASS_DEVICE static void add_bias(Terms const& terms, Accumulator& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const bias = float(terms.bias[j]);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        acc(2 * j + 4 * block) += bias;
        acc(1 + 2 * j + 4 * block) += bias;
      }
    }
  }

  /// acc = before(acc).
  template <class Accumulator>
  CUTLASS_DEVICE static void activate(KernelParams<Traits> const& params, int channel0, Accumulator& acc) {
    int const row = channel0 + accumulator_row(), last = params.k - 1;  // as in load_terms
    int const channels[2] = {min(row, last), min(row + 8, last)};
    activate_accumulator<Output, Traits::PRODUCTS == 3, 16>(params.before, channels, acc);
  }

  /// acc = unscaled acc + bias, raised to the floor.
  template <class Accumulator>
  CUTLASS_DEVICE static void add_terms(KernelParams<Traits> const& params, Terms const& terms,
                                       Accumulator& acc) {
    int const exponent[2] = {terms.unscale_sample + terms.unscale_column[0],
                             terms.unscale_sample + terms.unscale_column[1]};
    scale_beyond_float(exponent, acc);
    float const scale[2] = {clamped_power_of_two(exponent[0]), clamped_power_of_two(exponent[1])};
    FloorActivation const activation{params.floor};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const bias = float(terms.bias[j]);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& v = acc(i + 2 * j + 4 * block);
          v = activation(v * scale[j] + bias);
        }
      }
    }
  }

  /// Where 2^e of a product of scales leaves float's range, which the values need not: acc *= what a clamped
  /// power of two lacks. Hardly ever, so by whole warps.
  template <class Accumulator>
  CUTLASS_DEVICE static void scale_beyond_float(int const (&exponent)[2], Accumulator& acc) {
    int const rest[2] = {exponent[0] - max(-126, min(127, exponent[0])),
                         exponent[1] - max(-126, min(127, exponent[1]))};
    if (__all_sync(0xffffffffu, rest[0] == 0 && rest[1] == 0)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const scale = clamped_power_of_two(rest[j]);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        acc(2 * j + 4 * block) *= scale;
        acc(1 + 2 * j + 4 * block) *= scale;
      }
    }
  }

  /// Two neighbouring positions' values as they will be stored; Stepped16's integers beside 2^23.
  CUTLASS_DEVICE static cutlass::Array<float, 2> stored_pair(float first, float second) {
    cutlass::Array<float, 2> const pair{first, second};
    if constexpr (Traits::QUANTIZED) {
      return pair;
    } else {
      auto const rounded = cutlass::NumericArrayConverter<Stored, float, 2>{}(pair);
      return {float(rounded[0]), float(rounded[1])};
    }
  }

  /// v of the first of a row's four lanes. In assembly, as in StagedTile::pack: __shfl_sync takes integers.
  CUTLASS_DEVICE static float of_first_lane(float v) {
    float first;
    asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1c1f, 0xffffffff;" : "=f"(first) : "f"(v));
    return first;
  }

  /// Sums of a thread's values in its two rows of acc, and of their squares.
  struct RowSums {
    float sum[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};

    CUTLASS_DEVICE void add(int row, float v) {
      sum[row] += v;
      squares[row] += v * v;
    }
    /// Of the row's four lanes.
    CUTLASS_DEVICE void add_lanes() {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) {
          sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], mask);
          squares[j] += __shfl_xor_sync(0xffffffffu, squares[j], mask);
        }
      }
    }
  };

  /// Whether a row's moments do not follow from sums of its values and of their squares, by which they would
  /// be the least share of the latter, or the latter are too many for a float.
  CUTLASS_DEVICE static bool is_doubtful(float m2, float squares, float least_share) {
    return m2 < least_share * squares || squares >= 0x1p127f;
  }

  /// Moments of the rows of acc from the sums that tensor cores made, unless those do not tell: then from
  /// acc.
  template <class Accumulator>
  CUTLASS_DEVICE static void write_matrix_moments(KernelParams<Traits> const& params, int valid,
                                                  Accumulator& acc, MatrixMoments<Stored> const& sums,
                                                  float2* rows) {
    float const count = float(min(valid, WG_POS)), inverse = inverse_of_count(count);
    RunningMoments row[2];
    bool doubtful = false;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const mean = sums.sum(j) * inverse;
      float const m2 = sums.squares(j) - sums.sum(j) * mean;
      row[j] = {count, mean, m2};
      doubtful = doubtful || is_doubtful(m2, sums.squares(j), MatrixMoments<Stored>::kLeastShare);
    }
    bool const has_sums = MatrixMoments<Stored>::has_sums();
    if (__any_sync(0xffffffffu, has_sums && doubtful)) take_shifted_moments(params, valid, inverse, acc, row);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      if (has_sums) rows[accumulator_row() + 8 * j] = make_float2(row[j].mean, row[j].m2);
    }
  }

  /// The rows' moments from their sums, unless those do not tell: then from acc.
  template <class Accumulator>
  CUTLASS_DEVICE static void write_moments(KernelParams<Traits> const& params, int valid, Accumulator& acc,
                                           RowSums& sums, int const (&step)[2], float2* rows) {
    // Of the 24 bits of a sum of squares ten may cancel, which leaves an inverse deviation 13, two more than
    // operands of 16 bits leave a value.
    constexpr float kLeastShare = 0x1p-10f;
    float const count = float(min(valid, WG_POS)), inverse = inverse_of_count(count);
    sums.add_lanes();
    RunningMoments row[2];
    bool doubtful = false;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const mean = sums.sum[j] * inverse;
      float const m2 = sums.squares[j] - sums.sum[j] * mean;
      row[j] = {count, mean, m2};
      doubtful = doubtful || is_doubtful(m2, sums.squares[j], kLeastShare);
    }
    if (__any_sync(0xffffffffu, doubtful)) take_shifted_moments(params, valid, inverse, acc, row);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      scale_by_step(row[j], step[j]);
      if (threadIdx.x % 4 == 0) rows[accumulator_row() + 8 * j] = make_float2(row[j].mean, row[j].m2);
    }
  }

  /// Moments of the rows of acc as they will be stored, around their first position's value: as
  /// Drain::moments takes them, but added up in another order. Of Stepped16's integers.
  template <class Accumulator>
  CUTLASS_DEVICE static void take_shifted_moments([[maybe_unused]] KernelParams<Traits> const& params,
                                                  int valid, float inverse, Accumulator& acc,
                                                  RunningMoments (&row)[2]) {
    if constexpr (ROUNDS) {
      FloorActivation const activation{params.floor};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4 * kBlocks; ++i) acc(i) = activation(acc(i));
    }
    if (valid < WG_POS) {
      float const first[2] = {of_first_lane(acc(0)), of_first_lane(acc(2))};
      fill_beyond<kBlocks>(valid, first, acc);
    }
    RowSums sums;
    float pivot[2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      // Lanes of a row are four neighbours, of which the first has the first position.
      pivot[j] = of_first_lane(stored_pair(acc(2 * j), acc(1 + 2 * j))[0]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        auto const values = stored_pair(acc(2 * j + 4 * block), acc(1 + 2 * j + 4 * block));
        sums.add(j, values[0] - pivot[j]);
        sums.add(j, values[1] - pivot[j]);
      }
    }
    sums.add_lanes();
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      if constexpr (Traits::QUANTIZED) pivot[j] -= params.stepped_zero;
      row[j] = shifted_moments(row[j].count, pivot[j], sums.sum[j], sums.squares[j], sums.sum[j] * inverse);
    }
  }

  /// acc = relu(unscaled acc + bias), or without ReLU, / 2^step rounded to an integer of less than
  /// 2^step_bits, plus the zero point, in the lower half of the float's bits; one step per channel, from its
  /// largest magnitude in this half tile. All scales are powers of two and multiply acc at once.
  /// \tparam IS_SIGNED there is no ReLU
  template <bool IS_SIGNED, class Accumulator>
  CUTLASS_DEVICE static void quantize(KernelParams<Traits> const& params, Terms const& terms, int valid,
                                      Accumulator& acc, int (&steps)[2], float2* rows) {
    int exponent[2] = {terms.unscale_sample + terms.unscale_column[0],
                       terms.unscale_sample + terms.unscale_column[1]};
    float bias[2] = {float(terms.bias[0]), float(terms.bias[1])};
    scale_beyond_float(exponent, acc);
    if (valid < WG_POS) clear_beyond(valid, exponent, bias, acc);
    RowSums sums;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const unscale = max(-126, min(127, exponent[j]));
      float const largest = largest_magnitude<IS_SIGNED>(acc, j, clamped_power_of_two(unscale), bias[j]);
      // A little above the largest value, so that rounding to an integer stays below 2^step_bits.
      float const bound = largest * (1.f + 0x1p-15f);
      int const reach = (__float_as_int(bound) >> 23) - 126;  // bound < 2^reach
      bool const finite = bound < __int_as_float(0x7f800000);
      // Down to 2^-126: what is smaller than that is rounded to a multiple of it.
      int const step = finite ? max(reach - params.step_bits, -126) : kNoStep;
      steps[j] = step;
      // Of a row that is not all zeros, accumulators other than 0 have no room for a scale beyond float's
      // range, so clamping changes nothing. In one of zeros ReLU takes what acc and bias leave, or they
      // cancel: neither may meet 2^126.
      bool const scales = finite && bound > 0.f;
      float const scale = scales ? clamped_power_of_two(unscale - step) : 0.f;
      float const offset = scales ? bias[j] * clamped_power_of_two(-step) : 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& v = acc(i + 2 * j + 4 * block);
          float in_steps = v * scale + offset;
          // What is above 0 after ReLU stays so, however small: the backward tells by this which values ReLU
          // let through. Signed values are 1 or more anyway.
          if constexpr (!IS_SIGNED) in_steps = fmaxf(in_steps, one_if_positive(in_steps));
          v = in_steps + params.stepped_zero;  // beside 2^23 a float's last bit is worth 1
          // Of what is stored: to a backward pass that is the activation, whose distances to its mean cancel.
          sums.add(j, v - params.stepped_zero);
        }
      }
    }
    if (rows != nullptr) write_moments(params, valid, acc, sums, steps, rows);
  }

  /// 1 or 0, by one instruction.
  CUTLASS_DEVICE static float one_if_positive(float v) {
    float result;
    asm("set.gt.f32.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(v));
    return result;
  }

  /// Largest |acc * scale + bias| of a row; of what ReLU leaves of it unless IS_SIGNED.
  template <bool IS_SIGNED, class Accumulator>
  CUTLASS_DEVICE static float largest_magnitude(Accumulator const& acc, int j, float scale, float bias) {
    float largest = acc(2 * j), smallest = acc(2 * j);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        largest = max_nan(largest, acc(i + 2 * j + 4 * block));
        if constexpr (IS_SIGNED) smallest = min_nan(smallest, acc(i + 2 * j + 4 * block));
      }
    }
    // Scaling and adding keep their order.
    float magnitude = largest * scale + bias;
    magnitude =
        IS_SIGNED ? max_nan(fabsf(magnitude), fabsf(smallest * scale + bias)) : max_nan(magnitude, 0.f);
    magnitude = max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 1));
    return max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 2));
  }

  /// acc = unscaled acc + bias, but 0 from position `valid` on, which are the next sample's, or anything:
  /// then nothing is left to unscale and to add.
  template <class Accumulator>
  CUTLASS_DEVICE static void clear_beyond(int valid, int (&exponent)[2], float (&bias)[2], Accumulator& acc) {
    int const end =
        valid - 2 * int(threadIdx.x % 4);  // of the thread's positions, each block's first being 0
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      float const scale = clamped_power_of_two(exponent[j]);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& v = acc(i + 2 * j + 4 * block);
          v = 8 * block + i >= end ? 0.f : v * scale + bias[j];
        }
      }
      exponent[j] = 0;
      bias[j] = 0.f;
    }
  }

  /// max that lets NaN through, unlike fmaxf.
  CUTLASS_DEVICE static float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  }
  CUTLASS_DEVICE static float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  }
};

}  // namespace upconv3d::cuda
