#pragma once

// The kernel around the loop of mainloop_sm90.cuh. It is persistent: a thread block computes one tile of the output
// after the other. Its parts are parameters:
//
//     TilePlan    the sizes of a tile, the ring and the cluster
//     Schedule   how the two consumer warpgroups share tiles
//     Operands   what the producer loads: MatrixOperands, or a struct with the same members
//     Epilogue   what happens to a tile's sums; it has
//                  Element                       the 16-bit type of the operands
//                  kBuffers                      buffers of 64 rows and 64 columns per warpgroup
//                  Memory                        more shared memory per warpgroup, or Nothing
//                  begin(buffers, tile)          optional: starts loads before the product; returns what end() needs
//                  end(buffers, tile, sums, ·)   writes the tile

#include <mica/core/cuda/launch.h>
#include <mica/ops/gemm/detail/mainloop_sm90.cuh>
#include <mica/ops/gemm/detail/tile_buffers_sm90.cuh>

namespace mica::gemm {

/// How a block's two consumer warpgroups share tiles.
///
///     split_rows     warpgroup 1   | rows 0 to 63 of tile 0   | epilogue | rows 0 to 63 of tile 1   | …
///                    warpgroup 2   | rows 64 to 127 of tile 0 | epilogue | rows 64 to 127 of tile 1 | …
///
///     ping_pong      warpgroup 1   | multiply tile 0 | epilogue 0      | multiply tile 2 | epilogue 2 …
///                    warpgroup 2                     | multiply tile 1 | epilogue 1      | multiply tile 3 …
///
/// ping_pong hides a long epilogue: one warpgroup multiplies while the other is in its epilogue.
enum class Schedule { split_rows, ping_pong };

struct Nothing {};

template <class P, class Epilogue>
struct GemmMemory {
  unsigned char buffers[kConsumers][Epilogue::kBuffers][kChunkBytes];
  Stages<P> stages;
  typename Epilogue::Memory of_epilogue[kConsumers];
  std::uint64_t loaded[kConsumers];  // barrier: what the epilogue loads for a tile has arrived
  std::uint64_t turn[kConsumers];    // barrier: the other warpgroup has issued all products of its tile
};

/// A warpgroup's part of a tile: all of it, or half of its rows.
template <class EpilogueMemory>
struct WarpgroupTile {
  int row;     // the first, in the output
  int column;  // the first, in the product
  EpilogueMemory& memory;
  std::uint64_t* loaded;
  unsigned parity;  // of `loaded`, which completes once per tile
};

template <class Epilogue, class Buffers, class Tile>
__device__ auto begin(const Epilogue& epilogue, Buffers& buffers, const Tile& tile) {
  if constexpr (requires { epilogue.begin(buffers, tile); }) {
    return epilogue.begin(buffers, tile);
  } else {
    return Nothing{};
  }
}

/// The loop of a consumer warpgroup over its tiles.
template <class P, Schedule kSchedule, class Operands, class Epilogue>
__device__ void consume(GemmMemory<P, Epilogue>& shared, const Sizes& sizes, const Epilogue& epilogue) {
  constexpr bool kPingPong = kSchedule == Schedule::ping_pong;
  constexpr int kHalves = kPingPong ? 2 : 1;
  static_assert(kHalves * P::kColumns <= 256, "the sums must fit in registers");
  const int consumer = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  const int first_line = kPingPong ? 0 : consumer * kHalfRows;
  const int blocks = static_cast<int>(gridDim.x) / P::kCluster;
  TileBuffers<Epilogue::kBuffers> buffers{.memory = shared.buffers[consumer], .consumer = consumer};
  Ring<P::kStages> ring;
  if (kPingPong && consumer == 1) {
    ring.skip(sizes.slices);
  }
  unsigned parity = 0;  // of the barriers that complete once per tile
  for (int number = static_cast<int>(blockIdx.x) / P::kCluster + (kPingPong ? consumer * blocks : 0);
       number < sizes.order.size(); number += kPingPong ? kConsumers * blocks : blocks, parity ^= 1) {
    const Corner corner = corner_of<P>(sizes, number);
    const WarpgroupTile<typename Epilogue::Memory> tile{.row = corner.row + first_line,
                                                        .column = corner.column,
                                                        .memory = shared.of_epilogue[consumer],
                                                        .loaded = &shared.loaded[consumer],
                                                        .parity = parity};
    auto loaded = begin(epilogue, buffers, tile);
    if constexpr (kPingPong) {
      // Waits for the warpgroup's turn. Before the other warpgroup has consumed its last stage, this one could mistake
      // one round of the ring for another, since barriers have only a parity.
      cuda::wait(&shared.turn[consumer], parity ^ (consumer == 0 ? 1 : 0));
    }
    float sums[kHalves][P::kColumns / 2];
    multiply_tile<typename Epilogue::Element, P, Operands::kA, Operands::kB>(
        sums, shared.stages, ring, sizes.slices, first_line, [&] {
          if (kPingPong && is_first) {
            cuda::arrive(&shared.turn[1 - consumer]);
          }
        });
    if constexpr (kPingPong) {
      ring.skip(sizes.slices);  // those of the other warpgroup
    }
    epilogue.end(buffers, tile, sums, loaded);
  }
  if (is_first) {
    cuda::wait_stores_read<0>();  // the block's shared memory must live until then
  }
}

template <class P>
__device__ void sync_cluster() {
  if constexpr (P::kCluster > 1) {
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
  }
}

template <class P, Schedule kSchedule, class Operands, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Operands operands, const __grid_constant__ Epilogue epilogue,
                const Sizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GemmMemory<P, Epilogue>*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kReaders = kSchedule == Schedule::ping_pong ? 1 : kConsumers;  // warpgroups that read a stage
    for (int stage = 0; stage < P::kStages; ++stage) {
      cuda::init_barrier(&shared.stages.full[stage], 1);
      cuda::init_barrier(&shared.stages.empty[stage], P::kNeighbors * kReaders);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      cuda::init_barrier(&shared.loaded[consumer], 1);
      cuda::init_barrier(&shared.turn[consumer], 1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  sync_cluster<P>();
  if constexpr (Operands::kIsDependent) {
    cuda::allow_dependents();
  }
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<40>();  // keeps 40 of the initial 168 per thread
    if (threadIdx.x == 0) {
      produce(shared.stages, operands, sizes);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<232>();
    if constexpr (Operands::kIsDependent) {
      cuda::wait_for_previous_kernel();  // which may write what the epilogue reads, or read the output's memory
    }
    consume<P, kSchedule, Operands>(shared, sizes, epilogue);
  }
  sync_cluster<P>();  // another block of the cluster may still write to this one's shared memory
#endif
}

/// Launches the kernel for an (m, n) product of depth k, under `name`.
template <class P, Schedule kSchedule, class Operands, class Epilogue>
void launch(const char* name, std::int64_t m, std::int64_t n, std::int64_t k, const Operands& operands,
            const Epilogue& epilogue) {
  const Sizes sizes = sizes_of<P>(m, n, k);
  const int blocks = std::min(sizes.order.size(), cuda::multiprocessor_count() / P::kCluster) * P::kCluster;
  cuda::Launch launch(blocks, kThreads, sizeof(GemmMemory<P, Epilogue>));
  launch.cluster(P::kCluster);
  if constexpr (Operands::kIsDependent) {
    launch.dependent();
  }
  launch.run(gemm_kernel<P, kSchedule, Operands, Epilogue>, name, operands, epilogue, sizes);
}

}  // namespace mica::gemm
