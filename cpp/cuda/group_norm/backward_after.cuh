// SPDX-License-Identifier: Apache-2.0
/// \file
/// What group_norm_backward does about an activation behind the normalization, y = after(u):
///
///   u = gamma*xhat + beta, computed as the forward pass does, so that its gates are the same
///   g = grad_y*after'(u), which takes grad_y's place in all that follows
///   grad_slope = sum of grad_y*u where !(u > 0)
#pragma once

#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/group_norm/backward_work.cuh"

namespace upconv3d::cuda {

/// after'(u) of a thread's channels.
template <class Traits>
class AfterGradient {
 public:
  using T = typename Traits::T;
  using Args = typename Traits::Args;
  static constexpr int kVector = Traits::kVector;

  /// For the channels from `channel` on, as many as there are.
  __device__ __forceinline__ void load(const Args& args, int sample, int channel) {
    if constexpr (Traits::kAnyTail) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int own = min(channel + j, args.k - 1);
        const int row = sample * args.num_groups + args.group_channels.divide(own);
        const float4 table = __ldg(args.table + row);
        scale_[j] = (args.gamma != nullptr ? to_stat(args.gamma[own]) : 1.f) * table.z;
        shift_[j] = (args.beta != nullptr ? to_stat(args.beta[own]) : 0.f) - table.y * scale_[j];
        parameter_[j] = activation_parameter<T>(args.after, own);
      }
    }
  }

  /// Makes g of grad_y.
  ///
  /// \param deviation    a - mean
  /// \param slope_sums   added to: grad_y*u where !(u > 0), of activations with slopes; or null
  __device__ __forceinline__ void multiply(const Args& args, const float (&deviation)[kVector],
                                           float (&grad)[kVector], float* slope_sums) const {
    if constexpr (Traits::kAnyTail) {
      with_activation(args.after.kind, [&](auto after) {
        using After = decltype(after);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const float u = deviation[j] * scale_[j] + shift_[j];
          if constexpr (std::is_same_v<After, SlopeActivation>) {
            if (slope_sums != nullptr && !(u > 0.f)) slope_sums[j] += grad[j] * u;
          }
          if constexpr (std::is_same_v<After, ReluActivation>) {
            grad[j] = u <= 0.f ? 0.f : grad[j];  // also where grad_y is Inf or NaN, as in PyTorch
          } else {
            grad[j] *= after.derivative(u, parameter_[j]);
          }
        }
      });
    }
  }

 private:
  float scale_[kVector], shift_[kVector], parameter_[kVector];
};

}  // namespace upconv3d::cuda
