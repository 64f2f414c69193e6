// SPDX-License-Identifier: Apache-2.0
/// \file
/// conv_transpose_columns_sm80: a GEMM by mma.sync, of 16 bit m16n8k16, of float32 m16n8k8 of TF32, three
/// products of which carry float32's accuracy. Sums are float32.
///
///   gemm_m  rows of the result, (output channel, tap) in w's own order
///   gemm_n  input positions
///   gemm_k  input channels: short sums, of which a small block has tiles enough to fill the card
///
/// Operands come by cp.async, in 16 bytes where rows are whole and aligned, else 4 bytes at a time, as they
/// lie: nothing is packed before. 16-bit rows of an odd number of values come through registers. Of x in rows
/// of channels (NDHWC), shared memory has them as rows, too.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/col2im_plan.hpp"
#include "core/index_math.hpp"
#include "cuda/check.hpp"
#include "cuda/conv_transpose/conv_transpose_columns_sm80.hpp"
#include "cuda/conv_transpose/tensor_cores_sm80.cuh"
#include "cuda/group_norm/async_copy.cuh"
#include "cuda/group_norm/element.cuh"
#include "cuda/reserved_shared_memory.hpp"

namespace upconv3d::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kWarpRows = 32, kWarpPositions = 32;

/// A tile by eight warps of 32 x 32. Registers suffice for two blocks a multiprocessor.
/// \tparam T       of x and w: float, __nv_bfloat16 or __half
/// \tparam kDown   warps along the rows: 32 x 256, 64 x 128 or 128 x 64
/// \tparam kInRows whether x lies in rows of channels
template <class T, int kDown, bool kInRows_>
struct ColumnsTile {
  using Element = T;
  static constexpr bool kInRows = kInRows_;
  static constexpr int kRows = kWarpRows * kDown, kPositions = kWarpPositions * kWarps / kDown;
  static constexpr int kBlocks = 2;
  static constexpr int kVector = kAccessBytes / int(sizeof(T));
  static constexpr int kInputs = 64 / int(sizeof(T));  // of a k-block
  // Of floats, eight lanes read eight neighbours of four rows, whose banks differ by 8 then; of rows of
  // channels, four neighbours of eight rows. Of 16 bit, ldmatrix reads 16 bytes of eight rows, which begin at
  // eight different ones of a bank's 128.
  static constexpr int kRowPitch = kRows + 8, kPositionPitch = kPositions + 8,
                       kInputPitch = kInputs + kVector;
};

/// How operands come into shared memory.
enum class Pieces {
  kVectors,  // 16 bytes
  kWords,    // 4
  kValues    // one value: of 16 bit less than cp.async copies
};

template <class T>
struct ColumnsArgs {
  const T* x;                             // [N,C,D,H,W] or [N,D,H,W,C]
  const T* w;                             // [C,K,T,R,S], by its strides
  float* columns;                         // [samples][rows][pitch] of ColumnsLayout
  std::int64_t x_sample, columns_sample;  // values from sample to sample
  int rows, positions, inputs, pitch;
  int row_tiles, position_tiles;
  Pieces w_pieces, x_pieces;
  std::int64_t w_input;  // values from input channel to input channel
  std::int64_t w_k, w_tap[3];
  int kernel[2];  // R,S
  int taps;       // T*R*S
  int row_k;      // as in ColumnsLayout
};

/// A stage of both operands.
template <class Tile>
struct alignas(kAccessBytes) ColumnsStage {
  using T = typename Tile::Element;
  T w[Tile::kInputs][Tile::kRowPitch];
  T x[Tile::kInRows ? Tile::kPositions * Tile::kInputPitch : Tile::kInputs * Tile::kPositionPitch];

