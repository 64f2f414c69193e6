// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks launch_held_norm against a reference in double on the host. Plain CUDA, no torch.
///
///   test_held_norm   two minutes, most of them the reference's
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comparisons.hpp"
#include "core/held_norm.hpp"
#include "cuda/check.hpp"
#include "cuda/group_norm/held_norm.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"
#include "group_norm_comparisons.hpp"
#include "group_norm_reference.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

int compute_capability() {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "asking for the device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "asking for the device");
  return major * 10 + minor;
}

Problem problem_of(const Case& c) {
  Problem p;
  p.n = c.n, p.c = 1, p.k = c.k;
  p.in = {c.positions, 1, 1}, p.kernel = {1, 1, 1};
  p.num_groups = c.num_groups;
  p.dtype = c.dtype;
  p.x_layout = p.y_layout = c.y_layout;
  return p;
}

/// What a failure says of the cut.
std::string cut_text(const HeldCut& cut) {
  if (const auto* const t = std::get_if<HeldTiles>(&cut)) {
    return " tiles=" + std::to_string(t->tiles) + (t->clusters ? " of a cluster" : "") +
           " slabs=" + std::to_string(t->slabs) + " fold=" + std::to_string(t->fold);
  }
  const HeldPlanes& t = std::get<HeldPlanes>(cut);
  return " tiles=" + std::to_string(t.tiles) + (t.clusters ? " of a cluster" : "") + " of " +
         std::to_string(t.tile_values) + " teams=" + std::to_string(t.teams) + "*" +
         std::to_string(t.team_threads);
}

/// What the launcher takes of a case, in device memory.
struct CaseBuffers {
  HeldCut cut;
  Buffer c, y, bias, gamma, beta, slopes, part;

  CaseBuffers(const Case& at, const Reference& ref, const HeldCut& cut_of_case)
      : cut(cut_of_case),
        c(at.n * at.k * at.positions * size_of(at.dtype)),
        y(c.bytes()),
        bias(at.k * size_of(at.dtype)),
        gamma(bias.bytes()),
        beta(bias.bytes()),
        slopes(bias.bytes()),
        part(held_part_bytes(at.n, at.num_groups, cut)) {
    upload(c.data(), in_layout(at, at.layout, ref.c), at.dtype);
    upload(bias.data(), ref.bias, at.dtype);
    upload(gamma.data(), ref.gamma, at.dtype);
    upload(beta.data(), ref.beta, at.dtype);
    upload(slopes.data(), ref.slopes, at.dtype);
  }

  ActivationParams activation(const Case& at, Activation kind) const {
    return {kind, at.parameter, kind == Activation::kPrelu ? slopes.data() : nullptr, at.one_slope ? 0 : 1};
  }

  HeldNormParams params(const Case& at, double eps) const {
    return {.cut = cut,
            .n = at.n,
            .k = at.k,
            .positions = at.positions,
            .num_groups = at.num_groups,
            .dtype = at.dtype,
            .eps = eps,
            .before = activation(at, at.before),
            .after = activation(at, at.after),
            .y_planes = at.layout != at.y_layout,
            .c = c.data(),
            .bias = at.has_bias ? bias.data() : nullptr,
            .gamma = at.affine ? gamma.data() : nullptr,
            .beta = at.affine ? beta.data() : nullptr,
            .y = y.data(),
            .part = part.data()};
  }
};

/// The same tiles, for blocks that all wait.
HeldCut without_clusters(HeldCut cut) {
  std::visit([](auto& of) { of.clusters = false; }, cut);
  return cut;
}

/// The same tiles, for threads whose values do not stay in registers.
HeldCut in_shared_memory(HeldCut cut) {
  std::visit([](auto& of) { of.kept = false; }, cut);
  return cut;
}

/// Lets the next kernel begin, and brings c late: that one may have read nothing before.
__global__ void deliver_late(const char* from, char* to, std::int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  constexpr long long kCycles = 20000;
  for (const long long begin = clock64(); clock64() - begin < kCycles;) {
  }
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes; i += threads) {
    to[i] = from[i];
  }
}

/// The same bits right behind a kernel that writes c.
void check_behind_a_kernel(const HeldNormParams& params, const CaseBuffers& on, const std::vector<char>& once,
                           const std::string& what) {
  const Buffer kept(on.c.bytes());
  check(cudaMemcpy(kept.data(), on.c.data(), on.c.bytes(), cudaMemcpyDeviceToDevice), "keeping c");
  for (const Buffer* filled : {&on.c, &on.y}) {
    check(cudaMemset(filled->data(), 0xA5, filled->bytes()), "filling a test buffer");
  }
  check(cudaDeviceSynchronize(), "waiting for the buffers to be filled");
  deliver_late<<<264, 256>>>(kept.data(), on.c.data(), on.c.bytes());
  check(cudaGetLastError(), "launching what brings c");
  launch_held_norm(params, nullptr);
  expect(once == download_bytes(on.y.data(), on.y.bytes()), "behind the kernel that brings c: " + what);
}

