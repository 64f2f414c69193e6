// SPDX-License-Identifier: Apache-2.0
#include "core/group_times.hpp"

#include <cstddef>
#include <cstdint>

#include "core/channel_share.hpp"
#include "core/channels.hpp"
#include "core/extents.hpp"
#include "core/index_math.hpp"
#include "core/sm90_compared.hpp"
#include "core/traffic.hpp"

namespace upconv3d {
namespace {

/// What a convolution costs, in us.
struct GroupCost {
  double launches;
  double per_filled_gflop;  // of channels of each group filled up to kFilled
  double per_gflop;
  double per_mb_of_x;
  double per_mb_of_y;
};

constexpr std::int64_t kFilled = 32;

/// By what reads the inputs: 16 bits, TF32, float32's accuracy; each in NDHWC, then NCDHW.
using GroupCosts = GroupCost[3][2];

constexpr GroupCosts kPointwise = {{{8, 25, 0, 0, 5.2}, {11, 0, 0, 2.5, 2.2}},
                                   {{9.7, 34, 0, 0, 0.27}, {10, 0, 45, 0.71, 1.7}},
                                   {{9.5, 19, 0, 1.9, 1.6}, {7.4, 0, 0, 1.6, 1.7}}};
constexpr GroupCosts kUnstrided = {{{33, 1, 1, 8.1, 2}, {29, 0.9, 2.8, 2.7, 1.5}},
                                   {{17, 6.3, 0, 3.5, 1}, {31, 1.2, 8.2, 2.9, 0}},
                                   {{26, 9.4, 18, 1.1, 7.9}, {24, 0.71, 38, 0.57, 14}}};
constexpr GroupCosts kStrided = {{{35, 11, 22, 12, 2.6}, {31, 8.6, 44, 6.2, 1.1}},
                                 {{38, 8, 24, 0.64, 3.9}, {22, 7.4, 17, 0, 2.8}},
                                 {{34, 15, 0, 0, 3.9}, {22, 11, 19, 0, 2.5}}};

double filled(std::int64_t channels) {
  return static_cast<double>(ceil_div(channels, kFilled) * kFilled);
}

}  // namespace

bool has_group_times(const Problem& p) {
  constexpr std::int64_t kInputs = 4, kStride = 4;
  return p.operation == Operation::kConvTranspose && p.groups > 1 && group_inputs(p) >= kInputs && p.n > 0 &&
         p.dtype != DType::kFloat64 && longest(p.stride) <= kStride && p.x_layout == p.y_layout &&
         !p.tail.has_skip && !p.tail.returns_conv;
}

bool are_quick_groups(const Problem& p) {
  constexpr std::int64_t kTaps = 4;  // along an axis, at most, of what was timed
  return p.groups > 1 && are_groups_of_cudnn(p) && p.stride == Extent3{1, 1, 1} && volume(p.kernel) > 1 &&
         longest(p.kernel) <= kTaps && !is_dilated(p) && !p.is_ieee();
}

double cudnn_groups_us(const Problem& p) {
  constexpr std::int64_t kManyTaps = 5;  // along an axis
  constexpr double kOfManyTaps = 1.5, kDilated = 1.4;
  const bool strided = p.stride != Extent3{1, 1, 1};
  const GroupCosts& costs = strided ? kStrided : volume(p.kernel) == 1 ? kPointwise : kUnstrided;
  const std::size_t kind = p.dtype != DType::kFloat32 ? 0 : p.is_ieee() ? 2 : 1;
  const GroupCost& cost = costs[kind][in_rows(p) ? 0 : 1];
  const Traffic mb(p);
  const double gflops_of_pair =
      2e-9 * static_cast<double>(p.n * p.groups) * volume_of_any(p.in) * volume_of_any(p.kernel);
  const double filled_pairs = filled(group_inputs(p)) * filled(group_outputs(p));
  const double pairs = static_cast<double>(group_inputs(p) * group_outputs(p));
  const double slower =
      (longest(p.kernel) >= kManyTaps ? kOfManyTaps : 1) * (strided && is_dilated(p) ? kDilated : 1);
  return slower *
         (cost.launches + gflops_of_pair * (cost.per_filled_gflop * filled_pairs + cost.per_gflop * pairs) +
          cost.per_mb_of_x * mb.x + cost.per_mb_of_y * mb.y);
}

}  // namespace upconv3d
