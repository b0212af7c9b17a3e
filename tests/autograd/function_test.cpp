#include <thread>

#include "tests/depth.h"
#include "tests/support.h"
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Context;

namespace {

// Ops that use only core, so that these tests depend on autograd alone.

Tensor sum_of(const Tensor& a, const Tensor& b) {
  const Tensor y = empty_like(a);
  copy_into(y, a);
  add_into(y, b);
  return y;
}

struct Plus {
  Tensor forward(Context&, const Tensor& a, const Tensor& b) const { return sum_of(a, b); }
  Tensors backward(Context&, const Tensor& dy) const { return {dy, dy}; }
};

Tensor plus(const Tensor& a, const Tensor& b) { return autograd::apply(Plus{}, a, b); }

// y = x², from loops over float64 on the CPU; keeps its input.
struct Square {
  Tensor forward(Context& ctx, const Tensor& x) const {
    std::vector<double> values = to_vector<double>(x);
    for (double& v : values) {
      v *= v;
    }
    ctx.save_for_backward(x);
    return from_data(values, x.shape());
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [x] = ctx.saved<1>();
    std::vector<double> values = to_vector<double>(x);
    const std::vector<double> gradient = to_vector<double>(dy);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] *= 2 * gradient[i];
    }
    return from_data(values, x.shape());
  }
};

Tensor square(const Tensor& x) { return autograd::apply(Square{}, x); }

// y = eˣ; keeps its output.
struct Exp {
  Tensor forward(Context& ctx, const Tensor& x) const {
    std::vector<double> values = to_vector<double>(x);
    for (double& v : values) {
      v = std::exp(v);
    }
    const Tensor y = from_data(values, x.shape());
    ctx.save_for_backward(y);
    return y;
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [y] = ctx.saved<1>();
    EXPECT_TRUE(y.requires_grad()) << "a saved output keeps its place in the graph";
    std::vector<double> values = to_vector<double>(y);
    const std::vector<double> gradient = to_vector<double>(dy);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] *= gradient[i];
    }
    return from_data(values, y.shape());
  }
};

TEST(Autograd, Gradcheck) {
  const Tensor x = randn({3, 4}, float64);
  EXPECT_TRUE(autograd::gradcheck(square, {x}));
  EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return autograd::apply(Exp{}, a); }, {x}));
  EXPECT_TRUE(autograd::gradcheck(plus, {x, randn({3, 4}, float64)}));
}

TEST(Autograd, TensorUsedSeveralTimes) {
  const Tensor x = randn({3, 4}, float64);
  EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return plus(square(a), plus(a, plus(a, a))); }, {x}));
}

TEST(Autograd, DiamondRunsEachOpOnce) {
  // There are 2²⁰ paths: running the shared op's backward once per path would double the gradient at every level.
  Tensor x = scalar(1).requires_grad_();
  Tensor y = x;
  for (int level = 0; level < 20; ++level) {
    y = plus(y, y);
  }
  y.backward();
  EXPECT_EQ(x.grad().item(), 1 << 20);
}

TEST(Autograd, LongChainRunsAndIsDestroyed) {
  const Tensor x = ones({1}).requires_grad_();
  const Tensor one = ones({1});
  {
    Tensor y = x;
    for (int i = 0; i < kLongChain; ++i) {
      y = plus(y, one);
    }
    EXPECT_EQ(y.item(), kLongChain + 1);
    y.backward();
  }
  EXPECT_EQ(x.grad().item(), 1);
  Tensor never_run = x;
  for (int i = 0; i < kLongChain; ++i) {
    never_run = plus(never_run, one);
  }
}

