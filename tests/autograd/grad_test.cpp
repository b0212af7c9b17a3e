// Gradients of gradients.

#include <cmath>
#include <limits>
#include <tuple>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/mica.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// The gradients of f with respect to its inputs, under dy, as a function of them.
template <class F>
auto gradients_of(F f, const Tensor& dy) {
  return [f, dy](const Tensors& in) {
    const autograd::EnableGrad recorded;
    Tensors leaves;
    for (const Tensor& x : in) {
      leaves.push_back(x.requires_grad() ? x : x.detach().requires_grad_());
    }
    return autograd::grad({f(leaves)}, leaves, {dy}, {.create_graph = true});
  };
}

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

// y = x³ with an opaque backward.
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

TEST(CreateGraph, DifferentiatingAnOpaqueBackwardIsAnError) {
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
  // Derivatives that do not differentiate its backward still work: d(x³ w)/dw = x³, with OpaqueCube's own gradient.
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

TEST(CreateGraph, MovesAndCasts) {
  manual_seed(13);
  for (const Device device : test_devices()) {
    const Tensor a = randn({2, 1, 4}, float64, device);
    const auto check = [&](auto f) { EXPECT_TRUE(autograd::gradgradcheck(f, {a})); };
    check([](const Tensor& x) { return flatten(x * x) * view(contiguous(x), {8}); });
    check([](const Tensor& x) { return squeeze(x * x, 1) * triu(squeeze(x, 1)); });
    check([](const Tensor& x) { return stack({x * x, x}, 1) * unsqueeze(x, 1); });
    check([](const Tensor& x) {
      const Tensors parts = split(x * x, 2, 2);
      return parts[0] * parts[1];
    });
    check([](const Tensor& x) { return select(x * x, 2, 1) * slice(x * x, 2, 0, 3, 2); });
    check([](const Tensor& x) { return sum_to(x * x * x, {1, 4}) * min(x * x) * min(x * x, 2).values; });
    // float32 has 7 digits, so the step is large; the central difference of a square is exact anyway.
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x) { return (x * x).to(float32).to(float64); }, {a},
                                        {.step = 0.01, .atol = 1e-3}));
    check([&](const Tensor& x) { return (x * x).to(Device::cpu()); });
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
                          Case{"log1p", [](const Tensor& x) { return log1p(x); }, positive},
                          Case{"expm1", [](const Tensor& x) { return expm1(x); }, any},
                          Case{"sin", [](const Tensor& x) { return sin(x); }, any},
                          Case{"cos", [](const Tensor& x) { return cos(x); }, any},
                          Case{"softplus", [](const Tensor& x) { return softplus(x, 2, 1.5); }, away},
                          Case{"elu", [](const Tensor& x) { return elu(x, 0.7); }, away},
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
      // The third derivative: the second one is composed of ops, too.
      const auto function = [&](const Tensors& in) { return c.function(in[0]); };
      EXPECT_TRUE(autograd::gradgradcheck(gradients_of(function, ones_like(c.x)), {c.x}));
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
    EXPECT_TRUE(
        autograd::gradgradcheck([](const Tensor& x, const Tensor& y) { return fmod(x * x, y * y + 20); }, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x, const Tensor& y) { return minimum(x * x, y); }, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& x) { return maximum(x * x, 0.9) * minimum(x, 1.1); }, {a}));
  }
}

