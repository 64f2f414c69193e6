// SPDX-License-Identifier: Apache-2.0
/// \file
/// activation_group_norm_held: stages 2 to 4 of the library plan in one launch, for small convolutions.
///
///   c    [N,Z,P,Q,K]  dtype  PyTorch's convolution, without bias
///   part [N,G,tiles]  float2 (mean, M2) of before(c + bias), where a group is in several tiles
///   y    [N,Z,P,Q,K]  dtype  after(group_norm(before(c + bias))); may be c itself
///
/// A block copies its tile (core/held_norm.hpp) to shared memory, all loads on the way at once, and reads it
/// there twice: c crosses L2 once. Moments are merged by thread, then by row and channel of a tile, then by
/// tile, each in an order that the tiles decide; and tiles do not depend on the device. Where one tile is all
/// of its groups no block waits; else all of them do, once, for which the launch is cooperative. A device
/// that does not hold as many blocks gets fewer, which then read their tiles again instead of holding them.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/held_norm.hpp"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/pending.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kMaxThreads = 512;

/// Elements of a 16-byte vector.
template <class T>
constexpr int kLanes = kAccessBytes / sizeof(T);

/// Counts are 32-bit: the values are 16 MB at most.
template <class T>
struct HeldArgs {
  const T* c;      // [N,Z,P,Q,K] T
  const T* bias;   // [K] T, or null
  const T* gamma;  // [K] T, or null
  const T* beta;   // [K] T, or null
  T* y;            // as c
  float2* part;    // [N,G,tiles] mean, M2
  double eps;      // activation units squared
  ActivationParams activation;  // the only one, with AnyPending alone
  float parameter;              // activation.parameter
  bool norm_first;              // with AnyPending: whether the normalization precedes it
  int k, num_groups, slabs, tiles;
  int work;         // tiles of all samples and slabs
  int sample_rows;  // of fold positions each
  int tile_rows, fold, columns, row_lanes;
  int slab_channels, slab_groups, group_channels;
  int slot_shift;   // log2 of the lanes of a slot
  int group_lanes;  // threads that merge a group, a power of two up to 32
  int held_bytes, slots_bytes, moments_bytes;
};

/// A block's shared memory.
template <class T>
struct HeldShared {
  uint4* held;      // [loads,threads] vectors of T; each is written and read by its own thread
  float2* slots;    // [row_lanes,columns,slots of a vector] mean, M2
  double2* groups;  // [slab_groups] mean, M2
  float4* table;    // [slab_channels] mean, scale, shift, bias; before the merge gamma and beta in the middle

  __device__ HeldShared(char* base, const HeldArgs<T>& args)
      : held(reinterpret_cast<uint4*>(base)),
        slots(reinterpret_cast<float2*>(base + args.held_bytes)),
        groups(reinterpret_cast<double2*>(base + args.held_bytes + args.slots_bytes)),
        table(reinterpret_cast<float4*>(base + args.held_bytes + args.slots_bytes + args.moments_bytes)) {}
};

/// A tile, and this thread's part of it.
struct HeldTile {
  int sample, slab, tile;
  int rows;    // of the tile
  int offset;  // elements of c before this thread's first vector
  int step;    // from one of its vectors to the next
  int count;   // of its vectors
  int lane;    // channel of the slab, or with a fold value of the row, that its vectors begin with

  template <class T>
  __device__ HeldTile(const HeldArgs<T>& args, int work) {
    const int sample_slab = work / args.tiles;
    tile = work - sample_slab * args.tiles;
    sample = sample_slab / args.slabs;
    slab = sample_slab - sample * args.slabs;
    rows = min(args.tile_rows, args.sample_rows - tile * args.tile_rows);
    const int row_lane = static_cast<int>(threadIdx.x) / args.columns;
    lane = (static_cast<int>(threadIdx.x) - row_lane * args.columns) * kLanes<T>;
    const int row_elements = args.k * args.fold;
    offset = (sample * args.sample_rows + tile * args.tile_rows + row_lane) * row_elements +
             slab * args.slab_channels + lane;
    step = args.row_lanes * row_elements;
    count = row_lane < args.row_lanes ? rows_of(args.row_lanes, row_lane) : 0;
  }

  /// Rows that a row lane has.
  __device__ int rows_of(int row_lanes, int row_lane) const {
    return row_lane < rows ? (rows - row_lane - 1) / row_lanes + 1 : 0;
  }
};

