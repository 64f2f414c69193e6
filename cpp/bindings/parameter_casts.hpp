// SPDX-License-Identifier: Apache-2.0
/// \file
/// A call whose parameters are float32 where its input is 16 bit, as a module's are under autocast.
///
/// One allocation and one launch, of which PyTorch's casts take several (perf/NOTES.md, "Host time inside
/// whole models"). Where a call is recorded for a backward, it is an operator of its own, _cast_parameters:
/// the backward reads what was cast, as PyTorch's does, whatever the parameters hold by then.
#pragma once

#include <optional>

#include "bindings/torch_calls.hpp"
#include "core/arguments.hpp"

namespace upconv3d::bindings {

/// The tensors of a call beside its input.
struct Parameters {
  Tensor w;                      // [C,K/groups,T,R,S]
  std::optional<Tensor> bias;    // [K]
  std::optional<Tensor> gamma;   // [K]
  std::optional<Tensor> beta;    // [K]
  std::optional<Tensor> slopes;  // [1] or [K]
};

/// Those that are float32 in the dtype of `input`, which is 16 bit and on CUDA; the others as they are. What
/// does not lie dense is copied by PyTorch first.
/// \throws RuleViolation, before any launch, for one that is cast and sparse or on another device.
Parameters cast_parameters(const Tensor& input, const Parameters& parameters);

/// What cast_parameters makes of a tensor, if it is one: its metadata.
std::optional<TensorDesc> cast_desc(std::optional<TensorDesc> parameter, const TensorDesc& input);

}  // namespace upconv3d::bindings