TEST(Autograd, SavedInputsChainWithoutOverflow) {
  // Each op also refers to the previous op through its saved tensor.
  const Tensor x = scalar(1).requires_grad_();
  auto of_the_first = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = of_the_first;
  Tensor y = square(x);
  y.register_hook([of_the_first](const Tensor& g) { return g; });
  of_the_first.reset();
  for (int i = 1; i < kLongChain; ++i) {
    y = square(y);
  }
  EXPECT_EQ(y.item(), 1);
  EXPECT_FALSE(alive.expired());
  y = {};  // frees the chain, which must not recurse
  EXPECT_TRUE(alive.expired());
}

TEST(Autograd, OpWithManyInputs) {
  struct Total {
    Tensor forward(Context& ctx, const Tensors& terms) const {
      (void)ctx;
      Tensor y = zeros({}, float64);
      for (const Tensor& term : terms) {
        add_into(y, term);
      }
      return y;
    }
    Tensors backward(Context& ctx, const Tensor& dy) const {
      Tensors gradients(count);
      for (std::size_t i = 0; i < count; ++i) {
        gradients[i] = ctx.needs_grad(i) ? dy : Tensor{};
      }
      return gradients;
    }
    std::size_t count;
  };
  const Tensor x = scalar(2).requires_grad_();
  Tensors terms(100'000, x);
  terms[7] = scalar(1);
  autograd::apply(Total{terms.size()}, terms).backward();
  EXPECT_EQ(x.grad().item(), 99'999);
}

TEST(Autograd, LeavesAccumulate) {
  const Tensor x = from_data<double>({3.0}).requires_grad_();
  square(x).backward();
  const Tensor grad = x.grad();
  square(x).backward();
  EXPECT_EQ(x.grad().item(), 12);
  EXPECT_EQ(grad.item(), 12) << "the grad is added to in place";
  x.set_grad({});
  EXPECT_FALSE(x.grad().defined());
  square(x).backward();
  EXPECT_EQ(x.grad().item(), 6);
  EXPECT_EQ(grad.item(), 12);
}

TEST(Autograd, GradSharesNoMemory) {
  const Tensor x = ones({2}, float64).requires_grad_();
  const Tensor y = ones({2}, float64).requires_grad_();
  const Tensor dy = from_data<double>({5, 6});
  plus(x, y).backward(dy);
  fill_data(x.grad(), 0);
  expect_close(y.grad(), {5, 6}, 0, 0);
  expect_close(dy, {5, 6}, 0, 0);
}

TEST(Autograd, BackwardTwice) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = square(x);
  y.backward({}, {.retain_graph = true});
  y.backward();
  EXPECT_EQ(x.grad().item(), 12);
  expect_error([&] { y.backward(); }, "Square: backward has already run through this op");
}

TEST(Autograd, NoGradRecordsNothing) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = no_grad([&] { return square(x); });
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(autograd::grad_enabled());
  EXPECT_THROW(no_grad([&] { fail("out"); }), Error);
  EXPECT_TRUE(autograd::grad_enabled()) << "the mode comes back after an exception";
  EXPECT_FALSE(square(scalar(3)).requires_grad());
  expect_error([&] { y.backward(); }, "does not require a gradient");
  std::thread([&] { EXPECT_TRUE(autograd::grad_enabled()); }).join();
}

TEST(Autograd, DetachCutsTheGraphAndSharesElements) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = square(x).detach();
  EXPECT_FALSE(y.requires_grad());
  const Tensor d = x.detach();
  fill_data(d, 4);
  EXPECT_EQ(x.item(), 4);
}

TEST(Autograd, SavedTensorWrittenInPlaceIsAnError) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = square(x);
  fill_data(x, 5);
  x.detach().bump_version();  // a view of it is enough
  expect_error([&] { y.backward(); }, "Square: a tensor of shape [] that it saved for backward was modified in place");
  EXPECT_FALSE(x.grad().defined());
}

