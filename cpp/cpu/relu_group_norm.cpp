// SPDX-License-Identifier: Apache-2.0
/// \file
/// relu_group_norm, in three stages like its sibling on the GPU: moments per tile, finalize, normalize.
///
/// Tiles are cut by the shape alone and merged in a fixed order by Chan, Golub & LeVeque (1979), so the
/// result is the same bits for any number of threads. A tile's mean is found first, its M2 from the
/// deviations: the tile is in cache for that second look, and |mean| >> std costs no accuracy.
#include "cpu/relu_group_norm.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/tile_kernels.hpp"

namespace upconv3d::cpu {
namespace {

/// Elements that one thread handles sooner than it wakes another: PyTorch's own at::internal::GRAIN_SIZE.
constexpr std::int64_t kSerialElements = 32768;

/// Elements of a tile: 16-64 kB, so that a tile's second read finds it in the first or second level cache.
constexpr std::int64_t kTileElements = 8192;

/// A tile of columns has at least this many positions, so that what is done once per tile and channel stays
/// a few percent of what is done per element.
constexpr std::int64_t kMinTilePositions = 32;

/// Columns are widened to several positions side by side up to this width, where loop overhead has vanished.
constexpr std::int64_t kColumnWidth = 256;

/// Blocks in which layouts are exchanged hold all channels up to kBlockChannels, which makes the NDHWC side
/// one stream, and at least kBlockPositions, which makes runs of 2-8 whole cache lines of each channel.
/// 64-512 kB: within the second level cache.
constexpr std::int64_t kBlockElements = 32768;
constexpr std::int64_t kBlockChannels = 1024;
constexpr std::int64_t kBlockPositions = 64;

/// Elements added to the stride inside a block, one cache line in 16 bit: without them a column of a block
/// falls into a few sets of the first level cache.
constexpr std::int64_t kBlockPad = 32;

/// Blocks up to this size live on the stack.
constexpr std::int64_t kInlineBlock = 4096;

/// Bytes per core that stay cached between the moments and the normalize stage: the second level cache of
/// current server cores is 1-2 MiB, and the output needs its share.
constexpr std::int64_t kCachedBytes = std::int64_t{1} << 19;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Scratch of `count` values, uninitialized; small ones live in the object and cost no allocation.
template <class V, std::size_t kInline>
class Scratch {
 public:
  explicit Scratch(std::int64_t count) {
    if (count > static_cast<std::int64_t>(kInline)) {
      heap_ = std::make_unique_for_overwrite<V[]>(static_cast<std::size_t>(count));
    }
  }
  V* data() { return heap_ ? heap_.get() : inline_; }

