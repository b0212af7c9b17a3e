#include <tests/nn/support.h>

#include <optional>
#include <set>

#include <mica/autograd/detail/accumulate.h>
#include <mica/core/rng.h>
#include <mica/nn/checkpoint.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/adamw.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(NnCheckpoint, GptTrainsToTheSameBits) {
  for (const Device device : test_devices()) {
    std::vector<std::vector<double>> results[2];
    for (const bool on : {false, true}) {
      manual_seed(1);
      nn::GPT gpt{{.vocab = 11, .context = 8, .layers = 3, .heads = 2, .width = 16, .dropout = 0.2, .checkpoint = on}};
      gpt.to(device);
      optim::AdamW optimizer{gpt.parameters(), {.lr = 1e-2}};
      for (int step = 0; step < 3; ++step) {
        const Tensor tokens = randint(0, 11, {2, 8}).to(device);
        const Tensor loss = cross_entropy(gpt(tokens), tokens);
        optimizer.zero_grad();
        loss.backward();
        results[on].push_back(to_vector<double>(loss));
        for (const Tensor& parameter : gpt.parameters()) {
          results[on].push_back(to_vector<double>(parameter.grad()));
        }
        optimizer.step();
      }
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

// The bytes of all storages that the graph of `loss` keeps, each once.
std::size_t kept_bytes(const Tensor& loss) {
  std::size_t bytes = 0;
  std::vector<const autograd::Node*> nodes{autograd::gradient_edge(loss).node.get()};
  std::set<const void*> seen{nodes[0]};
  while (!nodes.empty()) {
    const autograd::Node* const node = nodes.back();
    nodes.pop_back();
    for (const Tensor& saved : node->saved_tensors()) {
      if (saved.defined() && seen.insert(saved.handle()->storage.get()).second) {
        bytes += saved.handle()->storage->bytes();
      }
    }
    for (const autograd::Edge& edge : node->edges) {
      if (edge.node != nullptr && seen.insert(edge.node.get()).second) {
        nodes.push_back(edge.node.get());
      }
    }
  }
  return bytes;
}

TEST(NnCheckpoint, SavesMemory) {
  std::size_t bytes[2];
  for (const bool on : {false, true}) {
    const nn::GPT gpt{{.vocab = 11, .context = 32, .layers = 4, .heads = 2, .width = 16, .checkpoint = on}};
    const Tensor tokens = randint(0, 11, {8, 32});
    bytes[on] = kept_bytes(cross_entropy(gpt(tokens), tokens));
  }
  EXPECT_LT(bytes[1] * 4, bytes[0]);
}

TEST(NnCheckpoint, FollowsAModuleThatMoves) {
  manual_seed(2);
  std::optional<nn::Linear> layer(nn::Linear{3, 2});
  const Tensor x = randn({4, 3}).requires_grad_();
  const Tensor y = nn::checkpoint(*layer, x);
  std::optional<nn::Linear> moved(std::move(*layer));
  layer.reset();
  y.backward(ones({4, 2}), {.retain_graph = true});
  const Tensor expected = moved->weight.grad();
  EXPECT_EQ(to_vector<float>(expected), to_vector<float>(sum(x.detach(), {0}, true) + zeros({2, 3})));
  const nn::Linear again = std::move(*moved);
  moved.reset();
  y.backward(ones({4, 2}), {.retain_graph = true});
}

TEST(NnCheckpoint, RefusesADestroyedModule) {
  const Tensor x = randn({4, 3}).requires_grad_();
  Tensor y;
  {
    const nn::Linear layer{3, 2};
    y = nn::checkpoint(layer, x);
  }
  expect_error([&] { y.backward(ones({4, 2})); }, "module: a handle to a destroyed module was used");
  struct Parent : nn::Module {
    std::vector<nn::Linear> layers;
    Parent() { layers.push_back(child("layer", nn::Linear{3, 2})); }
  };
  Parent parent;
  y = nn::checkpoint(parent.layers[0], x);
  parent.layers.clear();
  expect_error([&] { y.backward(ones({4, 2})); }, "module: a handle to a destroyed module was used");
}

}  // namespace
