#include <memory>
#include <string>
#include <thread>

#include "tests/support.h"
#include <mica/autograd/anomaly.h>
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/autograd/missing_gradients.h>
#include <mica/autograd/node.h>
#include <mica/core/rng.h>
#include <mica/nn/transformer.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::checkpoint;

namespace {

using Values = std::vector<std::vector<double>>;

// Calls f(x) directly or through checkpoint.
template <class F>
auto maybe_checkpoint(bool on, const F& f, const Tensor& x) {
  return on ? checkpoint(f, x) : f(x);
}

// Expects the same bits without and with checkpoint: of the loss, of the gradients of all leaves, and of the next
// random number after forward and after backward.
template <class Loss>
void expect_same_bits(const Loss& loss_with, const Tensors& leaves) {
  Values results[2];
  for (const bool on : {false, true}) {
    manual_seed(7);
    for (const Tensor& leaf : leaves) {
      leaf.set_grad({});
    }
    const Tensor loss = loss_with(on);
    results[on].push_back(to_vector<double>(loss));
    results[on].push_back(to_vector<double>(rand({2})));
    loss.backward();
    results[on].push_back(to_vector<double>(rand({2})));
    for (const Tensor& leaf : leaves) {
      ASSERT_TRUE(leaf.grad().defined());
      results[on].push_back(to_vector<double>(leaf.grad()));
    }
  }
  EXPECT_EQ(results[0], results[1]);
}

// Recomputed ops belong to the module that called checkpoint(), wherever backward is called.
TEST(Checkpoint, RecomputedOpsKeepTheirModule) {
  const auto module = std::make_shared<autograd::ModuleName>();
  module->name = "block";
  const auto other = std::make_shared<autograd::ModuleName>();
  std::vector<std::shared_ptr<autograd::ModuleName>> seen;
  const auto f = [&](const Tensor& x) {
    const Tensor y = exp(x);
    seen.push_back(y.grad_fn() == nullptr ? nullptr : y.grad_fn()->module);
    return y;
  };
  const Tensor x = ones({2}).requires_grad_();
  Tensor y;
  {
    const autograd::CurrentModule guard(module);
    y = checkpoint(f, x);
  }
  {
    const autograd::CurrentModule guard(other);
    sum(y).backward();
    EXPECT_EQ(autograd::current_module(), other);
  }
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[1], module);
  EXPECT_EQ(y.grad_fn()->module, module);
}

TEST(Checkpoint, SameBitsForABlockWithDropout) {
  for (const Device device : test_devices()) {
    manual_seed(1);
    nn::TransformerBlock first{16, {.heads = 2, .dropout = 0.3}}, second{16, {.heads = 2, .dropout = 0.3}};
    first.to(device);
    second.to(device);
    const Tensor x = randn({2, 5, 16}).to(device).detach().requires_grad_();
    Tensors leaves{x};
    for (const nn::TransformerBlock* block : {&first, &second}) {
      for (const Tensor& parameter : block->parameters()) {
        leaves.push_back(parameter);
      }
    }
    expect_same_bits(
        [&](bool on) {
          const Tensor y = maybe_checkpoint(
              on, [&](const Tensor& in) { return first(in); }, x);
          // Uses the first block again, so that its gradients are sums over checkpoints.
          const Tensor z = maybe_checkpoint(
              on, [&](const Tensor& in) { return first(second(in)); }, y);
          return sum(z * tanh(z));
        },
        leaves);
  }
}

TEST(Checkpoint, SameBitsWhereSumsHaveManyTerms) {
  // float32 sums of terms of very different magnitude depend on their order. w is used before, inside and after.
  manual_seed(2);
  const Tensor x = randn({64}).requires_grad_(), w = randn({64}).requires_grad_();
  expect_same_bits(
      [&](bool on) {
        const Tensor before = w * x * 1e3;
        const Tensor inside = maybe_checkpoint(
            on, [&](const Tensor& in) { return in * w * 1e-3 + exp(w) * in + w; }, before);
        return sum(inside * w + inside * x + before);
      },
      {x, w});
}

TEST(Checkpoint, Nested) {
  manual_seed(3);
  const Tensor x = randn({32}).requires_grad_(), w = randn({32}).requires_grad_();
  expect_same_bits(
      [&](bool on) {
        const auto inner = [=](const Tensor& in) { return dropout(tanh(in * w), 0.5); };
        const auto middle = [=](const Tensor& in) {
          const Tensor y = maybe_checkpoint(on, inner, dropout(in, 0.2) + w);
          return maybe_checkpoint(on, inner, y) * in;
        };
        return sum(maybe_checkpoint(on, middle, maybe_checkpoint(on, middle, x)));
      },
      {x, w});
}

