#include <algorithm>
#include <optional>
#include <random>

#include "tests/support.h"
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::checkpoint;
using autograd::EarlyAccumulation;

namespace {

Tensor leaf(double value) { return scalar(value).requires_grad_(); }

// Logs when a gradient of x arrives or, for a leaf, when it has been accumulated.
void note(std::vector<std::string>& log, const std::string& name, const Tensor& x) {
  if (x.is_leaf()) {
    x.register_post_accumulate_grad_hook([&log, name](const Tensor&) { log.push_back(name); });
  } else {
    x.register_hook([&log, name](const Tensor&) {
      log.push_back(name);
      return Tensor{};
    });
  }
}

using Log = std::vector<std::string>;

TEST(EarlyAccumulation, ComesAfterTheLastUse) {
  const Tensor first = leaf(2), middle = leaf(3), last = leaf(5), tied = leaf(7);
  const auto run = [&] {
    Log log;
    std::vector<autograd::HookHandle> handles;
    for (const auto& [name, x] : {std::pair{"first", first}, {"middle", middle}, {"last", last}, {"tied", tied}}) {
      handles.push_back(
          x.register_post_accumulate_grad_hook([&log, name = name](const Tensor&) { log.push_back(name); }));
      x.set_grad({});
    }
    const Tensor a = first * 2, b = a * tied, c = b * middle, d = c * tied, e = d * last;
    note(log, "a", a);
    note(log, "b", b);
    note(log, "c", c);
    note(log, "d", d);
    e.backward();
    for (autograd::HookHandle& handle : handles) {
      handle.remove();
    }
    EXPECT_EQ(first.grad().item(), 2 * 7 * 3 * 7 * 5);
    EXPECT_EQ(middle.grad().item(), 4 * 7 * 7 * 5);
    EXPECT_EQ(last.grad().item(), 4 * 7 * 3 * 7);
    EXPECT_EQ(tied.grad().item(), 2 * 4 * 7 * 3 * 5);
    return log;
  };
  const Log without = run();
  EXPECT_EQ(Log(without.begin(), without.begin() + 4), (Log{"d", "c", "b", "a"}));
  {
    const EarlyAccumulation early({first, middle, last, tied});
    EXPECT_EQ(run(), (Log{"last", "d", "c", "middle", "b", "tied", "a", "first"}));
    EXPECT_EQ(run(), (Log{"last", "d", "c", "middle", "b", "tied", "a", "first"}));
  }
  {
    const EarlyAccumulation early({middle});
    const Log log = run();
    EXPECT_EQ(Log(log.begin(), log.begin() + 5), (Log{"d", "c", "middle", "b", "a"}));
  }
  EXPECT_EQ(run(), without);
  EXPECT_EQ(EarlyAccumulation::leaves(), nullptr);
}

TEST(EarlyAccumulation, InsideCheckpoints) {
  const Tensor outer = leaf(2), inner = leaf(3), both = leaf(5), nested = leaf(7), before = leaf(11);
  const EarlyAccumulation early({outer, inner, both, nested, before});
  Log log;
  note(log, "outer", outer);
  note(log, "inner", inner);
  note(log, "both", both);
  note(log, "nested", nested);
  note(log, "before", before);
  const Tensor a = before * both;
  note(log, "a", a);
  const Tensor b = checkpoint(
      [&](const Tensor& x) {
        const Tensor y = x * inner;
        return checkpoint([&](const Tensor& z) { return z * nested * inner; }, y) * both;
      },
      a);
  note(log, "b", b);
  const Tensor c = b * outer;
  c.backward();
  // A leaf's gradients are complete only once all ops of the checkpoint have run.
  ASSERT_EQ(log.size(), 7u);
  EXPECT_EQ(Log(log.begin(), log.begin() + 2), (Log{"outer", "b"}));
  Log middle(log.begin() + 2, log.begin() + 4);
  std::sort(middle.begin(), middle.end());
  EXPECT_EQ(middle, (Log{"inner", "nested"}));
  EXPECT_EQ(log[4], "a");
  Log rest(log.begin() + 5, log.end());
  std::sort(rest.begin(), rest.end());
  EXPECT_EQ(rest, (Log{"before", "both"}));
  EXPECT_EQ(inner.grad().item(), 2 * 11 * 5 * 3 * 7 * 5 * 2);
  EXPECT_EQ(both.grad().item(), 2 * 5 * 11 * 9 * 7 * 2);
}

TEST(EarlyAccumulation, OfTheRootOfUnreachedLeavesAndInGrad) {
  const Tensor root = leaf(2), unused = leaf(3), x = leaf(5);
  const EarlyAccumulation early({root, unused, x});
  root.backward();
  EXPECT_EQ(root.grad().item(), 1);
  EXPECT_FALSE(unused.grad().defined());
  const Tensor y = x * x * x;
  const Tensor dy = autograd::grad({y}, {x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(dy.item(), 75);
  EXPECT_FALSE(x.grad().defined());
  dy.backward();
  EXPECT_EQ(x.grad().item(), 30);
  const Tensor z = x * x * x;
  z.backward({}, {.retain_graph = true});
  z.backward();
  EXPECT_EQ(x.grad().item(), 180);
}

TEST(EarlyAccumulation, ABackwardThatThrowsHasChangedOnlyEarlyLeaves) {
  const Tensor x = leaf(2), early_leaf = leaf(3), late = leaf(5);
  const EarlyAccumulation early({early_leaf});
  const Tensor y = x * 2;
  y.register_hook([](const Tensor&) -> Tensor { throw Error("the hook failed"); });
  const Tensor z = y * early_leaf * late;
  expect_error([&] { z.backward(); }, "the hook failed");
  EXPECT_EQ(early_leaf.grad().item(), 20);
  EXPECT_FALSE(late.grad().defined() || x.grad().defined());
}

TEST(EarlyAccumulation, RefusesOtherTensors) {
  const Tensor x = leaf(1), y = x * 2;
  expect_error([&] { EarlyAccumulation({x, y}); }, "expected leaves that require gradients, but tensor 1 is not one");
  expect_error([&] { EarlyAccumulation({Tensor{}}); }, "tensor 0 is not one");
  expect_error([&] { EarlyAccumulation({scalar(1)}); }, "tensor 0 is not one");
  expect_error(
      [&] {
        EarlyAccumulation({x, x});
      },
      "tensor 1, float64 [], is already in an EarlyAccumulation, or was given twice");
  const EarlyAccumulation one({x});
  expect_error([&] { EarlyAccumulation({leaf(3), x}); }, "tensor 1, float64 [], is already in an EarlyAccumulation");
  EXPECT_EQ(EarlyAccumulation::leaves()->size(), 1u);
  const EarlyAccumulation none(Tensors{});
}

// Random graphs with leaves that are used several times, inside and outside of checkpoints. Expects the same bits as
// without EarlyAccumulation, and that each leaf is accumulated once, with its final gradient.
TEST(EarlyAccumulation, SameBitsInRandomGraphs) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    Tensors leaves;
    manual_seed(seed);
    for (int i = 0; i < 6; ++i) {
      leaves.push_back(randn({3}).requires_grad_());
    }
    const auto loss_of = [&](unsigned graph) {
      std::mt19937 choose(graph);
      Tensors values = leaves;
      const auto any = [&]() -> const Tensor& { return values[choose() % values.size()]; };
      for (int i = 0; i < 12; ++i) {
        const Tensor a = any(), b = any(), w = leaves[choose() % leaves.size()];
        switch (choose() % 4) {
          case 0: values.push_back(a * b + w); break;
          case 1: values.push_back(sin(a) + b); break;
          case 2:
            values.push_back(checkpoint([w](const Tensor& x, const Tensor& y) { return sin(x * w) * y; }, a, b));
            break;
          default:
            values.push_back(checkpoint(
                [w](const Tensor& x) { return checkpoint([w](const Tensor& z) { return cos(z) * w; }, x * w) + x; },
                a));
        }
      }
      return sum(values.back() * any()) + sum(any());
    };
    std::vector<std::vector<float>> results[2];
    const unsigned graph = random();
    for (const bool on : {false, true}) {
      std::optional<EarlyAccumulation> early;
      if (on) {
        early.emplace(Tensors(leaves.begin(), leaves.begin() + 4));
      }
      std::vector<int> calls(leaves.size());
      std::vector<std::vector<float>> seen(leaves.size());
      std::vector<autograd::HookHandle> handles;
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        leaves[i].set_grad({});
        handles.push_back(leaves[i].register_post_accumulate_grad_hook([&, i](const Tensor& x) {
          ++calls[i];
          seen[i] = to_vector<float>(x.grad());
        }));
      }
      for (int pass = 1; pass <= 2; ++pass) {  // the second adds to existing gradients
        loss_of(graph).backward();
        for (std::size_t i = 0; i < leaves.size(); ++i) {
          results[on].push_back(leaves[i].grad().defined() ? to_vector<float>(leaves[i].grad()) : std::vector<float>{});
          EXPECT_EQ(calls[i], leaves[i].grad().defined() ? pass : 0) << seed;
          EXPECT_EQ(seen[i], results[on].back()) << seed;
        }
      }
      for (autograd::HookHandle& handle : handles) {
        handle.remove();
      }
    }
    EXPECT_EQ(results[0], results[1]) << seed;
  }
}

}  // namespace
