// Collectives over MPI. One thread of the process makes all calls of MPI, so it may be initialized without support for
// threads, and collectives advance while the program computes.

#include <mpi.h>
#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/dist/detail/mpi.h>

namespace mica::dist::detail {

namespace {

void check_mpi(int status, const char* call) {
  if (status != MPI_SUCCESS) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    fail("{} failed: {}", call, std::string(text, static_cast<std::size_t>(length)));
  }
}

/// A call of MPI and its end.
class Operation : public Transfer {
 public:
  /// start() returns a request, or MPI_REQUEST_NULL if all is done. finish() is called when it has ended. Both run on
  /// MPI's thread.
  Operation(std::function<MPI_Request()> start, std::function<void()> finish)
      : start_(std::move(start)), finish_(std::move(finish)) {}

  void wait() override {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  // The rest is for MPI's thread.

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
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    ended_.notify_all();
  }

 private:
  std::function<MPI_Request()> start_;
  std::function<void()> finish_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::exception_ptr error_;
};

/// The thread that calls MPI. Initializes it, and finalizes it when the process ends.
class MpiThread {
 public:
  static MpiThread& get() {
    static MpiThread thread;
    return thread;
  }

  /// Starts the operation after those given before.
  std::shared_ptr<Operation> run(std::function<MPI_Request()> start, std::function<void()> finish = {}) {
    auto operation = std::make_shared<Operation>(std::move(start), std::move(finish));
    const std::lock_guard lock(mutex_);
    given_.push_back(operation);
    something_given_.notify_one();
    return operation;
  }

 private:
  MpiThread() {
    std::exception_ptr error;
    std::condition_variable initialized;
    bool ready = false;
    thread_ = std::thread([&, this] {
      try {
        initialize();
      } catch (...) {
        error = std::current_exception();
      }
      const bool failed = error != nullptr;
      {
        const std::lock_guard lock(mutex_);
        ready = true;
        initialized.notify_one();
      }
      if (!failed) {
        loop();
      }
    });
    std::unique_lock lock(mutex_);
    initialized.wait(lock, [&] { return ready; });
    if (error) {
      lock.unlock();
      thread_.join();
      std::rethrow_exception(error);
    }
  }

  ~MpiThread() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      something_given_.notify_one();
    }
    thread_.join();
  }

  void initialize() {
    int already = 0;
    check_mpi(MPI_Initialized(&already), "MPI_Initialized");
    int level = 0;
    if (already != 0) {
      check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
      check(level == MPI_THREAD_MULTIPLE,
            "world: MPI was initialized without MPI_THREAD_MULTIPLE, which its use by two threads needs");
      return;
    }
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    owns_mpi_ = true;
  }

  void loop() {
    std::vector<std::shared_ptr<Operation>> running;
    std::vector<MPI_Request> requests;
    std::vector<int> ended;
    int idle = 0;
    for (;;) {
      std::deque<std::shared_ptr<Operation>> given;
      {
        std::unique_lock lock(mutex_);
        if (running.empty()) {
          something_given_.wait(lock, [this] { return stopping_ || !given_.empty(); });
          if (given_.empty()) {
            break;
          }
        }
        given.swap(given_);
      }
      for (std::shared_ptr<Operation>& operation : given) {
        try {
          const MPI_Request request = operation->start();
          if (request == MPI_REQUEST_NULL) {
            operation->end(nullptr);
          } else {
            requests.push_back(request);
            running.push_back(std::move(operation));
          }
        } catch (...) {
          operation->end(std::current_exception());
        }
        idle = 0;
      }
      if (running.empty()) {
        continue;
      }
      ended.resize(requests.size());
      std::vector<MPI_Status> statuses(requests.size());
      int count = 0;
      const int status =
          MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, ended.data(), statuses.data());
      for (int i = 0; i < count; ++i) {
        std::exception_ptr error;
        try {
          check_mpi(status == MPI_ERR_IN_STATUS ? statuses[i].MPI_ERROR : MPI_SUCCESS, "a collective of MPI");
        } catch (...) {
          error = std::current_exception();
        }
        std::exchange(running[ended[i]], nullptr)->end(error);
      }
      std::erase(running, nullptr);
      std::erase(requests, MPI_REQUEST_NULL);
      idle = count > 0 ? 0 : idle + 1;
      pause(idle);
    }
    if (owns_mpi_) {
      MPI_Finalize();
    }
  }

  // Messages on one machine take microseconds; on cores that several ranks share, waiting must leave them to others.
  static void pause(int idle) {
    if (idle > 200) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (idle > 0) {
      sched_yield();
    }
  }

  std::thread thread_;
  std::mutex mutex_;  // of what follows
  std::condition_variable something_given_;
  std::deque<std::shared_ptr<Operation>> given_;
  bool stopping_ = false;
  bool owns_mpi_ = false;
};