TEST(Checkpoint, RecomputesExactlyOnce) {
  const Tensor x = randn({3}).requires_grad_();
  int calls = 0, hooks = 0;
  x.register_hook([&](const Tensor& g) {
    ++hooks;
    return g;
  });
  const Tensor y = checkpoint(
      [&](const Tensor& in) {
        ++calls;
        return exp(in) * in;
      },
      x);
  EXPECT_EQ(calls, 1);
  const Tensor loss = sum(y * y + y);
  loss.backward({}, {.retain_graph = true});
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(hooks, 1);
  loss.backward();
  EXPECT_EQ(calls, 3);
  expect_error([&] { loss.backward(); }, "backward has already run through this op");
}

TEST(Checkpoint, KeepsNothingButTheInputs) {
  // The bytes of the storages created by the function that are still alive.
  std::vector<std::weak_ptr<Storage>> made;
  const auto live_bytes = [&] {
    std::size_t bytes = 0;
    for (const auto& storage : made) {
      if (const auto alive = storage.lock()) {
        bytes += alive->bytes();
      }
    }
    return bytes;
  };
  const auto chain = [&made](const Tensor& in) {
    Tensor y = in;
    for (int i = 0; i < 10; ++i) {
      y = exp(tanh(y));
      made.push_back(y.handle()->storage);
    }
    return y;
  };
  const Tensor x = randn({1000}).requires_grad_();
  {
    const Tensor y = chain(x);
    EXPECT_EQ(live_bytes(), 10 * y.bytes());
  }
  EXPECT_EQ(live_bytes(), 0u);
  made.clear();
  {
    const Tensor y = checkpoint(chain, x);
    EXPECT_EQ(live_bytes(), y.bytes());  // the result itself
    sum(y).backward();
    EXPECT_EQ(made.size(), 20u);
    EXPECT_EQ(live_bytes(), y.bytes());
  }
  EXPECT_EQ(live_bytes(), 0u);
  made.clear();
  // With several checkpoints, backward holds the tensors of one at a time.
  std::size_t most = 0;
  Tensor y = x;
  for (int i = 0; i < 4; ++i) {
    y = checkpoint(chain, y);
    y.register_hook([&](const Tensor&) {
      most = std::max(most, live_bytes());
      return Tensor{};
    });
  }
  sum(y).backward();
  EXPECT_LT(most, 2 * 10 * x.bytes());
}

TEST(Checkpoint, ManyInputsAndOutputsOfEveryKind) {
  const Tensor a = randn({4}, float64).requires_grad_(), b = randn({4}, float64), c = randint(0, 2, {4});
  const auto f = [](const Tensor& p, const Tensors& more, double factor, const std::string& name) {
    EXPECT_EQ(name, "n");
    return std::array<Tensor, 4>{p * more[0] * factor, more[1], more[0] + 1, Tensor{}};
  };
  const auto [product, same, constant, none] = checkpoint(f, a, Tensors{b, c}, 3.0, std::string("n"));
  EXPECT_TRUE(product.requires_grad());
  EXPECT_TRUE(same.is_same(c));
  EXPECT_FALSE(constant.requires_grad());
  EXPECT_FALSE(none.defined());
  sum(product).backward();
  expect_close(a.grad(), b * 3, 1e-12, 0);

  const Tensors list = checkpoint([](const Tensors& in) { return Tensors{in[0] * in[1], exp(in[1])}; }, Tensors{a, b});
  ASSERT_EQ(list.size(), 2u);
  a.set_grad({});
  sum(list[0]).backward();  // no gradient for the other output
  expect_close(a.grad(), b, 1e-12, 0);
}

TEST(Checkpoint, ReturnsAnInput) {
  const Tensor x = randn({3}, float64).requires_grad_();
  const auto f = [](const Tensor& in) { return Tensors{in, in * 2, in}; };
  const Tensors y = checkpoint(f, x * 1);
  sum(y[0] * 3 + y[1] * y[2]).backward();
  expect_close(x.grad(), x.detach() * 4 + 3, 1e-12, 0);
  x.set_grad({});
  const Tensors twice = checkpoint(
      [](const Tensor& in) {
        const Tensor z = in * in;
        return Tensors{z, z};
      },
      x);
  sum(twice[0] * 3 + twice[1]).backward();
  expect_close(x.grad(), x.detach() * 8, 1e-12, 0);
}

