// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the normalize kernels share: arguments, the map of a channel's values, and the kernels' host entry
/// points.
#pragma once

#include "cuda/group_norm/async_copy.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/group_norm.hpp"
#include "cuda/group_norm/pending.cuh"
#include "cuda/launch.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {

/// Tiles whose values a block of a transposing kernel has asked for ahead, beside the convolution: few
/// multiprocessors do there what all do otherwise, and a load takes long while the convolution's keep L2
/// busy.
inline constexpr int kTilesAhead = 4;

/// Blocks of such a kernel that share a multiprocessor.
inline constexpr int kAheadBlocks = 2;

/// The ring in which they arrive: a thread asks for its own vectors of 16 bytes, and takes them itself.
class TilesAhead {
 public:
  /// Of dynamic shared memory.
  static constexpr int kBytes = kTilesAhead * kLoadsInFlight * kStreamThreads * kAccessBytes;

  /// \param memory [kTilesAhead][kLoadsInFlight][kStreamThreads] uint4
  __device__ __forceinline__ explicit TilesAhead(void* memory)
      : own_(static_cast<uint4*>(memory) + threadIdx.x) {}

  /// Asks for a tile, unless it is `none`: vector i from pointer_of(i), or zeros where that is null.
  template <class PointerOf>
  __device__ __forceinline__ void ask(const void* any, bool none, PointerOf pointer_of) {
    if (!none) {
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const void* const from = pointer_of(i);
        copy_async<kAccessBytes>(at(asked_, i), from != nullptr ? from : any, from != nullptr);
      }
    }
    end_copies();
    advance(asked_);
  }

  /// Vector i of the tile that is next to be taken, which await() brought here.
  __device__ __forceinline__ uint4 vector(int i) const { return *at(taken_, i); }
  __device__ __forceinline__ void await() const { await_copies<kTilesAhead - 1>(); }
  __device__ __forceinline__ void end_tile() { advance(taken_); }

 private:
  __device__ __forceinline__ uint4* at(int tile, int i) const {
    return own_ + (tile * kLoadsInFlight + i) * kStreamThreads;
  }
  __device__ __forceinline__ static void advance(int& tile) { tile = tile + 1 == kTilesAhead ? 0 : tile + 1; }

  uint4* own_;  // this thread's vector 0 of tile 0
  int asked_ = 0, taken_ = 0;
};

template <class A, class Y>
struct NormalizeArgs {
  GroupNormShape shape;
  const A* a;            // [N,K,Z,P,Q] or [N,Z,P,Q,a_pitch] A
  const A* bias;         // [K] A, or null
  const A* skip;         // as a lies, or null; read with AnyPending and ActivatedSum
  const Stat<A>* table;  // [3,N,K] stat; null with ActivatedSum, and maybe with AnyPending
  Y* y;                  // [N,K,Z,P,Q] or [N,Z,P,Q,K] Y, may be a where type, layout and pitch are equal
  Y* sum;                // as y, written where kStoresSum
  // With AnyPending and ActivatedSum alone: the only activation, and whether the normalization precedes it.
  ActivationParams activation;
  Stat<A> parameter;  // activation.parameter
  bool norm_first;
  std::int64_t a_pitch;  // elements of a position's row of a; [N,Z,P,Q,a_pitch] only
  bool table_vectors;    // the table's rows take vector loads at every kLanes-th channel
  // The launch's partition of the work; each kernel says which of these it reads.
  std::int64_t channel_blocks;                               // blocks along K
  std::int64_t position_blocks;                              // blocks along the positions of one sample
  std::int64_t position_steps;                               // positions, or tiles of positions, per block
  std::int64_t early_position_blocks, early_position_steps;  // the same of samples before the last, if merged
  bool vector_out;                                           // transposing kernel: y takes 16-byte stores
  const std::int32_t* merged;                                // of NormalizeParams, as is
  std::int32_t merged_count;
};

template <class Input>
constexpr bool kIsSum = false;
template <class Activation, bool kAddsSkip, bool kStores>
constexpr bool kIsSum<ActivatedSum<Activation, kAddsSkip, kStores>> = true;

template <class Input>
constexpr bool kReadsSkip = Input::kDecidesLater;
template <class Activation, bool kAddsSkip, bool kStores>
constexpr bool kReadsSkip<ActivatedSum<Activation, kAddsSkip, kStores>> = kAddsSkip;

