// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the SM90 kernel that stores the convolution is run: on which tiles, and how the output is cut.
///
/// Blocks take tiles as they finish others, sample by sample, slab by slab. A launch of one or two waves is
/// as long as its last tiles, and a cut that makes some tiles cheaper gains nothing where others remain; so
/// tiles are handed out here, too. Not modelled: phases may go window by window.
#pragma once

#include <cstdint>
#include <vector>

#include "core/channels.hpp"
#include "core/cut.hpp"
#include "core/index_math.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"

namespace upconv3d {

/// Tiles, and a cut of the output.
struct Schedule {
  ConvInstance instance;
  Cut cut;
  double multiply_ms = 0.0;  // estimated time of the convolution, without what follows it
};

/// Tiles of all samples, borders left on.
inline std::int64_t tile_count(const Problem& problem, const ConvInstance& instance) {
  return saturating_product(problem.n, ceil_div(problem.positions(), instance.block_positions),
                            channel_tiles(problem, instance.block_channels));
}

/// Estimated time of the convolution on those tiles, cut like that, without what follows it.
double scheduled_multiply_ms(const Problem& problem, const ConvInstance& instance, const Cut& cut,
                             int sm_count);

/// The cut with the least estimated time; one slab unless that gains.
Schedule cheapest_cut(const Problem& problem, const ConvInstance& instance, int sm_count);

/// Whether the kernel in its linear mode can store the output where it belongs: in rows of whole 16-byte
/// chunks of channels, or of positions that no slab parts but between planes.
bool stores_in_place(const Problem& problem, const Cut& cut);

/// The best of the cuts that store in place, if there are any, else of all: unpacking costs more than cuts
/// along height and width save.
Schedule cheapest_cut_in_place(const Problem& problem, const ConvInstance& instance, int sm_count);

/// Of `base` and the variants that take the same operands and store the same values, that with the least
/// estimated time, with its cheapest cut; of a linear mode, a cut in place if there is one. Fitted to 16-bit
/// values in channels_last_3d, and taken for all others; but of three products, and of k-blocks of half the
/// input channels, base itself.
Schedule cheapest_schedule(const Problem& problem, const ConvInstance& base,
                           const std::vector<ConvInstance>& instances, int sm_count);

}  // namespace upconv3d
