// SPDX-License-Identifier: Apache-2.0
/// \file
/// Host side of activation_group_norm_held.
#include "cuda/group_norm/held_norm.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/group_norm/held_norm.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {
namespace {

template <class T>
HeldArgs<T> held_args(const HeldNormParams& params) {
  const HeldTiles& tiles = params.tiles;
  const auto count = [](std::int64_t value) { return static_cast<int>(value); };
  HeldArgs<T> args{};
  args.c = static_cast<const T*>(params.c);
  args.bias = static_cast<const T*>(params.bias);
  args.gamma = static_cast<const T*>(params.gamma);
  args.beta = static_cast<const T*>(params.beta);
  args.y = static_cast<T*>(params.y);
  args.part = static_cast<float2*>(params.part);
  args.eps = params.eps;
  args.norm_first = params.before.kind == Activation::kNone;
  args.activation = args.norm_first ? params.after : params.before;
  args.parameter = static_cast<float>(args.activation.parameter);
  args.num_groups = count(params.num_groups);
  args.slabs = count(tiles.slabs);
  args.tiles = count(tiles.tiles);
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
  args.table_pitch = count(tiles.table_bytes / (4 * sizeof(float)));
  args.slot_rows = count(tiles.slot_rows);
  args.shares_warps = tiles.shares_warps();
  const auto values = [&](std::int64_t rows) {
    return static_cast<double>(rows * tiles.fold * args.group_channels);
  };
  const auto narrow = [](double value) { return static_cast<float>(value); };
  args.tile_count = narrow(values(tiles.rows));
  args.last_count = narrow(values(args.sample_rows - (tiles.tiles - 1) * tiles.rows));
  args.tile_share = narrow(1.0 / args.tile_count);
  args.last_share = narrow(1.0 / args.last_count);
  args.group_share = 1 / values(args.sample_rows);
  return args;
}

template <class T, class Input>
void launch_held(const HeldNormParams& params, cudaStream_t stream) {
  constexpr const char* kName = "activation_group_norm_held";
  constexpr int kUnasked = 48 * 1024;  // bytes that kernels get
  static ReservedSharedMemory reserved;
  const auto kernel = activation_group_norm_held<T, Input>;
  const int shared_bytes = static_cast<int>(params.tiles.shared_bytes());
  if (shared_bytes > kUnasked) {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kName);
    reserved.ensure(kName, reinterpret_cast<const void*>(kernel), most);
  }
  HeldArgs<T> args = held_args<T>(params);
  const int threads = static_cast<int>(params.tiles.threads);
  if (args.tiles == 1) {
    kernel<<<static_cast<unsigned>(args.work), static_cast<unsigned>(threads), shared_bytes, stream>>>(args);
    return check_launch(kName);
  }
  const int blocks = params.max_blocks > 0 ? std::min(params.max_blocks, args.work) : args.work;
  launch_cooperative(kName, reinterpret_cast<const void*>(kernel), &args, {blocks, threads, shared_bytes},
                     stream, [](int) {});
}

}  // namespace

std::int64_t held_part_bytes(std::int64_t n, std::int64_t num_groups, const HeldTiles& tiles) {
  return tiles.tiles > 1 ? n * num_groups * tiles.tiles * static_cast<std::int64_t>(sizeof(float2)) : 0;
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
  with_element(params.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    if constexpr (sizeof(T) == 8) {
      throw std::invalid_argument(
          "upconv3d: values held by one launch are float32, bfloat16 or float16; got float64. Take the three "
          "passes of group_norm.hpp.");
    } else if (params.after.kind == Activation::kNone && params.before.kind == Activation::kRelu) {
      launch_held<T, AfterBias<ReluActivation>>(params, stream);
    } else if (params.after.kind == Activation::kNone && params.before.kind == Activation::kNone) {
      launch_held<T, AfterBias<NoActivation>>(params, stream);
    } else {
      launch_held<T, AnyPending>(params, stream);
    }
  });
}

}  // namespace upconv3d::cuda
