// Collectives over MPI. One thread of the process makes all MPI calls, so MPI may be initialized without thread
// support, and collectives make progress while the program computes.

#include <mpi.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/distributed/detail/transport/extremum.h>
#include <mica/distributed/detail/transport/mpi.h>

namespace mica::distributed::detail {

namespace {

void check_mpi(int status, const char* call) {
  if (status != MPI_SUCCESS) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    fail("{} failed: {}", call, std::string(text, static_cast<std::size_t>(length)));
  }
}

/// A nonblocking MPI operation.
class Operation : public Transfer {
 public:
  /// MPI's thread calls start(), which returns a request, or MPI_REQUEST_NULL if the operation is complete, and then
  /// finish(). `name` is a literal. With a limit, wait() throws after that many seconds.
  Operation(const char* name, std::function<MPI_Request()> start, std::function<void()> finish,
            std::optional<double> limit)
      : name_(name), start_(std::move(start)), finish_(std::move(finish)), limit_(limit) {}

  void wait() override {
    std::unique_lock lock(mutex_);
    const auto done = [this] { return done_.load(); };
    if (limit_) {
      check(changed_.wait_for(lock, std::chrono::duration<double>(*limit_), done),
            "{}: not all ranks have started within {} s. MPI does not say which; if they need longer, set "
            "MICA_DIST_START_TIMEOUT to more seconds",
            name_, *limit_);
    } else {
      changed_.wait(lock, done);
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  bool ended() const override { return done_; }

  /// Ends the operation with an Error. MPI may still use its tensors, so the caller must keep this object alive.
  void fail(const std::string& reason) { done(std::make_exception_ptr(Error(fmt::format("{}: {}", name_, reason)))); }

  // The functions below run on MPI's thread.

  MPI_Request start() { return start_(); }

  void end(std::exception_ptr error) {
    if (!error && finish_) {
      try {
        finish_();
      } catch (...) {
        error = std::current_exception();
      }
    }
    start_ = {};  // frees the tensors
    finish_ = {};
    done(std::move(error));
  }

 private:
  void done(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      error_ = std::move(error);
      done_ = true;
      changed_.notify_all();
    }
  }

  const char* name_;
  std::function<MPI_Request()> start_;
  std::function<void()> finish_;
  std::optional<double> limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

/// The thread that calls MPI. It may block there forever when another rank has failed, so it is not joined, and this
/// object is never destroyed.
class MpiThread {
 public:
  static MpiThread& get() {
    static MpiThread& thread = *new MpiThread;
    return thread;
  }

  /// Queues an operation.
  std::shared_ptr<Operation> run(const char* name, std::function<MPI_Request()> start,
                                 std::function<void()> finish = {}) {
    const std::lock_guard lock(mutex_);
    auto operation = std::make_shared<Operation>(name, std::move(start), std::move(finish), limit_);
    if (aborted_) {
      operation->fail(*aborted_);
      return operation;
    }
    check(!stopping_, "{}: this program has ended its part in the group", name);
    unfinished_.push_back(operation);
    changed_.notify_all();
    return operation;
  }

  /// Sets a timeout for waits, until report_failures() is called.
  void limit_waits(double seconds) {
    const std::lock_guard lock(mutex_);
    limit_ = seconds;
  }

  /// From now on, failures are reported to other ranks and waits have no timeout.
  void report_failures(std::function<void(const std::string&)> report) {
    const std::lock_guard lock(mutex_);
    report_ = std::move(report);
    limit_.reset();
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    aborted_ = reason;
    for (const auto* const operations : {&unfinished_, &failed_}) {
      for (const std::shared_ptr<Operation>& operation : *operations) {
        if (operation != nullptr) {
          operation->fail(reason);
        }
      }
    }
    changed_.notify_all();
  }

  void finalize() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return stopped_ || aborted_; });
  }

 private:
  MpiThread() {
    std::thread([this] {
      try {
        initialize();
      } catch (const Error& error) {
        abort(error.what());
        return;
      }
      loop();
    }).detach();
  }

