// SPDX-License-Identifier: Apache-2.0
/// \file
/// Text for messages and plans.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

#include "core/problem.hpp"

namespace upconv3d {

/// Appends a number, character or text. Streams are for floating point alone: they cost as much as a small
/// convolution, and every call of the op composes a plan's reason.
template <typename T>
void append(std::string& text, const T& part) {
  if constexpr (std::is_same_v<T, char>) {
    text += part;
  } else if constexpr (std::is_integral_v<T>) {
    text += std::to_string(part);
  } else if constexpr (std::is_floating_point_v<T>) {
    std::ostringstream stream;
    stream << part;
    text += stream.str();
  } else {
    text += part;
  }
}

/// The arguments as text, one after the other.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// "[16, 64, 32]"
template <typename Range>
std::string list_text(const Range& values) {
  std::string text = "[";
  const char* separator = "";
  for (const auto& value : values) {
    text += separator;
    append(text, value);
    separator = ", ";
  }
  return text + "]";
}

/// "(2, 2, 2)"
inline std::string triple_text(const Extent3& e) {
  return concat('(', e[0], ", ", e[1], ", ", e[2], ')');
}

/// "3x3x3"
inline std::string extent_text(const Extent3& e) {
  return concat(e[0], 'x', e[1], 'x', e[2]);
}

}  // namespace upconv3d
