// SPDX-License-Identifier: Apache-2.0
/// \file
/// One allocation, many parts.
#pragma once

#include <cstdint>

namespace upconv3d::cuda {

/// Hands out parts of the workspace, 256-byte aligned as cudaMalloc does. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  void* take(std::int64_t bytes) {
    void* const part = base_ && bytes ? base_ + used_ : nullptr;
    used_ += (bytes + 255) / 256 * 256;
    return part;
  }
  /// `count` elements of T.
  template <class T>
  T* take(std::int64_t count) {
    return static_cast<T*>(take(count * static_cast<std::int64_t>(sizeof(T))));
  }
  std::int64_t used() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

}  // namespace upconv3d::cuda
