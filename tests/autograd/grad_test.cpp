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

// y = x³, whose backward says nothing of how it is made.
struct OpaqueCube {
  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x);
    return x * x * x;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x] = ctx.saved<1>();
    return dy * x * x * 3;
  }
};

TEST(CreateGraph, ThroughAnOpThatIsNotComposedIsAnErrorOnceAsked) {
  const Tensor x = scalar(3).requires_grad_();
  const Tensor w = scalar(2).requires_grad_();
  const auto cube = [](const Tensor& a) { return autograd::apply(OpaqueCube{}, a); };
  const Tensor y = cube(x) * w;
  const Tensors first = autograd::grad({y}, {x, w}, {}, {.create_graph = true});
  EXPECT_EQ(first[0].item(), 2 * 27);
  expect_error([&] { autograd::grad({first[0]}, {x}, {}, {.retain_graph = true}); },
               "OpaqueCube: its gradient cannot be differentiated again");
  expect_error([&] { first[0].backward({}, {.retain_graph = true}); },
               "OpaqueCube: its gradient cannot be differentiated again");
  EXPECT_FALSE(autograd::gradgradcheck(cube, {randn({3}, float64)}, {.raise = false}));
  // What does not pass through its backward is not touched by that: d(x³ w)/dw = x³, with OpaqueCube's own gradient.
  EXPECT_EQ(autograd::grad({first[1]}, {x}).at(0).item(), 27);
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

TEST(CreateGraph, FunctionsOfOneArgument) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor any = randn({2, 3}, float64, device);
    const Tensor positive = rand({2, 3}, float64, device) + 0.5;
    const Tensor away = from_data(std::vector<double>{1.5, -2, 0.7, 3, -0.6, 1.1}, {2, 3}, device);  // from kinks
    struct Case {
      const char* name;
      Tensor (*function)(const Tensor&);
      Tensor x;
    };
    for (const Case& c : {Case{"exp", [](const Tensor& x) { return exp(x); }, any},
                          Case{"log", [](const Tensor& x) { return log(x); }, positive},
                          Case{"sqrt", [](const Tensor& x) { return sqrt(x); }, positive},
                          Case{"rsqrt", [](const Tensor& x) { return rsqrt(x); }, positive},
                          Case{"pow 2", [](const Tensor& x) { return pow(x, 2); }, any},
                          Case{"pow 3", [](const Tensor& x) { return pow(x, 3); }, any},
                          Case{"pow 1", [](const Tensor& x) { return pow(x, 1); }, any},
                          Case{"pow 0", [](const Tensor& x) { return pow(x, 0); }, any},
                          Case{"pow -1.5", [](const Tensor& x) { return pow(x, -1.5); }, positive},
                          Case{"tanh", [](const Tensor& x) { return tanh(x); }, any},
                          Case{"erf", [](const Tensor& x) { return erf(x); }, any},
                          Case{"sigmoid", [](const Tensor& x) { return sigmoid(x); }, any},
                          Case{"silu", [](const Tensor& x) { return silu(x); }, any},
                          Case{"gelu", [](const Tensor& x) { return gelu(x); }, any},
                          Case{"gelu tanh", [](const Tensor& x) { return gelu(x, GeluApproximation::tanh); }, any},
                          Case{"relu", [](const Tensor& x) { return relu(x); }, away},
                          Case{"abs", [](const Tensor& x) { return abs(x); }, away},
                          Case{"clamp", [](const Tensor& x) { return clamp(x, -1, 1); }, away}}) {
      SCOPED_TRACE(c.name);
      EXPECT_TRUE(autograd::gradgradcheck(c.function, {c.x}));
      // The third: the second derivative is made of ops too.
      const auto slope = [&](const Tensor& x) {
        const autograd::GradMode recorded(true);
        const Tensor at = x.requires_grad() ? x : x.detach().requires_grad_();
        return autograd::grad({sum(c.function(at))}, {at}, {}, {.create_graph = true}).at(0);
      };
      EXPECT_TRUE(autograd::gradgradcheck(slope, {c.x}));
    }
  }
}

TEST(CreateGraph, FunctionsOfTwoArguments) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    const Tensor a = rand({2, 3}, float64, device) + 0.5;
    const Tensor b = randn({3}, float64, device);
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x, const Tensor& y) { return pow(x, y); }, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& y) { return pow(1.7, y); }, {b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x, const Tensor& y) { return maximum(x * x, y); }, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x, const Tensor& y) { return minimum(x * x, y); }, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x) { return maximum(x * x, 0.9) * minimum(x, 1.1); }, {a}));
  }
}

