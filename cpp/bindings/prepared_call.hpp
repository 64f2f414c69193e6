// SPDX-License-Identifier: Apache-2.0
/// \file
/// From the op's arguments to what is to be run, remembered from call to call.
///
/// Checking the rules and choosing a plan takes longer on the host than a small block takes on the GPU, and a
/// network calls each of its blocks with the same shapes over and over.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bindings/torch_calls.hpp"
#include "core/backward_plan.hpp"
#include "core/launch_memo.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::bindings {

inline const std::optional<Tensor> kNoTensor;
inline const Tail kReluGroupNorm;

/// The op's arguments as PyTorch hands them over.
struct OpArguments {
  const Tensor& input;                       // [N,C,D,H,W] or [C,D,H,W] dtype
  const Tensor& weight;                      // [C,K/groups,T,R,S] dtype
  const std::optional<Tensor>& bias;         // [K] dtype
  const std::optional<Tensor>& norm_weight;  // [K] dtype
  const std::optional<Tensor>& norm_bias;    // [K] dtype
  const std::vector<std::int64_t>& stride;   // depth, height, width, as the next three
  const std::vector<std::int64_t>& padding;
  const std::vector<std::int64_t>& output_padding;
  const std::vector<std::int64_t>& dilation;
  std::int64_t groups;
  std::int64_t num_groups;
  double eps;  // activation units squared
  const std::string& precision;
  bool for_training = false;                        // whether what a backward pass reads is to be kept
  const std::optional<Tensor>& slopes = kNoTensor;  // [1] or [K] dtype
  const std::optional<Tensor>& skip = kNoTensor;    // as the result
  const Tail& tail = kReluGroupNorm;                // but for what slopes and skip say
  bool spares_host = false;                         // as Device's
  bool casts_parameters = false;                    // of float32, to input's dtype (parameter_casts.hpp)
};

/// How some gradients of one call are computed.
struct PreparedBackward {
  const BackwardPlan plan;
  LaunchMemo grad_x_memo;
};

/// Those of one call, by the gradients that were asked for. Safe to use from several threads.
class PreparedBackwards {
 public:
  /// \param forward the plan that kept what is read
  PreparedBackward& find(const Problem& problem, const Plan& forward, const Device& device,
                         const GradientMask& wanted);

 private:
  std::mutex mutex_;
  std::unique_ptr<PreparedBackward> prepared_[4];  // of x, and of weight; the others do not matter
};

/// What follows from the metadata of the arguments, whatever their values.
struct PreparedCall {
  Problem problem;
  Device device;
  Plan plan;
  bool repeats_bits = false;     // library plan: the convolution is to be a deterministic one
  std::int64_t saved_bytes = 0;  // what the plan keeps for a backward pass
  std::shared_ptr<PreparedBackwards> backwards = std::make_shared<PreparedBackwards>();
  std::shared_ptr<LaunchMemo> launch_memo = std::make_shared<LaunchMemo>();
  std::vector<std::int64_t> y_sizes;    // [N,K,Z,P,Q]
  std::vector<std::int64_t> y_strides;  // in elements, as many
};

/// The call of these arguments: checked and planned where they are met for the first time, else remembered.
/// May be called from several threads at once.
/// \throws RuleViolation or ValueViolation (core/errors.hpp), or what query_device throws.
std::shared_ptr<const PreparedCall> prepare_call(const OpArguments& arguments);

}  // namespace upconv3d::bindings
