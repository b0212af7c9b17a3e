#include <cuda_runtime_api.h>

#include <array>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/core/host_reader.h>
#include <mica/core/memory.h>

namespace mica::detail {

namespace {

// Two buffers in turn, each with an event that is reached when its copy is complete.
class Reader final : public PinnedReader {
 public:
  explicit Reader(std::int64_t count) : count_(static_cast<std::size_t>(count)) {
    for (Buffer& buffer : buffers_) {
      cuda::check(cudaHostAlloc(reinterpret_cast<void**>(&buffer.values), bytes() + 1, cudaHostAllocDefault),
                  "cudaHostAlloc");
      cuda::check(cudaEventCreateWithFlags(&buffer.complete, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
  }

  void start(const Tensor& x) override {
    Buffer& buffer = buffers_[started_++ % 2];
    const cudaStream_t stream = cuda::current_stream();
    cuda::check(cudaMemcpyAsync(buffer.values, x.data<std::int64_t>(), bytes(), cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync");
    cuda::check(cudaEventRecord(buffer.complete, stream), "cudaEventRecord");
  }

  std::vector<std::int64_t> finish() override {
    const Buffer& buffer = buffers_[finished_++ % 2];
    cuda::check(cudaEventSynchronize(buffer.complete), "cudaEventSynchronize");
    memory::check_copy();
    return {buffer.values, buffer.values + count_};
  }

 private:
  // At program exit the driver may already be unloaded: errors are ignored.
  struct Buffer {
    std::int64_t* values = nullptr;
    cudaEvent_t complete = nullptr;

    ~Buffer() {
      if (complete != nullptr) {
        (void)cudaEventSynchronize(complete);
        (void)cudaEventDestroy(complete);
      }
      if (values != nullptr) {
        (void)cudaFreeHost(values);
      }
    }
  };

  std::size_t bytes() const { return count_ * sizeof(std::int64_t); }

  std::size_t count_;
  std::array<Buffer, 2> buffers_{};
  std::size_t started_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace

std::unique_ptr<PinnedReader> pinned_reader(Cuda, std::int64_t count) { return std::make_unique<Reader>(count); }

}  // namespace mica::detail
