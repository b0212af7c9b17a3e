#include <mica/core/detail/ceil_div.h>
#include <mica/ops/elementwise/detail/functions.h>
#include <mica/ops/gemm/detail/kernel_sm90.cuh>
#include <mica/ops/matmul/detail/matmul_epilogue_cuda.h>

// Matrix products with an activation, or the derivative of one, as the epilogue of the kernel in ops/gemm. This
// takes long, since it moves two tensors of the output's size, so the warpgroups alternate (Schedule::ping_pong).

namespace mica::kernels {

namespace {

using EpiloguePlan = gemm::TilePlan<128, 5, 2>;
constexpr int kHalves = gemm::kTileRows / gemm::kHalfRows;
constexpr int kChunks = EpiloguePlan::kColumns / gemm::kChunk;  // per tile
constexpr int kGroups = gemm::kChunk / 16;                      // groups of 16 columns
constexpr int kWarps = gemm::kWarpgroup / 32;

/// A buffer for each half and each chunk of a tile; number chunk * kHalves + half.
using Buffers = gemm::TileBuffers<kHalves * kChunks>;
using Sums = float[kHalves][EpiloguePlan::kColumns / 2];

/// The epilogue of backward: out = (a · b) ⊙ slopes, and the column sums of each tile, for the gradient of the bias.
template <class T>
struct Gradient {
  using Element = T;
  static constexpr int kBuffers = kHalves * kChunks;
  struct Memory {
    float sums[kWarps][gemm::kChunk];  // column sums
  };
  CUtensorMap slopes;
  CUtensorMap out;
  float* parts;  // (tiles of rows, N), or null
  int part_count;
  int columns;

  /// Starts to load the tile's slopes.
  template <class Tile>
  __device__ gemm::Nothing begin(const Buffers& buffers, const Tile& tile) const {
    buffers.template load<kHalves>(&slopes, tile);
    return {};
  }

  template <class Tile>
  __device__ void end(const Buffers& buffers, const Tile& tile, const Sums& sums, gemm::Nothing) const {
    cuda::wait(tile.loaded, tile.parity);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float totals[gemm::kChunk / 4] = {};  // column sums: a thread has two of every 8 columns
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        multiply(buffers, chunk * kHalves + half, sums[half] + chunk * (gemm::kChunk / 2), totals);
      }
      if (parts != nullptr) {
        buffers.sync();  // until the previous sums have been read
        write_totals(tile.memory.sums[buffers.warp()], totals, buffers.lane());
      }
      const int column = tile.column + chunk * gemm::kChunk;
      buffers.store([&] {
        if (column < columns) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            cuda::store_tile(&out, column, tile.row + half * gemm::kHalfRows, buffers.memory[chunk * kHalves + half]);
          }
        }
      });
      if (parts != nullptr && buffers.thread() < gemm::kChunk) {
        write_part(tile.memory, tile.row / gemm::kTileRows, column + buffers.thread(), buffers.thread());
      }
    }
  }

 private:
  /// Multiplies the slopes in a buffer by the sums, and adds the products to the totals of their columns.
  __device__ static void multiply(const Buffers& buffers, int buffer, const float* sums,
                                  float (&totals)[gemm::kChunk / 4]) {
    std::uint32_t pairs[kGroups][4];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      buffers.get(buffer, i, pairs[i]);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float* const s = sums + i * 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 slope = gemm::floats_of<T>(pairs[i][j]);
        const float first = s[2 * j] * slope.x;
        const float second = s[2 * j + 1] * slope.y;
        totals[4 * i + j / 2 * 2] += first;
        totals[4 * i + j / 2 * 2 + 1] += second;
        pairs[i][j] = cuda::pair_of<T>(first, second);
      }
      buffers.put(buffer, i, pairs[i]);
    }
  }

  /// Writes the sum of a column of the tile, which is column number `index` of the chunk.
  __device__ void write_part(const Memory& shared, int part, int column, int index) const {
    if (column < columns && part < part_count) {
      float total = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        total += shared.sums[warp][index];
      }
      parts[std::int64_t{part} * columns + column] = total;
    }
  }

  /// Halves the number of totals per lane: lanes kStep apart exchange halves of their totals, and each adds up the half
  /// that it keeps. Returns the original index of this lane's first total.
  template <int kStep, int kKept>
  __device__ static int fold(float (&totals)[gemm::kChunk / 4], int lane) {
    const bool upper = (lane & kStep) != 0;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const float sent = upper ? totals[k] : totals[k + kKept];
      const float mine = upper ? totals[k + kKept] : totals[k];
      totals[k] = mine + __shfl_xor_sync(~0u, sent, kStep);
    }
    return upper ? kKept : 0;
  }

  /// Adds up the totals of the 8 lanes that have the same 16 columns. Each lane then writes two sums.
  __device__ static void write_totals(float (&to)[gemm::kChunk], float (&totals)[gemm::kChunk / 4], int lane) {
    const int first = fold<16, 8>(totals, lane) + fold<8, 4>(totals, lane) + fold<4, 2>(totals, lane);
    const int column = first / 4 * 16 + first % 4 / 2 * 8 + lane % 4 * 2;
    to[column] = totals[0];
    to[column + 1] = totals[1];
  }
};