TEST(Checkpoint, OnlyCapturedTensorsNeedGradients) {
  const Tensor w = randn({3}, float64).requires_grad_(), x = randn({3}, float64);
  const Tensor y = checkpoint([&](const Tensor& in) { return exp(w) * in; }, x);
  EXPECT_TRUE(y.requires_grad());
  expect_close(autograd::grad({sum(y)}, {w}, {}, {.retain_graph = true})[0], exp(w.detach()) * x, 1e-12, 0);
  const Tensor loss = sum(y);
  loss.backward();
  expect_close(w.grad(), exp(w.detach()) * x, 1e-12, 0);
  EXPECT_TRUE(autograd::explain_missing_gradients(loss, {{"w", w}}).empty());
}

TEST(Checkpoint, IsAPlainCallWithoutRecording) {
  const Tensor w = randn({3}).requires_grad_();
  int calls = 0;
  const auto f = [&](const Tensor& in) {
    ++calls;
    return in * w;
  };
  const Tensor quiet = no_grad([&] { return checkpoint(f, ones({3})); });
  EXPECT_FALSE(quiet.requires_grad());
  const Tensor constant = checkpoint([](const Tensor& in) { return in * 2; }, ones({3}));
  EXPECT_FALSE(constant.requires_grad());
  const Tensor inside = checkpoint([&](const Tensor& in) { return no_grad([&] { return f(in); }); }, ones({3}));
  EXPECT_FALSE(inside.requires_grad());
  EXPECT_EQ(calls, 2);
}

TEST(Checkpoint, GradientsOfEveryOrder) {
  manual_seed(4);
  const Tensor w = randn({2, 3}, float64);
  const auto f = [](const Tensor& a, const Tensor& b) {
    return checkpoint([](const Tensor& p, const Tensor& q) { return matmul(tanh(p * q), p); }, a, b);
  };
  EXPECT_TRUE(autograd::gradcheck(f, {randn({3, 3}, float64), randn({3, 3}, float64)}));
  EXPECT_TRUE(autograd::gradgradcheck(f, {randn({3, 3}, float64), randn({3, 3}, float64)}));
}

TEST(Checkpoint, GradAroundAndThroughSeveral) {
  manual_seed(5);
  const Tensor x = randn({4}, float64).requires_grad_(), w = randn({4}, float64).requires_grad_();
  const auto f = [&](const Tensor& in) {
    return checkpoint([&](const Tensor& p) { return checkpoint([&](const Tensor& q) { return tanh(q * w); }, p) + p; },
                      in);
  };
  const auto plain = [&](const Tensor& in) { return tanh(in * w) + in; };
  const auto gradients_of = [&](const auto& g) {
    const Tensor middle = g(g(x));
    return autograd::grad({sum(g(g(middle)))}, {middle, w, x});
  };
  const Tensors got = gradients_of(f), expected = gradients_of(plain);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(to_vector<double>(got[i]), to_vector<double>(expected[i])) << i;
  }
}

TEST(Checkpoint, OtherThreadsMayDrawRandomNumbers) {
  manual_seed(6);
  const Tensor x = ones({1000}).requires_grad_();
  const Tensor y = checkpoint(
      [](const Tensor& in) {
        const Tensor once = dropout(in, 0.5);
        std::thread([] { rand({3}); }).join();
        return dropout(once, 0.5);
      },
      x);
  std::thread([&] { y.backward(ones({1000})); }).join();
  // y is 4 where the element was kept, and so is its gradient: the same elements were dropped.
  EXPECT_EQ(to_vector<float>(x.grad()), to_vector<float>(y));
}

TEST(Checkpoint, SeedingInsideDoesNotAffectTheOutside) {
  manual_seed(8);
  const Tensor x = ones({10}).requires_grad_();
  const Tensor y = checkpoint(
      [](const Tensor& in) {
        manual_seed(99);
        return dropout(in, 0.5);
      },
      x);
  rand({4});
  const PhiloxKey before = rng_state();
  y.backward(ones({10}));
  EXPECT_EQ(rng_state().seed, before.seed);
  EXPECT_EQ(rng_state().offset, before.offset);
  EXPECT_EQ(to_vector<float>(x.grad()), to_vector<float>(y));
}

