#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/tiled_matmul/tiled_matmul_cuda.cuh>

// One block a multiprocessor, which stays until all tiles of the output are done. Its first warpgroup only asks the
// copy engine for the next pieces of a and b; the two others multiply them, 64 rows of the tile each. Two blocks, a
// cluster, work on tiles one below the other: these need the same piece of b, of which each block fetches one half for
// both.

namespace mica::kernels::tiles {

namespace {

constexpr int kTileRows = 128;
constexpr int kDepth = 64;  // of a piece: 128 bytes, the length of a swizzled line
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerRows = kTileRows / kConsumers;
constexpr int kLineBytes = 128;
constexpr int kChunk = 64;                        // elements of a line
constexpr int kChunkBytes = kChunk * kLineBytes;  // 64 lines
constexpr int kGroupRows = 1024;                  // of y, that one group of tiles has

template <int kTileColumns, int kStages_, int kCluster_>
struct Plan {
  static constexpr int kColumns = kTileColumns;
  static constexpr int kStages = kStages_;    // pieces that are under way or being multiplied
  static constexpr int kCluster = kCluster_;  // blocks
  static constexpr int kABytes = kTileRows * kLineBytes;
  static constexpr int kBBytes = kColumns * kLineBytes;
  static constexpr int kShare = kColumns / kCluster;  // columns of b that a block fetches

  struct Shared {
    unsigned char a[kStages][kABytes];
    unsigned char b[kStages][kBBytes];
    unsigned char y[kConsumers][2][kChunkBytes];
    std::uint64_t full[kStages];   // a piece has come
    std::uint64_t empty[kStages];  // all who read it have done so, in the whole cluster
  };
};

// A place in the ring of stages. Barriers are known by the parity of the round.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Sizes {
  TileOrder order;  // of a cluster's tiles
  int pieces;       // of K
  int columns;      // N
  float slope;
};

/// The first column or row of the first tile of the cluster's.
struct Corner {
  int row;
  int column;
};

template <class P>
__device__ Corner corner_of(const Sizes& sizes, int tile) {
  const TileOrder::Place place = sizes.order.place(tile);
  return {place.row * P::kCluster * kTileRows, place.column * P::kColumns};
}

/// Asks for all pieces of all tiles of this block, each as soon as its stage is free. One thread.
template <class P, Lines kA, Lines kB>
__device__ void produce(typename P::Shared& shared, const CUtensorMap* a_map, const CUtensorMap* b_map,
                        const Sizes& sizes) {
  const int rank = P::kCluster > 1 ? cuda::cluster_rank() : 0;
  const auto load_b = [&](void* to, int element, int line, std::uint64_t* barrier) {
    if constexpr (P::kCluster > 1) {
      cuda::load_tile(to, b_map, element, line, barrier, (1 << P::kCluster) - 1);
    } else {
      cuda::load_tile(to, b_map, element, line, barrier);
    }
  };
  Ring<P::kStages> ring;
  for (int tile = blockIdx.x / P::kCluster; tile < sizes.order.size(); tile += gridDim.x / P::kCluster) {
    const Corner corner = corner_of<P>(sizes, tile);
    const int row = corner.row + rank * kTileRows;
    for (int piece = 0; piece < sizes.pieces; ++piece, ring.advance()) {
      const int k = piece * kDepth;
      std::uint64_t* const full = &shared.full[ring.stage];
      cuda::wait(&shared.empty[ring.stage], ring.parity ^ 1);  // at once in the first round
      cuda::arrive_expecting(full, P::kABytes + P::kBBytes);
      unsigned char* const a = shared.a[ring.stage];
      if constexpr (kA == Lines::depth) {
        cuda::load_tile(a, a_map, k, row, full);
      } else {
        for (int chunk = 0; chunk < kTileRows / kChunk; ++chunk) {
          cuda::load_tile(a + chunk * kChunkBytes, a_map, row + chunk * kChunk, k, full);
        }
      }
      unsigned char* const b = shared.b[ring.stage] + rank * P::kShare * kLineBytes;
      const int column = corner.column + rank * P::kShare;
      if constexpr (kB == Lines::depth) {
        load_b(b, k, column, full);
      } else {
        for (int chunk = 0; chunk < P::kShare / kChunk; ++chunk) {
          load_b(b + chunk * kChunkBytes, column + chunk * kChunk, k, full);
        }
      }
    }
  }
}

/// Where a warpgroup's operands in one stage begin, for wgmma.
template <Lines kLines>
__device__ std::uint64_t descriptor(const void* tile) {
  if constexpr (kLines == Lines::depth) {
    return cuda::depth_lines(tile);
  } else {
    return cuda::row_lines<kDepth>(tile);
  }
}

/// Writes a warpgroup's part of a tile, 64 columns at a time, through shared memory: so it leaves in whole lines,
/// beside the threads, and what lies outside of y is left out by the copy engine.
template <class T, class P>
__device__ void write_out(const float (&sums)[P::kColumns / 2], unsigned char (&buffers)[2][kChunkBytes], int& turn,
                          const CUtensorMap* y_map, int row, int column, const Sizes& sizes) {
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int line = thread / 32 * 16 + lane % 16;  // that this lane gives the address of
#pragma unroll
  for (int chunk = 0; chunk < P::kColumns / kChunk; ++chunk) {
    if (column + chunk * kChunk >= sizes.columns) {
      return;
    }
    unsigned char* const buffer = buffers[turn];
    turn ^= 1;
    if (thread == 0) {
      cuda::wait_stores_read<1>();  // the one that was here
    }
    cuda::meet(1 + consumer, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const float* const s = sums + chunk * (kChunk / 2) + i * 8;
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = cuda::pair_of<T>(leaky(s[2 * j], sizes.slope), leaky(s[2 * j + 1], sizes.slope));
      }
      const int place = (2 * i + lane / 16) ^ (line % 8);  // the swizzle of the map
      cuda::store_matrices(buffer + line * kLineBytes + place * 16, pairs);
    }
    cuda::publish_to_engines();
    cuda::meet(1 + consumer, kWarpgroup);
    if (thread == 0) {
      cuda::store_tile(y_map, column + chunk * kChunk, row, buffer);
      cuda::commit_stores();
    }
  }
}

