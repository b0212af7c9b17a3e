#include "tests/support.h"
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::HookHandle;

namespace {

// Runs backward from 3 · x; returns and removes the gradient of x.
double triple_backward(const Tensor& x) {
  (x * 3).backward();
  const double gradient = x.grad().item();
  x.set_grad({});
  return gradient;
}

TEST(Hooks, RunInOrderUntilRemoved) {
  const Tensor x = scalar(1).requires_grad_();
  std::vector<int> calls;
  HookHandle first = x.register_hook([&](const Tensor& g) {
    calls.push_back(1);
    return g * 2;
  });
  HookHandle second = x.register_hook([&](const Tensor& g) {
    calls.push_back(2);
    return g + 1;
  });
  EXPECT_EQ(triple_backward(x), 7);
  first.remove();
  EXPECT_EQ(triple_backward(x), 4);
  first.remove();  // a second call has no effect
  second.remove();
  EXPECT_EQ(triple_backward(x), 3);
  EXPECT_EQ(calls, (std::vector<int>{1, 2, 2}));
}

TEST(Hooks, RemovalFreesWhatTheHookCaptured) {
  const Tensor x = scalar(1).requires_grad_();
  auto captured = std::make_shared<int>(0);
  HookHandle handle = x.register_hook([captured](const Tensor&) { return Tensor{}; });
  EXPECT_EQ(captured.use_count(), 2);
  handle.remove();
  EXPECT_EQ(captured.use_count(), 1);
}

TEST(Hooks, HandlesOutliveTensorAndGraph) {
  HookHandle of_leaf, of_result, of_node, none;
  std::weak_ptr<int> captured;
  {
    const auto calls = std::make_shared<int>(0);
    captured = calls;
    const Tensor x = scalar(1).requires_grad_();
    const Tensor y = x * 2;
    of_leaf = x.register_hook([calls](const Tensor& g) { return ++*calls, g; });
    of_result = y.register_hook([calls](const Tensor& g) { return ++*calls, g; });
    of_node = y.grad_fn()->register_prehook([calls](const Tensors&) { return ++*calls, Tensors{}; });
    y.backward();
    EXPECT_EQ(*calls, 3);
  }
  EXPECT_TRUE(captured.expired());  // handles keep neither the graph nor the hooks alive
  EXPECT_NO_THROW(of_leaf.remove());
  EXPECT_NO_THROW(of_result.remove());
  EXPECT_NO_THROW(of_node.remove());
  EXPECT_NO_THROW(none.remove());
}

TEST(Hooks, DestroyingTheHandleKeepsTheHook) {
  const Tensor x = scalar(1).requires_grad_();
  x.register_hook([](const Tensor& g) { return g * 10; });
  EXPECT_EQ(triple_backward(x), 30);
}

TEST(Hooks, RegisteredByAHookRunsFromTheNextBackwardOn) {
  const Tensor x = scalar(1).requires_grad_();
  int inner = 0;
  HookHandle outer;
  outer = x.register_hook([&](const Tensor&) {
    x.register_hook([&](const Tensor&) {
      ++inner;
      return Tensor{};
    });
    return Tensor{};
  });
  triple_backward(x);
  EXPECT_EQ(inner, 0);
  outer.remove();
  triple_backward(x);
  EXPECT_EQ(inner, 1);
}

TEST(Hooks, RemovedByAHookBeforeItsTurnIsNotCalled) {
  const Tensor x = scalar(1).requires_grad_();
  HookHandle itself, later;
  int calls = 0;
  const auto captured = std::make_shared<int>(7);
  itself = x.register_hook([&, captured](const Tensor&) {
    itself.remove();
    later.remove();
    calls += *captured;  // what a hook captured lives until it returns
    return Tensor{};
  });
  later = x.register_hook([&](const Tensor&) {
    calls += 1000;
    return Tensor{};
  });
  triple_backward(x);
  triple_backward(x);
  EXPECT_EQ(calls, 7);
  EXPECT_EQ(captured.use_count(), 1);
}

TEST(Hooks, AWrongReplacementIsRefused) {
  const Tensor x = ones({2}).requires_grad_();
  HookHandle handle = x.register_hook([](const Tensor&) { return ones({3}); });
  expect_error([&] { sum(x).backward(); }, "the hook of a gradient of float32 [2] on cpu returned float32 [3]");
  EXPECT_FALSE(x.grad().defined());
  handle.remove();
  handle = x.register_hook([](const Tensor&) { return ones({2}, float64); });
  expect_error([&] { sum(x).backward(); }, "returned float64 [2]");
}

TEST(Hooks, AnExceptionReachesTheCallerAndModesComeBack) {
  const Tensor x = scalar(1).requires_grad_();
  const Tensor y = exp(x);
  HookHandle handle = y.register_hook([](const Tensor&) -> Tensor { fail("hook: no"); });
  expect_error([&] { y.backward(); }, "hook: no");
  EXPECT_TRUE(autograd::grad_enabled());
  EXPECT_FALSE(x.grad().defined());
  handle.remove();
  y.backward();  // nothing had run yet, so the graph is intact
  EXPECT_EQ(x.grad().item(), std::exp(1.0));
}

TEST(Hooks, OfNodesRunBeforeAndAfter) {
  const Tensor x = scalar(2).requires_grad_();
  const Tensor y = scalar(5).requires_grad_();
  const Tensor z = x * y;
  const std::shared_ptr<autograd::Node> node = z.grad_fn();
  EXPECT_EQ(node->name(), "Mul");
  EXPECT_EQ(x.grad_fn(), nullptr);
  std::vector<std::string> order;
  z.register_hook([&](const Tensor& g) {
    order.push_back("tensor");
    return g * 10;
  });
  HookHandle before = node->register_prehook([&](const Tensors& gradients) {
    order.push_back("before");
    return Tensors{gradients.at(0) + 1};
  });
  HookHandle after = node->register_hook([&](const Tensors& results, const Tensors& gradients) {
    order.push_back("after");
    EXPECT_EQ(gradients.at(0).item(), 11);
    EXPECT_EQ(results.at(0).item(), 55);
    return Tensors{results.at(0), results.at(1) * 100};
  });
  z.backward({}, {.retain_graph = true});
  EXPECT_EQ(order, (std::vector<std::string>{"tensor", "before", "after"}));
  EXPECT_EQ(x.grad().item(), 55);
  EXPECT_EQ(y.grad().item(), 2200);
  before.remove();
  after.remove();
  z.backward();
  EXPECT_EQ(x.grad().item(), 55 + 50);
}

TEST(Hooks, OfNodesMustReturnWhatFits) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor y = x * full({2}, 3);
  HookHandle handle = y.grad_fn()->register_prehook([](const Tensors&) { return Tensors(2); });
  expect_error([&] { sum(y).backward(); }, "Mul: expected 1 gradients from the prehook, got 2");
  handle.remove();
  handle = y.grad_fn()->register_hook([](const Tensors&, const Tensors&) { return Tensors(1); });
  expect_error([&] { sum(y).backward(); }, "Mul: expected 2 gradients from the hook, got 1");
  handle.remove();
  handle = y.grad_fn()->register_hook([](const Tensors&, const Tensors&) { return Tensors{ones({3}), {}}; });
  expect_error([&] { sum(y).backward(); }, "the hook of a gradient of float32 [2] on cpu returned float32 [3]");
  handle.remove();
  // Gradients that are not needed are dropped, and an undefined gradient means none.
  y.grad_fn()->register_hook([](const Tensors&, const Tensors&) { return Tensors{{}, ones({7})}; });
  sum(y).backward();
  EXPECT_FALSE(x.grad().defined());
}

