// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the launch of a plan's convolution leaves to the next one of the same plan.
///
/// A launch's parameters follow from problem and plan, but for the addresses of its tensors. Working them out
/// takes microseconds, of which a small block has few.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace upconv3d {

/// A launch that can be repeated with other addresses; what it is, its launcher knows.
class RememberedLaunch {
 public:
  virtual ~RememberedLaunch() = default;
};

/// The launch that was last made of one plan, for one device. Safe to use from several threads.
class LaunchMemo {
 public:
  /// Calls run(launch) with the Launch of the time before, or with make() where there is none yet, or where
  /// another thread is using it. A launch that fails is forgotten.
  ///
  /// \param memo   null: every launch is made anew
  /// \tparam Launch a RememberedLaunch that run() leaves fit for another run()
  template <class Launch, class Make, class Run>
  static void run(LaunchMemo* memo, const Make& make, const Run& run) {
    std::unique_lock<std::mutex> lock;
    if (memo) lock = std::unique_lock<std::mutex>(memo->mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      run(*make());
      return;
    }
    std::unique_ptr<RememberedLaunch> held = std::move(memo->held_);
    if (auto* const known = dynamic_cast<Launch*>(held.get())) {
      run(*known);
    } else {
      std::unique_ptr<Launch> made = make();
      run(*made);
      held = std::move(made);
    }
    memo->held_ = std::move(held);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<RememberedLaunch> held_;
};

}  // namespace upconv3d
