// SPDX-License-Identifier: Apache-2.0
#include "bindings/prepared_call.hpp"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "bindings/parameter_casts.hpp"
#include "bindings/plan_query.hpp"
#include "core/arguments.hpp"
#include "core/library_plan.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/activation_memory.hpp"
#endif

namespace upconv3d::bindings {
namespace {

// Input and weight have five axes where they are right; a tensor of more breaks a rule, and such calls are
// not remembered.
constexpr std::int64_t kMaxRank = 5;

// Per tensor one word of kinds, sizes and strides; four lists of three; groups, num_groups, eps, what is
// chosen from a few, the activation's parameter, and host threads.
constexpr std::size_t kMaxWords = 7 * (1 + 2 * kMaxRank) + 4 * 3 + 6;

// An entry takes 1 to 2 KB, with a launch of the SM90 plan 20 to 40, with three 110. Where more calls differ
// than fit, as with shapes that never repeat, all are forgotten and each costs what the first one does.
constexpr std::size_t kMaxRemembered = 1024;

/// All that Arguments and Device hold of a call, as plain numbers.
class CallKey {
 public:
  void append(std::int64_t word) { words_[size_++] = word; }

  bool operator==(const CallKey& other) const {
    return size_ == other.size_ && std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
  }

  std::size_t hash() const {
    std::uint64_t state = size_;
    for (std::size_t i = 0; i < size_; ++i) {
      // Multiplication carries a word's bits upwards only, the shift brings them back down.
      state = (state ^ static_cast<std::uint64_t>(words_[i])) * 0x9e3779b97f4a7c15u;
      state ^= state >> 32;
    }
    return state;
  }