TEST(Checkpoint, DetectsChangesBeforeRecomputation) {
  const Tensor x = ones({3}).requires_grad_(), w = ones({3}).requires_grad_();
  const Tensor constant = ones({3});
  const auto product = [&](const Tensor& in, const Tensor& by) { return in * by * w; };
  const auto loss = [&] { return sum(checkpoint(product, x, constant)); };
  const std::string changed = "checkpoint: a tensor of shape [3] that the function used was modified in place since";
  Tensor y = loss();
  no_grad([&] { add_(w, ones({3})); });
  expect_error([&] { y.backward(); }, changed);
  y = loss();
  add_(constant, ones({3}));
  expect_error([&] { y.backward(); }, changed);
  y = loss();
  y.backward();

  int calls = 0;
  const auto sum_of = [&calls](auto f) {
    calls = 0;
    return [&calls, f](const Tensor& in) {
      ++calls;
      return f(in);
    };
  };
  const auto expect_refused = [&](const auto& f, const std::string& text) {
    const Tensor z = checkpoint(sum_of(f), x);
    expect_error([&] { z.backward(ones(z.shape())); }, text);
  };
  expect_refused([&](const Tensor& in) { return calls == 1 ? dropout(in, 0.5) : in * 1; },
                 "drew 1 random tensors, and 1 fewer when called again");
  expect_refused([&](const Tensor& in) { return calls == 1 ? in * 1 : dropout(in, 0.5); },
                 "the function drew more random tensors than the first time, which drew 0");
  expect_refused([&](const Tensor& in) { return calls == 1 ? in * 1 : sum(in); },
                 "returned float32 [3] as output 0, and float32 [] when called again");
  expect_refused([&](const Tensor& in) { return calls == 1 ? in * 1 : in.detach(); },
                 "depended on something that requires a gradient, but did not when called again");
  const Tensors list = checkpoint(
      [&](const Tensor& in) {
        return ++calls % 2 == 0 ? Tensors{in * 1} : Tensors{in * 1, in * 2};
      },
      x);
  const std::string counts =
      list.size() == 1 ? "returned 1 tensors, and 2 when called again" : "returned 2 tensors, and 1 when called again";
  expect_error([&] { list[0].backward(ones({3})); }, counts);
}

TEST(Checkpoint, ErrorsLeaveTheGraphUsable) {
  const Tensor x = ones({3}).requires_grad_();
  bool fail_now = false;
  const Tensor y = checkpoint(
      [&](const Tensor& in) {
        check(!fail_now, "the function failed");
        return dropout(in, 0.5) * 2;
      },
      x);
  fail_now = true;
  const PhiloxKey before = rng_state();
  expect_error([&] { y.backward(ones({3})); }, "the function failed");
  EXPECT_EQ(rng_state().offset, before.offset);
  EXPECT_TRUE(autograd::grad_enabled());
  expect_error([&] { checkpoint([](const Tensor& in) { return matmul(in, ones({5, 5})); }, x); }, "matmul");
  EXPECT_TRUE((x * 1).requires_grad());
  EXPECT_NE(autograd::gradient_edge(x * 1).node->name(), "an op inside a checkpoint");
  fail_now = false;
  y.backward(ones({3}));
  EXPECT_EQ(to_vector<float>(x.grad()), to_vector<float>(y));
}

TEST(Checkpoint, EscapedTensorsCannotBeDifferentiated) {
  const Tensor x = ones({3}).requires_grad_();
  Tensor leaked;
  checkpoint(
      [&](const Tensor& in) {
        leaked = in * 2;
        return leaked + 1;
      },
      x);
  EXPECT_TRUE(leaked.requires_grad());
  expect_error([&] { sum(leaked * 3).backward(); }, "was created in a checkpointed function but");
  EXPECT_FALSE(x.grad().defined());
}

TEST(Checkpoint, AnomaliesInsideAreFound) {
  const autograd::DetectAnomaly guard;
  nn::Linear layer{3, 3};
  const Tensor x = zeros({2, 3}).requires_grad_();
  const Tensor y = checkpoint([&](const Tensor& in) { return sqrt(layer(in) * 0); }, x);
  expect_error([&] { sum(y).backward(); }, "Sqrt: its backward made Inf in the gradient of input 0");
}

