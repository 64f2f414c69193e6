// SPDX-License-Identifier: Apache-2.0
/// \file
/// What turns a stored element into the value that is normalized. The moments and the normalize kernel must
/// see the same value, so both take one of these functors; another activation is one more struct.
#pragma once

namespace upconv3d::cuda {

/// max(v, 0) as PyTorch has it: NaN stays NaN, which fmaxf would turn into 0.
struct Relu {
  template <class S>
  __device__ __forceinline__ S operator()(S v) const {
    return v < S(0) ? S(0) : v;
  }
};

/// The convolution as the library left it: bias and activation are still due.
template <class Activation>
struct AfterBias {
  static constexpr bool kReadsBias = true;
  template <class S>
  __device__ __forceinline__ S operator()(S c, S bias) const {
    return Activation{}(c + bias);
  }
};

/// The convolution as our epilogue left it: nothing is due.
struct AsStored {
  static constexpr bool kReadsBias = false;
  template <class S>
  __device__ __forceinline__ S operator()(S a, S) const {
    return a;
  }
};

}  // namespace upconv3d::cuda