/// Sends the thread's vectors on their way, in two batches.
/// \returns those of the first batch
template <class T>
__device__ __forceinline__ int load_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                         const HeldShared<T>& shared) {
  const int first = min((tile.count / 2 + kLoadsInFlight - 1) / kLoadsInFlight * kLoadsInFlight, tile.count);
  const T* from = args.c + tile.offset;
  uint4* to = shared.held + threadIdx.x;
  for (int i = 0; i < tile.count; ++i, from += tile.step, to += blockDim.x) {
    if (i == first) __pipeline_commit();
    __pipeline_memcpy_async(to, from, kAccessBytes);
  }
  if (first == tile.count) __pipeline_commit();
  __pipeline_commit();
  return first;
}

template <class T>
__device__ __forceinline__ void load_channels(const HeldArgs<T>& args, const HeldTile& tile,
                                              const HeldShared<T>& shared) {
  const auto value = [](const T* from, int channel, float absent) {
    return from != nullptr ? to_stat(from[channel]) : absent;
  };
  for (int i = threadIdx.x; i < args.slab_channels; i += blockDim.x) {
    const int channel = tile.slab * args.slab_channels + i;
    shared.table[i] = {0.f, value(args.gamma, channel, 1.f), value(args.beta, channel, 0.f),
                       value(args.bias, channel, 0.f)};
  }
}

/// What a thread knows of the channels of its vectors.
template <class T, class Input>
struct HeldChannels {
  float mean[kLanes<T>], scale[kLanes<T>], shift[kLanes<T>], bias[kLanes<T>];
  int first;  // channel of lane 0 of a row, before it is taken modulo K

  __device__ HeldChannels(const HeldArgs<T>& args, const HeldTile& tile, const HeldShared<T>& shared)
      : first(tile.slab * args.slab_channels + tile.lane) {
    // Threads behind the last column's have no vectors.
    if (tile.count == 0) return;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      const int at = tile.lane + j;
      const float4 row = shared.table[args.fold > 1 ? at % args.k : at];
      mean[j] = row.x;
      scale[j] = row.y;
      shift[j] = row.z;
      bias[j] = row.w;
    }
  }

  __device__ __forceinline__ void activate_here(const HeldArgs<T>& args, float (&v)[kLanes<T>]) const {
    activate(args.activation, args.parameter, v, [&](int j) {
      return activation_parameter<T>(args.activation, args.fold > 1 ? (first + j) % args.k : first + j);
    });
  }

  /// before(c + bias).
  __device__ __forceinline__ void pending(const HeldArgs<T>& args, const uint4& word,
                                          float (&v)[kLanes<T>]) const {
    Vector<T, kLanes<T>> c;
    memcpy(&c, &word, sizeof(c));
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      if constexpr (Input::kDecidesLater) {
        v[j] = to_stat(c.at[j]) + bias[j];
      } else {
        v[j] = Input{}(to_stat(c.at[j]), bias[j]);
      }
    }
    if (Input::kDecidesLater && !args.norm_first) activate_here(args, v);
  }

  __device__ __forceinline__ uint4 normalized(const HeldArgs<T>& args, float (&v)[kLanes<T>]) const {
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) v[j] = (v[j] - mean[j]) * scale[j] + shift[j];
    if (Input::kDecidesLater && args.norm_first) activate_here(args, v);
    Vector<T, kLanes<T>> y;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) y.at[j] = from_stat<T>(v[j]);
    uint4 word;
    memcpy(&word, &y, sizeof(word));
    return word;
  }
};

/// Adds the thread's vectors from `begin` to `end` to its moments.
template <class T, class Input>
__device__ __forceinline__ void absorb_held(const HeldArgs<T>& args, const HeldChannels<T, Input>& channels,
                                            const uint4* held, int begin, int end,
                                            Moments<float, kLanes<T>>& moments) {
  int i = begin;
  for (; i + kLoadsInFlight <= end; i += kLoadsInFlight) {
    float value[kLoadsInFlight][kLanes<T>];
#pragma unroll
    for (int row = 0; row < kLoadsInFlight; ++row) {
      channels.pending(args, held[(i + row) * blockDim.x], value[row]);
    }
    moments.absorb(value);
  }
  for (; i < end; ++i) {
    float value[1][kLanes<T>];
    channels.pending(args, held[i * blockDim.x], value[0]);
    moments.absorb(value);
  }
}

