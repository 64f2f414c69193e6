// SPDX-License-Identifier: Apache-2.0
/// \file
/// One call of the block, whatever operator it came by: the plan's tensors around the plan's launches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/block_settings.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/torch_calls.hpp"

namespace upconv3d::bindings {

/// The numbers of a call by the public operator's own arguments; frees the handles, whatever the names are.
/// \param num_groups 0 where nothing is normalized
BlockSettings settings_of(const std::vector<std::int64_t>& stride, const std::vector<std::int64_t>& padding,
                          const std::vector<std::int64_t>& output_padding, std::int64_t groups,
                          const std::vector<std::int64_t>& dilation, StringHandle order,
                          std::int64_t num_groups, double eps, StringHandle activation, double parameter,
                          bool return_conv, StringHandle precision);

/// What a call returns beside y.
struct CallExtras {
  std::optional<Tensor> saved;  // what a backward pass will read, if the plan keeps anything
  std::optional<Tensor> conv;   // the convolution [N,K,Z,P,Q] or [K,Z,P,Q], where tail.returns_conv
};

/// Runs the call; a plan that keeps something for a backward pass fills extras.saved.
Tensor run_call(const OpArguments& arguments, CallExtras& extras);

/// The same where prepare_call(arguments) is at hand: finding it again would cost host time.
Tensor run_prepared(const PreparedCall& call, const OpArguments& arguments, CallExtras& extras);

/// What follows the convolution, of one that is given: arguments.input [N,K,Z,P,Q], on CUDA; they are those
/// of a training call that returns its convolution, of a kernel of one position and as many channels in as
/// out.
Tensor run_tail_of(const OpArguments& arguments);

const void* data_or_null(const std::optional<Tensor>& tensor);

}  // namespace upconv3d::bindings
