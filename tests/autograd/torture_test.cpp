// Extreme graphs, and whether they are freed completely. Under AddressSanitizer, these tests also detect leaks and uses
// after free.

#include "tests/depth.h"
#include "tests/support.h"
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Context;

namespace {

// Detects whether the memory of a tensor was freed.
class Remains {
 public:
  void watch(const Tensor& x) {
    tensors_.push_back(x.handle());
    storages_.push_back(x.handle()->storage);
    nodes_.push_back(x.grad_fn());
  }
  bool any() const {
    const auto alive = [](const auto& x) { return !x.expired(); };
    return std::any_of(tensors_.begin(), tensors_.end(), alive) ||
           std::any_of(storages_.begin(), storages_.end(), alive) || std::any_of(nodes_.begin(), nodes_.end(), alive);
  }

 private:
  std::vector<std::weak_ptr<mica::detail::TensorImpl>> tensors_;
  std::vector<std::weak_ptr<Storage>> storages_;
  std::vector<std::weak_ptr<autograd::Node>> nodes_;
};

TEST(Torture, LongChainOfOpsThatSave) {
  // x · 1, many times: each op saves its input, and so refers to the previous op twice.
  const Tensor x = scalar(3).requires_grad_();
  const Tensor one = scalar(1).requires_grad_();
  Remains remains;
  {
    Tensor y = x;
    for (int i = 0; i < kLongChain; ++i) {
      y = y * one;
      if (i % (kLongChain / 10) == 0) {
        remains.watch(y);
      }
    }
    y.backward();
  }
  EXPECT_EQ(x.grad().item(), 1);
  EXPECT_EQ(one.grad().item(), 3.0 * kLongChain);
  EXPECT_FALSE(remains.any());
}

TEST(Torture, LongChainOfWritesInPlace) {
  const Tensor x = scalar(3).requires_grad_();
  {
    const Tensor y = x * 1;
    for (int i = 0; i < kLongChain; ++i) {
      add_(y, x);
    }
    y.backward();
  }
  EXPECT_EQ(x.grad().item(), kLongChain + 1);
}

TEST(Torture, NodeWithManyInputs) {
  constexpr int kInputs = 100'000;
  const Tensor x = full({1}, 2, float64).requires_grad_();
  Tensors parts;
  for (int i = 0; i < kInputs; ++i) {
    parts.push_back(i % 2 == 0 ? x : x * 3);
  }
  sum(cat(parts, 0)).backward();
  EXPECT_EQ(x.grad().item(), kInputs / 2 * 4);
}

TEST(Torture, OneTensorUsedByManyOps) {
  const Tensor x = scalar(2).requires_grad_();
  const Tensor shared = x * 5;
  Tensor total = scalar(0);
  for (int i = 0; i < kLongChain; ++i) {
    total = total + shared;
  }
  total.backward();
  EXPECT_EQ(x.grad().item(), 5.0 * kLongChain);
}

TEST(Torture, NestedDiamonds) {
  // 2⁶⁰ paths from the last to the first.
  const Tensor x = scalar(1).requires_grad_();
  Tensor y = x;
  for (int level = 0; level < 60; ++level) {
    y = y + y * 1;
  }
  EXPECT_EQ(autograd::grad({y}, {x}, {}, {.retain_graph = true}).at(0).item(), std::exp2(60));
  y.backward();
  EXPECT_EQ(x.grad().item(), std::exp2(60));
}

TEST(Torture, GradientsOfGradientsOfADeepChain) {
  // y = x³²: each square saves its input, whose history the second backward goes through.
  const Tensor x = scalar(1).requires_grad_();
  Tensor y = x;
  for (int i = 0; i < 5; ++i) {
    y = y * y;
  }
  Tensor g = y;
  double expected = 1;
  for (int order = 0; order < 4; ++order) {
    g = autograd::grad({g}, {x}, {}, {.create_graph = true}).at(0);
    expected *= 32 - order;
    EXPECT_EQ(g.item(), expected);
  }
}

TEST(Torture, GraphsDroppedWithoutBackward) {
  const Tensor x = full({4}, 2, float64).requires_grad_();
  Remains remains;
  {
    const Tensor y = exp(x);  // saves its output
    const Tensor z = y * y;
    const Tensor part = slice(z, 0, 0, 2);
    add_(part, slice(y, 0, 1, 3));
    const Tensor gradient = autograd::grad({sum(z)}, {x}, {}, {.create_graph = true}).at(0);
    for (const Tensor& tensor : {y, z, part, gradient}) {
      remains.watch(tensor);
    }
    EXPECT_TRUE(remains.any());
  }
  EXPECT_FALSE(remains.any());
  EXPECT_FALSE(x.grad().defined());
}

TEST(Torture, ALeafOutlivedByItsGraph) {
  Tensor y;
  std::weak_ptr<mica::detail::TensorImpl> leaf;
  {
    const Tensor x = scalar(3).requires_grad_();
    leaf = x.handle();
    y = x * x;
  }
  EXPECT_TRUE(leaf.expired());
  y.backward();  // to nobody's grad
}

// Fails in forward or in backward, on request.
struct Fragile {
  enum Where { nowhere, forward_, backward_ };
  const Where* fails;

