// SPDX-License-Identifier: Apache-2.0
#include "cuda/conv_transpose/conv_transpose_few_channels_sm80.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/channels.hpp"
#include "core/few_channels_layout.hpp"
#include "cuda/conv_transpose/few_channels_params_sm80.cuh"
#include "cuda/conv_transpose/few_channels_variants_sm80.hpp"

namespace upconv3d::cuda {
namespace {

cutlass::FastDivmod divmod(std::int64_t divisor) {
  return cutlass::FastDivmod(static_cast<int>(divisor));
}

/// kFewThreads chunks further, in the order in which load_box takes them.
FewBoxPlace box_step(const FewChannelsLayout& layout, bool chunks_first) {
  int left = kFewThreads;
  const auto digit = [&left](std::int64_t radix) {
    const int value = left % static_cast<int>(radix);
    left /= static_cast<int>(radix);
    return value;
  };
  FewBoxPlace step{};
  if (chunks_first) step.chunk = digit(layout.chunks);
  step.width = digit(layout.box[2]);
  step.height = digit(layout.box[1]);
  if (chunks_first) {
    step.depth = left;
  } else {
    step.depth = digit(layout.box[0]);
    step.chunk = left;
  }
  return step;
}

void set_tensors(const ConvTransposeDirectParams& from, FewParams& params) {
  const Problem& p = from.problem;
  params.x = from.x, params.w = from.w, params.bias = from.bias;
  params.table = static_cast<const float*>(from.table);
  params.part = from.part, params.counts = from.counts, params.y = from.y;
  params.before = from.before, params.after = from.after;
  std::copy_n(from.w_strides, 5, params.w_strides);
  const bool x_rows = p.x_layout == Layout::kNDHWC, y_rows = p.y_layout == Layout::kNDHWC;
  params.x_sample = p.c * volume(p.in), params.y_sample = p.k * p.positions();
  params.x_channel = static_cast<int>(x_rows ? 1 : volume(p.in));
  params.x_position = static_cast<int>(x_rows ? p.c : 1);
  params.y_channel = static_cast<int>(y_rows ? 1 : p.positions());
  params.y_position = static_cast<int>(y_rows ? p.k : 1);
  params.samples = static_cast<int>(p.n);
  params.channels = static_cast<int>(group_inputs(p)), params.k = static_cast<int>(p.k);
  params.group_outputs = static_cast<int>(group_outputs(p));
  const Extent3 out = p.out();
  for (int axis = 0; axis < 3; ++axis) {
    params.in[axis] = static_cast<int>(p.in[axis]), params.out[axis] = static_cast<int>(out[axis]);
    params.stride[axis] = static_cast<int>(p.stride[axis]);
    params.kernel[axis] = static_cast<int>(p.kernel[axis]);
  }
  const std::int64_t chunk = 16 / size_of(p.dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(from.x) % 16 == 0;
  params.copies = x_rows && group_inputs(p) % chunk == 0 && aligned;
  params.channels_first = !y_rows;
  const std::int64_t* const w = from.w_strides;
  params.taps_first = std::max({w[2], w[3], w[4]}) < w[1];
}

void set_layout(const Problem& p, const FewChannelsLayout& layout, FewParams& params) {
  for (int axis = 0; axis < 3; ++axis) {
    params.lower[axis] = static_cast<int>(layout.lower[axis]);
    params.tile[axis] = static_cast<int>(layout.tile[axis]);
  }
  params.items = static_cast<int>(p.n * layout.tile_count());
  params.tiles = divmod(layout.tile_count());
  params.tiles_height = divmod(layout.tiles[1]), params.tiles_width = divmod(layout.tiles[2]);
  params.tile_height = divmod(layout.tile[1]), params.tile_width = divmod(layout.tile[2]);
  params.box_depth = static_cast<int>(layout.box[0]);
  params.box_height = divmod(layout.box[1]), params.box_width = divmod(layout.box[2]);
  params.channel_blocks = divmod(layout.channel_blocks / p.groups);
  params.chunks = divmod(layout.chunks), params.box = divmod(layout.box_positions());
  params.box_step = box_step(layout, params.copies);
  params.pitch_bytes = layout.pitch * 16;
  params.row_warps = layout.row_warps, params.groups = static_cast<int>(layout.groups.size());
  params.taps = static_cast<int>(layout.taps.size()), params.steps = static_cast<int>(layout.steps.size());
  params.fragments = layout.fragments;
  const FewSharedBytes bytes = few_shared_bytes(layout);
  params.x_at = static_cast<int>(bytes.weights);
  params.rows_at = params.x_at + static_cast<int>(bytes.x);
  params.channels_at = params.rows_at + static_cast<int>(bytes.rows);
  params.moments_at = params.channels_at + static_cast<int>(bytes.channels);
  params.steps_at = params.moments_at + static_cast<int>(bytes.moments);
  params.stage_at = params.steps_at + static_cast<int>(bytes.steps);
  params.stage_plane = layout.stage.plane, params.stage_channel = layout.stage.channel;
  params.stage_planes = divmod(layout.tile[0] * p.stride[0]);
  for (std::size_t i = 0; i < layout.groups.size(); ++i) {
    const FewGroup& group = layout.groups[i];
    FewGroupParams& to = params.group[i];
    to.least_counts = 0;
    std::int64_t offset = 0;
    bool inside = true;
    for (int axis = 0; axis < 3; ++axis) {
      to.phase[axis] = static_cast<std::int16_t>(group.phase[axis]);
      to.least_counts += few_counts_of_axis(group.phase[axis] + 1, axis);
      offset = offset * params.out[axis] + group.phase[axis];
      inside = inside && group.phase[axis] < params.out[axis];
    }
    // That of a phase beyond the volume, which nobody uses, may not fit.
    to.y_offset = inside ? static_cast<int>(offset * params.y_position) : 0;
    for (int list = 0; list < kFewLists; ++list)
      to.steps[list] = static_cast<std::uint16_t>(group.steps[list]);
    to.first_step = static_cast<std::uint16_t>(group.first_step);
    to.first_fragment = static_cast<std::uint16_t>(group.first_fragment);
  }
  std::copy(layout.taps.begin(), layout.taps.end(), params.tap);
  std::copy(layout.steps.begin(), layout.steps.end(), params.step);
}

/// As many neighbouring channels, or positions of a pair, as a store takes: of all that a thread has, half of
/// them and so on the most of which rows of y are whole, and which are aligned.
int values_of_store(const Problem& p, const FewChannelsLayout& layout, const void* y) {
  const bool rows = p.y_layout == Layout::kNDHWC;
  const std::int64_t of = rows ? group_outputs(p) : p.out()[2];
  std::int64_t values = rows ? 2 * layout.column_tiles : layout.paired;
  constexpr std::int64_t kStoreBytes = 16;
  const auto fits = [&] {
    const std::int64_t bytes = std::min(kStoreBytes, values * size_of(p.dtype));
    return of % values == 0 && reinterpret_cast<std::uintptr_t>(y) % static_cast<std::uintptr_t>(bytes) == 0;
  };
  while (values > 1 && !fits()) values /= 2;
  return static_cast<int>(values);
}

}  // namespace

void launch_few_channels(const ConvTransposeDirectParams& from, const FewChannelsLayout& of_block,
                         cudaStream_t stream) {
  if (from.problem.n == 0) return;
  FewParams params{};
  set_tensors(from, params);
  const bool output = from.y != nullptr;
  const FewChannelsLayout& layout = output ? of_block.of_output() : of_block;
  set_layout(from.problem, layout, params);
  if (output) params.store_values = values_of_store(from.problem, layout, from.y);
  switch (from.problem.dtype) {
    case DType::kBFloat16:
      return launch_few_channels_bf16(params, layout, output, stream);
    case DType::kFloat16:
      return launch_few_channels_f16(params, layout, output, stream);
    case DType::kFloat32:
      if (from.problem.is_ieee()) {
        return launch_few_channels_f32x3(params, layout, output, stream);
      }
      return launch_few_channels_f32(params, layout, output, stream);
    default:
      throw std::logic_error("upconv3d: conv_transpose_few_channels_sm80 has no kernel for " +
                             describe(from.problem));
  }
}

}  // namespace upconv3d::cuda
