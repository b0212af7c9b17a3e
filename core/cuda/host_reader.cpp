#include <cuda_runtime_api.h>

#include <array>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/core/host_reader.h>
#include <mica/core/memory.h>

namespace mica::detail {

namespace {

// Pending reads in turn, each with an event that is reached when its elements are there.
class Reader final : public PinnedReader {
 public:
  explicit Reader(std::int64_t count) : count_(static_cast<std::size_t>(count)) {
    cuda::check(
        cudaHostAlloc(reinterpret_cast<void**>(&values_.pinned), (2 * kPending * bytes()) + 1, cudaHostAllocDefault),
        "cudaHostAlloc");
    for (Pending& pending : pending_) {
      cuda::check(cudaEventCreateWithFlags(&pending.complete, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
  }

  void start(const Tensor* x, std::size_t slot) override {
    const std::size_t turn = started_++ % kPending;
    Pending& pending = pending_[turn];
    const cudaStream_t stream = cuda::current_stream();
    pending.values = slots() + slot * count_;
    if (x != nullptr) {
      std::int64_t* const to = values_.pinned + turn * count_;
      pending.values = to;
      cuda::check(cudaMemcpyAsync(to, x->data<std::int64_t>(), bytes(), cudaMemcpyDeviceToHost, stream),
                  "cudaMemcpyAsync");
    }
    cuda::check(cudaEventRecord(pending.complete, stream), "cudaEventRecord");
  }

  std::int64_t* slots() const override { return values_.pinned + kPending * count_; }

  std::vector<std::int64_t> finish() override {
    const Pending& pending = pending_[finished_++ % kPending];
    cuda::check(cudaEventSynchronize(pending.complete), "cudaEventSynchronize");
    memory::check_copy();
    return {pending.values, pending.values + count_};
  }

 private:
  static constexpr std::size_t kPending = HostReader::kSlots;

  // At program exit the driver may already be unloaded: errors are ignored.
  struct Values {
    std::int64_t* pinned = nullptr;  // of copies, then the slots

    ~Values() {
      if (pinned != nullptr) {
        (void)cudaFreeHost(pinned);
      }
    }
  };
  struct Pending {
    const std::int64_t* values = nullptr;
    cudaEvent_t complete = nullptr;

    ~Pending() {
      if (complete != nullptr) {
        (void)cudaEventSynchronize(complete);
        (void)cudaEventDestroy(complete);
      }
    }
  };

  std::size_t bytes() const { return count_ * sizeof(std::int64_t); }

  std::size_t count_;
  Values values_{};  // freed after the events were waited for
  std::array<Pending, kPending> pending_{};
  std::size_t started_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace

std::unique_ptr<PinnedReader> pinned_reader(Cuda, std::int64_t count) { return std::make_unique<Reader>(count); }

}  // namespace mica::detail
