#include <algorithm>
#include <memory>
#include <utility>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/train/batches.h>

namespace mica::train {

DatasetBatches::DatasetBatches(const io::Dataset& data, io::DataLoaderOptions options, const distributed::Group& group,
                               std::int64_t units)
    : data_(data), options_(options), units_(units) {
  options_.rank = group.rank();
  options_.ranks = group.size();
  loader_.emplace(data_, options_);
}

Batch DatasetBatches::next() {
  Batch batch{.fields = loader_->next()};
  batch.units = options_.batch / options_.ranks * units_;
  return batch;
}

void DatasetBatches::seek(const io::DataPosition& position) {
  options_.start = position;
  loader_.emplace(data_, options_);
}

namespace {

/// Samples begin … end − 1.
struct Samples {
  std::int64_t begin, end;
};

Batch read_samples(const io::Dataset& data, Samples samples, Device device) {
  const std::int64_t rows = samples.end - samples.begin;
  Tensors fields;
  for (const io::Dataset::Field& field : data.fields()) {
    std::vector<std::int64_t> sizes{rows};
    sizes.insert(sizes.end(), field.shape.begin(), field.shape.end());
    fields.push_back(empty(Shape(sizes), field.dtype));
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    data.read(samples.begin + row, 0, io::Sample(fields, row));
  }
  for (Tensor& field : fields) {
    field = field.to(device);
  }
  return {.fields = std::move(fields), .weight = static_cast<double>(rows), .units = rows};
}

}  // namespace

Validation::Validation(std::vector<Batch> batches) : size_(static_cast<std::int64_t>(batches.size())) {
  const auto kept = std::make_shared<const std::vector<Batch>>(std::move(batches));
  read_ = [kept](std::int64_t i) { return (*kept)[static_cast<std::size_t>(i)]; };
}

Validation::Validation(const io::Dataset& data, const ValidationOptions& options, const distributed::Group& group) {
  check(data.size() >= 1 && options.batch >= 1,
        "Validation: expected samples and a batch of at least 1, got {} samples and a batch of {}", data.size(),
        options.batch);
  std::vector<Samples> parts;
  for (std::int64_t first = 0; first < data.size();) {
    const std::int64_t count = std::min(options.batch, data.size() - first), ranks = group.size();
    const Samples part{first + group.rank() * count / ranks, first + (group.rank() + 1) * count / ranks};
    if (part.end > part.begin) {
      parts.push_back(part);
    }
    first += count;
  }
  if (options.keep) {
    std::vector<Batch> batches;
    batches.reserve(parts.size());
    for (const Samples& part : parts) {
      batches.push_back(read_samples(data, part, options.device));
    }
    *this = Validation(std::move(batches));
    return;
  }
  size_ = static_cast<std::int64_t>(parts.size());
  read_ = [&data, parts = std::move(parts), device = options.device](std::int64_t i) {
    return read_samples(data, parts[static_cast<std::size_t>(i)], device);
  };
}

}  // namespace mica::train
