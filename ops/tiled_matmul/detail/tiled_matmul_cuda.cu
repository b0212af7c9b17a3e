#include <algorithm>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/detail/ceil_div.h>
#include <mica/ops/gemm/detail/tile_order.cuh>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_cuda.cuh>

// The kernels for all GPUs and all strides: one for 16-bit floats, with tensor cores, and one for other dtypes,
// without. On compute capability 9.0, 16-bit products use the faster tiled_matmul_sm90.cu where possible.

namespace mica::kernels {

namespace tiles {

namespace {

constexpr int kGroup = 8;  // rows of tiles in a group (TileOrder)

/// Sizes of a product, whose output is divided into tiles, one per block.
struct Product {
  gemm::TileOrder order;
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  std::int64_t depth;    // K
};

Product product_of(const TiledMatmulArgs& args, int tile_rows, int tile_columns) {
  const std::int64_t m = args.y.size(0);
  const std::int64_t n = args.y.size(1);
  return {.order = {.rows = static_cast<int>(ceil_div(m, tile_rows)),
                    .columns = static_cast<int>(ceil_div(n, tile_columns)),
                    .group = kGroup},
          .rows = m,
          .columns = n,
          .depth = args.a.size(1)};
}

// The kernel with tensor cores.

constexpr int kTile = 128;  // rows and columns of the output
constexpr int kSlice = 32;  // elements of K that are multiplied between two barriers
constexpr int kStages = 3;  // slices in shared memory, being loaded or multiplied
constexpr int kPack = 8;    // 16-bit elements in 16 bytes
// Each warp computes a part of the tile, by mma instructions of size 16 x 8 x 16.
constexpr int kWarpsDown = 2;
constexpr int kWarpsAcross = 2;
constexpr int kWarpRows = kTile / kWarpsDown;
constexpr int kWarpColumns = kTile / kWarpsAcross;
constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;

using Bits = std::uint16_t;

/// A 16-bit operand on the device.
struct Source {
  const Bits* data;
  std::int64_t lines;
  std::int64_t length;
  std::int64_t leading;
  std::int64_t step;
  bool packs;  // whether lines are contiguous and can be read in aligned packs of 16 bytes

  Source(const Tensor& x, const OperandLayout& m)
      : data(reinterpret_cast<const Bits*>(x.raw_data())),
        lines(m.lines),
        length(m.length),
        leading(m.leading),
        step(m.step),
        packs(m.step == 1 && m.leading % kPack == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {}
};

/// A slice of an operand in shared memory. Its lines run along K and have length kSlice, or run along the rows of A
/// (the columns of B) and have length kTile. They are padded by 16 bytes against bank conflicts.
template <Lines kLines>
struct OperandSlice {
  static constexpr int kCount = kLines == Lines::depth ? kTile : kSlice;
  static constexpr int kLength = kLines == Lines::depth ? kSlice : kTile;
  static constexpr int kPitch = kLength + kPack;

  Bits data[kCount * kPitch];

  /// Starts loading the slice that begins at row (of A) or column (of B) `row`, and at `k` along K. Elements outside of
  /// the matrix become zeros. Called by all threads.
  __device__ void load(const Source& x, std::int64_t row, std::int64_t k) {
    const std::int64_t first_line = kLines == Lines::depth ? row : k;
    const std::int64_t first = kLines == Lines::depth ? k : row;
#pragma unroll
    for (int i = threadIdx.x; i < kCount * kLength / kPack; i += kThreads) {
      const int line = i / (kLength / kPack);
      const int element = i % (kLength / kPack) * kPack;
      Bits* const to = data + line * kPitch + element;
      const std::int64_t rest = first_line + line < x.lines ? x.length - first - element : 0;
      const Bits* const from = x.data + (first_line + line) * x.leading + (first + element) * x.step;
      if (x.packs && rest >= kPack) {
        cuda::copy_async<16>(to, from);
      } else {
        alignas(16) Bits values[kPack];
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          values[j] = j < rest ? from[j * x.step] : Bits{0};
        }
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
      }
    }
  }

