// SPDX-License-Identifier: Apache-2.0
#include "core/plan.hpp"

#include <stdexcept>

#include "core/border_slabs.hpp"
#include "core/half_blocks.hpp"
#include "core/pack_stages.hpp"
#include "core/text.hpp"

namespace upconv3d {

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kSm90ImplicitGemm:
      return "sm90_implicit_gemm";
    case Algorithm::kSm80ImplicitGemm:
      return "sm80_implicit_gemm";
    case Algorithm::kCudaDirect:
      return "cuda_direct";
    case Algorithm::kCudaCol2im:
      return "cuda_col2im";
    case Algorithm::kCudaLibrary:
      return "cuda_library";
    case Algorithm::kCpuLibrary:
      return "cpu_library";
  }
  throw std::logic_error("upconv3d: Algorithm out of range");
}

namespace {

/// Of how many bits a stored value is, where its dtype does not say so.
const char* steps_text(const Plan& plan) {
  return stores_steps(plan) ? " in 16 bits with a step," : "";
}

}  // namespace

std::vector<std::string> pack_stages(const Problem& problem) {
  return {problem.dtype == DType::kFloat32 ? "pack_scaled_operands" : "pack_operands"};
}

std::string describe(const Plan& plan) {
  std::string text = concat("plan: ", name(plan.algorithm), "\n  reason: ", plan.reason);
  if (plan.instance) {
    text += concat("\n  kernel: ", plan.instance->name, ", tile ", plan.instance->block_channels,
                   " channels x ", plan.instance->block_positions, " positions");
    if (plan.instance->block_inputs == kHalfBlockInputs) {
      text += concat(", k-blocks of ", kHalfBlockInputs, " input channels");
    }
  }
  const bool direct = plan.algorithm == Algorithm::kCudaDirect;
  if ((direct && plan.tiles == 0) || (plan.twice && plan.linear)) {
    text += "\n  convolution: computed once, and stored as y";
  } else if (plan.held) {
    text += "\n  convolution: held in shared memory, as far as that goes, until it is normalized";
  } else if (plan.twice || direct) {
    text += "\n  convolution: computed for its moments, and once more to be normalized and stored";
    if (plan.twice && !plan.activation_in_y) text += concat(" as ", name(plan.conv_layout), " beside y");
  } else {
    text += concat("\n  convolution: stores ", name(plan.activation), steps_text(plan), ' ',
                   name(plan.conv_layout), plan.activation_in_y ? " in y's memory" : " beside y");
  }
  if (plan.pack_x) text += ", from a packed copy of x";
  if (plan.w_in_place) text += plan.pack_x ? " and w as it lies" : ", from w as it lies";
  if (!plan.channels.empty()) text += concat("\n  channels: ", plan.channels);
  if (plan.estimated_stored_ms > 0 || plan.estimated_twice_ms > 0) {
    const auto estimate = [](double ms) { return ms > 0 ? concat(ms, " ms") : "not possible"; };
    text += concat("\n  estimates after packing: stored ", estimate(plan.estimated_stored_ms),
                   plan.linear ? ", by conv_transpose_twice_sm90 " : ", computed twice ",
                   estimate(plan.estimated_twice_ms));
    if (plan.held) text += concat(", held ", plan.expected_held_us / 1e3, " ms with what follows");
  }
  if (direct) text += concat("\n  estimate: ", plan.estimated_direct_ms, " ms");
  if (plan.split_axes > 0) {
    text += concat("\n  borders: cut off along ", plan.split_axes, plan.split_axes == 1 ? " axis" : " axes",
                   ", so that taps which read only padding are skipped");
  }
  if (plan.share_taps)
    text += "\n  loads of x: where they can, each serves all taps along the height, or the depth";
  if (plan.pair_phases) text += "\n  tiles: of two phases each, which share loads of x";
  if (plan.launches > 1) {
    text += concat("\n  launches: ", plan.launches, " of the convolution, since one takes at most ",
                   kMaxSlabs, " phases");
  }
  if (plan.leaving_blocks > 0) {
    text += concat("\n  normalization: beside the convolution, of which ", plan.leaving_blocks,
                   " blocks end after the first sample");
  }
  if (plan.window_tiles > 0) {
    text += concat("\n  order: all phases of ", plan.window_tiles, " tiles of positions, then the next ones");
  }
  if (plan.tiles > 0 && !plan.linear) {
    text += concat("\n  moments: ", plan.tiles, " per sample and channel, of ", plan.tile_positions,
                   " positions at most");
  }
  text += "\n  stages: ";
  const char* separator = "";
  for (const std::string& stage : plan.stages) {
    text += separator + stage;
    separator = " > ";
  }
  if (plan.workspace_bytes > 0) text += concat("\n  workspace: ", plan.workspace_bytes, " bytes");
  return text;
}

}  // namespace upconv3d
