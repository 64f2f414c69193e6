// SPDX-License-Identifier: Apache-2.0
/// \file
/// The op's arguments as they arrive, before any rule is checked: tensors by their metadata, lists by value.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace upconv3d {

/// A tensor without its data.
struct TensorDesc {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // in elements, as many as sizes
  std::string dtype;                  // torch's name without "torch.": "float32"
  std::string device;                 // "cpu", "cuda:0", "meta"
  std::string layout = "strided";
  std::int64_t data_ptr_mod16 = 0;  // bytes beyond a 16-byte boundary
};

struct Arguments {
  TensorDesc input;                       // [N,C,D,H,W] or [C,D,H,W]
  TensorDesc weight;                      // [C,K/groups,T,R,S]
  std::optional<TensorDesc> bias;         // [K]
  std::optional<TensorDesc> norm_weight;  // [K]
  std::optional<TensorDesc> norm_bias;    // [K]
  std::optional<TensorDesc> slopes;       // [1] or [K], where tail.activation is kPrelu
  std::optional<TensorDesc> skip;         // [N,K,Z,P,Q] or [K,Z,P,Q], as the result
  std::vector<std::int64_t> stride;       // one value per spatial axis, as the next three
  std::vector<std::int64_t> padding;
  std::vector<std::int64_t> output_padding;
  std::vector<std::int64_t> dilation;
  std::int64_t groups = 1;
  std::int64_t num_groups = 1;
  double eps = 1e-5;  // activation units squared
  std::string precision = "ieee";
  Tail tail;  // but for what slopes and skip say
};

/// Checks every rule of the block and says it as a Problem. An unbatched input is a batch of one.
///
/// y is channels_last_3d where input or weight suggests that format by PyTorch's own rule, as in PyTorch's
/// convolution. x_layout is the order of an input that is dense in memory, and of the dense copy that a plan
/// has to make of any other.
/// \throws RuleViolation or ValueViolation (core/errors.hpp): the rule, the value it got and the remedy.
Problem make_problem(const Arguments& arguments);

/// Rules on one argument that a kernel could not read, as make_problem checks them of all.
/// \throws RuleViolation: a sparse tensor; one that is not on the device of `input`.
void require_strided(const std::string& argument, const TensorDesc& tensor);
void require_device(const std::string& argument, const TensorDesc& tensor, const TensorDesc& input);

/// Whether a [N,C,D,H,W] tensor lies dense in the order `layout`, axes of size 1 aside.
bool is_dense(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides, Layout layout);

/// PyTorch's rule by which strides suggest channels_last_3d (c10's is_channels_last_strides_3d).
bool suggests_channels_last_3d(const std::vector<std::int64_t>& sizes,
                               const std::vector<std::int64_t>& strides);

/// Strides, in elements, of a dense [N,C,D,H,W] tensor in the order `layout`, as PyTorch computes them.
std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& sizes, Layout layout);

}  // namespace upconv3d