TEST(Checkpoint, ReturnsTheResultOfANestedCheckpoint) {
  manual_seed(9);
  const Tensor x = randn({8}).requires_grad_(), w = randn({8}).requires_grad_();
  expect_same_bits(
      [&](bool on) {
        const auto inner = [=](const Tensor& in) { return dropout(tanh(in * w), 0.5); };
        const auto outer = [=](const Tensor& in) { return maybe_checkpoint(on, inner, in * 2); };
        return sum(maybe_checkpoint(on, outer, x));
      },
      {x, w});
}

TEST(Checkpoint, NestedCheckpointsKeepNothingUntilRecomputed) {
  const Tensor x = randn({8}).requires_grad_();
  std::weak_ptr<Storage> made;
  const auto square = [](const Tensor& in) { return in * in; };
  const Tensor y = checkpoint(
      [&](const Tensor& in) {
        const Tensor between = exp(in);
        made = between.handle()->storage;
        return checkpoint(square, between) + in;
      },
      x);
  EXPECT_TRUE(made.expired());
  sum(y).backward();
  expect_close(x.grad(), exp(x.detach() * 2) * 2 + 1, 1e-6, 1e-6);
}

TEST(Checkpoint, WritesInPlaceInside) {
  manual_seed(10);
  const Tensor x = randn({4, 3}).requires_grad_(), w = randn({4, 3}).requires_grad_();
  expect_same_bits(
      [&](bool on) {
        const auto f = [=](const Tensor& in) {
          Tensor h = in * w;
          add_(h, tanh(w), 0.5);
          mul_(select(h, 0, 1), select(w, 0, 2));  // a view, so its base too
          const Tensor row = slice(h, 0, 2, 4);    // made before the next write
          mul_(h, exp(in));                        // … and read after it
          const Tensor buffer = zeros({4, 3});     // no history before it is written
          copy_(slice(buffer, 0, 0, 2), row);
          return buffer * h + dropout(h, 0.5);
        };
        return sum(maybe_checkpoint(on, f, maybe_checkpoint(on, f, x)));
      },
      {x, w});
}

TEST(Checkpoint, ReturnsWhatWasWrittenInPlace) {
  manual_seed(11);
  const Tensor x = randn({4, 3}).requires_grad_(), w = randn({3}).requires_grad_();
  expect_same_bits(
      [&](bool on) {
        const auto f = [=](const Tensor& in) {
          const Tensor h = in * 2;
          const Tensor row = select(h, 0, 1);
          mul_(h, w);
          add_(row, w);
          return Tensors{h, row, reshape(h, {12})};
        };
        const Tensors y = on ? checkpoint(f, x) : f(x);
        return sum(y[0] * y[0]) + sum(y[1] * w) + sum(exp(y[2]));
      },
      {x, w});
}

TEST(Checkpoint, ResultsCanBeWrittenInPlace) {
  const Tensor x = randn({4}, float64).requires_grad_(), w = randn({4}, float64).requires_grad_();
  const Tensor y = checkpoint([](const Tensor& in) { return exp(in); }, x);
  mul_(y, w);
  sum(y * y).backward();
  expect_close(x.grad(), exp(x.detach() * 2) * w.detach() * w.detach() * 2, 1e-12, 1e-12);
}

TEST(Checkpoint, DetectsWritesToInputs) {
  const Tensor x = ones({3}).requires_grad_(), w = ones({3}).requires_grad_();
  const std::string changed = "that the function used was modified in place by the function itself, last by add_";
  const Tensor h = x * 1;
  expect_error([&] { checkpoint([&](const Tensor& in) { return add_(in, w) * 2; }, h); }, changed);
  expect_error(
      [&] { checkpoint([&](const Tensor& in) { return add_(select(in, 0, 0), select(w, 0, 0)) * 2; }, x * 1); },
      changed);
  const Tensor captured = x * 1;
  expect_error([&] { checkpoint([&](const Tensor& in) { return add_(captured, in) * captured; }, w); }, changed);
  // A buffer that gets its history inside has no graph outside.
  const Tensor buffer = zeros({3});
  const Tensor y = checkpoint([&](const Tensor& in) { return copy_(buffer, in) * 2; }, x);
  expect_error([&] { sum(buffer).backward(); }, "was created in a checkpointed function but");
}

TEST(Checkpoint, ViewsOfInputsCannotBeWrittenInPlace) {
  const Tensor x = randn({4}, float64).requires_grad_();
  const Tensor in = x * 1;
  const Tensor y = checkpoint([](const Tensor& p) { return reshape(p, {2, 2}); }, in);
  expect_error([&] { mul_(y, 2); }, "is a view that Checkpoint returned");
  const auto two = checkpoint(
      [](const Tensor& p) {
        const Tensor z = exp(p);
        return Tensors{z, reshape(z, {2, 2})};
      },
      in);
  expect_error([&] { mul_(two[1], 2); }, "is a view that Checkpoint returned");
  mul_(two[0], 2);
  expect_error([&] { sum(two[1]).backward(); }, "Checkpoint returned a view of shape [2, 2] of a tensor that mul_ has");
}