/// Joins neighbouring lanes of one group and leaves the thread's moments in its slots.
template <class T>
__device__ __forceinline__ void leave_in_slots(const HeldArgs<T>& args, const HeldTile& tile,
                                               Moments<float, kLanes<T>>& moments, float2* slots) {
  constexpr int kCount = kLanes<T>;
#pragma unroll
  for (int half = 1; half < kCount; half *= 2) {
    if (2 * half > 1 << args.slot_shift) continue;
#pragma unroll
    for (int j = 0; j < kCount; j += 2 * half) {
      const float delta = moments.mean[j + half] - moments.mean[j];
      moments.mean[j] += delta * 0.5f;
      moments.m2[j] += moments.m2[j + half] + (delta * (moments.count * (0.5f * half))) * delta;
    }
  }
  if (static_cast<int>(threadIdx.x) >= args.row_lanes * args.columns) return;
  float2* to = slots + ((threadIdx.x * kCount) >> args.slot_shift);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if ((j & ((1 << args.slot_shift) - 1)) == 0) to[j >> args.slot_shift] = {moments.mean[j], moments.m2[j]};
  }
}

struct HeldPart {
  double count, mean, m2;
};

/// Sum over `lanes` neighbouring threads, a power of two of them.
__device__ __forceinline__ double lanes_sum(double value, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
  return value;
}

/// The moments of part_at(0) ... part_at(parts - 1), by `lanes` threads: their mean first, then M2 about it.
template <class PartAt>
__device__ __forceinline__ double2 merge_parts(int lane, int lanes, int parts, PartAt part_at) {
  double count = 0, sum = 0, m2 = 0;
  for (int i = lane; i < parts; i += lanes) {
    const HeldPart part = part_at(i);
    count += part.count;
    sum += part.count * part.mean;
  }
  const double mean = lanes_sum(sum, lanes) / lanes_sum(count, lanes);
  for (int i = lane; i < parts; i += lanes) {
    const HeldPart part = part_at(i);
    const double delta = part.mean - mean;
    m2 += part.m2 + (part.count * delta) * delta;
  }
  return {mean, lanes_sum(m2, lanes)};
}

/// Calls body(group, lane, parts) for every group of the slab, whole warps at a time: some of their threads
/// with none of the `parts` and the last group. Their result is that of a group of no values.
template <class T, class Body>
__device__ __forceinline__ void for_each_group(const HeldArgs<T>& args, int parts, Body body) {
  const int at_once = blockDim.x / args.group_lanes;
  const int own = threadIdx.x / args.group_lanes, lane = threadIdx.x - own * args.group_lanes;
  for (int first = 0; first < args.slab_groups; first += at_once) {
    const int group = first + own;
    const bool valid = group < args.slab_groups;
    body(valid ? group : args.slab_groups - 1, valid ? lane : -1, valid ? parts : 0);
  }
}

template <class T>
__device__ __forceinline__ float2* parts_of(const HeldArgs<T>& args, const HeldTile& tile, int group) {
  return args.part + (tile.sample * args.num_groups + tile.slab * args.slab_groups + group) * args.tiles;
}

/// Merges the slots of each group: into shared memory where the tile is all of it, else into part.
template <class T>
__device__ __forceinline__ void merge_slots_of_groups(const HeldArgs<T>& args, const HeldTile& tile,
                                                      const HeldShared<T>& shared) {
  const int group_slots = args.group_channels >> args.slot_shift;
  const int row_parts = group_slots * args.fold;
  const int row_slots = (args.columns * kLanes<T>) >> args.slot_shift;
  const int fold_slots = args.k >> args.slot_shift;  // from one position of a row to the next
  for_each_group(args, args.row_lanes * row_parts, [&](int group, int lane, int parts) {
    const double2 merged = merge_parts(max(lane, 0), args.group_lanes, parts, [&](int i) {
      const int row = i / row_parts, in_row = i - row * row_parts;
      const int folded = in_row / group_slots;
      const float2 slot = shared.slots[row * row_slots + folded * fold_slots + group * group_slots +
                                       (in_row - folded * group_slots)];
      const int count = tile.rows_of(args.row_lanes, row) << args.slot_shift;
      return HeldPart{static_cast<double>(count), slot.x, slot.y};
    });
    if (lane != 0) return;
    if (args.tiles == 1) {
      shared.groups[group] = merged;
    } else {
      parts_of(args, tile, group)[tile.tile] = {static_cast<float>(merged.x), static_cast<float>(merged.y)};
    }
  });
}

