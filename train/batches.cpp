#include <memory>
#include <utility>

#include <mica/core/check.h>
#include <mica/train/batches.h>

namespace mica::train {

namespace {

io::DataLoaderOptions for_ranks(io::DataLoaderOptions options, const distributed::Group& group) {
  options.rank = group.rank();
  options.ranks = group.size();
  return options;
}

}  // namespace

DatasetBatches::DatasetBatches(const io::Dataset& data, io::DataLoaderOptions options, const distributed::Group& group,
                               std::int64_t units)
    : units_(options.batch / group.size() * units), loader_(data, for_ranks(options, group)) {}

Batch DatasetBatches::next() { return {.fields = loader_.next(), .units = units_}; }

Validation::Validation(std::vector<Batch> batches) : size_(static_cast<std::int64_t>(batches.size())) {
  read_ = [kept = std::move(batches)](const std::function<void(const Batch&)>& f) {
    for (const Batch& batch : kept) {
      f(batch);
    }
  };
}

Validation::Validation(const io::Dataset& data, const ValidationOptions& options, const distributed::Group& group) {
  check(data.size() >= 1 && options.batch >= 1,
        "Validation: expected samples and a batch of at least 1, got {} samples and a batch of {}", data.size(),
        options.batch);
  const auto loader = std::make_shared<const io::DataLoader>(
      data, for_ranks({.batch = (options.batch + group.size() - 1) / group.size() * group.size(),
                       .shuffle = false,
                       .workers = options.workers,
                       .device = options.device},
                      group));
  size_ = loader->batches_per_epoch();
  read_ = [loader](const std::function<void(const Batch&)>& f) {
    for (const Tensors& fields : loader->epoch(0)) {
      if (const std::int64_t rows = fields[0].size(0); rows > 0) {
        f({.fields = fields, .weight = static_cast<double>(rows), .units = rows});
      }
    }
  };
  if (options.keep) {
    std::vector<Batch> batches;
    each([&](const Batch& batch) { batches.push_back(batch); });
    *this = Validation(std::move(batches));
  }
}

}  // namespace mica::train
