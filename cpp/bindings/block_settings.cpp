// SPDX-License-Identifier: Apache-2.0
#include "bindings/block_settings.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <deque>
#include <map>
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
  mutable std::mutex mutex;
  std::deque<BlockSettings> settings;  // entries stay where they are as it grows
  std::map<BlockNumbers, std::int64_t> numbers;

  std::optional<std::int64_t> find(const BlockNumbers& wanted) const {
    const auto known = numbers.find(wanted);
    return known == numbers.end() ? std::nullopt : std::optional(known->second);
  }
};

Remembered& remembered() {
  static Remembered all;
  return all;
}

/// Nothing for another tail, and for lists that are no triples, which the op refuses.
std::optional<BlockNumbers> numbers_of(const BlockSettings& s) {
  const bool is_known = s.precision == "tf32" || s.precision == "ieee";
  if (!is_known || !s.tail.is_relu_group_norm() || s.spares_host || s.casts_parameters) return std::nullopt;
  BlockNumbers numbers = {
      {}, s.groups, s.num_groups, std::bit_cast<std::uint64_t>(s.eps), s.precision == "tf32"};
  auto* next = numbers.triples.begin();
  for (const auto* const triple : {&s.stride, &s.padding, &s.output_padding, &s.dilation}) {
    if (triple->size() != 3) return std::nullopt;
    next = std::copy(triple->begin(), triple->end(), next);
  }
  return numbers;
}

}  // namespace

std::optional<std::int64_t> remember_settings(BlockSettings settings) {
  const std::optional<BlockNumbers> numbers = numbers_of(settings);
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (numbers) {
    if (const auto known = all.find(*numbers)) return known;
  }
  if (all.settings.size() >= kMaxRemembered) return std::nullopt;
  const auto number = static_cast<std::int64_t>(all.settings.size());
  all.settings.push_back(std::move(settings));
  if (numbers) all.numbers.emplace(*numbers, number);
  return number;
}

std::optional<std::int64_t> number_of(const BlockNumbers& numbers) {
  const Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.find(numbers);
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
