#include <mica/ops/elementwise/detail/functions.h>
#include <mica/ops/matmul/detail/matmul_epilogue_cuda.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_sm90.cuh>

// Matrix products with an activation, or the derivative of one, in the epilogue. The epilogue takes long: it moves two
// tensors as large as the output, and in forward computes exponentials. To hide it, each of a block's two consumer
// warpgroups computes tiles of its own (ping-pong): one multiplies while the other runs its epilogue.
//
//     warpgroup 1   | multiply tile 0 | epilogue 0      | multiply tile 2 | epilogue 2 …
//     warpgroup 2                     | multiply tile 1 | epilogue 1      | multiply tile 3 …
//                     ─────────────────────── time ───────────────────────▶
//
// For its epilogue, each warpgroup has a buffer in shared memory, in the swizzled layout. TMA copies fill and empty it.
// The warps access it by ldmatrix and stmatrix, which map elements to the lanes that hold the tile's accumulators.

namespace mica::kernels::tiles {

namespace {

using Ours = Plan<128, 5, 2>;
constexpr int kColumns = Ours::kColumns;
constexpr int kHalfRows = 64;  // rows of a wgmma instruction
constexpr int kHalves = kTileRows / kHalfRows;
constexpr int kChunks = kColumns / kChunk;  // per tile
constexpr int kUnits = kHalves * kChunks;   // per tile; a unit is kHalfRows rows and kChunk columns
constexpr int kWarps = kWarpgroup / 32;
constexpr int kGroups = kChunk / 16;  // groups of 16 columns, each accessed by one ldmatrix or stmatrix

struct Shared {
  unsigned char tiles[kConsumers][kUnits][kChunkBytes];
  Stages<Ours> stages;
  float sums[kConsumers][kWarps][kChunk];  // column sums
  std::uint64_t loaded[kConsumers];        // barrier: the tile of slopes is in shared memory
  std::uint64_t turn[kConsumers];          // barrier: the other warpgroup has issued all products of its tile
};

using Sums = float[kHalves][kColumns / 2];

template <class T>
__device__ float2 floats_of(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Float16>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

/// The tile that a warpgroup computes.
struct Tile {
  unsigned char (&units)[kUnits][kChunkBytes];
  int consumer;
  int row;  // the tile's first row and column in the output
  int column;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return thread() / 32; }
  __device__ void sync() const { cuda::barrier_sync(1 + consumer, kWarpgroup); }
  /// The address that this lane passes to ldmatrix or stmatrix for columns 16 i to 16 i + 15 of a unit and the warp's
  /// 16 rows.
  __device__ unsigned char* place(int unit, int i) const {
    const int line = warp() * 16 + lane() % 16;
    return units[unit] + line * kLineBytes + ((2 * i + lane() / 16) ^ (line % 8)) * 16;
  }
};

/// The epilogue of backward: out = (a · b) ⊙ slopes, and the column sums of each tile, for the gradient of the bias.
template <class T>
struct Gradient {
  float* parts;  // (tiles of rows, N), or null
  int part_count;
  int columns;

  struct Loaded {};

  /// Starts loading the tile's slopes into shared memory.
  __device__ Loaded begin(Shared& shared, const Tile& tile, const CUtensorMap* slopes_map) const {
    if (tile.thread() != 0) {
      return {};
    }
    cuda::wait_stores_read<0>();  // until the previous tile's output has been read from the buffer
    std::uint64_t* const loaded = &shared.loaded[tile.consumer];
    cuda::arrive_expecting(loaded, kUnits * kChunkBytes);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      cuda::load_tile(tile.units[unit], slopes_map, tile.column + unit / kHalves * kChunk,
                      tile.row + unit % kHalves * kHalfRows, loaded);
    }
    return {};
  }

  __device__ void end(Shared& shared, const Tile& tile, const Sums& sums, Loaded&, unsigned parity, const CUtensorMap*,
                      const CUtensorMap* out_map) const {
    cuda::wait(&shared.loaded[tile.consumer], parity);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float totals[kChunk / 4] = {};  // column sums: a thread has two of every 8 columns
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int unit = chunk * kHalves + half;
        std::uint32_t pairs[kGroups][4];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          cuda::load_matrices(pairs[i], tile.place(unit, i));
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const float* const s = sums[half] + chunk * (kChunk / 2) + i * 8;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 slopes = floats_of<T>(pairs[i][j]);
            const float first = s[2 * j] * slopes.x;
            const float second = s[2 * j + 1] * slopes.y;
            totals[4 * i + j / 2 * 2] += first;
            totals[4 * i + j / 2 * 2 + 1] += second;
            pairs[i][j] = cuda::pair_of<T>(first, second);
          }
          cuda::store_matrices(tile.place(unit, i), pairs[i]);
        }
      }
      cuda::fence_async_proxy();
      if (parts != nullptr) {
        tile.sync();  // until the previous sums have been read
        write_totals(shared.sums[tile.consumer][tile.warp()], totals, tile.lane());
      }
      tile.sync();
      const int column = tile.column + chunk * kChunk;
      if (tile.thread() == 0 && column < columns) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          cuda::store_tile(out_map, column, tile.row + half * kHalfRows, tile.units[chunk * kHalves + half]);
        }
        cuda::commit_stores();
      }
      const int part = tile.row / kTileRows;
      if (parts != nullptr && tile.thread() < kChunk && column + tile.thread() < columns && part < part_count) {
        float total = 0;
        for (int warp = 0; warp < kWarps; ++warp) {
          total += shared.sums[tile.consumer][warp][tile.thread()];
        }
        parts[std::int64_t{part} * columns + column + tile.thread()] = total;
      }
    }
  }

 private:
  /// Halves the number of totals per lane: two lanes whose indices differ by kStep exchange halves of their totals, and
  /// each adds up the half that it keeps. Returns the original index of this lane's first total.
  template <int kStep, int kKept>
  __device__ static int fold(float (&totals)[kChunk / 4], int lane) {
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
  __device__ static void write_totals(float (&to)[kChunk], float (&totals)[kChunk / 4], int lane) {
    const int first = fold<16, 8>(totals, lane) + fold<8, 4>(totals, lane) + fold<4, 2>(totals, lane);
    const int column = first / 4 * 16 + first % 4 / 2 * 8 + lane % 4 * 2;
    to[column] = totals[0];
    to[column + 1] = totals[1];
  }
};