  /// Loads four 8 x 8 matrices, 16 rows and 16 elements of K, from `row` and `k` on (ldmatrix). Matrix 0 comes first;
  /// its neighbor along K is matrix 1 or, with kRowsFirst, matrix 2.
  template <bool kRowsFirst>
  __device__ void matrices(std::uint32_t (&pairs)[4], int row, int k) const {
    const int lane = threadIdx.x % 32;
    const int number = lane / 8;
    row += 8 * (kRowsFirst ? number % 2 : number / 2);
    k += 8 * (kRowsFirst ? number / 2 : number % 2);
    if constexpr (kLines == Lines::depth) {
      cuda::load_matrices(pairs, data + (row + lane % 8) * kPitch + k);
    } else {
      cuda::load_matrices_transposed(pairs, data + (k + lane % 8) * kPitch + row);
    }
  }
};

template <Lines kA, Lines kB>
struct Stage {
  OperandSlice<kA> a;
  OperandSlice<kB> b;
};

/// The sums of a warp's part of the tile: sums[i][j] are those of rows 16 i and columns 8 j on, as mma computes them.
using WarpSums = float[kWarpRows / 16][kWarpColumns / 8][4];

/// Writes a warp's part of the tile, whose first element is (row, column).
template <class T>
__device__ void write_warp(const WarpSums& sums, T* y, const Product& product, std::int64_t row, std::int64_t column,
                           float slope) {
  const int lane = threadIdx.x % 32;
  const bool in_pairs = product.columns % 2 == 0 && reinterpret_cast<std::uintptr_t>(y) % 4 == 0;
#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t m = row + 16 * i + 8 * half + lane / 4;
        const std::int64_t n = column + 8 * j + lane % 4 * 2;
        const float first = leaky(sums[i][j][2 * half], slope);
        const float second = leaky(sums[i][j][2 * half + 1], slope);
        T* const to = y + m * product.columns + n;
        if (m >= product.rows || n >= product.columns) {
          continue;
        }
        if (in_pairs) {
          *reinterpret_cast<std::uint32_t*>(to) = cuda::pair_of<T>(first, second);
        } else {
          to[0] = T(first);
          if (n + 1 < product.columns) {
            to[1] = T(second);
          }
        }
      }
    }
  }
}

/// Each thread block computes one tile of y.
template <class T, Lines kA, Lines kB>
__global__ void __launch_bounds__(kThreads, 2)
    tiled_matmul_mma_kernel(const Source a, const Source b, T* y, const Product product, float slope) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const stages = reinterpret_cast<Stage<kA, kB>*>(memory);
  const gemm::TileOrder::Position position = product.order.position(blockIdx.x);
  const std::int64_t row = std::int64_t{position.row} * kTile;
  const std::int64_t column = std::int64_t{position.column} * kTile;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsAcross * kWarpRows;
  const int warp_column = warp % kWarpsAcross * kWarpColumns;
  const int slices = static_cast<int>((product.depth + kSlice - 1) / kSlice);

  const auto load = [&](int slice) {
    if (slice < slices) {
      Stage<kA, kB>& stage = stages[slice % kStages];
      stage.a.load(a, row, std::int64_t{slice} * kSlice);
      stage.b.load(b, column, std::int64_t{slice} * kSlice);
    }
    cuda::commit_copies();  // one group per slice, even if empty, so that the groups can be counted
  };
  for (int slice = 0; slice < kStages - 1; ++slice) {
    load(slice);
  }

  WarpSums sums = {};
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    cuda::wait_copies<kStages - 2>();
    __syncthreads();  // the slice is visible to all threads, and all have finished the previous one
    load(slice + kStages - 1);
    const Stage<kA, kB>& stage = stages[slice % kStages];
