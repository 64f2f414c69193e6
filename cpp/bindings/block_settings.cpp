// SPDX-License-Identifier: Apache-2.0
#include "bindings/block_settings.hpp"

#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "core/text.hpp"

namespace upconv3d::bindings {
namespace {

// An entry takes 1 KB, here and in Python. Networks have tens of blocks; settings that never repeat, as with
// an eps that is annealed, shall not fill memory.
constexpr std::size_t kMaxRemembered = 4096;

struct Remembered {
  std::mutex mutex;
  std::deque<BlockSettings> settings;  // entries stay where they are as it grows
};

Remembered& remembered() {
  static Remembered all;
  return all;
}

}  // namespace

std::optional<std::int64_t> remember_settings(BlockSettings settings) {
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.settings.size() >= kMaxRemembered) return std::nullopt;
  all.settings.push_back(std::move(settings));
  return static_cast<std::int64_t>(all.settings.size()) - 1;
}

const BlockSettings& remembered_settings(std::int64_t number) {
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto count = static_cast<std::int64_t>(all.settings.size());
  if (number < 0 || number >= count) {
    throw std::out_of_range(
        concat("upconv3d: a block's settings must be a number that this process gave out; got ", number,
               " of ", count, ". Call the public operator instead."));
  }
  return all.settings[static_cast<std::size_t>(number)];
}

}  // namespace upconv3d::bindings
