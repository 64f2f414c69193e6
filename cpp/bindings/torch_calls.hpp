// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the op needs of PyTorch, through its stable ABI: allocation, formats, the convolution, the stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arguments.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

using torch::stable::Tensor;

std::vector<std::int64_t> sizes_of(const Tensor& tensor);
std::vector<std::int64_t> strides_of(const Tensor& tensor);

/// What a tensor is, in torch's own codes.
struct TensorKind {
  std::int32_t dtype = 0;
  std::int32_t layout = 0;
  std::int32_t device_type = 0;
  std::int32_t device_index = 0;
};

TensorKind kind_of(const Tensor& tensor);

/// The metadata of a tensor, as core reads it.
TensorDesc describe_tensor(const Tensor& tensor);

/// The text of a string argument, whose handle is freed. (PyTorch's own conversion to std::string leaks one
/// per call.)
std::string take_string(StringHandle handle);

/// Uninitialized tensor of the dtype and device of `like`.
Tensor empty_strided_like(const Tensor& like, const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides);

/// Uninitialized [bytes] uint8 tensor on the device of `like`.
Tensor empty_bytes_like(const Tensor& like, std::int64_t bytes);

/// Uninitialized memory of the current CUDA device, the allocator's again when the object dies: for launches
/// on the current stream, which it orders before the next use. A tensor around it would take as long as the
/// allocation itself.
class DeviceScratch {
 public:
  /// \param like a tensor on that device
  DeviceScratch(const Tensor& like, std::int64_t bytes);
  void* data() const { return tensor_ ? tensor_->mutable_data_ptr() : memory_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const noexcept;
  };
  std::unique_ptr<void, Free> memory_;
  std::optional<Tensor> tensor_;  // instead, with a torch that does not offer its allocator
};

/// Makes CUDA device `index` the current one for as long as the object lives.
class OnDevice {
 public:
  explicit OnDevice(std::int32_t index) {
    // It mostly is already, and asking takes less than PyTorch's guard, which is an allocation.
    if (torch::stable::accelerator::getCurrentDeviceIndex() != index) guard_.emplace(index);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

/// The same memory, from element `offset` on, under other sizes and strides; no view relation, as for memory
/// that the op owns.
Tensor reinterpret(const Tensor& tensor, const std::vector<std::int64_t>& sizes,
                   const std::vector<std::int64_t>& strides, std::int64_t offset = 0);

/// Whether a [N,C,D,H,W] tensor lies dense in the order `layout`.
bool is_dense_in(const Tensor& tensor, Layout layout);

/// The tensor itself where it lies dense in the order `layout`, else a copy that does.
Tensor contiguous_in(const Tensor& tensor, Layout layout);

/// A dense vector, or nothing.
std::optional<Tensor> contiguous_vector(const std::optional<Tensor>& vector);

/// Flags of PyTorch's convolution that are global state unless given. Null: PyTorch's own reading of them.
struct CudnnFlags {
  bool benchmark;
  bool deterministic;
  bool enabled;
  bool allow_tf32;
};

/// torch.backends.cudnn's benchmark, deterministic and enabled as they are now, read through Python.
CudnnFlags read_cudnn_flags(bool allow_tf32);

/// conv_transpose3d(x, w, bias), by PyTorch.
///   x [N,C,D,H,W] dtype, w [C,K/groups,T,R,S] dtype, bias [K] dtype or none; returns [N,K,Z,P,Q] dtype in a
///   format of PyTorch's choice.
Tensor conv_transpose3d(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                        const Problem& problem, const std::optional<CudnnFlags>& flags);

/// a [M,L] dtype times b [L,N] dtype, by PyTorch: [M,N] dtype, contiguous.
Tensor matrix_product(const Tensor& a, const Tensor& b);

/// PyTorch's current stream on CUDA device `index`, a cudaStream_t.
void* current_cuda_stream(std::int32_t index);

}  // namespace upconv3d::bindings