/// Groups of one value each: their mean is that value to the last bit, so y is beta.
void check_alike(const Case& at, const Reference& ref, const std::vector<double>& y,
                 const std::string& what) {
  std::int64_t off = 0;
  for (std::int64_t n = 0; n < at.n; ++n) {
    for (std::int64_t k = 0; k < at.k; ++k) {
      for (std::int64_t p = 0; p < at.positions; ++p) {
        off += y[index_of(at, at.y_layout, n, k, p)] != (at.affine ? ref.beta[k] : 0.0);
      }
    }
  }
  expect(off == 0, std::to_string(off) + " values are not beta: " + what);
}

/// The same bits, of a transposed result, where y begins amid what two rows are stored in.
void check_beside_a_boundary(HeldNormParams params, std::int64_t bytes, const std::vector<char>& once,
                             const std::string& what) {
  const Buffer y(bytes + size_of(params.dtype));
  char* const begin = y.data() + size_of(params.dtype);
  params.y = begin;
  launch_held_norm(params, nullptr);
  expect(once == download_bytes(begin, bytes), "beside a boundary: " + what);
  expect(y.pads_intact(), "wrote outside y beside a boundary: " + what);
}

/// Against the reference; then the same bits with as many blocks as a small device holds, none of them in
/// clusters, from values that lie in shared memory, and in place where nothing is transposed.
void run_case(const Case& at, const HeldCut& cut) {
  const double eps = 1e-5;
  const Reference ref = make_reference(at, eps);
  const CaseBuffers on(at, ref, cut);
  HeldNormParams params = on.params(at, eps);
  const std::string what = describe(at) + cut_text(cut);
  launch_held_norm(params, nullptr);
  check(cudaDeviceSynchronize(), what);
  const std::vector<double> y = download(on.y.data(), at.n * at.k * at.positions, at.dtype);
  check_y(at, ref, y, stat_roundoff(at), eps);
  if (at.alike) check_alike(at, ref, y, what);
  const std::vector<char> once = download_bytes(on.y.data(), on.y.bytes());
  check_behind_a_kernel(params, on, once, what);
  if (params.y_planes) check_beside_a_boundary(params, on.y.bytes(), once, what);
  for (const int blocks : {7, 1}) {
    check(cudaMemset(on.y.data(), 0xA5, on.y.bytes()), "filling a test buffer");
    params.max_blocks = blocks;
    params.cut = without_clusters(cut);
    launch_held_norm(params, nullptr);
    expect(once == download_bytes(on.y.data(), on.y.bytes()),
           "the same bits from " + std::to_string(blocks) + " blocks: " + what);
  }
  params.max_blocks = 0;
  params.cut = in_shared_memory(cut);
  check(cudaMemset(on.y.data(), 0xA5, on.y.bytes()), "filling a test buffer");
  launch_held_norm(params, nullptr);
  expect(once == download_bytes(on.y.data(), on.y.bytes()),
         "the same bits from values in shared memory: " + what);
  const Buffer original(on.c.bytes());
  check(cudaMemcpy(original.data(), on.c.data(), on.c.bytes(), cudaMemcpyDeviceToDevice), "keeping c");
  for (const HeldCut& in_place : {in_shared_memory(cut), cut}) {
    if (params.y_planes) break;
    check(cudaMemcpy(on.c.data(), original.data(), on.c.bytes(), cudaMemcpyDeviceToDevice), "restoring c");
    params.cut = in_place;
    params.y = on.c.data();
    launch_held_norm(params, nullptr);
    expect(once == download_bytes(on.c.data(), on.c.bytes()), "in place: " + what);
  }
  check(cudaDeviceSynchronize(), "waiting for the kernel under test");
  for (const Buffer* buffer : {&on.c, &on.y, &on.part}) {
    expect(buffer->pads_intact(), "wrote outside a buffer: " + what);
  }
}

struct Shape {
  std::int64_t n, k, positions, num_groups;
};
// Blocks that wait for each other and blocks that do not; groups of less than a vector, of one and a half and
// of many; channels that are no whole vectors; rows that no row lane has; instance norm; one group.
constexpr Shape kShapes[] = {
    {2, 16, 60, 4},     {3, 64, 264, 8},     {1, 128, 129, 1},  {2, 24, 77, 2},       {2, 320, 512, 320},
    {1, 64, 4913, 8},   {2, 64, 3375, 2},    {2, 2, 4096, 2},   {1, 2, 65536, 2},     {1, 12, 8194, 3},
    {2, 36, 4100, 3},   {1, 512, 3375, 512}, {1, 512, 833, 8},  {64, 512, 64, 8},     {1, 256, 5120, 32},
    {1, 2048, 65, 4},   {2, 96, 2197, 96},   {1, 1, 33000, 1},  {1, 40, 20011, 5},    {5, 8, 4096, 1},
    {3, 48, 3, 4},      {2, 64, 1, 8},       {2, 640, 27, 640}, {1, 32, 49153, 8},    {1, 6, 200003, 2},
    {4, 320, 112, 320}, {1, 24, 73728, 24},  {3, 20, 84, 20},   {16, 192, 1728, 192}, {9, 130, 1001, 130},
    {66, 64, 512, 8}};

