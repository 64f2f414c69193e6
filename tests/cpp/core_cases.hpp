// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the tests of cpp/core share: expectations, and the problem and devices that their cases depart from.
#pragma once

#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

inline int failures = 0;

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::cerr << "FAILED: " << what << '\n';
}

template <typename Violation>
void expect_violation(const std::function<void()>& call, const std::string& part, const std::string& what) {
  try {
    call();
    expect(false, what + ": nothing was thrown");
  } catch (const Violation& error) {
    expect(std::string(error.what()).find(part) != std::string::npos, what + ": message is " + error.what());
  }
}

/// KernelBench level 2, problem 61: the headline shape.
inline Problem headline(DType dtype = DType::kBFloat16, Layout layout = Layout::kNDHWC) {
  Problem p;
  p.n = 16;
  p.c = 64;
  p.k = 128;
  p.in = {32, 32, 32};
  p.kernel = {3, 3, 3};
  p.num_groups = 8;
  p.dtype = dtype;
  p.x_layout = layout;
  p.y_layout = layout;
  return p;
}

inline Device hopper() {
  return {.is_cuda = true, .compute_capability = 90, .sm_count = 132, .max_threads = 1};
}

inline std::vector<ConvInstance> all_compiled() {
  std::vector<ConvInstance> instances = conv_instances();
  for (ConvInstance& instance : instances) instance.compiled = true;
  return instances;
}

inline bool has_part(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace upconv3d