  __device__ T& x_at(int input, int position) {
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
template <class T>
__device__ std::int64_t w_offset(const ColumnsArgs<T>& args, int row) {
  const int k = args.row_k == 1 ? row % (args.rows / args.taps) : row / args.taps;
  const int tap = args.row_k == 1 ? row / (args.rows / args.taps) : row % args.taps;
  const int s = tap % args.kernel[1], r = tap / args.kernel[1] % args.kernel[0];
  const int t = tap / args.kernel[1] / args.kernel[0];
  return k * args.w_k + t * args.w_tap[0] + r * args.w_tap[1] + s * args.w_tap[2];
}

/// Neighbours that one thread copies at once.
template <class T>
struct Piece {
  T* to;  // shared memory
  const T* from;
  bool inside;  // else zeros are brought
};

/// Brings kCopies pieces of kValues, piece_of(0) and so on, kTogether at a time.
template <class T, int kValues, int kCopies, int kTogether, class PieceOf>
__device__ __forceinline__ void bring(const PieceOf& piece_of) {
  if constexpr (kValues * sizeof(T) >= 4) {
#pragma unroll kTogether
    for (int copy = 0; copy < kCopies; ++copy) {
      const Piece<T> piece = piece_of(copy);
      copy_async<kValues* int(sizeof(T))>(piece.to, piece.from, piece.inside);
    }
  } else {
    // All loads before the first store, which waits for its own.
    using Bits = Word<sizeof(T)>;
    constexpr int kLoads = kCopies < kTogether ? kCopies : kTogether;
    static_assert(kCopies % kLoads == 0);
    for (int first = 0; first < kCopies; first += kLoads) {
      Bits bits[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const Piece<T> piece = piece_of(first + i);
        bits[i] = piece.inside ? __ldg(reinterpret_cast<const Bits*>(piece.from)) : Bits(0);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) *reinterpret_cast<Bits*>(piece_of(first + i).to) = bits[i];
    }
  }
}

/// Starts the copies of one stage after the other.
template <class Tile>
class ColumnsLoader {
 public:
  using T = typename Tile::Element;

  __device__ ColumnsLoader(const ColumnsArgs<T>& args, const T* x, int row0, int position0)
      : args_(args), x_(x), row0_(row0), position0_(position0) {
    const int row = row0 + int(threadIdx.x) % Tile::kRows;
    const bool by_value = args.w_pieces == Pieces::kValues && row < args.rows;
    w_ = args.w + (by_value ? w_offset(args, row) : 0);
  }

  /// x first: its copies are on their way while weights come through registers.
  __device__ void load(ColumnsStage<Tile>& to, int input0) const {
    by_pieces(args_.x_pieces, [&](auto values) { copy_x<values()>(to, input0); });
    by_pieces(args_.w_pieces, [&](auto values) { copy_w<values()>(to, input0); });
  }

 private:
  static constexpr int kInputs = Tile::kInputs, kWord = 4 / int(sizeof(T));
  static constexpr int kLoadsTogether = 8;  // through registers

  /// Calls copy(the number of values of a piece).
  template <class Copy>
  __device__ static void by_pieces(Pieces pieces, const Copy& copy) {
    if (pieces == Pieces::kVectors) return copy(std::integral_constant<int, Tile::kVector>());
    if (kWord > 1 && pieces == Pieces::kWords) return copy(std::integral_constant<int, kWord>());
    copy(std::integral_constant<int, 1>());
  }

  /// \tparam kValues of one copy; of one value, w_ is where the thread's row begins
  template <int kValues>
  __device__ void copy_w(ColumnsStage<Tile>& to, int input0) const {
    constexpr int kAcross = Tile::kRows / kValues, kDown = kThreads / kAcross;
    constexpr int kCopies = kInputs / kDown > 0 ? kInputs / kDown : 1;
    const int m = int(threadIdx.x) % kAcross * kValues, first = int(threadIdx.x) / kAcross;
    const int skipped = kValues > 1 ? row0_ + m : 0;
    if (kInputs < kDown && first >= kInputs) return;
    constexpr bool kIsAsync = kValues * sizeof(T) >= 4;
    bring<T, kValues, kCopies, kIsAsync ? kCopies : kLoadsTogether>([&](int copy) {
      const int i = first + copy * kDown;
      const bool inside = input0 + i < args_.inputs && row0_ + m < args_.rows;
      return Piece<T>{&to.w[i][m], w_ + (inside ? (input0 + i) * args_.w_input + skipped : 0), inside};
    });
  }

  /// \tparam kValues of one copy
  template <int kValues>
  __device__ void copy_x(ColumnsStage<Tile>& to, int input0) const {
    constexpr bool kInRows = Tile::kInRows;
    constexpr int kAcross = (kInRows ? kInputs : Tile::kPositions) / kValues;
    constexpr int kCopies = kInputs * Tile::kPositions / kValues / kThreads;
    constexpr bool kIsAsync = kValues * sizeof(T) >= 4;
    // Addresses take registers.
    constexpr int kTogether = kValues == Tile::kVector ? kCopies : kIsAsync ? 2 : kLoadsTogether;
    bring<T, kValues, kCopies, kTogether>([&](int copy) {
      const int at = copy * kThreads + int(threadIdx.x);
      const int along = at % kAcross * kValues, down = at / kAcross;
      const int i = kInRows ? along : down, n = kInRows ? down : along;
      const bool inside = input0 + i < args_.inputs && position0_ + n < args_.positions;
      const int input = input0 + i, position = position0_ + n;
      const int offset = kInRows ? position * args_.inputs + input : input * args_.positions + position;
      return Piece<T>{&to.x_at(i, n), x_ + (inside ? offset : 0), inside};
    });
  }

  const ColumnsArgs<T>& args_;
  const T* x_;
  const T* w_;  // of the thread's row, or of all
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

/// What a warp has of a tile: fragments of 16 rows by 8 positions, as mma.sync has them.
struct ColumnsSums {
  static constexpr int kRowFragments = kWarpRows / 16, kPositionFragments = kWarpPositions / 8;
  float at[kRowFragments][kPositionFragments][4] = {};
};

/// Adds a k-block's products of float32, of a warp whose rows and positions begin at m0 and n0.
template <int kProducts, class Tile>
__device__ __forceinline__ void multiply_floats(ColumnsStage<Tile>& stage, int m0, int n0,
                                                ColumnsSums& sums) {
  const int lane = int(threadIdx.x) % 32;
  constexpr int kUnrolled = kProducts == 3 ? 1 : 2;  // three products' words take registers
#pragma unroll kUnrolled
  for (int step = 0; step < Tile::kInputs; step += 8) {
    const int i = step + lane % 4;
    OperandWords<4, kProducts> a[ColumnsSums::kRowFragments];
#pragma unroll
    for (int f = 0; f < ColumnsSums::kRowFragments; ++f) {
      const int m = m0 + lane / 4 + 16 * f;
      const float values[4] = {stage.w[i][m], stage.w[i][m + 8], stage.w[i + 4][m], stage.w[i + 4][m + 8]};
      set_words<kProducts>(a[f], values);
    }
#pragma unroll
    for (int g = 0; g < ColumnsSums::kPositionFragments; ++g) {
      const int n = n0 + 8 * g + lane / 4;
      const float values[2] = {stage.x_at(i, n), stage.x_at(i + 4, n)};
      OperandWords<2, kProducts> b;
      set_words<kProducts>(b, values);
#pragma unroll
      for (int f = 0; f < ColumnsSums::kRowFragments; ++f) {
        multiply_add<float>(sums.at[f][g], a[f], b, sums.at[f][g]);
      }
    }
  }
}

/// The same of 16 bit.
template <class Tile>
__device__ __forceinline__ void multiply_halves(ColumnsStage<Tile>& stage, int m0, int n0,
                                                ColumnsSums& sums) {
  using T = typename Tile::Element;
  const int lane = int(threadIdx.x) % 32, row = lane % 8;
  // Of the four matrices that an instruction loads, this lane names a row of the one that is `second` along
  // either axis.
  const int second[2] = {lane / 8 % 2 * 8, lane / 16 * 8};
#pragma unroll
  for (int step = 0; step < Tile::kInputs; step += 16) {
    std::uint32_t a[ColumnsSums::kRowFragments][4];
#pragma unroll
    for (int f = 0; f < ColumnsSums::kRowFragments; ++f) {
      load_matrices<true>(a[f], &stage.w[step + row + second[1]][m0 + 16 * f + second[0]]);
    }
#pragma unroll
    for (int g = 0; g < ColumnsSums::kPositionFragments; g += 2) {
      const int n = n0 + 8 * g;
      std::uint32_t b[4];
      if constexpr (Tile::kInRows) {
        load_matrices<false>(b, &stage.x_at(step + second[0], n + row + second[1]));
      } else {
        load_matrices<true>(b, &stage.x_at(step + row + second[0], n + second[1]));
      }
#pragma unroll
      for (int f = 0; f < ColumnsSums::kRowFragments; ++f) {
        multiply_add<T>(sums.at[f][g], a[f], b[0], b[1], sums.at[f][g]);
        multiply_add<T>(sums.at[f][g + 1], a[f], b[2], b[3], sums.at[f][g + 1]);
      }
    }
  }
}

template <int kProducts, class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocks)
    conv_transpose_columns_sm80(const __grid_constant__ ColumnsArgs<typename Tile::Element> args) {
  constexpr int kStages = kColumnsStages<Tile>, kInputs = Tile::kInputs;
  extern __shared__ __align__(kAccessBytes) unsigned char shared[];
  auto* const stages = reinterpret_cast<ColumnsStage<Tile>*>(shared);
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
  const int m0 = warp % kDown * kWarpRows, n0 = warp / kDown * kWarpPositions;
  ColumnsSums sums;
  for (int block = 0, now = 0; block < k_blocks; ++block) {
    await_copies<kStages - 2>();
    __syncthreads();
    // Into the stage of the block before, with which all warps are done.
    const int ahead = block + kStages - 1;
    if (ahead < k_blocks) loader.load(stages[now == 0 ? kStages - 1 : now - 1], ahead * kInputs);
    end_copies();
    ColumnsStage<Tile>& stage = stages[now];
    now = now + 1 == kStages ? 0 : now + 1;
    if constexpr (std::is_same_v<typename Tile::Element, float>) {
      multiply_floats<kProducts>(stage, m0, n0, sums);
    } else {
      multiply_halves(stage, m0, n0, sums);
    }
  }

  float* const columns = args.columns + sample * args.columns_sample;
#pragma unroll
  for (int f = 0; f < ColumnsSums::kRowFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m0 + lane / 4 + 16 * f + 8 * half;
      if (row >= args.rows) continue;
#pragma unroll
      for (int g = 0; g < ColumnsSums::kPositionFragments; ++g) {
        const int position = position0 + n0 + 8 * g + 2 * (lane % 4);
        if (position >= args.positions) continue;
        // Rows are whole vectors, so that the second of the pair is at least padding.
        *reinterpret_cast<float2*>(columns + std::int64_t(row) * args.pitch + position) =
            make_float2(sums.at[f][g][2 * half], sums.at[f][g][2 * half + 1]);
      }
    }
  }
}

/// The widest pieces that rows of `row` values from `pointer` on come in.
template <class T>
Pieces widest_pieces(const void* pointer, std::int64_t row) {
  const auto begins = [&](std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0 &&
           row * static_cast<std::int64_t>(sizeof(T)) % bytes == 0;
  };
  if (begins(kAccessBytes)) return Pieces::kVectors;
  return sizeof(T) < 4 && begins(4) ? Pieces::kWords : Pieces::kValues;
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
void launch(ColumnsArgs<typename Tile::Element>& args, std::int64_t samples, cudaStream_t stream) {
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
template <int kProducts, bool kInRows, class T>
void launch_tile(ColumnsArgs<T>& args, std::int64_t samples, cudaStream_t stream) {
  const int down = columns_tile_rows(args.rows, args.positions) / kWarpRows;
  if (down == 1) return launch<kProducts, ColumnsTile<T, 1, kInRows>>(args, samples, stream);
  if (down == 4) return launch<kProducts, ColumnsTile<T, 4, kInRows>>(args, samples, stream);
  launch<kProducts, ColumnsTile<T, 2, kInRows>>(args, samples, stream);
}

template <int kProducts, class T>
void launch_of(const ConvTransposeColumnsParams& params, cudaStream_t stream) {
  const Problem& p = params.problem;
  const ColumnsLayout layout(p);
  const bool in_rows = p.x_layout == Layout::kNDHWC;
  ColumnsArgs<T> args{};
  args.x = static_cast<const T*>(params.x);
  args.w = static_cast<const T*>(params.w);
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
  args.w_pieces = lies_in_order(params, layout) ? widest_pieces<T>(params.w, layout.rows) : Pieces::kValues;
  args.x_pieces = widest_pieces<T>(params.x, in_rows ? p.c : layout.positions);
  if (in_rows) return launch_tile<kProducts, true>(args, layout.samples, stream);
  launch_tile<kProducts, false>(args, layout.samples, stream);
}

}  // namespace

void launch_columns(const ConvTransposeColumnsParams& params, cudaStream_t stream) {
  const Problem& p = params.problem;
  if (p.dtype == DType::kBFloat16) return launch_of<1, __nv_bfloat16>(params, stream);
  if (p.dtype == DType::kFloat16) return launch_of<1, __half>(params, stream);
  if (p.dtype != DType::kFloat32) {
    throw std::logic_error("upconv3d: conv_transpose_columns_sm80 has no kernel for " + describe(p));
  }
  if (p.is_ieee()) return launch_of<3, float>(params, stream);
  launch_of<1, float>(params, stream);
}

}  // namespace upconv3d::cuda
