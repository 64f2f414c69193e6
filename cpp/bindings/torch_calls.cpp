// SPDX-License-Identifier: Apache-2.0
#include "bindings/torch_calls.hpp"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "core/arguments.hpp"
#include "core/text.hpp"

#if UPCONV3D_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

// In libtorch_cpu from 2.13 on, so weak: older ones only log what happened.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace upconv3d::bindings {
namespace {

/// What PyTorch says of the error that it just met, where this torch hands it over.
std::string torch_error_text() {
  return torch_exception_get_what_without_backtrace
             ? torch_exception_get_what_without_backtrace()
             : "PyTorch's message is on stderr (torch 2.13 and later hand it over)";
}

[[noreturn]] void throw_torch_error(const std::string& doing) {
  throw std::runtime_error(concat("upconv3d: ", doing, " failed: ", torch_error_text()));
}

/// Whether the current GPU answers: one in error has no memory to give either.
bool gpu_answers() {
#if UPCONV3D_WITH_CUDA
  std::size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess;
#else
  return false;
#endif
}

/// For an allocation that PyTorch's CUDA allocator refused: throws what python/upconv3d/_out_of_memory.py
/// makes torch.OutOfMemoryError of, by PyTorch's words for it.
[[noreturn]] void throw_allocation_error(const std::string& what) {
  if (!gpu_answers()) throw_torch_error(concat("allocating ", what));
  throw std::runtime_error(
      concat("upconv3d: CUDA out of memory. Allocating ", what, " failed: ", torch_error_text()));
}

/// Throws unless `status` is success.
void check_torch(AOTITorchError status, const char* doing) {
  if (status != AOTI_TORCH_SUCCESS) throw_torch_error(doing);
}

/// The same; `doing` composes its text only where it is needed.
template <typename Doing>
  requires std::is_invocable_r_v<std::string, Doing>
void check_torch(AOTITorchError status, const Doing& doing) {
  if (status != AOTI_TORCH_SUCCESS) throw_torch_error(doing());
}

std::string dtype_text(std::int32_t dtype) {
  static const std::array<std::pair<std::int32_t, const char*>, 15> kNames = {{
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
  }};
  for (const auto& [code, text] : kNames) {
    if (code == dtype) return text;
  }
  return concat("dtype #", dtype);
}

/// As torch.layout has them.
std::string layout_text(std::int32_t layout) {
  static const std::array<std::pair<std::int32_t, const char*>, 7> kNames = {{
      {aoti_torch_layout_strided(), "strided"},
      {aoti_torch_layout_sparse_coo(), "sparse_coo"},
      {aoti_torch_layout_sparse_csr(), "sparse_csr"},
      {aoti_torch_layout_sparse_csc(), "sparse_csc"},
      {aoti_torch_layout_sparse_bsr(), "sparse_bsr"},
      {aoti_torch_layout_sparse_bsc(), "sparse_bsc"},
      {aoti_torch_layout__mkldnn(), "_mkldnn"},
  }};
  for (const auto& [code, text] : kNames) {
    if (code == layout) return text;
  }
  return concat("layout #", layout);
}

std::string device_text(std::int32_t type, std::int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return concat("cuda:", index);
  if (type == aoti_torch_device_type_meta()) return "meta";
  return concat("device type #", type);
}

Tensor empty_strided(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                     const TensorKind& kind) {
  AtenTensorHandle handle = nullptr;
  const auto rank = static_cast<std::int64_t>(sizes.size());
  const AOTITorchError status = aoti_torch_empty_strided(rank, sizes.data(), strides.data(), kind.dtype,
                                                         kind.device_type, kind.device_index, &handle);
  if (status != AOTI_TORCH_SUCCESS) {
    const std::string what = concat(list_text(sizes), ' ', dtype_text(kind.dtype), " on ",
                                    device_text(kind.device_type, kind.device_index));
    if (kind.device_type == aoti_torch_device_type_cuda()) throw_allocation_error(what);
    throw_torch_error(concat("allocating ", what));
  }
  return Tensor(handle);
}

/// A function of libtorch_cuda, or null. The symbols are only in CUDA builds of torch; linking to them would
/// tie this module to those.
template <typename Function>
Function torch_cuda_function(const char* symbol) {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<Function>(dlsym(library, symbol)) : nullptr;
}

/// What PyTorch's allocator offers beside tensors.
struct RawAllocator {
  AOTITorchError (*allocate)(std::uint64_t, void**) =
      torch_cuda_function<decltype(allocate)>("aoti_torch_cuda_caching_allocator_raw_alloc");
  AOTITorchError (*free)(void*) =
      torch_cuda_function<decltype(free)>("aoti_torch_cuda_caching_allocator_raw_delete");
};

/// What the properties of torch.backends.cudnn call, each in a tenth of the property's time.
struct CudnnGetters {
  pybind11::object benchmark, deterministic, deterministic_algorithms, enabled;
};

/// Looked up once, which takes longer than the calls. To be called with the GIL held.
const CudnnGetters& cudnn_getters() {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<CudnnGetters> storage;
  return storage
      .call_once_and_store_result([] {
        const auto torch = pybind11::module_::import("torch._C");
        return CudnnGetters{torch.attr("_get_cudnn_benchmark"), torch.attr("_get_cudnn_deterministic"),
                            torch.attr("_get_deterministic_algorithms"), torch.attr("_get_cudnn_enabled")};
      })
      .get_stored();
}

const RawAllocator& raw_allocator() {
  static const RawAllocator allocator;
  return allocator;
}

}  // namespace

