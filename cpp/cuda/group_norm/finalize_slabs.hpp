// SPDX-License-Identifier: Apache-2.0
/// \file
/// group_norm_finalize_slabs: forward stage 3 of 4 of an SM90 plan whose convolution takes several launches,
/// none of which has the moments of all slabs (core/slab_launches.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

struct FinalizeSlabsParams {
  Problem problem;
  std::vector<Slab> slabs;  // at most kMaxPhases, as the convolution took them
  std::int64_t moment_positions =
      0;                           // of a slab that one partial moment covers; the slab's last has the rest
  int granule_shift = 0;           // granule = 2^shift neighbouring channels of one group share a moment
  const float* part = nullptr;     // [N,moments,K/granule,2] (mean, M2)
  const void* gamma = nullptr;     // [K] dtype, or null for 1
  const void* beta = nullptr;      // [K] dtype, or null for 0
  float* channel_table = nullptr;  // [3,N,K] written: mean, scale, shift
  float* table = nullptr;  // [N,G,4] written, or null: mean, rest of the mean, 1/sqrt(var + eps), unused
};
/// \throws std::logic_error for more slabs than it takes.
void launch_group_norm_finalize_slabs(const FinalizeSlabsParams& params, cudaStream_t stream);

}  // namespace upconv3d::cuda