/// Multiplies the pieces of all tiles of this block. A warpgroup, for its 64 rows.
template <class T, class P, Lines kA, Lines kB>
__device__ void consume(typename P::Shared& shared, const CUtensorMap* y_map, const Sizes& sizes) {
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const int thread = threadIdx.x % kWarpgroup;
  const int rank = P::kCluster > 1 ? cuda::cluster_rank() : 0;
  // Both blocks wait for both, as each writes into the other's memory too.
  const auto release = [&](int stage) {
    if (thread < P::kCluster) {
      cuda::arrive_in_block(&shared.empty[stage], thread);
    }
  };
  Ring<P::kStages> ring;
  int turn = 0;  // of the two buffers of y
  for (int tile = blockIdx.x / P::kCluster; tile < sizes.order.size(); tile += gridDim.x / P::kCluster) {
    float sums[P::kColumns / 2];
    int last = 0;
    for (int piece = 0; piece < sizes.pieces; ++piece, ring.advance()) {
      cuda::wait(&shared.full[ring.stage], ring.parity);
      std::uint64_t a = descriptor<kA>(shared.a[ring.stage] + consumer * kChunkBytes);
      std::uint64_t b = descriptor<kB>(shared.b[ring.stage]);
      cuda::begin_products();
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        cuda::multiply_add<T, P::kColumns, kA, kB>(sums, a, b, piece > 0 || k > 0);
        a += cuda::kNextDepth<kA>;
        b += cuda::kNextDepth<kB>;
      }
      cuda::commit_products();
      if (piece > 0) {
        cuda::wait_products<1>();
        release(last);
      }
      last = ring.stage;
    }
    cuda::wait_products<0>();
    cuda::pin(sums);
    release(last);
    const Corner corner = corner_of<P>(sizes, tile);
    write_out<T, P>(sums, shared.y[consumer], turn, y_map, corner.row + rank * kTileRows + consumer * kConsumerRows,
                    corner.column, sizes);
  }
  if (thread == 0) {
    cuda::wait_stores_read<0>();  // shared memory goes with the block
  }
}