std::vector<std::int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

std::vector<std::int64_t> strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return {strides.begin(), strides.end()};
}

TensorKind kind_of(const Tensor& tensor) {
  TensorKind kind;
  check_torch(aoti_torch_get_dtype(tensor.get(), &kind.dtype), "reading a dtype");
  check_torch(aoti_torch_get_layout(tensor.get(), &kind.layout), "reading a layout");
  check_torch(aoti_torch_get_device_type(tensor.get(), &kind.device_type), "reading a device");
  check_torch(aoti_torch_get_device_index(tensor.get(), &kind.device_index), "reading a device");
  return kind;
}

TensorDesc describe_tensor(const Tensor& tensor) {
  const TensorKind kind = kind_of(tensor);
  TensorDesc desc;
  desc.sizes = sizes_of(tensor);
  desc.dtype = dtype_text(kind.dtype);
  desc.device = device_text(kind.device_type, kind.device_index);
  if (kind.layout != aoti_torch_layout_strided()) {
    desc.layout = layout_text(kind.layout);
    return desc;  // a sparse tensor has neither strides nor one data pointer
  }
  desc.strides = strides_of(tensor);
  desc.data_ptr_mod16 =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16);
  return desc;
}

std::string take_string(StringHandle handle) {
  const std::unique_ptr<StringOpaque, void (*)(StringHandle)> owner(
      handle, [](StringHandle string) { torch_delete_string(string); });
  std::size_t length = 0;
  const char* data = nullptr;
  check_torch(torch_string_length(handle, &length), "reading a string argument");
  check_torch(torch_string_c_str(handle, &data), "reading a string argument");
  return {data, length};
}

Tensor empty_strided_like(const Tensor& like, const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides) {
  return empty_strided(sizes, strides, kind_of(like));
}

Tensor empty_bytes_like(const Tensor& like, std::int64_t bytes) {
  TensorKind kind = kind_of(like);
  kind.dtype = aoti_torch_dtype_uint8();
  return empty_strided({bytes}, {1}, kind);
}

DeviceScratch::DeviceScratch(const Tensor& like, std::int64_t bytes) {
  const RawAllocator& allocator = raw_allocator();
  if (!allocator.allocate || !allocator.free) {
    tensor_ = empty_bytes_like(like, bytes);
    return;
  }
  void* memory = nullptr;
  if (allocator.allocate(static_cast<std::uint64_t>(bytes), &memory) != AOTI_TORCH_SUCCESS) {
    throw_allocation_error(concat(bytes, " bytes of scratch memory"));
  }
  memory_.reset(memory);
}

void DeviceScratch::Free::operator()(void* memory) const noexcept {
  // Destructors must not throw. Freeing fails after a CUDA error only, which the next call meets and reports.
  static_cast<void>(raw_allocator().free(memory));
}