template <class Input>
constexpr bool kStoresSum = false;
template <class Activation, bool kAddsSkip>
constexpr bool kStoresSum<ActivatedSum<Activation, kAddsSkip, true>> = true;

/// From a to y for the values of kLanes channels, in registers: y = (v - mean)*scale + shift, v = Input(a,
/// bias); with ActivatedSum, the activation of a + bias (+ skip); with AnyPending, all that NormalizeParams
/// can say.
template <class A, class Input, int kLanes>
struct ChannelMap {
  using S = Stat<A>;
  static constexpr bool kIsSum = cuda::kIsSum<Input>;
  static constexpr bool kStoresSum = cuda::kStoresSum<Input>;
  static constexpr bool kReadsSkip = cuda::kReadsSkip<Input>;
  static constexpr bool kMayLackTable = kIsSum || Input::kDecidesLater;
  S mean[kLanes], scale[kLanes], shift[kLanes], bias[kLanes];

  /// Takes the row of `channel` into one lane.
  template <class Y>
  __device__ __forceinline__ void load(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                       std::int64_t channel, int lane) {
    load_bias(args, channel, lane);
    if (kMayLackTable && args.table == nullptr) return;
    const std::int64_t plane = args.shape.n * args.shape.k;
    const S* from = args.table + sample * args.shape.k + channel;
    mean[lane] = from[0];
    scale[lane] = from[plane];
    shift[lane] = from[2 * plane];
  }

  template <class Y>
  __device__ __forceinline__ void load_bias(const NormalizeArgs<A, Y>& args, std::int64_t channel, int lane) {
    bias[lane] = Input::kReadsBias && args.bias != nullptr ? to_stat(args.bias[channel]) : S(0);
  }

  /// Takes the rows of kLanes consecutive channels, as many of them as there are.
  template <class Y>
  __device__ __forceinline__ void load_consecutive(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                                   std::int64_t channel) {
    if (args.table_vectors) {
      load_vectors(args, sample, channel);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (channel + lane < args.shape.k) load(args, sample, channel + lane, lane);
    }
  }

  /// Takes the rows of kLanes consecutive channels; the table must allow vector loads at `channel`.
  template <class Y>
  __device__ __forceinline__ void load_vectors(const NormalizeArgs<A, Y>& args, std::int64_t sample,
                                               std::int64_t channel) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) load_bias(args, channel + lane, lane);
    if (kMayLackTable && args.table == nullptr) return;
    const std::int64_t plane = args.shape.n * args.shape.k;
    const S* from = args.table + sample * args.shape.k + channel;
    const auto means = load_vector<kLanes, false>(from);
    const auto scales = load_vector<kLanes, false>(from + plane);
    const auto shifts = load_vector<kLanes, false>(from + 2 * plane);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      mean[lane] = means.at[lane];
      scale[lane] = scales.at[lane];
      shift[lane] = shifts.at[lane];
    }
  }

  /// kCount elements, the j-th of them of channel channel_of(j), which lane lane_of(j) has.
  /// \param skip where kReadsSkip
  /// \param channel_of below K
  template <class Y, int kCount, class LaneOf, class ChannelOf>
  __device__ __forceinline__ Vector<Y, kCount> apply(const NormalizeArgs<A, Y>& args,
                                                     const Vector<A, kCount>& a,
                                                     const Vector<A, kCount>& skip, LaneOf lane_of,
                                                     ChannelOf channel_of) const {
    S v[kCount];
    if constexpr (Input::kDecidesLater) {
      add_pending(a, bias, args.skip != nullptr, skip, v, lane_of);
      const bool has_norm = args.table != nullptr;
      if (has_norm && args.norm_first) normalize(v, lane_of);
      activate(args.activation, args.parameter, v,
               [&](int j) { return activation_parameter<Y>(args.activation, channel_of(j)); });
      if (has_norm && !args.norm_first) normalize(v, lane_of);
    } else if constexpr (kIsSum) {
      add_pending(a, bias, Input::kAddsSkip, skip, v, lane_of);
      activate_as<typename Input::Activation>(args.activation, args.parameter, v, [&](int j) {
        return activation_parameter<Y>(args.activation, channel_of(j));
      });
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = Input{}(to_stat(a.at[j]), bias[lane_of(j)]);
      normalize(v, lane_of);
    }
    return rounded<Y>(v);
  }

  /// What is stored where kStoresSum: a + bias (+ skip).
  template <class Y, int kCount, class LaneOf>
  __device__ __forceinline__ Vector<Y, kCount> sum_of(const Vector<A, kCount>& a,
                                                      const Vector<A, kCount>& skip, LaneOf lane_of) const {
    S v[kCount];
    add_pending(a, bias, Input::kAddsSkip, skip, v, lane_of);
    return rounded<Y>(v);
  }

  /// The activation of what is stored.
  template <class Y, int kCount, class ChannelOf>
  __device__ __forceinline__ Vector<Y, kCount> activated(const NormalizeArgs<A, Y>& args,
                                                         const Vector<Y, kCount>& sum,
                                                         ChannelOf channel_of) const {
    S v[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = to_stat(sum.at[j]);
    activate_as<typename Input::Activation>(args.activation, args.parameter, v, [&](int j) {
      return activation_parameter<Y>(args.activation, channel_of(j));
    });
    return rounded<Y>(v);
  }

 private:
  template <class Y, int kCount>
  static __device__ __forceinline__ Vector<Y, kCount> rounded(const S (&v)[kCount]) {
    Vector<Y, kCount> y;
#pragma unroll
    for (int j = 0; j < kCount; ++j) y.at[j] = from_stat<Y>(v[j]);
    return y;
  }

  template <int kCount, class LaneOf>
  __device__ __forceinline__ void normalize(S (&v)[kCount], LaneOf lane_of) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      v[j] = (v[j] - mean[lane_of(j)]) * scale[lane_of(j)] + shift[lane_of(j)];
    }
  }
};