  void initialize() {
    int already = 0;
    check_mpi(MPI_Initialized(&already), "MPI_Initialized");
    int level = 0;
    if (already != 0) {
      check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
      check(level == MPI_THREAD_MULTIPLE,
            "MPI was initialized without MPI_THREAD_MULTIPLE, which its use by two threads needs");
      return;
    }
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    owns_mpi_ = true;
    // Open MPI reports errors of nonblocking collectives to this communicator, whichever one they use.
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }

  void loop() {
    std::vector<MPI_Request> requests;  // of the operations in unfinished_ that were started
    int idle = 0;
    while (const std::size_t known = wait_for_operations(requests)) {
      idle = requests.size() < known ? 0 : idle;
      start_operations(requests, known);
      idle = end_operations(requests) > 0 ? 0 : idle + 1;
      pause(idle);
    }
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) {
        return;  // unfinished_ keeps the tensors that MPI may still use
      }
    }
    if (owns_mpi_) {
      MPI_Finalize();
    }
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

  // Removes ended operations. Returns the number of the others, or 0 if the thread is to end.
  std::size_t wait_for_operations(std::vector<MPI_Request>& requests) {
    std::unique_lock lock(mutex_);
    std::erase(unfinished_, nullptr);
    std::erase(requests, MPI_REQUEST_NULL);
    changed_.wait(lock, [this] { return stopping_ || aborted_ || !unfinished_.empty(); });
    return aborted_ ? 0 : unfinished_.size();
  }

  // Other threads append operations, and only this one removes them, so the first `known` stay where they are.
  void start_operations(std::vector<MPI_Request>& requests, std::size_t known) {
    while (requests.size() < known) {
      const std::shared_ptr<Operation> operation = unfinished(requests.size());
      MPI_Request request = MPI_REQUEST_NULL;
      std::exception_ptr error;
      try {
        request = operation->start();
      } catch (...) {
        error = std::current_exception();
      }
      requests.push_back(request);
      if (request == MPI_REQUEST_NULL) {
        end(requests.size() - 1, error);
      }
    }
  }

  // Ends the operations whose requests are complete. Returns their number.
  int end_operations(std::vector<MPI_Request>& requests) {
    ended_.resize(requests.size());
    statuses_.resize(requests.size());
    int count = 0;
    const int status =
        MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, ended_.data(), statuses_.data());
    count = count == MPI_UNDEFINED ? 0 : count;
    if (status != MPI_SUCCESS && status != MPI_ERR_IN_STATUS) {
      fail_all(status, requests);
      return static_cast<int>(requests.size());
    }
    for (int i = 0; i < count; ++i) {
      std::exception_ptr error;
      try {
        check_mpi(status == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS, "a collective of MPI");
      } catch (...) {
        error = std::current_exception();
      }
      end(static_cast<std::size_t>(ended_[i]), error);
    }
    return count;
  }

  void fail_all(int status, std::vector<MPI_Request>& requests) {
    std::exception_ptr error;
    try {
      check_mpi(status, "MPI_Testsome");
    } catch (...) {
      error = std::current_exception();
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      end(i, error);
      requests[i] = MPI_REQUEST_NULL;
    }
  }

  std::shared_ptr<Operation> unfinished(std::size_t i) {
    const std::lock_guard lock(mutex_);
    return unfinished_[i];
  }

  // Ends and removes operation i. A failed one stays until abort(), which gets the reason.
  void end(std::size_t i, const std::exception_ptr& error) {
    std::function<void(const std::string&)> report;
    std::shared_ptr<Operation> operation;
    {
      const std::lock_guard lock(mutex_);
      operation = std::exchange(unfinished_[i], nullptr);
      if (error && report_) {
        report = report_;
        if (aborted_) {
          return;  // was reported already
        }
        failed_.push_back(operation);
      }
    }
    if (!report) {
      operation->end(error);
      return;
    }
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& what) {
      report(what.what());
    }
  }

  // Messages on one machine take microseconds, so poll at first; later sleep, since several ranks may share a core.
  static void pause(int idle) {
    if (idle > 200) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (idle > 0) {
      sched_yield();
    }
  }

  // Used by the thread only.
  bool owns_mpi_ = false;
  std::vector<int> ended_;  // by MPI_Testsome
  std::vector<MPI_Status> statuses_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Operation>> unfinished_;  // null: about to be removed
  std::vector<std::shared_ptr<Operation>> failed_;
  std::function<void(const std::string&)> report_;
  std::optional<std::string> aborted_;
  std::optional<double> limit_;  // of waits, in seconds
  bool stopping_ = false;
  bool stopped_ = false;
};