TEST(CreateGraph, PowersOfZero) {
  for (const Device device : test_devices()) {
    const Tensor b = from_data<double>({0.0, 1.0, 2.0, 2.5}, {4}, device).requires_grad_();
    const Tensor zero = zeros({4}, float64, device).requires_grad_();
    const auto second = [](const Tensor& y, const Tensor& x) {
      const Tensor first = autograd::grad({y}, {x}, {ones_like(y)}, {.create_graph = true}).at(0);
      return autograd::grad({first}, {x}, {ones_like(first)}).at(0);
    };
    expect_close(second(pow(zero, b), b), {0, 0, 0, 0}, 0, 0);
    expect_close(second(pow(0, b), b), {0, 0, 0, 0}, 0, 0);
    const Tensor whole = from_data<double>({1.0, 2.0, 3.0, 4.0}, {4}, device);
    expect_close(second(pow(zero, whole), zero), {0, 2, 0, 0}, 0, 0);
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

// Whether the gradients under dy are the same bits with and without create_graph.
template <class F>
void expect_same_bits(F f, const Tensors& in, const Tensor& dy, const std::string& what) {
  Tensors leaves;
  for (const Tensor& x : in) {
    leaves.push_back(x.detach().requires_grad_());
  }
  const Tensor y = f(leaves);
  const Tensors plain = autograd::grad({y}, leaves, {dy}, {.retain_graph = true});
  const Tensors recorded = autograd::grad({y}, leaves, {dy}, {.create_graph = true});
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(to_vector<double>(recorded[i]), to_vector<double>(plain[i])) << what << ", input " << i;
  }
}

// Every combination of present parameters and of gradients among x, weight and bias.
TEST(CreateGraph, LayerNorm) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    for (const Shape& row : {Shape{4}, Shape{2, 4}}) {
      const Tensor x = randn({3, 2, 4}, float64, device);
      const Tensors all{x, randn(row, float64, device), randn(row, float64, device)};
      for (const int there : {1, 3, 5, 7}) {
        for (int wanted = 1; wanted < 8; ++wanted) {
          if ((wanted & there) != wanted) {
            continue;
          }
          SCOPED_TRACE(fmt::format("{}, row {}, arguments {}, gradients {}", device, row, there, wanted));
          Tensors inputs;
          for (int i = 0; i < 3; ++i) {
            if ((wanted >> i & 1) != 0) {
              inputs.push_back(all[i]);
            }
          }
          const auto norm = [&](const Tensors& in) {
            Tensors arguments(3);
            std::size_t next = 0;
            for (int i = 0; i < 3; ++i) {
              arguments[i] = (wanted >> i & 1) != 0 ? in[next++] : (there >> i & 1) != 0 ? all[i] : Tensor{};
            }
            return layer_norm(arguments[0], row, arguments[1], arguments[2], 1e-3);
          };
          EXPECT_TRUE(autograd::gradgradcheck(norm, inputs));
        }
      }
    }
  }
}

TEST(CreateGraph, LayerNormHasAThirdDerivative) {
  manual_seed(9);
  for (const Device device : test_devices()) {
    const Tensors in{randn({2, 4}, float64, device), randn({4}, float64, device), randn({4}, float64, device)};
    const Tensor dy = randn({2, 4}, float64, device);
    const auto norm = [](const Tensors& a) { return layer_norm(a[0], {4}, a[1], a[2], 0.1); };
    EXPECT_TRUE(autograd::gradgradcheck(gradients_of(norm, dy), in));
  }
}

TEST(CreateGraph, LayerNormInOtherDtypes) {
  manual_seed(10);
  for (const Device device : test_devices()) {
    const Tensors in{randn({5, 1037}, float64, device), randn({1037}, float64, device), randn({1037}, float64, device)};
    const Tensor dy = randn({5, 1037}, float64, device);
    const auto norm = [](const Tensors& a) { return layer_norm(a[0], {1037}, a[1], a[2]); };
    const Tensors directions{randn_like(in[0]), randn_like(in[1]), randn_like(in[2])};
    const auto second = [&](DType x_dtype, DType weight_dtype) {
      const Tensors leaves{in[0].to(x_dtype).detach().requires_grad_(),
                           in[1].to(weight_dtype).detach().requires_grad_(),
                           in[2].to(weight_dtype).detach().requires_grad_()};
      const Tensors first = gradients_of(norm, dy.to(x_dtype))(leaves);
      Tensors sent;
      for (int i = 0; i < 3; ++i) {
        sent.push_back(directions[i].to(first[i].dtype()));
      }
      return autograd::grad({first[0], first[1]}, {leaves[0], leaves[1]}, {sent[0], sent[1]});
    };
    const Tensors expected = second(float64, float64);
    for (const auto& [x_dtype, weight_dtype, tolerance] :
         {std::tuple{float32, float32, 1e-5}, {float16, float16, 8e-3}, {bfloat16, float32, 0.06}}) {
      const std::string what = fmt::format("{} with weights of {} on {}", x_dtype, weight_dtype, device);
      const Tensors got = second(x_dtype, weight_dtype);
      EXPECT_EQ(got[0].dtype(), x_dtype);
      EXPECT_EQ(got[1].dtype(), weight_dtype);
      expect_close(got[0], expected[0].to(Device::cpu()), tolerance, tolerance, what);
      expect_close(got[1], expected[1].to(Device::cpu()), tolerance, tolerance, what);
      const Tensors strided{transpose(randn({1037, 5}, x_dtype, device), 0, 1), in[1].to(weight_dtype),
                            in[2].to(weight_dtype)};
      expect_same_bits(norm, strided, dy.to(x_dtype), what);
    }
  }
}

