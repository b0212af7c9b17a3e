#pragma once

// Copies of a matrix's tiles by the copy engine of compute capability 9.0 (TMA): one thread issues the copy, the engine
// computes the addresses, and a barrier in shared memory counts the bytes. On older chips these functions trap.

#include <mica/core/cuda/detail/tensor_map.h>
#include <mica/core/cuda/ptx.cuh>

namespace mica::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MICA_PTX_90(...) asm volatile(__VA_ARGS__)
#else
#define MICA_PTX_90(...) __trap()
#endif

/// Prefetches the map.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  MICA_PTX_90("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the tile at element `element` of line `line` to shared memory. The barrier counts its bytes, including those
/// outside the matrix: arrive_expecting() them.
__device__ inline void load_tile(void* shared, const CUtensorMap* map, int element, int line, std::uint64_t* barrier) {
  MICA_PTX_90(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(element), "r"(line), "r"(shared_address(barrier))
      : "memory");
}

/// The same, but copies the tile to the same address in each block of the cluster whose bit in `blocks` is set. Each
/// block's own barrier counts the bytes.
__device__ inline void load_tile(void* shared, const CUtensorMap* map, int element, int line, std::uint64_t* barrier,
                                 std::uint16_t blocks) {
  MICA_PTX_90(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(element), "r"(line), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

/// Copies a tile from shared memory to the matrix, except for elements outside of it. The copy belongs to the thread's
/// next group of stores.
__device__ inline void store_tile(const CUtensorMap* map, int element, int line, const void* shared) {
  MICA_PTX_90("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
              "r"(element), "r"(line), "r"(shared_address(shared))
              : "memory");
}

/// The same for a map of heads (swizzled_heads_map).
__device__ inline void load_tile(void* shared, const CUtensorMap* map, int element, int line, int head, int batch,
                                 std::uint64_t* barrier) {
  MICA_PTX_90(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(element), "r"(line), "r"(head), "r"(batch), "r"(shared_address(barrier))
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap* map, int element, int line, int head, int batch,
                                  const void* shared) {
  MICA_PTX_90("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
              "r"(element), "r"(line), "r"(head), "r"(batch), "r"(shared_address(shared))
              : "memory");
}

/// Copies `bytes` adjacent bytes to shared memory; the barrier counts them. Both addresses and `bytes` are multiples of
/// 16.
__device__ inline void load_bytes(void* shared, const void* global, int bytes, std::uint64_t* barrier) {
  MICA_PTX_90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                  shared_address(shared)),
              "l"(global), "r"(bytes), "r"(shared_address(barrier))
              : "memory");
}

/// Commits the stores that this thread has started since the last group as one group.
__device__ inline void commit_stores() { MICA_PTX_90("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most kPending of the thread's latest groups have yet to read shared memory.
template <int kPending>
__device__ void wait_stores_read() {
  MICA_PTX_90("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// A fence between writes to shared memory, by this thread or by others it has waited for, and reads by the copy engine
/// or wgmma, which access memory through another proxy.
__device__ inline void fence_async_proxy() { MICA_PTX_90("fence.proxy.async.shared::cta;" ::: "memory"); }

#undef MICA_PTX_90

}  // namespace mica::cuda
