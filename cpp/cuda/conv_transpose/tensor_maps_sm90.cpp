// SPDX-License-Identifier: Apache-2.0
#include "cuda/conv_transpose/tensor_maps_sm90.hpp"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda/check.hpp"

namespace upconv3d::cuda {
namespace {

// The signatures that cuda.h declares for CUDA 12.0, where both encoders appeared.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);
using EncodeIm2col = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                  const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
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

}  // namespace

CUtensorMap encode_x_im2col(const Problem& problem, DType operand, const void* x, int box_positions,
                            int box_channels) {
  static const auto encode = driver_function<EncodeIm2col>("cuTensorMapEncodeIm2col");
  const auto [depth, height, width] = problem.in;
  const cuuint64_t pixel = static_cast<cuuint64_t>(problem.c * size_of(operand));
  // Innermost axis first, as TMA counts: C,W,H,D,N; the byte stride of C is implied.
  const cuuint64_t extents[5] = {static_cast<cuuint64_t>(problem.c), static_cast<cuuint64_t>(width),
                                 static_cast<cuuint64_t>(height), static_cast<cuuint64_t>(depth),
                                 static_cast<cuuint64_t>(problem.n)};
  const cuuint64_t strides[4] = {pixel, pixel * extents[1], pixel * extents[1] * extents[2],
                                 pixel * extents[1] * extents[2] * extents[3]};
  int lower[3], upper[3];
  for (int axis = 0; axis < 3; ++axis) {
    lower[axis] = static_cast<int>(problem.padding[2 - axis] - (problem.kernel[2 - axis] - 1));
    upper[axis] = static_cast<int>(-problem.padding[2 - axis]);
  }
  CUtensorMap map;
  check_encoded(encode(&map, tensor_map_type(operand), 5, const_cast<void*>(x), extents, strides, lower,
                       upper, static_cast<cuuint32_t>(box_channels), static_cast<cuuint32_t>(box_positions),
                       kUnitStrides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                "x", problem);
  return map;
}

namespace {

CUtensorMap encode_tiled_3d(const char* tensor, const Problem& problem, DType dtype, void* data,
                            const cuuint64_t (&extents)[3], const cuuint32_t (&box)[3],
                            CUtensorMapL2promotion promotion) {
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  const cuuint64_t row = extents[0] * static_cast<cuuint64_t>(size_of(dtype));
  const cuuint64_t strides[2] = {row, row * extents[1]};
  CUtensorMap map;
  check_encoded(encode(&map, tensor_map_type(dtype), 3, data, extents, strides, box, kUnitStrides,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                tensor, problem);
  return map;
}

}  // namespace

CUtensorMap encode_w(const Problem& problem, DType operand, const void* w, int box_k, int box_channels) {
  return encode_tiled_3d("w", problem, operand, const_cast<void*>(w),
                         {static_cast<cuuint64_t>(problem.c), static_cast<cuuint64_t>(problem.k),
                          static_cast<cuuint64_t>(volume(problem.kernel))},
                         {static_cast<cuuint32_t>(box_channels), static_cast<cuuint32_t>(box_k), 1},
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap encode_a(const Problem& problem, DType activation, void* a, int box_positions, int box_k) {
  return encode_tiled_3d("relu(conv)", problem, activation, a,
                         {static_cast<cuuint64_t>(problem.k), static_cast<cuuint64_t>(problem.positions()),
                          static_cast<cuuint64_t>(problem.n)},
                         {static_cast<cuuint32_t>(box_k), static_cast<cuuint32_t>(box_positions), 1},
                         CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace upconv3d::cuda
