// SPDX-License-Identifier: Apache-2.0
/// \file
/// col2im: y(k, o) = activation(bias(k) + sum over taps that reach o of columns(k, tap, input)), taps in
/// rising order.
///
/// o = input*stride + tap*dilation - padding along each axis. A lane has one output position of kChannels
/// neighbouring output channels, so that what taps are worth asking for serves them all, and a warp's loads
/// are of neighbouring inputs. Rows of channels (NDHWC) are written through shared memory.
#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/col2im_plan.hpp"
#include "core/index_math.hpp"
#include "cuda/activation.cuh"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/col2im.hpp"
#include "cuda/group_norm/element.cuh"

namespace upconv3d::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 32;
constexpr int kLoadsAhead = 16;  // of a lane

/// All but what has the dtype of y.
struct Col2imArgs {
  const float* columns;         // [samples][rows][pitch] of ColumnsLayout
  std::int64_t columns_sample;  // floats from sample to sample
  int tap, k;                   // floats from tap to tap, from output channel to output channel
  int channels;
  int in[3], kernel[3], padding[3], dilation[3];
  cutlass::FastDivmod height, width;  // of outputs
  cutlass::FastDivmod stride[3];
  cutlass::FastDivmod step[3];          // taps from one that reaches an output to the next, or all
  cutlass::FastDivmod back[3];          // inputs that the next one reads before
  int positions;                        // outputs of a sample
  int position_blocks, channel_blocks;  // of a sample
};

/// \tparam T of y and bias
template <class T>
struct Col2imTypedArgs : Col2imArgs {
  const T* bias;  // [K], or null
  T* y;           // [N,K,Z,P,Q] or [N,Z,P,Q,K]
  ActivationParams activation;
};

/// Taps that reach one output along one axis: first, first + step, ... `count` of them, which read input,
/// input - back, ...
struct AxisTaps {
  int first, count, input;
};

__device__ AxisTaps taps_of(const Col2imArgs& args, int axis, int output) {
  const int step = args.step[axis].divisor, back = args.back[axis].divisor;
  // As far as the last tap that is tried reaches back, `back` inputs, so that no dividend is negative.
  int reach = output + args.padding[axis] + back * args.stride[axis].divisor;
  int tap = 0, input, rest;
  for (; tap < step; ++tap, reach -= args.dilation[axis]) {
    args.stride[axis](input, rest, reach);
    if (rest == 0) break;
  }
  if (tap == step) return {0, 0, 0};
  input -= back;
  // Taps before the first that reads behind the volume.
  const int outside = input - args.in[axis] + 1;
  if (outside > 0) {
    const int skipped = args.back[axis].div(outside + back - 1);
    tap += skipped * step, input -= skipped * back;
  }
  if (input < 0 || tap >= args.kernel[axis]) return {0, 0, 0};
  return {tap, min(args.step[axis].div(args.kernel[axis] - tap + step - 1), args.back[axis].div(input) + 1),
          input};
}

/// Where the products of one output lie that are taken of all three axes, the width's taps innermost.
class TapWalk {
 public:
  __device__ TapWalk(const Col2imArgs& args, const AxisTaps& z, const AxisTaps& p, const AxisTaps& q)
      : p_count_(p.count), q_count_(q.count) {
    place_ = ((z.first * args.kernel[1] + p.first) * args.kernel[2] + q.first) * args.tap +
             (z.input * args.in[1] + p.input) * args.in[2] + q.input;
    // Who reads back by more than the volume reads one input, and needs no step to a next one.
    const auto back = [&](int axis) { return min(args.back[axis].divisor, args.in[axis]); };
    const int r = args.kernel[2] * args.tap;
    const int z_next = args.step[0].divisor * args.kernel[1] * r - back(0) * args.in[1] * args.in[2];
    const int p_next = args.step[1].divisor * r - back(1) * args.in[2];
    q_next_ = args.step[2].divisor * args.tap - back(2);
    p_next_ = p_next - q.count * q_next_;
    z_next_ = z_next - p.count * p_next;
  }

  __device__ int place() const { return place_; }