template <class T, class P, Lines kA, Lines kB>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_matmul_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                        const __grid_constant__ CUtensorMap y_map, const Sizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  if (threadIdx.x == 0) {
    cuda::prefetch_map(&a_map);
    cuda::prefetch_map(&b_map);
    cuda::prefetch_map(&y_map);
    for (int stage = 0; stage < P::kStages; ++stage) {
      cuda::init_barrier(&shared.full[stage], 1);
      cuda::init_barrier(&shared.empty[stage], P::kCluster * kConsumers);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  if (threadIdx.x < kWarpgroup) {
    cuda::keep_registers<40>();  // of the 168 that each thread begins with
    if (threadIdx.x == 0) {
      produce<P, kA, kB>(shared, &a_map, &b_map, sizes);
    }
    __syncwarp();
  } else {
    cuda::claim_registers<232>();
    consume<T, P, kA, kB>(shared, &y_map, sizes);
  }
  // No block goes while another may still write to its memory.
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
#endif
}

template <class T, class P, Lines kA, Lines kB>
void launch(const TiledMatmulArgs& args, const Matrix& a, const Matrix& b) {
  constexpr DType dtype = dtype_of<T>;
  const auto map = [](const Tensor& x, const Matrix& lines, int box_lines) {
    return cuda::swizzled_tensor_map({.dtype = dtype,
                                      .data = x.raw_data(),
                                      .lines = lines.lines,
                                      .length = lines.length,
                                      .leading = lines.leading,
                                      .box_lines = static_cast<std::uint32_t>(box_lines),
                                      .box_length = kChunk});
  };
  const std::int64_t m = args.y.size(0);
  const std::int64_t n = args.y.size(1);
  const Sizes sizes{.order = {.rows = parts_of(m, P::kCluster * kTileRows),
                              .columns = parts_of(n, P::kColumns),
                              .group = kGroupRows / (P::kCluster * kTileRows)},
                    .pieces = parts_of(args.a.size(1), kDepth),
                    .columns = static_cast<int>(n),
                    .slope = static_cast<float>(slope_of(args.activation))};
  const auto kernel = tiled_matmul_kernel<T, P, kA, kB>;
  constexpr int kBytes = sizeof(typename P::Shared);
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
              "cudaFuncSetAttribute");
  const int clusters = std::min(sizes.order.size(), cuda::multiprocessor_count() / P::kCluster);
  cuda::Launch(clusters * P::kCluster, kThreads, kBytes)
      .cluster(P::kCluster)
      .run(kernel, "tiled_matmul_kernel", map(args.a, a, kA == Lines::depth ? kTileRows : kDepth),
           map(args.b, b, kB == Lines::depth ? P::kShare : kDepth), map(args.y, matrix_of(args.y), kConsumerRows),
           sizes);
}

/// Calls f.operator()<P>() with the plan that is done first. Wide tiles cost the least for each element, but where
/// there are few of them, multiprocessors have nothing to do. All plans sum an element in the same order.
template <class F>
void on_plan(std::int64_t rows, std::int64_t columns, const F& f) {
  const int blocks = cuda::multiprocessor_count();
  // What a tile takes, measured, as often as a block has one.
  const auto cost = [&]<class P>(P, double tile) {
    const std::int64_t clusters =
        std::int64_t{parts_of(rows, P::kCluster * kTileRows)} * parts_of(columns, P::kColumns);
    return tile * parts_of(clusters, blocks / P::kCluster);
  };
  using Wide = Plan<256, 4, 2>;
  using Middle = Plan<128, 6, 1>;
  using Narrow = Plan<64, 8, 1>;
  const double wide = cost(Wide{}, 1), middle = cost(Middle{}, 0.52), narrow = cost(Narrow{}, 0.42);
  if (wide <= std::min(middle, narrow)) {
    f.template operator()<Wide>();
  } else if (middle <= narrow) {
    f.template operator()<Middle>();
  } else {
    f.template operator()<Narrow>();
  }
}

}  // namespace

bool fits_sm90(const Tensor& x) {
  const Matrix m = matrix_of(x);
  return m.step == 1 && m.leading >= m.length &&
         cuda::fits_tensor_map(x.dtype(), x.raw_data(), m.lines, m.length, m.leading);
}

void multiply_sm90(const TiledMatmulArgs& args) {
  const Matrix a = matrix_of(args.a);
  const Matrix b = matrix_of(args.b);
  on_dtype(Types<Half, BFloat16>{}, args.y.dtype(), "tiled_matmul", [&]<class T>() {
    on_lines(a, b, [&]<Lines kA, Lines kB>() {
      on_plan(args.y.size(0), args.y.size(1), [&]<class P>() { launch<T, P, kA, kB>(args, a, b); });
    });
  });
}

}  // namespace mica::kernels::tiles
