#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tests/support.h"
#include "tests/train/toy.h"
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>
#include <mica/optim/sgd.h>
#include <mica/train/training_step.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

std::vector<std::vector<float>> weights_of(const nn::Module& model) {
  std::vector<std::vector<float>> weights;
  for (const Tensor& parameter : model.parameters()) {
    weights.push_back(to_vector<float>(parameter.to(float32)));
  }
  return weights;
}

/// Takes steps until `steps` have been taken, and returns their results.
std::vector<train::StepResult> take(train::TrainingStep& training, std::int64_t steps) {
  std::vector<train::StepResult> results;
  while (training.steps_done() < steps) {
    training.step();
    if (training.full() || training.steps_done() == steps) {
      for (const train::StepResult& result : training.finished()) {
        results.push_back(result);
      }
    }
  }
  return results;
}

TEST(TrainingStep, TakesTheStepsOfAPlainLoop) {
  const ToyData data(35);
  const optim::CosineSchedule schedule{.peak = 0.05, .warmup = 2, .total = 8};
  ToyModel model;
  train::DatasetBatches batches(data, {.batch = 4, .seed = 1});
  optim::AdamW optimizer(model.parameters());
  manual_seed(5);
  train::TrainingStep training(
      model, model.loss(), batches, optimizer,
      {.accumulate = 3, .clip = 0.1, .schedule = [&](std::int64_t step) { return schedule.lr(step); }});
  const std::vector<train::StepResult> results = take(training, 8);

  ToyModel plain;
  train::DatasetBatches same(data, {.batch = 4, .seed = 1});
  optim::AdamW adamw(plain.parameters());
  manual_seed(5);
  ASSERT_EQ(results.size(), 8u);
  for (std::int64_t step = 0; step < 8; ++step) {
    adamw.zero_grad();
    adamw.set_lr(schedule.lr(step));
    double sum = 0;
    for (int i = 0; i < 3; ++i) {
      const Tensor loss = plain.loss()(same.next().fields);
      loss.backward(full({}, 1. / 3, float32));
      sum += loss.item();
    }
    const double norm = adamw.step({.max_grad_norm = 0.1}).item();
    const train::StepResult& result = results[static_cast<std::size_t>(step)];
    EXPECT_EQ(result.loss, sum / 3);
    EXPECT_EQ(result.lr, schedule.lr(step));
    EXPECT_EQ(result.grad_norm, norm);
    EXPECT_EQ(result.units, 12);
    EXPECT_TRUE(result.diverged.empty());
  }
  EXPECT_EQ(weights_of(model), weights_of(plain));
}

/// Batches of a list, over and over.
struct ListBatches : train::Batches {
  explicit ListBatches(std::vector<train::Batch> list) : list(std::move(list)) {}
  train::Batch next() override { return list[static_cast<std::size_t>(at++) % list.size()]; }
  io::DataPosition position() const override { return {.index = at}; }
  void seek(const io::DataPosition& position) override { at = position.index; }

  std::vector<train::Batch> list;
  std::int64_t at = 0;
};

TEST(TrainingStep, WeighsTheBatchesOfAStep) {
  // Batches of one and three samples count as one batch of four.
  manual_seed(9);
  const Tensor x = randn({4, 2}), y = randn({4, 1});
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    std::vector<float> of_x = to_vector<float>(x), of_y = to_vector<float>(y);
    return Tensors{from_data(std::vector(of_x.begin() + 2 * first, of_x.begin() + 2 * (first + count)), {count, 2}),
                   from_data(std::vector(of_y.begin() + first, of_y.begin() + first + count), {count, 1})};
  };
  ToyModel one, two;
  one.eval();
  two.eval();
  ListBatches whole({{.fields = {x, y}}});
  ListBatches parts({{.fields = rows(0, 1), .weight = 1}, {.fields = rows(1, 3), .weight = 3}});
  optim::SGD first(one.parameters(), {.lr = 0.1}), second(two.parameters(), {.lr = 0.1});
  train::TrainingStep of_whole(one, one.loss(), whole, first);
  train::TrainingStep of_parts(two, two.loss(), parts, second, {.accumulate = 2});
  const auto a = take(of_whole, 3), b = take(of_parts, 3);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(a[i].loss, b[i].loss, 1e-6);
    EXPECT_NEAR(a[i].grad_norm, b[i].grad_norm, 1e-6);
  }
  EXPECT_NEAR(of_whole.mean_loss(train::Validation(whole.list)), of_parts.mean_loss(train::Validation(parts.list)),
              1e-6);
}

