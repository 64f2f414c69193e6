// SPDX-License-Identifier: Apache-2.0
/// Checks that the direct plan's output passes are launched beside group_norm_finalize where their code waits
/// for it, and there alone: what a GPU runs from PTX of before Hopper (CUDA_FORCE_PTX_JIT=1, where the build
/// has such PTX) does not, and would read a table that is not yet written. Captured graphs say which kernel
/// may begin beside which. Needs a GPU of compute capability 9.0. Exit code 0: all passed.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "conv_transpose_reference.cuh"
#include "core/few_channels_layout.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_direct.hpp"
#include "cuda/conv_transpose/conv_transpose_few_channels_sm80.hpp"
#include "cuda/group_norm/group_norm.hpp"
#include "gpu_test.hpp"

namespace {

using namespace upconv3d;
using namespace upconv3d::tests;

using Pass = std::function<void(const cuda::ConvTransposeDirectParams&, cudaStream_t)>;

Problem problem_of(std::int64_t channels, std::int64_t groups) {
  Problem p;
  p.n = 2, p.c = channels, p.k = channels, p.groups = groups, p.num_groups = 2;
  p.in = {6, 7, 8}, p.kernel = {3, 3, 3}, p.stride = {2, 2, 2}, p.padding = {1, 1, 1};
  p.output_padding = {1, 1, 1}, p.dilation = {1, 1, 1};
  p.dtype = DType::kBFloat16, p.x_layout = p.y_layout = Layout::kNDHWC;
  return p;
}

/// Architecture, as 10 times its number, that a captured kernel's code was compiled for.
int compiled_arch(cudaGraphNode_t node) {
  cudaKernelNodeParams params{};
  check(cudaGraphKernelNodeGetParams(node, &params), "a kernel of the graph");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, params.func), "its code");
  return attributes.ptxVersion;
}

/// `from` and `to` of the graph's edges and what kinds they are, as many as `count` says, or, of null, how
/// many.
void read_edges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to, cudaGraphEdgeData* edges,
                std::size_t& count) {
#if CUDART_VERSION >= 13000
  check(cudaGraphGetEdges(graph, from, to, edges, &count), "edges of the graph");
#else
  check(cudaGraphGetEdges_v2(graph, from, to, edges, &count), "edges of the graph");
#endif
}

/// Kernels of `graph` that may begin beside the one before, by what they were compiled for.
std::vector<int> kernels_beside(cudaGraph_t graph) {
  std::size_t count = 0;
  read_edges(graph, nullptr, nullptr, nullptr, count);
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> edges(count);
  read_edges(graph, from.data(), to.data(), edges.data(), count);
  std::vector<int> archs;
  for (std::size_t i = 0; i < count; ++i) {
    if (edges[i].type == cudaGraphDependencyTypeProgrammatic) archs.push_back(compiled_arch(to[i]));
  }
  return archs;
}

/// Captures a block's three launches.
std::vector<int> kernels_beside(const Problem& p, std::int64_t tiles, const Pass& pass) {
  DeviceBuffer<__nv_bfloat16> x(p.n * p.c * volume(p.in)), y(p.n * p.k * p.positions());
  DeviceBuffer<__nv_bfloat16> w(p.c * p.k / p.groups * volume(p.kernel));
  DeviceBuffer<float> part(p.n * tiles * p.k * 2), table(3 * p.n * p.k);
  DeviceBuffer<std::int32_t> counts(tiles);
  cuda::ConvTransposeDirectParams moments;
  moments.problem = p;
  moments.x = x.get(), moments.w = w.get();
  const std::int64_t taps = volume(p.kernel);
  const std::int64_t strides[5] = {p.k / p.groups * taps, taps, p.kernel[1] * p.kernel[2], p.kernel[2], 1};
  std::copy_n(strides, 5, moments.w_strides);
  moments.before = {p.tail.before(), 0, nullptr, 0}, moments.after = {p.tail.after(), 0, nullptr, 0};
  cuda::ConvTransposeDirectParams output = moments;
  moments.part = part.get(), moments.counts = counts.get();
  output.table = table.get(), output.y = y.get();
  cuda::FinalizeParams finalize;
  finalize.shape = {p.n, p.k, p.positions(), p.num_groups, 0, tiles};
  DeviceBuffer<char> scratch(cuda::finalize_scratch_bytes(finalize.shape));
  finalize.dtype = p.dtype, finalize.eps = p.eps;
  finalize.part = part.get(), finalize.counts = counts.get();
  finalize.scratch = scratch.get(), finalize.table = table.get();

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  check(cudaStreamCreate(&stream), "a stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  pass(moments, stream);
  cuda::launch_group_norm_finalize(finalize, stream);
  pass(output, stream);
  check(cudaStreamEndCapture(stream, &graph), "capturing");
  const std::vector<int> archs = kernels_beside(graph);
  check(cudaGraphDestroy(graph), "the graph");
  check(cudaStreamDestroy(stream), "the stream");
  return archs;
}

int check_kernel(const char* name, const Problem& p, std::int64_t tiles, const Pass& pass) {
  constexpr int kHopper = 90;
  cudaFuncAttributes own{};
  check(cudaFuncGetAttributes(&own, reference_kernel), "this program's code");
  const std::vector<int> archs = kernels_beside(p, tiles, pass);
  const std::size_t expected = own.ptxVersion >= kHopper ? 1 : 0;
  bool right = archs.size() == expected;
  for (const int arch : archs) right = right && arch >= kHopper;
  std::printf("%s: %zu kernels beside another, of code for %d: %s\n", name, archs.size(), own.ptxVersion,
              right ? "right" : "FAILED");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  if (no_gpu(90)) return kSkipped;
  cudaFuncAttributes own{};
  if (std::getenv("CUDA_FORCE_PTX_JIT") != nullptr &&
      cudaFuncGetAttributes(&own, reference_kernel) != cudaSuccess) {
    std::puts("skipped: a build without PTX");
    return kSkipped;
  }
  try {
    const Problem depthwise = problem_of(16, 16), grouped = problem_of(8, 4), few = problem_of(16, 1);
    const FewChannelsLayout layout = few_channels_layout(few);
    const Pass direct = [](const auto& params, cudaStream_t stream) { cuda::launch_direct(params, stream); };
    int failed = check_kernel("conv_transpose_depthwise", depthwise, cuda::direct_tiles(depthwise), direct);
    failed += check_kernel("conv_transpose_any_taps", grouped, cuda::direct_tiles(grouped), direct);
    failed += check_kernel(
        "conv_transpose_few_channels_sm80", few, layout.tile_count(),
        [&](const auto& params, cudaStream_t stream) { cuda::launch_few_channels(params, layout, stream); });
    return failed == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
