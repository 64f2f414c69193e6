// SPDX-License-Identifier: Apache-2.0
/// \file
/// Convolutions of one voxel per sample, as those with which voxel GANs and decoders of latent vectors begin:
/// every output is the product of the sample's channels with one tap, y [N,K*T*R*S] = x [N,C] w [C,K*T*R*S].
/// cuDNN knows that of bfloat16 and float16 in channels_last_3d alone.
#pragma once

#include <optional>

#include "core/problem.hpp"

namespace upconv3d {

/// The pointwise convolution of x [N,C,1,1,1] to K*T*R*S channels that has the same values in the same order,
/// where w and y lie in one order; or nothing where an output has no tap or a tap no output
/// (without_idle_taps), where x has more voxels or the convolution groups, or where 32 bits cannot count
/// them.
std::optional<Problem> product_of_one_voxel(const Problem& problem);

/// Whether the library plan's convolution becomes such a product, without idle taps. Not where it adds a bias
/// to what it returns.
bool is_one_voxel_product(const Problem& problem);

}  // namespace upconv3d
