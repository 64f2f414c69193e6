// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where before(conv) of the SM90 plan (core/tail.hpp) lies with what is needed to read it: in a call's
/// workspace, or, where the plan keeps it for the backward pass, in memory of its own. (The library plan
/// keeps the convolution as PyTorch returned it, or its sum with a skip, the col2im plan its own in the same
/// form.)
#pragma once

#include <cstdint>

#include "core/channels.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/twice_layout.hpp"
#include "cuda/workspace.hpp"

namespace upconv3d::cuda {

/// Whether before(conv) is stored as the convolution that is returned. In another order of the axes it is
/// copied there.
inline bool returns_activation(const Problem& problem, const Plan& plan) {
  return problem.tail.returns_conv && problem.y_layout == plan.conv_layout;
}

struct ActivationMemory {
  void* a;  // [N,Z,P,Q,padded_channels(K)] of stored_bits; null where it lies in y, or is wanted itself
  std::int8_t* steps;       // [N,tiles,padded_channels(K)], where it is stored in fewer bits than y
  std::int32_t* moment_of;  // [Z*P*Q], where others than the convolution's kernel read a with its steps
  float* table;  // [N,G,4] mean, rest of the mean, 1/sqrt(var + eps), unused; twice: [twice_table_floats],
                 // which begins with that; null where only the table of channels is wanted

  ActivationMemory(const Problem& problem, const Plan& plan, Carver& carver) {
    const std::int64_t channels = padded_channels(problem.k);
    const bool read_elsewhere = !plan.normalizes || plan.keeps_activation;
    const bool elsewhere = plan.activation_in_y || returns_activation(problem, plan);
    const std::int64_t a_values = elsewhere ? 0 : problem.n * channels * problem.positions();
    a = carver.take(a_values * plan.instance->stored_bits / 8);
    steps = carver.take<std::int8_t>(stores_steps(plan) ? problem.n * plan.tiles * channels : 0);
    moment_of = carver.take<std::int32_t>(stores_steps(plan) && read_elsewhere ? problem.positions() : 0);
    std::int64_t floats = 0;
    if (plan.linear) {
      floats = 0;
    } else if (plan.twice) {
      floats = twice_table_floats(problem, plan.tiles);
    } else if (plan.normalizes || plan.keeps_activation) {
      floats = 4 * problem.num_groups * problem.n;
    }
    table = carver.take<float>(floats);
  }
};

/// Bytes of what a plan keeps for the backward pass; 0 where it keeps nothing.
inline std::int64_t saved_bytes(const Problem& problem, const Plan& plan) {
  if (problem.n == 0) return 0;
  if (plan.keeps_conv || plan.keeps_sum)
    return problem.n * problem.k * problem.positions() * size_of(problem.dtype);
  if (!plan.keeps_activation) return 0;
  Carver carver(nullptr);
  const ActivationMemory counted(problem, plan, carver);
  return carver.used();
}

}  // namespace upconv3d::cuda
