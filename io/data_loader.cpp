#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/async_copy.h>
#include <mica/core/rng.h>
#include <mica/io/data_loader.h>
#include <mica/io/permutation.h>

namespace mica::io {

namespace {

// The number of batches that are copied to a GPU ahead of the one that is being used.
constexpr std::int64_t kSentAhead = 2;

std::int64_t batches_in(std::int64_t samples, std::int64_t batch) {
  return samples / batch + (samples % batch != 0 ? 1 : 0);
}

void check_position(const DataPosition& at, std::int64_t size) {
  // The bound on the epoch keeps the number of all samples far from overflow.
  check(at.epoch >= 0 && at.epoch <= INT64_MAX / 4 / size && at.index >= 0 && at.index < size,
        "DataLoader: expected a position in data of {} samples, got epoch {}, index {}", size, at.epoch, at.index);
}

}  // namespace

void Dataset::finish(const Tensors&, const DataPosition&) const {}

TensorDataset::TensorDataset(Tensors tensors) : tensors_(std::move(tensors)) {
  check(!tensors_.empty(), "TensorDataset: expected at least one tensor, got none");
  for (Tensor& x : tensors_) {
    check(x.device().is_cpu() && x.dim() >= 1 && x.size(0) == tensors_[0].size(0),
          "TensorDataset: expected tensors on the CPU with the same number of rows, {}, got one of shape {} on {}",
          tensors_[0].dim() > 0 ? tensors_[0].size(0) : 0, x.shape(), x.device());
    x = contiguous_data(x);
  }
}

std::vector<Dataset::Field> TensorDataset::fields() const {
  std::vector<Field> fields;
  for (const Tensor& x : tensors_) {
    fields.push_back({Shape(std::vector<std::int64_t>(x.shape().begin() + 1, x.shape().end())), x.dtype()});
  }
  return fields;
}

void TensorDataset::read(std::int64_t index, std::int64_t, const Sample& to) const {
  check(index >= 0 && index < size(), "TensorDataset: expected an index in [0, {}), got {}", size(), index);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::span<std::byte> row = to.bytes(i);
    std::copy_n(tensors_[i].raw_data() + static_cast<std::size_t>(index) * row.size(), row.size(), row.data());
  }
}

/// Batches are numbered from 0. Batch i is prepared in slot i modulo the number of slots:
///
///     released ≤ i < released + slots   a worker may prepare it (each batch is prepared by one worker)
///     taken ≤ i < released              only on a GPU: its copy to the device was started
///     i < taken                         next() has returned it
///
/// There are `batches` of them in all.
class detail::BatchQueue {
 public:
  /// With `samples`, the queue ends after that many; its last batch may be shorter.
  BatchQueue(const Dataset& data, const DataLoaderOptions& options, std::optional<std::int64_t> samples)
      : data_(data),
        options_(options),
        fields_(data.fields()),
        size_(data.size()),
        samples_(samples),
        batches_(samples ? batches_in(*samples, options.batch) : std::numeric_limits<std::int64_t>::max()),
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

  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;
  ~BatchQueue() {
    stop();
    for (const Slot& slot : slots_) {
      try {
        slot.sent.wait();  // before its memory is freed
      } catch (const Error&) {
        // The GPU has failed; its next use will report the error.
      }
    }
  }

  bool ended() const { return taken_ == batches_; }

