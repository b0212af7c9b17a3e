#pragma once

// Batches of training data, prepared in advance by worker threads.

#include <cstdint>
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
    check(i < batch_.size(), "Sample: expected one of {} fields, got field {}", batch_.size(), i);
    const Tensor& x = batch_[i];
    check(row_ >= 0 && row_ < x.size(0), "Sample: expected one of {} rows, got row {}", x.size(0), row_);
    const std::int64_t elements = x.numel() / x.size(0);
    return {x.data<T>() + row_ * elements, static_cast<std::size_t>(elements)};
  }

 private:
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
  /// Writes every element of sample `index`, as a function of index and epoch alone. Called by several threads at a
  /// time. Exceptions are rethrown by DataLoader::next().
  virtual void read(std::int64_t index, std::int64_t epoch, const Sample& to) const = 0;
};

struct DataLoaderOptions {
  std::int64_t batch = 1;  ///< samples per batch, all ranks together
  bool shuffle = true;     ///< a different order in each epoch, at no cost in memory: see Permutation
  std::uint64_t seed = 0;  ///< of the orders
  /// Threads that prepare batches, at most workers + 2 batches ahead. With 0, next() prepares each batch. The batches
  /// do not depend on this number.
  int workers = 1;
  Device device = Device::cpu();  ///< of the batches
  DataPosition start{};           ///< where the first batch begins
  /// For training with several processes: the index of this one, and their number. Rank r gets the rows [r, r + 1) ·
  /// batch / ranks of each batch, so the parts of all ranks make up the batch that a single process would get.
  int rank = 0;
  int ranks = 1;
};

/// Endless batches of a data set, epoch after epoch. A batch may combine the last samples of an epoch with the first
/// ones of the next. The batches depend only on the data, `batch`, `shuffle`, `seed` and `start`.
///
/// With several ranks, each reads only its own rows. A position counts the samples of all ranks, so it is valid for any
/// number of ranks:
///
///     io::DataLoader loader(data, {.batch = 32, .rank = group.rank(), .ranks = group.size()});
///
/// For a GPU, batches are copied from page-locked memory on a separate stream, two batches ahead, while earlier steps
/// run.
///
///     io::DataLoader loader(data, {.batch = 32, .device = Device::cuda()});
///     while (loader.position().epoch < 3) {
///       const Tensors batch = loader.next();
///       …
///     }
class DataLoader {
 public:
  /// Throws unless data.size() ≥ 1, batch ≥ 1, workers is in [0, 256], `start` is a position in the data, rank is in
  /// [0, ranks) and ranks divides batch. The data set must outlive the loader.
  explicit DataLoader(const Dataset& data, const DataLoaderOptions& options = {});
  explicit DataLoader(const Dataset&& data, const DataLoaderOptions& options = {}) = delete;
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// This rank's part of the next batch: for each field, a new tensor (batch / ranks, field's shape…). If the data set
  /// threw while reading one of the samples, rethrows that exception, at this and every later call.
  Tensors next();

  /// Where the next batch begins, counting all ranks. A loader that starts there continues with the same batches.
  DataPosition position() const;

 private:
  class Queue;
  std::unique_ptr<Queue> queue_;
};

}  // namespace mica::io
