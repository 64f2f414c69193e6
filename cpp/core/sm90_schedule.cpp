// SPDX-License-Identifier: Apache-2.0
#include "core/sm90_schedule.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/im2col_limits.hpp"
#include "core/index_math.hpp"
#include "core/phase_pairs.hpp"
#include "core/ring_shape.hpp"
#include "core/slab_launches.hpp"

namespace upconv3d {
namespace {

// Times in ns and rates of an H200, fitted to 170 blocks of bfloat16 channels_last_3d, each on the three
// tiles and with every cut: perf/NOTES.md, "Tiles and cuts".

/// Of tiles that all have the same taps.
struct TileRun {
  std::int64_t tiles;  // of a sample
  double ns;           // of one
};

/// Loads of x that may be on their way at once.
/// \param shared_rows positions of the longest load beyond a tile's; 0 where each serves one tap
double loads_in_flight(const ConvInstance& instance, std::int64_t shared_rows) {
  const int row_bytes = 2 * instance.block_inputs, splits = instance.products == 1 ? 1 : 2;
  const RingShape rings = ring_shape(
      {.bytes = ring_bytes(instance.block_channels, instance.block_positions, instance.stored_bits),
       .x_rows = instance.block_positions + static_cast<int>(shared_rows),
       .shares_taps = shared_rows > 0,
       .row_bytes = row_bytes,
       .w_bytes = instance.block_channels * row_bytes,
       .splits = splits});
  return rings.x_units / splits;
}

/// Estimated time of one of a tile's k-blocks: what the slowest of the tensor cores, shared memory, L2 and
/// the wait for a load takes.
///
/// \param block_channels rows that are multiplied
/// \param in_flight loads of x, of all slabs of a launch
/// \param active blocks that load at the same time
double k_block_ns(const ConvInstance& instance, double block_channels, const SharedLoads& loads,
                  double in_flight, double active) {
  constexpr double kMacsPerNs = 3500;        // of 16 bit, of one SM
  constexpr double kSharedBytesPerNs = 173;  // of one SM
  constexpr double kL2BytesPerNs = 8600, kL2BytesPerNsOfSM = 90;
  // Of w, which all blocks read at about the same time, a part.
  constexpr double kShareOfW = 0.4;
  constexpr double kLoad = 1360;  // from asking for x until it is there, beside others that do
  constexpr double kRow = 1.15;   // of TMA, for a row of either operand
  const double bc = block_channels, bp = instance.block_positions;
  const double row_bytes = instance.block_inputs * 2.0;
  const double copies = instance.products == 1 ? 1 : 2, taps = static_cast<double>(loads.taps);
  const double x_rows = (bp + (taps - 1) * static_cast<double>(loads.rows)) / taps;
  const double multiply = bc * bp * instance.block_inputs * instance.products / kMacsPerNs;
  const double warpgroups = bc < instance.block_channels ? 1 : 2;
  const double read =
      warpgroups * (64 + static_cast<double>(warpgroup_positions(instance))) * instance.products;
  const double shared = ((bc + x_rows) * copies + read) * row_bytes / kSharedBytesPerNs;
  const double loaded = (kShareOfW * bc + x_rows) * row_bytes * copies;
  const double l2 = loaded * std::max(1 / kL2BytesPerNsOfSM, active / kL2BytesPerNs);
  const double wait = kLoad / (in_flight * taps);
  const double rows = (bc + x_rows) * copies * kRow;
  return std::max({multiply, shared, l2, wait, rows});
}

/// A slab, or a pair of them, as tiles are cut from it.
struct TileSource {
  Slab reads;
  SharedLoads loads;
  std::int64_t both = 0;    // taps that all of a tile's rows multiply,
  std::int64_t single = 0;  // and that one phase of a pair alone does
};

/// Estimated time of one of a source's tiles.
double tile_ns(const Problem& p, const ConvInstance& instance, const TileSource& from, double in_flight,
               double active) {
  constexpr double kTile = 2570;   // filling the pipeline, and handing the accumulators over
  constexpr double kLeast = 3600;  // of the epilogue of the tile before, which a tile waits for
  const auto of_taps = [&](std::int64_t taps, double channels) {
    return static_cast<double>(taps * ceil_div(group_inputs(p), instance.block_inputs)) *
           k_block_ns(instance, channels, from.loads, in_flight, active);
  };
  const double ns = kTile + of_taps(from.both, instance.block_channels) +
                    (from.single > 0 ? of_taps(from.single, instance.block_channels / 2.0) : 0);
  return p.operation == Operation::kConvTranspose ? std::max(ns, kLeast) : ns;
}

/// What the tiles of a cut are cut from.
std::vector<TileSource> tile_sources(const Problem& p, const Cut& cut, const std::vector<Slab>& slabs) {
  std::vector<TileSource> sources;
  if (!cut.pair_phases) {
    for (const Slab& slab : slabs) {
      const SharedLoads loads = cut.share_taps ? shared_loads(p, slab) : SharedLoads{};
      sources.push_back({slab, loads, slab.tap_count(), 0});
    }
    return sources;
  }
  const PhasePairs paired = pair_phases(p);
  for (const PhasePair& pair : paired.pairs) {
    const SharedLoads loads = cut.share_taps ? shared_loads_of_pair(p, paired, pair) : SharedLoads{};
    const std::int64_t all = pair.reads.tap_count();
    const std::int64_t both = pair.phases[0].tap_count() + pair.phases[1].tap_count() - all;
    sources.push_back({pair.reads, loads, both, all - both});
  }
  return sources;
}

/// When the last of the tiles is done that `blocks` take in this order, each as soon as it is free.
double makespan(const std::vector<TileRun>& runs, std::int64_t samples, std::int64_t blocks) {
  // Of more tiles, the order decides about less of the whole than the estimate is off.
  constexpr std::int64_t kMostHandedOut = 2048;
  std::int64_t tiles = 0;
  double sum = 0, longest = 0;
  for (const TileRun& run : runs) {
    tiles += run.tiles;
    sum += static_cast<double>(run.tiles) * run.ns;
    if (run.tiles > 0) longest = std::max(longest, run.ns);
  }
  tiles = saturating_product(tiles, samples);
  if (tiles <= blocks) return longest;
  if (tiles > kMostHandedOut)
    return sum * static_cast<double>(samples) / static_cast<double>(blocks) + longest / 2;
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at(
      std::greater<>{}, std::vector<double>(static_cast<std::size_t>(blocks), 0.0));
  double end = 0;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    for (const TileRun& run : runs) {
      for (std::int64_t tile = 0; tile < run.tiles; ++tile) {
        const double done = free_at.top() + run.ns;
        free_at.pop();
        free_at.push(done);
        end = std::max(end, done);
      }
    }
  }
  return end;
}

/// What launches some of whose tiles share loads of x, and some do not, took of the estimate.
///
/// \param slabs  of a launch
/// \param phases slabs of the output as it is
double seen_of_mixed(const Problem& p, const ConvInstance& instance, std::size_t slabs, std::size_t phases) {
  // On tiles of 128 x 256, whose rings hold two loads: half of the phases sharing, and phases cut for it,
  // which then have no windows any more and find less of x in L2. (Of tiles of 64 channels, four: there it
  // gains.)
  constexpr double kMixed = 1.04, kMixedPhases = 1.08, kCutPhases = 1.11;
  if (p.stride == Extent3{1, 1, 1} || instance.block_channels * instance.block_positions < 128 * 256)
    return kMixed;
  return slabs > phases ? kCutPhases : kMixedPhases;
}

/// What pairs of phases took of the estimate, along the depth and along the height, by 170 times beside those
/// of tiles of 64 channels. Phases of one tap took 0.8 to 1.5 times that: by more than most, so that other
/// plans, which were quicker as a rule, keep them.
double seen_of_pairs(const Problem& p) {
  constexpr double kPlanes = 1.04, kRows = 1.12, kOneTap = 1.3;
  const PhasePairs paired = pair_phases(p);
  const bool one_tap = !paired.pairs.empty() && paired.pairs.front().reads.tap_count() == 1;
  return (paired.axis == 0 ? kPlanes : kRows) * (one_tap ? kOneTap : 1);
}

/// Estimated time of the convolution's launches.
double scheduled_ns(const Problem& p, const ConvInstance& instance, const std::vector<Slab>& slabs,
                    const Cut& cut, int sm_count) {
  constexpr double kLaunch = 4000;  // between two
  const std::int64_t blocks = std::max(sm_count, 1);
  const std::int64_t k_tiles = channel_tiles(p, instance.block_channels);
  const int launches = slab_launches(slabs.size());
  const std::size_t phases = border_slabs(p, 0).size();
  double ns = (launches - 1) * kLaunch;
  for (int launch = 0; launch < launches; ++launch) {
    const std::vector<Slab> own = slabs_of_launch(slabs, launch, launches);
    const std::vector<TileSource> sources = tile_sources(p, cut, own);
    std::int64_t shared_rows = 0, sharing = 0, of_sample = 0;
    for (const TileSource& from : sources) {
      shared_rows = std::max(shared_rows, (from.loads.taps - 1) * from.loads.rows);
      sharing += from.loads.taps > 1 ? 1 : 0;
      of_sample += ceil_div(from.reads.positions(), instance.block_positions);
    }
    const double in_flight = loads_in_flight(instance, shared_rows);
    const std::int64_t tiles = saturating_product(p.n, of_sample, k_tiles);
    if (tiles > kMaxSm90Tiles) return std::numeric_limits<double>::infinity();
    const auto active = static_cast<double>(std::min(tiles, blocks));
    std::vector<TileRun> runs;
    for (const TileSource& from : sources) {
      runs.push_back({ceil_div(from.reads.positions(), instance.block_positions) * k_tiles,
                      tile_ns(p, instance, from, in_flight, active)});
    }
    // What such blocks took of their estimates: tiles of 64 channels less, those of 128 x 128 more.
    constexpr double kNarrow = 0.92, kSquare = 1.05;
    const double seen = cut.pair_phases                   ? seen_of_pairs(p)
                        : instance.block_channels == 64   ? kNarrow
                        : instance.block_positions == 128 ? kSquare
                                                          : 1;
    const bool mixed = sharing > 0 && sharing < static_cast<std::int64_t>(sources.size());
    ns += makespan(runs, p.n, blocks) * seen * (mixed ? seen_of_mixed(p, instance, own.size(), phases) : 1);
  }
  return ns;
}

/// A cut that the kernel can run, and its slabs.
struct CutSlabs {
  Cut cut;
  std::vector<Slab> slabs;
};

/// The output as it is, then every cut of it.
std::vector<CutSlabs> possible_cuts(const Problem& p) {
  std::vector<CutSlabs> cuts = {{Cut{}, border_slabs(p, 0)}};
  // Phases that take several launches are not cut.
  if (cuts.front().slabs.size() > std::size_t{kMaxSlabs}) return cuts;
  const auto add = [&](const Cut& cut, std::vector<Slab> slabs) {
    const bool cuts_any = slabs.size() > 1 || cut.share_taps;
    if (cuts_any && slabs.size() <= std::size_t{kMaxSlabs} && within_im2col(p, slabs, cut.share_taps))
      cuts.push_back({cut, std::move(slabs)});
  };
  for (int axes = 1; axes <= 3; ++axes) add({axes, false}, border_slabs(p, axes));
  if (p.dilation == Extent3{1, 1, 1}) add({0, true}, tap_sharing_slabs(p));
  return cuts;
}

bool takes_pairs(const ConvInstance& instance) {
  return pairs_phases(instance.block_channels, instance.block_positions, instance.block_inputs,
                      instance.products, instance.stored_bits);
}

/// Phases in pairs: each load of x for one tap, or for several where that can be.
std::vector<CutSlabs> possible_pairs(const Problem& p) {
  std::vector<CutSlabs> cuts;
  const PhasePairs paired = pair_phases(p);
  const std::vector<Slab> slabs = slabs_of_pairs(paired), reads = reads_of_pairs(paired);
  if (slabs.empty() || slabs.size() > std::size_t{kMaxSlabs}) return cuts;
  const bool shares = std::any_of(paired.pairs.begin(), paired.pairs.end(), [&](const PhasePair& pair) {
    return shared_loads_of_pair(p, paired, pair).taps > 1;
  });
  if (within_im2col(p, reads)) cuts.push_back({{0, false, true}, slabs});
  if (shares && within_im2col(p, reads, true)) cuts.push_back({{0, true, true}, slabs});
  return cuts;
}

// Descriptors of many slabs cost host time and launch parameters: a gain within the estimate's error, or of a
// convolution that takes little, is not worth them.
constexpr double kWorthwhileGain = 0.98;
constexpr double kWorthwhileNs = 20e3;

/// Of cuts, the first of which is taken unless another gains, that with the least estimated time.
Schedule cheapest_of(const Problem& p, const ConvInstance& instance, const std::vector<CutSlabs>& cuts,
                     int sm_count) {
  const CutSlabs& first = cuts.front();
  Schedule best{instance, first.cut};
  const double uncut = scheduled_ns(p, instance, first.slabs, first.cut, sm_count);
  double ns = uncut, least = kWorthwhileGain * uncut;
  for (auto other = cuts.begin() + 1; other != cuts.end() && uncut >= kWorthwhileNs; ++other) {
    // With three products, two loads of that many rows leave no room for w.
    if (other->cut.share_taps && instance.products != 1) continue;
    const double found = scheduled_ns(p, instance, other->slabs, other->cut, sm_count);
    if (found < least) best.cut = other->cut, ns = least = found;
  }
  best.multiply_ms = ns * 1e-6;
  return best;
}

/// Whether variants take the same operands and store the same values, by k-blocks of as many input channels.
bool is_alternative(const ConvInstance& instance, const ConvInstance& base) {
  return instance.compiled && instance.arch == base.arch && !instance.twice && !instance.held &&
         instance.operand == base.operand && instance.products == base.products &&
         instance.output == base.output && instance.stored_bits == base.stored_bits &&
         instance.block_inputs == base.block_inputs;
}

/// `apart`, or phases in pairs where these gain.
Schedule or_in_pairs(const Problem& p, const Schedule& apart, const std::vector<ConvInstance>& instances,
                     int sm_count) {
  Schedule best = apart;
  double least = kWorthwhileGain * apart.multiply_ms * 1e6;
  if (apart.multiply_ms * 1e6 < kWorthwhileNs) return best;
  const std::vector<CutSlabs> cuts = possible_pairs(p);
  for (const ConvInstance& instance : instances) {
    if (!is_alternative(instance, apart.instance) || !takes_pairs(instance)) continue;
    for (const CutSlabs& pairs : cuts) {
      const double ns = scheduled_ns(p, instance, pairs.slabs, pairs.cut, sm_count);
      if (ns < least) best = {instance, pairs.cut, ns * 1e-6}, least = ns;
    }
  }
  return best;
}

bool slabs_lie_in_place(const Problem& p, const std::vector<Slab>& slabs) {
  if (p.y_layout == Layout::kNDHWC) return p.k % kChannelUnit == 0;
  const Extent3 out = p.out();
  const std::int64_t chunk = 16 / size_of(p.dtype);
  return p.positions() % chunk == 0 && std::all_of(slabs.begin(), slabs.end(), [&](const Slab& slab) {
           return slab.step == Extent3{1, 1, 1} && slab.extent[1] == out[1] && slab.extent[2] == out[2] &&
                  slab.origin[0] * out[1] * out[2] % chunk == 0;
         });
}

/// Those of the cuts that store in place: none, or the output as it is and others.
std::vector<CutSlabs> cuts_in_place(const Problem& p, std::vector<CutSlabs> cuts) {
  std::erase_if(cuts, [&](const CutSlabs& cut) { return !slabs_lie_in_place(p, cut.slabs); });
  return cuts;
}

}  // namespace

