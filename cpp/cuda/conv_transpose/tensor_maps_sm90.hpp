// SPDX-License-Identifier: Apache-2.0
/// \file
/// TMA descriptors of the SM90 convolution, encoded on the host: for the first call of a plan. Later ones
/// have other addresses and nothing else that is new, so their descriptors are moved (TensorMaps).
///
/// The driver's functions are looked up through the runtime, so nothing links against libcuda.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/border_slabs.hpp"
#include "core/channels.hpp"
#include "core/grad_w_plan.hpp"
#include "core/problem.hpp"

namespace upconv3d::cuda {

/// What is read of a row of an operand.
struct RowBox {
  std::int64_t channels;  // elements that there are to read; behind them TMA fills in zeros
  std::int64_t pitch;     // elements from one row to the next
};

/// Of hi, where data begin with the first hi, and of lo where they begin with the first lo.
inline RowBox row_box(const SplitRow& row) {
  return {row.extent(), row.elements()};
}

/// A descriptor of a tensor, or of a part of it that begins `offset` bytes behind its address.
struct TensorMap {
  CUtensorMap map;
  std::int64_t offset;
};

/// The tensors of a launch that its descriptors show.
enum class Mapped { kX, kXLo, kW, kWLo, kA };
using MappedAddresses = std::array<const void*, 5>;  // by Mapped

/// Descriptors in a launch's parameters, which stay where they are.
class TensorMaps {
 public:
  /// Puts `from`, a descriptor of `tensor`, into the parameters.
  void place(CUtensorMap& at, Mapped tensor, const TensorMap& from) {
    at = from.map;
    placed_.push_back({&at, tensor, from.offset});
  }

  /// Makes all of them show the tensors at `to`, of the same shapes and alignment as those at `from`.
  /// \throws std::runtime_error where the driver refuses an address.
  void move(const MappedAddresses& from, const MappedAddresses& to) const;

 private:
  struct Placed {
    CUtensorMap* map;
    Mapped tensor;
    std::int64_t offset;
  };
  std::vector<Placed> placed_;
};

/// The part of x [samples,D,H,W,row.pitch] 16 bit that a slab reads, for TMA im2col: `box_positions` output
/// positions x `box_channels` channels. Groups that were packed apart count as samples.
///
/// Within a slab a transposed convolution is a plain one of stride 1: positions i read x at window + i +
/// m*dilation. The descriptor spans just the input inside the volume (input_box), so that a slab cut off at a
/// border reads nothing out of bounds, which costs im2col extra cycles; its corners make the bounding box
/// hold the slab's positions of every sample, which im2col walks one after the other. A plain convolution's
/// stride is that of the walk, which begins at a coordinate in inputs.
///
/// \param shares_taps the loads serve all taps along the height, see input_box
TensorMap encode_slab_input(const Problem& problem, const Slab& slab, DType operand, const void* x,
                            std::int64_t samples, const RowBox& row, int box_positions, int box_channels,
                            bool shares_taps = false);

/// w [T*R*S,K,operand_channels] 16 bit, read in tiles of one tap x `box_k` output channels x `box_channels`.
TensorMap encode_w(const Problem& problem, DType operand, const void* w, int box_k, int box_channels);

/// w [C,T*R*S,K] 16 bit, K a multiple of 8, read in tiles of one tap x `box_channels` input channels x
/// `box_k` output channels.
TensorMap encode_w_in_place(const Problem& problem, DType operand, const void* w, int box_k,
                            int box_channels);

/// A slab of y, every step-th position of [N,Z,P,Q,channels] of `element`, stored in tiles of `box_positions`
/// consecutive positions x `box_k` channels. The walk goes on from one sample's slab to the next one's: whole
/// tiles of one sample only.
///
/// \param fold y is taken as [N,Z,P,Q/fold,channels], which channels = fold*K makes the same memory
TensorMap encode_slab_output(const Problem& problem, const Slab& slab, DType element, std::int64_t channels,
                             void* y, int box_positions, int box_channels, int fold = 1);

/// A slab of whole planes of y [N,K,Z,P,Q] of `element`, stored in tiles of `box_positions` consecutive
/// positions x `box_k` channels. What lies beyond the slab or K is not stored.
TensorMap encode_slab_channels(const Problem& problem, const Slab& slab, DType element, void* y,
                               int box_positions, int box_k);

/// y as [N,Z*P*Q/fold,fold*K] of `element`, in boxes of `box_rows` rows of a sample x `box_k` values of each.
///
/// \param fold positions of a row, which divide Z*P*Q
TensorMap encode_output_rows(const Problem& problem, DType element, void* y, int box_rows, int box_k,
                             int fold);

/// An operand of the gradient of the weight, [N,extent...,row.pitch] 16 bit, for TMA im2col: k-blocks of
/// positions x chunks of channels.
TensorMap encode_grad_w_operand(const char* tensor, const Problem& problem, DType operand, const void* data,
                                const GradWOperand& walk, const RowBox& row);

}  // namespace upconv3d::cuda