TEST(CreateGraph, EmptyLayerNorm) {
  for (const Device device : test_devices()) {
    for (const Shape& shape : {Shape{0, 4}, Shape{3, 0}}) {
      const Shape row{shape.back()};
      const Tensors leaves{zeros(shape, float64, device).requires_grad_(), ones(row, float64, device).requires_grad_()};
      const Tensor dy = zeros(shape, float64, device).requires_grad_();
      const Tensor y = layer_norm(leaves[0], row, leaves[1]);
      const Tensors first = autograd::grad({y}, leaves, {dy}, {.create_graph = true});
      const Tensors second =
          autograd::grad(first, {leaves[0], leaves[1], dy}, {zeros_like(first[0]), ones(row, float64, device)});
      EXPECT_EQ(second[0].shape(), shape);
      EXPECT_EQ(to_vector<double>(second[1]), std::vector<double>(row.back(), 0));
      EXPECT_EQ(second[2].shape(), shape);
    }
  }
}

TEST(CreateGraph, CrossEntropy) {
  manual_seed(8);
  for (const Device device : test_devices()) {
    const Tensor logits = randn({2, 3, 5}, float64, device);
    const Tensor targets = from_data(std::vector<std::int64_t>{4, 0, -100, 2, 2, 1}, {2, 3}, device);
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      for (const std::int64_t ignore : {-100, 2}) {
        for (const DType index : {int64, int32}) {
          // A target of -100 is either ignored or absent.
          const Tensor labels = ignore == -100 ? targets.to(index) : where(lt(targets, 0), 3, targets).to(index);
          const auto loss = [&](const Tensors& in) {
            return cross_entropy(in[0], labels, {.ignore_index = ignore, .reduction = reduction});
          };
          EXPECT_TRUE(autograd::gradgradcheck(loss, {logits}));
          const Tensor dy = randn_like(loss({logits}));
          EXPECT_TRUE(autograd::gradgradcheck(gradients_of(loss, dy), {logits}));  // the third derivative
          for (const DType dtype : {float64, float32, float16, bfloat16}) {
            expect_same_bits(loss, {logits.to(dtype)}, dy.to(accumulate_dtype(dtype)),
                             fmt::format("{} on {}", dtype, device));
          }
        }
      }
    }
    // One row alone, whose loss is a scalar without reduction.
    const Tensor row = randn({4}, float64, device);
    const Tensor label = full({}, 2, int64, device);
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      EXPECT_TRUE(autograd::gradgradcheck(
          [&](const Tensor& x) { return cross_entropy(x, label, {.reduction = reduction}); }, {row}));
    }
  }
}

TEST(CreateGraph, CrossEntropyOfIgnoredNonFiniteRows) {
  for (const Device device : test_devices()) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const Tensor x = from_data<double>({nan, nan, 1, 1}, {2, 2}, device).requires_grad_();
    const Tensor loss = cross_entropy(x, from_data<std::int64_t>({-100, 0}, device));
    const Tensor dx = autograd::grad({loss}, {x}, {}, {.create_graph = true}).at(0);
    const Tensor a = from_data<double>({5, 6, 1, 0}, {2, 2}, device);
    const Tensor ddx = autograd::grad({dx}, {x}, {a}, {.create_graph = true}).at(0);
    expect_close(ddx, {0, 0, 0.25, -0.25}, 0, 1e-15);  // p (a − Σ a p) with p = ½
    // p (1 − p) (1 − 2 p) = 0 where p = ½
    expect_close(autograd::grad({ddx}, {x}, {a}).at(0), {0, 0, 0, 0}, 0, 1e-15);
  }
}

