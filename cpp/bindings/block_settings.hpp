// SPDX-License-Identifier: Apache-2.0
/// \file
/// The numbers of a block, remembered under a number of their own.
///
/// PyTorch's dispatcher and its stable ABI copy a list of three integers several times on the way into an
/// operator: four lists, a float and a string take longer than all that this module does before it launches.
/// The Python layer therefore passes one integer for them (torch.ops.upconv3d._numbered_block).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/tail.hpp"

namespace upconv3d::bindings {

/// What the op takes beside tensors.
struct BlockSettings {
  std::vector<std::int64_t> stride;  // depth, height, width, as the next three
  std::vector<std::int64_t> padding;
  std::vector<std::int64_t> output_padding;
  std::int64_t groups;
  std::vector<std::int64_t> dilation;
  std::int64_t num_groups;
  double eps;  // activation units squared
  std::string precision;
  Tail tail = {};                 // but for what tensors say: slopes and has_skip
  bool spares_host = false;       // as Device's
  bool casts_parameters = false;  // of float32, to the input's dtype (parameter_casts.hpp)
};

/// The numbers of a block of relu before a group norm, without memory of their own.
struct BlockNumbers {
  std::array<std::int64_t, 12> triples;  // stride, padding, output_padding, dilation
  std::int64_t groups;
  std::int64_t num_groups;
  std::uint64_t eps_bits;  // of the double: NaN and -0 are values like others
  bool is_tf32;            // else "ieee"

  auto operator<=>(const BlockNumbers&) const = default;
};

/// Remembers `settings` for the life of the process, unchanged. Returns their number, the same for equal
/// BlockNumbers, or nothing where as many as are worth remembering already are. May be called from several
/// threads at once.
std::optional<std::int64_t> remember_settings(BlockSettings settings);

/// The number of settings that were remembered, or nothing. May be called from several threads at once.
std::optional<std::int64_t> number_of(const BlockNumbers& numbers);

/// The settings of a number that remember_settings returned.
/// \throws std::out_of_range for another number.
const BlockSettings& remembered_settings(std::int64_t number);

}  // namespace upconv3d::bindings