/// The epilogue of forward: out = f(z) for z = a · b + bias, and a second output, which is f′(z) if kSlopes, else z.
template <class T, class F, bool kSlopes>
struct Forward {
  const T* bias;  // or null
  int columns;

  struct Loaded {
    std::uint32_t biases[kGroups][2];  // of a chunk's columns, two per word
  };

  __device__ Loaded begin(Shared&, const Tile& tile, const CUtensorMap*) const { return load(tile, 0); }

  __device__ void end(Shared&, const Tile& tile, const Sums& sums, Loaded& loaded, unsigned,
                      const CUtensorMap* second_map, const CUtensorMap* out_map) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int unit = (chunk * kHalves + half) % 2 * 2;  // of the buffer; the next one is for the second output
        if (tile.thread() == 0) {
          cuda::wait_stores_read<1>();  // until these two units are free; the stores of the other two may be in flight
        }
        tile.sync();
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const float2 biases[2] = {floats_of<T>(loaded.biases[i][0]), floats_of<T>(loaded.biases[i][1])};
          const float* const s = sums[half] + chunk * (kChunk / 2) + i * 8;
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
          cuda::store_matrices(tile.place(unit, i), pairs);
          cuda::store_matrices(tile.place(unit + 1, i), second_pairs);
        }
        if (half + 1 == kHalves && chunk + 1 < kChunks) {
          loaded = load(tile, chunk + 1);
        }
        cuda::fence_async_proxy();
        tile.sync();
        if (tile.thread() == 0) {
          const int column = tile.column + chunk * kChunk;
          if (column < columns) {
            cuda::store_tile(out_map, column, tile.row + half * kHalfRows, tile.units[unit]);
            cuda::store_tile(second_map, column, tile.row + half * kHalfRows, tile.units[unit + 1]);
          }
          cuda::commit_stores();
        }
      }
    }
  }

 private:
  /// The biases of a thread's columns.
  __device__ Loaded load(const Tile& tile, int chunk) const {
    Loaded loaded{};
#pragma unroll
    for (int k = 0; k < kChunk / 8; ++k) {
      const int column = tile.column + chunk * kChunk + 8 * k + tile.lane() % 4 * 2;
      if (bias != nullptr && column < columns) {
        loaded.biases[k / 2][k % 2] = *reinterpret_cast<const std::uint32_t*>(bias + column);
      }
    }
    return loaded;
  }
};

/// The loop of a consumer warpgroup, over every other tile of the block.
template <class T, Lines kB, class Epilogue>
__device__ void consume(Shared& shared, const CUtensorMap* other_map, const CUtensorMap* out_map, const Sizes& sizes,
                        const Epilogue& epilogue) {
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  const int step = gridDim.x / Ours::kCluster;
  Ring<Ours::kStages> ring;
  if (consumer == 1) {
    ring.skip(sizes.pieces);
  }
  unsigned parity = 0;  // of the barriers that complete once per tile
  for (int number = blockIdx.x / Ours::kCluster + consumer * step; number < sizes.order.size();
       number += kConsumers * step, parity ^= 1) {
    const Corner corner = corner_of<Ours>(sizes, number);
    const Tile tile{.units = shared.tiles[consumer], .consumer = consumer, .row = corner.row, .column = corner.column};
    auto loaded = epilogue.begin(shared, tile, other_map);
    // Waits for the warpgroup's turn; the first one starts. It must not wait for a stage before the other warpgroup has
    // consumed its last one: barriers have only a parity, so it could mistake one round for another.
    cuda::wait(&shared.turn[consumer], parity ^ (consumer == 0 ? 1 : 0));
    Sums sums;
    const auto issued = [&] {
      if (is_first) {
        cuda::arrive(&shared.turn[1 - consumer]);
      }
    };
    multiply_tile<T, Ours, Lines::depth, kB>(sums, shared.stages, ring, sizes.pieces, 0, issued, release<Ours>);
    ring.skip(sizes.pieces);
    epilogue.end(shared, tile, sums, loaded, parity, other_map, out_map);
  }
  if (is_first) {
    cuda::wait_stores_read<0>();  // the block's shared memory must live until then
  }
}