/// How many cases there were of each kind.
struct Kinds {
  int waiting = 0, alone = 0, folded = 0, transposed = 0, planes_waiting = 0, planes_alone = 0, teams = 0;
  int clusters = 0, planes_clusters = 0;  // on a GPU that has them
  int kept = 0, planes_kept = 0;          // whose values are few enough to stay in registers
  int runs = 0;                           // transposed, two rows at a time

  void count(const HeldCut& cut, bool transposes) {
    transposed += transposes;
    if (const auto* const t = std::get_if<HeldTiles>(&cut)) {
      kept += keeps_values(cut);
      runs += transposes && t->rows % HeldTiles::kRunRows == 0 && t->row_lanes % HeldTiles::kRunRows == 0;
      waiting += t->tiles > 1 && !t->clusters, alone += t->tiles == 1, folded += t->fold > 1;
      clusters += t->clusters;
      return;
    }
    const HeldPlanes& t = std::get<HeldPlanes>(cut);
    planes_kept += keeps_values(cut);
    planes_waiting += t.tiles > 1 && !t.clusters, planes_alone += t.tiles == 1, teams += t.teams > 1;
    planes_clusters += t.clusters;
  }
  void expect_all() const {
    std::string text;
    for (const int kind : {waiting, clusters, alone, folded, transposed, runs, kept, planes_waiting,
                           planes_clusters, planes_alone, teams, planes_kept}) {
      text += " " + std::to_string(kind);
    }
    std::printf(
        "cases that wait for all, for clusters, for none, fold, transpose, two rows at a time, keep; "
        "planes that wait for all, "
        "for clusters, for none, in teams, keep:%s\n",
        text.c_str());
    const int wanted = compute_capability() >= 90 ? 10 : 0;
    expect(waiting > 10 && clusters >= wanted && alone > 20 && folded > 5 && transposed > 40 &&
               planes_waiting > 10 && planes_clusters >= wanted && planes_alone > 20 && teams > 5 &&
               runs > 20 && transposed > runs + 20 && kept > 20 && planes_kept > 20,
           "cases of every kind:" + text);
  }
};

void run_cases() {
  const int capability = compute_capability();
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  constexpr Activation kActivations[] = {Activation::kNone,     Activation::kRelu, Activation::kLeakyRelu,
                                         Activation::kElu,      Activation::kSilu, Activation::kGelu,
                                         Activation::kGeluTanh, Activation::kPrelu};
  int turn = 0;
  Kinds kinds;
  const auto run = [&](Case c) {
    constexpr Layout kRows = Layout::kNDHWC, kPlanes = Layout::kNCDHW;
    for (const auto& [from, to] : {std::pair{kRows, kRows}, {kPlanes, kPlanes}, {kRows, kPlanes}}) {
      c.layout = from, c.y_layout = to;
      const std::optional<HeldCut> cut = held_cut(problem_of(c), from, capability);
      if (!cut) continue;
      kinds.count(*cut, from != to);
      run_case(c, *cut);
    }
  };
  for (const Shape& s : kShapes) {
    for (const DType dtype : kDTypes) {
      Case c{s.n, s.k, s.positions, s.num_groups, dtype, dtype, Layout::kNDHWC, Layout::kNDHWC};
      c.before = ++turn % 4 == 0 ? Activation::kNone : Activation::kRelu;
      c.has_bias = turn % 3 != 0;
      c.affine = turn % 5 != 0;
      c.bias_mean = turn % 7 == 0 ? 30 : 0;
      run(c);
      // One of the others, before or after.
      const Activation other = kActivations[turn % 8];
      const bool comes_first = turn / 8 % 2 == 0;
      c.before = comes_first ? other : Activation::kNone;
      c.after = comes_first ? Activation::kNone : other;
      c.parameter = other == Activation::kElu ? 1.25 : 0.25;
      c.one_slope = turn % 3 == 0;
      run(c);
      if (turn % 4 == 1) {
        c.before = Activation::kLeakyRelu, c.after = Activation::kNone;
        c.parameter = turn % 8 == 1 ? 0.25 : -0.5;
        run(c);
      }
      c.before = turn % 4 == 0 ? Activation::kSilu : turn % 4 == 1 ? Activation::kRelu : Activation::kNone;
      c.after = Activation::kNone;
      c.has_bias = false, c.alike = true;
      run(c);
      c.affine = !c.affine;
      run(c);
    }
  }
  // Of planes of two values an infinite one, which is a channel's first, shares a vector with other channels.
  for (const auto& [positions, groups] :
       {std::pair<std::int64_t, std::int64_t>{4096, 2}, {4097, 16}, {2, 16}}) {
    Case special{
        2, 16, positions, groups, DType::kBFloat16, DType::kBFloat16, Layout::kNDHWC, Layout::kNDHWC};
    for (const double value : {1e15, std::numeric_limits<double>::infinity()}) {
      special.special = value;
      run(special);
    }
  }
  kinds.expect_all();
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  try {
    run_cases();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("held_norm: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
