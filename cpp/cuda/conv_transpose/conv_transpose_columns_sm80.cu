// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_columns_sm80: a GEMM of float32 by mma.sync m16n8k8 of TF32, three products of which carry
/// float32's accuracy.
///
///   gemm_m  rows of the result, (output channel, tap) in w's own order
///   gemm_n  input positions
///   gemm_k  input channels: short sums, of which a small block has tiles enough to fill the card
///
/// Operands come by cp.async, in 16 bytes where rows are whole and aligned, else float by float, as they lie:
/// nothing is packed before. Of x in rows of channels (NDHWC), shared memory has them as rows, too.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/col2im_plan.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_columns_sm80.hpp"
#include "cuda/conv_transpose/tensor_cores_sm80.cuh"
#include "cuda/group_norm/async_copy.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kWarpRows = 32, kWarpPositions = 32, kInputs = 16;
constexpr int kVector = 4;  // floats of 16 bytes

/// A tile by eight warps of 32 x 32. Registers suffice for two blocks a multiprocessor.
/// \tparam kDown   warps along the rows: 32 x 256, 64 x 128 or 128 x 64
/// \tparam kInRows whether x lies in rows of channels
template <int kDown, bool kInRows_>
struct ColumnsTile {
  static constexpr bool kInRows = kInRows_;
  static constexpr int kRows = kWarpRows * kDown, kPositions = kWarpPositions * kWarps / kDown;
  static constexpr int kBlocks = 2;
  // Eight lanes read eight neighbours of four rows, whose banks differ by 8 then; of rows of channels, four
  // neighbours of eight rows.
  static constexpr int kRowPitch = kRows + 8, kPositionPitch = kPositions + 8, kInputPitch = kInputs + 4;
};

struct ColumnsArgs {
  const float* x;                         // [N,C,D,H,W] or [N,D,H,W,C]
  const float* w;                         // [C,K,T,R,S], by its strides
  float* columns;                         // [samples][rows][pitch] of ColumnsLayout
  std::int64_t x_sample, columns_sample;  // floats from sample to sample
  int rows, positions, inputs, pitch;
  int row_tiles, position_tiles;
  bool w_vectors, x_vectors;  // 16 bytes at a time
  std::int64_t w_input;       // floats from input channel to input channel
  std::int64_t w_k, w_tap[3];
  int kernel[2];  // R,S
  int taps;       // T*R*S
  int row_k;      // as in ColumnsLayout
};

/// A stage of both operands.
template <class Tile>
struct ColumnsStage {
  float w[kInputs][Tile::kRowPitch];
  float x[Tile::kInRows ? Tile::kPositions * Tile::kInputPitch : kInputs * Tile::kPositionPitch];

  __device__ float& x_at(int input, int position) {
    return Tile::kInRows ? x[position * Tile::kInputPitch + input]
                         : x[input * Tile::kPositionPitch + position];
  }
};

/// As many as two blocks of a multiprocessor have room for: k-blocks are short, and memory is far.
template <class Tile>
constexpr int kColumnsStages = 84 * 1024 / int(sizeof(ColumnsStage<Tile>));
template <class Tile>
constexpr int kColumnsBytes = kColumnsStages<Tile> * int(sizeof(ColumnsStage<Tile>));

/// Where row `row` of the result begins in w.
__device__ std::int64_t w_offset(const ColumnsArgs& args, int row) {
  const int k = args.row_k == 1 ? row % (args.rows / args.taps) : row / args.taps;
  const int tap = args.row_k == 1 ? row / (args.rows / args.taps) : row % args.taps;
  const int s = tap % args.kernel[1], r = tap / args.kernel[1] % args.kernel[0];
  const int t = tap / args.kernel[1] / args.kernel[0];
  return k * args.w_k + t * args.w_tap[0] + r * args.w_tap[1] + s * args.w_tap[2];
}

/// Starts the copies of one stage after the other.
template <class Tile>
class ColumnsLoader {
 public:
  __device__ ColumnsLoader(const ColumnsArgs& args, const float* x, int row0, int position0)
      : args_(args), x_(x), row0_(row0), position0_(position0) {
    const int row = row0 + int(threadIdx.x) % Tile::kRows;
    w_ = args.w + (args.w_vectors || row >= args.rows ? 0 : w_offset(args, row));
  }

  __device__ void load(ColumnsStage<Tile>& to, int input0) const {
    load_w(to, input0);
    load_x(to, input0);
  }

