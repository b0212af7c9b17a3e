#pragma once

// Rows that stream through shared memory, for chips of compute capability 9.0 and up: bulk copies fetch the rows to
// come while the threads work on the one that is there, so that enough bytes are always under way to fill the memory
// system.
//
// A block has `groups` groups of `threads` threads. Each group works on rows of its own, alone, or the one group of
// each block of a cluster works on a slab of `slab` columns of the same row. Every group has a ring of `stages` stages;
// a stage holds its slab of one row of each source.

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/layer_norm/rows_cuda.cuh>

namespace mica::kernels::rows {

struct RingPlan {
  int threads = 0;  // a group; 0: rows of this length need another kernel
  int groups = 1;
  int cluster = 1;
  int stages = 1;
  int slab = 0;          // columns of a row that a block works on
  int source_bytes = 0;  // of a stage, for each source
  int sources = 1;
  int meeting_bytes = 0;    // where warps meet
  int parameter_bytes = 0;  // the slab of weight and bias

  __host__ __device__ int block() const { return threads * groups; }
  __host__ __device__ int stage_bytes() const { return source_bytes * sources; }
  __host__ __device__ int barriers() const { return groups * stages; }
  __host__ __device__ int parameter_begin() const { return (meeting_begin() + meeting_bytes + 127) / 128 * 128; }
  __host__ __device__ int ring_begin() const { return (parameter_begin() + parameter_bytes + 127) / 128 * 128; }
  __host__ __device__ int meeting_begin() const { return (barriers() * 8 + 15) / 16 * 16; }
  __host__ __device__ int shared_bytes() const { return ring_begin() + groups * stages * stage_bytes(); }
};

constexpr int kRingBlock = 512;          // threads, at most
constexpr int kRingCluster = 8;          // blocks, at most
constexpr int kRingShared = 226 * 1024;  // bytes of shared memory that a block may have, at most

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// A barrier on which the bytes of bulk copies arrive; each of its phases is begun by one thread.
__device__ inline void init_arrivals(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void expect_bytes(std::uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void wait_arrivals(std::uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Starts copying from global to shared memory; addresses and size are multiples of 16.
__device__ inline void bulk_copy(void* to, const void* from, unsigned bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The same variable of another block of the cluster.
template <class Value>
__device__ Value* in_block(Value* p, unsigned rank) {
  std::uint64_t result;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(reinterpret_cast<std::uint64_t>(p)), "r"(rank));
  return reinterpret_cast<Value*>(result);
}

/// Lets the next kernel of the stream, launched as a dependent one, start before this one ends.
__device__ inline void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Waits until the kernel before is done and its writes are seen.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// A thread's place: its group and its number in it, and the rows its group takes: first, first + step, …
struct Place {
  int group;
  int lane;            // in the group
  int rank;            // of the block in its cluster
  std::int64_t begin;  // the block's first column
  int columns;         // and how many it has
  int packs;           // the thread's own
  std::int64_t first;
  std::int64_t step;

  __device__ Place(const RingPlan& p, std::int64_t row_columns, int pack) {
    group = threadIdx.x / p.threads;
    lane = threadIdx.x % p.threads;
    rank = p.cluster == 1 ? 0 : static_cast<int>(cluster_rank());
    begin = std::int64_t{rank} * p.slab;
    const std::int64_t left = row_columns - begin;
    columns = static_cast<int>(left < 0 ? 0 : left < p.slab ? left : p.slab);
    packs = (columns / pack - lane + p.threads - 1) / p.threads;
    const std::int64_t teams = gridDim.x / p.cluster;
    first = group * teams + blockIdx.x / p.cluster;
    step = teams * p.groups;
  }
};

/// f(i, column) for those of a thread's kElements / V packs that lie inside the slab.
template <int V, int kElements, class F>
__device__ void for_slab_packs(const RingPlan& p, const Place& at, F f) {
#pragma unroll
  for (int i = 0; i < kElements / V; ++i) {
    if (i < at.packs) {
      f(i, (i * p.threads + at.lane) * V);
    }
  }
}

/// The block's slab of a parameter, or of what stands for an absent one, into shared memory.
template <int V, class W>
__device__ void keep_parameter(const Place& at, const W* parameter, float absent, W* kept) {
  for (int column = threadIdx.x * V; column < at.columns; column += blockDim.x * V) {
    store(kept + column, load_or<V>(parameter, at.begin + column, absent));
  }
}

/// The ring of the thread's group.
template <class T, int V>
class Ring {
 public:
  __device__ Ring(const RingPlan& p, const Place& at, unsigned char* memory)
      : source_bytes_(p.source_bytes),
        stage_bytes_(p.stage_bytes()),
        stages_(p.stages),
        columns_(at.columns),
        leads_(at.lane == 0),
        arrivals_(reinterpret_cast<std::uint64_t*>(memory) + at.group * p.stages),
        stages_begin_(memory + p.ring_begin() + at.group * p.stages * p.stage_bytes()) {
    if (leads_) {
      for (int stage = 0; stage < stages_; ++stage) {
        init_arrivals(arrivals_ + stage);
      }
      publish_arrivals();
    }
  }

  /// Starts fetching a slab of each source into a stage; done by the group's first thread.
  template <class... Sources>
  __device__ void fetch(int stage, const Sources*... sources) {
    if (leads_) {
      expect_bytes(arrivals_ + stage, (span_bytes(sources) + ...));
      int i = 0;
      (fetch_source(stage, i++, sources), ...);
    }
  }

  __device__ void wait(int stage, unsigned parity) { wait_arrivals(arrivals_ + stage, parity); }

  /// Where source number i of the stage, which came from `from`, lies.
  __device__ const T* slab(int stage, int i, const T* from) const {
    return reinterpret_cast<const T*>(stages_begin_ + stage * stage_bytes_ + i * source_bytes_ + misalignment(from));
  }

 private:
  // Packs of one element also mean any alignment: what is copied are the 16-byte granules that hold the slab.
  __device__ static unsigned misalignment(const T* from) {
    return V > 1 ? 0 : static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) % 16);
  }
  __device__ unsigned span_bytes(const T* from) const {
    const unsigned bytes = columns_ * sizeof(T);
    return V > 1 || bytes == 0 ? bytes : (misalignment(from) + bytes + 15) / 16 * 16;
  }
  __device__ void fetch_source(int stage, int i, const T* from) {
    if (columns_ > 0) {
      bulk_copy(stages_begin_ + stage * stage_bytes_ + i * source_bytes_,
                reinterpret_cast<const unsigned char*>(from) - misalignment(from), span_bytes(from), arrivals_ + stage);
    }
  }

  int source_bytes_;
  int stage_bytes_;
  int stages_;
  int columns_;
  bool leads_;
  std::uint64_t* arrivals_;
  unsigned char* stages_begin_;
};

/// Where the warps that share a row meet. Two buffers are used in turn, so that one barrier a meeting is enough.
template <class Value>
class Meeting {
 public:
  __device__ Meeting(const RingPlan& p, const Place& at, unsigned char* memory)
      : threads_(p.threads),
        group_(at.group),
        cluster_(p.cluster),
        mine_(p.cluster > 1 ? at.rank : at.group),
        size_((p.cluster > 1 ? p.cluster : p.groups) * (p.threads / kWarp)),
        values_(reinterpret_cast<Value*>(memory + p.meeting_begin())) {}

  /// Leaves the warp's value and waits for the others. What is returned holds until the meeting after the next.
  __device__ const Value* swap(const Value& value, int lane) {
    turn_ ^= 1;
    const int warps = threads_ / kWarp;
    Value* const own = values_ + turn_ * size_ + mine_ * warps + lane / kWarp;
    if (cluster_ > 1) {
      if (lane % kWarp < cluster_) {
        *in_block(own, lane % kWarp) = value;
      }
    } else if (lane % kWarp == 0) {
      *own = value;
    }
    sync();
    return cluster_ > 1 ? values_ + turn_ * size_ : own - lane / kWarp;
  }

  /// How many values a meeting returns.
  __device__ int count() const { return (cluster_ > 1 ? cluster_ : 1) * (threads_ / kWarp); }

  __device__ void sync() const {
    if (cluster_ > 1) {
      cluster_sync();
    } else {
      sync_group();
    }
  }

  __device__ void sync_group() const {
    if (threads_ == kWarp) {
      __syncwarp();
    } else {
      sync_named<1>();
    }
  }

 private:
  // Hardware barrier kId, 1 to 15, for group kId - 1: checkers follow barriers only by constant ids.
  template <int kId>
  __device__ void sync_named() const {
    if (group_ + 1 == kId) {
      asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads_) : "memory");
    } else if constexpr (kId < 15) {
      sync_named<kId + 1>();
    }
  }

