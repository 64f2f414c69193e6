// SPDX-License-Identifier: Apache-2.0
#include "bindings/build_info.hpp"

#include <sstream>
#include <string>

namespace upconv3d::bindings {

bool archs_run_on(int compute_capability) {
  std::istringstream archs(kCudaArchs);
  std::string arch;
  while (std::getline(archs, arch, ';')) {
    std::size_t digits = 0;
    const int number = std::stoi(arch, &digits);
    if (arch.ends_with("-virtual") && number <= compute_capability) return true;
    const bool suffixed = digits < arch.size() && arch[digits] != '-';
    const bool same_major = number / 10 == compute_capability / 10;
    if (number == compute_capability || (!suffixed && same_major && number < compute_capability)) return true;
  }
  return false;
}

}  // namespace upconv3d::bindings
