// SPDX-License-Identifier: Apache-2.0
/// \file
/// Names of the stages in a profiler's trace: an NVTX range around the launches of each.
#pragma once

#include <nvtx3/nvToolsExt.h>

namespace upconv3d::cuda {

/// A range on this thread for as long as the object lives. It covers the launches on the host; Nsight Systems
/// and torch.profiler project it onto the kernels. Without a tool attached it is the test of a null pointer.
class StageRange {
 public:
  explicit StageRange(const char* stage) { nvtxRangePushA(stage); }
  ~StageRange() { nvtxRangePop(); }
  StageRange(const StageRange&) = delete;
  StageRange& operator=(const StageRange&) = delete;
};

}  // namespace upconv3d::cuda
