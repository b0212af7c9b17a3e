#include <mica/ops/tiled_matmul/detail/tiled_matmul_sm90.cuh>

// tiled_matmul() on compute capability 9.0. A tile has 128 rows; each of two consumer warpgroups multiplies 64 of them
// by wgmma. See tiled_matmul_sm90.cuh for how operands reach shared memory.

namespace mica::kernels::tiles {

namespace {

constexpr int kConsumerRows = kTileRows / kConsumers;

template <class P>
struct Shared {
  unsigned char y[kConsumers][2][kChunkBytes];
  Stages<P> stages;
};

/// Writes a warpgroup's part of a tile, 64 columns at a time, through shared memory. From there, TMA copies whole lines
/// to global memory asynchronously, and skips elements outside of y.
template <class T, class P>
__device__ void write_out(const float (&sums)[P::kColumns / 2], unsigned char (&buffers)[2][kChunkBytes],
                          int& buffer_index, const CUtensorMap* y_map, int row, int column, int columns, float slope) {
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int line = thread / 32 * 16 + lane % 16;  // the line whose address this lane passes to stmatrix
#pragma unroll
  for (int chunk = 0; chunk < P::kColumns / kChunk; ++chunk) {
    if (column + chunk * kChunk >= columns) {
      return;
    }
    unsigned char* const buffer = buffers[buffer_index];
    buffer_index ^= 1;
    if (thread == 0) {
      cuda::wait_stores_read<1>();  // until the buffer's previous contents have been read
    }
    cuda::barrier_sync(1 + consumer, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const float* const s = sums + chunk * (kChunk / 2) + i * 8;
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = cuda::pair_of<T>(leaky(s[2 * j], slope), leaky(s[2 * j + 1], slope));
      }
      const int place = (2 * i + lane / 16) ^ (line % 8);  // the swizzle of the tensor map
      cuda::store_matrices(buffer + line * kLineBytes + place * 16, pairs);
    }
    cuda::fence_async_proxy();
    cuda::barrier_sync(1 + consumer, kWarpgroup);
    if (thread == 0) {
      cuda::store_tile(y_map, column + chunk * kChunk, row, buffer);
      cuda::commit_stores();
    }
  }
}

/// The loop of a consumer warpgroup over all tiles of the block: multiplies and writes its 64 rows of each.
template <class T, class P, Lines kA, Lines kB>
__device__ void consume(Shared<P>& shared, const CUtensorMap* y_map, const Sizes& sizes, float slope) {
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const int thread = threadIdx.x % kWarpgroup;
  Ring<P::kStages> ring;
  int buffer_index = 0;  // of the next buffer for y
  for (int tile = blockIdx.x / P::kCluster; tile < sizes.order.size(); tile += gridDim.x / P::kCluster) {
    float sums[1][P::kColumns / 2];
    multiply_tile<T, P, kA, kB>(
        sums, shared.stages, ring, sizes.pieces, consumer * kChunkBytes, [] {}, release<P>);
    const Corner corner = corner_of<P>(sizes, tile);
    write_out<T, P>(sums[0], shared.y[consumer], buffer_index, y_map, corner.row + consumer * kConsumerRows,
                    corner.column, sizes.columns, slope);
  }
  if (thread == 0) {
    cuda::wait_stores_read<0>();  // shared memory must live until the stores have read it
  }
}

template <class T, class P, Lines kA, Lines kB>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_matmul_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                        const __grid_constant__ CUtensorMap y_map, const Sizes sizes, const float slope) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<P>*>(memory);
  if (threadIdx.x == 0) {
    cuda::prefetch_map(&a_map);
    cuda::prefetch_map(&b_map);
    cuda::prefetch_map(&y_map);
    init_stages(shared.stages, kConsumers);
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<40>();  // keeps 40 of the initial 168 per thread
    if (threadIdx.x == 0) {
      produce<P, kA, kB>(shared.stages, &a_map, &b_map, sizes);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<232>();
    consume<T, P, kA, kB>(shared, &y_map, sizes, slope);
  }
  // A block must not exit while another one of the cluster may still write to its shared memory.
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
#endif
}

template <class T, class P, Lines kA, Lines kB>
void launch(const TiledMatmulArgs& args) {
  const Sizes sizes = sizes_of<P>(args.y.size(0), args.y.size(1), args.a.size(1));
  cuda::Launch(blocks_for<P>(sizes), kThreads, sizeof(Shared<P>))
      .cluster(P::kCluster)
      .run(tiled_matmul_kernel<T, P, kA, kB>, "tiled_matmul_kernel", map_of_a<P, kA>(args.a), map_of_b<P, kB>(args.b),
           map_of(args.y, matrix_of(args.y), kConsumerRows), sizes, static_cast<float>(slope_of(args.activation)));
}

/// Calls f.operator()<P>() with the plan that is fastest for the sizes. Wide tiles take the least time per element; but
/// if there are too few of them, some multiprocessors are idle. All plans sum an element in the same order.
template <class F>
void on_plan(std::int64_t rows, std::int64_t columns, const F& f) {
  const int blocks = cuda::multiprocessor_count();
  // The measured time of one tile, times the number of tiles per block.
  const auto cost = [&]<class P>(P, double tile) {
    const std::int64_t clusters =
        std::int64_t{parts_of(rows, P::kClusterRows * kTileRows)} * parts_of(columns, P::kClusterColumns * P::kColumns);
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
  on_dtype(Types<Float16, BFloat16>{}, args.y.dtype(), "tiled_matmul", [&]<class T>() {
    on_lines(a, b, [&]<Lines kA, Lines kB>() {
      on_plan(args.y.size(0), args.y.size(1), [&]<class P>() { launch<T, P, kA, kB>(args); });
    });
  });
}

}  // namespace mica::kernels::tiles
