// Collectives over NCCL, on a separate stream.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/transport/nccl.h>

namespace mica::distributed::detail {

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
  void block(cudaStream_t stream) const { cuda::check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
  void wait() const { cuda::check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  bool has_passed() const {
    const cudaError_t status = cudaEventQuery(event_);
    (void)cudaGetLastError();  // clears cudaErrorNotReady, which the next check of a launch would report
    return status != cudaErrorNotReady;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Keeps the tensors of a collective until NCCL has read or written them, so that their memory is not reused before.
class TensorsInUse {
 public:
  TensorsInUse(Tensors tensors, cudaStream_t after) : tensors_(std::move(tensors)), after_(after) {}

  void end(cudaStream_t stream) const { end_.record(stream); }
  bool has_ended() const { return end_.has_passed(); }
  void wait_for_end() const { end_.wait(); }

  /// Makes the current stream wait for the end. If the collective was queued after this stream's work, the tensors are
  /// released now: memory is freed in stream order, and a host that runs ahead would keep that of many steps.
  void block_current_stream() {
    const cudaStream_t stream = cuda::current_stream();
    end_.block(stream);
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

/// A group's NCCL communicator. It is never destroyed: ncclCommDestroy needs all ranks together, and collectives that
/// must be aborted may outlive the last Group.
class Communicator {
 public:
  explicit Communicator(Device device) : device_(device) {}

  Device device() const { return device_; }

  /// Says that a CUDA graph uses the communicator.
  void capture() { captured_ = true; }

  /// Sets the communicator, once. abort() may have been called before.
  void set(ncclComm_t handle) {
    const std::lock_guard lock(mutex_);
    handle_ = handle;
  }

  /// Exclusive use of the communicator, for one thread at a time. Null after abort().
  class Use {
   public:
    explicit Use(Communicator& of) : lock_(of.calls_), handle_(of.handle()) {}
    ncclComm_t handle() const { return handle_; }

   private:
    std::unique_lock<std::timed_mutex> lock_;
    ncclComm_t handle_;
  };

  /// Ends collectives that run on the GPU, and NCCL calls in which other threads wait. Call it on a separate thread: it
  /// waits for all kernels of this GPU, including those of other communicators.
  void abort() {
    // A call in progress usually returns soon. If it waits for other ranks, only the abort ends it, so go on without
    // the lock.
    std::unique_lock calls(calls_, std::defer_lock);
    (void)calls.try_lock_for(std::chrono::seconds(1));
    ncclComm_t handle = nullptr;
    {
      const std::lock_guard lock(mutex_);
      handle = std::exchange(handle_, nullptr);
    }
    if (handle == nullptr) {
      return;
    }
    const auto done = std::make_shared<std::promise<void>>();
    std::thread([done, handle, index = device_.index] {
      if (cudaSetDevice(index) == cudaSuccess) {
        (void)ncclCommAbort(handle);
      }
      done->set_value();
    }).detach();
    // NCCL ends what runs on the GPU at once. But it returns only after the graphs with its collectives are destroyed,
    // which happens when the program unwinds.
    const std::future<void> result = done->get_future();
    if (captured_) {
      (void)result.wait_for(std::chrono::seconds(1));
    } else {
      result.wait();
    }
  }

  /// The asynchronous error that NCCL has reported; empty if none. May be called on any thread.
  std::string error() {
    const std::lock_guard lock(mutex_);
    ncclResult_t status = ncclSuccess;
    if (handle_ == nullptr || ncclCommGetAsyncError(handle_, &status) != ncclSuccess || status == ncclSuccess ||
        status == ncclInProgress) {
      return "";
    }
    return fmt::format("NCCL reports: {} ({})", ncclGetErrorString(status), ncclGetLastError(handle_));
  }

 private:
  ncclComm_t handle() {
    const std::lock_guard lock(mutex_);
    return handle_;
  }

  const Device device_;
  std::atomic<bool> captured_{false};
  std::timed_mutex calls_;
  std::mutex mutex_;  // guards handle_
  ncclComm_t handle_ = nullptr;
};

class QueuedCollective final : public Transfer {
  // When a rank fails, the others still compute the steps that they have launched. So they launch only a few ahead.
  static constexpr std::size_t most_replays = 8;

 public:
  QueuedCollective(const char* name, std::shared_ptr<Communicator> communicator,
                   std::shared_ptr<Coordinator> coordinator, std::shared_ptr<TensorsInUse> tensors)
      : name_(name),
        communicator_(std::move(communicator)),
        coordinator_(std::move(coordinator)),
        tensors_(std::move(tensors)),
        captured_(is_capturing()) {}

  void wait() override {
    if (coordinator_ != nullptr) {
      coordinator_->check(name_);
    }
    if (captured_ && !is_capturing()) {
      return;  // replays end on the stream on which they are launched
    }
    mica::check(captured_ == is_capturing(), "{}: cannot be waited for in a capture, as it was started before", name_);
    const DeviceGuard guard(communicator_->device());
    tensors_->block_current_stream();
  }

  // A graph ends only after its collectives, since the captured stream has waited for them.
  std::shared_ptr<Transfer> replayed() override {
    const auto end = std::make_shared<TensorsInUse>(Tensors{}, nullptr);
    end->end(cuda::current_stream());
    replays_.push_back(std::make_shared<QueuedCollective>(name_, communicator_, coordinator_, end));
    const std::shared_ptr<QueuedCollective> result = replays_.back();
    if (replays_.size() > most_replays) {
      replays_.front()->tensors_->wait_for_end();
      replays_.pop_front();
    }
    return result;
  }

  // Called on the coordinator's thread, which does not use the current device otherwise.
  bool ended() const override {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        (device != communicator_->device().index && cudaSetDevice(communicator_->device().index) != cudaSuccess)) {
      (void)cudaGetLastError();
      return true;
    }
    if (tensors_->has_ended()) {
      return true;
    }
    if (const std::string error = communicator_->error();
        coordinator_ != nullptr && !error.empty() && !reported_.exchange(true)) {
      coordinator_->report_error(error);
    }
    return false;
  }

 private:
  const char* name_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Coordinator> coordinator_;
  std::shared_ptr<TensorsInUse> tensors_;
  const bool captured_;
  std::deque<std::shared_ptr<QueuedCollective>> replays_;  // the newest
  mutable std::atomic<bool> reported_{false};
};

class Nccl final : public Collectives {
 public:
  Nccl(int rank, int size, std::shared_ptr<Coordinator> coordinator, std::function<void(const Tensor&)> broadcast)
      : rank_(rank), size_(size), coordinator_(std::move(coordinator)), broadcast_bytes_(std::move(broadcast)) {}

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    return run("all_reduce", {x}, [&](ncclComm_t communicator) {
      return ncclAllReduce(x.raw_data(), x.raw_data(), count(x), type_of(x.dtype()), function_of(reduction),
                           communicator, stream_);
    });
  }

  std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) override {
    return run("reduce_scatter", {from, into}, [&](ncclComm_t communicator) {
      return ncclReduceScatter(from.raw_data(), into.raw_data(), count(into), type_of(from.dtype()),
                               function_of(reduction), communicator, stream_);
    });
  }

  std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    return run("all_gather", {from, into}, [&](ncclComm_t communicator) {
      return ncclAllGather(from.raw_data(), into.raw_data(), count(from), type_of(from.dtype()), communicator, stream_);
    });
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    return run("broadcast", {x}, [&](ncclComm_t communicator) {
      return ncclBroadcast(x.raw_data(), x.raw_data(), count(x), type_of(x.dtype()), root, communicator, stream_);
    });
  }

 private:
  static std::size_t count(const Tensor& x) { return static_cast<std::size_t>(x.numel()); }

  void check_ranks(const char* name) const {
    if (coordinator_ != nullptr) {
      coordinator_->check(name);
    }
  }

  /// Queues an NCCL call after the current stream's work.
  template <class Call>
  std::shared_ptr<Transfer> run(const char* name, const Tensors& tensors, const Call& call) {
    const std::lock_guard lock(mutex_);
    const Device device = tensors.front().device();
    const DeviceGuard guard(device);
    connect(name, device);
    if (is_capturing()) {
      communicator_->capture();
    }
    Event before;
    before.record(cuda::current_stream());
    before.block(stream_);
    std::optional<ncclResult_t> status;
    std::string detail;
    {
      const Communicator::Use use(*communicator_);
      if (use.handle() != nullptr) {
        status = call(use.handle());
        detail = status == ncclSuccess ? "" : ncclGetLastError(nullptr);
      }
    }
    if (status != ncclSuccess) {
      check_ranks(name);  // throws if the communicator was aborted or another rank has failed
      fail("{}: NCCL failed: {} ({})", name, ncclGetErrorString(status.value_or(ncclInvalidUsage)), detail);
    }
    auto in_use = std::make_shared<TensorsInUse>(tensors, cuda::current_stream());
    in_use->end(stream_);
    if (!is_capturing()) {  // the graph keeps what it needs, and its events cannot be queried
      keep(in_use);
    }
    return std::make_shared<QueuedCollective>(name, communicator_, coordinator_, std::move(in_use));
  }

  // Creates the communicator, at the first collective.
  void connect(const char* name, Device device) {
    mica::check(communicator_ != nullptr || !is_capturing(),
                "{}: a group's first collective on a GPU cannot be captured into a CUDA graph", name);
    if (communicator_ != nullptr) {
      mica::check(device == communicator_->device(),
                  "{}: this group communicates from {} since its first collective, got a tensor on {}", name,
                  communicator_->device(), device);
      return;
    }
    // Otherwise captured collectives could use other algorithms than the same ones without a graph: with other bits,
    // and not compatible with those of a rank that could not capture its step.
    (void)setenv("NCCL_GRAPH_REGISTER", "0", 0);
    ncclUniqueId id{};
    if (rank_ == 0) {
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    }
    const Tensor bytes = empty({static_cast<std::int64_t>(sizeof id)}, uint8);
    std::memcpy(bytes.raw_data(), &id, sizeof id);
    broadcast_bytes_(bytes);
    std::memcpy(&id, bytes.raw_data(), sizeof id);
    // High priority, so that NCCL's blocks run before those of kernels that backward has already queued.
    if (stream_ == nullptr) {
      int least = 0, greatest = 0;
      cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
      cuda::check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                  "cudaStreamCreateWithPriority");
    }
    auto communicator = std::make_shared<Communicator>(device);
    initialize(*communicator, device, id);
    if (coordinator_ != nullptr) {
      coordinator_->on_failure_in_background([communicator] { communicator->abort(); });
    }
    communicator_ = std::move(communicator);
  }

  // Initializes the communicator, which all ranks do together. If a rank does not take part, NCCL never returns, so a
  // separate thread calls it, and this one throws.
  void initialize(Communicator& communicator, Device device, const ncclUniqueId& id) {
    struct Initialization {
      std::mutex mutex;
      std::condition_variable changed;
      std::optional<ncclResult_t> status;
      std::string detail;
      ncclComm_t handle = nullptr;
    };
    const auto shared = std::make_shared<Initialization>();
    std::thread([shared, device, id, rank = rank_, size = size_] {
      ncclComm_t handle = nullptr;
      const bool usable = cudaSetDevice(device.index) == cudaSuccess;
      const ncclResult_t status = usable ? ncclCommInitRank(&handle, size, id, rank) : ncclUnhandledCudaError;
      const std::lock_guard lock(shared->mutex);
      shared->status = status;
      shared->detail = status == ncclSuccess ? "" : ncclGetLastError(nullptr);
      shared->handle = handle;
      shared->changed.notify_all();
    }).detach();
    std::unique_lock lock(shared->mutex);
    const auto over = [&] { return shared->status.has_value() || (coordinator_ != nullptr && coordinator_->failed()); };
    while (!shared->changed.wait_for(lock, std::chrono::milliseconds(50), over)) {
    }
    if (shared->status != ncclSuccess) {
      check_ranks("ncclCommInitRank");
      fail("ncclCommInitRank failed: {} ({})", ncclGetErrorString(*shared->status), shared->detail);
    }
    communicator.set(shared->handle);
  }

  void keep(const std::shared_ptr<const TensorsInUse>& tensors) {
    while (!running_.empty() && running_.front()->has_ended()) {
      running_.pop_front();
    }
    running_.push_back(tensors);
  }

  int rank_;
  int size_;
  std::shared_ptr<Coordinator> coordinator_;
  std::function<void(const Tensor&)> broadcast_bytes_;
  std::mutex mutex_;  // guards the members below
  std::shared_ptr<Communicator> communicator_;
  cudaStream_t stream_ = nullptr;
  std::deque<std::shared_ptr<const TensorsInUse>> running_;
};

}  // namespace

std::shared_ptr<Collectives> nccl_collectives(int rank, int size, std::shared_ptr<Coordinator> coordinator,
                                              std::function<void(const Tensor&)> broadcast) {
  return std::make_shared<Nccl>(rank, size, std::move(coordinator), std::move(broadcast));
}

}  // namespace mica::distributed::detail
