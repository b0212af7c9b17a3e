#pragma once

// Instructions that CUDA C++ has no short name for.

#include <cuda_runtime.h>

#include <cstdint>

namespace mica::cuda {

/// Where `p` lies in shared memory, as some instructions want it. It costs a few instructions each time.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// 2ˣ with a relative error of 2⁻²²; 0 where that is below the least normal number.
__device__ inline float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A policy for loads of what is to stay in the L2 cache when others have to go.
__device__ inline std::uint64_t evict_last() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// The usual policy.
__device__ inline std::uint64_t evict_normal() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies from global to shared memory that run beside the thread. They are awaited in groups, in order.

/// Starts copying kBytes (4, 8 or 16), to which both addresses are aligned; zeros, and no read, where not `present`.
/// kLastInL2: of what is in the L2 cache, others are to go first (16 bytes only).
template <int kBytes, bool kLastInL2 = false>
__device__ void copy_async(std::uint32_t shared, const void* global, bool present = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16) {
    if constexpr (kLastInL2) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                   "r"(bytes), "l"(evict_last())
                   : "memory");
    } else {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
    }
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

template <int kBytes, bool kLastInL2 = false>
__device__ void copy_async(void* shared, const void* global, bool present = true) {
  copy_async<kBytes, kLastInL2>(shared_address(shared), global, present);
}

/// Makes one group of the copies that this thread has started since the last group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of the thread's youngest groups are still under way. It sees what it copied itself.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The same for a number known at run time; waits for more where it is past 15.
__device__ inline void wait_copies(int pending) {
  switch (pending) {
    case 0: return wait_copies<0>();
    case 1: return wait_copies<1>();
    case 2: return wait_copies<2>();
    case 3: return wait_copies<3>();
    case 4: return wait_copies<4>();
    case 5: return wait_copies<5>();
    case 6: return wait_copies<6>();
    case 7: return wait_copies<7>();
    case 8: return wait_copies<8>();
    case 9: return wait_copies<9>();
    case 10: return wait_copies<10>();
    case 11: return wait_copies<11>();
    case 12: return wait_copies<12>();
    case 13: return wait_copies<13>();
    case 14: return wait_copies<14>();
    default: return wait_copies<15>();
  }
}

// Barriers in shared memory: threads arrive without waiting, and wait for a phase, known by its parity, to be complete.

__device__ inline void init_barrier(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// Like wait(), it takes a barrier by its address in shared memory, too.
__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}
__device__ inline void arrive(std::uint64_t* barrier) { arrive(shared_address(barrier)); }

/// The loop is not left to the compiler, which splits it up, and race checkers then take no notice of the wait.
__device__ inline void wait(std::uint32_t barrier, unsigned parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MICA_PTX_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define MICA_PTX_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n" MICA_PTX_WAIT
      " complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#undef MICA_PTX_WAIT
}
__device__ inline void wait(std::uint64_t* barrier, unsigned parity) { wait(shared_address(barrier), parity); }

/// Like __syncthreads() for so many threads, whole warps, that use barrier `number`, 1 to 15.
__device__ inline void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// For threads that do not wait for the others to come.
__device__ inline void arrive_to_meet(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Matrices of 8 by 8 16-bit elements, four at once, as the tensor cores' registers hold them: row l / 4 of matrix i,
// its elements 2 (l % 4), in the low half, and the next, are in pairs[i] of lane l. Lane l gives the address, aligned
// to 16 bytes, of row l % 8 of matrix l / 8.

__device__ inline void load_matrices(std::uint32_t (&pairs)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}

/// The same of the matrices' transposes.
__device__ inline void load_matrices_transposed(std::uint32_t (&pairs)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}

// Counters in global memory through which blocks meet.

/// Adds to *p, and gives what it was. Whoever adds later, or reads the sum with load_acquire, sees what this thread
/// wrote before; this thread sees what those wrote who were before it.
__device__ inline int exchange_add(int* p, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}

/// Adds to *p; whoever then reads the sum with load_acquire also sees what this thread wrote before.
__device__ inline void release_add(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ inline int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// What follows needs compute capability 9.0: the host asks device_has_clusters(). On older chips it is a trap.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MICA_PTX_90(...) asm volatile(__VA_ARGS__)
#else
#define MICA_PTX_90(...) __trap()
#endif

// Clusters: blocks that run at the same time and reach into each other's shared memory.

__device__ inline int cluster_rank() {
  int rank = 0;
  MICA_PTX_90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void arrive_in_cluster() { MICA_PTX_90("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
/// For threads that have written nothing that the others are to see.
__device__ inline void arrive_in_cluster_relaxed() {
  MICA_PTX_90("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() { MICA_PTX_90("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// The address of the same shared variable in another block of the cluster.
__device__ inline std::uint32_t address_in_block(const void* p, int rank) {
  std::uint32_t result = 0;
  MICA_PTX_90("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(p)), "r"(rank));
  return result;
}

/// *p of block `rank`.
__device__ inline float load_from_block(const float* p, int rank) {
  float value = 0;
  MICA_PTX_90("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in_block(p, rank)) : "memory");
  return value;
}
__device__ inline int load_from_block(const int* p, int rank) {
  int value = 0;
  MICA_PTX_90("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address_in_block(p, rank)) : "memory");
  return value;
}
__device__ inline double load_from_block(const double* p, int rank) {
  double value = 0;
  MICA_PTX_90("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(address_in_block(p, rank)) : "memory");
  return value;
}

/// Four neighbors, aligned to 16 bytes.
__device__ inline float4 load_four_from_block(const float* p, int rank) {
  float4 four = {};
  MICA_PTX_90("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
              : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
              : "r"(address_in_block(p, rank))
              : "memory");
  return four;
}

/// Arrives at the same barrier of block `rank`, to say that something was read. What this thread wrote is not made
/// known there: that would cost a fence of all memory.
__device__ inline void arrive_in_block(std::uint64_t* barrier, int rank) {
  MICA_PTX_90("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank)) : "memory");
}

/// Makes barriers that were just initialized known to the other blocks.
__device__ inline void publish_barriers() { MICA_PTX_90("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives, and lets the phase wait for so many bytes more.
__device__ inline void arrive_expecting(std::uint64_t* barrier, int bytes) {
  MICA_PTX_90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
              : "memory");
}

/// Writes *p of block `rank`, whose *barrier counts the 4 bytes once they are there.
__device__ inline void send(float* p, int rank, float value, std::uint64_t* barrier) {
  MICA_PTX_90(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in_block(p, rank)),
      "r"(__float_as_uint(value)), "r"(address_in_block(barrier, rank))
      : "memory");
}

/// load_matrices() the other way.
__device__ inline void store_matrices(void* row, const std::uint32_t (&pairs)[4]) {
  MICA_PTX_90("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
              "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
              : "memory");
}

#undef MICA_PTX_90

// Dependent launches: the next kernel of the stream may start before this one ends. Older chips wait anyway.

__device__ inline void allow_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before has ended and its writes are seen.
__device__ inline void wait_for_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace mica::cuda
