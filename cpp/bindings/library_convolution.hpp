// SPDX-License-Identifier: Apache-2.0
/// \file
/// The convolution of plans that leave it to PyTorch, as PyTorch is asked for it.
#pragma once

#include <optional>

#include "bindings/torch_calls.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

/// A convolution without taps that reach no output (core/idle_taps.hpp), and of one voxel per sample as a
/// matrix product (core/one_voxel.hpp).
class LibraryConvolution {
 public:
  /// \param given the call's problem
  /// \param all_taps w [C,K/groups,T,R,S] dtype, as the call has it
  /// \param adds_bias whether run will be given a bias
  LibraryConvolution(const Problem& given, const Tensor& all_taps, bool adds_bias);

  /// \param x [N,C,D,H,W] dtype
  /// \param operand `w`, or a copy in another order
  /// \param bias [K] dtype or none
  /// \returns [N,K,Z,P,Q] dtype in a format of PyTorch's choice; of a product in the operand's order
  Tensor run(const Tensor& x, const Tensor& operand, const std::optional<Tensor>& bias,
             const std::optional<CudnnFlags>& flags) const;

  Problem problem;  // without idle taps, also where run asks for a product
  Tensor w;         // [C,K/groups,T,R,S] dtype, of problem's taps

 private:
  Tensor run_product(const Tensor& x, const Tensor& operand, const std::optional<CudnnFlags>& flags) const;

  std::optional<Problem> product_;
};

}  // namespace upconv3d::bindings