 private:
  __device__ void load_w(ColumnsStage<Tile>& to, int input0) const {
    if (args_.w_vectors) {
      constexpr int kAcross = Tile::kRows / kVector;
      const int m = int(threadIdx.x) % kAcross * kVector;
#pragma unroll
      for (int i = int(threadIdx.x) / kAcross; i < kInputs; i += kThreads / kAcross) {
        const bool inside = input0 + i < args_.inputs && row0_ + m < args_.rows;
        const float* const from = w_ + (inside ? (input0 + i) * args_.w_input + row0_ + m : 0);
        copy_async<16>(&to.w[i][m], from, inside);
      }
      return;
    }
    const int m = int(threadIdx.x) % Tile::kRows;
#pragma unroll
    for (int i = int(threadIdx.x) / Tile::kRows; i < kInputs; i += kThreads / Tile::kRows) {
      const bool inside = input0 + i < args_.inputs && row0_ + m < args_.rows;
      copy_async<4>(&to.w[i][m], w_ + (inside ? (input0 + i) * args_.w_input : 0), inside);
    }
  }

  __device__ void load_x(ColumnsStage<Tile>& to, int input0) const {
    if (args_.x_vectors) return copy_x<kVector>(to, input0);
    copy_x<1>(to, input0);
  }

  /// \tparam kFloats of one copy
  template <int kFloats>
  __device__ void copy_x(ColumnsStage<Tile>& to, int input0) const {
    constexpr bool kInRows = Tile::kInRows;
    constexpr int kAcross = (kInRows ? kInputs : Tile::kPositions) / kFloats;
    constexpr int kCopies = kInputs * Tile::kPositions / kFloats;
    constexpr int kUnrolled = kFloats == 1 ? 2 : kCopies / kThreads;  // addresses take registers
#pragma unroll kUnrolled
    for (int copy = 0; copy < kCopies / kThreads; ++copy) {
      const int at = copy * kThreads + int(threadIdx.x);
      const int along = at % kAcross * kFloats, down = at / kAcross;
      const int i = kInRows ? along : down, n = kInRows ? down : along;
      const bool inside = input0 + i < args_.inputs && position0_ + n < args_.positions;
      const int input = input0 + i, position = position0_ + n;
      const int offset = kInRows ? position * args_.inputs + input : input * args_.positions + position;
      copy_async<4 * kFloats>(&to.x_at(i, n), x_ + (inside ? offset : 0), inside);
    }
  }

  const ColumnsArgs& args_;
  const float* x_;
  const float* w_;  // of the thread's row, or of all
  int row0_, position0_;
};

/// One product of TF32 as the words of OperandWords<., 1>, rounded to nearest.
template <int kProducts, int kWords>
__device__ __forceinline__ void set_words(OperandWords<kWords, kProducts>& to, const float (&from)[kWords]) {
  std::uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = kProducts == 1 ? to_tf32(from[i]) : __float_as_uint(from[i]);
  to.set(words);
}

template <int kProducts, class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocks)
    conv_transpose_columns_sm80(const __grid_constant__ ColumnsArgs args) {
  constexpr int kStages = kColumnsStages<Tile>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const stages = reinterpret_cast<ColumnsStage<Tile>*>(shared);
  constexpr int kRowFragments = kWarpRows / 16, kPositionFragments = kWarpPositions / 8;
  const int tile = int(blockIdx.x);
  const int row0 = tile % args.row_tiles * Tile::kRows;
  const int position0 = tile / args.row_tiles % args.position_tiles * Tile::kPositions;
  const int sample = tile / args.row_tiles / args.position_tiles;
  const ColumnsLoader<Tile> loader(args, args.x + sample * args.x_sample, row0, position0);

  const int k_blocks = (args.inputs + kInputs - 1) / kInputs;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < k_blocks) loader.load(stages[stage], stage * kInputs);
    end_copies();
  }
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  constexpr int kDown = Tile::kRows / kWarpRows;
  const int m0 = warp % kDown * kWarpRows + lane / 4, n0 = warp / kDown * kWarpPositions;
  float acc[kRowFragments][kPositionFragments][4] = {};
  for (int block = 0, now = 0; block < k_blocks; ++block) {
    await_copies<kStages - 2>();
    __syncthreads();
    // Into the stage of the block before, with which all warps are done.
    const int ahead = block + kStages - 1;
    if (ahead < k_blocks) loader.load(stages[now == 0 ? kStages - 1 : now - 1], ahead * kInputs);
    end_copies();
    ColumnsStage<Tile>& stage = stages[now];
    now = now + 1 == kStages ? 0 : now + 1;
    constexpr int kUnrolled = kProducts == 3 ? 1 : 2;  // three products' words take registers
#pragma unroll kUnrolled
    for (int step = 0; step < kInputs; step += 8) {
      const int i = step + lane % 4;
      OperandWords<4, kProducts> a[kRowFragments];
#pragma unroll
      for (int f = 0; f < kRowFragments; ++f) {
        const int m = m0 + 16 * f;
        const float values[4] = {stage.w[i][m], stage.w[i][m + 8], stage.w[i + 4][m], stage.w[i + 4][m + 8]};
        set_words<kProducts>(a[f], values);
      }
#pragma unroll
      for (int g = 0; g < kPositionFragments; ++g) {
        const int n = n0 + 8 * g + lane / 4;
        const float values[2] = {stage.x_at(i, n), stage.x_at(i + 4, n)};
        OperandWords<2, kProducts> b;
        set_words<kProducts>(b, values);
#pragma unroll
        for (int f = 0; f < kRowFragments; ++f) multiply_add<float>(acc[f][g], a[f], b, acc[f][g]);
      }
    }
  }

  float* const columns = args.columns + sample * args.columns_sample;
