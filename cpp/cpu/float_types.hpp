// SPDX-License-Identifier: Apache-2.0
/// \file
/// The 16-bit storage types of the host kernels, and the type in which each dtype is computed.
#pragma once

#include <cstdint>

namespace upconv3d::cpu {

/// Bits of a bfloat16: the upper half of a float32.
struct BFloat16 {
  std::uint16_t bits;
};

/// Bits of an IEEE 754 binary16.
struct Float16 {
  std::uint16_t bits;
};

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

/// float, or double where the data are float64.
template <class T>
using compute_t = typename ComputeType<T>::type;

}  // namespace upconv3d::cpu
