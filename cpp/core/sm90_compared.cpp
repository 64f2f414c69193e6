// SPDX-License-Identifier: Apache-2.0
#include "core/sm90_compared.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/im2col_limits.hpp"
#include "core/index_math.hpp"
#include "core/slab_launches.hpp"

namespace upconv3d {
namespace {

/// Estimated cycles of one of a slab's tiles: the slowest of the tensor cores, shared memory and TMA.
double tile_cycles(const Problem& p, const ConvInstance& instance, const Slab& slab, bool share_taps) {
  const double block_inputs = instance.block_inputs;
  constexpr double kMacsPerCycle = 2048;  // 16-bit tensor-core multiply-adds of one SM
  // Shared-memory bandwidth of one SM: 128 bytes a cycle, of which 0.92 were seen (one product, 128 x 256).
  constexpr double kSharedBytesPerCycle = 118;
  // Of TMA for a row of either operand: half k-blocks of 64 x 256 took 600. Whole ones have longer to wait.
  constexpr double kRowCycles = 1.9;
  // Filling the pipeline, and handing the accumulators over.
  constexpr double kTileCycles = 1500;
  // Tiles of few k-blocks took this long, in either width, 256 positions 12000 and 128 positions 13500: they
  // wait for the tile before to be stored and its moments to be taken. A little less for the smaller ones, so
  // that they win where either makes one wave.
  const double least = instance.block_positions < 256 ? 11000 : 12000;
  const double bc = instance.block_channels, bp = instance.block_positions;
  const double copies = instance.products == 1 ? 1 : 2;  // hi, or hi and lo
  const std::int64_t blocks_of_tap = ceil_div(group_inputs(p), instance.block_inputs);
  const double k_blocks = static_cast<double>(slab.tap_count() * blocks_of_tap);
  const double multiply = k_blocks * bc * bp * block_inputs * instance.products / kMacsPerCycle;
  // TMA writes a k-block once, or x once for all taps that share it; each of the two warpgroups reads its 64
  // channels and its positions per product.
  const double row_bytes = block_inputs * 2;
  double x_rows = bp;
  if (share_taps) {
    const SharedLoads shared = shared_loads(p, slab);
    const double taps = static_cast<double>(shared.taps);
    x_rows = (bp + (taps - 1) * static_cast<double>(shared.rows)) / taps;
  }
  const double written = (bc + x_rows) * row_bytes * copies;
  const double read =
      2 * (64 + static_cast<double>(warpgroup_positions(instance))) * row_bytes * instance.products;
  const double staged = 3 * bc * bp * instance.stored_bits / 8;  // to be stored and for its moments
  const double shared = (k_blocks * (written + read) + staged) / kSharedBytesPerCycle;
  const double cycles =
      kTileCycles + std::max({multiply, shared, k_blocks * (bc + x_rows) * copies * kRowCycles});
  return p.operation == Operation::kConvTranspose ? std::max(cycles, least) : cycles;
}

/// Estimated cycles of the convolution: those of block 0, which takes the first and costliest tile of every
/// wave, of each launch.
double cycles_of_slabs(const Problem& p, const ConvInstance& instance, const std::vector<Slab>& slabs,
                       bool share_taps, int sm_count) {
  const std::int64_t blocks = std::max(sm_count, 1);
  const std::int64_t k_tiles = channel_tiles(p, instance.block_channels);
  constexpr double kLaunchCycles = 7000;  // 4 us between launches
  const int launches = slab_launches(slabs.size());
  double cycles = (launches - 1) * kLaunchCycles;
  for (int launch = 0; launch < launches; ++launch) {
    std::int64_t begin = 0;
    for (const Slab& slab : slabs_of_launch(slabs, launch, launches)) {
      const std::int64_t tiles =
          saturating_product(p.n, ceil_div(slab.positions(), instance.block_positions), k_tiles);
      if (tiles > kMaxSm90Tiles - begin) return std::numeric_limits<double>::infinity();
      // Those that begin in this slab.
      const std::int64_t waves = ceil_div(begin + tiles, blocks) - ceil_div(begin, blocks);
      cycles += static_cast<double>(waves) * tile_cycles(p, instance, slab, share_taps);
      begin += tiles;
    }
  }
  return cycles;
}

}  // namespace

double compared_cycles(const Problem& p, const ConvInstance& instance, int sm_count) {
  return cycles_of_slabs(p, instance, border_slabs(p, 0), false, sm_count);
}

double compared_multiply_ms(const Problem& p, const ConvInstance& instance, int sm_count) {
  // As the comparisons had it: cuts that gain less, or of less, were not made.
  constexpr double kWorthwhileGain = 0.97;
  constexpr double kWorthwhileCycles = 50e3;
  double cycles = compared_cycles(p, instance, sm_count), least = kWorthwhileGain * cycles;
  if (cycles < kWorthwhileCycles) return cycles / kCyclesPerMs;
  for (int axes = 1; axes <= 3; ++axes) {
    const std::vector<Slab> slabs = border_slabs(p, axes);
    if (slabs.size() == 1 || slabs.size() > std::size_t{kMaxSlabs} || !within_im2col(p, slabs)) continue;
    const double cut = cycles_of_slabs(p, instance, slabs, false, sm_count);
    if (cut < least) cycles = least = cut;
  }
  return cycles / kCyclesPerMs;
}

double compared_multiply_ms(const Problem& p, const Schedule& schedule, int sm_count) {
  if (schedule.cut.pair_phases) return schedule.multiply_ms;  // slabs say nothing of their tiles
  const std::vector<Slab> slabs = plan_slabs(p, schedule.cut);
  return cycles_of_slabs(p, schedule.instance, slabs, schedule.cut.share_taps, sm_count) / kCyclesPerMs;
}

}  // namespace upconv3d
