// Training steps of several ranks: from CUDA graphs, and resumed by another number of ranks.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/files.h"
#include "tests/ranks/rank_device.h"
#include "tests/support.h"
#include "tests/train/toy.h"
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/cuda_graph.h>
#include <mica/optim/adamw.h>
#include <mica/train/checkpoints.h>
#include <mica/train/ranks.h>
#include <mica/train/training_step.h>

namespace mica::distributed {
namespace {

using namespace testing_support;

// Each rank's batches on its device; the model's parameters, in several buckets, are averaged or sharded.
struct ToyRun {
  DType dtype = float32;
  bool zero = false;
  bool graph = true;
  bool dropout = true;
  std::string folder{};  // for checkpoints: the run resumes if there is one, and writes one at its end
  Group group = world();
  // Added to the loss on this rank; may do what cannot be captured.
  std::function<Tensor(const Tensor& extra)> more = [](const Tensor& extra) { return sum(extra * extra); };
};

struct Ended {
  std::vector<std::pair<double, double>> steps;  // loss and gradient norm
  std::vector<std::vector<double>> weights;
  std::string graph_error;

  bool operator==(const Ended& other) const { return steps == other.steps && weights == other.weights; }
};

Ended train_toy(const ToyRun& run, std::int64_t steps) {
  struct Model : ToyModel {
    Tensor extra = param("extra", ones({3}));
  } model;
  model.to(rank_device(), run.dtype);
  if (!run.dropout) {
    model.eval();
  }
  const ToyData data(40);
  train::DatasetBatches batches(data, {.batch = 8, .seed = 1, .device = rank_device()}, run.group);
  const optim::AdamWOptions options{.lr = 0.01, .eps = 1e-3};
  std::variant<std::monostate, optim::AdamW, ShardedAdamW> optimizer;
  if (run.zero) {
    optimizer.emplace<ShardedAdamW>(model.parameters(), options, run.group,
                                    ShardingOptions{.bucket_bytes = 80, .overlap = true, .overlap_gather = true});
  } else {
    optimizer.emplace<optim::AdamW>(model.parameters(), options);
  }
  const train::AnyOptimizer any = run.zero ? train::AnyOptimizer(std::get<ShardedAdamW>(optimizer))
                                           : train::AnyOptimizer(std::get<optim::AdamW>(optimizer));
  manual_seed(5);
  const train::Loss loss = [&](const Tensors& batch) {
    return model.loss()(batch) + run.more(model.extra.to(float32)) * 0.01;
  };
  train::TrainingStep training(
      model, loss, batches, any,
      {.accumulate = 2,
       .clip = 0.5,
       .ema = 0.9,
       .schedule = [](std::int64_t step) { return 0.01 / (1 + 0.1 * static_cast<double>(step)); },
       .cuda_graph = run.graph,
       .parallel = {.bucket_bytes = 80, .check_every = 7}},
      run.group);
  train::Checkpoints checkpoints({.folder = run.folder, .every = 1, .resume = true}, {{"steps", std::to_string(steps)}},
                                 {.changed = {"steps"}}, {}, run.group);
  checkpoints.resume([&](const io::TrainingCheckpoint& saved) { training.resume(saved); });
  Ended ended;
  while (training.steps_done() < steps) {
    training.step();
    if (training.full() || training.steps_done() == steps) {
      for (const train::StepResult& result : training.finished()) {
        ended.steps.emplace_back(result.loss, result.grad_norm);
      }
    }
  }
  checkpoints.save(training.checkpoint());
  checkpoints.finish();
  for (const Tensor& parameter : model.parameters()) {
    ended.weights.push_back(to_vector<double>(parameter.to(float64)));
  }
  ended.graph_error = training.graph_error();
  return ended;
}

bool usable() { return 8 % world().size() == 0; }

TEST(TrainingStepRanks, ReplaysTheSameBits) {
  if (!usable()) {
    GTEST_SKIP() << "for numbers of ranks that divide the batch of 8";
  }
  for (const DType dtype : {float32, float16}) {
    for (const bool zero : {false, true}) {
      const Ended replayed = train_toy({.dtype = dtype, .zero = zero}, 80);
      EXPECT_EQ(replayed.graph_error, "");
      EXPECT_EQ(replayed, train_toy({.dtype = dtype, .zero = zero, .graph = false}, 80)) << name_of(dtype) << zero;
    }
  }
}

// A step that one rank cannot capture is captured by none, wherever the capture fails.
TEST(TrainingStepRanks, NoRankUsesAGraphThatAnotherCannotCapture) {
  if (!usable() || world().size() == 1) {
    GTEST_SKIP() << "for 2, 4 or 8 ranks";
  }
  const int last = world().size() - 1;
  const bool is_last = world().rank() == last;
  for (const bool zero : {false, true}) {
    ToyRun reads{.zero = zero}, lacks{.zero = zero};
    if (is_last) {
      reads.more = [](const Tensor& extra) { return sum(extra) * sum(extra).item(); };
      lacks.more = [](const Tensor& extra) { return zeros({}, extra.dtype(), extra.device()); };
    }
    for (ToyRun& run : {std::ref(reads), std::ref(lacks)}) {
      const Ended ended = train_toy(run, 12);
      if (rank_device().is_cuda()) {
        EXPECT_NE(ended.graph_error.find(is_last ? "cannot be captured into a CUDA graph"
                                                 : fmt::format("rank {} could not capture", last)),
                  std::string::npos)
            << ended.graph_error;
      }
      run.graph = false;
      EXPECT_EQ(ended, train_toy(run, 12)) << zero;
    }
  }
}

// A run of all ranks, continued by one rank, and again by all, is that of one rank, up to rounding.
TEST(TrainingStepRanks, AnyNumberOfRanksContinuesARun) {
  if (!usable()) {
    GTEST_SKIP() << "for numbers of ranks that divide the batch of 8";
  }
  const Ended expected = train_toy({.dropout = false, .group = Group()}, 24);
  for (const bool zero : {false, true}) {
    for (const bool zero_alone : {false, true}) {
      const TemporaryFolder folder;
      ToyRun run{.zero = zero, .dropout = false, .folder = folder.path()};
      std::vector<std::pair<double, double>> steps = train_toy(run, 8).steps;
      train::on_rank_0(world(), [&] {
        ToyRun alone = run;
        alone.group = Group();
        alone.zero = zero_alone;
        const Ended middle = train_toy(alone, 16);
        steps.insert(steps.end(), middle.steps.begin(), middle.steps.end());
      });
      const Ended ended = train_toy(run, 24);
      if (world().rank() == 0) {
        steps.insert(steps.end(), ended.steps.begin(), ended.steps.end());
        ASSERT_EQ(steps.size(), 24u);
        for (std::size_t i = 0; i < steps.size(); ++i) {
          EXPECT_NEAR(steps[i].first, expected.steps[i].first, 1e-6) << i;
          EXPECT_NEAR(steps[i].second, expected.steps[i].second, 1e-5) << i;
        }
      }
      for (std::size_t i = 0; i < ended.weights.size(); ++i) {
        for (std::size_t k = 0; k < ended.weights[i].size(); ++k) {
          EXPECT_NEAR(ended.weights[i][k], expected.weights[i][k], 1e-5) << i;
        }
      }
    }
  }
}

TEST(CaptureRanks, ReplaysCollectives) {
  if (rank_device().is_cpu()) {
    GTEST_SKIP() << "for GPUs";
  }
  const Group group = world();
  const int n = group.size(), rank = group.rank();
  constexpr std::int64_t count = 1000;
  const Tensor own = here(zeros({count})), total = here(zeros({count})), part = here(zeros({count})),
               all = here(zeros({n * count})), shared = here(zeros({count}));
  group.all_reduce(total);
  const cuda::Graph graph = cuda::capture(
      [&] {
        const Tensor sums = own * 1;
        const Work first = group.start_all_reduce(sums);
        const Work second = group.start_all_gather(own * 2, all);
        copy_into(shared, own * 3);
        first.wait();
        copy_into(total, sums);
        second.wait();
        group.reduce_scatter(all, part);
        group.broadcast(shared, n - 1);
      },
      rank_device());
  const auto expect = [&](const Tensor& x, double value) {
    EXPECT_EQ(to_vector<double>(x), std::vector<double>(static_cast<std::size_t>(x.numel()), value));
  };
  for (int time = 0; time < 40; ++time) {
    fill_data(own, rank + time);
    graph.replay();
    if (time % 3 == 0) {  // collectives without the graph, between replays
      group.all_reduce(total, Reduction::mean);
    }
    if (time % 8 == 7) {
      expect(total, n * time + n * (n - 1) / 2);
      expect(part, n * 2 * (rank + time));
      expect(shared, 3 * (n - 1 + time));
      expect(as_strided(all, {count}, {1}, (n - 1) * count), 2 * (n - 1 + time));
    }
  }
}

TEST(CaptureRanks, WhatCannotBeCaptured) {
  const Group group = world();
  if (group.size() == 1) {
    GTEST_SKIP() << "for several ranks";
  }
  const std::string rest = ": cannot be captured into a CUDA graph; call it outside of cuda::capture";
  const Tensor x = ones({3});
  {
    // Nothing is really captured, so that no GPU is needed.
    mica::detail::Capture capture{.device = rank_device(), .calls = {}, .random = nullptr};
    const mica::detail::Capturing capturing(capture);
    expect_error([&] { group.all_reduce(x); }, "all_reduce" + rest);
    expect_error([&] { group.barrier(); }, "barrier" + rest);
    expect_error([&] { (void)group.split(0); }, "split" + rest);
  }
  group.all_reduce(x);  // nothing was sent, so the ranks can continue
  EXPECT_EQ(to_vector<float>(x), std::vector<float>(3, static_cast<float>(group.size())));
  if (rank_device().is_cpu()) {
    return;
  }
  const Tensor y = here(ones({3}));
  const Group others = group.split(0);
  const auto in_capture = [](const std::function<void()>& f) { (void)cuda::capture(f, rank_device()); };
  expect_error([&] { in_capture([&] { others.all_reduce(y); }); },
               "all_reduce: a group's first collective on a GPU cannot be captured into a CUDA graph");
  const Work before = group.start_all_reduce(y);
  expect_error([&] { in_capture([&] { before.wait(); }); },
               "all_reduce: cannot be waited for in a capture, as it was started before");
  before.wait();
  others.all_reduce(y);
  EXPECT_EQ(to_vector<float>(y), std::vector<float>(3, static_cast<float>(group.size() * group.size())));
}

}  // namespace
}  // namespace mica::distributed
