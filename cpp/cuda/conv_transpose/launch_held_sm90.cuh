// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host's side of conv_transpose_held_sm90.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/held_tiles.hpp"
#include "core/index_math.hpp"
#include "cuda/conv_transpose/conv_transpose_held_sm90.cuh"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/conv_transpose/fill_geometry_sm90.cuh"
#include "cuda/conv_transpose/fill_params_sm90.cuh"
#include "cuda/conv_transpose/remembered_launch_sm90.hpp"
#include "cuda/conv_transpose/tail_sm90.hpp"

namespace upconv3d::cuda {

/// What a slab loads, and where it lies.
template <class Traits>
void fill_held_slab(const ConvTransposeParams& params, DType operand, const Slab& from, HeldSlab& slab,
                    CUtensorMap& map, TensorMaps& maps) {
  const Problem& problem = params.problem;
  const InputRows input = input_rows(params);
  maps.place(map, Mapped::kX,
             encode_slab_input(problem, from, operand, params.x_hi, input.samples, input.row, Traits::BLK_POS,
                               Traits::BLK_C));
  // Where no tap reaches, the one k-block behind the last: x and w are zeros there.
  const bool reached = from.tap_count() > 0;
  slab.c_begin = reached ? 0 : static_cast<int>(ceil_div(input.channels, Traits::BLK_C));
  const std::int64_t c_blocks = reached ? ceil_div(problem.c, Traits::BLK_C) : 1;
  const Extent3 taps = reached ? from.taps : Extent3{1, 1, 1};
  slab.c_blocks = static_cast<int>(c_blocks);
  slab.taps_w = static_cast<int>(taps[2]);
  slab.taps_h = static_cast<int>(taps[1]);
  slab.k_blocks = static_cast<int>(volume(taps) * c_blocks);
  copy_extent(input_box(problem, from).lower, slab.corner);
  copy_extent(from.dilation, slab.dilation);
  copy_extent(from.tap, slab.tap);
  copy_extent(from.tap_step, slab.tap_step);
  fill_geometry(from, slab);
  slab.pos_tiles = cutlass::FastDivmod(static_cast<int>(ceil_div(from.positions(), Traits::BLK_POS)));
}

/// All parameters but those of point_to and divide_shared_memory.
template <class Traits>
void fill_held_params(const ConvTransposeParams& params, DType operand, HeldParams<Traits>& to,
                      TensorMaps& maps) {
  const Problem& problem = params.problem;
  const std::vector<Slab> slabs = border_slabs(problem, 0);
  if (slabs.size() > kMaxSlabs || problem.groups != 1 || problem.k % kChannelUnit != 0 || params.linear ||
      params.y != nullptr || params.channel_table != nullptr) {
    throw std::logic_error(
        "upconv3d: conv_transpose_held_sm90 normalizes up to " + std::to_string(kMaxSlabs) +
        " phases of a convolution without groups into y [N,Z,P,Q,K]; got " + std::to_string(slabs.size()) +
        " phases of " + describe(problem) + ". select_plan must choose another plan.");
  }
  const std::int64_t k_tiles = ceil_div(problem.k, Traits::BLK_K);
  std::int64_t tiles = 0, moments = 0;
  to.num_slabs = static_cast<int>(slabs.size());
  for (std::size_t index = 0; index < slabs.size(); ++index) {
    HeldSlab& slab = to.slabs[index];
    fill_held_slab<Traits>(params, operand, slabs[index], slab, to.x[index], maps);
    to.first_tile[index] = static_cast<int>(tiles);
    slab.first_moment = static_cast<int>(moments);
    moments += slab.pos_tiles.divisor;
    tiles += problem.n * slab.pos_tiles.divisor * k_tiles;
  }
  to.tiles = static_cast<int>(tiles);
  to.moments = static_cast<int>(moments);
  to.k_tiles = cutlass::FastDivmod(static_cast<int>(k_tiles));
  maps.place(to.w, Mapped::kW,
             Traits::W_IN_PLACE
                 ? encode_w_in_place(problem, operand, params.w_hi, Traits::BLK_K, Traits::BLK_C)
                 : encode_w(problem, operand, params.w_hi, Traits::BLK_K, Traits::BLK_C));
  const std::int64_t w_inputs = Traits::W_IN_PLACE ? problem.c : operand_channels(problem);
  to.operand_bytes[0] = problem.k * volume(problem.kernel) * w_inputs * size_of(operand);
  to.operand_bytes[1] = problem.n * volume(problem.in) * input_rows(params).channels * size_of(operand);
  copy_extent(problem.kernel, to.kernel);
  copy_extent(problem.out(), to.out);
  to.positions = static_cast<int>(problem.positions());
  to.k = static_cast<int>(problem.k);
  const std::int64_t group_values = problem.k / problem.num_groups * problem.positions();
  to.inverse_count = 1.0 / static_cast<double>(group_values);
  to.eps = problem.eps;
  to.floor = checked_floor(params);
  to.granule_shift = held_granule_shift(problem);
  const std::int64_t group_channels = problem.k / problem.num_groups;
  to.group_channels = cutlass::FastDivmod(static_cast<int>(group_channels));
  to.group_granules = cutlass::FastDivmod(static_cast<int>(group_channels >> to.granule_shift));
  to.groups = static_cast<int>(problem.num_groups);
  to.groups_of_all = static_cast<int>(problem.n * problem.num_groups);
}

/// Every address of a launch but those in descriptors.
template <class Traits>
void point_to(const ConvTransposeParams& params, HeldParams<Traits>& to) {
  using Output = typename Traits::Output;
  to.y = static_cast<Output*>(params.a);
  to.bias = static_cast<const Output*>(params.bias);
  to.gamma = static_cast<const Output*>(params.gamma);
  to.beta = static_cast<const Output*>(params.beta);
  to.after = checked_linear_after(params);
  static_assert(sizeof(float4) == kHeldMomentFloats * sizeof(float));
  to.part = reinterpret_cast<float4*>(params.part);
  to.operands[0] = static_cast<const char*>(params.w_hi);
  to.operands[1] = static_cast<const char*>(params.x_hi);
  const bool merges_apart = held_merges_apart(params.problem, to.moments);
  to.table = merges_apart ? reinterpret_cast<HeldRow*>(params.table) : nullptr;
}

/// How much of the operands each of `blocks` blocks brings into L2 before they are loaded.
template <class Traits>
void divide_prefetching(int blocks, HeldParams<Traits>& to) {
  // What an H200's L2 (50 MB) keeps beside the result; more would come twice.
  constexpr std::int64_t kMostBytes = 24 << 20, kUnit = 128;
  const bool fits = to.operand_bytes[0] + to.operand_bytes[1] <= kMostBytes;
  for (int i = 0; i < 2; ++i) {
    const std::int64_t share = ceil_div(ceil_div(to.operand_bytes[i], std::int64_t{blocks}), kUnit) * kUnit;
    to.prefetched_bytes[i] = fits ? static_cast<int>(share) : 0;
  }
}

template <class Operand, class Output, bool kWInPlace, int BLK_POS>
class ConvTransposeHeldLaunchSm90 : public RememberedLaunch {
 public:
  explicit ConvTransposeHeldLaunchSm90(const ConvTransposeParams& params) : shown_(mapped_addresses(params)) {
    constexpr DType operand = std::is_same_v<Operand, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
    fill_held_params(params, operand, params_, maps_);
    blocks_ = std::min(params_.tiles, params.sm_count * Traits::SHAPE.blocks_per_sm);
    reserve_shared_memory(kName, kKernel, Traits::SHAPE.shared_bytes);
  }