TEST(Autograd, HooksSeeAndReplaceGradients) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = square(x);
  const Tensor z = plus(y, y);
  double seen = 0;
  y.register_hook([&](const Tensor& dy) {
    seen = dy.item();
    return scalar(10);
  });
  x.register_hook([](const Tensor&) { return Tensor{}; });
  z.backward();
  EXPECT_EQ(seen, 2) << "the hook sees the sum of both paths";
  EXPECT_EQ(x.grad().item(), 60);
  expect_error([] { scalar(1).register_hook([](const Tensor& g) { return g; }); }, "does not require a gradient");
}

TEST(Autograd, HooksOfLeavesSeeTheSumOfShortAndLongPaths) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = plus(square(square(x)), plus(square(x), x));  // 4 x³ + 2 x + 1
  std::vector<double> seen;
  x.register_hook([&](const Tensor& dx) {
    seen.push_back(dx.item());
    return Tensor{};
  });
  y.backward();
  EXPECT_EQ(seen, std::vector<double>{115});
  EXPECT_EQ(x.grad().item(), 115);
}

// y = x, with a backward that must not run.
struct NoWay {
  Tensor forward(Context&, const Tensor& x) const { return x.detach(); }
  Tensor backward(Context&, const Tensor&) const { throw Error("NoWay: ran"); }
};

TEST(Autograd, GradReturnsWhatBackwardAccumulates) {
  const Tensor a = from_data(std::vector<double>{2, 3}, {2}).requires_grad_();
  const Tensor b = from_data(std::vector<double>{5, 7}, {2}).requires_grad_();
  const Tensor middle = square(a);
  const Tensor y = plus(square(middle), plus(b, b));
  const Tensor dy = from_data(std::vector<double>{1, 10}, {2});
  const Tensors got = autograd::grad({y}, {b, middle, a, a, y}, {dy}, {.retain_graph = true});
  expect_close(got[0], {2, 20}, 0, 0);
  expect_close(got[1], {8, 180}, 0, 0);
  expect_close(got[2], {32, 1080}, 0, 0);
  expect_close(got[3], {32, 1080}, 0, 0);
  expect_close(got[4], {1, 10}, 0, 0);
  EXPECT_FALSE(a.grad().defined() || b.grad().defined()) << "nothing accumulates";
  // Each result has its own memory.
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NE(got[i].raw_data(), dy.raw_data());
    for (std::size_t k = 0; k < i; ++k) {
      EXPECT_NE(got[i].raw_data(), got[k].raw_data());
    }
  }
  y.backward(dy);
  expect_close(a.grad(), {32, 1080}, 0, 0);
  expect_close(b.grad(), {2, 20}, 0, 0);
}

TEST(Autograd, GradAddsOverOutputsAndTakesHooks) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = square(x);
  y.register_hook([](const Tensor& g) { return plus(g, g); });
  const Tensors got = autograd::grad({y, square(y), x}, {x}, {scalar(1), {}, scalar(100)});
  EXPECT_EQ(got.at(0).item(), 2 * (1 + 2 * 9) * 6 + 100);
}

TEST(Autograd, GradRunsOnlyThePathsToItsInputs) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor other = scalar(4).requires_grad_();
  const Tensor y = plus(square(x), autograd::apply(NoWay{}, other));
  EXPECT_EQ(autograd::grad({y}, {x}).at(0).item(), 6);
  EXPECT_FALSE(other.grad().defined());
  // The op before an input is not run either, and stays usable.
  const Tensor z = autograd::apply(NoWay{}, x);
  EXPECT_EQ(autograd::grad({square(z)}, {z}).at(0).item(), 6);
  expect_error([&] { autograd::grad({z}, {x}); }, "NoWay: ran");
}

