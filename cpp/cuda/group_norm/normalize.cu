// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_normalize: forward stage 4 of 4, where a and y lie in the same layout.
///
///   a     [N,K,Z,P,Q] or [N,Z,P,Q,pitch]  the convolution, before(conv), or what is between them
///   skip  as a                            or none
///   table [3,N,K]                         mean, scale, shift from finalize, or none
///   y     [N,K,Z,P,Q] or [N,Z,P,Q,K]      after((v - mean)*scale + shift), v = before(a + bias + skip); may
///                                         be a itself where pitch is K
///
/// A copy with few operations per element, so all that counts is bandwidth: 16-byte accesses, several in
/// flight per thread, a thread's mean, scale and shift in registers, the last sample first. The mean is
/// subtracted before it is scaled: folded into the shift it would cancel where |mean| >> std. a and y may be
/// the same memory, which is safe because each thread reads an element before it writes it and no other
/// thread touches it.
#include "cuda/group_norm/normalize.cuh"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/compiled_arch.hpp"
#include "cuda/group_norm/geometry.hpp"

namespace upconv3d::cuda {
namespace {

/// Vectors per thread and block at most: 64 KB of reads per block, so that the table's rows cost little and a
/// large tensor still makes several waves of blocks, which evens out their ends.
constexpr std::int64_t kVectorsPerThread = 16;

/// Blocks below which threads get fewer vectors: four blocks on each of the largest card's multiprocessors,
/// twice.
constexpr std::int64_t kBlocksWanted = 1024;

std::int64_t vectors_per_thread(std::int64_t total_vectors) {
  return std::clamp<std::int64_t>(total_vectors / (kBlocksWanted * kStreamThreads), kLoadsInFlight,
                                  kVectorsPerThread);
}

/// Loads in flight of a thread that may read a skip: its registers leave room for half as many bytes as
/// elsewhere, and so do as many more blocks on a multiprocessor.
template <class A, int kVector>
constexpr int kAnyLoads =
    std::min<int>(kLoadsInFlight, kLoadsInFlight* kAccessBytes / 2 / (kVector * sizeof(A)));

/// Blocks per multiprocessor that registers are left for; 0: the compiler's choice, which for stored sums is
/// to spill some for one block more.
template <class A, class Input>
constexpr int kBlocksPerMultiprocessor = kStoresSum<Input>       ? 3
                                         : !Input::kDecidesLater ? 0
                                         : sizeof(A) == 8        ? 3
                                                                 : 4;

/// Normalizes kLoads vectors that lie `from_step` and `to_step` elements apart, through lane_of(j) for the
/// j-th element of each, which is of channel channel_of(j).
/// \param from, to in args.a and args.y
template <int kLoads, int kVector, class A, class Y, class Map, class LaneOf, class ChannelOf>
__device__ __forceinline__ void normalize_vectors(const NormalizeArgs<A, Y>& args, const Map& map,
                                                  const A* from, std::int64_t from_step, Y* to,
                                                  std::int64_t to_step, LaneOf lane_of,
                                                  ChannelOf channel_of) {
  Vector<A, kVector> in[kLoads], skip[kLoads] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) in[i] = load_once<kVector>(from + i * from_step);
  if (Map::kReadsSkip && args.skip != nullptr) {
    const A* const with = args.skip + (from - args.a);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) skip[i] = load_once<kVector>(with + i * from_step);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if constexpr (Map::kStoresSum) {
      const auto sum = map.template sum_of<Y>(in[i], skip[i], lane_of);
      store_once<kVector>(args.sum + (to - args.y) + i * to_step, sum);
      store_once<kVector>(to + i * to_step, map.activated(args, sum, channel_of));
    } else {
      store_once<kVector>(to + i * to_step, map.apply(args, in[i], skip[i], lane_of, channel_of));
    }
  }
}