/// The epilogue of forward: out = f(z) for z = a · b + bias, and a second output, which is f′(z) if kSlopes, else z.
template <class T, class F, bool kSlopes>
struct Forward {
  using Element = T;
  static constexpr int kBuffers = kHalves * kChunks;
  using Memory = gemm::Nothing;
  CUtensorMap second;
  CUtensorMap out;
  const T* bias;  // or null
  int columns;

  struct Loaded {
    std::uint32_t biases[kGroups][2];  // of a chunk's columns, two per word
  };

  template <class Tile>
  __device__ Loaded begin(const Buffers& buffers, const Tile& tile) const {
    return load(buffers, tile.column);
  }

  template <class Tile>
  __device__ void end(Buffers& buffers, const Tile& tile, const Sums& sums, Loaded& loaded) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = tile.column + chunk * gemm::kChunk;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int buffer = buffers.template take<2>();  // the next one is for the second output
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          fill(buffers, buffer, i, sums[half] + chunk * (gemm::kChunk / 2) + i * 8, loaded);
        }
        if (half + 1 == kHalves && chunk + 1 < kChunks) {
          loaded = load(buffers, column + gemm::kChunk);
        }
        buffers.store([&] {
          if (column < columns) {
            const int row = tile.row + half * gemm::kHalfRows;
            cuda::store_tile(&out, column, row, buffers.memory[buffer]);
            cuda::store_tile(&second, column, row, buffers.memory[buffer + 1]);
          }
        });
      }
    }
  }

 private:
  /// Computes both outputs of the i-th 16 columns of a chunk.
  __device__ static void fill(const Buffers& buffers, int buffer, int i, const float* s, const Loaded& loaded) {
    const float2 biases[2] = {gemm::floats_of<T>(loaded.biases[i][0]), gemm::floats_of<T>(loaded.biases[i][1])};
    std::uint32_t pairs[4];
    std::uint32_t second_pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float z[2] = {s[2 * j] + biases[j / 2].x, s[2 * j + 1] + biases[j / 2].y};
      const auto first = F::template at<T>(z[0]);
      const auto second = F::template at<T>(z[1]);
      pairs[j] = cuda::pair_of<T>(first.value, second.value);
      second_pairs[j] = kSlopes ? cuda::pair_of<T>(first.slope, second.slope) : cuda::pair_of<T>(z[0], z[1]);
    }
    buffers.put(buffer, i, pairs);
    buffers.put(buffer + 1, i, second_pairs);
  }

  /// The biases of a thread's columns of the chunk that begins at `first`.
  __device__ Loaded load(const Buffers& buffers, int first) const {
    Loaded loaded{};
#pragma unroll
    for (int k = 0; k < gemm::kChunk / 8; ++k) {
      const int column = first + buffers.column(k / 2, k % 2 * 2);
      if (bias != nullptr && column < columns) {
        loaded.biases[k / 2][k % 2] = *reinterpret_cast<const std::uint32_t*>(bias + column);
      }
    }
    return loaded;
  }
};