TEST(CreateGraph, TheSameKernelsWhetherRecordedOrNot) {
  manual_seed(11);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16}) {
      // Long enough that different orders of summation round differently.
      const Tensor x = randn({3, 777}, dtype, device);
      const Tensor dy = randn_like(x);
      const auto expect_same = [&](const char* name, auto f) {
        expect_same_bits([&](const Tensors& in) { return f(in[0]); }, {x}, dy,
                         fmt::format("{} {} {}", name, dtype, device));
      };
      expect_same("softmax", [](const Tensor& a) { return softmax(a, 1); });
      expect_same("log_softmax", [](const Tensor& a) { return log_softmax(a, 1); });
      expect_same("gelu", [](const Tensor& a) { return gelu(a); });
      expect_same("gelu tanh", [](const Tensor& a) { return gelu(a, GeluApproximation::tanh); });
      expect_same("silu", [](const Tensor& a) { return silu(a); });
      const Tensors qkv{randn({2, 33, 8}, dtype, device), randn({2, 33, 8}, dtype, device),
                        randn({2, 33, 8}, dtype, device)};
      expect_same_bits(
          [](const Tensors& in) { return scaled_dot_product_attention(in[0], in[1], in[2], {.causal = true}); }, qkv,
          randn_like(qkv[0]), fmt::format("attention {} {}", dtype, device));
    }
  }
}

TEST(CreateGraph, SoftmaxAndAttentionHaveThirdDerivatives) {
  manual_seed(12);
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3}, float64, device);
    const Tensor dy = randn_like(x);
    EXPECT_TRUE(autograd::gradgradcheck(gradients_of([](const Tensors& in) { return softmax(in[0], 1); }, dy), {x}));
    EXPECT_TRUE(
        autograd::gradgradcheck(gradients_of([](const Tensors& in) { return log_softmax(in[0], 1); }, dy), {x}));
    const Tensors qkv{randn({3, 2}, float64, device), randn({3, 2}, float64, device), randn({3, 2}, float64, device)};
    const auto attention = [](const Tensors& in) {
      return scaled_dot_product_attention(in[0], in[1], in[2], {.causal = true});
    };
    EXPECT_TRUE(autograd::gradgradcheck(gradients_of(attention, randn({3, 2}, float64, device)), qkv));
  }
}

// The saved tensors of an opaque op do not reveal its inputs: this one saves a copy of its input.
struct OpaqueCopy {
  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x.detach());
    return x * x;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const { return dy * ctx.saved<1>()[0] * 2; }
};

TEST(CreateGraph, OpaqueOpsDependOnAllTheirInputs) {
  const Tensor x = randn({5}, float64).requires_grad_();
  const Tensor y = autograd::apply(OpaqueCopy{}, x);
  const Tensor dx = autograd::grad({y}, {x}, {ones_like(y)}, {.create_graph = true}).at(0);
  expect_error([&] { autograd::grad({sum(dx)}, {x}, {}, {.allow_unused = true}); },
               "OpaqueCopy: its gradient cannot be differentiated again");
}

// y = 2 x, whose gradient is wrong in one element, or for one of the inputs.
struct WrongInOne {
  std::int64_t element;
  Tensor forward(autograd::Context&, const Tensor& x) const { return x * 2; }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    const Tensor dx = dy * 2;
    fill_data(as_strided(dx, {1}, {1}, element), 3);
    return dx;
  }
};

TEST(Gradcheck, SeesEachElementOfEachInput) {
  const Tensor x = randn({3}, float64);
  for (const std::int64_t element : {0, 1, 2}) {
    const auto f = [&](const Tensor& a) { return autograd::apply(WrongInOne{element}, a); };
    expect_error([&] { autograd::gradcheck(f, {x}); },
                 fmt::format("gradcheck: input 0 of shape [3], element {}", element));
    const auto second = [&](const Tensor& a, const Tensor& b) { return a * a + f(b); };
    expect_error(
        [&] {
          autograd::gradcheck(second, {x, x});
        },
        fmt::format("gradcheck: input 1 of shape [3], element {}", element));
    EXPECT_FALSE(autograd::gradcheck(f, {x}, {.raise = false}));
  }
}

}  // namespace
