#pragma once

// PTX instructions without a CUDA C++ intrinsic. <cuda/ptx>, <cuda/atomic> and cooperative groups wrap some of them,
// but add 1.0, 2.3 and 2.4 s to the compilation of each source.

#include <cuda_runtime.h>

#include <cstdint>

namespace mica::cuda {

/// The shared-memory address of `p`, as some instructions require it. Costs a few instructions each time.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// 2ˣ with a relative error of 2⁻²²; 0 where the result is below the smallest normal number.
__device__ inline float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// L2 cache policies for loads, as createpolicy encodes them (compute capability 8.0 to 12.0). As constants, they can be
// kernel arguments, which saves registers.
inline constexpr std::uint64_t kEvictUnchanged = 0x10f0000000000000;
inline constexpr std::uint64_t kEvictLast = 0x14f0000000000000;

/// The L2 cache policy for inputs that a kernel reads once. `input_bytes` is the size of all of them:
///
/// - Results of large inputs (more than 64 MiB) do not fit. With evict_last, they leave the cache before the inputs, in
///   the order in which they were written, which DRAM writes faster.
/// - Other results remain in the cache if inputs leave it first. With evict_unchanged, as without a policy, inputs do
///   not become more recent by being read.
__host__ __device__ constexpr std::uint64_t read_once_policy(std::int64_t input_bytes) {
  return input_bytes > 64 << 20 ? kEvictLast : kEvictUnchanged;
}

// Asynchronous copies from global to shared memory. A thread waits for groups of them, in order.

/// Starts copying the first `bytes` of kBytes (4, 8 or 16), to which both addresses are aligned. The others become
/// zeros.
template <int kBytes>
__device__ void copy_part_async(std::uint32_t shared, const void* global, int bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

/// The same with a policy for the L2 cache, which copies of less than 16 bytes ignore.
template <int kBytes>
__device__ void copy_part_async(std::uint32_t shared, const void* global, int bytes, std::uint64_t policy) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(bytes), "l"(policy)
                 : "memory");
  } else {
    copy_part_async<kBytes>(shared, global, bytes);
  }
}

/// Starts copying kBytes (4, 8 or 16), to which both addresses are aligned. Writes zeros, without a read, unless
/// `present`.
template <int kBytes>
__device__ void copy_async(std::uint32_t shared, const void* global, bool present = true) {
  copy_part_async<kBytes>(shared, global, present ? kBytes : 0);
}
template <int kBytes>
__device__ void copy_async(void* shared, const void* global, bool present = true) {
  copy_async<kBytes>(shared_address(shared), global, present);
}
/// The same with a policy for the L2 cache, which copies of less than 16 bytes ignore.
template <int kBytes>
__device__ void copy_async(std::uint32_t shared, const void* global, std::uint64_t policy, bool present = true) {
  copy_part_async<kBytes>(shared, global, present ? kBytes : 0, policy);
}

/// Commits the copies that this thread has started since the last group as one group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of the thread's latest groups are pending. The thread sees its own copies then.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The same for a number known at run time only. If it is above 15, waits as for 15.
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

// Barriers in shared memory (mbarriers): threads arrive without waiting, and wait for a phase, identified by its
// parity, to complete.

__device__ inline void init_barrier(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// Arrives at a barrier. Both arrive() and wait() also take the barrier as its shared-memory address.
__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}
__device__ inline void arrive(std::uint64_t* barrier) { arrive(shared_address(barrier)); }

/// Waits until the phase with that parity is complete. The loop is written in assembly, since the compiler would split
/// it up, and race checkers would then not recognize the wait.
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

/// Like __syncthreads(), for the `threads` threads (whole warps) that use named barrier `number`, 1 to 15.
__device__ inline void barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// Like barrier_sync(), for threads that only arrive and do not wait.
__device__ inline void barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Four matrices of 8 by 8 16-bit elements, as the tensor cores' registers hold them: pairs[i] of lane l has elements
// 2 (l % 4), in the low half, and the next of row l / 4 of matrix i. Lane l provides the address, aligned to 16 bytes,
// of row l % 8 of matrix l / 8.

__device__ inline void load_matrices(std::uint32_t (&pairs)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}

/// The same for the matrices' transposes.
__device__ inline void load_matrices_transposed(std::uint32_t (&pairs)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}

// Counters in global memory by which blocks synchronize.

/// Adds to *p and returns the old value. Threads that add later see what this thread wrote before; this thread sees
/// what earlier adders wrote before.
__device__ inline int exchange_add(int* p, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}

// The following functions need compute capability 9.0: the host checks device_has_clusters(). On older GPUs they trap.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MICA_PTX_90(...) asm volatile(__VA_ARGS__)
#else
#define MICA_PTX_90(...) __trap()
#endif

// Clusters: blocks that run at the same time and can access each other's shared memory.

__device__ inline int cluster_rank() {
  int rank = 0;
  MICA_PTX_90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void arrive_in_cluster() { MICA_PTX_90("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
/// Arrives at the cluster's barrier without publishing this thread's writes.
__device__ inline void arrive_in_cluster_relaxed() {
  MICA_PTX_90("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() { MICA_PTX_90("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// Like __syncthreads(), for all blocks of the cluster. Afterwards, all of them see each other's writes.
__device__ inline void meet_in_cluster() {
  arrive_in_cluster();
  wait_for_cluster();
}

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

/// Four adjacent floats of block `rank`, from p on, which is aligned to 16 bytes.
__device__ inline float4 load_four_from_block(const float* p, int rank) {
  float4 four = {};
  MICA_PTX_90("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
              : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
              : "r"(address_in_block(p, rank))
              : "memory");
  return four;
}

/// Arrives at the same barrier of block `rank` to report that something was read. Does not publish this thread's
/// writes: that would cost a full memory fence.
__device__ inline void arrive_in_block(std::uint64_t* barrier, int rank) {
  MICA_PTX_90("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank)) : "memory");
}

/// Makes barriers that were just initialized visible to the other blocks.
__device__ inline void publish_barriers() { MICA_PTX_90("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives, and increases the number of bytes that the phase expects by `bytes`.
__device__ inline void arrive_expecting(std::uint64_t* barrier, int bytes) {
  MICA_PTX_90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
              : "memory");
}

/// Writes *p of block `rank`, whose *barrier counts the 4 bytes when they have arrived.
__device__ inline void send(float* p, int rank, float value, std::uint64_t* barrier) {
  MICA_PTX_90(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in_block(p, rank)),
      "r"(__float_as_uint(value)), "r"(address_in_block(barrier, rank))
      : "memory");
}

/// The inverse of load_matrices().
__device__ inline void store_matrices(void* row, const std::uint32_t (&pairs)[4]) {
  MICA_PTX_90("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
              "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
              : "memory");
}

#undef MICA_PTX_90

// Dependent launches: the stream's next kernel may start before this one ends. No effect on older chips.

__device__ inline void allow_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits until the previous kernel has ended and its writes are visible.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace mica::cuda
