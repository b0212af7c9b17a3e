#include "tests/support.h"
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Context;
using autograd::gradcheck;
using autograd::gradgradcheck;

namespace {

Tensor normal(const Shape& shape) { return randn(shape, float64); }

template <class F>
void expect_differentiable(F&& f, const Tensors& inputs) {
  EXPECT_TRUE(gradcheck(f, inputs));
  EXPECT_TRUE(gradgradcheck(f, inputs));
}

// Each op on the result of an op.

TEST(InPlaceGradient, Add) {
  const auto f = [](double alpha) {
    return [alpha](const Tensor& a, const Tensor& b) { return add_(a * a, b * b, alpha) * a; };
  };
  expect_differentiable(f(1), {normal({2, 3}), normal({2, 3})});
  expect_differentiable(f(-2.5), {normal({2, 3}), normal({3})});
}

TEST(InPlaceGradient, Mul) {
  const auto f = [](const Tensor& a, const Tensor& b) { return mul_(a * a, b * b) * a; };
  expect_differentiable(f, {normal({2, 3}), normal({2, 3})});
  expect_differentiable(f, {normal({2, 3}), normal({2, 1})});
  expect_differentiable([](const Tensor& a) { return mul_(a * a, 3) * a; }, {normal({2, 3})});
}

TEST(InPlaceGradient, OnlyOneSideNeedsIt) {
  const Tensor c = normal({2, 3});
  expect_differentiable([&](const Tensor& a) { return add_(mul_(a * a, c), c) * a; }, {normal({2, 3})});
  expect_differentiable([&](const Tensor& a) { return mul_(add_(clone(c), a * a), a) * a; }, {normal({2, 3})});
}

TEST(InPlaceGradient, CopyFillAndZero) {
  expect_differentiable([](const Tensor& a, const Tensor& b) { return copy_(a * a, b * b) * a; },
                        {normal({2, 3}), normal({3})});
  expect_differentiable([](const Tensor& a, const Tensor& b) { return fill_(a * b, 2) * a + zero_(a * b) * b; },
                        {normal({2, 3}), normal({2, 3})});
  // Through another dtype: rounding has the gradient 1.
  const Tensor x = normal({4}).requires_grad_();
  const Tensor y = empty({2, 4});
  copy_(y, x);
  y.backward(full({2, 4}, 3));
  expect_close(x.grad(), {6, 6, 6, 6}, 0, 0);
  EXPECT_EQ(x.grad().dtype(), float64);
}

TEST(InPlaceGradient, OperandsThatOverlap) {
  expect_differentiable(
      [](const Tensor& a) {
        const Tensor y = a * a;
        return add_(mul_(y, y), y);
      },
      {normal({3})});
  expect_differentiable(
      [](const Tensor& a) {
        const Tensor y = a * a;
        mul_(y, transpose(y, 0, 1));
        return add_(y, select(y, 0, 1)) * a;
      },
      {normal({3, 3})});
}

TEST(InPlaceGradient, SeveralInARow) {
  expect_differentiable(
      [](const Tensor& a, const Tensor& b) {
        const Tensor y = a + b;
        for (int i = 0; i < 3; ++i) {
          mul_(add_(y, a), b);
        }
        return y;
      },
      {normal({2, 2}), normal({2, 2})});
}

TEST(InPlaceGradient, AllHandlesSeeTheNewHistory) {
  const Tensor x = full({}, 3, float64).requires_grad_();
  const Tensor y = x * 2;
  const Tensor same = y;
  const Tensor kept = y * 5;  // from the old value
  mul_(y, 10);
  EXPECT_EQ(same.grad_fn()->name(), "Scale_");
  EXPECT_EQ(autograd::grad({same}, {x}, {}, {.retain_graph = true}).at(0).item(), 20);
  EXPECT_EQ(autograd::grad({kept}, {x}, {}, {.retain_graph = true}).at(0).item(), 10);
}

TEST(InPlaceGradient, ATensorWithoutHistoryGetsOne) {
  const Tensor x = normal({3}).requires_grad_();
  const Tensor sums = zeros({3}, float64);
  EXPECT_FALSE(sums.requires_grad());
  add_(sums, x);
  add_(sums, x);
  EXPECT_TRUE(sums.requires_grad());
  EXPECT_FALSE(sums.is_leaf());
  sum(sums).backward();
  expect_close(x.grad(), {2, 2, 2}, 0, 0);
}

TEST(InPlaceGradient, HooksStayWithTheValueTheyWereRegisteredFor) {
  const Tensor x = full({}, 3, float64).requires_grad_();
  const Tensor y = x * 2;
  std::vector<double> seen;
  const auto see = [&](const Tensor& g) {
    seen.push_back(g.item());
    return Tensor{};
  };
  y.register_hook(see);
  mul_(y, 10);
  y.register_hook(see);
  y.backward();
  EXPECT_EQ(seen, (std::vector<double>{1, 10}));
}

TEST(InPlaceGradient, NothingIsRecordedInNoGrad) {
  const Tensor x = normal({3}).requires_grad_();
  const Tensor y = x + 1;
  const auto history = y.grad_fn();
  no_grad([&] { mul_(y, 2); });
  EXPECT_EQ(y.grad_fn(), history);
  const Tensor c = zeros({3}, float64);
  no_grad([&] { add_(c, x); });
  EXPECT_FALSE(c.requires_grad());
}

// Views: a write to one also writes its base and the base's other views.

TEST(InPlaceViews, WritingAViewReachesItsBase) {
  const auto f = [](const Tensor& a, const Tensor& b) {
    const Tensor y = a * a;
    const Tensor row = select(y, 0, 1);
    mul_(row, b);
    return y * 2 + row;
  };
  expect_differentiable(f, {normal({2, 3}), normal({3})});
}

TEST(InPlaceViews, WritingTheBaseReachesItsViews) {
  const auto f = [](const Tensor& a, const Tensor& b) {
    const Tensor y = a * a;
    const Tensor turned = transpose(y, 0, 1);
    const Tensor spread = expand(slice(y, 1, 0, 1), {2, 2, 3});
    mul_(y, b);
    return matmul(turned, y) + sum(spread * b, {0, 1});
  };
  expect_differentiable(f, {normal({2, 3}), normal({2, 3})});
}

TEST(InPlaceViews, OneViewReachesAnother) {
  const auto f = [](const Tensor& a, const Tensor& b) {
    const Tensor y = a * a;
    const Tensor flat = view(y, {6});
    const Tensor turned = transpose(y, 0, 1);
    add_(slice(turned, 0, 0, 3, 2), b);  // every other column
    mul_(slice(flat, 0, 1, 5), 3);
    zero_(select(select(y, 0, 1), 0, 2));
    return flat * flat;
  };
  expect_differentiable(f, {normal({2, 3}), normal({2, 2})});
}

TEST(InPlaceViews, FillingABuffer) {
  const Tensor x = normal({3}).requires_grad_();
  const Tensor buffer = zeros({2, 3}, float64);
  const Tensor first = select(buffer, 0, 0);  // views, before anything requires a gradient
  const Tensor second = select(buffer, 0, 1);
  copy_(first, x * 2);
  EXPECT_TRUE(buffer.requires_grad());
  EXPECT_TRUE(second.requires_grad()) << "as the buffer does";
  copy_(second, x * x);
  sum(buffer * from_data(std::vector<double>{1, 1, 1, 10, 10, 10}, {2, 3})).backward({}, {.retain_graph = true});
  std::vector<double> expected = to_vector<double>(x);
  for (double& v : expected) {
    v = 2 + 20 * v;
  }
  expect_close(x.grad(), expected, 1e-12, 0);
  expect_close(autograd::grad({first}, {x}, {ones({3}, float64)}).at(0), {2, 2, 2}, 0, 0);
}

TEST(InPlaceViews, ABaseWithGaps) {
  const auto f = [](const Tensor& a, const Tensor& b) {
    const Tensor base = add_(transpose(zeros({3, 2}, float64), 0, 1).detach(), a);  // column by column
    const Tensor part = slice(base, 1, 1, 3);
    mul_(part, b);
    return base + unsqueeze(select(part, 1, 0), 1);
  };
  expect_differentiable(f, {normal({2, 3}), normal({2, 2})});
}

TEST(InPlaceViews, EmptyOnes) {
  const Tensor x = normal({0, 3}).requires_grad_();
  const Tensor y = x * 2;
  const Tensor part = slice(y, 1, 1, 2);
  add_(part, 1 + part);
  sum(y).backward();
  EXPECT_EQ(x.grad().shape(), (Shape{0, 3}));
}

TEST(InPlaceViews, AWriteInNoGradIsNotPassedOn) {
  const Tensor x = normal({4}).requires_grad_();
  const Tensor y = x * 2;
  const Tensor part = slice(y, 0, 0, 2);
  no_grad([&] { fill_(part, 7); });
  EXPECT_EQ(y.grad_fn()->name(), "MulNumber");
  EXPECT_EQ(part.grad_fn()->name(), "Slice");
}

TEST(InPlaceViews, DetachedViewsHaveNoHistory) {
  const Tensor x = normal({4}).requires_grad_();
  const Tensor y = x * 2;
  const Tensor detached = slice(y.detach(), 0, 0, 2);
  const Tensor quiet = no_grad([&] { return slice(y, 0, 0, 2); });
  mul_(y, 3);
  EXPECT_FALSE(detached.requires_grad());
  EXPECT_FALSE(quiet.requires_grad());
  expect_close(detached, quiet, 0, 0);
  add_(detached, slice(x, 0, 0, 2));
  EXPECT_TRUE(detached.requires_grad());
  EXPECT_EQ(y.grad_fn()->name(), "Scale_");
}

// Errors and their messages.

TEST(InPlaceErrors, LeavesThatRequireAGradient) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor y = ones({2});
  const std::string message = "_: the target of shape [2] is a leaf that requires a gradient";
  expect_error([&] { fill_(x, 0); }, "fill" + message);
  expect_error([&] { zero_(x); }, "zero" + message);
  expect_error([&] { copy_(x, y); }, "copy" + message);
  expect_error([&] { add_(x, y); }, "add" + message);
  expect_error([&] { mul_(x, y); }, "mul" + message);
  expect_error([&] { mul_(x, 2); }, "mul" + message);
  expect_error([&] { zero_(slice(x, 0, 0, 1)); },
               "zero_: the target of shape [1] is a view of a leaf that requires a gradient");
  EXPECT_EQ(x.version(), 0u);
  expect_close(x, {1, 1}, 0, 0);
  no_grad([&] { zero_(slice(x, 0, 0, 1)); });
  expect_close(x, {0, 1}, 0, 0);
  EXPECT_TRUE(x.is_leaf());
}