#pragma unroll
  for (int f = 0; f < kRowFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m0 + 16 * f + 8 * half;
      if (row >= args.rows) continue;
#pragma unroll
      for (int g = 0; g < kPositionFragments; ++g) {
        const int position = position0 + n0 + 8 * g + 2 * (lane % 4);
        if (position >= args.positions) continue;
        // Rows are whole vectors, so that the second of the pair is at least padding.
        *reinterpret_cast<float2*>(columns + std::int64_t(row) * args.pitch + position) =
            make_float2(acc[f][g][2 * half], acc[f][g][2 * half + 1]);
      }
    }
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

/// Whether w's rows lie one behind the other, as the result's do. Axes of one entry have any stride.
bool lies_in_order(const ConvTransposeColumnsParams& params, const ColumnsLayout& layout) {
  const Problem& p = params.problem;
  const Extent3& kernel = p.kernel;
  const std::int64_t extents[] = {p.c, p.k, kernel[0], kernel[1], kernel[2]};
  const std::int64_t expected[] = {layout.rows, layout.row_k, kernel[1] * kernel[2] * layout.row_tap,
                                   kernel[2] * layout.row_tap, layout.row_tap};
  for (int axis = 0; axis < 5; ++axis) {
    if (extents[axis] > 1 && params.w_strides[axis] != expected[axis]) return false;
  }
  return true;
}

template <int kProducts, class Tile>
void launch(ColumnsArgs& args, std::int64_t samples, cudaStream_t stream) {
  args.row_tiles = static_cast<int>(ceil_div(args.rows, Tile::kRows));
  args.position_tiles = static_cast<int>(ceil_div(args.positions, Tile::kPositions));
  const auto blocks = static_cast<unsigned>(args.row_tiles * args.position_tiles * samples);
  const auto kernel = conv_transpose_columns_sm80<kProducts, Tile>;
  constexpr int kBytes = kColumnsBytes<Tile>;
  static ReservedSharedMemory reserved;
  reserved.ensure("conv_transpose_columns_sm80", reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<blocks, kThreads, kBytes, stream>>>(args);
  check_launch("launching conv_transpose_columns_sm80");
}

/// The tile of which the fewest are needed: all are of one size.
template <int kProducts, bool kInRows>
void launch_tile(ColumnsArgs& args, std::int64_t samples, cudaStream_t stream) {
  const int down = columns_tile_rows(args.rows, args.positions) / kWarpRows;
  if (down == 1) return launch<kProducts, ColumnsTile<1, kInRows>>(args, samples, stream);
  if (down == 4) return launch<kProducts, ColumnsTile<4, kInRows>>(args, samples, stream);
  launch<kProducts, ColumnsTile<2, kInRows>>(args, samples, stream);
}

}  // namespace

void launch_columns(const ConvTransposeColumnsParams& params, cudaStream_t stream) {
  const Problem& p = params.problem;
  const ColumnsLayout layout(p);
  if (p.dtype != DType::kFloat32) {
    throw std::logic_error("upconv3d: conv_transpose_columns_sm80 has no kernel for " + describe(p));
  }
  const bool in_rows = p.x_layout == Layout::kNDHWC;
  ColumnsArgs args{};
  args.x = static_cast<const float*>(params.x);
  args.w = static_cast<const float*>(params.w);
  args.columns = static_cast<float*>(params.columns);
  args.x_sample = p.c * volume(p.in);
  args.columns_sample = layout.rows * layout.pitch;
  args.rows = static_cast<int>(layout.rows);
  args.positions = static_cast<int>(layout.positions);
  args.inputs = static_cast<int>(p.c);
  args.pitch = static_cast<int>(layout.pitch);
  args.w_input = params.w_strides[0];
  args.w_k = params.w_strides[1];
  for (int axis = 0; axis < 3; ++axis) args.w_tap[axis] = params.w_strides[2 + axis];
  for (int axis = 0; axis < 2; ++axis) args.kernel[axis] = static_cast<int>(p.kernel[1 + axis]);
  args.taps = static_cast<int>(volume(p.kernel));
  args.row_k = static_cast<int>(layout.row_k);
  args.w_vectors = lies_in_order(params, layout) && layout.rows % kVector == 0 && is_aligned(params.w);
  args.x_vectors = (in_rows ? p.c : layout.positions) % kVector == 0 && is_aligned(params.x);
  if (p.is_ieee()) {
    if (in_rows) return launch_tile<3, true>(args, layout.samples, stream);
    return launch_tile<3, false>(args, layout.samples, stream);
  }
  if (in_rows) return launch_tile<1, true>(args, layout.samples, stream);
  launch_tile<1, false>(args, layout.samples, stream);
}

}  // namespace upconv3d::cuda