  int threads_;
  int group_;
  int cluster_;
  int mine_;
  int size_;
  Value* values_;
  int turn_ = 0;
};

#endif

// On the host.

/// Whether the current device has bulk copies and clusters.
inline bool device_has_rings() {
  static std::atomic<int> known[64];  // by device: 0 not known, else 1 + answer
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64) {
    return false;
  }
  if (known[device] == 0) {
    int major = 0;
    cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    known[device] = 1 + (major >= 9 ? 1 : 0);
  }
  return known[device] == 2;
}

/// The bytes that a Meeting of Values needs.
template <class Value>
int meeting_bytes(const RingPlan& p) {
  return 2 * (p.cluster > 1 ? p.cluster : p.groups) * (p.threads / kWarp) * static_cast<int>(sizeof(Value));
}

/// The threads that hold `columns` with so many elements each, in whole warps.
inline int ring_threads(std::int64_t columns, int elements) {
  return static_cast<int>((columns + elements * kWarp - 1) / (elements * kWarp) * kWarp);
}

/// As many groups of so many threads as a block has room for.
inline int ring_groups(int threads) { return threads > kRingBlock ? 0 : kRingBlock / threads; }

/// The first of `choices`, elements a thread, that puts most threads to work, in two groups or more if possible: while
/// one meets, the other works. 0: none holds a row.
inline int ring_elements(std::int64_t columns, std::initializer_list<int> choices) {
  int best = 0;
  int most = 0;
  for (const int elements : choices) {
    const int threads = ring_threads(columns, elements);
    const int groups = ring_groups(threads);
    const int busy = threads * groups - (groups == 1 ? kRingBlock / 8 : 0);
    if (groups > 0 && busy > most) {
      best = elements;
      most = busy;
    }
  }
  return best;
}

