// SPDX-License-Identifier: Apache-2.0
/// \file
/// Host side of activation_group_norm_held and of activation_group_norm_kept.
#include "cuda/group_norm/held_norm.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <variant>

#include "cuda/group_norm/held_launch.cuh"
#include "cuda/group_norm/held_norm.cuh"
#include "cuda/group_norm/kept_norm.cuh"

namespace upconv3d::cuda {
namespace {

template <class T>
HeldArgs<T> held_args(const HeldNormParams& params, const HeldTiles& tiles) {
  const auto count = [](std::int64_t value) { return static_cast<int>(value); };
  HeldArgs<T> args{};
  fill_common(params, args);
  args.y_planes = params.y_planes;
  args.clusters = tiles.clusters;
  args.num_groups = count(params.num_groups);
  args.slabs = count(tiles.slabs);
  args.work = count(params.n * tiles.slabs * tiles.tiles);
  args.sample_rows = count(params.positions / tiles.fold);
  args.tile_rows = count(tiles.rows);
  args.fold = count(tiles.fold);
  args.row_elements = count(params.k * tiles.fold);
  args.columns = count(tiles.columns);
  args.row_lanes = count(tiles.row_lanes);
  args.slab_channels = count(params.k / tiles.slabs);
  args.slab_groups = count(params.num_groups / tiles.slabs);
  args.group_channels = count(params.k / params.num_groups);
  args.slot_shift = std::countr_zero(static_cast<std::uint64_t>(tiles.slot_lanes));
  args.group_lanes = count(std::clamp<std::int64_t>(
      std::bit_floor(static_cast<std::uint64_t>(tiles.threads / args.slab_groups)), 1, 32));
  args.held_bytes = count(tiles.held_bytes);
  args.slots_bytes = count(tiles.slots_bytes);
  args.table_pitch = count(tiles.table_bytes / (HeldTiles::kTableRows * sizeof(float)));
  args.slot_rows = count(tiles.slot_rows);
  args.shares_warps = tiles.shares_warps();
  const auto values = [&](std::int64_t rows) {
    return static_cast<double>(rows * tiles.fold * args.group_channels);
  };
  args.counts = TileCounts::of(values(tiles.rows), values(args.sample_rows - (tiles.tiles - 1) * tiles.rows),
                               values(args.sample_rows), count(tiles.tiles));
  return args;
}

/// Whether the values of a plane that neighbouring rows of a tile become can be stored together.
bool stores_runs(const HeldTiles& tiles, const HeldNormParams& params) {
  constexpr std::int64_t kRows = HeldTiles::kRunRows;
  return params.positions % kRows == 0 && tiles.rows % kRows == 0 && tiles.row_lanes % kRows == 0 &&
         reinterpret_cast<std::uintptr_t>(params.y) % (kRows * size_of(params.dtype)) == 0;
}

/// Columns of a warp's stores into NCDHW, so that the rows beside them fill a sector of 32 bytes, or two; of
/// tiles of few rows more, so that all lanes have some.
///
/// \param rows of a thread's store
int wide_columns(const HeldTiles& tiles, DType dtype, std::int64_t rows) {
  const std::int64_t most = rows > 1 || size_of(dtype) == 4 ? 4 : 2;
  std::int64_t wide = std::gcd(tiles.columns, most);
  while (wide < 32 && tiles.columns % (2 * wide) == 0 && 32 / wide * rows > tiles.rows) wide *= 2;
  return static_cast<int>(wide);
}

}  // namespace

void launch_held_tiles(const HeldNormParams& params, const HeldTiles& tiles, cudaStream_t stream) {
  if (params.y_planes && (tiles.fold > 1 || params.y == params.c)) {
    throw std::invalid_argument(
        std::string(
            "upconv3d: a transposed result takes memory of its own, and channels of whole vectors; got ") +
        (tiles.fold > 1 ? "channels that end within one" : "y in the memory of c") +
        ". Keep the order of c, or let y be another tensor.");
  }
  with_held_kernel(params, [&](auto element, auto input) {
    using T = typename decltype(element)::type;
    using Input = typename decltype(input)::type;
    static ReservedSharedMemory reserved;
    static CompiledArch arch;
    HeldArgs<T> args = held_args<T>(params, tiles);
    args.stores_runs = stores_runs(tiles, params);
    const bool runs = !Input::kDecidesLater && args.stores_runs;
    args.wide = wide_columns(tiles, params.dtype, runs ? HeldTiles::kRunRows : 1);
    KeptKernel<HeldArgs<T>> kept;
    if constexpr (!Input::kDecidesLater) {
      if (tiles.kept) kept = {activation_group_norm_kept<T, Input>, params.y_planes ? args.held_bytes : 0};
    }
    launch_held_kernel("activation_group_norm_held", activation_group_norm_held<T, Input>, kept, args,
                       {args.work, static_cast<int>(tiles.threads), static_cast<int>(tiles.shared_bytes()),
                        static_cast<int>(tiles.tiles), tiles.clusters},
                       reserved, arch, params, stream);
  });
}

std::int64_t held_part_bytes(std::int64_t n, std::int64_t num_groups, const HeldCut& cut) {
  const std::int64_t tiles = std::visit([](const auto& of) { return of.tiles; }, cut);
  return tiles > 1 ? n * num_groups * tiles * static_cast<std::int64_t>(sizeof(float2)) : 0;
}

void launch_held_norm(const HeldNormParams& params, cudaStream_t stream) {
  if (params.n == 0) return;
  require_slopes(params.before);
  require_slopes(params.after);
  if (params.before.kind != Activation::kNone && params.after.kind != Activation::kNone) {
    throw std::invalid_argument(
        std::string("upconv3d: one activation comes before the normalization or after it; "
                    "got before=") +
        name(params.before.kind) + ", after=" + name(params.after.kind) + ". Apply one of them elsewhere.");
  }
  if (const auto* const tiles = std::get_if<HeldTiles>(&params.cut)) {
    launch_held_tiles(params, *tiles, stream);
  } else {
    launch_held_planes(params, std::get<HeldPlanes>(params.cut), stream);
  }
}

}  // namespace upconv3d::cuda