template <class T, Lines kB, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_epilogue_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                           const __grid_constant__ CUtensorMap other_map, const __grid_constant__ CUtensorMap out_map,
                           const Sizes sizes, const Epilogue epilogue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    cuda::prefetch_map(&a_map);
    cuda::prefetch_map(&b_map);
    cuda::prefetch_map(&other_map);
    cuda::prefetch_map(&out_map);
    init_stages(shared.stages, 1);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      cuda::init_barrier(&shared.loaded[consumer], 1);
      cuda::init_barrier(&shared.turn[consumer], 1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<40>();
    if (threadIdx.x == 0) {
      produce<Ours, Lines::depth, kB>(shared.stages, &a_map, &b_map, sizes);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<232>();
    consume<T, kB>(shared, &other_map, &out_map, sizes, epilogue);
  }
  // The other block may still write to this one's shared memory.
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
#endif
}

template <class T, Lines kB, class Epilogue>
void launch(const Tensor& a, const Tensor& b, const Tensor& other, const Tensor& out, const Epilogue& epilogue) {
  const Sizes sizes = sizes_of<Ours>(a.size(0), b.size(1), a.size(1));
  cuda::Launch(blocks_for<Ours>(sizes), kThreads, sizeof(Shared))
      .cluster(Ours::kCluster)
      .run(matmul_epilogue_kernel<T, kB, Epilogue>, "matmul_epilogue_kernel", map_of_a<Ours, Lines::depth>(a),
           map_of_b<Ours, kB>(b), map_of(other, matrix_of(other), kHalfRows), map_of(out, matrix_of(out), kHalfRows),
           sizes, epilogue);
}

/// Whether this kernel supports a · b: 16-bit floats, rows of a that are contiguous, rows (if b_has_rows) or columns of
/// b that are, and at least as many tiles as multiprocessors.
bool fits(const Tensor& a, const Tensor& b, bool b_has_rows, const Tensor& out) {
  return cuda::device_has_wgmma() && size_of(out.dtype()) == 2 && out.dim() == 2 && matrix_of(a).lines_are_rows &&
         matrix_of(b).lines_are_rows == b_has_rows &&
         std::int64_t{parts_of(out.size(0), kTileRows)} * parts_of(out.size(1), kTileRows) >=
             cuda::multiprocessor_count() &&
         fits_sm90(a) && fits_sm90(b) && fits_sm90(out);
}

}  // namespace

}  // namespace mica::kernels::tiles

namespace mica::kernels {

bool matmul_with_epilogue(const MatmulActivationBackward& args) {
  if (!args.slopes.defined() || !tiles::fits(args.a, args.b, true, args.out) || !tiles::fits_sm90(args.slopes)) {
    return false;
  }
  const std::int64_t rows = args.out.size(0);
  const std::int64_t columns = args.out.size(1);
  const int part_count = tiles::parts_of(rows, tiles::kTileRows);
  const Tensor parts = args.dbias.defined() ? empty({part_count, columns}, float32, args.out.device()) : Tensor{};
  on_dtype(Types<Float16, BFloat16>{}, args.out.dtype(), "matmul", [&]<class T>() {
    tiles::launch<T, tiles::Lines::rows>(
        args.a, args.b, args.slopes, args.out,
        tiles::Gradient<T>{
            .parts = parts.data_or_null<float>(), .part_count = part_count, .columns = static_cast<int>(columns)});
  });
  if (parts.defined()) {
    add_parts(parts, args.dbias);
  }
  return true;
}

bool gives_slopes(Cuda, const MatmulArgs& args) {
  return args.activation == Activation::gelu_tanh && !args.accumulate && args.a.size(-1) > 0 &&
         tiles::fits(args.a, args.b, false, args.out) &&
         (!args.bias.defined() || reinterpret_cast<std::uintptr_t>(args.bias.raw_data()) % 4 == 0);
}

bool matmul_with_epilogue(const MatmulArgs& args) {
  const bool keeps_sums = args.sums.defined() && tiles::fits_sm90(args.sums) && gives_slopes(Cuda{}, args);
  if (!args.slopes.defined() && !keeps_sums) {
    return false;
  }
  const Tensor& second = keeps_sums ? args.sums : args.slopes;
  on_dtype(Types<Float16, BFloat16>{}, args.out.dtype(), "matmul", [&]<class T>() {
    const auto launch = [&]<bool kSlopes>() {
      using Epilogue = tiles::Forward<T, functions::GeluTanh, kSlopes>;
      tiles::launch<T, tiles::Lines::depth>(
          args.a, args.b, second, args.out,
          Epilogue{.bias = args.bias.data_or_null<T>(), .columns = static_cast<int>(args.out.size(1))});
    };
    args.slopes.defined() ? launch.template operator()<true>() : launch.template operator()<false>();
  });
  return true;
}

}  // namespace mica::kernels
