// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the GPU tests of kernel variants run and report their cases.
#pragma once

#include <cstdio>
#include <exception>
#include <string>

#include "core/plan.hpp"

namespace upconv3d::tests {

/// Runs and prints; counts what passed and failed.
class Tally {
 public:
  template <class Body>
  void run(const ConvInstance& instance, const std::string& what, const Body& body) {
    std::string problem;
    try {
      problem = body();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    problem.empty() ? ++passed : ++failed;
    if (problem.empty()) return;
    std::printf("FAILED %s, %s: %s\n", instance.name, what.c_str(), problem.c_str());
    std::fflush(stdout);  // a program that is ended for its time has told
  }
  int passed = 0, failed = 0;
};

}  // namespace upconv3d::tests