 private:
  std::array<std::int64_t, kMaxWords> words_;  // the first size_ are set
  std::size_t size_ = 0;
};

struct HashOfCallKey {
  std::size_t operator()(const CallKey& key) const { return key.hash(); }
};

/// Appends what describe_tensor reads. False where the tensor has no place in a key; it breaks a rule then.
bool append(CallKey& key, const Tensor& tensor) {
  const TensorKind kind = kind_of(tensor);
  const std::int64_t rank = tensor.dim();
  if (kind.layout != aoti_torch_layout_strided() || rank > kMaxRank) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  // Codes and indices of torch are small: dtype, layout and device type count kinds, devices number below
  // 256.
  const auto small = [](std::int64_t value) { return value & 0xff; };
  key.append(1 + (rank << 8) + (static_cast<std::int64_t>(address % 16) << 16) + (small(kind.dtype) << 24) +
             (small(kind.device_type) << 32) + (small(kind.device_index) << 40));
  for (const std::int64_t size : tensor.sizes()) key.append(size);
  for (const std::int64_t stride : tensor.strides()) key.append(stride);
  return true;
}

bool append(CallKey& key, const std::optional<Tensor>& tensor) {
  if (tensor) return append(key, *tensor);
  key.append(0);  // a tensor's first word is odd
  return true;
}

bool append(CallKey& key, const std::vector<std::int64_t>& triple) {
  if (triple.size() != 3) return false;
  for (const std::int64_t value : triple) key.append(value);
  return true;
}

/// The key of a call, or nothing where it breaks one of the rules that make keys small.
std::optional<CallKey> key_of(const OpArguments& a) {
  CallKey key;
  const bool fits = append(key, a.input) && append(key, a.weight) && append(key, a.bias) &&
                    append(key, a.norm_weight) && append(key, a.norm_bias) && append(key, a.slopes) &&
                    append(key, a.skip) && append(key, a.stride) && append(key, a.padding) &&
                    append(key, a.output_padding) && append(key, a.dilation);
  if (!fits || (a.precision != "ieee" && a.precision != "tf32")) return std::nullopt;
  key.append(a.groups);
  key.append(a.num_groups);
  key.append(std::bit_cast<std::int64_t>(a.eps));
  key.append((a.precision == "tf32" ? 1 : 0) + (a.for_training ? 2 : 0) + (a.tail.norm ? 4 : 0) +
             (a.tail.order == Order::kNormAct ? 8 : 0) + (a.tail.returns_conv ? 16 : 0) +
             (a.spares_host ? 32 : 0) + (a.casts_parameters ? 64 : 0) +
             (static_cast<std::int64_t>(a.tail.activation) << 8));
  key.append(std::bit_cast<std::int64_t>(a.tail.parameter));
  // Of what a plan reads of its device, only the host's threads can change while the process runs.
  key.append(torch::stable::get_num_threads());
  return key;
}

std::optional<TensorDesc> describe_optional(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return describe_tensor(*tensor);
}

std::shared_ptr<const PreparedCall> checked_and_planned(const OpArguments& a) {
  Arguments arguments = {describe_tensor(a.input),
                         describe_tensor(a.weight),
                         describe_optional(a.bias),
                         describe_optional(a.norm_weight),
                         describe_optional(a.norm_bias),
                         describe_optional(a.slopes),
                         describe_optional(a.skip),
                         a.stride,
                         a.padding,
                         a.output_padding,
                         a.dilation,
                         a.groups,
                         a.num_groups,
                         a.eps,
                         a.precision,
                         a.tail};
  if (a.casts_parameters) {
    arguments.weight = *cast_desc(arguments.weight, arguments.input);
    for (auto* const vector :
         {&arguments.bias, &arguments.norm_weight, &arguments.norm_bias, &arguments.slopes}) {
      *vector = cast_desc(*vector, arguments.input);
    }
  }
  auto call = std::make_shared<PreparedCall>();
  call->problem = make_problem(arguments);
  call->device = query_device(arguments.input.device);
  call->device.spares_host = a.spares_host;
  call->plan = make_plan(call->problem, call->device, conv_instances(), a.for_training);
  // PyTorch's convolution was taken for its speed alone, here or against what training could run: the promise
  // of the same bits stays, unless it would cost that speed.
  if (!a.for_training && call->plan.algorithm == Algorithm::kCudaLibrary &&
      has_quick_deterministic_kernels(call->problem)) {
    const auto could_be_sm90 = [](const Plan& plan) {
      return plan.instead_of_sm90 || plan.algorithm == Algorithm::kSm90ImplicitGemm;
    };
    call->repeats_bits = could_be_sm90(call->plan) ||
                         could_be_sm90(make_plan(call->problem, call->device, conv_instances(), true));
  }
#if UPCONV3D_WITH_CUDA
  call->saved_bytes = cuda::saved_bytes(call->problem, call->plan);
#endif
  const Extent3 out = call->problem.out();
  call->y_sizes = {call->problem.n, call->problem.k, out[0], out[1], out[2]};
  call->y_strides = dense_strides(call->y_sizes, call->problem.y_layout);
  return call;
}

/// Calls by their keys. Safe to use from several threads.
class RememberedCalls {
 public:
  /// The call of `key`, or null.
  std::shared_ptr<const PreparedCall> find(const CallKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = calls_.find(key);
    return known == calls_.end() ? nullptr : known->second;
  }

  void insert(const CallKey& key, std::shared_ptr<const PreparedCall> call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (calls_.size() >= kMaxRemembered) calls_.clear();
    calls_.insert_or_assign(key, std::move(call));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<CallKey, std::shared_ptr<const PreparedCall>, HashOfCallKey> calls_;
};

}  // namespace

PreparedBackward& PreparedBackwards::find(const Problem& problem, const Plan& forward, const Device& device,
                                          const GradientMask& wanted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& prepared = prepared_[(wanted.x ? 1 : 0) + (wanted.w ? 2 : 0)];
  if (!prepared) {
    prepared.reset(new PreparedBackward{forward.keeps_conv ? library_backward_plan(problem, wanted)
                                                           : select_backward_plan(problem, device, wanted),
                                        {}});
  }
  return *prepared;
}

std::shared_ptr<const PreparedCall> prepare_call(const OpArguments& arguments) {
  static RememberedCalls remembered;
  const std::optional<CallKey> key = key_of(arguments);
  if (!key) return checked_and_planned(arguments);
  if (auto known = remembered.find(*key)) return known;
  auto call = checked_and_planned(arguments);
  remembered.insert(*key, call);
  return call;
}

}  // namespace upconv3d::bindings
