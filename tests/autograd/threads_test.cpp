// Operations that several threads may run concurrently. Most effective under ThreadSanitizer, which .ci/run uses.

#include <thread>

#include "tests/support.h"
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/norm/layer_norm.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

constexpr int kThreads = 4;

// Calls work(i) for i = 0, 1, … on one thread each.
template <class F>
void on_threads(F&& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&work, i] { work(i); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// A small network of typical ops, with integers small enough that sums of gradients are exact in any order.
Tensor small_network(const Tensor& x, const Tensor& weight) {
  const Tensor h = matmul(x, transpose(weight, 0, 1));
  return sum(relu(h) * 2 + slice(h, 1, 0, 1));
}

TEST(Threads, SeparateGraphs) {
  std::array<Tensor, kThreads> gradients;
  on_threads([&](int i) {
    for (int round = 0; round < 20; ++round) {
      const Tensor x = full({3, 4}, i + 1);
      const Tensor weight = full({2, 4}, 1).requires_grad_();
      const Tensor y = layer_norm(softmax(matmul(x, transpose(weight, 0, 1)), 1), {2}) + randn({2}) * 0;
      sum(y * y).backward();
      small_network(x, weight).backward();
      gradients[i] = weight.grad();
    }
  });
  for (int i = 0; i < kThreads; ++i) {
    // 3 rows of i + 1, four times for the first column of h, else twice; the squares of zeros add nothing.
    std::vector<double> expected(8, 12 * (i + 1));
    std::fill(expected.begin() + 4, expected.end(), 6 * (i + 1));
    expect_close(gradients[i], expected, 1e-4, 1e-4);
  }
}

TEST(Threads, SharedLeavesAddUp) {
  constexpr int kRounds = 50;
  const Tensor weight = full({2, 4}, 1).requires_grad_();
  on_threads([&](int) {
    for (int round = 0; round < kRounds; ++round) {
      small_network(ones({3, 4}), weight).backward();
    }
  });
  const double first = 12. * kThreads * kRounds;
  const double second = 6. * kThreads * kRounds;
  expect_close(weight.grad(), {first, first, first, first, second, second, second, second}, 0, 0);
}

TEST(Threads, SharedLeavesAndGrad) {
  const Tensor weight = full({2, 4}, 1).requires_grad_();
  on_threads([&](int i) {
    for (int round = 0; round < 20; ++round) {
      const Tensor x = full({3, 4}, i + 1);
      const Tensor g = autograd::grad({small_network(x, weight)}, {weight}).at(0);
      EXPECT_EQ(to_vector<float>(g)[0], 12 * (i + 1));
    }
  });
  EXPECT_FALSE(weight.grad().defined());
}

TEST(Threads, HooksOfASharedLeaf) {
  const Tensor weight = full({4}, 1).requires_grad_();
  std::atomic<int> before{0}, after{0}, removed{0};
  weight.register_hook([&](const Tensor&) {
    ++before;
    return Tensor{};
  });
  weight.register_post_accumulate_grad_hook([&](const Tensor&) { ++after; });
  autograd::HookHandle handle = weight.register_hook([&](const Tensor&) {
    ++removed;
    return Tensor{};
  });
  on_threads([&](int i) {
    for (int round = 0; round < 20; ++round) {
      if (i == 0 && round == 10) {
        handle.remove();
      }
      sum(weight * 2).backward();
    }
  });
  EXPECT_EQ(before, 20 * kThreads);
  EXPECT_EQ(after, 20 * kThreads);
  EXPECT_GE(removed, 10);
  const int calls = removed;
  sum(weight * 2).backward();
  EXPECT_EQ(removed, calls);
}

TEST(Threads, ModesAndWritesInPlace) {
  on_threads([](int i) {
    for (int round = 0; round < 20; ++round) {
      const Tensor x = full({4}, 2, float64).requires_grad_();
      const Tensor y = x * 3;
      add_(slice(y, 0, 0, 2), slice(x, 0, 2, 4));
      if (i % 2 == 0) {
        EXPECT_FALSE(no_grad([&] { return y * 2; }).requires_grad());
      } else {
        EXPECT_TRUE(inference_mode([&] { return y * 2; }).is_inference());
      }
      sum(y).backward();
      expect_close(x.grad(), {3, 3, 4, 4}, 0, 0);
    }
  });
}

TEST(Threads, AGraphFreedByAnotherThread) {
  const Tensor x = ones({2}).requires_grad_();
  Tensor y = x;
  for (int i = 0; i < 10'000; ++i) {
    y = y + x;
  }
  std::thread([gone = std::move(y)]() mutable { gone = {}; }).join();
  std::thread([&] { sum(x).backward(); }).join();
  expect_close(x.grad(), {1, 1}, 0, 0);
}

TEST(Threads, OneModelEvaluatedAndTrained) {
  const nn::GPT model({.vocab = 11, .context = 8, .layers = 1, .heads = 2, .width = 8});
  const Tensor tokens = from_data(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8}, {1, 8});
  const Tensor expected = no_grad([&] { return model(tokens); });
  on_threads([&](int i) {
    if (i % 2 == 0) {
      expect_close(inference_mode([&] { return model(tokens); }), expected, 0, 0);
    } else {
      cross_entropy(reshape(model(tokens), {8, 11}), reshape(tokens, {8})).backward();
    }
  });
  for (const Tensor& parameter : model.parameters()) {
    EXPECT_TRUE(parameter.grad().defined());
  }
}

}  // namespace