/// Fills in what follows from the rest; takes as many stages as fit, up to `most`. threads = 0 where not one does.
inline RingPlan complete(RingPlan p, int element_bytes, bool packed, int meeting_bytes, int column_bytes, int most) {
  p.source_bytes = (p.slab * element_bytes + (packed ? 0 : 16) + 127) / 128 * 128;
  p.meeting_bytes = meeting_bytes;
  p.parameter_bytes = p.slab * column_bytes;
  for (p.stages = most; p.stages > 0 && p.shared_bytes() > kRingShared; --p.stages) {
  }
  if (p.stages == 0) {
    p = {};
  }
  return p;
}

/// Launches kernel(args...) on `grid` blocks laid out by the plan. Its shared memory is raised once a device.
template <class Kernel, class... Args>
void launch_ring(Kernel kernel, const char* name, const RingPlan& p, unsigned grid, const Args&... args) {
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared_bytes()),
              "cudaFuncSetAttribute");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(p.block());
  config.dynamicSmemBytes = p.shared_bytes();
  config.stream = cuda::current_stream();
  config.attrs = &attribute;
  config.numAttrs = p.cluster > 1 ? 1 : 0;
  cuda::check(cudaLaunchKernelEx(&config, kernel, args...), name);
  cuda::check_launch(name);
}

}  // namespace mica::kernels::rows