double scheduled_multiply_ms(const Problem& p, const ConvInstance& instance, const Cut& cut, int sm_count) {
  return scheduled_ns(p, instance, plan_slabs(p, cut), cut, sm_count) * 1e-6;
}

Schedule cheapest_cut(const Problem& p, const ConvInstance& instance, int sm_count) {
  return cheapest_of(p, instance, possible_cuts(p), sm_count);
}

bool stores_in_place(const Problem& p, const Cut& cut) {
  return slabs_lie_in_place(p, plan_slabs(p, cut));
}

Schedule cheapest_cut_in_place(const Problem& p, const ConvInstance& instance, int sm_count) {
  const std::vector<CutSlabs> cuts = possible_cuts(p), in_place = cuts_in_place(p, cuts);
  return cheapest_of(p, instance, in_place.empty() ? cuts : in_place, sm_count);
}

Schedule cheapest_schedule(const Problem& p, const ConvInstance& base,
                           const std::vector<ConvInstance>& instances, int sm_count) {
  std::vector<CutSlabs> cuts = possible_cuts(p);
  if (!p.tail.norm) {
    std::vector<CutSlabs> in_place = cuts_in_place(p, cuts);
    if (!in_place.empty()) cuts = std::move(in_place);
  }
  Schedule best = cheapest_of(p, base, cuts, sm_count);
  if (base.products != 1) return best;
  for (const ConvInstance& instance : instances) {
    if (base.block_inputs != kBlockInputs || !is_alternative(instance, base)) continue;
    // One that counts more tiles than the kernel can takes forever.
    const Schedule other = cheapest_of(p, instance, cuts, sm_count);
    if (other.multiply_ms < best.multiply_ms) best = other;
  }
  return or_in_pairs(p, best, instances, sm_count);
}

}  // namespace upconv3d