  Tensor forward(Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x);
    const Tensor y = x.detach() * 2;
    check(*fails != forward_, "Fragile: forward");
    return y;
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [x] = ctx.saved<1>();
    check(*fails != backward_, "Fragile: backward");
    return dy * 2;
  }
};

TEST(Torture, ExceptionsInForward) {
  const Tensor x = scalar(3).requires_grad_();
  Fragile::Where fails = Fragile::forward_;
  Remains remains;
  {
    const Tensor y = exp(x);
    const auto before = y.grad_fn().use_count();
    expect_error([&] { autograd::apply(Fragile{&fails}, y); }, "Fragile: forward");
    EXPECT_EQ(y.grad_fn().use_count(), before) << "nothing of the failed op holds on to its input";
    EXPECT_TRUE(autograd::grad_enabled());
    fails = Fragile::nowhere;
    autograd::apply(Fragile{&fails}, y).backward();
    remains.watch(y);
  }
  EXPECT_FALSE(remains.any());
  EXPECT_EQ(x.grad().item(), 2 * std::exp(3));
}

TEST(Torture, ExceptionsInBackwardChangeNoGrad) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor other = scalar(5).requires_grad_();
  Fragile::Where fails = Fragile::backward_;
  Remains remains;
  {
    const Tensor y = exp(x);
    const Tensor z = autograd::apply(Fragile{&fails}, y);
    const Tensor loss = z * other;
    for (const Tensor& tensor : {y, z, loss}) {
      remains.watch(tensor);
    }
    expect_error([&] { loss.backward({}, {.retain_graph = true}); }, "Fragile: backward");
    EXPECT_TRUE(autograd::grad_enabled());
    EXPECT_FALSE(x.grad().defined() || other.grad().defined()) << "leaves come last, so none was reached";
    fails = Fragile::nowhere;
    loss.backward({}, {.retain_graph = true});  // all is still there
    EXPECT_EQ(other.grad().item(), z.item());
    // Without retain_graph, nodes that ran before the exception were freed, and the next backward is an error.
    fails = Fragile::backward_;
    expect_error([&] { loss.backward(); }, "Fragile: backward");
    fails = Fragile::nowhere;
    expect_error([&] { loss.backward(); }, "Mul: backward has already run through this op");
    z.backward();  // nodes that did not run are intact
  }
  EXPECT_FALSE(remains.any());
}

TEST(Torture, ExceptionsInHooksLeaveNothingBehind) {
  const Tensor x = scalar(3).requires_grad_();
  Remains remains;
  {
    const Tensor y = exp(x);
    const Tensor z = y * y;
    y.register_hook([](const Tensor&) -> Tensor { fail("hook: tensor"); });
    z.grad_fn()->register_prehook([](const Tensors&) -> Tensors { throw std::runtime_error("hook: before"); });
    remains.watch(y);
    remains.watch(z);
    EXPECT_THROW(z.backward(), std::runtime_error);
    EXPECT_TRUE(autograd::grad_enabled());
    expect_error([&] { autograd::grad({y * 2}, {x}); }, "hook: tensor");
  }
  EXPECT_FALSE(remains.any());
  autograd::HookHandle handle =
      x.register_post_accumulate_grad_hook([](const Tensor&) { fail("hook: after the grad was added to"); });
  expect_error([&] { (x * 2).backward(); }, "hook: after the grad was added to");
  EXPECT_EQ(x.grad().item(), 2);
  handle.remove();
  (x * 2).backward();
  EXPECT_EQ(x.grad().item(), 4);
}

TEST(Torture, AHookThatDropsTheGraph) {
  const Tensor x = scalar(3).requires_grad_();
  Tensor y = x * 2;
  Tensor loss = y * 5;
  loss.grad_fn()->register_prehook([&](const Tensors&) {
    y = {};
    loss = {};
    return Tensors{};
  });
  loss.backward();
  EXPECT_EQ(x.grad().item(), 10);
  EXPECT_FALSE(loss.defined());
}

TEST(Torture, AHookThatHoldsItsOwnTensorKeepsItUntilRemoved) {
  Remains remains;
  autograd::HookHandle handle;
  {
    const Tensor x = scalar(3).requires_grad_();
    const Tensor y = x * 2;
    handle = y.register_hook([y](const Tensor&) { return Tensor{}; });  // the only possible cycle, created by the user
    remains.watch(y);
  }
  EXPECT_TRUE(remains.any());
  handle.remove();
  EXPECT_FALSE(remains.any());
}

}  // namespace