#pragma unroll
    for (int k = 0; k < kSlice; k += 16) {
      std::uint32_t a_pairs[kWarpRows / 16][4];
      std::uint32_t b_pairs[kWarpColumns / 16][4];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        stage.a.template matrices<true>(a_pairs[i], warp_row + 16 * i, k);
      }
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        stage.b.template matrices<false>(b_pairs[j], warp_column + 16 * j, k);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          cuda::multiply_add_16_8_16<T>(sums[i][j], a_pairs[i], b_pairs[j / 2][j % 2 * 2],
                                        b_pairs[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  write_warp(sums, y, product, row + warp_row, column + warp_column, slope);
}

template <class T>
void multiply_mma(const TiledMatmulArgs& args) {
  const OperandLayout a = gemm::layout_of(args.a);
  const OperandLayout b = gemm::layout_of(args.b);
  const Product product = product_of(args, kTile, kTile);
  on_lines(a, b, [&]<Lines kA, Lines kB>() {
    cuda::Launch(product.order.size(), kThreads, kStages * sizeof(Stage<kA, kB>))
        .run(tiled_matmul_mma_kernel<T, kA, kB>, "tiled_matmul_mma_kernel", Source(args.a, a), Source(args.b, b),
             args.y.data<T>(), product, static_cast<float>(slope_of(args.activation)));
  });
}

// The kernel without tensor cores, kept simple.

constexpr int kPlainTile = 128;
constexpr int kPlainSlice = 16;
constexpr int kEach = 8;  // rows and columns per thread, with a distance of 16
constexpr int kSide = kPlainTile / kEach;
constexpr int kPlainThreads = kSide * kSide;

template <class T>
struct Strided {
  const T* data;
  std::int64_t row_step;
  std::int64_t column_step;

  explicit Strided(const Tensor& x) : data(x.data<T>()), row_step(x.strides()[0]), column_step(x.strides()[1]) {}
  __device__ T at(std::int64_t row, std::int64_t column) const { return data[row * row_step + column * column_step]; }
};

template <class T>
__global__ void __launch_bounds__(kPlainThreads, sizeof(T) == 4 ? 2 : 1)
    tiled_matmul_fma_kernel(const Strided<T> a, const Strided<T> b, T* y, const Product product, T slope) {
  __shared__ T a_slice[kPlainSlice][kPlainTile + 1];  // padded, so that the elements of a column are in different banks
  __shared__ T b_slice[kPlainSlice][kPlainTile + 1];
  const gemm::TileOrder::Position position = product.order.position(blockIdx.x);
  const std::int64_t row = std::int64_t{position.row} * kPlainTile;
  const std::int64_t column = std::int64_t{position.column} * kPlainTile;
  const int i = threadIdx.x / kSide;
  const int j = threadIdx.x % kSide;
  T sums[kEach][kEach] = {};
  for (std::int64_t k = 0; k < product.depth; k += kPlainSlice) {
    for (int at = threadIdx.x; at < kPlainTile * kPlainSlice; at += kPlainThreads) {
      const int a_row = at / kPlainSlice, a_k = at % kPlainSlice;
      const int b_k = at / kPlainTile, b_column = at % kPlainTile;
      const bool a_inside = row + a_row < product.rows && k + a_k < product.depth;
      const bool b_inside = column + b_column < product.columns && k + b_k < product.depth;
      a_slice[a_k][a_row] = a_inside ? a.at(row + a_row, k + a_k) : T{0};
      b_slice[b_k][b_column] = b_inside ? b.at(k + b_k, column + b_column) : T{0};
    }
    __syncthreads();
#pragma unroll 2  // with more, two blocks per multiprocessor would not have enough registers
    for (int depth = 0; depth < kPlainSlice; ++depth) {
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int c = 0; c < kEach; ++c) {
          sums[r][c] = fma(a_slice[depth][i + r * kSide], b_slice[depth][j + c * kSide], sums[r][c]);
        }
      }
    }
    __syncthreads();  // before the next slice overwrites this one
  }
  for (int r = 0; r < kEach; ++r) {
    for (int c = 0; c < kEach; ++c) {
      const std::int64_t m = row + i + r * kSide;
      const std::int64_t n = column + j + c * kSide;
      if (m < product.rows && n < product.columns) {
        y[m * product.columns + n] = leaky(sums[r][c], slope);
      }
    }
  }
}

template <class T>
void multiply_fma(const TiledMatmulArgs& args) {
  const Product product = product_of(args, kPlainTile, kPlainTile);
  cuda::Launch(product.order.size(), kPlainThreads)
      .run(tiled_matmul_fma_kernel<T>, "tiled_matmul_fma_kernel", Strided<T>(args.a), Strided<T>(args.b),
           args.y.data<T>(), product, static_cast<T>(slope_of(args.activation)));
}

/// Whether a product uses each element so often that copying its operands to an aligned layout saves time.
bool is_worth_copies(const TiledMatmulArgs& args) {
  const double m = static_cast<double>(args.y.size(0));
  const double n = static_cast<double>(args.y.size(1));
  const double k = static_cast<double>(args.a.size(1));
  return m * n * k >= 1 << 26 && m * n * k >= 64 * (m * n + m * k + k * n);
}

/// A new matrix of x's shape for the sm90 kernel: row- or column-major like x, with rows or columns aligned to 16
/// bytes.
Tensor aligned_like(const Tensor& x) {
  const OperandLayout m = gemm::layout_of(x);
  const std::int64_t leading = (m.length + kPack - 1) / kPack * kPack;
  const Tensor lines = empty({m.lines, leading}, x.dtype(), x.device());
  return as_strided(lines, x.shape(), m.lines_are_rows ? Strides{leading, 1} : Strides{1, leading}, 0);
}

Tensor fitting(const Tensor& x) {
  if (fits_sm90(x)) {
    return x;
  }
  const Tensor copy = aligned_like(x);
  copy_into(copy, x);
  return copy;
}

bool try_sm90(const TiledMatmulArgs& args) {
  if (!cuda::device_has_wgmma()) {
    return false;
  }
  const bool y_fits = fits_sm90(args.y);
  if (!(y_fits && fits_sm90(args.a) && fits_sm90(args.b)) && !is_worth_copies(args)) {
    return false;
  }
  const Tensor y = y_fits ? args.y : aligned_like(args.y);
  multiply_sm90({.a = fitting(args.a), .b = fitting(args.b), .activation = args.activation, .y = y});
  if (!y_fits) {
    copy_into(args.y, y);
  }
  return true;
}

}  // namespace

}  // namespace tiles

void tiled_matmul(Cuda, const TiledMatmulArgs& args) {
  on_dtype(FloatTypes{}, args.y.dtype(), "tiled_matmul", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      if (!tiles::try_sm90(args)) {
        tiles::multiply_mma<T>(args);
      }
    } else {
      tiles::multiply_fma<T>(args);
    }
  });
}

}  // namespace mica::kernels