TEST(InPlaceErrors, ALeafThatIsAViewOfWhatIsWritten) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor buffer = zeros({2});
  const Tensor part = slice(buffer, 0, 0, 1).requires_grad_();
  add_(buffer, x);
  expect_error([&] { part * 2; },
               "a leaf of shape [1] that requires a gradient is a view of a tensor that add_ wrote in place");
}

TEST(InPlaceErrors, ASavedTensorNamesBothOps) {
  const Tensor x = ones({2}).requires_grad_();
  const auto message = [](const std::string& saver, const std::string& writer) {
    return saver + ": a tensor of shape [2] that it saved for backward was modified in place since, last by " + writer;
  };
  const Tensor weight = ones({2});
  const Tensor y = x * weight;
  mul_(weight, 2);
  expect_error([&] { sum(y).backward(); }, message("Mul", "mul_"));
  const Tensor z = exp(x);  // saves its output
  add_(z, x);
  expect_error([&] { sum(z).backward(); }, message("Exp", "add_"));
  const Tensor h = x + 0;
  const Tensor square = h * h;
  zero_(slice(h, 0, 0, 1));  // through a view
  expect_error([&] { sum(square).backward(); }, message("Mul", "zero_"));
  const Tensor mine = x * weight;
  weight.data<float>()[0] = 3;
  weight.bump_version();
  expect_error([&] { sum(mine).backward(); }, message("Mul", "bump_version"));
  const Tensor step = x * x;
  optim::SGD optimizer({x}, {.lr = 1});
  x.set_grad(ones({2}));
  optimizer.step();
  expect_error([&] { sum(step).backward(); }, message("Mul", "an optimizer's step"));
}

