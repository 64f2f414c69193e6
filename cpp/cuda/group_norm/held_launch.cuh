// SPDX-License-Identifier: Apache-2.0
/// \file
/// Host side that both forms of activation_group_norm_held share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/held_norm.hpp"
#include "cuda/compiled_arch.hpp"
#include "cuda/conv_transpose/cooperative_launch.hpp"
#include "cuda/group_norm/held_norm.hpp"
#include "cuda/group_norm/pending.cuh"
#include "cuda/launch.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {

void launch_held_tiles(const HeldNormParams& params, const HeldTiles& tiles, cudaStream_t stream);
void launch_held_planes(const HeldNormParams& params, const HeldPlanes& planes, cudaStream_t stream);

/// Fills in what both kernels' arguments have by the same names.
template <class Args>
void fill_common(const HeldNormParams& params, Args& args) {
  using T = std::remove_pointer_t<decltype(args.y)>;
  args.c = static_cast<const T*>(params.c);
  args.bias = static_cast<const T*>(params.bias);
  args.gamma = static_cast<const T*>(params.gamma);
  args.beta = static_cast<const T*>(params.beta);
  args.y = static_cast<T*>(params.y);
  args.part = static_cast<float2*>(params.part);
  args.eps = params.eps;
  args.activation = params.before.kind == Activation::kNone ? params.after : params.before;
  args.parameter = static_cast<float>(args.activation.parameter);
}

/// Calls visit(type_identity<T>{}, type_identity<Input>{}) with the element type and what is due of a value.
/// Of AnyPending, that is an activation before the normalization that has_held_kernel says no of.
template <class Visit>
void with_held_kernel(const HeldNormParams& params, Visit&& visit) {
  const auto with_input = [&](auto element) {
    const bool has_one_parameter = params.after.kind != Activation::kPrelu || params.after.slope_step == 0;
    if (params.after.kind == Activation::kNone && params.before.kind == Activation::kRelu) {
      visit(element, std::type_identity<AfterBias<ReluActivation>>{});
    } else if (params.before.kind == Activation::kLeakyRelu) {
      visit(element, std::type_identity<AfterBias<SlopeActivation>>{});
    } else if (params.before.kind == Activation::kNone && !has_one_parameter) {
      visit(element, std::type_identity<AfterBias<NoActivation, ChannelSlopes>>{});
    } else if (params.before.kind == Activation::kNone) {
      with_activation(params.after.kind, [&](auto activation) {
        visit(element, std::type_identity<AfterBias<NoActivation, decltype(activation)>>{});
      });
    } else {
      visit(element, std::type_identity<AnyPending>{});
    }
  };
  with_element(params.dtype, [&](auto element) {
    if constexpr (sizeof(typename decltype(element)::type) == 8) {
      throw std::invalid_argument(
          "upconv3d: values held by one launch are float32, bfloat16 or float16; got float64. Take the three "
          "passes of group_norm.hpp.");
    } else {
      with_input(element);
    }
  });
}

/// How one kernel is launched.
struct HeldShape {
  int work;     // blocks that hold all values
  int threads;  // of a block
  int shared_bytes;
  int tiles;      // blocks that wait for each other, one: none do
  bool clusters;  // whether those are a cluster; else all blocks wait
};

/// A launch whose blocks wait for their clusters' alone, or for none. Where `beside`, it begins as soon as
/// the blocks of the kernel before have ended, not when what they wrote has been, too: 1 us earlier. (Of
/// cooperative launches that would make no difference.)
template <class Args>
cudaError_t launch_held_clusters(void (*kernel)(Args), const Args& args, const HeldShape& shape, bool beside,
                                 cudaStream_t stream) {
  return launch_status(
      kernel,
      {dim3(static_cast<unsigned>(shape.work)), dim3(static_cast<unsigned>(shape.threads)),
       static_cast<std::size_t>(shape.shared_bytes), shape.clusters ? static_cast<unsigned>(shape.tiles) : 1},
      stream, args, beside);
}

/// Whether a launch was refused because the context holds no such cluster: it may have been granted a few
/// multiprocessors of each of the GPU's parts alone (green contexts, MPS).
inline bool refuses_clusters(cudaError_t status) {
  return status == cudaErrorInvalidClusterSize || status == cudaErrorLaunchOutOfResources;
}

/// The kernel whose threads keep their values in registers, where that can run.
template <class Args>
struct KeptKernel {
  void (*kernel)(Args) = nullptr;
  int held_bytes = 0;  // of shared memory that values take there
};

/// \param kept in the place of `kernel` where not all blocks wait for each other
/// \param reserved,arch static, the kernel's own. What a GPU runs from PTX of an older architecture neither
/// knows clusters nor waits for the kernel before.
template <class Args>
void launch_held_kernel(const char* name, void (*kernel)(Args), const KeptKernel<Args>& kept, Args& args,
                        const HeldShape& shape, ReservedSharedMemory& reserved, CompiledArch& arch,
                        const HeldNormParams& params, cudaStream_t stream) {
  if (shape.shared_bytes > kUnaskedSharedBytes) {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
    reserved.ensure(name, reinterpret_cast<const void*>(kernel), most);
  }
  const bool knows_hopper = arch.of(reinterpret_cast<const void*>(kernel)) >= 90;
  if (shape.tiles == 1 || (shape.clusters && knows_hopper)) {
    Args alone = args;
    HeldShape of_alone = shape;
    if (kept.kernel != nullptr) {
      alone.held_bytes = kept.held_bytes;
      of_alone.shared_bytes += kept.held_bytes - args.held_bytes;
    }
    const cudaError_t status = launch_held_clusters(kept.kernel != nullptr ? kept.kernel : kernel, alone,
                                                    of_alone, knows_hopper, stream);
    if (!shape.clusters || !refuses_clusters(status)) return check(status, name);
    cudaGetLastError();
  }
  args.clusters = false;
  const int blocks = params.max_blocks > 0 ? std::min(params.max_blocks, shape.work) : shape.work;
  launch_cooperative(name, reinterpret_cast<const void*>(kernel), &args,
                     {blocks, shape.threads, shape.shared_bytes}, stream, [](int) {});
}

}  // namespace upconv3d::cuda