/// A thread owns kVector channels and walks positions. Blocks: channel block fastest, then position block,
/// then sample.
template <class A, class Y, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, kBlocksPerMultiprocessor<A, Input>)
    group_norm_normalize_ndhwc(const NormalizeArgs<A, Y> args) {
  const std::int64_t k = args.shape.k;
  const BlockWork work = work_of_block(args);
  const std::int64_t sample = work.sample, begin = work.first_step;
  const std::int64_t channel = (work.channel_block * blockDim.x + threadIdx.x) * kVector;
  if constexpr (kIsSum<Input>) {
    wait_for_kernel_before();
  } else {
    await_sample(args, sample);
  }
  if (channel >= k) return;

  ChannelMap<A, Input, kVector> map;
  map.load_consecutive(args, sample, channel);

  const auto lane_of = [](int j) { return j; };
  const auto channel_of = [&](int j) { return channel + j; };
  const std::int64_t end = min(begin + work.steps, args.shape.positions);
  const std::int64_t from_step = blockDim.y * args.a_pitch, to_step = blockDim.y * k;
  std::int64_t position = begin + threadIdx.y;
  const A* from = args.a + (sample * args.shape.positions + position) * args.a_pitch + channel;
  Y* to = args.y + (sample * args.shape.positions + position) * k + channel;
  // Of double, more vectors in flight do not fit the registers beside their map on arch 80.
  constexpr int kLoads = kReadsSkip<Input> ? kAnyLoads<A, kVector>
                         : sizeof(A) == 8  ? kLoadsInFlight / 2
                                           : kLoadsInFlight;
  for (; position + (kLoads - 1) * blockDim.y < end; position += kLoads * blockDim.y) {
    normalize_vectors<kLoads, kVector>(args, map, from, from_step, to, to_step, lane_of, channel_of);
    from += kLoads * from_step;
    to += kLoads * to_step;
  }
  for (; position < end; position += blockDim.y, from += from_step, to += to_step) {
    normalize_vectors<1, kVector>(args, map, from, from_step, to, to_step, lane_of, channel_of);
  }
}

/// The threads of a row share one channel. Blocks: position block fastest, then blockDim.y rows of [N*K,
/// positions]. Rows start anywhere, at the same place in a and in y; the vectors between `first` and `last`
/// are aligned.
template <class A, class Y, class Input, int kVector>
__global__ void __launch_bounds__(kStreamThreads, kBlocksPerMultiprocessor<A, Input>)
    group_norm_normalize_ncdhw(const NormalizeArgs<A, Y> args) {
  const std::int64_t block = static_cast<std::int64_t>(gridDim.x) - 1 - static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t row_block = block / args.position_blocks;
  const std::int64_t row = row_block * blockDim.y + threadIdx.y;
  if (row >= args.shape.n * args.shape.k) return;
  const std::int64_t sample = row / args.shape.k;
  if constexpr (kIsSum<Input>) wait_for_kernel_before();

  ChannelMap<A, Input, 1> map;
  map.load(args, sample, row - sample * args.shape.k, 0);

  const std::int64_t begin =
      row * args.shape.positions + (block - row_block * args.position_blocks) * args.position_steps;
  const std::int64_t end = min(begin + args.position_steps, (row + 1) * args.shape.positions);
  const std::int64_t first = min((begin + kVector - 1) / kVector * kVector, end);
  const std::int64_t last = max(end / kVector * kVector, first);
  const auto lane_of = [](int) { return 0; };
  const auto channel_of = [&](int) { return row - sample * args.shape.k; };

  for (std::int64_t i = begin + threadIdx.x; i < first; i += blockDim.x) {
    normalize_vectors<1, 1>(args, map, args.a + i, 1, args.y + i, 1, lane_of, channel_of);
  }
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kVector;
  std::int64_t at = first + static_cast<std::int64_t>(threadIdx.x) * kVector;
  constexpr int kLoads = kReadsSkip<Input> ? kAnyLoads<A, kVector> : kLoadsInFlight;
  for (; at + (kLoads - 1) * step < last; at += kLoads * step) {
    normalize_vectors<kLoads, kVector>(args, map, args.a + at, step, args.y + at, step, lane_of, channel_of);
  }
  for (; at < last; at += step) {
    normalize_vectors<1, kVector>(args, map, args.a + at, step, args.y + at, step, lane_of, channel_of);
  }
  for (std::int64_t i = last + threadIdx.x; i < end; i += blockDim.x) {
    normalize_vectors<1, 1>(args, map, args.a + i, 1, args.y + i, 1, lane_of, channel_of);
  }
}

