// SPDX-License-Identifier: Apache-2.0
#include "core/arguments.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/errors.hpp"
#include "core/index_math.hpp"
#include "core/text.hpp"

namespace upconv3d {
namespace {

using Sizes = std::vector<std::int64_t>;

// Axes of a 5-D tensor from the one that varies quickest in memory to the slowest.
constexpr std::array<int, 5> kInnerToOuterNCDHW = {4, 3, 2, 1, 0};
constexpr std::array<int, 5> kInnerToOuterNDHWC = {1, 4, 3, 2, 0};

const std::array<int, 5>& inner_to_outer(Layout layout) {
  return layout == Layout::kNCDHW ? kInnerToOuterNCDHW : kInnerToOuterNDHWC;
}

struct NamedTensor {
  const char* argument;
  const TensorDesc* tensor;
};

std::vector<NamedTensor> given_tensors(const Arguments& a) {
  std::vector<NamedTensor> tensors = {{"input", &a.input}, {"weight", &a.weight}};
  if (a.bias) tensors.push_back({"bias", &*a.bias});
  if (a.norm_weight) tensors.push_back({"norm_weight", &*a.norm_weight});
  if (a.norm_bias) tensors.push_back({"norm_bias", &*a.norm_bias});
  if (a.slopes) tensors.push_back({"activation_param", &*a.slopes});
  if (a.skip) tensors.push_back({"skip", &*a.skip});
  return tensors;
}

DType parse_dtype(const std::string& dtype) {
  if (dtype == "float32") return DType::kFloat32;
  if (dtype == "bfloat16") return DType::kBFloat16;
  if (dtype == "float16") return DType::kFloat16;
  if (dtype == "float64") return DType::kFloat64;
  throw UnsupportedViolation(
      concat("upconv3d: input must be float32, bfloat16, float16 or float64; got input.dtype=", dtype,
             ". Convert it, for example with input.float()."));
}

Precision parse_precision(const std::string& precision) {
  if (precision == "ieee") return Precision::kIEEE;
  if (precision == "tf32") return Precision::kTF32;
  throw ValueViolation(concat("upconv3d: precision must be \"ieee\" or \"tf32\"; got \"", precision,
                              "\". None follows torch.backends.cudnn.conv.fp32_precision."));
}

void check_kind(const Arguments& a) {
  for (const auto& [argument, tensor] : given_tensors(a)) {
    require_strided(argument, *tensor);
    if (tensor->dtype != a.input.dtype) {
      throw RuleViolation(
          concat("upconv3d: all tensors must have the dtype of input; got input.dtype=", a.input.dtype, ", ",
                 argument, ".dtype=", tensor->dtype, ". Pass ", argument, ".to(input.dtype)."));
    }
    require_device(argument, *tensor, a.input);
  }
  const std::string type = a.input.device.substr(0, a.input.device.find(':'));
  if (type != "cpu" && type != "cuda" && type != "meta") {
    throw UnsupportedViolation(
        concat("upconv3d: input must be on the CPU or a CUDA device; got input.device=", a.input.device,
               ". Pass input.cpu() or input.cuda()."));
  }
}

Extent3 parse_triple(const Sizes& values, const char* argument) {
  if (values.size() != 3) {
    throw RuleViolation(concat("upconv3d: ", argument, " must be one int or one per spatial axis (3); got ",
                               list_text(values), ". Pass 3 values, or one for all axes."));
  }
  return {values[0], values[1], values[2]};
}

/// The input as [N,C,D,H,W]. The added axis has the stride that unsqueeze(0) gives it.
std::pair<Sizes, Sizes> batched(const TensorDesc& input) {
  const std::size_t rank = input.sizes.size();
  if (rank != 4 && rank != 5) {
    throw RuleViolation(
        concat("upconv3d: input must be [N, C, D, H, W] or unbatched [C, D, H, W]; got input.shape=",
               list_text(input.sizes), ". Add or drop axes with unsqueeze or flatten."));
  }
  if (rank == 5) return {input.sizes, input.strides};
  Sizes sizes = {1};
  Sizes strides = {input.sizes[0] * input.strides[0]};
  sizes.insert(sizes.end(), input.sizes.begin(), input.sizes.end());
  strides.insert(strides.end(), input.strides.begin(), input.strides.end());
  return {sizes, strides};
}

void check_weight(const Sizes& x_sizes, const Arguments& a) {
  const Sizes& w = a.weight.sizes;
  if (w.size() != 5) {
    throw RuleViolation(concat("upconv3d: weight must be [C, K/groups, T, R, S]; got weight.shape=",
                               list_text(w), ". Add axes of 1 tap with unsqueeze."));
  }
  if (a.groups < 1) {
    throw RuleViolation(concat("upconv3d: groups must be at least 1; got groups=", a.groups,
                               ". Pass 1 for an ordinary convolution."));
  }
  if (w[0] != x_sizes[1]) {
    throw RuleViolation(concat("upconv3d: weight.size(0) must equal the input's channels; got weight.shape=",
                               list_text(w), ", input.shape=", list_text(a.input.sizes),
                               ". A transposed "
                               "convolution's weight is [C, K/groups, T, R, S]."));
  }
}

void check_per_channel(const std::optional<TensorDesc>& tensor, const char* argument, std::int64_t k) {
  if (!tensor || (tensor->sizes.size() == 1 && tensor->sizes[0] == k)) return;
  throw RuleViolation(concat("upconv3d: ", argument, " must have one value per output channel; got ",
                             argument, ".shape=", list_text(tensor->sizes), ", expected [", k, "]."));
}

void check_slopes(const Arguments& a, std::int64_t k) {
  const bool wanted = a.tail.activation == Activation::kPrelu;
  const bool fits =
      a.slopes && a.slopes->sizes.size() == 1 && (a.slopes->sizes[0] == 1 || a.slopes->sizes[0] == k);
  if (wanted ? fits : !a.slopes) return;
  throw RuleViolation(
      concat("upconv3d: activation_param must be a tensor of one slope, or of one per output channel, for "
             "activation=\"prelu\" and for no other; got ",
             a.slopes ? "activation_param.shape=" + list_text(a.slopes->sizes) : std::string("none"),
             " for activation=\"", name(a.tail.activation), "\" of ", k, " channels."));
}

void check_skip(const Arguments& a, const Problem& p) {
  if (!a.skip) return;
  const Extent3 out = p.out();
  Sizes expected = {p.n, p.k, out[0], out[1], out[2]};
  if (a.input.sizes.size() == 4) expected.erase(expected.begin());
  if (a.skip->sizes == expected) return;
  throw RuleViolation(
      concat("upconv3d: skip must have the sizes of the convolution's result; got skip.shape=",
             list_text(a.skip->sizes), ", expected ", list_text(expected), ". Resize or expand it first."));
}

/// What follows the convolution, with what tensors say of it.
Tail complete_tail(const Arguments& a) {
  Tail tail = a.tail;
  tail.slopes = a.slopes && a.slopes->sizes.size() == 1 ? a.slopes->sizes[0] : 0;
  tail.has_skip = a.skip.has_value();
  if (!tail.norm && (a.norm_weight || a.norm_bias)) {
    throw RuleViolation(
        "upconv3d: norm_weight and norm_bias belong to a normalization; got one of them with norm=None. "
        "Leave them out, or say norm=\"group\".");
  }
  return tail;
}

}  // namespace

void require_strided(const std::string& argument, const TensorDesc& tensor) {
  if (tensor.layout == "strided") return;
  throw RuleViolation(concat("upconv3d: ", argument, " must be a dense (strided) tensor; got ", argument,
                             ".layout=", tensor.layout, ". Pass ", argument, ".to_dense()."));
}

void require_device(const std::string& argument, const TensorDesc& tensor, const TensorDesc& input) {
  if (tensor.device == input.device) return;
  throw RuleViolation(
      concat("upconv3d: all tensors must be on the device of input; got input.device=", input.device, ", ",
             argument, ".device=", tensor.device, ". Pass ", argument, ".to(input.device)."));
}

bool is_dense(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides, Layout layout) {
  std::int64_t expected = 1;
  for (const int axis : inner_to_outer(layout)) {
    if (sizes[axis] != 1 && strides[axis] != expected) return false;
    expected = saturating_product(expected, std::max<std::int64_t>(sizes[axis], 1));
  }
  return true;
}

bool suggests_channels_last_3d(const Sizes& sizes, const Sizes& strides) {
  if (sizes.size() != 5 || strides[1] == 0) return false;
  std::int64_t least = 0;
  for (const int axis : kInnerToOuterNDHWC) {
    if (sizes[axis] == 0 || strides[axis] < least) return false;
    // [N,1,1,1,1] and the like fit both formats; PyTorch calls them contiguous.
    if (axis == 0 && least == strides[1]) return false;
    least = strides[axis] * std::max<std::int64_t>(sizes[axis], 1);
  }
  return true;
}

Sizes dense_strides(const Sizes& sizes, Layout layout) {
  Sizes strides(5);
  std::int64_t next = 1;
  for (const int axis : inner_to_outer(layout)) {
    strides[axis] = next;
    next = saturating_product(next, std::max<std::int64_t>(sizes[axis], 1));
  }
  return strides;
}

Problem make_problem(const Arguments& a) {
  check_kind(a);
  const auto [x_sizes, x_strides] = batched(a.input);
  check_weight(x_sizes, a);

  Problem p;
  p.dtype = parse_dtype(a.input.dtype);
  p.precision = parse_precision(a.precision);
  p.n = x_sizes[0];
  p.c = x_sizes[1];
  p.in = {x_sizes[2], x_sizes[3], x_sizes[4]};
  p.kernel = {a.weight.sizes[2], a.weight.sizes[3], a.weight.sizes[4]};
  p.stride = parse_triple(a.stride, "stride");
  p.padding = parse_triple(a.padding, "padding");
  p.output_padding = parse_triple(a.output_padding, "output_padding");
  p.dilation = parse_triple(a.dilation, "dilation");
  p.groups = a.groups;
  p.num_groups = a.num_groups;
  p.eps = a.eps;
  p.has_bias = a.bias.has_value();
  p.tail = complete_tail(a);
  if (__builtin_mul_overflow(a.weight.sizes[1], a.groups, &p.k)) {
    throw RuleViolation(concat("upconv3d: groups is out of range; got groups=", a.groups,
                               ". Pass a divisor of the input channels."));
  }
  validate(p);
  check_per_channel(a.bias, "bias", p.k);
  check_per_channel(a.norm_weight, "norm_weight", p.k);
  check_per_channel(a.norm_bias, "norm_bias", p.k);
  check_slopes(a, p.k);
  check_skip(a, p);

  const bool x_suggests = suggests_channels_last_3d(x_sizes, x_strides);
  const bool w_suggests = suggests_channels_last_3d(a.weight.sizes, a.weight.strides);
  p.y_layout = x_suggests || w_suggests ? Layout::kNDHWC : Layout::kNCDHW;
  // One channel, or one voxel, lies in both orders: in that of y then, as plans were compared.
  const bool is_ndhwc = is_dense(x_sizes, x_strides, Layout::kNDHWC) &&
                        (w_suggests || !is_dense(x_sizes, x_strides, Layout::kNCDHW));
  p.x_layout = x_suggests || is_ndhwc ? Layout::kNDHWC : Layout::kNCDHW;
  // A copy that has to be made anyway starts where the allocator puts it, on at least 64 bytes.
  p.x_aligned = !is_dense(x_sizes, x_strides, p.x_layout) || a.input.data_ptr_mod16 == 0;
  p.w_channels_last =
      is_dense(a.weight.sizes, a.weight.strides, Layout::kNDHWC) && a.weight.data_ptr_mod16 == 0;
  return p;
}

}  // namespace upconv3d