template <class T, class F>
void combine(void* from, void* into, int* count, MPI_Datatype* /*type*/) {
  const T* const a = static_cast<const T*>(from);
  T* const b = static_cast<T*>(into);
  for (int i = 0; i < *count; ++i) {
    b[i] = F{}(a[i], b[i]);
  }
}

struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<float>(a) + static_cast<float>(b));
  }
};
struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return extremum<true>(a, b);
  }
};
struct Greatest {
  template <class T>
  T operator()(T a, T b) const {
    return extremum<false>(a, b);
  }
};

template <class T, class F>
MPI_Op made_operator() {
  MPI_Op made = MPI_OP_NULL;
  check_mpi(MPI_Op_create(combine<T, F>, 1, &made), "MPI_Op_create");
  return made;
}

// MPI has no 16-bit floats, and its MPI_MIN and MPI_MAX may lose a NaN. These are created on MPI's thread at first use.

template <class T>
MPI_Datatype type_16() {
  static MPI_Datatype type = [] {
    MPI_Datatype made = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(2, MPI_BYTE, &made), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&made), "MPI_Type_commit");
    return made;
  }();
  return type;
}

template <class T>
MPI_Op operator_of(Reduction reduction) {
  if (reduction == Reduction::min) {
    static MPI_Op least = made_operator<T, Least>();
    return least;
  }
  if (reduction == Reduction::max) {
    static MPI_Op greatest = made_operator<T, Greatest>();
    return greatest;
  }
  if constexpr (sizeof(T) == 2) {
    static MPI_Op sum = made_operator<T, Sum>();
    return sum;
  }
  return MPI_SUM;
}

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return MPI_DOUBLE;
    case DType::float32: return MPI_FLOAT;
    case DType::float16: return type_16<Float16>();
    case DType::bfloat16: return type_16<BFloat16>();
    case DType::int64: return MPI_INT64_T;
    case DType::int32: return MPI_INT32_T;
    case DType::uint8:
    case DType::boolean: return MPI_UINT8_T;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op function_of(DType dtype, Reduction reduction) {
  if (is_floating(dtype)) {
    MPI_Op found = MPI_OP_NULL;
    on_dtype(FloatTypes{}, dtype, "all_reduce", [&]<class T>() { found = operator_of<T>(reduction); });
    return found;
  }
  return reduction == Reduction::min ? MPI_MIN : reduction == Reduction::max ? MPI_MAX : MPI_SUM;
}

int count_of(const char* op, const Tensor& x) {
  check(x.numel() <= std::numeric_limits<int>::max(), "{}: expected at most 2^31 - 1 elements, got {}", op, x.numel());
  return static_cast<int>(x.numel());
}

void divide(const Tensor& x, int divisor) {
  on_dtype(FloatTypes{}, x.dtype(), "all_reduce", [&]<class T>() {
    using A = Accumulate<T>;
    T* const data = x.data<T>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      data[i] = static_cast<T>(static_cast<A>(data[i]) / static_cast<A>(divisor));
    }
  });
}

class Mpi final : public MpiCollectives {
 public:
  /// Takes ownership of the communicator. Call it on MPI's thread.
  explicit Mpi(MPI_Comm communicator) : communicator_(communicator) {
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
    std::vector<int> own(size_);
    std::iota(own.begin(), own.end(), 0);
    members_.resize(size_);
    MPI_Group group = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(communicator_, &group), "MPI_Comm_group");
    check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
    check_mpi(MPI_Group_translate_ranks(group, size_, own.data(), all, members_.data()), "MPI_Group_translate_ranks");
    MPI_Group_free(&group);
    MPI_Group_free(&all);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  const std::vector<int>& members() const override { return members_; }

