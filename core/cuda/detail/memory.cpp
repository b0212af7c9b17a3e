#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/cuda/detail/arena.h>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/allocation_fault.h>
#include <mica/core/detail/memory.h>

namespace mica::memory {

namespace {

// By default, the driver's pool releases memory at every synchronization; keep it instead.
void keep_freed_memory() {
  static std::vector<std::once_flag> done(cuda::device_count());
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  std::call_once(done[device], [&] {
    cudaMemPool_t pool = nullptr;
    cuda::check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
    std::uint64_t all = UINT64_MAX;
    cuda::check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
  });
}

/// Freed small blocks of the default stream, reused in stream order. This saves two driver calls per small op. Blocks
/// of other streams are not cached: such a stream may be destroyed with unfinished work on a block, and another stream
/// may get its handle.
class SmallBlocks {
 public:
  static bool fits(std::size_t bytes, cudaStream_t stream) { return bytes <= kLargest && stream == nullptr; }
  static std::size_t rounded(std::size_t bytes) { return (bytes + kStep - 1) / kStep * kStep; }

  /// Null if there is none.
  void* pop(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& blocks = blocks_of(bytes);
    if (blocks.empty()) {
      return nullptr;
    }
    void* const data = blocks.back();
    blocks.pop_back();
    kept_ -= rounded(bytes);
    return data;
  }

  /// False if the cache is full.
  bool push(void* data, std::size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    if (kept_ + rounded(bytes) > kMaxKept) {
      return false;
    }
    try {
      blocks_of(bytes).push_back(data);
    } catch (const std::bad_alloc&) {
      return false;
    }
    kept_ += rounded(bytes);
    return true;
  }

  /// Returns all blocks to the driver.
  void release() {
    const std::lock_guard lock(mutex_);
    for (std::vector<void*>& blocks : free_) {
      for (void* const data : blocks) {
        (void)cudaFreeAsync(data, nullptr);
      }
      blocks.clear();
    }
    kept_ = 0;
  }

 private:
  static constexpr std::size_t kStep = 512;
  static constexpr std::size_t kLargest = std::size_t{1} << 20;
  static constexpr std::size_t kMaxKept = std::size_t{256} << 20;

  std::vector<void*>& blocks_of(std::size_t bytes) { return free_[rounded(bytes) / kStep - 1]; }

  std::mutex mutex_;
  std::array<std::vector<void*>, kLargest / kStep> free_;  // by size
  std::size_t kept_ = 0;
};

// The cache of the current device. Never destroyed: tensors may outlive every static.
SmallBlocks& small_blocks() {
  static auto* const all = new std::vector<SmallBlocks>(cuda::device_count());
  int device = 0;
  (void)cudaGetDevice(&device);  // fails at most at program exit
  return (*all)[device];
}

cudaError_t try_allocate(void** data, std::size_t bytes, cudaStream_t stream) {
  if (!pooling()) {
    return cudaMalloc(data, bytes);
  }
  const bool small = SmallBlocks::fits(bytes, stream);
  if (small) {
    *data = small_blocks().pop(bytes);
    if (*data != nullptr) {
      return cudaSuccess;
    }
  }
  keep_freed_memory();
  return cudaMallocAsync(data, small ? SmallBlocks::rounded(bytes) : bytes, stream);
}

/// Pinned host memory through which pageable memory is copied to a GPU. A direct copy from pageable memory would make
/// the host wait for all earlier work on the stream.
class Staging {
 public:
  static constexpr std::size_t kLargest = std::size_t{16} << 20;

