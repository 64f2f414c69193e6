// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/conv_transpose/direct_launch.cuh"

namespace upconv3d::cuda {

// Instantiated in files of their own, so that they compile side by side.
extern template void launch_depthwise<__nv_bfloat16>(const ConvTransposeDirectParams&, const DirectTiling&,
                                                     cudaStream_t);
extern template void launch_depthwise<__half>(const ConvTransposeDirectParams&, const DirectTiling&,
                                              cudaStream_t);
extern template void launch_depthwise<float>(const ConvTransposeDirectParams&, const DirectTiling&,
                                             cudaStream_t);
extern template void launch_any_taps<__nv_bfloat16>(const ConvTransposeDirectParams&, const DirectTiling&,
                                                    cudaStream_t);
extern template void launch_any_taps<__half>(const ConvTransposeDirectParams&, const DirectTiling&,
                                             cudaStream_t);
extern template void launch_any_taps<float>(const ConvTransposeDirectParams&, const DirectTiling&,
                                            cudaStream_t);

std::int64_t direct_tiles(const Problem& problem) {
  return direct_tiling(problem).tile_count();
}

void launch_direct(const ConvTransposeDirectParams& params, cudaStream_t stream) {
  require_slopes(params.before);
  require_slopes(params.after);
  const DirectTiling tiling = direct_tiling(params.problem);
  with_element(params.problem.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    if constexpr (std::is_same_v<T, double>) {
      throw std::logic_error("upconv3d: conv_transpose_direct computes in float; got " +
                             describe(params.problem) + ". select_plan must choose another plan.");
    } else if (tiling.depthwise) {
      launch_depthwise<T>(params, tiling, stream);
    } else {
      launch_any_taps<T>(params, tiling, stream);
    }
  });
}

}  // namespace upconv3d::cuda