TEST(Hooks, OfALeafsNodeRunInBackwardOnly) {
  const Tensor x = scalar(2).requires_grad_();
  const Tensor y = x * 3;
  int calls = 0;
  const autograd::Edge edge = autograd::gradient_edge(x);
  edge.node->register_prehook([&](const Tensors&) {
    ++calls;
    return Tensors{};
  });
  autograd::grad({y}, {x}, {}, {.retain_graph = true});
  EXPECT_EQ(calls, 0);
  y.backward();
  EXPECT_EQ(calls, 1);
}

TEST(Hooks, AreRecordedWithCreateGraph) {
  const Tensor x = scalar(3).requires_grad_();
  x.register_hook([](const Tensor& g) { return g * g; });
  const Tensor dx = autograd::grad({x * x}, {x}, {}, {.create_graph = true}).at(0);  // (2x)²
  EXPECT_EQ(dx.item(), 36);
  EXPECT_EQ(autograd::grad({dx}, {x}).at(0).item(), 24 * 24);  // the hook again: 8x squared
}

TEST(Hooks, PostAccumulateSeeTheLeafWithItsGrad) {
  const Tensor x = scalar(4).requires_grad_();
  std::vector<double> seen;
  HookHandle handle = x.register_post_accumulate_grad_hook([&](const Tensor& leaf) {
    EXPECT_TRUE(leaf.is_same(x));
    seen.push_back(leaf.grad().item());
    add_(leaf, leaf.grad(), -0.5);  // a step; nothing is recorded in a hook
    leaf.set_grad({});
  });
  (x * 2).backward();
  (x * 6).backward();
  EXPECT_EQ(seen, (std::vector<double>{2, 6})) << "each backward brings only its own gradient";
  EXPECT_EQ(x.item(), 0);
  EXPECT_FALSE(x.grad().defined());
  autograd::grad({x * 2}, {x});
  EXPECT_EQ(seen.size(), 2u) << "grad() accumulates nothing";
  handle.remove();
  (x * 2).backward();
  EXPECT_EQ(x.grad().item(), 2);
}