 private:
  std::unique_ptr<V[]> heap_;
  V inline_[kInline];
};

struct Moments {
  double count, mean, m2;
};

/// Chan, Golub & LeVeque: moments of the union.
Moments merge(const Moments& a, const Moments& b) {
  if (a.count == 0.0) return b;
  const double count = a.count + b.count;
  const double delta = b.mean - a.mean;
  const double share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

/// Moments from a rough mean and the deviations from it.
Moments moments_about(std::int64_t count, double rough_mean, const Deviation& deviation) {
  const double n = static_cast<double>(count);
  const double correction = deviation.sum / n;
  // A NaN must stay one, hence no std::max, whose result depends on the order of its arguments.
  const double m2 = deviation.sum_squares - deviation.sum * correction;
  return {n, rough_mean + correction, m2 < 0.0 ? 0.0 : m2};
}

/// How the work is cut. A unit is what finalize sees at once: a group where both layouts are NCDHW (its
/// memory is contiguous), else a sample.
struct Cut {
  std::int64_t units = 0;
  std::int64_t unit_channels = 0;
  std::int64_t unit_groups = 0;
  std::int64_t group_channels = 0;
  std::int64_t positions = 0;
  std::int64_t unit_elements = 0;
  std::int64_t packed = 1;           // NDHWC input: positions side by side that form one row of columns
  std::int64_t width = 0;            // entries of a unit's tables: unit_channels * packed
  std::int64_t tile = 0;             // NCDHW input: elements of a group per tile. NDHWC: positions per tile
  std::int64_t tiles = 0;            // per group (NCDHW) or per unit (NDHWC)
  std::int64_t moment_items = 0;     // work items of a unit in the moments stage
  std::int64_t block_channels = 0;   // layouts differ: extent of a block
  std::int64_t block_positions = 0;  // the same
  std::int64_t normalize_items = 0;  // work items of a unit in the normalize stage
  std::int64_t wave = 1;             // units between whose two stages the data are expected to stay cached
};

std::int64_t packed_positions(std::int64_t channels) {
  // A width that is a multiple of 16 leaves no remainder behind any vector length; beyond 1024 columns the
  // tables would crowd the first level cache.
  const std::int64_t whole = 16 / std::gcd(channels, std::int64_t{16});
  const std::int64_t least = ceil_div(kColumnWidth, channels);
  const std::int64_t packed = ceil_div(least, whole) * whole;
  return packed * channels <= 1024 ? packed : least;
}

Cut make_cut(const ReluGroupNormParams& p) {
  const bool rows = p.c_layout == Layout::kNCDHW;
  const bool same = p.c_layout == p.y_layout;
  Cut cut;
  cut.group_channels = p.k / p.num_groups;
  cut.unit_groups = rows && same ? 1 : p.num_groups;
  cut.unit_channels = cut.unit_groups * cut.group_channels;
  cut.units = p.n * (p.k / cut.unit_channels);
  cut.positions = p.positions;
  cut.unit_elements = cut.unit_channels * p.positions;
  cut.width = cut.unit_channels;
  if (rows) {
    cut.tile = kTileElements;
    cut.tiles = ceil_div(cut.group_channels * p.positions, cut.tile);
    cut.moment_items = cut.tiles * cut.unit_groups;
  } else {
    cut.packed = packed_positions(p.k);
    cut.width = p.k * cut.packed;
    const std::int64_t wanted = std::max(kMinTilePositions, kTileElements / p.k);
    cut.tile = ceil_div(wanted, cut.packed) * cut.packed;
    cut.tiles = ceil_div(p.positions, cut.tile);
    cut.moment_items = cut.tiles;
  }
  cut.normalize_items = cut.moment_items;
  if (!same) {
    cut.block_channels = std::min(p.k, kBlockChannels);
    const std::int64_t wanted = std::max(kBlockPositions, kBlockElements / cut.block_channels);
    cut.block_positions = std::min(p.positions, ceil_div(wanted, cut.packed) * cut.packed);
    cut.normalize_items = ceil_div(p.positions, cut.block_positions);
  }
  static const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t unit_bytes = std::max<std::int64_t>(1, cut.unit_elements * size_of(p.dtype));
  cut.wave = std::clamp<std::int64_t>(kCachedBytes * cores / unit_bytes, 1, cut.units);
  return cut;
}

template <class T>
class ReluGroupNorm {
  using A = compute_t<T>;

 public:
  explicit ReluGroupNorm(const ReluGroupNormParams& params)
      : p_(params),
        cut_(make_cut(params)),
        kernels_(tile_kernels<T>()),
        c_(static_cast<const T*>(params.c)),
        y_(static_cast<T*>(params.y)),
        columns_(params.c_layout == Layout::kNDHWC),
        bias_(columns_ ? cut_.width : params.k),
        partials_(cut_.wave * cut_.moment_items * (columns_ ? cut_.unit_groups : 1)),
        tables_(cut_.wave * 3 * cut_.width) {
    read_channels(params.bias, 0.0, bias_.data(), params.k);
    if (columns_) repeat(bias_.data(), params.k, cut_.width);
  }

  void run(const ParallelFor& parallel_for) {
    const bool same = p_.c_layout == p_.y_layout;
    for (wave_begin_ = 0; wave_begin_ < cut_.units; wave_begin_ += cut_.wave) {
      const std::int64_t units = std::min(cut_.wave, cut_.units - wave_begin_);
      const bool serial = units * cut_.unit_elements < kSerialElements;
      split(serial, units * cut_.moment_items, parallel_for, [this](std::int64_t begin, std::int64_t end) {
        columns_ ? column_moments(begin, end) : row_moments(begin, end);
      });
      for (std::int64_t unit = 0; unit < units; ++unit) finalize(unit);
      split(serial, units * cut_.normalize_items, parallel_for,
            [this, same](std::int64_t begin, std::int64_t end) {
              if (!same) {
                columns_ ? normalize_columns_to_rows(begin, end) : normalize_rows_to_columns(begin, end);
              } else {
                columns_ ? normalize_columns(begin, end) : normalize_rows(begin, end);
              }
            });
    }
  }

 private:
  template <class Body>
  static void split(bool serial, std::int64_t items, const ParallelFor& parallel_for, const Body& body) {
    if (serial) {
      body(0, items);
    } else {
      parallel_for(items, body);
    }
  }

  /// out [count] A from values [count] T, or `absent` where values is null.
  void read_channels(const void* values, double absent, A* out, std::int64_t count) const {
    if (values == nullptr) {
      std::fill_n(out, count, static_cast<A>(absent));
    } else {
      kernels_.convert(static_cast<const T*>(values), out, count);
    }
  }

  /// Repeats the first `period` entries of values [count] A.
  static void repeat(A* values, std::int64_t period, std::int64_t count) {
    for (std::int64_t i = period; i < count; ++i) values[i] = values[i - period];
  }

  std::int64_t first_channel(std::int64_t unit) const {
    return (wave_begin_ + unit) % (p_.k / cut_.unit_channels) * cut_.unit_channels;
  }

  std::int64_t offset(std::int64_t unit) const { return (wave_begin_ + unit) * cut_.unit_elements; }

  void row_moments(std::int64_t item_begin, std::int64_t item_end) {
    const std::int64_t group_elements = cut_.group_channels * cut_.positions;
    // Without a bias, channels need not be told apart.
    const std::int64_t row = p_.bias == nullptr ? cut_.unit_elements : cut_.positions;
    for (std::int64_t item = item_begin; item < item_end; ++item) {
      const std::int64_t unit = item / cut_.moment_items;
      const std::int64_t group = item % cut_.moment_items / cut_.tiles;
      const std::int64_t begin = group * group_elements + item % cut_.tiles * cut_.tile;
      const Run run = {begin, std::min(begin + cut_.tile, (group + 1) * group_elements), row};
      const T* c = c_ + offset(unit);
      const A* bias = bias_.data() + first_channel(unit);
      const double sum = kernels_.row_sum(c, run, bias);
      const A rough = static_cast<A>(sum / static_cast<double>(run.end - run.begin));
      const Deviation deviation = kernels_.row_deviation(c, run, bias, rough);
      partials_.data()[item] = moments_about(run.end - run.begin, static_cast<double>(rough), deviation);
    }
  }

  void column_moments(std::int64_t item_begin, std::int64_t item_end) {
    const std::int64_t width = cut_.width;
    Scratch<A, 3 * 1024> scratch(3 * width);
    A* first = scratch.data();  // column sums, then deviations
    A* second = first + width;  // squares
    A* rough = second + width;  // rough mean of each column's group
    for (std::int64_t item = item_begin; item < item_end; ++item) {
      const std::int64_t unit = item / cut_.moment_items;
      const std::int64_t begin = item % cut_.tiles * cut_.tile;
      const std::int64_t positions = std::min(cut_.tile, cut_.positions - begin);
      const T* c = c_ + offset(unit) + begin * p_.k;
      const std::int64_t rows = positions / cut_.packed;
      const std::int64_t rest = positions % cut_.packed;
      column_moments_of_tile(c, {rows, width}, first, second, rough, item, rows * cut_.packed, false);
      if (rest > 0) {
        column_moments_of_tile(c + rows * width, {1, rest * p_.k}, first, second, rough, item, rest,
                               rows > 0);
      }
    }
  }

  void column_moments_of_tile(const T* c, TileExtent extent, A* first, A* second, A* rough, std::int64_t item,
                              std::int64_t positions, bool merge_into) {
    if (positions == 0) return;
    Moments* out = partials_.data() + item * cut_.unit_groups;
    const double count = static_cast<double>(cut_.group_channels * positions);
    kernels_.column_sum(c, extent, bias_.data(), first);
    fold(first, extent.width);
    for (std::int64_t group = 0; group < cut_.unit_groups; ++group) {
      const std::int64_t channel = group * cut_.group_channels;
      const A mean = static_cast<A>(sum_of(first + channel, cut_.group_channels) / count);
      std::fill_n(rough + channel, cut_.group_channels, mean);
    }
    repeat(rough, p_.k, extent.width);
    kernels_.column_deviation(c, extent, bias_.data(), rough, first, second);
    fold(first, extent.width);
    fold(second, extent.width);
    for (std::int64_t group = 0; group < cut_.unit_groups; ++group) {
      const std::int64_t channel = group * cut_.group_channels;
      const Deviation total = {sum_of(first + channel, cut_.group_channels),
                               sum_of(second + channel, cut_.group_channels)};
      const Moments moments =
          moments_about(cut_.group_channels * positions, static_cast<double>(rough[channel]), total);
      out[group] = merge_into ? merge(out[group], moments) : moments;
    }
  }

  /// Adds the columns of the positions that lie side by side: values [width] A to values [K] A.
  void fold(A* values, std::int64_t width) const {
    for (std::int64_t i = p_.k; i < width; i += p_.k) {
      for (std::int64_t channel = 0; channel < p_.k; ++channel) values[channel] += values[i + channel];
    }
  }

  static double sum_of(const A* values, std::int64_t count) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
    return sum;
  }

  /// tables_ of a unit: mean, scale, shift, [width] A each.
  Affine<A> table(std::int64_t unit) {
    A* mean = tables_.data() + unit * 3 * cut_.width;
    return {bias_.data() + first_channel(unit), mean, mean + cut_.width, mean + 2 * cut_.width};
  }

  void finalize(std::int64_t unit) {
    A* mean = tables_.data() + unit * 3 * cut_.width;
    A* scale = mean + cut_.width;
    A* shift = scale + cut_.width;
    const std::int64_t first = first_channel(unit);
    const T* gamma = static_cast<const T*>(p_.gamma);
    const T* beta = static_cast<const T*>(p_.beta);
    read_channels(gamma == nullptr ? nullptr : gamma + first, 1.0, scale, cut_.unit_channels);
    read_channels(beta == nullptr ? nullptr : beta + first, 0.0, shift, cut_.unit_channels);
    for (std::int64_t group = 0; group < cut_.unit_groups; ++group) {
      const Moments total = merge_tiles(unit, group);
      const double rstd = 1.0 / std::sqrt(total.m2 / total.count + p_.eps);
      const A rounded = static_cast<A>(total.mean);
      const double lost = total.mean - static_cast<double>(rounded);
      for (std::int64_t i = group * cut_.group_channels; i < (group + 1) * cut_.group_channels; ++i) {
        const double factor = rstd * static_cast<double>(scale[i]);
        mean[i] = rounded;
        scale[i] = static_cast<A>(factor);
        shift[i] = static_cast<A>(static_cast<double>(shift[i]) - lost * factor);
      }
    }
    repeat(mean, cut_.unit_channels, cut_.width);
    repeat(scale, cut_.unit_channels, cut_.width);
    repeat(shift, cut_.unit_channels, cut_.width);
  }

  Moments merge_tiles(std::int64_t unit, std::int64_t group) {
    const Moments* parts = partials_.data() + unit * cut_.moment_items * (columns_ ? cut_.unit_groups : 1);
    const std::int64_t start = columns_ ? group : group * cut_.tiles;
    const std::int64_t step = columns_ ? cut_.unit_groups : 1;
    Moments total = {0.0, 0.0, 0.0};
    for (std::int64_t tile = 0; tile < cut_.tiles; ++tile) total = merge(total, parts[start + tile * step]);
    return total;
  }

  // The normalize stages walk backwards: what the moments stage read last is still cached.

  void normalize_rows(std::int64_t item_begin, std::int64_t item_end) {
    for (std::int64_t item = item_end; item-- > item_begin;) {
      const std::int64_t unit = item / cut_.normalize_items;
      const std::int64_t begin = item % cut_.normalize_items * cut_.tile;
      const std::int64_t end = std::min(begin + cut_.tile, cut_.unit_elements);
      kernels_.normalize_rows(c_ + offset(unit), y_ + offset(unit), {begin, end, cut_.positions},
                              table(unit));
    }
  }

  void normalize_columns(std::int64_t item_begin, std::int64_t item_end) {
    for (std::int64_t item = item_end; item-- > item_begin;) {
      const std::int64_t unit = item / cut_.normalize_items;
      const std::int64_t begin = item % cut_.normalize_items * cut_.tile;
      const std::int64_t positions = std::min(cut_.tile, cut_.positions - begin);
      const std::int64_t at = offset(unit) + begin * p_.k;
      normalize_packed(c_ + at, y_ + at, positions, table(unit));
    }
  }

  /// y [positions,K] T from c [positions,K] T, both dense.
  void normalize_packed(const T* c, T* y, std::int64_t positions, Affine<A> affine) const {
    const std::int64_t rows = positions / cut_.packed;
    const std::int64_t done = rows * cut_.width;
    kernels_.normalize_columns(c, cut_.width, y, cut_.width, {rows, cut_.width}, affine);
    kernels_.normalize_columns(c + done, 0, y + done, 0, {1, positions * p_.k - done}, affine);
  }

  void normalize_columns_to_rows(std::int64_t item_begin, std::int64_t item_end) {
    Scratch<T, kInlineBlock> block((cut_.block_channels + kBlockPad) * cut_.block_positions);
    for (std::int64_t item = item_end; item-- > item_begin;) {
      const std::int64_t unit = item / cut_.normalize_items;
      const std::int64_t begin = item % cut_.normalize_items * cut_.block_positions;
      const std::int64_t positions = std::min(cut_.block_positions, cut_.positions - begin);
      const T* c = c_ + offset(unit) + begin * p_.k;
      T* y = y_ + offset(unit) + begin;
      for (std::int64_t k = 0; k < p_.k; k += cut_.block_channels) {
        const std::int64_t channels = std::min(cut_.block_channels, p_.k - k);
        std::int64_t stride = channels;
        if (p_.k < kBlockPad) {
          normalize_packed(c, block.data(), positions, table(unit));
        } else {
          stride += kBlockPad;
          kernels_.normalize_columns(c + k, p_.k, block.data(), stride, {positions, channels},
                                     table(unit).from(k));
        }
        kernels_.transpose(block.data(), stride, y + k * cut_.positions, cut_.positions,
                           {positions, channels});
      }
    }
  }

  void normalize_rows_to_columns(std::int64_t item_begin, std::int64_t item_end) {
    Scratch<T, kInlineBlock> block(cut_.block_channels * (cut_.block_positions + kBlockPad));
    for (std::int64_t item = item_end; item-- > item_begin;) {
      const std::int64_t unit = item / cut_.normalize_items;
      const std::int64_t begin = item % cut_.normalize_items * cut_.block_positions;
      const std::int64_t positions = std::min(cut_.block_positions, cut_.positions - begin);
      const std::int64_t stride = positions + kBlockPad;
      const T* c = c_ + offset(unit) + begin;
      T* y = y_ + offset(unit) + begin * p_.k;
      for (std::int64_t k = 0; k < p_.k; k += cut_.block_channels) {
        const std::int64_t channels = std::min(cut_.block_channels, p_.k - k);
        for (std::int64_t i = 0; i < channels; ++i) {
          kernels_.normalize_rows(c + (k + i) * cut_.positions, block.data() + i * stride,
                                  {0, positions, positions}, table(unit).from(k + i));
        }
        kernels_.transpose(block.data(), stride, y + k, p_.k, {channels, positions});
      }
    }
  }

  const ReluGroupNormParams& p_;
  const Cut cut_;
  const TileKernels<T>& kernels_;
  const T* c_;
  T* y_;
  const bool columns_;             // c is NDHWC
  Scratch<A, 1024> bias_;          // [K], or [width] for columns
  Scratch<Moments, 64> partials_;  // [wave, moment_items] or [wave, tiles, G]
  Scratch<A, 1024> tables_;        // [wave, 3, width]
  std::int64_t wave_begin_ = 0;
};

}  // namespace

void relu_group_norm(const ReluGroupNormParams& asked, const ParallelFor& parallel_for) {
  ReluGroupNormParams params = asked;
  if (params.num_groups < 1 || params.k % params.num_groups != 0) {
    throw std::invalid_argument("upconv3d: num_groups must divide the output channels; got num_groups=" +
                                std::to_string(params.num_groups) + ", channels=" + std::to_string(params.k) +
                                ". Pass a divisor of the channels.");
  }
  if (params.n == 0 || params.k == 0 || params.positions == 0) return;
  if (params.y == params.c && params.c_layout != params.y_layout) {
    throw std::invalid_argument(
        "upconv3d: relu_group_norm in place needs equal layouts; got c and y at one address with " +
        std::string(name(params.c_layout)) + " and " + name(params.y_layout) + ". Give y memory of its own.");
  }
  // A single channel lies the same in both layouts, and a row's sums are the more exact ones.
  if (params.k == 1) params.c_layout = params.y_layout = Layout::kNCDHW;
  switch (params.dtype) {
    case DType::kFloat32:
      return ReluGroupNorm<float>(params).run(parallel_for);
    case DType::kBFloat16:
      return ReluGroupNorm<BFloat16>(params).run(parallel_for);
    case DType::kFloat16:
      return ReluGroupNorm<Float16>(params).run(parallel_for);
    case DType::kFloat64:
      return ReluGroupNorm<double>(params).run(parallel_for);
  }
}

}  // namespace upconv3d::cpu