/// Elements of a position's row of a, where a_layout is NDHWC.
inline std::int64_t row_pitch(const NormalizeParams& params) {
  return params.a_pitch != 0 ? params.a_pitch : params.shape.k;
}

/// What a block has to do: `steps` positions, or tiles of them, from `first_step` on.
struct BlockWork {
  std::int64_t sample, channel_block, first_step, steps;
};

/// Blocks run from the last sample to the first: the convolution wrote the last one just now, and it is still
/// in L2. Beside the convolution, from the first sample to the last, each from its end. Channel block
/// fastest.
template <class A, class Y>
__device__ __forceinline__ BlockWork work_of_block(const NormalizeArgs<A, Y>& args) {
  const std::int64_t of_sample = args.channel_blocks * args.position_blocks, n = args.shape.n;
  const std::int64_t of_early_sample = args.channel_blocks * args.early_position_blocks;
  std::int64_t block = static_cast<std::int64_t>(gridDim.x) - 1 - static_cast<std::int64_t>(blockIdx.x);
  BlockWork work{0, 0, 0, args.position_steps};
  if (args.merged == nullptr) {
    work.sample = block / of_sample;
    block -= work.sample * of_sample;
  } else if (block < of_sample) {
    work.sample = n - 1;
  } else {
    const std::int64_t to_last = (block - of_sample) / of_early_sample;
    work.sample = n - 2 - to_last;
    work.steps = args.early_position_steps;
    block -= of_sample + to_last * of_early_sample;
  }
  const std::int64_t position_block = block / args.channel_blocks;
  work.channel_block = block - position_block * args.channel_blocks;
  work.first_step = position_block * work.steps;
  return work;
}

/// Waits until *counter is at least `count`: then what was written before is there for the block, once its
/// threads have met.
__device__ __forceinline__ void await_count(const std::int32_t* counter, std::int32_t count) {
  constexpr unsigned kPollNanoseconds = 500;
  for (;;) {
    std::int32_t value;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    if (value >= count) return;
    __nanosleep(kPollNanoseconds);
  }
}

/// Waits until what is read of `sample` is there, if the launch began beside the kernel before it. By all
/// threads of the block, before they read.
template <class A, class Y>
__device__ __forceinline__ void await_sample(const NormalizeArgs<A, Y>& args, std::int64_t sample) {
#if __CUDA_ARCH__ >= 900
  if (args.merged == nullptr) return;
  // The last sample's blocks wait for all of that kernel, so that none behind this one begins before it has
  // ended; then they acquire too, for this multiprocessor may hold what lay beside other samples' values.
  if (sample == args.shape.n - 1) wait_for_kernel_before();
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread == 0) await_count(args.merged, args.merged_count);
  if (thread == 32) await_count(args.merged + sample, args.merged_count);
  __syncthreads();