  __device__ void advance() {
    place_ += q_next_;
    if (++q_ < q_count_) return;
    q_ = 0, place_ += p_next_;
    if (++p_ < p_count_) return;
    p_ = 0, place_ += z_next_;
  }

 private:
  int place_, q_next_, p_next_, z_next_;  // to the next of an axis, from the last of the one within
  int p_count_, q_count_, p_ = 0, q_ = 0;
};

/// \tparam kChannels output channels of a lane
/// \tparam kAcross   warps that share an output position
/// \tparam kMostTaps most that reach an output, or 0 for any number: unrolled, no tap costs as much as one
template <class T, int kChannels, int kAcross, int kMostTaps, bool kInRows>
__global__ void __launch_bounds__(kThreads) col2im(const __grid_constant__ Col2imTypedArgs<T> args) {
  constexpr int kBlockChannels = kChannels * kAcross, kBlockPositions = kThreads / kAcross;
  const int block = int(blockIdx.x);
  const int position0 = block % args.position_blocks * kBlockPositions;
  const int channel0 = block / args.position_blocks % args.channel_blocks * kBlockChannels;
  const std::int64_t n = block / args.position_blocks / args.channel_blocks;
  const int warp = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  const int in_block = warp / kAcross * kLanes + lane;
  const int position = position0 + in_block, channel = channel0 + warp % kAcross * kChannels;

  float sums[kChannels] = {};
  if (position < args.positions && channel < args.channels) {
    int at[3];
    at[0] = args.height.divmod(at[1], args.width.divmod(at[2], position));
    const AxisTaps z_taps = taps_of(args, 0, at[0]);
    const AxisTaps p_taps = taps_of(args, 1, at[1]);
    const AxisTaps q_taps = taps_of(args, 2, at[2]);
    const float* const columns = args.columns + n * args.columns_sample + std::int64_t(channel) * args.k;
    // The last lane's channels that are none read the last one's products.
    int offset[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) offset[c] = min(c, args.channels - 1 - channel) * args.k;
    TapWalk walk(args, z_taps, p_taps, q_taps);
    constexpr int kTaps = kMostTaps > 0 ? kMostTaps : kLoadsAhead / kChannels;
    for (int left = z_taps.count * p_taps.count * q_taps.count; left > 0; left -= kTaps) {
      float products[kTaps][kChannels];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          products[j][c] = j < left ? __ldg(columns + walk.place() + offset[c]) : 0;
        }
        walk.advance();
      }
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sums[c] += products[j][c];
      }
      if constexpr (kMostTaps > 0) break;
    }
    if (args.bias) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (channel + c < args.channels) sums[c] += to_stat(args.bias[channel + c]);
      }
    }
    with_activation(args.activation.kind, [&](auto activation) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int of = min(channel + c, args.channels - 1);
        sums[c] = activation.value(sums[c], activation_parameter<T>(args.activation, of));
      }
    });
  }
  if constexpr (kInRows) {
    // One float more than channels: lanes' writes meet other banks.
    __shared__ float tile[kBlockPositions][kBlockChannels + 1];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) tile[in_block][warp % kAcross * kChannels + c] = sums[c];
    __syncthreads();
    for (int i = int(threadIdx.x); i < kBlockPositions * kBlockChannels; i += kThreads) {
      const int o = i / kBlockChannels, c = i % kBlockChannels;
      if (position0 + o >= args.positions || channel0 + c >= args.channels) continue;
      args.y[(n * args.positions + position0 + o) * args.channels + channel0 + c] = from_stat<T>(tile[o][c]);
    }
  } else if (position < args.positions) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (channel + c >= args.channels) break;
      args.y[(n * args.channels + channel + c) * args.positions + position] = from_stat<T>(sums[c]);
    }
  }
}

template <int kChannels, int kAcross, int kMostTaps, class T>
void launch(Col2imTypedArgs<T>& args, const Problem& p, cudaStream_t stream) {
  args.position_blocks = static_cast<int>(ceil_div(args.positions, kThreads / kAcross));
  args.channel_blocks = static_cast<int>(ceil_div(p.k, kChannels * kAcross));
  const auto blocks = static_cast<unsigned>(p.n * args.position_blocks * args.channel_blocks);
  if (p.y_layout == Layout::kNDHWC) {
    col2im<T, kChannels, kAcross, kMostTaps, true><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    col2im<T, kChannels, kAcross, kMostTaps, false><<<blocks, kThreads, 0, stream>>>(args);
  }
  check_launch("launching col2im");
}

