// SPDX-License-Identifier: Apache-2.0
/// \file
/// Host side of activation_group_norm_held_planes and of activation_group_norm_kept_planes.
#include "cuda/group_norm/held_norm_planes.cuh"

#include <bit>
#include <cstdint>

#include "core/index_math.hpp"
#include "cuda/group_norm/held_launch.cuh"
#include "cuda/group_norm/kept_norm_planes.cuh"

namespace upconv3d::cuda {
namespace {

template <class T>
HeldPlanesArgs<T> held_planes_args(const HeldNormParams& params, const HeldPlanes& planes) {
  const auto count = [](std::int64_t value) { return static_cast<int>(value); };
  HeldPlanesArgs<T> args{};
  fill_common(params, args);
  args.whole = params.positions % kLanes<T> == 0;
  args.one_channel = args.whole || params.k == params.num_groups;
  args.clusters = planes.clusters;
  args.groups = count(params.n * params.num_groups);
  args.num_groups = count(params.num_groups);
  args.work = count(planes.tiles > 1 ? args.groups * planes.tiles : ceil_div(args.groups, planes.teams));
  args.group_channels = count(params.k / params.num_groups);
  args.positions = count(params.positions);
  args.group_values = args.group_channels * args.positions;
  args.tile_values = count(planes.tile_values);
  args.teams = count(planes.teams);
  args.team_threads = count(planes.team_threads);
  args.team_shift = std::countr_zero(static_cast<std::uint64_t>(planes.team_threads));
  const int step = args.team_threads * kLanes<T>;
  args.step_channels = step / args.positions;
  args.step_positions = step % args.positions;
  args.held_bytes = count(planes.held_bytes);
  args.slots_bytes = count(planes.slots_bytes);
  args.table_pitch = count(planes.channels);
  const auto last = static_cast<double>(args.group_values - (planes.tiles - 1) * planes.tile_values);
  args.counts = TileCounts::of(static_cast<double>(args.tile_values), last,
                               static_cast<double>(args.group_values), count(planes.tiles));
  return args;
}

}  // namespace

void launch_held_planes(const HeldNormParams& params, const HeldPlanes& planes, cudaStream_t stream) {
  with_held_kernel(params, [&](auto element, auto input) {
    using T = typename decltype(element)::type;
    using Input = typename decltype(input)::type;
    static ReservedSharedMemory reserved;
    static CompiledArch arch;
    HeldPlanesArgs<T> args = held_planes_args<T>(params, planes);
    KeptKernel<HeldPlanesArgs<T>> kept;
    if constexpr (!Input::kDecidesLater) {
      if (planes.kept) kept = {activation_group_norm_kept_planes<T, Input>, 0};
    }
    launch_held_kernel(
        "activation_group_norm_held_planes", activation_group_norm_held_planes<T, Input>, kept, args,
        {args.work, static_cast<int>(planes.threads()), static_cast<int>(planes.shared_bytes()),
         static_cast<int>(planes.tiles), planes.clusters},
        reserved, arch, params, stream);
  });
}

}  // namespace upconv3d::cuda
