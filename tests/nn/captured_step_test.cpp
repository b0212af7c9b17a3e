#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "tests/launches.h"
#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/rng.h>
#include <mica/nn/models/gpt.h>
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

// Trains a small GPT with dropout; from step `captured_from` on by replays of one graph. In bfloat16, attention is one
// kernel.
Outcome train(int steps, int captured_from, bool checkpoint, DType dtype) {
  manual_seed(17);
  nn::GPT model(nn::GPTConfig{
      .vocab = vocab, .context = context, .layers = 2, .heads = 2, .width = 64, .dropout = 0.2, .bias = false});
  model.config.checkpoint = checkpoint;
  model.to(gpu);
  model.to(dtype);
  optim::SGD optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.9});
  const Tensor inputs = empty({batch, context}, int64, gpu), targets = empty({batch, context}, int64, gpu);
  Tensor loss;
  const auto step = [&] {
    loss = cross_entropy(model(inputs).to(float32), targets);
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
    for (const DType dtype : {float32, bfloat16}) {
      cuda::LaunchRecord record;
      const Outcome plain = train(12, 12, checkpoint, dtype), captured = train(12, 3, checkpoint, dtype);
      EXPECT_EQ(plain.losses, captured.losses) << fmt::format("{}", dtype);
      EXPECT_TRUE(plain.weights == captured.weights) << fmt::format("{}", dtype);
      if (gpu_has_wgmma()) {
        EXPECT_EQ(record.has("flash_forward_sm90_kernel"), dtype == bfloat16);
      }
      // Each step had its own tokens and dropout masks.
      const std::set<float> different(captured.losses.begin(), captured.losses.end());
      EXPECT_EQ(different.size(), captured.losses.size()) << fmt::format("{}", dtype);
    }
  }
}

}  // namespace