  /// With the addresses of `params`, which differs from the constructor's in nothing else.
  void run(const ConvTransposeParams& params, cudaStream_t stream) {
    const MappedAddresses to = mapped_addresses(params);
    maps_.move(shown_, to);
    shown_ = to;
    point_to(params, params_);
    launch_cooperative(kName, kKernel, &params_, {blocks_, Traits::THREADS, Traits::SHAPE.shared_bytes},
                       stream, [&](int blocks) {
                         divide_prefetching(blocks, params_);
                         const int tiles_of_block = ceil_div(params_.tiles, blocks);
                         const HeldRooms rooms = held_rooms(Traits::SHAPE, tiles_of_block);
                         params_.slots = rooms.slots;
                         params_.stages = rooms.stages;
                       });
  }

 private:
  using Traits = HeldTraitsSm90<Operand, Output, kWInPlace, BLK_POS>;
  static constexpr const char* kName = "conv_transpose_held_sm90";
  static inline const void* const kKernel = reinterpret_cast<const void*>(conv_transpose_held_sm90<Traits>);

  HeldParams<Traits> params_{};
  TensorMaps maps_;
  MappedAddresses shown_;
  int blocks_ = 0;
};

/// The kernel that takes w as it lies or packed.
template <class Operand, class Output, int BLK_POS>
void launch_conv_transpose_held_sm90(const ConvTransposeParams& params, cudaStream_t stream) {
  if (params.w_in_place) {
    run_remembered<ConvTransposeHeldLaunchSm90<Operand, Output, true, BLK_POS>>(params, stream);
  } else {
    run_remembered<ConvTransposeHeldLaunchSm90<Operand, Output, false, BLK_POS>>(params, stream);
  }
}

}  // namespace upconv3d::cuda