  Tensors next() {
    if (options_.device.is_cpu()) {
      wait_for(taken_);
      Tensors batch = std::move(slot_of(taken_).batch);
      release();
      ++taken_;
      return batch;
    }
    while (released_ < std::min(taken_ + kSentAhead, batches_) &&
           (released_ == taken_ ? (wait_for(taken_), true) : is_ready(released_))) {
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

  // This rank's part of the rows of a batch.
  struct Part {
    std::int64_t begin, rows;
  };
  Part part_of(std::int64_t number) const {
    const std::int64_t rows = samples_ ? std::min(options_.batch, *samples_ - number * options_.batch) : options_.batch;
    const std::int64_t least = rows / options_.ranks, more = rows % options_.ranks;
    return {options_.rank * least + std::min<std::int64_t>(options_.rank, more),
            least + (options_.rank < more ? 1 : 0)};
  }

  void allocate(Slot& slot, std::int64_t rows) const {
    if (!slot.batch.empty() && slot.batch.front().size(0) == rows) {
      return;
    }
    Tensors batch;
    for (const Dataset::Field& field : fields_) {
      Shape shape{rows};
      for (const std::int64_t size : field.shape) {
        shape.push_back(size);
      }
      batch.push_back(pinned_empty(shape, field.dtype, options_.device));
    }
    slot.batch = std::move(batch);
  }

  void make(std::int64_t number, Slot& slot) const {
    slot.sent.wait();
    const Part part = part_of(number);
    allocate(slot, part.rows);
    if (part.rows == 0) {
      return;
    }
    std::vector<PhiloxKey> drawn;
    const RecordPhiloxKeys record(drawn);
    const DataPosition first = position_of(number, part.begin);
    DataPosition at = first;
    Permutation order(size_, mix_seeds(options_.seed, static_cast<std::uint64_t>(at.epoch)));
    for (std::int64_t row = 0; row < part.rows; ++row) {
      data_.read(options_.shuffle ? order(at.index) : at.index, at.epoch, Sample(slot.batch, row));
      if (++at.index == size_) {
        at = {at.epoch + 1, 0};
        order = Permutation(size_, mix_seeds(options_.seed, static_cast<std::uint64_t>(at.epoch)));
      }
    }
    data_.finish(slot.batch, first);
    check(drawn.empty(),
          "DataLoader: the data set drew from the global random generator, whose numbers depend on the order in which "
          "workers read; use io::SampleRandom(seed, epoch, index)");
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
    const auto ahead = static_cast<std::int64_t>(slots_.size());
    std::unique_lock lock(mutex_);
    for (;;) {
      may_make_.wait(lock, [&] { return stops_ || next_to_make_ < std::min(released_ + ahead, batches_); });
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
  const std::optional<std::int64_t> samples_;
  const std::int64_t batches_;
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

EpochBatches::EpochBatches(std::unique_ptr<detail::BatchQueue> queue) : queue_(std::move(queue)) {}
EpochBatches::EpochBatches(EpochBatches&&) noexcept = default;
EpochBatches::~EpochBatches() = default;

EpochBatches::Iterator EpochBatches::begin() {
  advance();
  return Iterator(this);
}

void EpochBatches::advance() {
  batch_.clear();  // first, so that its memory can be used again
  if (!queue_->ended()) {
    batch_ = queue_->next();
  }
}

DataLoader::DataLoader(const Dataset& data, const DataLoaderOptions& options) : data_(data), options_(options) {
  const std::int64_t size = data.size();
  check(size >= 1, "DataLoader: expected a data set with at least one sample, got one with {}", size);
  check(!data.fields().empty(), "DataLoader: expected a data set with at least one field, got none");
  check(options.batch >= 1, "DataLoader: expected a batch of at least 1, got {}", options.batch);
  check(options.workers >= 0 && options.workers <= 256, "DataLoader: expected workers in [0, 256], got {}",
        options.workers);
  check_position(options.start, size);
  check(options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks,
        "DataLoader: expected a rank in [0, ranks), got rank {} of {}", options.rank, options.ranks);
  check(options.batch % options.ranks == 0,
        "DataLoader: expected a batch that {} ranks can share equally, got one of {} samples", options.ranks,
        options.batch);
}

DataLoader::~DataLoader() = default;

EpochBatches DataLoader::epoch(std::int64_t epoch) const {
  DataLoaderOptions options = options_;
  options.start = {epoch, 0};
  check_position(options.start, data_.size());
  const std::int64_t samples = options.drop_last ? data_.size() / options.batch * options.batch : data_.size();
  return EpochBatches(std::make_unique<detail::BatchQueue>(data_, options, samples));
}

std::int64_t DataLoader::batches_per_epoch() const {
  return options_.drop_last ? data_.size() / options_.batch : batches_in(data_.size(), options_.batch);
}

Tensors DataLoader::next() {
  if (queue_ == nullptr) {
    queue_ = std::make_unique<detail::BatchQueue>(data_, options_, std::nullopt);
  }
  return queue_->next();
}

DataPosition DataLoader::position() const { return queue_ == nullptr ? options_.start : queue_->position(); }

void DataLoader::seek(const DataPosition& position) {
  check_position(position, data_.size());
  options_.start = position;
  queue_.reset();
}

}  // namespace mica::io
