#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include <mica/core/creation.h>
#include <mica/core/detail/async_copy.h>
#include <mica/io/data_loader.h>
#include <mica/io/permutation.h>

namespace mica::io {

namespace {

// The number of batches that are copied to a GPU ahead of the one that is being used.
constexpr std::int64_t kSentAhead = 2;

const DataLoaderOptions& checked(const Dataset& data, const DataLoaderOptions& options) {
  const std::int64_t size = data.size();
  check(size >= 1, "DataLoader: expected a data set with at least one sample, got one with {}", size);
  check(options.batch >= 1, "DataLoader: expected a batch of at least 1, got {}", options.batch);
  check(options.workers >= 0 && options.workers <= 256, "DataLoader: expected workers in [0, 256], got {}",
        options.workers);
  const DataPosition& start = options.start;
  // The bound on the epoch keeps the number of all samples far from overflow.
  check(start.epoch >= 0 && start.epoch <= INT64_MAX / 4 / size && start.index >= 0 && start.index < size,
        "DataLoader: expected a position in data of {} samples, got epoch {}, index {}", size, start.epoch,
        start.index);
  check(options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks,
        "DataLoader: expected a rank in [0, ranks), got rank {} of {}", options.rank, options.ranks);
  check(options.batch % options.ranks == 0,
        "DataLoader: expected a batch that {} ranks can share equally, got one of {} samples", options.ranks,
        options.batch);
  return options;
}

}  // namespace

/// Batches are numbered from 0. Batch i is prepared in slot i modulo the number of slots:
///
///     released ≤ i < released + slots   a worker may prepare it (each batch is prepared by one worker)
///     taken ≤ i < released              only on a GPU: its copy to the device was started
///     i < taken                         next() has returned it
class DataLoader::Queue {
 public:
  Queue(const Dataset& data, const DataLoaderOptions& options)
      : data_(data),
        options_(checked(data, options)),
        fields_(data.fields()),
        size_(data.size()),
        rows_(options.batch / options.ranks),
        stream_(options.device),
        slots_(static_cast<std::size_t>(options.workers) + 2) {
    check(!fields_.empty(), "DataLoader: expected a data set with at least one field, got none");
    try {
      for (int i = 0; i < options.workers; ++i) {
        workers_.emplace_back([this] { work(); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Queue() {
    stop();
    for (const Slot& slot : slots_) {
      try {
        slot.sent.wait();  // before its memory is freed
      } catch (const Error&) {
        // The GPU has failed; its next use will report the error.
      }
    }
  }

  Tensors next() {
    if (options_.device.is_cpu()) {
      wait_for(taken_);
      Tensors batch = std::move(slot_of(taken_).batch);
      release();
      ++taken_;
      return batch;
    }
    while (released_ < taken_ + kSentAhead && (released_ == taken_ ? (wait_for(taken_), true) : is_ready(released_))) {
      send();
    }
    Sent sent = std::move(sent_.front());
    sent_.pop_front();
    sent.copy.order();
    ++taken_;
    return std::move(sent.batch);
  }

  DataPosition position() const { return position_of(taken_, 0); }

 private:
  struct Slot {
    Tensors batch;             // for a GPU in page-locked memory, which is kept
    AsyncCopy sent;            // the last copy from it
    std::exception_ptr error;  // instead of the batch
    bool ready = false;
  };
  struct Sent {
    Tensors batch;
    AsyncCopy copy;
  };

  Slot& slot_of(std::int64_t number) {
    return slots_[static_cast<std::size_t>(number % static_cast<std::int64_t>(slots_.size()))];
  }

  // The position of a row of the whole batch.
  DataPosition position_of(std::int64_t number, std::int64_t row) const {
    const std::int64_t samples = options_.start.index + number * options_.batch + row;
    return {options_.start.epoch + samples / size_, samples % size_};
  }

  void make(std::int64_t number, Slot& slot) const {
    slot.sent.wait();
    if (slot.batch.empty()) {
      Tensors batch;
      for (const Dataset::Field& field : fields_) {
        Shape shape{rows_};
        for (const std::int64_t size : field.shape) {
          shape.push_back(size);
        }
        batch.push_back(pinned_empty(shape, field.dtype, options_.device));
      }
      slot.batch = std::move(batch);
    }
    DataPosition at = position_of(number, options_.rank * rows_);
    Permutation order(size_, mix_seeds(options_.seed, static_cast<std::uint64_t>(at.epoch)));
    for (std::int64_t row = 0; row < rows_; ++row) {
      data_.read(options_.shuffle ? order(at.index) : at.index, at.epoch, Sample(slot.batch, row));
      if (++at.index == size_) {
        at = {at.epoch + 1, 0};
        order = Permutation(size_, mix_seeds(options_.seed, static_cast<std::uint64_t>(at.epoch)));
      }
    }
  }

  // Prepares the batch, or stores the error.
  void fill(std::int64_t number) {
    Slot& slot = slot_of(number);
    try {
      make(number, slot);
    } catch (...) {
      slot.error = std::current_exception();
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      may_make_.wait(lock,
                     [&] { return stops_ || next_to_make_ < released_ + static_cast<std::int64_t>(slots_.size()); });
      if (stops_) {
        return;
      }
      const std::int64_t number = next_to_make_++;
      lock.unlock();
      fill(number);
      lock.lock();
      slot_of(number).ready = true;
      is_made_.notify_one();
    }
  }

  bool is_ready(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    return slot_of(number).ready && slot_of(number).error == nullptr;
  }

  // Waits until the batch is ready; throws its error, if any.
  void wait_for(std::int64_t number) {
    Slot& slot = slot_of(number);
    if (workers_.empty() && !slot.ready) {
      fill(number);
      slot.ready = true;
    }
    std::unique_lock lock(mutex_);
    is_made_.wait(lock, [&] { return slot.ready; });
    if (slot.error != nullptr) {
      std::rethrow_exception(slot.error);
    }
  }

  // Starts the copy of batch `released_`, which is ready.
  void send() {
    Slot& slot = slot_of(released_);
    Tensors batch;
    for (const Tensor& host : slot.batch) {
      batch.push_back(empty(host.shape(), host.dtype(), options_.device));
    }
    slot.sent = stream_.start(batch, slot.batch);
    sent_.push_back({std::move(batch), slot.sent});
    release();
  }

  // Frees the slot of batch `released_` for a later batch.
  void release() {
    const std::lock_guard lock(mutex_);
    slot_of(released_).ready = false;
    ++released_;
    may_make_.notify_one();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    may_make_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  const Dataset& data_;
  const DataLoaderOptions options_;
  const std::vector<Dataset::Field> fields_;
  const std::int64_t size_;
  const std::int64_t rows_;  // of this rank in a batch
  const CopyStream stream_;

  std::mutex mutex_;
  std::condition_variable may_make_, is_made_;
  std::vector<Slot> slots_;  // the numbers above determine who may use a slot; `ready` is guarded by the mutex
  std::int64_t next_to_make_ = 0, released_ = 0;
  bool stops_ = false;

  // Used only by the thread that calls next().
  std::int64_t taken_ = 0;
  std::deque<Sent> sent_;

  std::vector<std::thread> workers_;
};

DataLoader::DataLoader(const Dataset& data, const DataLoaderOptions& options)
    : queue_(std::make_unique<Queue>(data, options)) {}

DataLoader::~DataLoader() = default;

Tensors DataLoader::next() { return queue_->next(); }

DataPosition DataLoader::position() const { return queue_->position(); }

}  // namespace mica::io