  /// Copies to the current device on `stream`. `from` has been read on return.
  void send(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    Buffer& buffer = buffers_[next_];
    next_ = (next_ + 1) % buffers_.size();
    if (buffer.sent == nullptr) {
      cuda::check(cudaEventCreateWithFlags(&buffer.sent, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    cuda::check(cudaEventSynchronize(buffer.sent), "cudaEventSynchronize");
    if (buffer.bytes < bytes) {
      cuda::check(cudaFreeHost(buffer.data), "cudaFreeHost");
      buffer.data = nullptr;
      buffer.bytes = 0;
      cuda::check(cudaHostAlloc(&buffer.data, bytes, cudaHostAllocDefault), "cudaHostAlloc");
      buffer.bytes = bytes;
    }
    std::memcpy(buffer.data, from, bytes);
    cuda::check(cudaMemcpyAsync(to, buffer.data, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    cuda::check(cudaEventRecord(buffer.sent, stream), "cudaEventRecord");
  }

 private:
  struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    cudaEvent_t sent = nullptr;  // recorded after the last copy from it
  };

  std::mutex mutex_;
  std::array<Buffer, 8> buffers_;
  std::size_t next_ = 0;
};

// The buffers of the current device. Never destroyed: at program exit the driver may be unloaded.
Staging& staging() {
  static auto* const all = new std::vector<Staging>(cuda::device_count());
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  return (*all)[device];
}

// A block's owner is a stream or, with the lowest bit set, a graph's arena. CUDA's predefined stream handles with that
// bit are the numbers 1 and 2.
void* owner_of(cuda::Arena* arena) { return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(arena) | 1); }

cuda::Arena* arena_of(void* owner) {
  const auto bits = reinterpret_cast<std::uintptr_t>(owner);
  return bits > 2 && (bits & 1) != 0 ? reinterpret_cast<cuda::Arena*>(bits - 1) : nullptr;
}

std::atomic<void (*)()> copy_check{nullptr};

[[noreturn]] void throw_out_of_memory(std::size_t bytes) {
  int device = 0;
  std::size_t free = 0;
  std::size_t total = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  throw OutOfMemory(
      fmt::format("out of memory: asked for {} bytes on cuda:{}, where {} of {} are free", bytes, device, free, total));
}

void poison(void* data, std::size_t bytes, cudaStream_t stream) {
  if (poisoning()) {
    cuda::check(cudaMemsetAsync(data, 0xFF, bytes, stream), "cudaMemsetAsync");
  }
}

}  // namespace

void* allocate(Cuda, std::size_t bytes, void** stream) {
  AllocationFault::on_allocation(bytes);
  const cudaStream_t current = cuda::current_stream();
  if (cuda::Arena* const arena = cuda::current_arena(); arena != nullptr) [[unlikely]] {
    *stream = owner_of(arena);
    void* const data = arena->allocate(bytes);
    if (data == nullptr) {
      throw_out_of_memory(bytes);
    }
    poison(data, bytes, nullptr);  // not captured: a replay must not overwrite what on_each_replay() wrote there
    return data;
  }
  *stream = current;
  void* data = nullptr;
  cudaError_t status = try_allocate(&data, bytes, current);
  if (status == cudaErrorMemoryAllocation) {
    // Memory freed on other streams, or freed in stream order by pending work, becomes available after waiting.
    (void)cudaGetLastError();
    small_blocks().release();
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    status = try_allocate(&data, bytes, current);
  }
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw_out_of_memory(bytes);
  }
  cuda::check(status, pooling() ? "cudaMallocAsync" : "cudaMalloc");
  poison(data, bytes, current);
  return data;
}

void deallocate(Cuda, void* data, std::size_t bytes, void* stream) noexcept {
  AllocationFault::on_deallocation();
  // Failures are ignored; at program exit the driver may already be unloaded.
  if (cuda::Arena* const arena = arena_of(stream); arena != nullptr) [[unlikely]] {
    arena->deallocate(data);
    return;
  }
  const auto order = static_cast<cudaStream_t>(stream);
  if (!pooling()) {
    (void)cudaFree(data);
  } else if (!SmallBlocks::fits(bytes, order) || !small_blocks().push(data, bytes)) {
    (void)cudaFreeAsync(data, order);
  }
}

void copy(Cuda, void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) {
  if (is_capturing()) {
    fail("copy from {} to {}: cannot be captured into a CUDA graph; call it outside of cuda::capture", from_device,
         to_device);
  }
  const cudaStream_t stream = cuda::current_stream();
  if (to_device.is_cuda() && from_device.is_cuda()) {
    // A peer copy works although this GPU cannot access the other's memory pool. The other GPU's work is not ordered
    // with this stream, so wait for both.
    {
      const DeviceGuard other(to_device);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    cuda::check(cudaMemcpyPeerAsync(to, to_device.index, from, from_device.index, bytes, stream),
                "cudaMemcpyPeerAsync");
  } else if (from_device.is_cpu() && bytes <= Staging::kLargest) {
    staging().send(to, from, bytes, stream);
  } else {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  if (from_device.is_cuda()) {
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_copy();
  }
}

void check_copies_by(void (*f)()) { copy_check = f; }

void check_copy() {
  if (void (*const f)() = copy_check) {
    f();
  }
}

}  // namespace mica::memory

namespace mica::cuda {

void release_cached_memory() {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  memory::small_blocks().release();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo");
}

}  // namespace mica::cuda