/// Merges the tiles of each group.
template <class T>
__device__ __forceinline__ void merge_tiles_of_groups(const HeldArgs<T>& args, const HeldTile& tile,
                                                      const HeldShared<T>& shared) {
  const int row_values = args.fold * args.group_channels;
  for_each_group(args, args.tiles, [&](int group, int lane, int parts) {
    const float2* from = parts_of(args, tile, group);
    const double2 merged = merge_parts(max(lane, 0), args.group_lanes, parts, [&](int i) {
      const int rows = min(args.tile_rows, args.sample_rows - i * args.tile_rows);
      const float2 part = from[i];
      return HeldPart{static_cast<double>(rows * row_values), part.x, part.y};
    });
    if (lane == 0) shared.groups[group] = merged;
  });
}

/// From the groups' moments to y = (v - mean)*scale + shift, as group_norm_finalize has it.
template <class T>
__device__ __forceinline__ void fill_table(const HeldArgs<T>& args, const HeldShared<T>& shared) {
  const double count = static_cast<double>(args.sample_rows) * args.fold * args.group_channels;
  for (int i = threadIdx.x; i < args.slab_channels; i += blockDim.x) {
    const double2 moments = shared.groups[i / args.group_channels];
    float4& row = shared.table[i];
    const float mean = static_cast<float>(moments.x);
    const double scale = row.y / sqrt(moments.y / count + args.eps);
    row.x = mean;
    row.y = static_cast<float>(scale);
    row.z = static_cast<float>(row.z - (moments.x - static_cast<double>(mean)) * scale);
  }
}

template <class T, class Input>
__device__ __forceinline__ void take_tile_moments(const HeldArgs<T>& args, const HeldTile& tile,
                                                  const HeldShared<T>& shared) {
  const int first = load_tile(args, tile, shared);
  load_channels(args, tile, shared);
  __syncthreads();
  const HeldChannels<T, Input> channels(args, tile, shared);
  Moments<float, kLanes<T>> moments;
  const uint4* held = shared.held + threadIdx.x;
  __pipeline_wait_prior(1);
  absorb_held(args, channels, held, 0, first, moments);
  __pipeline_wait_prior(0);
  absorb_held(args, channels, held, first, tile.count, moments);
  leave_in_slots(args, tile, moments, shared.slots);
  __syncthreads();
  merge_slots_of_groups(args, tile, shared);
}

template <class T, class Input>
__device__ __forceinline__ void normalize_tile(const HeldArgs<T>& args, const HeldTile& tile,
                                               const HeldShared<T>& shared) {
  const HeldChannels<T, Input> channels(args, tile, shared);
  const uint4* held = shared.held + threadIdx.x;
  T* to = args.y + tile.offset;
#pragma unroll 2
  for (int i = 0; i < tile.count; ++i, to += tile.step) {
    float v[kLanes<T>];
    channels.pending(args, held[i * blockDim.x], v);
    *reinterpret_cast<uint4*>(to) = channels.normalized(args, v);
  }
}

template <class T, class Input>
__global__ void __launch_bounds__(kMaxThreads) activation_group_norm_held(const HeldArgs<T> args) {
  extern __shared__ __align__(kAccessBytes) char raw_shared[];
  const HeldShared<T> shared(raw_shared, args);
  const bool holds = static_cast<int>(gridDim.x) == args.work;
  for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
    take_tile_moments<T, Input>(args, HeldTile(args, work), shared);
    if (!holds) __syncthreads();  // before the next tile takes this one's shared memory
  }
  if (args.tiles > 1) cooperative_groups::this_grid().sync();
  for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
    const HeldTile tile(args, work);
    if (!holds) {
      __syncthreads();
      load_tile(args, tile, shared);
      load_channels(args, tile, shared);
      __pipeline_wait_prior(0);
    }
    if (args.tiles > 1) merge_tiles_of_groups(args, tile, shared);
    __syncthreads();
    fill_table(args, shared);
    __syncthreads();
    normalize_tile<T, Input>(args, tile, shared);
  }
}

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
  args.k = count(params.k);
  args.num_groups = count(params.num_groups);
  args.slabs = count(tiles.slabs);
  args.tiles = count(tiles.tiles);
  args.work = count(params.n * tiles.slabs * tiles.tiles);
  args.sample_rows = count(params.positions / tiles.fold);
  args.tile_rows = count(tiles.rows);
  args.fold = count(tiles.fold);
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
  args.moments_bytes = count(tiles.moments_bytes);
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
    throw std::invalid_argument(std::string("upconv3d: one activation comes before the normalization or after it; "
                                            "got before=") +
                                name(params.before.kind) + ", after=" + name(params.after.kind) +
                                ". Apply one of them elsewhere.");
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