TEST(TrainingStep, ReplaysTheSameBitsOnAGpu) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const ToyData data(35);
  const auto run = [&](bool graph) {
    ToyModel model;
    model.to(Device::cuda());
    train::DatasetBatches batches(data, {.batch = 4, .seed = 1, .device = Device::cuda()});
    optim::AdamW optimizer(model.parameters(), {.lr = 0.01});
    manual_seed(5);
    train::TrainingStep training(model, model.loss(), batches, optimizer,
                                 {.accumulate = 2, .clip = 1, .ema = 0.9, .cuda_graph = graph});
    const std::vector<train::StepResult> results = take(training, 80);
    EXPECT_EQ(training.graph_error(), "");
    return std::pair(results.back().loss, weights_of(model));
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(TrainingStep, TakesBatchesOfDifferentShapes) {
  for (const Device device : test_devices()) {
    ToyModel model;
    model.to(device);
    ListBatches batches({{.fields = {ones({2, 2}).to(device), ones({2, 1}).to(device)}},
                         {.fields = {ones({3, 2}).to(device), ones({3, 1}).to(device)}}});
    optim::AdamW optimizer(model.parameters(), {.lr = 0.01});
    train::TrainingStep training(model, model.loss(), batches, optimizer);
    const std::vector<train::StepResult> results = take(training, 20);
    EXPECT_LT(results.back().loss, results.front().loss);
    EXPECT_EQ(training.graph_error(), device.is_cuda() ? "batches have different shapes" : "");
  }
}

TEST(TrainingStep, ResumesWithTheSameBits) {
  const ToyData data(35);
  for (const DType dtype : {float32, float16}) {
    const train::StepOptions options{.accumulate = 2, .clip = 1, .ema = 0.9};
    const auto run = [&](const io::TrainingCheckpoint* from, std::int64_t steps) {
      ToyModel model;
      model.to(dtype);
      train::DatasetBatches batches(data, {.batch = 4, .seed = 1});
      optim::AdamW optimizer(model.parameters(), {.lr = 0.01});
      manual_seed(from == nullptr ? 5 : 6);
      train::TrainingStep training(model, model.loss(), batches, optimizer, options);
      if (from != nullptr) {
        training.resume(*from);
        EXPECT_EQ(training.steps_done(), from->step);
      }
      take(training, steps);
      io::TrainingCheckpoint checkpoint = training.checkpoint();
      for (auto& [name, part] : checkpoint.parts) {
        for (auto& [key, tensor] : part) {
          tensor = clone(tensor);
        }
      }
      return checkpoint;
    };
    const io::TrainingCheckpoint half = run(nullptr, 3), resumed = run(&half, 7), whole = run(nullptr, 7);
    EXPECT_EQ(whole.parts.contains("scaler"), dtype == float16);
    EXPECT_EQ(whole.data, resumed.data);
    EXPECT_EQ(whole.random.offset, resumed.random.offset);
    ASSERT_EQ(whole.parts.size(), resumed.parts.size());
    for (const auto& [name, part] : whole.parts) {
      EXPECT_EQ(io::fingerprint(part), io::fingerprint(resumed.part(name))) << name;
    }
    EXPECT_NE(io::fingerprint(whole.part("model")), io::fingerprint(half.part("model")));
  }
}

TEST(TrainingStep, SavesTrainedParametersOnly) {
  const ToyData data(35);
  ToyModel model;
  for (const Tensor& parameter : model.first.parameters()) {
    parameter.requires_grad_(false);
  }
  train::DatasetBatches batches(data, {.batch = 4});
  optim::AdamW optimizer(model.last.parameters());
  train::TrainingStep training(model, model.loss(), batches, optimizer, {.trained_only = true});
  take(training, 2);
  io::TrainingCheckpoint checkpoint = training.checkpoint();
  std::vector<std::string> names;
  for (const auto& [name, tensor] : checkpoint.part("model")) {
    names.push_back(name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"last.bias", "last.weight"}));
  const auto weights = weights_of(model);
  Tensor& kept = checkpoint.parts["model"]["last.weight"];
  kept = clone(kept);
  take(training, 3);
  EXPECT_NE(weights_of(model), weights);
  training.resume(checkpoint);
  EXPECT_EQ(weights_of(model)[2], weights[2]);
  checkpoint.parts["model"].erase("last.weight");
  expect_error([&] { training.resume(checkpoint); }, "it lacks last.weight of shape [1, 8]");
}

TEST(TrainingStep, GivesTheModelItsAverages) {
  const ToyData data(35);
  ToyModel model;
  train::DatasetBatches batches(data, {.batch = 4});
  optim::AdamW optimizer(model.parameters(), {.lr = 0.1});
  train::TrainingStep training(model, model.loss(), batches, optimizer, {.ema = 0.9});
  take(training, 5);
  const auto own = weights_of(model);
  const train::Validation validation(data, {.batch = 35});
  const double loss = training.mean_loss(validation);
  {
    const train::TrainingStep::Averages averages(training);
    EXPECT_NE(weights_of(model), own);
    EXPECT_NE(training.mean_loss(validation), loss);
    expect_error([&] { training.step(); }, "average");
  }
  EXPECT_EQ(weights_of(model), own);
  EXPECT_EQ(training.mean_loss(validation), loss);  // without dropout
}

TEST(TrainingStep, ReportsALossThatIsNotFinite) {
  ToyModel model;
  ListBatches batches({{.fields = {full({1, 2}, std::numeric_limits<double>::infinity(), float32), ones({1, 1})}}});
  optim::AdamW optimizer(model.parameters());
  train::TrainingStep training(model, model.loss(), batches, optimizer);
  const std::vector<train::StepResult> results = take(training, 1);
  EXPECT_FALSE(std::isfinite(results[0].loss));
  EXPECT_EQ(results[0].diverged, std::vector<int>{0});
}

TEST(TrainingStep, Refuses) {
  const ToyData data(35);
  ToyModel model;
  train::DatasetBatches batches(data, {.batch = 4});
  optim::AdamW optimizer(model.parameters());
  const auto make = [&](train::StepOptions options) {
    train::TrainingStep(model, model.loss(), batches, optimizer, std::move(options));
  };
  expect_error([&] { make({.accumulate = 0}); }, "expected at least 1 batch per step, got 0");
  expect_error([&] { make({.clip = -1}); }, "expected a maximum gradient norm of at least 0, got -1");
  expect_error([&] { make({.clip = NAN}); }, "expected a maximum gradient norm of at least 0, got nan");
  expect_error([&] { make({.ema = 1}); }, "Ema");
  for (const Tensor& parameter : model.parameters()) {
    parameter.requires_grad_(false);
  }
  expect_error([&] { make({}); }, "the model has no parameter that requires a gradient");
}

}  // namespace
