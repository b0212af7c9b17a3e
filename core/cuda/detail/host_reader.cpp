#include <cuda_runtime_api.h>

#include <array>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/host_reader.h>
#include <mica/core/detail/memory.h>
#include <mica/core/dispatch.h>

namespace mica::detail {

namespace {

// Pending reads, used in turn, each with an event that marks the arrival of its elements.
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

  void start(const Tensor& x) override {
    std::int64_t* const to = values_.pinned + (started_ % kPending) * count_;
    cuda::check(cudaMemcpyAsync(to, x.data<std::int64_t>(), bytes(), cudaMemcpyDeviceToHost, cuda::current_stream()),
                "cudaMemcpyAsync");
    will_have(to);
  }

  void start_slot(std::size_t slot) override { will_have(slots() + slot * count_); }

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
    std::int64_t* pinned = nullptr;  // first for copies, then the slots

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

  // Marks `values`, which earlier work on the stream writes, as the next pending read.
  void will_have(const std::int64_t* values) {
    Pending& pending = pending_[started_++ % kPending];
    pending.values = values;
    cuda::check(cudaEventRecord(pending.complete, cuda::current_stream()), "cudaEventRecord");
  }

  std::size_t count_;
  Values values_{};  // freed after the destructor has waited for the events
  std::array<Pending, kPending> pending_{};
  std::size_t started_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace

std::unique_ptr<PinnedReader> pinned_reader(Cuda, std::int64_t count) { return std::make_unique<Reader>(count); }

}  // namespace mica::detail