  Local local() const override {
    // On the heap, since the operation outlives this call if another rank fails.
    auto result = std::make_shared<Local>();
    MpiThread::get()
        .run("world",
             [result, communicator = communicator_, rank = rank_] {
               MPI_Comm machine = MPI_COMM_NULL;
               check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine),
                         "MPI_Comm_split_type");
               MPI_Comm_rank(machine, &result->rank);
               MPI_Comm_size(machine, &result->size);
               MPI_Comm_free(&machine);
               return MPI_REQUEST_NULL;
             })
        ->wait();
    return *result;
  }

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    const int count = count_of("all_reduce", x);
    return MpiThread::get().run(
        "all_reduce",
        [=, communicator = communicator_] {
          MPI_Request request = MPI_REQUEST_NULL;
          check_mpi(MPI_Iallreduce(MPI_IN_PLACE, x.raw_data(), count, type_of(x.dtype()),
                                   function_of(x.dtype(), reduction), communicator, &request),
                    "MPI_Iallreduce");
          return request;
        },
        finish(x, reduction));
  }

  std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) override {
    const int count = count_of("reduce_scatter", into);
    // MPI requires buffers that do not overlap.
    const bool in_place = from.raw_data() <= into.raw_data() && into.raw_data() < from.raw_data() + from.bytes();
    const Tensor result = in_place ? empty(into.shape(), into.dtype()) : into;
    return MpiThread::get().run(
        "reduce_scatter",
        [=, communicator = communicator_] {
          MPI_Request request = MPI_REQUEST_NULL;
          check_mpi(MPI_Ireduce_scatter_block(from.raw_data(), result.raw_data(), count, type_of(from.dtype()),
                                              function_of(from.dtype(), reduction), communicator, &request),
                    "MPI_Ireduce_scatter_block");
          return request;
        },
        [=, divided = finish(result, reduction)] {
          divided();
          if (in_place) {
            std::memcpy(into.raw_data(), result.raw_data(), into.bytes());
          }
        });
  }

  std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    const int count = count_of("all_gather", from);
    const bool in_place = from.raw_data() == into.raw_data() + static_cast<std::size_t>(rank_) * from.bytes();
    return MpiThread::get().run("all_gather", [=, communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : from.raw_data(), count, type_of(from.dtype()), into.raw_data(),
                               count, type_of(from.dtype()), communicator, &request),
                "MPI_Iallgather");
      return request;
    });
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    const int count = count_of("broadcast", x);
    return MpiThread::get().run("broadcast", [=, communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibcast(x.raw_data(), count, type_of(x.dtype()), root, communicator, &request), "MPI_Ibcast");
      return request;
    });
  }

  std::shared_ptr<Transfer> barrier() override {
    return MpiThread::get().run("barrier", [communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
      return request;
    });
  }

  std::shared_ptr<MpiCollectives> split(int color, int key) override {
    auto result = std::make_shared<std::shared_ptr<MpiCollectives>>();
    MpiThread::get()
        .run("split",
             [=, communicator = communicator_] {
               MPI_Comm part = MPI_COMM_NULL;
               check_mpi(MPI_Comm_split(communicator, color, key, &part), "MPI_Comm_split");
               *result = std::make_shared<Mpi>(part);
               return MPI_REQUEST_NULL;
             })
        ->wait();
    return *result;
  }

 private:
  std::function<void()> finish(const Tensor& result, Reduction reduction) const {
    return [result, reduction, size = size_] {
      if (reduction == Reduction::mean) {
        divide(result, size);
      }
    };
  }

  MPI_Comm communicator_;  // not freed before the process ends: all ranks would have to free it together
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> members_;
};

}  // namespace

std::shared_ptr<MpiCollectives> mpi_world(double start_timeout) {
  MpiThread::get().limit_waits(start_timeout);
  auto result = std::make_shared<std::shared_ptr<MpiCollectives>>();
  MpiThread::get()
      .run("world",
           [result] {
             MPI_Comm all = MPI_COMM_NULL;
             check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &all), "MPI_Comm_dup");
             *result = std::make_shared<Mpi>(all);
             return MPI_REQUEST_NULL;
           })
      ->wait();
  return *result;
}

void mpi_report_failures(std::function<void(const std::string&)> report) {
  MpiThread::get().report_failures(std::move(report));
}

void mpi_abort(const std::string& reason) { MpiThread::get().abort(reason); }

void mpi_finalize() { MpiThread::get().finalize(); }

}  // namespace mica::distributed::detail