/// Whether a launch may begin while the kernel before ends, as those of sums do: where held norms did so
/// behind cuDNN's convolution, 1 us was gained; of sums it was not shown. Code that a GPU runs from PTX of an
/// older architecture would not wait for that kernel.
/// \param arch static, the kernel's own
template <class Input, class Args>
bool begins_early(void (*kernel)(Args), CompiledArch& arch) {
  return kIsSum<Input> && arch.of(reinterpret_cast<const void*>(kernel)) >= 90;
}

template <class A, class Y, class Input, int kVector>
void launch_ndhwc(const NormalizeParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  NormalizeArgs<A, Y> args = normalize_args<A, Y>(params);
  args.table_vectors = shape.k % kVector == 0 && is_aligned(params.table);
  const BlockShape block = channel_block_shape(shape.k, kVector, kStreamThreads);
  args.channel_blocks = block.blocks;
  const std::int64_t steps = block.y * vectors_per_thread(shape.n * shape.k * shape.positions / kVector);
  const std::int64_t blocks = divide_positions(shape.positions, steps, steps, args);
  const auto kernel = group_norm_normalize_ndhwc<A, Y, Input, kVector>;
  static CompiledArch arch;
  launch("group_norm_normalize_ndhwc", kernel, blocks, dim3(block.x, block.y), stream, args,
         params.merged != nullptr || begins_early<Input>(kernel, arch));
}

template <class A, class Y, class Input, int kVector>
void launch_ncdhw(const NormalizeParams& params, cudaStream_t stream) {
  const GroupNormShape& shape = params.shape;
  NormalizeArgs<A, Y> args = normalize_args<A, Y>(params);
  const BlockShape block = row_block_shape(shape.positions, kVector, kStreamThreads);
  args.position_steps = block.x * vectors_per_thread(shape.n * shape.k * shape.positions / kVector) * kVector;
  args.position_blocks = ceil_div(shape.positions, args.position_steps);
  const auto kernel = group_norm_normalize_ncdhw<A, Y, Input, kVector>;
  static CompiledArch arch;
  launch("group_norm_normalize_ncdhw", kernel, args.position_blocks * ceil_div(shape.n * shape.k, block.y),
         dim3(block.x, block.y), stream, args, begins_early<Input>(kernel, arch));
}

template <class Input>
constexpr bool kIsBareSum = std::is_same_v<Input, ActivatedSum<NoActivation, true, false>>;

void require_no_sum(const NormalizeParams& params) {
  if (params.sum == nullptr) return;
  throw std::invalid_argument(
      "upconv3d: normalize stores the sum that it activates only without a table, in one layout and dtype, "
      "and "
      "of float64 without an activation; got another launch with a sum. Pass null, and add elsewhere.");
}

/// Calls visit(constant of `flag`).
template <class Visit>
void with_flag(bool flag, Visit&& visit) {
  if (flag) return visit(std::true_type{});
  visit(std::false_type{});
}

/// with_activation of the types that there are kernels of ActivatedSum for.
template <class A, class Visit>
void with_sum_activation(Activation activation, Visit&& visit) {
  if constexpr (std::is_same_v<A, double>) {
    visit(NoActivation{});
  } else {
    with_activation(activation, visit);
  }
}

}  // namespace