template <class T, cuda::Lines kB, class Epilogue>
void launch_epilogue(const Tensor& a, const Tensor& b, const Epilogue& epilogue) {
  gemm::launch<EpiloguePlan, gemm::Schedule::ping_pong>(
      "matmul_epilogue_kernel", a.size(0), b.size(1), a.size(1),
      gemm::MatrixOperands<EpiloguePlan, cuda::Lines::depth, kB>(a, b), epilogue);
}

CUtensorMap map_of_half_tiles(const Tensor& x) { return gemm::map_of(x, gemm::kHalfRows); }

/// Whether this kernel supports a · b: 16-bit floats, contiguous rows of a, contiguous rows (if b_has_rows) or columns
/// of b, and at least as many tiles as multiprocessors.
bool fits_epilogue(const Tensor& a, const Tensor& b, bool b_has_rows, const Tensor& out) {
  return cuda::device_has_wgmma() && size_of(out.dtype()) == 2 && out.dim() == 2 && gemm::layout_of(a).lines_are_rows &&
         gemm::layout_of(b).lines_are_rows == b_has_rows &&
         ceil_div(out.size(0), gemm::kTileRows) * ceil_div(out.size(1), EpiloguePlan::kColumns) >=
             cuda::multiprocessor_count() &&
         gemm::fits_tensor_map(a) && gemm::fits_tensor_map(b) && gemm::fits_tensor_map(out);
}

}  // namespace

bool matmul_with_epilogue(const MatmulActivationBackward& args) {
  if (!args.slopes.defined() || !fits_epilogue(args.a, args.b, true, args.out) || !gemm::fits_tensor_map(args.slopes)) {
    return false;
  }
  const std::int64_t columns = args.out.size(1);
  const int part_count = static_cast<int>(ceil_div(args.out.size(0), gemm::kTileRows));
  const Tensor parts = args.dbias.defined() ? empty({part_count, columns}, float32, args.out.device()) : Tensor{};
  on_dtype(Types<Float16, BFloat16>{}, args.out.dtype(), "matmul", [&]<class T>() {
    launch_epilogue<T, cuda::Lines::rows>(args.a, args.b,
                                          Gradient<T>{.slopes = map_of_half_tiles(args.slopes),
                                                      .out = map_of_half_tiles(args.out),
                                                      .parts = parts.data_or_null<float>(),
                                                      .part_count = part_count,
                                                      .columns = static_cast<int>(columns)});
  });
  if (parts.defined()) {
    add_parts(parts, args.dbias);
  }
  return true;
}

bool gives_slopes(Cuda, const MatmulArgs& args) {
  return args.activation == Activation::gelu_tanh && !args.accumulate && args.a.size(-1) > 0 &&
         fits_epilogue(args.a, args.b, false, args.out) &&
         (!args.bias.defined() || reinterpret_cast<std::uintptr_t>(args.bias.raw_data()) % 4 == 0);
}

bool matmul_with_epilogue(const MatmulArgs& args) {
  const bool keeps_sums = args.sums.defined() && gemm::fits_tensor_map(args.sums) && gives_slopes(Cuda{}, args);
  if (!args.slopes.defined() && !keeps_sums) {
    return false;
  }
  on_dtype(Types<Float16, BFloat16>{}, args.out.dtype(), "matmul", [&]<class T>() {
    const auto launch = [&]<bool kSlopes>() {
      launch_epilogue<T, cuda::Lines::depth>(
          args.a, args.b,
          Forward<T, functions::GeluTanh, kSlopes>{.second = map_of_half_tiles(kSlopes ? args.slopes : args.sums),
                                                   .out = map_of_half_tiles(args.out),
                                                   .bias = args.bias.data_or_null<T>(),
                                                   .columns = static_cast<int>(args.out.size(1))});
    };
    keeps_sums ? launch.template operator()<false>() : launch.template operator()<true>();
  });
  return true;
}

}  // namespace mica::kernels
