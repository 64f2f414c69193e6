// SPDX-License-Identifier: Apache-2.0
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/channels.hpp"
#include "cuda/check.hpp"

namespace upconv3d::cuda {
namespace {

// The signatures that cuda.h declares for CUDA 12.0, where all three appeared.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);
using EncodeIm2col = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                  const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
using ReplaceAddress = CUresult (*)(CUtensorMap*, void*);
constexpr unsigned kEncoderDriverVersion = 12000;

template <class Function>
Function driver_function(const char* symbol) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(symbol, &function, kEncoderDriverVersion, cudaEnableDefault, &found),
        std::string("looking up ") + symbol);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("upconv3d: the SM90 plan needs a driver that offers ") + symbol +
                             " (CUDA 12.0 or later); the one loaded does not. Update the NVIDIA driver.");
  }
  return reinterpret_cast<Function>(function);
}

CUtensorMapDataType tensor_map_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kFloat64:
      break;
  }
  throw std::logic_error(std::string("upconv3d: no TMA descriptor for ") + name(dtype));
}

void check_encoded(CUresult status, const char* tensor, const Problem& problem) {
  if (status == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string("upconv3d: the driver refused the TMA descriptor of ") + tensor +
                           " with CUresult " + std::to_string(static_cast<int>(status)) + " for " +
                           describe(problem) +
                           ". select_plan should have chosen another plan: please report it.");
}

constexpr cuuint32_t kUnitStrides[5] = {1, 1, 1, 1, 1};

/// The swizzle of a box of rows of `count` elements: of 64 bytes, or of 128.
CUtensorMapSwizzle swizzle_of(cuuint32_t count, DType dtype) {
  return count * size_of(dtype) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

/// An im2col descriptor over a box of a dense [N,D,H,W,C] tensor, of every step-th element of it.
struct Im2colBox {
  std::int64_t samples;  // N
  Extent3 volume;        // D,H,W of the tensor
  RowBox row;            // C
  Extent3 origin;        // of the box
  Extent3 step;
  Extent3 extent;              // in steps
  Extent3 lower, upper;        // corners of the bounding box, relative to the box
  Extent3 stride = {1, 1, 1};  // between positions, in steps
};

TensorMap encode_im2col(const char* tensor, const Problem& problem, DType dtype, void* data,
                        const Im2colBox& box, int box_positions, int box_channels,
                        CUtensorMapL2promotion promotion) {
  static const auto encode = driver_function<EncodeIm2col>("cuTensorMapEncodeIm2col");
  const auto& [depth, height, width] = box.volume;
  const std::int64_t pixel = box.row.pitch * size_of(dtype);
  // Innermost axis first, as TMA counts: C,W,H,D,N; the byte stride of C is implied.
  const cuuint64_t extents[5] = {
      static_cast<cuuint64_t>(box.row.channels), static_cast<cuuint64_t>(box.extent[2]),
      static_cast<cuuint64_t>(box.extent[1]), static_cast<cuuint64_t>(box.extent[0]),
      static_cast<cuuint64_t>(box.samples)};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(pixel * box.step[2]),
                                 static_cast<cuuint64_t>(pixel * width * box.step[1]),
                                 static_cast<cuuint64_t>(pixel * width * height * box.step[0]),
                                 static_cast<cuuint64_t>(pixel * width * height * depth)};
  int lower[3], upper[3];
  const cuuint32_t positions[5] = {1, static_cast<cuuint32_t>(box.stride[2]),
                                   static_cast<cuuint32_t>(box.stride[1]),
                                   static_cast<cuuint32_t>(box.stride[0]), 1};
  for (int axis = 0; axis < 3; ++axis) {
    lower[axis] = static_cast<int>(box.lower[2 - axis]);
    upper[axis] = static_cast<int>(box.upper[2 - axis]);
  }
  TensorMap result{};
  result.offset = ((box.origin[0] * height + box.origin[1]) * width + box.origin[2]) * pixel;
  char* const first = static_cast<char*>(data) + result.offset;
  const auto channels = static_cast<cuuint32_t>(box_channels);
  check_encoded(
      encode(&result.map, tensor_map_type(dtype), 5, first, extents, strides, lower, upper, channels,
             static_cast<cuuint32_t>(box_positions), positions, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle_of(channels, dtype), promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      tensor, problem);
  return result;
}

}  // namespace

void TensorMaps::move(const MappedAddresses& from, const MappedAddresses& to) const {
  static const auto replace = driver_function<ReplaceAddress>("cuTensorMapReplaceAddress");
  for (const Placed& placed : placed_) {
    const auto tensor = static_cast<std::size_t>(placed.tensor);
    if (from[tensor] == to[tensor]) continue;
    void* const address = static_cast<char*>(const_cast<void*>(to[tensor])) + placed.offset;
    const CUresult status = replace(placed.map, address);
    if (status != CUDA_SUCCESS) {
      throw std::runtime_error("upconv3d: the driver refused to move a TMA descriptor, with CUresult " +
                               std::to_string(static_cast<int>(status)) + ". Please report it.");
    }
  }
}