void launch_normalize_in_layout(const NormalizeParams& params, cudaStream_t stream) {
  const auto launch_as = [&](auto a, auto y, auto input) {
    using A = typename decltype(a)::type;
    using Y = typename decltype(y)::type;
    using Input = typename decltype(input)::type;
    // Along a row of channels 16 bytes of the wider type: a thread's two stores would leave gaps between
    // those of its neighbours, which was seen to take half as long again. Along positions, of the narrower
    // type, a's.
    constexpr int kVector = kAccessBytes / sizeof(A);
    constexpr int kWhole = kAccessBytes / std::max(sizeof(A), sizeof(Y));
    constexpr int kFewer = std::min(kVector, 4);  // 8 bytes of 16 bit: rows of 12, 20 or 100 channels
    const bool aligned = is_aligned(params.a) && is_aligned(params.y) && is_aligned(params.table) &&
                         is_aligned(params.skip) && is_aligned(params.sum);
    if (params.a_layout == Layout::kNCDHW) {
      constexpr int kAlong = kStoresSum<Input> ? kFewer : kVector;
      if (aligned) return launch_ncdhw<A, Y, Input, kAlong>(params, stream);
      return launch_ncdhw<A, Y, Input, 1>(params, stream);
    }
    const auto whole = [&](int vector) {
      return aligned && params.shape.k % vector == 0 && row_pitch(params) % vector == 0;
    };
    constexpr bool kHasRoom =
        !Input::kDecidesLater && !kStoresSum<Input> && (!kReadsSkip<Input> || kIsBareSum<Input>);
    if constexpr (kHasRoom) {
      if (whole(kWhole)) return launch_ndhwc<A, Y, Input, kWhole>(params, stream);
    }
    // All that AnyPending, or an activation beside a skip, may need of eight channels does not fit the
    // registers of three blocks.
    if (whole(kFewer)) return launch_ndhwc<A, Y, Input, kFewer>(params, stream);
    launch_ndhwc<A, Y, Input, 1>(params, stream);
  };
  const Activation activation =
      params.before.kind != Activation::kNone ? params.before.kind : params.after.kind;
  const bool is_sum = params.table == nullptr && params.a_dtype == params.y_dtype;
  // Of double one kernel has all activations.
  if (is_sum && (params.a_dtype != DType::kFloat64 || activation == Activation::kNone)) {
    return with_element(params.a_dtype, [&](auto a) {
      using A = typename decltype(a)::type;
      with_sum_activation<A>(activation, [&](auto functor) {
        using Functor = decltype(functor);
        with_flag(params.skip != nullptr, [&](auto adds_skip) {
          with_flag(params.sum != nullptr, [&](auto stores) {
            launch_as(a, a, std::type_identity<ActivatedSum<Functor, adds_skip(), stores()>>{});
          });
        });
      });
    });
  }
  require_no_sum(params);
  with_normalize_types(params, launch_as);
}

namespace {

void require_one_activation(const NormalizeParams& params) {
  require_slopes(params.before);
  require_slopes(params.after);
  if (params.before.kind == Activation::kNone || params.after.kind == Activation::kNone) return;
  throw std::invalid_argument(
      std::string(
          "upconv3d: normalize applies one activation, before the normalization or after it; got before=") +
      name(params.before.kind) + ", after=" + name(params.after.kind) + ". Apply one of them elsewhere.");
}

}  // namespace

void launch_group_norm_normalize(const NormalizeParams& params, cudaStream_t stream) {
  if (params.shape.n == 0) return;
  require_one_activation(params);
  if (params.steps != nullptr) {
    require_no_sum(params);
    launch_normalize_steps(params, stream);
  } else if (params.a_layout == params.y_layout) {
    launch_normalize_in_layout(params, stream);
  } else {
    require_no_sum(params);
    launch_normalize_transpose(params, stream);
  }
}

}  // namespace upconv3d::cuda