TEST(Autograd, GradErrors) {
  const Tensor x = from_data(std::vector<double>{1, 2}, {2}).requires_grad_();
  const Tensor other = scalar(1).requires_grad_();
  const Tensor y = square(x);
  const Tensor dy = from_data(std::vector<double>{1, 1}, {2});
  expect_error([&] { autograd::grad({}, {x}); }, "grad: expected at least one output");
  expect_error([&] { autograd::grad({{}}, {x}); }, "grad: expected a defined tensor, got an undefined one");
  expect_error([&] { autograd::grad({y}, {x}); },
               "grad: a tensor of shape [2] is not a scalar and needs an explicit gradient");
  expect_error([&] { autograd::grad({y}, {x}, {dy, dy}); }, "grad: expected 1 gradients, one for each output, got 2");
  expect_error([&] { autograd::grad({y}, {x}, {scalar(1)}); }, "grad: expected a gradient of float64 [2] on cpu, got");
  expect_error([&] { autograd::grad({dy}, {x}, {dy}); }, "grad: the tensor of shape [2] does not require a gradient");
  expect_error([&] { autograd::grad({y}, {dy}, {dy}); }, "grad: input 0 of shape [2] does not require a gradient");
  expect_error([&] { autograd::grad({y}, {{}}, {dy}); }, "grad: expected a defined input 0, got an undefined one");
  expect_error(
      [&] {
        autograd::grad({y}, {x, other}, {dy}, {.retain_graph = true});
      },
      "grad: the outputs do not depend on input 1 of shape []");
  const Tensors got = autograd::grad({y}, {x, other}, {dy}, {.allow_unused = true});
  expect_close(got[0], {2, 4}, 0, 0);
  EXPECT_FALSE(got[1].defined());
  expect_error([&] { autograd::grad({y}, {x}, {dy}); }, "Square: backward has already run through this op");
}

TEST(Autograd, GradThroughALongChain) {
  const Tensor x = scalar(1).requires_grad_();
  Tensor y = x;
  for (int i = 0; i < kLongChain; ++i) {
    y = plus(y, x);
  }
  EXPECT_EQ(autograd::grad({y}, {x}).at(0).item(), kLongChain + 1);
}

// (a, b) → (a + b, a, indices), the second cut from the graph by request, the third by its dtype.
struct Several {
  std::array<Tensor, 3> forward(Context& ctx, const Tensor& a, const Tensor& b) const {
    const Tensor copy = sum_of(a, zeros_like(a));
    ctx.mark_non_differentiable(copy);
    return {sum_of(a, b), copy, zeros(a.shape(), int64)};
  }
  Tensors backward(Context&, const Tensor& dy, const Tensor& second, const Tensor& third) const {
    EXPECT_EQ(second.item(), 0) << "an output without gradient gives zeros";
    EXPECT_EQ(third.dtype(), int64);
    return {dy, dy};
  }
};

TEST(Autograd, OutputsWithoutGradient) {
  const Tensor x = scalar(3).requires_grad_();
  const auto [sum, copy, indices] = autograd::apply(Several{}, x, scalar(1));
  EXPECT_TRUE(sum.requires_grad());
  EXPECT_FALSE(copy.requires_grad());
  EXPECT_FALSE(indices.requires_grad());
  sum.backward();
  EXPECT_EQ(x.grad().item(), 1);
}

// (x) → (x, 2x): both are differentiable, but a gradient may reach only one of them.
struct Pair {
  bool materialize;
  std::array<Tensor, 2> forward(Context& ctx, const Tensor& x) const {
    ctx.set_materialize_grads(materialize);
    return {sum_of(x, zeros_like(x)), sum_of(x, x)};
  }
  Tensor backward(Context&, const Tensor& first, const Tensor& second) const {
    EXPECT_EQ(first.defined(), materialize);
    return sum_of(second, second);
  }
};

TEST(Autograd, OneOfSeveralOutputsUsed) {
  for (const bool materialize : {true, false}) {
    const Tensor x = scalar(3).requires_grad_();
    const auto [first, second] = autograd::apply(Pair{materialize}, x);
    second.backward();
    EXPECT_EQ(x.grad().item(), 2);
  }
}

