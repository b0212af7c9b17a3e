// Collectives over NCCL, on a stream of their own.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/dist/detail/nccl.h>

namespace mica::dist::detail {

namespace {

void check_nccl(ncclResult_t status, const char* call) {
  mica::check(status == ncclSuccess, "{} failed: {} ({})", call, ncclGetErrorString(status), ncclGetLastError(nullptr));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return ncclFloat64;
    case DType::float32: return ncclFloat32;
    case DType::float16: return ncclFloat16;
    case DType::bfloat16: return ncclBfloat16;
    case DType::int64: return ncclInt64;
    case DType::int32: return ncclInt32;
    case DType::uint8:
    case DType::boolean: return ncclUint8;
  }
  return ncclUint8;
}

ncclRedOp_t function_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return ncclSum;
    case Reduction::mean: return ncclAvg;
    case Reduction::min: return ncclMin;
    case Reduction::max: return ncclMax;
  }
  return ncclSum;
}

/// An event of the current device.
class Event {
 public:
  Event() { cuda::check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) const { cuda::check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void hold_up(cudaStream_t stream) const {
    cuda::check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  bool has_passed() const {
    const bool passed = cudaEventQuery(event_) == cudaSuccess;
    if (!passed) {
      (void)cudaGetLastError();  // otherwise the next check of a launch would report that it has not passed
    }
    return passed;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// The tensors of a collective. Their memory may be used again once the last handle is gone, so handles stay until NCCL
/// has read or written it.
class Held {
 public:
  Held(Tensors tensors, cudaStream_t after) : tensors_(std::move(tensors)), after_(after) {}

  void end(cudaStream_t stream) const { end_.record(stream); }
  bool has_ended() const { return end_.has_passed(); }

  /// The current stream waits for the end. If it is the one after whose work the collective was queued, what it frees
  /// from then on is freed after the collective, whose tensors are like those of its own kernels. Otherwise a host that
  /// runs ahead of the GPU would keep the memory of many steps.
  void hold_up_current_stream() {
    const cudaStream_t stream = cuda::current_stream();
    end_.hold_up(stream);
    if (stream == after_) {
      Tensors freed;
      const std::lock_guard lock(mutex_);
      freed.swap(tensors_);
    }
  }

 private:
  std::mutex mutex_;
  Tensors tensors_;
  cudaStream_t after_;
  Event end_;
};

class Queued final : public Transfer {
 public:
  Queued(Device device, std::shared_ptr<Held> held) : device_(device), held_(std::move(held)) {}

  void wait() override {
    const DeviceGuard guard(device_);
    held_->hold_up_current_stream();
  }

 private:
  Device device_;
  std::shared_ptr<Held> held_;
};

class Nccl final : public Collectives {
 public:
  Nccl(int rank, int size, std::function<void(const Tensor&)> broadcast)
      : rank_(rank), size_(size), broadcast_bytes_(std::move(broadcast)) {}

  // The communicator is not destroyed: all ranks would have to do it together, and the process's end frees it.

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    return run("ncclAllReduce", {x}, [=, this] {
      return ncclAllReduce(x.raw_data(), x.raw_data(), count(x), type_of(x.dtype()), function_of(reduction),
                           communicator_, stream_);
    });
  }

  std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) override {
    return run("ncclReduceScatter", {from, into}, [=, this] {
      return ncclReduceScatter(from.raw_data(), into.raw_data(), count(into), type_of(from.dtype()),
                               function_of(reduction), communicator_, stream_);
    });
  }

  std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    return run("ncclAllGather", {from, into}, [=, this] {
      return ncclAllGather(from.raw_data(), into.raw_data(), count(from), type_of(from.dtype()), communicator_,
                           stream_);
    });
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    return run("ncclBroadcast", {x}, [=, this] {
      return ncclBroadcast(x.raw_data(), x.raw_data(), count(x), type_of(x.dtype()), root, communicator_, stream_);
    });
  }

 private:
  static std::size_t count(const Tensor& x) { return static_cast<std::size_t>(x.numel()); }

  /// Queues a call of NCCL after the current stream's work.
  template <class Call>
  std::shared_ptr<Transfer> run(const char* name, const Tensors& tensors, const Call& call) {
    const std::lock_guard lock(mutex_);
    const Device device = tensors.front().device();
    const DeviceGuard guard(device);
    connect(name, device);
    Event before;
    before.record(cuda::current_stream());
    before.hold_up(stream_);
    check_nccl(call(), name);
    auto held = std::make_shared<Held>(tensors, cuda::current_stream());
    held->end(stream_);
    keep(tensors, held);
    return std::make_shared<Queued>(device, std::move(held));
  }

  // At the first collective.
  void connect(const char* name, Device device) {
    if (communicator_ != nullptr) {
      mica::check(device == *device_,
                  "{}: this group communicates from {} since its first collective, got a tensor on {}", name, *device_,
                  device);
      return;
    }
    check_not_capturing("the first collective of a group on a GPU");
    ncclUniqueId id{};
    if (rank_ == 0) {
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    }
    const Tensor bytes = empty({static_cast<std::int64_t>(sizeof id)}, uint8);
    std::memcpy(bytes.raw_data(), &id, sizeof id);
    broadcast_bytes_(bytes);
    std::memcpy(&id, bytes.raw_data(), sizeof id);
    // Before the blocks of kernels that are already queued, as the multiprocessors become free. NCCL needs few of them,
    // and would otherwise start after all that backward has queued meanwhile.
    int least = 0, greatest = 0;
    cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cuda::check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreateWithPriority");
    check_nccl(ncclCommInitRank(&communicator_, size_, id, rank_), "ncclCommInitRank");
    device_ = device;
  }

  void keep(const Tensors& tensors, const std::shared_ptr<const Held>& held) {
    if (is_capturing()) {
      on_each_replay([tensors] {});  // the graph owns them
      return;
    }
    while (!running_.empty() && running_.front()->has_ended()) {
      running_.pop_front();
    }
    running_.push_back(held);
  }

  int rank_;
  int size_;
  std::function<void(const Tensor&)> broadcast_bytes_;
  std::mutex mutex_;  // of what follows
  std::optional<Device> device_;
  ncclComm_t communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::deque<std::shared_ptr<const Held>> running_;
};

}  // namespace

std::shared_ptr<Collectives> nccl_collectives(int rank, int size, std::function<void(const Tensor&)> broadcast) {
  return std::make_shared<Nccl>(rank, size, std::move(broadcast));
}

}  // namespace mica::dist::detail