TEST(Checkpoint, AViewThatIsOutOfDateIsReadInside) {
  // The view is re-derived when the function uses it, and is used outside, too.
  const Tensor x = randn({4}, float64).requires_grad_(), w = randn({4}, float64).requires_grad_();
  const Tensor base = x * 1;
  const Tensor view = slice(base, 0, 0, 2);
  mul_(base, w);
  int calls = 0;
  const Tensor y = checkpoint([&](const Tensor& in) { return select(in, 0, 0) * view; }, x);
  view.register_hook([&](const Tensor&) {
    ++calls;
    return Tensor{};
  });
  sum(y * view).backward();
  EXPECT_EQ(calls, 1);
  const Tensor xs = slice(x.detach(), 0, 0, 2), ws = slice(w.detach(), 0, 0, 2), first = select(x.detach(), 0, 0);
  expect_close(slice(w.grad(), 0, 0, 2), first * xs * xs * ws * 2, 1e-12, 1e-12);
}

TEST(Checkpoint, WritingAnInputLaterMakesNoCycle) {
  std::weak_ptr<Storage> storage;
  {
    const Tensor x = randn({4}).requires_grad_();
    const Tensor in = x * 1;
    storage = in.handle()->storage;
    const Tensor y = checkpoint([](const Tensor& p) { return exp(p); }, in);
    add_(in, y);
    expect_error([&] { sum(in).backward(); }, "was modified in place since, last by add_");
  }
  EXPECT_TRUE(storage.expired());
}

TEST(Checkpoint, HooksOfEveryKindRunOnce) {
  const Tensor x = full({2}, 3, float64).requires_grad_(), w = full({2}, 5, float64).requires_grad_();
  const Tensor in = x * 1;
  std::vector<std::string> calls;
  const auto says = [&](std::string name, double factor) {
    return [&calls, name, factor](const Tensor& g) {
      calls.push_back(name);
      return g * factor;
    };
  };
  in.register_hook(says("input", 2));
  w.register_hook(says("weight", 3));
  w.register_post_accumulate_grad_hook([&](const Tensor& leaf) {
    calls.push_back("weight grown");
    EXPECT_TRUE(leaf.is_same(w));
  });
  const Tensor y = checkpoint(
      [&](const Tensor& p) {
        const Tensor h = p * w;
        h.register_hook(says("inside", 10));
        h.grad_fn()->register_prehook([&](const Tensors& gradients) {
          calls.push_back("before Mul");
          return gradients;
        });
        return h * h;
      },
      in);
  y.register_hook(says("result", 7));
  y.grad_fn()->register_prehook([&](const Tensors& gradients) {
    calls.push_back("before Checkpoint");
    return Tensors{gradients[0] * 11};
  });
  sum(y).backward();
  EXPECT_EQ(calls, (std::vector<std::string>{"result", "before Checkpoint", "inside", "before Mul", "input", "weight",
                                             "weight grown"}));
  const double at_h = 7 * 11 * 2 * 15 * 10;
  expect_close(x.grad(), full({2}, at_h * 5 * 2, float64), 1e-12, 1e-12);
  expect_close(w.grad(), full({2}, at_h * 3 * 3, float64), 1e-12, 1e-12);
  expect_error([&] { y.grad_fn()->register_hook([](const Tensors&, const Tensors&) { return Tensors{}; }); },
               "Checkpoint: register_hook is for ops that return the gradients of their inputs");
}

TEST(Checkpoint, BackwardInInferenceMode) {
  const Tensor x = randn({3}).requires_grad_();
  const Tensor y = checkpoint([](const Tensor& in) { return exp(in) * in; }, x);
  {
    const autograd::InferenceMode guard;
    sum(y.detach());
    y.backward(ones({3}));
    EXPECT_FALSE(checkpoint([](const Tensor& in) { return exp(in); }, x).requires_grad());
  }
  EXPECT_FALSE(x.grad().is_inference());
  expect_close(x.grad(), exp(x.detach()) * (x.detach() + 1), 1e-6, 1e-6);
}

}  // namespace