TensorMap encode_slab_input(const Problem& problem, const Slab& slab, DType operand, const void* x,
                            std::int64_t samples, const RowBox& row, int box_positions, int box_channels,
                            bool shares_taps) {
  const InputBox part = input_box(problem, slab, shares_taps);
  const Im2colBox box{samples,     problem.in, row,        part.origin, {1, 1, 1},
                      part.extent, part.lower, part.upper, slab.stride};
  return encode_im2col("x", problem, operand, const_cast<void*>(x), box, box_positions, box_channels,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

TensorMap encode_slab_output(const Problem& problem, const Slab& slab, DType element, std::int64_t channels,
                             void* y, int box_positions, int box_channels, int fold) {
  Extent3 out = problem.out();
  out[2] /= fold;
  // From a single position no step leads on, and that of a long stride may be more than TMA takes (2^40).
  Extent3 step = slab.step;
  for (int axis = 0; axis < 3; ++axis) step[axis] = slab.extent[axis] == 1 ? 1 : step[axis];
  const Im2colBox box{problem.n, out,      {channels, channels}, slab.origin, step, slab.extent, {},
                      {},        {1, 1, 1}};
  return encode_im2col("before(conv)", problem, element, y, box, box_positions, box_channels,
                       CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

namespace {

/// A tiled descriptor over a tensor of three axes, given innermost first; dense but for rows of `pitch`
/// elements.
///
/// \param offset bytes from `data` to the tensor's part that is shown
TensorMap encode_tiled(const char* tensor, const Problem& problem, DType dtype, void* data,
                       std::int64_t offset, const cuuint64_t (&extents)[3], cuuint64_t pitch,
                       const cuuint32_t (&box)[3], CUtensorMapL2promotion promotion) {
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  const cuuint64_t row = pitch * static_cast<cuuint64_t>(size_of(dtype));
  const cuuint64_t strides[2] = {row, row * extents[1]};
  TensorMap result{};
  result.offset = offset;
  char* const first = static_cast<char*>(data) + offset;
  check_encoded(encode(&result.map, tensor_map_type(dtype), 3, first, extents, strides, box, kUnitStrides,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(box[0], dtype), promotion,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                tensor, problem);
  return result;
}

}  // namespace

TensorMap encode_w(const Problem& problem, DType operand, const void* w, int box_k, int box_channels) {
  const auto pitch = static_cast<cuuint64_t>(operand_channels(problem));
  return encode_tiled(
      "w", problem, operand, const_cast<void*>(w), 0,
      {pitch, static_cast<cuuint64_t>(problem.k), static_cast<cuuint64_t>(volume(problem.kernel))}, pitch,
      {static_cast<cuuint32_t>(box_channels), static_cast<cuuint32_t>(box_k), 1},
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

TensorMap encode_w_in_place(const Problem& problem, DType operand, const void* w, int box_k,
                            int box_channels) {
  const auto k = static_cast<cuuint64_t>(problem.k);
  return encode_tiled(
      "w", problem, operand, const_cast<void*>(w), 0,
      {k, static_cast<cuuint64_t>(volume(problem.kernel)), static_cast<cuuint64_t>(problem.c)}, k,
      {static_cast<cuuint32_t>(box_k), 1, static_cast<cuuint32_t>(box_channels)},
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

TensorMap encode_slab_channels(const Problem& problem, const Slab& slab, DType element, void* y,
                               int box_positions, int box_k) {
  const Extent3 out = problem.out();
  return encode_tiled("conv", problem, element, y, slab.origin[0] * out[1] * out[2] * size_of(element),
                      {static_cast<cuuint64_t>(slab.positions()), static_cast<cuuint64_t>(problem.k),
                       static_cast<cuuint64_t>(problem.n)},
                      static_cast<cuuint64_t>(problem.positions()),
                      {static_cast<cuuint32_t>(box_positions), static_cast<cuuint32_t>(box_k), 1},
                      CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

TensorMap encode_output_rows(const Problem& problem, DType element, void* y, int box_rows, int box_k,
                             int fold) {
  const auto row = static_cast<cuuint64_t>(problem.k * fold);
  const auto rows = static_cast<cuuint64_t>(problem.positions() / fold);
  return encode_tiled("before(conv)", problem, element, y, 0, {row, rows, static_cast<cuuint64_t>(problem.n)},
                      row, {static_cast<cuuint32_t>(box_k), static_cast<cuuint32_t>(box_rows), 1},
                      CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

TensorMap encode_grad_w_operand(const char* tensor, const Problem& problem, DType operand, const void* data,
                                const GradWOperand& walk, const RowBox& row) {
  const Im2colBox box{problem.n,   walk.extent, row,        {},       {1, 1, 1},
                      walk.extent, walk.lower,  walk.upper, walk.step};
  return encode_im2col(tensor, problem, operand, const_cast<void*>(data), box, kGradWBlock, kGradWChunk,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace upconv3d::cuda