template <class T, class F>
void combine(void* from, void* into, int* count, MPI_Datatype* /*type*/) {
  const T* const a = static_cast<const T*>(from);
  T* const b = static_cast<T*>(into);
  for (int i = 0; i < *count; ++i) {
    b[i] = static_cast<T>(F{}(static_cast<float>(a[i]), static_cast<float>(b[i])));
  }
}

struct Sum {
  float operator()(float a, float b) const { return a + b; }
};
struct Least {
  float operator()(float a, float b) const { return b < a ? b : a; }
};
struct Greatest {
  float operator()(float a, float b) const { return a < b ? b : a; }
};

/// Types and functions of MPI, which has none for 16-bit floats. Made on MPI's thread at first use.
struct Types16 {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MPI_OP_NULL, min = MPI_OP_NULL, max = MPI_OP_NULL;
};

template <class T>
const Types16& types_16() {
  static const Types16 types = [] {
    Types16 made;
    check_mpi(MPI_Type_contiguous(2, MPI_BYTE, &made.type), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&made.type), "MPI_Type_commit");
    check_mpi(MPI_Op_create(combine<T, Sum>, 1, &made.sum), "MPI_Op_create");
    check_mpi(MPI_Op_create(combine<T, Least>, 1, &made.min), "MPI_Op_create");
    check_mpi(MPI_Op_create(combine<T, Greatest>, 1, &made.max), "MPI_Op_create");
    return made;
  }();
  return types;
}

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return MPI_DOUBLE;
    case DType::float32: return MPI_FLOAT;
    case DType::float16: return types_16<Half>().type;
    case DType::bfloat16: return types_16<BFloat16>().type;
    case DType::int64: return MPI_INT64_T;
    case DType::int32: return MPI_INT32_T;
    case DType::uint8:
    case DType::boolean: return MPI_UINT8_T;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op function_of(DType dtype, Reduction reduction) {
  if (dtype == float16 || dtype == bfloat16) {
    const Types16& types = dtype == float16 ? types_16<Half>() : types_16<BFloat16>();
    return reduction == Reduction::min ? types.min : reduction == Reduction::max ? types.max : types.sum;
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
  /// Takes the communicator over. Call it on MPI's thread.
  explicit Mpi(MPI_Comm communicator) : communicator_(communicator) {
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  int local_rank() const override {
    int result = 0;
    MpiThread::get()
        .run([&] {
          MPI_Comm machine = MPI_COMM_NULL;
          check_mpi(MPI_Comm_split_type(communicator_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
                    "MPI_Comm_split_type");
          MPI_Comm_rank(machine, &result);
          MPI_Comm_free(&machine);
          return MPI_REQUEST_NULL;
        })
        ->wait();
    return result;
  }

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    const int count = count_of("all_reduce", x);
    return MpiThread::get().run(
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
    // MPI wants buffers that do not overlap.
    const bool in_place = from.raw_data() <= into.raw_data() && into.raw_data() < from.raw_data() + from.bytes();
    const Tensor result = in_place ? empty(into.shape(), into.dtype()) : into;
    return MpiThread::get().run(
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
    return MpiThread::get().run([=, communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : from.raw_data(), count, type_of(from.dtype()), into.raw_data(),
                               count, type_of(from.dtype()), communicator, &request),
                "MPI_Iallgather");
      return request;
    });
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    const int count = count_of("broadcast", x);
    return MpiThread::get().run([=, communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibcast(x.raw_data(), count, type_of(x.dtype()), root, communicator, &request), "MPI_Ibcast");
      return request;
    });
  }

  std::shared_ptr<Transfer> barrier() override {
    return MpiThread::get().run([communicator = communicator_] {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
      return request;
    });
  }

  std::shared_ptr<MpiCollectives> split(int color, int key) override {
    std::shared_ptr<MpiCollectives> result;
    MpiThread::get()
        .run([&] {
          MPI_Comm part = MPI_COMM_NULL;
          check_mpi(MPI_Comm_split(communicator_, color, key, &part), "MPI_Comm_split");
          result = std::make_shared<Mpi>(part);
          return MPI_REQUEST_NULL;
        })
        ->wait();
    return result;
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
};

}  // namespace

std::shared_ptr<MpiCollectives> mpi_world() {
  std::shared_ptr<MpiCollectives> result;
  MpiThread::get()
      .run([&] {
        MPI_Comm all = MPI_COMM_NULL;
        check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &all), "MPI_Comm_dup");
        result = std::make_shared<Mpi>(all);
        return MPI_REQUEST_NULL;
      })
      ->wait();
  return result;
}

}  // namespace mica::dist::detail
