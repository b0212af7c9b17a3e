#pragma once

// Batches of training data, made by worker threads ahead of the training.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::io {

/// A place in the data: `index` samples of epoch `epoch`, in that epoch's order, have been used.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t index = 0;

  friend bool operator==(const DataPosition&, const DataPosition&) = default;
};

/// Where a Dataset writes one sample: the sample's row of each of the batch's tensors.
class Sample {
 public:
  Sample(const Tensors& batch, std::int64_t row) : batch_(batch), row_(row) {}

  /// The elements of field i, in row-major order. T is the field's dtype.
  template <class T>
  std::span<T> field(std::size_t i) const {
    const Tensor& x = batch_[i];
    const std::int64_t elements = x.numel() / x.size(0);
    return {x.data<T>() + row_ * elements, static_cast<std::size_t>(elements)};
  }

 private:
  const Tensors& batch_;
  std::int64_t row_;
};

/// Samples by number: what a DataLoader makes batches of. A sample has one or more fields; a batch has a tensor for
/// each. A data set of images with labels:
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

  virtual std::int64_t size() const = 0;
  virtual std::vector<Field> fields() const = 0;
  /// Writes every element of sample `index`, which must depend on index and epoch alone. Called by several threads at a
  /// time. The loader passes an exception on.
  virtual void read(std::int64_t index, std::int64_t epoch, const Sample& to) const = 0;
};

struct DataLoaderOptions {
  std::int64_t batch = 1;  ///< samples per batch: of all ranks together
  bool shuffle = true;     ///< another order in each epoch, which takes no memory: see Permutation
  std::uint64_t seed = 0;  ///< of the orders
  /// Threads that make batches ahead, at most two more than there are threads. With 0, next() makes them. The batches
  /// do not depend on it.
  int workers = 1;
  Device device = Device::cpu();  ///< of the batches
  DataPosition start{};           ///< where the first batch begins
  /// Of several processes that train together: which one this is, and how many there are. Rank r gets the rows
  /// [r, r + 1) · batch / ranks of each batch, so the batches of all ranks together are those of one rank.
  int rank = 0;
  int ranks = 1;
};

/// Endless batches of a data set, epoch after epoch. A batch may have the last samples of an epoch and the first ones
/// of the next. The batches depend on the data, the seed and the start alone.
///
/// With several ranks, each reads only its own rows. A position counts the samples of all ranks, so it means the same
/// to any number of them:
///
///     io::DataLoader loader(data, {.batch = 32, .rank = group.rank(), .ranks = group.size()});
///
/// On a GPU, batches are copied from page-locked memory on a stream of their own while earlier steps run: the one after
/// next is on its way.
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
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// This rank's part of the next batch: a tensor (batch / ranks, field's shape…) for each field, which belongs to the
  /// caller. Throws what the data set threw when it read one of the samples, then again at each call.
  Tensors next();

  /// Where the next batch begins, of all ranks. A loader that starts there goes on with the same batches.
  DataPosition position() const;

 private:
  class Queue;
  std::unique_ptr<Queue> queue_;
};

}  // namespace mica::io
