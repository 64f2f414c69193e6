// SPDX-License-Identifier: Apache-2.0
/// \file
/// Checks launch_channels_last_copies, bit for bit, against a copy on the host. Plain CUDA, no torch.
///
///   test_channels_last   a second, also under compute-sanitizer
///
/// Returns 0 when every case agrees, 1 with one line per disagreement otherwise.
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comparisons.hpp"
#include "cuda/check.hpp"
#include "cuda/layout/channels_last.hpp"
#include "device_buffer.hpp"
#include "gpu_test.hpp"

using namespace upconv3d;
using namespace upconv3d::cuda;
using namespace upconv3d::test;

namespace {

struct Extents {
  std::int64_t batch, channels, positions;
};

/// One of a launch's tensors, on both sides.
struct Operand {
  Extents extents;
  std::int64_t bytes;   // of an element
  std::int64_t offset;  // bytes before the first, in device memory
  std::vector<char> host;
  Buffer from, to;

  Operand(const Extents& e, std::int64_t element_bytes, std::int64_t bytes_before = 0)
      : extents(e),
        bytes(element_bytes),
        offset(bytes_before),
        host(static_cast<std::size_t>(e.batch * e.channels * e.positions * element_bytes)),
        from(offset + static_cast<std::int64_t>(host.size())),
        to(from.bytes()) {
    std::uint32_t state = 12345;
    for (char& byte : host) byte = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
    check(cudaMemcpy(begin(from), host.data(), host.size(), cudaMemcpyHostToDevice), "uploading");
  }
  char* begin(const Buffer& buffer) const { return buffer.data() + offset; }
  ChannelsLastCopy copy() const {
    return {extents.batch, extents.channels, extents.positions, begin(from), begin(to)};
  }
  void check_result(const std::string& what) const {
    std::vector<char> expected(host.size()), found(host.size());
    const auto [batch, channels, positions] = extents;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t c = 0; c < channels; ++c) {
        for (std::int64_t p = 0; p < positions; ++p) {
          std::memcpy(&expected[static_cast<std::size_t>(((b * positions + p) * channels + c) * bytes)],
                      &host[static_cast<std::size_t>(((b * channels + c) * positions + p) * bytes)],
                      static_cast<std::size_t>(bytes));
        }
      }
    }
    check(cudaMemcpy(found.data(), begin(to), found.size(), cudaMemcpyDeviceToHost), what);
    expect(found == expected, what + ": batch=" + std::to_string(batch) + " channels=" +
                                  std::to_string(channels) + " positions=" + std::to_string(positions));
    expect(from.pads_intact() && to.pads_intact(), what + ": wrote outside a buffer");
  }
};

// x of a small block, w of 1 to 216 taps, channels that fill no tile, one channel, one position; x of many
// tiles, some of them not full; stretches of many and of few channels, the last of them not full, of as many
// positions as one can have and of one more, and of rows of positions, the last of them not full.
constexpr Extents kExtents[] = {
    {2, 384, 216},   {384, 64, 27},  {4, 320, 112},  {320, 320, 8},  {1, 33, 1000}, {7, 992, 2},
    {3, 1023, 2},    {5, 2048, 1},   {9, 1, 77},     {16, 31, 64},   {8, 70, 125},  {2, 16, 216},
    {1, 256, 20480}, {5, 100, 33},   {3, 65, 3},     {2, 2016, 1},   {1, 1500, 3},  {3, 72, 12345},
    {4, 24, 16384},  {2, 200, 4096}, {600, 264, 36}, {2048, 40, 64}, {2, 72, 512},  {2, 72, 513},
    {1, 128, 4096},  {2, 72, 3000},  {9, 520, 1000}, {300, 8192, 2}};

/// Whole vectors that lie amid two.
void run_unaligned_cases() {
  for (const std::int64_t bytes : {2, 4}) {
    for (const Extents& e : {Extents{2, 384, 216}, {320, 320, 8}, {1, 128, 4096}}) {
      const Operand operand(e, bytes, bytes);
      launch_channels_last_copies({operand.copy(), {}}, bytes == 2 ? DType::kFloat16 : DType::kFloat32,
                                  nullptr);
      check(cudaDeviceSynchronize(), "waiting for the kernel under test");
      operand.check_result("unaligned");
    }
  }
}

void run_cases() {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Operand* before = nullptr;
    std::vector<std::unique_ptr<Operand>> operands;
    for (const Extents& e : kExtents) {
      operands.push_back(std::make_unique<Operand>(e, size_of(dtype)));
      const Operand& now = *operands.back();
      // Alone, as the first and as the second, and beside another.
      for (const std::array<ChannelsLastCopy, 2>& copies :
           {std::array<ChannelsLastCopy, 2>{now.copy(), {}},
            {ChannelsLastCopy{}, now.copy()},
            {before ? before->copy() : ChannelsLastCopy{}, now.copy()}}) {
        for (const Operand* operand : {before, &now}) {
          if (operand) check(cudaMemset(operand->to.data(), 0xA5, operand->to.bytes()), "filling");
        }
        launch_channels_last_copies(copies, dtype, nullptr);
        check(cudaDeviceSynchronize(), "waiting for the kernel under test");
        now.check_result(name(dtype));
        if (copies[0].batch > 0 && copies[0].from != now.from.data())
          before->check_result("the first of two");
      }
      before = &now;
    }
  }
  launch_channels_last_copies({}, DType::kFloat32, nullptr);
}

}  // namespace

int main() {
  if (upconv3d::tests::no_gpu(0)) return upconv3d::tests::kSkipped;
  try {
    run_cases();
    run_unaligned_cases();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("channels_last: %d comparisons, %d failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
