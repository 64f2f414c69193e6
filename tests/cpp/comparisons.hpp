// SPDX-License-Identifier: Apache-2.0
/// \file
/// How GPU tests that compare tensors element by element count and report.
#pragma once

#include <cstdio>
#include <string>

namespace upconv3d::test {

inline int failures = 0;
inline int comparisons = 0;

inline void expect(bool ok, const std::string& what) {
  ++comparisons;
  if (ok) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

}  // namespace upconv3d::test
