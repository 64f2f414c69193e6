// SPDX-License-Identifier: Apache-2.0
/// \file
/// What both SM90 kernels' launches do with the launch before them.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "core/launch_memo.hpp"
#include "cuda/conv_transpose/conv_transpose_sm90.hpp"
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

namespace upconv3d::cuda {

/// What the descriptors of a launch show, in Mapped's order.
inline MappedAddresses mapped_addresses(const ConvTransposeParams& params) {
  return {params.x_hi, params.x_lo, params.w_hi, params.w_lo, params.a};
}

/// Runs the Launch that params.memo holds, or one made for `params`.
template <class Launch>
void run_remembered(const ConvTransposeParams& params, cudaStream_t stream) {
  LaunchMemo::run<Launch>(
      params.memo, [&] { return std::make_unique<Launch>(params); },
      [&](Launch& launch) { launch.run(params, stream); });
}

/// One Launch after the other for shares of the slabs (core/slab_launches.hpp).
template <class Launch>
class SlabLaunchesSm90 : public RememberedLaunch {
 public:
  explicit SlabLaunchesSm90(const ConvTransposeParams& params) {
    if (params.channel_table == nullptr && !params.linear) {
      throw std::logic_error("upconv3d: several launches of the SM90 kernel do not normalize; got them for " +
                             describe(params.problem) + " without a channel_table.");
    }
    ConvTransposeParams share = params;
    for (share.launch = 0; share.launch < params.launches; ++share.launch) {
      launches_.push_back(std::make_unique<Launch>(share));
      // All count in the same memory, in which the launch before has counted.
      share.clears_counters = true;
    }
  }

  void run(const ConvTransposeParams& params, cudaStream_t stream) {
    for (const std::unique_ptr<Launch>& launch : launches_) launch->run(params, stream);
  }

 private:
  std::vector<std::unique_ptr<Launch>> launches_;
};

}  // namespace upconv3d::cuda
