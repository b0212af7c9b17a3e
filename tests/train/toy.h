#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/io/data_loader.h>
#include <mica/nn/linear.h>
#include <mica/nn/module.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/train/batches.h>
#include <mica/train/training_step.h>

namespace mica::testing_support {

/// A small problem for trainers: y = x₀ − 2 x₁.
struct ToyData : io::Dataset {
  explicit ToyData(std::int64_t count) : count(count) {}

  std::int64_t size() const override { return count; }
  std::vector<Field> fields() const override { return {{{2}, float32}, {{1}, float32}}; }
  void read(std::int64_t i, std::int64_t, const io::Sample& to) const override {
    const auto x = static_cast<float>(i % 7), y = static_cast<float>(i % 5);
    to.field<float>(0)[0] = x / 7;
    to.field<float>(0)[1] = y / 5;
    to.field<float>(1)[0] = x / 7 - 2 * y / 5;
  }

  std::int64_t count;
};

struct ToyModel : nn::Module {
  nn::Linear first = child("first", nn::Linear{2, 8});
  nn::Linear last = child("last", nn::Linear{8, 1});
  Tensor operator()(const Tensor& x) const { return last(dropout(first(x), 0.1, is_training())); }

  /// A model that is the same each time.
  ToyModel() {
    manual_seed(3);
    for (const Tensor& parameter : parameters()) {
      parameter.set_data(randn(parameter.shape()) * 0.3);
    }
  }

  train::Loss loss() const {
    return [this](const Tensors& batch) {
      const Tensor error = (*this)(batch[0].to(first.weight.dtype())).to(float32) - batch[1];
      return mean(error * error);
    };
  }
};

}  // namespace mica::testing_support
