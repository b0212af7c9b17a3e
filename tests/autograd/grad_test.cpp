// Gradients of gradients.

#include <cmath>

#include "tests/support.h"
#include <mica/mica.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

Tensor scalar(double value) { return full({}, value, float64); }

TEST(CreateGraph, DerivativesOfAnyOrder) {
  const Tensor x = scalar(3).requires_grad_();
  Tensor y = x * x * x * x;
  for (const double expected : {108.0, 108.0, 72.0, 24.0}) {
    y = autograd::grad({y}, {x}, {}, {.create_graph = true}).at(0);
    EXPECT_EQ(y.item(), expected);
  }
  EXPECT_FALSE(x.grad().defined());
}

TEST(CreateGraph, BackwardThroughAGradient) {
  // loss = y + (dy/dx)², y = x² · w: its gradients by hand are 2 x w + 8 x w² and x² + 8 x² w.
  const Tensor x = scalar(3).requires_grad_();
  const Tensor w = scalar(5).requires_grad_();
  const Tensor y = x * x * w;
  const Tensor dx = autograd::grad({y}, {x}, {}, {.create_graph = true}).at(0);
  (y + dx * dx).backward();
  EXPECT_EQ(x.grad().item(), 2 * 3 * 5 + 8 * 3 * 25);
  EXPECT_EQ(w.grad().item(), 9 + 8 * 9 * 5);
}

TEST(CreateGraph, GradientsWithoutItHaveNoHistory) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor y = x * x;
  EXPECT_FALSE(autograd::grad({y}, {x}, {}, {.retain_graph = true}).at(0).requires_grad());
  EXPECT_TRUE(autograd::grad({y}, {x}, {}, {.create_graph = true}).at(0).requires_grad());
}

TEST(CreateGraph, ThroughAnOpThatIsNotComposedIsAnErrorOnceAsked) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor w = scalar(2).requires_grad_();
  const Tensor y = exp(x) * w;
  const Tensors first = autograd::grad({y}, {x, w}, {}, {.create_graph = true});
  EXPECT_DOUBLE_EQ(first[0].item(), 2 * std::exp(3.0));
  expect_error([&] { autograd::grad({first[0]}, {x}, {}, {.retain_graph = true}); },
               "Exp: its gradient cannot be differentiated again");
  expect_error([&] { first[0].backward({}, {.retain_graph = true}); }, "Exp: its gradient cannot be differentiated");
  EXPECT_FALSE(
      autograd::gradgradcheck([](const Tensor& a) { return exp(a); }, {randn({3}, float64)}, {.raise = false}));
  // What does not pass through it is not touched by it: d(eˣ w)/dw = eˣ, whose own gradient is that of exp alone.
  EXPECT_DOUBLE_EQ(autograd::grad({first[1]}, {x}).at(0).item(), std::exp(3.0));
}

// y = x³ whose backward is right, but hides from the graph that it depends on x.
struct Cube {
  static constexpr bool composed = true;
  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x);
    return x * x * x;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x] = ctx.saved<1>();
    return dy * x.detach() * x.detach() * 3;
  }
};

TEST(CreateGraph, GradgradcheckSeesAWrongSecondDerivative) {
  const auto cube = [](const Tensor& x) { return autograd::apply(Cube{}, x); };
  EXPECT_TRUE(autograd::gradcheck(cube, {randn({3}, float64)}));
  EXPECT_FALSE(autograd::gradgradcheck(cube, {randn({3}, float64)}, {.raise = false}));
}

TEST(CreateGraph, EveryComposedOp) {
  manual_seed(1);
  using autograd::gradgradcheck;
  for (const Device device : test_devices()) {
    const auto random = [&](const Shape& shape) { return randn(shape, float64, device); };
    const Tensor a = random({2, 3});
    const Tensor b = random({2, 3});
    const Tensor row = random({3});
    const Tensor away = from_data(std::vector<double>{1.5, -2, 0.7, 3, -0.6, 1.1}, {2, 3}, device);  // from zero
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return x + y * x; }, {a, row}));
    EXPECT_TRUE(
        gradgradcheck([](const Tensor& x, const Tensor& y) { return x - y - 2 * (3 - x) * (x - 1); }, {row, a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return x / y; }, {a, away}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return x * (2 / x + x / 3); }, {away}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return neg(x) * x; }, {a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return where(gt(x, y), x * y, x * x); }, {a, b}));
    EXPECT_TRUE(
        gradgradcheck([](const Tensor& x) { return where(gt(x, 0), x * x, 0) + masked_fill(x, lt(x, 0), 1); }, {a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return sum(x * x, {1}, true) * mean(x * x, {0}); }, {a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return matmul(x, y); }, {a, random({3, 4})}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return matmul(x, y); },
                              {random({2, 1, 2, 3}), random({2, 3, 2})}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return matmul(x, y); }, {a, row}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& w, const Tensor& c) { return linear(x, w, c); },
                              {random({2, 2, 3}), random({4, 3}), random({4})}));
    EXPECT_TRUE(gradgradcheck(
        [](const Tensor& x, const Tensor& y) {
          return slice(cat({x * x, y * x}, 1), 1, 1, 6, 2);
        },
        {a, b}));
    EXPECT_TRUE(gradgradcheck(
        [](const Tensor& x) {
          return contiguous(permute(x * x, {1, 0})) * reshape(expand(x, {2, 2, 3}), {2, 3, 2});
        },
        {a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return select(x * x, 0, 1) * unsqueeze(x, 0); }, {a}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return tril(x * x); }, {random({3, 3})}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x) { return dropout(x * x, 0.4, true); }, {a}));
  }
}

}  // namespace