/// As many warps share a position as channels are there for.
template <int kChannels, int kMostTaps, class T>
void launch_across(Col2imTypedArgs<T>& args, const Problem& p, cudaStream_t stream) {
  const std::int64_t across = ceil_div(p.k, kChannels);
  if (across == 1) return launch<kChannels, 1, kMostTaps>(args, p, stream);
  if (across == 2) return launch<kChannels, 2, kMostTaps>(args, p, stream);
  if (across <= 4) return launch<kChannels, 4, kMostTaps>(args, p, stream);
  launch<kChannels, 8, kMostTaps>(args, p, stream);
}

/// The form for the output channels, and for the taps where there is one for few.
template <class T>
void launch_form(Col2imTypedArgs<T>& args, const Problem& p, cudaStream_t stream) {
  const std::int64_t taps = col2im_most_taps(p);
  switch (col2im_lane_channels(p)) {
    case 1:
      if (taps == 1) return launch<1, 1, 1>(args, p, stream);
      if (taps <= 4) return launch<1, 1, 4>(args, p, stream);
      if (taps <= 8) return launch<1, 1, 8>(args, p, stream);
      return launch<1, 1, 0>(args, p, stream);
    case 2:
      return taps == 1 ? launch_across<2, 1>(args, p, stream) : launch_across<2, 0>(args, p, stream);
    case 4:
      return taps == 1 ? launch<4, 1, 1>(args, p, stream) : launch<4, 1, 0>(args, p, stream);
    default:
      return taps == 1 ? launch_across<8, 1>(args, p, stream) : launch_across<8, 0>(args, p, stream);
  }
}

template <class T>
void launch_typed(const Col2imParams& params, cudaStream_t stream) {
  const Problem& p = params.problem;
  const ColumnsLayout layout(p);
  const Extent3 out = p.out();
  Col2imTypedArgs<T> args{};
  args.columns = static_cast<const float*>(params.columns);
  args.bias = static_cast<const T*>(params.bias);
  args.y = static_cast<T*>(params.y);
  args.activation = params.activation;
  args.columns_sample = layout.samples == 1 ? volume(p.in) : layout.rows * layout.pitch;
  args.tap = static_cast<int>(layout.row_tap * layout.pitch);
  args.k = static_cast<int>(layout.row_k * layout.pitch);
  args.channels = static_cast<int>(p.k);
  for (int axis = 0; axis < 3; ++axis) {
    args.in[axis] = static_cast<int>(p.in[axis]);
    args.kernel[axis] = static_cast<int>(p.kernel[axis]);
    args.stride[axis] = cutlass::FastDivmod(static_cast<int>(p.stride[axis]));
    args.padding[axis] = static_cast<int>(p.padding[axis]);
    args.dilation[axis] = static_cast<int>(p.dilation[axis]);
    args.step[axis] = cutlass::FastDivmod(static_cast<int>(col2im_tap_step(p, axis)));
    const std::int64_t shared = std::gcd(p.stride[axis], p.dilation[axis]);
    args.back[axis] = cutlass::FastDivmod(static_cast<int>(p.dilation[axis] / shared));
  }
  args.height = cutlass::FastDivmod(static_cast<int>(out[1]));
  args.width = cutlass::FastDivmod(static_cast<int>(out[2]));
  args.positions = static_cast<int>(p.positions());
  launch_form(args, p, stream);
}

}  // namespace

void launch_col2im(const Col2imParams& params, cudaStream_t stream) {
  const Problem& p = params.problem;
  if (p.dtype == DType::kBFloat16) return launch_typed<__nv_bfloat16>(params, stream);
  if (p.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  if (p.dtype != DType::kFloat32) {
    throw std::logic_error("upconv3d: col2im has no kernel for " + describe(p));
  }
  launch_typed<float>(params, stream);
}

}  // namespace upconv3d::cuda