Tensor reinterpret(const Tensor& tensor, const std::vector<std::int64_t>& sizes,
                   const std::vector<std::int64_t>& strides, std::int64_t offset) {
  AtenTensorHandle handle = nullptr;
  check_torch(
      aoti_torch__reinterpret_tensor(tensor.get(), static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), offset, &handle),  // which it adds to the tensor's own
      [&] { return concat("viewing a tensor as ", list_text(sizes)); });
  return Tensor(handle);
}

bool is_dense_in(const Tensor& tensor, Layout layout) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return is_dense({sizes.data(), sizes.size()}, {strides.data(), strides.size()}, layout);
}

Tensor contiguous_in(const Tensor& tensor, Layout layout) {
  if (is_dense_in(tensor, layout)) return tensor;
  using torch::headeronly::MemoryFormat;
  std::array<StableIValue, 2> stack{
      torch::stable::detail::from(tensor),
      torch::stable::detail::from(layout == Layout::kNDHWC ? MemoryFormat::ChannelsLast3d
                                                           : MemoryFormat::Contiguous)};
  check_torch(torch_call_dispatcher("aten::contiguous", "", stack.data(), TORCH_ABI_VERSION),
              [&] { return concat("copying ", list_text(sizes_of(tensor)), " to ", name(layout)); });
  return torch::stable::detail::to<Tensor>(stack[0]);
}

std::optional<Tensor> contiguous_vector(const std::optional<Tensor>& vector) {
  if (!vector || vector->is_contiguous()) return vector;
  return torch::stable::contiguous(*vector);
}

CudnnFlags read_cudnn_flags(bool allow_tf32) {
  const pybind11::gil_scoped_acquire gil;
  const CudnnGetters& get = cudnn_getters();
  CudnnFlags flags;
  flags.benchmark = get.benchmark().cast<bool>();
  flags.deterministic = get.deterministic().cast<bool>() || get.deterministic_algorithms().cast<bool>();
  flags.enabled = get.enabled().cast<bool>();
  flags.allow_tf32 = allow_tf32;
  return flags;
}

Tensor conv_transpose3d(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Problem& p,
                        const std::optional<CudnnFlags>& flags) {
  using torch::stable::detail::from;
  const auto list = [](const Extent3& e) { return from(std::vector<std::int64_t>(e.begin(), e.end())); };
  std::vector<StableIValue> stack = {from(x),         from(w),          from(bias), list(p.stride),
                                     list(p.padding), list(p.dilation), from(true), list(p.output_padding),
                                     from(p.groups)};
  const char* op = "aten::convolution";
  if (flags) {
    op = "aten::_convolution";
    stack.insert(stack.end(), {from(flags->benchmark), from(flags->deterministic), from(flags->enabled),
                               from(flags->allow_tf32)});
  }
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    const std::string doing = concat(op, " on ", describe(p));
    // Not every torch says what it lacked. Mostly it is room for the result, of which this tells.
    const Extent3 out = p.out();
    const std::vector<std::int64_t> sizes = {p.n, p.k, out[0], out[1], out[2]};
    if (x.is_cuda()) empty_strided_like(x, sizes, dense_strides(sizes, p.y_layout));
    throw_torch_error(doing);
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor matrix_product(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::vector<StableIValue> stack = {from(a), from(b)};
  check_torch(torch_call_dispatcher("aten::mm", "", stack.data(), TORCH_ABI_VERSION), [&] {
    return concat("aten::mm of ", list_text(sizes_of(a)), " and ", list_text(sizes_of(b)));
  });
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void* current_cuda_stream(std::int32_t index) {
  using CurrentStream = AOTITorchError (*)(std::int32_t, void**);
  static const auto current_stream = torch_cuda_function<CurrentStream>("aoti_torch_get_current_cuda_stream");
  if (!current_stream) {
    throw std::runtime_error(
        "upconv3d: PyTorch's current CUDA stream is needed; got a torch without "
        "aoti_torch_get_current_cuda_stream in a loaded libtorch_cuda.so. Install a CUDA build of torch >= "
        "2.11.");
  }
  void* stream = nullptr;
  check_torch(current_stream(index, &stream),
              [&] { return concat("reading the current stream of cuda:", index); });
  return stream;
}

}  // namespace upconv3d::bindings