TEST(InPlaceErrors, TensorsThatBackwardDoesNotNeedMayBeWritten) {
  const Tensor x = full({2}, 3, float64).requires_grad_();
  const Tensor h = x * 2;
  const Tensor y = h * full({2}, 5, float64);  // needs the constant only
  const Tensor z = h / full({2}, 2, float64);
  mul_(h, 10);
  sum(y + z + h).backward();
  expect_close(x.grad(), {31, 31}, 0, 0);
}

TEST(InPlaceErrors, IntegerTargets) {
  const Tensor x = ones({2}).requires_grad_();
  expect_error([&] { copy_(zeros({2}, int64), x); },
               "copy_: the source of shape [2] requires a gradient, which a target of int64 cannot have");
  no_grad([&] { copy_(zeros({2}, int64), x); });
}

// y = x, sharing memory, with a backward that reverses the gradient.
struct Reverse {
  Tensor forward(Context&, const Tensor& x) const { return x.detach(); }
  Tensor backward(Context&, const Tensor& dy) const { return dy * -1; }
};

TEST(InPlaceErrors, ViewsThatCustomOpsReturn) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor h = x * 2;
  const Tensor y = autograd::apply(Reverse{}, h);
  expect_error([&] { zero_(y); }, "zero_: the target of shape [2] is a view that Reverse returned");
  mul_(h, 3);
  expect_error([&] { y * 2; }, "Reverse returned a view of shape [2] of a tensor that mul_ has since written");
}

