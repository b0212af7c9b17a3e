#pragma once

// What a run reads: training batches and validation batches.

#include <cstdint>
#include <functional>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/distributed/group.h>
#include <mica/io/data_loader.h>

namespace mica::train {

/// A batch. The loss of a batch is a mean, over samples, tokens or something else.
struct Batch {
  Tensors fields;  ///< on the model's device
  /// The weight of this batch's loss among the batches of a step or of a validation: the number of elements that the
  /// loss is a mean over, if it differs between batches.
  double weight = 1;
  std::int64_t units = 1;  ///< samples, tokens, …: for the speed only
};

/// An endless sequence of training batches whose position can be saved. With several ranks, each gets its own part of
/// each batch.
class Batches {
 public:
  virtual ~Batches() = default;

  virtual Batch next() = 0;
  /// Where the next batch begins.
  virtual io::DataPosition position() const = 0;
  /// Continues at a position: the following batches are those that next() returned after position() was called.
  virtual void seek(const io::DataPosition& position) = 0;
};

/// Batches of a data set, prepared by an io::DataLoader.
///
///     train::DatasetBatches batches(digits, {.batch = 32, .seed = 1, .device = device}, group);
class DatasetBatches : public Batches {
 public:
  /// The options' rank and number of ranks are those of `group`. `units` is the number of units of a sample: for
  /// windows of tokens, their length. The data set must outlive this object.
  explicit DatasetBatches(const io::Dataset& data, io::DataLoaderOptions options, const distributed::Group& group = {},
                          std::int64_t units = 1);
  explicit DatasetBatches(const io::Dataset&& data, io::DataLoaderOptions options, const distributed::Group& group = {},
                          std::int64_t units = 1) = delete;

  Batch next() override;
  io::DataPosition position() const override { return loader_.position(); }
  void seek(const io::DataPosition& position) override { loader_.seek(position); }

 private:
  std::int64_t units_;  // of this rank in a batch
  io::DataLoader loader_;
};

struct ValidationOptions {
  std::int64_t batch = 1;         ///< samples per batch, all ranks together
  Device device = Device::cpu();  ///< of the batches
  bool keep = false;              ///< keep all batches on the device, instead of reading them in each validation
  int workers = 1;                ///< threads that prepare batches
};

/// The data that a model is validated on: a list of batches, of which each rank has its own part.
class Validation {
 public:
  /// There is no validation.
  Validation() = default;
  /// Batches in memory.
  explicit Validation(std::vector<Batch> batches);
  /// All samples of a data set, as of epoch 0; it must outlive this object. Of each batch, each rank reads its part;
  /// the parts differ by at most one sample. The weight of a batch is its number of samples. Throws an Error if there
  /// are no samples.
  explicit Validation(const io::Dataset& data, const ValidationOptions& options = {},
                      const distributed::Group& group = {});
  explicit Validation(const io::Dataset&& data, const ValidationOptions& options = {},
                      const distributed::Group& group = {}) = delete;

  /// False if there is no validation. With several ranks, a rank may have no batches although there is one.
  explicit operator bool() const { return read_ != nullptr; }
  std::int64_t size() const { return size_; }  ///< the number of batches
  /// Calls f for each of this rank's batches, in order.
  void each(const std::function<void(const Batch&)>& f) const {
    if (read_ != nullptr) {
      read_(f);
    }
  }

 private:
  std::int64_t size_ = 0;
  std::function<void(const std::function<void(const Batch&)>&)> read_;
};

}  // namespace mica::train
