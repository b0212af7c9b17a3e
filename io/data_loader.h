#pragma once

// Batches of training data, prepared in advance by worker threads.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/tensor.h>

namespace mica::io {

/// A position in the data: `index` samples of epoch `epoch`, in that epoch's order, have been used.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t index = 0;

  friend bool operator==(const DataPosition&, const DataPosition&) = default;
};

/// Where a Dataset writes one sample: the sample's row of each of the batch's tensors.
class Sample {
 public:
  /// Keeps a reference to `batch`.
  Sample(const Tensors& batch, std::int64_t row) : batch_(batch), row_(row) {}
  Sample(const Tensors&& batch, std::int64_t row) = delete;

  /// The elements of field i, in row-major order. T is the field's dtype. Throws an Error for a field or a row that the
  /// batch does not have.
  template <class T>
  std::span<T> field(std::size_t i) const {
    const std::int64_t elements = elements_of(i);
    return {batch_[i].data<T>() + row_ * elements, static_cast<std::size_t>(elements)};
  }
  /// The memory of field i, of any dtype.
  std::span<std::byte> bytes(std::size_t i) const {
    const std::size_t size = static_cast<std::size_t>(elements_of(i)) * size_of(batch_[i].dtype());
    return {batch_[i].raw_data() + static_cast<std::size_t>(row_) * size, size};
  }

 private:
  std::int64_t elements_of(std::size_t i) const {
    check(i < batch_.size(), "Sample: expected one of {} fields, got field {}", batch_.size(), i);
    const Tensor& x = batch_[i];
    check(row_ >= 0 && row_ < x.size(0), "Sample: expected one of {} rows, got row {}", x.size(0), row_);
    return x.numel() / x.size(0);
  }

  const Tensors& batch_;
  std::int64_t row_;
};

/// A data set: samples that can be read by index. A sample has one or more fields; a batch has a tensor for each field.
/// A data set of images with labels:
///
///     struct Digits : io::Dataset {
///       std::int64_t size() const override { return 60000; }
///       std::vector<Field> fields() const override { return {{{28, 28}, float32}, {{}, int64}}; }
///       void read(std::int64_t index, std::int64_t, const io::Sample& to) const override {
///         decode(index, to.field<float>(0));
///         to.field<std::int64_t>(1)[0] = labels[index];
///       }
///     };
class Dataset {
 public:
  /// One field of one sample.
  struct Field {
    Shape shape;
    DType dtype;
  };

  virtual ~Dataset() = default;

  virtual std::int64_t size() const = 0;          ///< the number of samples
  virtual std::vector<Field> fields() const = 0;  ///< the same for all samples
  /// Writes every element of sample `index`, as a function of index and epoch alone; for random numbers see
  /// SampleRandom. Called by several threads at a time. Exceptions are rethrown by DataLoader::next().
  virtual void read(std::int64_t index, std::int64_t epoch, const Sample& to) const = 0;
  /// Called once the samples of a batch are read (with several ranks: this rank's part of them), to combine them. `at`
  /// is the position of the first one. By default, they stay as they are.
  virtual void finish(const Tensors& batch, const DataPosition& at) const;
};

/// The rows of tensors: sample i has a field x[i] for each tensor x.
///
///     const io::TensorDataset data({images, labels});
class TensorDataset : public Dataset {
 public:
  /// Throws an Error unless there are tensors, all on the CPU, with one axis or more and the same number of rows. Keeps
  /// the tensors, and copies those that are not row-major.
  explicit TensorDataset(Tensors tensors);

  std::int64_t size() const override { return tensors_.front().size(0); }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, std::int64_t epoch, const Sample& to) const override;

 private:
  Tensors tensors_;
};