TEST(Autograd, NeedsGradSkipsWork) {
  struct Ask {
    std::array<bool, 3>* seen;
    Tensor forward(Context& ctx, const Tensor& a, const Tensor& b, const Tensor& absent) const {
      *seen = {ctx.needs_grad(0), ctx.needs_grad(1), ctx.needs_grad(2)};
      EXPECT_FALSE(absent.defined());
      return sum_of(a, b);
    }
    Tensors backward(Context& ctx, const Tensor& dy) const {
      return {ctx.needs_grad(0) ? dy : Tensor{}, ctx.needs_grad(1) ? dy : Tensor{}, {}};
    }
  };
  std::array<bool, 3> seen{};
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = autograd::apply(Ask{&seen}, scalar(1), x, Tensor{});
  EXPECT_EQ(seen, (std::array<bool, 3>{false, true, false}));
  y.backward();
  EXPECT_EQ(x.grad().item(), 1);
  no_grad([&] { return autograd::apply(Ask{&seen}, scalar(1), x, Tensor{}); });
  EXPECT_EQ(seen, (std::array<bool, 3>{false, false, false}));
}

struct Wrong {
  Tensors result;
  Tensor forward(Context&, const Tensor& x) const { return sum_of(x, x); }
  Tensors backward(Context&, const Tensor&) const { return result; }
};

TEST(Autograd, WrongBackwardIsNamed) {
  const Tensor x = ones({2, 3}, float64).requires_grad_();
  const auto run = [&](Tensors result) {
    autograd::apply(Wrong{std::move(result)}, x).backward(ones({2, 3}, float64));
  };
  expect_error([&] { run({}); }, "Wrong: backward returned 0 gradients for 1 inputs");
  expect_error([&] { run({Tensor{}}); }, "Wrong: backward returned no gradient for input 0");
  expect_error(
      [&] {
        run({ones({3, 2}, float64)});
      },
      "should be float64 [2, 3] on cpu, but backward returned float64 [3, 2]");
  expect_error([&] { run({ones({2, 3}, float32)}); }, "but backward returned float32 [2, 3]");
  EXPECT_FALSE(x.grad().defined());
}

TEST(Autograd, BackwardMayNotAskForMoreThanForwardReturned) {
  struct Greedy {
    Tensor forward(Context&, const Tensor& x) const { return sum_of(x, x); }
    Tensor backward(Context&, const Tensor& dy, const Tensor&) const { return dy; }
  };
  const Tensor x = scalar(1).requires_grad_();
  expect_error([&] { autograd::apply(Greedy{}, x).backward(); },
               "Greedy: backward takes the gradients of 2 outputs, forward returned 1");
}

TEST(Autograd, ForwardMayNotReturnItsInput) {
  struct Same {
    Tensor forward(Context&, const Tensor& x) const { return x; }
    Tensor backward(Context&, const Tensor& dy) const { return dy; }
  };
  const Tensor x = scalar(1).requires_grad_();
  expect_error([&] { autograd::apply(Same{}, x); }, "Same: forward returned its input 0");
}

TEST(Autograd, InvalidRootsAndGradients) {
  const Tensor x = ones({2}, float64).requires_grad_();
  expect_error([&] { plus(x, x).backward(); }, "a tensor of shape [2] is not a scalar and needs an explicit gradient");
  expect_error([&] { plus(x, x).backward(ones({3}, float64)); },
               "expected a gradient of float64 [2] on cpu, got float64 [3]");
  expect_error([&] { plus(x, x).backward(ones({2}, float32)); }, "got float32 [2]");
  expect_error([] { Tensor{}.backward(); }, "undefined");
  expect_error([] { ones({1}, int64).requires_grad_(); }, "a tensor of int64 cannot have a gradient");
  expect_error([&] { plus(x, x).requires_grad_(); }, "expected a leaf");
  expect_error([&] { x.set_grad(ones({3}, float64)); }, "set_grad: expected float64 [2]");
}