TEST(Hooks, PostAccumulateIsForLeaves) {
  const auto hook = [](const Tensor&) {};
  const Tensor x = scalar(1).requires_grad_();
  expect_error([&] { (x * 2).register_post_accumulate_grad_hook(hook); },
               "register_post_accumulate_grad_hook: expected a leaf that requires a gradient, got the result of an op");
  expect_error([&] { scalar(1).register_post_accumulate_grad_hook(hook); }, "got one that does not of shape []");
}

TEST(Hooks, PostAccumulateOutlivesItsLeaf) {
  Tensor y;
  int calls = 0;
  {
    const Tensor x = scalar(1).requires_grad_();
    x.register_post_accumulate_grad_hook([&](const Tensor&) { ++calls; });
    y = x * 2;
  }
  y.backward();
  EXPECT_EQ(calls, 0) << "there is no leaf to show";
}

TEST(Hooks, BackwardWithinAHook) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = scalar(5).requires_grad_();
  x.register_hook([&](const Tensor&) {
    const Tensor inner = enable_grad([&] { return y * y; });
    inner.backward();
    return Tensor{};
  });
  EXPECT_EQ(triple_backward(x), 3);
  EXPECT_EQ(y.grad().item(), 10);
}

TEST(Hooks, EmptyFunctionsAreRefused) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor y = x * 2;
  const std::string text = "expected a function to call, got an empty one";
  expect_error([&] { x.register_hook(nullptr); }, "register_hook: " + text);
  expect_error([&] { y.register_hook({}); }, "register_hook: " + text);
  expect_error([&] { x.register_post_accumulate_grad_hook(nullptr); }, "register_post_accumulate_grad_hook: " + text);
  expect_error([&] { y.grad_fn()->register_prehook(nullptr); }, "register_prehook: " + text);
  expect_error([&] { y.grad_fn()->register_hook(nullptr); }, "register_hook: " + text);
  expect_error([&] { y.grad_fn()->register_output_hook(0, nullptr); }, "register_output_hook: " + text);
  const auto same = [](const Tensor& gradient) { return gradient; };
  expect_error([&] { y.grad_fn()->register_output_hook(1, same); },
               "MulNumber: register_output_hook: there is no output 1");
  expect_error([&] { y.grad_fn()->register_output_hook(-1, same); }, "there is no output -1");
  y.backward(ones({2}));  // the failed registrations left nothing behind
  expect_close(x.grad(), {2, 2}, 0, 0);
}

}  // namespace
