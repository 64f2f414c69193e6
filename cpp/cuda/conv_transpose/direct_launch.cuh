// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launches of conv_transpose_direct's kernels, one instantiation of each launcher per file.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/channels.hpp"
#include "core/direct_tiling.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/compiled_arch.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"
#include "cuda/conv_transpose/direct_pass.cuh"
#include "cuda/launch.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {

/// For T of problem.dtype: conv_transpose_depthwise, and conv_transpose_any_taps.
template <class T>
void launch_depthwise(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                      cudaStream_t stream);
template <class T>
void launch_any_taps(const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                     cudaStream_t stream);

/// Elements from one channel, and from one position of each axis, to the next.
struct DenseSteps {
  int channel, axis[3];

  DenseSteps(Layout layout, std::int64_t channels, const Extent3& extent) {
    const bool first = layout == Layout::kNCDHW;
    const std::int64_t position = first ? 1 : channels;
    channel = static_cast<int>(first ? volume(extent) : 1);
    axis[2] = static_cast<int>(position);
    axis[1] = static_cast<int>(position * extent[2]);
    axis[0] = static_cast<int>(position * extent[2] * extent[1]);
  }
};

template <class T>
void set_geometry(const Problem& problem, DirectArgs<T>& args) {
  const Extent3 out = problem.out();
  const DenseSteps x(problem.x_layout, problem.c, problem.in), y(problem.y_layout, problem.k, out);
  args.x_sample = problem.c * volume(problem.in);
  args.y_sample = problem.k * volume(out);
  args.x_channel = x.channel;
  args.y_channel = y.channel;
  args.channels_first = problem.y_layout == Layout::kNCDHW;
  for (int axis = 0; axis < 3; ++axis) {
    args.x_axis[axis] = x.axis[axis];
    args.y_axis[axis] = y.axis[axis];
    args.in[axis] = static_cast<int>(problem.in[axis]);
    args.out[axis] = static_cast<int>(out[axis]);
    args.kernel[axis] = static_cast<int>(problem.kernel[axis]);
    args.stride[axis] = static_cast<int>(problem.stride[axis]);
    args.padding[axis] = static_cast<int>(problem.padding[axis]);
    args.dilation[axis] = static_cast<int>(problem.dilation[axis]);
  }
  args.n = static_cast<int>(problem.n);
  args.k = static_cast<int>(problem.k);
  args.group_inputs = static_cast<int>(group_inputs(problem));
  args.group_outputs = static_cast<int>(group_outputs(problem));
}

template <class T>
DirectArgs<T> direct_args(const ConvTransposeDirectParams& params, const DirectTiling& tiling) {
  DirectArgs<T> args{};
  set_geometry(params.problem, args);
  args.x = static_cast<const T*>(params.x);
  args.w = static_cast<const T*>(params.w);
  for (int axis = 0; axis < 5; ++axis) args.w_strides[axis] = params.w_strides[axis];
  args.bias = static_cast<const T*>(params.bias);
  args.table = static_cast<const float*>(params.table);
  args.part = reinterpret_cast<float2*>(params.part);
  args.counts = params.counts;
  args.y = static_cast<T*>(params.y);
  args.norm_first = params.before.kind == Activation::kNone;
  args.activation = args.norm_first ? params.after : params.before;
  args.parameter = static_cast<float>(args.activation.parameter);
  args.lanes_c = tiling.lanes_c;
  args.lanes_q = tiling.lanes_q;
  args.lanes_z = tiling.lanes_z;
  const auto shift = [](int lanes) { return std::countr_zero(static_cast<unsigned>(lanes)); };
  args.lanes_c_shift = shift(tiling.lanes_c);
  args.lanes_q_shift = shift(tiling.lanes_q);
  args.lanes_z_shift = shift(tiling.lanes_z);
  for (int axis = 0; axis < 3; ++axis) {
    args.first[axis] = static_cast<int>(tiling.first[axis]);
    args.end[axis] = static_cast<int>(tiling.first[axis] + tiling.cells[axis]);
    args.tile[axis] = static_cast<int>(tiling.tile[axis]);
    args.tiles[axis] = static_cast<int>(tiling.tiles[axis]);
  }
  args.tile_count = static_cast<int>(tiling.tile_count());
  args.channel_blocks = static_cast<int>(tiling.channel_blocks);
  return args;
}

/// Whether a pass has no activation but ReLU to apply: that of moments leaves out what comes after them.
inline bool is_plain(const ConvTransposeDirectParams& params) {
  const auto plain = [](Activation kind) { return kind == Activation::kNone || kind == Activation::kRelu; };
  return plain(params.before.kind) && (params.part != nullptr || plain(params.after.kind));
}

/// What CUDA is asked about a kernel, or told, once; static, the kernel's own.
struct DirectKernelFacts {
  ReservedSharedMemory reserved;
  CompiledArch arch;
};

/// One pass, a block for each sample, tile and block of channels.
template <class T>
void launch_direct_kernel(const char* name, void (*kernel)(DirectArgs<T>),
                          const ConvTransposeDirectParams& params, const DirectTiling& tiling,
                          DirectKernelFacts& facts, cudaStream_t stream) {
  constexpr std::int64_t kUnasked = 48 * 1024;  // bytes that kernels get
  const std::int64_t for_moments = direct_moment_bytes(tiling);
  if (tiling.shared_bytes + for_moments > kUnasked) {
    // All that there is: another thread may be about to launch the kernel for a shape that takes more.
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
    facts.reserved.ensure(name, reinterpret_cast<const void*>(kernel), most - static_cast<int>(for_moments));
  }
  const std::int64_t blocks =
      saturating_product(params.problem.n, tiling.tile_count(), tiling.channel_blocks);
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw std::logic_error("upconv3d: conv_transpose_direct runs at most 2147483647 blocks; got " +
                           std::to_string(blocks) + " for " + describe(params.problem) +
                           ". select_plan must choose another plan.");
  }
  const dim3 grid(static_cast<unsigned>(blocks)), threads(kDirectThreads);
  const auto shared_bytes = static_cast<std::size_t>(tiling.shared_bytes);
  const DirectArgs<T> args = direct_args<T>(params, tiling);
  // Beside group_norm_finalize, if this code waits for it: what a GPU runs from PTX of before Hopper does
  // not.
  const bool beside = params.problem.tail.norm && params.part == nullptr &&
                      facts.arch.of(reinterpret_cast<const void*>(kernel)) >= 90;
  launch_kernel(name, kernel, {grid, threads, shared_bytes}, stream, args, beside);
}

}  // namespace upconv3d::cuda
