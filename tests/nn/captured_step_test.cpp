#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/cuda/graph.h>
#include <mica/core/rng.h>
#include <mica/nn/gpt.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

constexpr Device gpu = Device::cuda();
constexpr std::int64_t vocab = 31, context = 16, batch = 3;

struct Outcome {
  std::vector<float> losses;
  std::vector<std::vector<float>> weights;
};

// Trains a small GPT with dropout; from step `captured_from` on by replays of one graph.
Outcome train(int steps, int captured_from, bool checkpoint) {
  manual_seed(17);
  nn::GPT model(nn::GPTConfig{
      .vocab = vocab, .context = context, .layers = 2, .heads = 2, .width = 24, .dropout = 0.2, .bias = false});
  model.config.checkpoint = checkpoint;
  model.to(gpu);
  optim::SGD optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.9});
  const Tensor inputs = empty({batch, context}, int64, gpu), targets = empty({batch, context}, int64, gpu);
  Tensor loss;
  const auto step = [&] {
    loss = cross_entropy(model(inputs), targets);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  };
  Outcome outcome;
  cuda::Graph graph;
  for (int i = 0; i < steps; ++i) {
    std::vector<std::int64_t> tokens(batch * context + 1);
    for (std::size_t k = 0; k < tokens.size(); ++k) {
      tokens[k] = static_cast<std::int64_t>((k * k + 7 * k * static_cast<std::size_t>(i)) % vocab);
    }
    copy_into(inputs, from_data(std::vector(tokens.begin(), tokens.end() - 1), {batch, context}));
    copy_into(targets, from_data(std::vector(tokens.begin() + 1, tokens.end()), {batch, context}));
    if (i < captured_from) {
      step();
    } else {
      if (graph.empty()) {
        graph = cuda::capture(step);
      }
      graph.replay();
    }
    outcome.losses.push_back(static_cast<float>(loss.item()));
  }
  for (const Tensor& weight : model.parameters()) {
    outcome.weights.push_back(to_vector<float>(weight));
  }
  return outcome;
}

TEST(CapturedStep, SameBitsAsWithoutAGraph) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const bool checkpoint : {false, true}) {
    const Outcome plain = train(12, 12, checkpoint), captured = train(12, 3, checkpoint);
    EXPECT_EQ(plain.losses, captured.losses);
    EXPECT_TRUE(plain.weights == captured.weights);
    // Each step has had tokens and masks of its own.
    EXPECT_EQ(std::set<float>(captured.losses.begin(), captured.losses.end()).size(), captured.losses.size());
  }
}

}  // namespace