TEST(InPlaceErrors, SetDataMakesOldGraphsRaise) {
  const Tensor x = ones({2}).requires_grad_();
  const Tensor y = sum(x + 1);  // saves nothing
  x.set_data(zeros({2}, float64));
  expect_error([&] { y.backward(); },
               "set_data has replaced a leaf of float32 [2] on cpu since the graph was recorded");
  EXPECT_FALSE(x.grad().defined());
}

TEST(InPlaceErrors, SetGradDetaches) {
  const Tensor x = ones({2}).requires_grad_();
  x.set_grad(x * 2);
  EXPECT_FALSE(x.grad().requires_grad());
}

// No cycles: the graph is freed with the last handle.

TEST(InPlaceCycles, WritingSavedTensorsMakesNone) {
  const Tensor x = ones({2}).requires_grad_();
  std::weak_ptr<autograd::Node> last, base;
  {
    const Tensor y = x * 2;
    const Tensor part = slice(y, 0, 0, 1);
    const Tensor u = part * part;  // saves views of y …
    const Tensor v = y * y;        // … and y
    add_(y, v);                    // … whose history now leads to both
    mul_(part, u);
    last = part.grad_fn();
    base = y.grad_fn();
    EXPECT_FALSE(last.expired() || base.expired());
  }
  EXPECT_TRUE(last.expired());
  EXPECT_TRUE(base.expired());
}

// A view notices a write to its base at its next use, and keeps a gradient set after that write.
TEST(InPlace, AViewKeepsTheGradientItWasGivenAfterAWriteToItsBase) {
  const Tensor x = ones({3}).requires_grad_();
  const Tensor y = x * 1;
  const Tensor v = slice(y, 0, 0, 2);
  mul_(y, ones({3}));
  v.set_grad(full({2}, 5));
  ASSERT_TRUE(v.grad().defined());
  expect_close(v.grad(), {5, 5}, 0, 0);
}

}  // namespace