#endif
}

/// The arguments that no launch decides.
template <class A, class Y>
NormalizeArgs<A, Y> normalize_args(const NormalizeParams& params) {
  NormalizeArgs<A, Y> args{};
  args.shape = params.shape;
  args.a = static_cast<const A*>(params.a);
  args.bias = static_cast<const A*>(params.bias);
  args.skip = static_cast<const A*>(params.skip);
  args.table = static_cast<const Stat<A>*>(params.table);
  args.y = static_cast<Y*>(params.y);
  args.sum = static_cast<Y*>(params.sum);
  args.norm_first = params.before.kind == Activation::kNone;
  args.activation = args.norm_first ? params.after : params.before;
  args.parameter = static_cast<Stat<A>>(args.activation.parameter);
  args.a_pitch = row_pitch(params);
  args.merged = params.merged;
  args.merged_count = params.merged_count;
  return args;
}

/// Divides the `positions` of a sample, or tiles of them, among blocks of `steps`; of samples that are
/// normalized beside the convolution, where few blocks run at a time and each begins with a chain of loads,
/// `early_steps`. Returns the launch's blocks. channel_blocks must be set.
template <class A, class Y>
std::int64_t divide_positions(std::int64_t positions, std::int64_t steps, std::int64_t early_steps,
                              NormalizeArgs<A, Y>& args) {
  args.position_steps = steps;
  args.position_blocks = ceil_div(positions, steps);
  args.early_position_steps = early_steps;
  args.early_position_blocks = ceil_div(positions, early_steps);
  const std::int64_t early = args.merged != nullptr ? args.shape.n - 1 : 0;
  return args.channel_blocks *
         (early * args.early_position_blocks + (args.shape.n - early) * args.position_blocks);
}

/// Calls visit(A tag, Y tag, Input tag) for the types that `params` names.
/// \throws std::invalid_argument for a pair of dtypes that has no kernel.
template <class Visit>
void with_normalize_types(const NormalizeParams& params, Visit&& visit) {
  with_element(params.a_dtype, [&](auto a) {
    const auto with_input = [&](auto y) {
      const bool is_plain =
          params.table != nullptr && params.skip == nullptr && params.after.kind == Activation::kNone;
      if (is_plain && params.before.kind == Activation::kRelu) {
        return visit(a, y, std::type_identity<AfterBias<ReluActivation>>{});
      }
      if (is_plain && params.before.kind == Activation::kNone && params.bias == nullptr) {
        return visit(a, y, std::type_identity<AsStored>{});
      }
      return visit(a, y, std::type_identity<AnyPending>{});
    };
    if (params.y_dtype == params.a_dtype) return with_input(a);
    constexpr bool kIs16Bit = sizeof(typename decltype(a)::type) == 2;
    if constexpr (kIs16Bit) {
      if (params.y_dtype == DType::kFloat32) return with_input(std::type_identity<float>{});
    }
    throw std::invalid_argument(
        "upconv3d: normalize writes the dtype it reads, or float32 from 16 bit; got a_dtype=" +
        std::string(name(params.a_dtype)) + ", y_dtype=" + name(params.y_dtype) +
        ". Store the activation in y's dtype.");
  });
}

/// Launches a kernel beside the convolution whose blocks have a TilesAhead.
template <class Args>
void launch_ahead(const char* name, void (*kernel)(Args), ReservedSharedMemory& reserved, std::int64_t blocks,
                  cudaStream_t stream, const Args& args) {
  reserved.ensure(name, reinterpret_cast<const void*>(kernel), TilesAhead::kBytes);
  launch(name, kernel, blocks, dim3(kStreamThreads), stream, args, true, TilesAhead::kBytes);
}

/// a and y in the same layout.
void launch_normalize_in_layout(const NormalizeParams& params, cudaStream_t stream);

/// a [N,Z,P,Q,a_pitch] in 16 bits with steps, y [N,K,Z,P,Q] or [N,Z,P,Q,K] float32.
/// \throws std::invalid_argument where params say otherwise.
void launch_normalize_steps(const NormalizeParams& params, cudaStream_t stream);

/// a and y in different layouts.
void launch_normalize_transpose(const NormalizeParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