struct DataLoaderOptions {
  std::int64_t batch = 1;  ///< samples per batch, all ranks together
  bool shuffle = true;     ///< a different order in each epoch, at no cost in memory: see Permutation
  std::uint64_t seed = 0;  ///< of the orders
  /// Threads that prepare batches, at most workers + 2 batches ahead. With 0, the caller prepares each batch. The
  /// batches do not depend on this number.
  int workers = 1;
  Device device = Device::cpu();  ///< of the batches
  bool drop_last = false;         ///< whether epoch() leaves out a last batch that is shorter
  DataPosition start{};           ///< where the first batch of next() begins
  /// For training with several processes: the index of this one, and their number. Each reads its part of the rows of
  /// each batch, so the parts of all ranks make up the batch that a single process would get.
  int rank = 0;
  int ranks = 1;
};

namespace detail {
class BatchQueue;
}

/// One pass over the batches of an epoch: see DataLoader::epoch(). May be iterated once.
class EpochBatches {
 public:
  struct End {};
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Tensors;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(EpochBatches* of) : of_(of) {}
    const Tensors& operator*() const { return of_->batch_; }
    const Tensors* operator->() const { return &of_->batch_; }
    Iterator& operator++() { return of_->advance(), *this; }
    void operator++(int) { of_->advance(); }
    bool operator==(End) const { return of_->batch_.empty(); }

   private:
    EpochBatches* of_;
  };

  explicit EpochBatches(std::unique_ptr<detail::BatchQueue> queue);
  EpochBatches(EpochBatches&&) noexcept;
  ~EpochBatches();

  Iterator begin();
  static End end() { return {}; }

 private:
  void advance();

  std::unique_ptr<detail::BatchQueue> queue_;
  Tensors batch_;
};

/// Batches of a data set, in two ways. epoch(e) is one pass over all samples:
///
///     io::DataLoader loader(data, {.batch = 32});
///     for (std::int64_t e = 0; e < 3; ++e) {
///       for (const Tensors& batch : loader.epoch(e)) { … }
///     }
///
/// next() continues endlessly, epoch after epoch, for training in steps. Such a batch may combine the last samples of
/// an epoch with the first ones of the next, so all have the same shape.
///
/// The batches depend only on the data, `batch`, `shuffle`, `seed` and the position. With several ranks, each reads
/// only its own rows. A position counts the samples of all ranks, so it is valid for any number of ranks:
///
///     io::DataLoader loader(data, {.batch = 32, .rank = group.rank(), .ranks = group.size()});
///
/// For a GPU, batches are copied from page-locked memory on a separate stream, two batches ahead, while earlier steps
/// run.
///
/// Random numbers that a data set draws from the global generator (core/rng.h) would depend on the order in which
/// workers read, so they are an Error.
class DataLoader {
 public:
  /// Throws unless data.size() ≥ 1, batch ≥ 1, workers is in [0, 256], `start` is a position in the data, rank is in
  /// [0, ranks) and ranks divides batch. The data set must outlive the loader.
  explicit DataLoader(const Dataset& data, const DataLoaderOptions& options = {});
  explicit DataLoader(const Dataset&& data, const DataLoaderOptions& options = {}) = delete;
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// This rank's part of each batch of an epoch, in order. The last one is shorter, or left out (`drop_last`), if the
  /// number of samples is not a multiple of `batch`; the ranks' parts of it differ by at most one row, so one may have
  /// none. The data set and not the loader must outlive the pass. Independent of next(). Throws for a negative epoch,
  /// and where a data set did.
  EpochBatches epoch(std::int64_t epoch) const;
  /// The number of batches of an epoch().
  std::int64_t batches_per_epoch() const;

  /// This rank's part of the next batch: for each field, a new tensor (batch / ranks, field's shape…). If the data set
  /// threw while reading one of the samples, rethrows that exception, at this and every later call. Workers start with
  /// the first call.
  Tensors next();
  /// Where the next batch of next() begins, counting all ranks.
  DataPosition position() const;
  /// Continues at a position: next() returns the batches that it returned after position() was called.
  void seek(const DataPosition& position);

 private:
  const Dataset& data_;
  DataLoaderOptions options_;
  std::unique_ptr<detail::BatchQueue> queue_;  // of next(); null before the first batch
};

}  // namespace mica::io