TEST(Autograd, ExceptionInBackwardLeavesTheGraphUsable) {
  struct Fails {
    bool* now;
    Tensor forward(Context&, const Tensor& x) const { return sum_of(x, x); }
    Tensor backward(Context&, const Tensor& dy) const {
      check(!*now, "Fails: not now");
      return sum_of(dy, dy);
    }
  };
  bool now = true;
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = autograd::apply(Fails{&now}, x);
  expect_error([&] { y.backward(); }, "not now");
  EXPECT_TRUE(autograd::grad_enabled());
  now = false;
  y.backward();
  EXPECT_EQ(x.grad().item(), 2);
}

TEST(Autograd, TwoThreadsWithSeparateGraphs) {
  const auto work = [] {
    for (int round = 0; round < 20; ++round) {
      const Tensor x = scalar(1).requires_grad_();
      Tensor y = x;
      for (int i = 0; i < 500; ++i) {
        y = plus(y, x);
      }
      y.backward();
      EXPECT_EQ(x.grad().item(), 501);
    }
  };
  std::thread other(work);
  work();
  other.join();
}

TEST(Gradcheck, FindsWrongGradients) {
  struct Off {
    Tensor forward(Context& ctx, const Tensor& x) const { return Square{}.forward(ctx, x); }
    Tensor backward(Context& ctx, const Tensor& dy) const {
      const Tensor right = Square{}.backward(ctx, dy);
      right.data<double>()[2] *= 1.01;
      return right;
    }
  };
  const Tensor x = from_data<double>({1, 2, 3, 4});
  const auto off = [](const Tensor& a) { return autograd::apply(Off{}, a); };
  expect_error([&] { autograd::gradcheck(off, {x}); }, "input 0 of shape [4], element 2");
  EXPECT_FALSE(autograd::gradcheck(off, {x}, {.raise = false}));
  expect_error([&] { autograd::gradcheck(square, {ones({2})}); }, "input 0 is float32");
}

TEST(Gradcheck, FunctionsThatCannotBeCalled) {
  const Tensor x = ones({2}, float64);
  const std::function<Tensor(const Tensor&)> none;
  expect_error([&] { autograd::gradcheck(none, {x}); }, "gradcheck: expected a function to call, got an empty one");
  expect_error([&] { autograd::gradgradcheck(none, {x}); }, "expected a function to call, got an empty one");
  const auto two = [](const Tensor& a, const Tensor& b) { return sum_of(a, b); };
  expect_error([&] { autograd::gradcheck(two, {x}); }, "the function takes more than the 1 inputs given");
  expect_error([&] { autograd::checkpoint(none, x); }, "checkpoint: expected a function to call, got an empty one");
}

TEST(Gradcheck, FindsIgnoredStrides) {
  // Reads dy as if it were contiguous.
  struct Flat {
    Tensor forward(Context&, const Tensor& x) const { return sum_of(x, x); }
    Tensor backward(Context&, const Tensor& dy) const {
      const Tensor flat = as_strided(dy, dy.shape(), contiguous_strides(dy.shape()), dy.handle()->offset);
      return sum_of(flat, flat);
    }
  };
  const auto flat = [](const Tensor& a) { return autograd::apply(Flat{}, a); };
  expect_error([&] { autograd::gradcheck(flat, {randn({2, 3}, float64)}); }, "with non-contiguous inputs");
  EXPECT_TRUE(autograd::gradcheck(flat, {randn({2, 3}, float64)}, {.noncontiguous = false}));
}

TEST(Gradcheck, FindsGradientsThatChange) {
  static int calls = 0;
  struct Drifts {
    Tensor forward(Context&, const Tensor& x) const { return sum_of(x, x); }
    Tensor backward(Context&, const Tensor& dy) const {
      const Tensor result = sum_of(dy, dy);
      result.data<double>()[0] += 1e-12 * ++calls;
      return result;
    }
  };
  expect_error(
      [&] { autograd::gradcheck([](const Tensor& a) { return autograd::apply(Drifts{}, a); }, {randn({2}, float64)}); },
      "differ in their bits");
}

}  // namespace