TEST(CreateGraph, SoftmaxAndEmbedding) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4}, float64, device);
    for (const int axis : {0, 1}) {
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& a) { return softmax(a, axis); }, {x}));
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& a) { return log_softmax(a, axis); }, {x}));
    }
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& a) { return softmax(softmax(a * a, 1), 1); }, {x}));
    const Tensor indices = from_data(std::vector<std::int64_t>{2, 0, 2, 1}, {2, 2}, device);
    EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& w) { return embedding(w * w, indices); }, {x}));
  }
}

TEST(CreateGraph, Reductions) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4}, float64, device);
    for (const Dims& axes : {Dims{}, Dims{0}, Dims{1}}) {
      for (const bool keepdim : {false, true}) {
        const auto check = [&](auto f) { EXPECT_TRUE(autograd::gradgradcheck(f, {x})); };
        check([&](const Tensor& a) { return var(a, axes, 1, keepdim); });
        check([&](const Tensor& a) { return logsumexp(a, axes, keepdim); });
      }
    }
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& a) { return max(a * a); }, {x}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& a) { return max(a * a, 1).values; }, {x}));
  }
}

TEST(CreateGraph, Attention) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const bool causal : {false, true}) {
      const auto attention = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
        return scaled_dot_product_attention(q, k, v, {.causal = causal});
      };
      EXPECT_TRUE(autograd::gradgradcheck(attention,
                                          {randn({1, 2, 3, 2}, float64, device), randn({1, 2, 3, 2}, float64, device),
                                           randn({1, 2, 3, 2}, float64, device)}));
    }
  }
}

TEST(CreateGraph, LayerNorm) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 2, 4}, float64, device);
    const Tensor weight = randn({4}, float64, device);
    const Tensor bias = randn({4}, float64, device);
    const auto norm = [](const Tensor& a, const Tensor& w, const Tensor& b) { return layer_norm(a, {4}, w, b); };
    EXPECT_TRUE(autograd::gradgradcheck(norm, {x, weight, bias}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& a) { return layer_norm(a, {2, 4}); }, {x}));
    // Recorded or by the kernel, the gradients are the same numbers.
    for (const DType dtype : {float32, float16, bfloat16}) {
      const Tensor a = transpose(randn({33, 5}, dtype, device), 0, 1).requires_grad_();
      const Tensor w = randn({33}, dtype, device).requires_grad_();
      const Tensor y = layer_norm(a, {33}, w, {});
      const Tensor dy = randn_like(y);
      const Tensors kernel = autograd::grad({y}, {a, w}, {dy}, {.retain_graph = true});
      const Tensors recorded = autograd::grad({y}, {a, w}, {dy}, {.create_graph = true});
      const double tolerance = dtype == float32 ? 1e-5 : dtype == float16 ? 2e-3 : 2e-2;
      expect_close(recorded[0], kernel[0], tolerance, tolerance);
      expect_close(recorded[1], kernel[1], tolerance, tolerance);
    }
  }
}

TEST(CreateGraph, CrossEntropy) {
  manual_seed(8);
  for (const Device device : test_devices()) {
    const Tensor logits = randn({2, 3, 5}, float64, device);
    const Tensor targets = from_data(std::vector<std::int64_t>{4, 0, -100, 2, 2, 1}, {2, 3}, device);
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      const auto loss = [&](const Tensor& x) { return cross_entropy(x, targets, {.reduction = reduction}); };
      EXPECT_TRUE(autograd::gradgradcheck(loss, {logits}));
      const Tensor x = logits.detach().requires_grad_();
      const Tensor y = loss(x);
      const Tensor kernel = autograd::grad({y}, {x}, {ones_like(y)}, {.retain_graph = true}).at(0);
      const Tensor recorded = autograd::grad({y}, {x}, {ones_like(y)}, {.create_graph = true}).at(0);
      expect_close(recorded, kernel, 1e-12, 1e-12);
    }
  }
}

// What an opaque op saved says nothing of where it came from: this one saves a copy of its input.
struct OpaqueCopy {
  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x.detach());
    return x * x;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const { return dy * ctx.saved<1>()[0] * 2; }
};

TEST(CreateGraph, OpaqueOpsKnowTheirInputsWhateverTheySaved) {
  const Tensor x = randn({5}, float64).requires_grad_();
  const Tensor y = autograd::apply(OpaqueCopy{}, x);
  const Tensor dx = autograd::grad({y}, {x}, {ones_like(y)}, {.create_graph = true}).at(0);
  expect_error([&] { autograd::grad({sum(dx)}, {x}, {}, {.allow_unused = true}); },
               "OpaqueCopy: its gradient cannot be differentiated again");
}

}  // namespace
