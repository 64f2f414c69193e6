// SPDX-License-Identifier: Apache-2.0
#include "cuda/group_norm/group_norm_backward.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "core/channels.hpp"
#include "core/text.hpp"
#include "cuda/group_norm/backward_launch.hpp"
#include "cuda/group_norm/backward_work.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/group_norm/geometry.hpp"

namespace upconv3d::cuda {
namespace {

/// Rows of a and grad_c are multiples of this, so that vectors of channels are aligned in either.
constexpr std::int64_t kPitchUnit = 8;

std::int64_t counter_count(const GroupNormBackwardParams& params) {
  return params.n * (2 + params.num_groups) + 1;
}

void require(bool holds, const std::string& rule_and_value) {
  if (!holds) throw std::invalid_argument("upconv3d: group_norm_backward " + rule_and_value);
}

void require_supported(const GroupNormBackwardParams& params) {
  constexpr std::int64_t kIndexEnd = std::numeric_limits<std::int32_t>::max();
  require(params.dtype != DType::kFloat64,
          "takes float32, bfloat16 and float16; got float64. Use PyTorch's.");
  require(params.steps == nullptr || (params.dtype == DType::kFloat32 && params.moment_of != nullptr),
          concat("takes steps with float32 and moment_of; got ", name(params.dtype),
                 params.moment_of != nullptr ? "" : " without moment_of", ". Store a in its own dtype."));
  require(
      params.operand == GradOperand::kOwn || (params.dtype == DType::kFloat32 && params.unscale != nullptr),
      concat("scales float32 alone, and then says how; got ", name(params.dtype),
             params.unscale != nullptr ? "" : " without unscale", ". Ask for its own dtype."));
  require(params.operand != GradOperand::kSplitFloat16 || params.steps == nullptr,
          "splits float32 where a is float32 too; got steps. Ask for kScaledFloat16.");
  require(
      params.grad_c == nullptr || params.grad_c != params.a || may_overwrite_activation(params),
      concat(
          "writes split rows over a where a block of threads has whole blocks of 64 channels; got rows of ",
          params.grad_c_pitch, " over rows of ", params.a_pitch, ". Give grad_c memory of its own."));
  require(
      params.before == Activation::kRelu || params.before == Activation::kNone,
      concat("takes relu or none before the normalization; got ", name(params.before), ". Use PyTorch's."));
  require(!params.signed_steps || params.steps != nullptr,
          "takes signed_steps with steps; got no steps. Store a in its own dtype.");
  require((params.after.kind == Activation::kPrelu) == (params.after.slopes != nullptr) &&
              (params.after.slopes != nullptr || params.grad_slopes == nullptr),
          concat("takes slopes and their gradient with prelu, and prelu with slopes; got ",
                 name(params.after.kind), params.after.slopes != nullptr ? " with slopes" : " without slopes",
                 params.grad_slopes != nullptr ? ", with their gradient" : "", ". Pass both or neither."));
  require(params.num_groups > 0 && params.k % params.num_groups == 0,
          concat("wants groups that divide the channels; got ", params.num_groups, " of ", params.k,
                 ". Choose a divisor."));
  const bool pitched =
      params.a_pitch >= params.k && params.a_pitch % kPitchUnit == 0 && is_aligned(params.a) &&
      (params.grad_c == nullptr || (params.grad_c_pitch >= params.k &&
                                    params.grad_c_pitch % kPitchUnit == 0 && is_aligned(params.grad_c)));
  require(
      pitched,
      concat(
          "wants 16-byte aligned a and grad_c in rows of multiples of 8 that hold all channels; got rows of ",
          params.a_pitch, " and ", params.grad_c_pitch, " for ", params.k,
          is_aligned(params.a) ? "" : ", a not aligned",
          is_aligned(params.grad_c) ? "" : ", grad_c not aligned", ". Pad the rows."));
  require(params.positions < kIndexEnd / 2 && params.n * params.k <= kIndexEnd &&
              params.a_pitch <= kIndexEnd && params.n * params.moments <= kIndexEnd,
          concat("counts in 32 bits: positions below 2^30, samples times channels below 2^31; got ",
                 params.positions, " and ", params.n * params.k, ". Split the batch."));
  require(params.sm_count > 0, concat("must be told the device's multiprocessors; got sm_count=",
                                      params.sm_count, ". Set it from query_device."));
}

/// Channels of a tile of grad_y NCDHW, of rows of `channels`: narrow tiles where wide ones would be mostly
/// empty. Threads without a channel cost what others do: of 2^24 values in 16 channels, float32 with steps,
/// narrow tiles take 100 us instead of 241, bfloat16 63 instead of 119, planes that are no whole vectors 139
/// and 120 instead of 455 and 386. Of 48 channels 98 instead of 118, but of 32 in bfloat16 75 instead of 72
/// (perf/NOTES.md, "Few channels in NCDHW, trained").
int plane_tile_channels(const GroupNormBackwardParams& params, std::int64_t channels) {
  constexpr std::int64_t kMost = 48;
  const std::int64_t size = size_of(params.dtype);
  const bool is_16_bit_vectors = size == 2 && params.positions * size % kAccessBytes == 0;
  // Split rows over a want a block of threads to have whole rows, or whole blocks of 64 channels.
  const bool is_split = params.operand == GradOperand::kSplitFloat16;
  const std::int64_t most = is_split || is_16_bit_vectors ? kNarrowTileChannels : kMost;
  return channels <= most ? kNarrowTileChannels : kPlaneTileChannels;
}

/// Without samples the parameters' gradients are 0, and so is the exponent.
void clear_gradients(const GroupNormBackwardParams& params, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(params.k * size_of(params.dtype));
  for (void* const gradient : {params.grad_gamma, params.grad_beta, params.grad_bias}) {
    if (gradient != nullptr) check(cudaMemsetAsync(gradient, 0, bytes, stream), "clearing a gradient");
  }
  if (params.grad_slopes != nullptr) {
    const std::int64_t slopes = params.after.slope_step == 0 ? 1 : params.k;
    check(cudaMemsetAsync(params.grad_slopes, 0, static_cast<std::size_t>(slopes * size_of(params.dtype)),
                          stream),
          "clearing the slopes' gradient");
  }
  if (params.unscale != nullptr) {
    check(cudaMemsetAsync(params.unscale, 0, sizeof(std::int32_t), stream), "clearing the exponent");
  }
}

}  // namespace

BackwardShape backward_shape(const GroupNormBackwardParams& params) {
  const std::int64_t channels = std::max(params.k, params.grad_c_pitch);
  BackwardShape shape;
  if (params.grad_y_layout == Layout::kNCDHW) {
    const int tile_channels = plane_tile_channels(params, channels);
    shape.vectors = tile_channels / kBackwardVector;
    shape.slots = kStreamThreads / shape.vectors;
    shape.channel_blocks = static_cast<int>(ceil_div(channels, tile_channels));
  } else {
    // An even number of slots: merging begins with halves.
    const BlockShape half = channel_block_shape(channels, kBackwardVector, kStreamThreads / 2);
    shape.vectors = half.x;
    shape.slots = 2 * half.y;
    shape.channel_blocks = static_cast<int>(half.blocks);
  }
  shape.block_channels = shape.vectors * kBackwardVector;
  shape.max_blocks = kBackwardBlocksPerMultiprocessor * std::max(params.sm_count, 1);
  return shape;
}

bool may_overwrite_activation(const GroupNormBackwardParams& params) {
  const std::int64_t a_bytes = params.steps != nullptr ? 2 : size_of(params.dtype);
  const std::int64_t bytes = params.operand == GradOperand::kScaledFloat16 ? 2 : size_of(params.dtype);
  if (params.a_pitch * a_bytes != params.grad_c_pitch * bytes) return false;
  if (params.operand != GradOperand::kSplitFloat16) return a_bytes == bytes;
  const BackwardShape shape = backward_shape(params);
  return shape.channel_blocks == 1 ||
         (SplitRow(params.grad_c_pitch).lo_step == kBlockInputs && shape.block_channels % kBlockInputs == 0);
}

BackwardScratch::BackwardScratch(const GroupNormBackwardParams& params, void* base) : carver(base) {
  const BackwardShape shape = backward_shape(params);
  const std::int64_t units = std::max(shape.max_blocks, shape.channel_blocks);
  counters = carver.take(counter_count(params) * std::int64_t{sizeof(std::int32_t)});
  part = carver.take(units * shape.block_channels * kPartFields * std::int64_t{sizeof(float)});
  sums = carver.take(params.n * params.k * std::int64_t{sizeof(ChannelSums)});
  terms = carver.take(params.n * params.num_groups * std::int64_t{sizeof(GroupTerms)});
  slope_sums =
      carver.take(params.grad_slopes != nullptr ? params.n * params.k * std::int64_t{sizeof(double)} : 0);
  bytes = carver.used();
}

std::int64_t group_norm_backward_counter_bytes(const GroupNormBackwardParams& params) {
  return counter_count(params) * std::int64_t{sizeof(std::int32_t)};
}

std::int64_t group_norm_backward_scratch_bytes(const GroupNormBackwardParams& params) {
  return BackwardScratch(params, nullptr).bytes;
}

void launch_group_norm_backward(const GroupNormBackwardParams& params, cudaStream_t stream) {
  if (params.n == 0 || params.k == 0 || params.positions == 0) return clear_gradients(params, stream);
  require_supported(params);
  if (!params.counters_cleared) {
    check(cudaMemsetAsync(params.scratch, 0,
                          static_cast<std::size_t>(group_norm_backward_counter_bytes(params)), stream),
          "clearing the counters of group_norm_backward");
  }
  const bool scaled = params.operand == GradOperand::kScaledFloat16;
  if (params.dtype == DType::kBFloat16) {
    launch_backward<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(params, stream);
  } else if (params.dtype == DType::kFloat16) {
    launch_backward<__half, __half, __half>(params, stream);
  } else if (params.steps != nullptr) {
    scaled ? launch_backward<float, std::uint16_t, __half>(params, stream)
           : launch_backward<float, std::uint16_t, float>(params, stream);
  } else if (params.operand == GradOperand::kSplitFloat16) {
    launch_backward<float, float, SplitHalf>(params, stream);
  } else {
    scaled ? launch_backward<float, float, __half>(params, stream)
           : launch_backward<float, float, float>(params, stream);
  }
}

}  // namespace upconv3d::cuda
