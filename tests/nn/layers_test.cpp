#include <tests/nn/support.h>

#include <algorithm>

#include <mica/core/rng.h>
#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/init.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>
#include <mica/nn/rms_norm.h>
#include <mica/nn/transformer.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Names = std::vector<std::string>;

TEST(LinearModule, MatchesReference) {
  manual_seed(1);
  const nn::Linear linear{3, 2};
  const Tensor x = randn({4, 5, 3});
  const std::vector<double> w = to_vector<double>(linear.weight), b = to_vector<double>(linear.bias),
                            in = to_vector<double>(x);
  std::vector<double> expected;
  for (int row = 0; row < 20; ++row) {
    for (int o = 0; o < 2; ++o) {
      double sum = b[o];
      for (int i = 0; i < 3; ++i) {
        sum += w[o * 3 + i] * in[row * 3 + i];
      }
      expected.push_back(sum);
    }
  }
  const Tensor y = linear(x);
  EXPECT_EQ(y.shape(), (Shape{4, 5, 2}));
  expect_close(y, expected, 1e-5, 1e-6);
}

TEST(LinearModule, WithAnActivation) {
  const nn::Linear linear{3, 2};
  const Tensor x = randn({5, 3});
  expect_close(linear(x, Activation::relu), relu(linear(x)), 0, 0);
  expect_close(linear(x, Activation::gelu_tanh), gelu(linear(x), GeluApproximation::tanh), 0, 0);
  const nn::Linear without{3, 2, {.bias = false}};
  expect_close(without(x, Activation::leaky_relu), leaky_relu(without(x)), 0, 0);
}

TEST(LinearModule, InitializesLikePyTorch) {
  manual_seed(1);
  const nn::Linear linear{100, 300};
  for (const Tensor& tensor : {linear.weight, linear.bias}) {
    const std::vector<double> values = to_vector<double>(tensor);
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    EXPECT_GE(*least, -0.1);
    EXPECT_LE(*most, 0.1);
    EXPECT_LT(*least, -0.095);
    EXPECT_GT(*most, 0.095);
  }
  EXPECT_EQ(names_of(linear.named_parameters()), (Names{"weight", "bias"}));
  EXPECT_EQ(names_of((nn::Linear{2, 3, {.bias = false}}).named_parameters()), (Names{"weight"}));
}

TEST(LinearModule, Gradients) {
  manual_seed(2);
  nn::Linear with_bias{3, 2};
  check_gradients(with_bias, randn({2, 4, 3}));
  compare_devices(with_bias, randn({2, 4, 3}));
  nn::Linear without{3, 2, {.bias = false}};
  check_gradients(without, randn({3}));
}

TEST(LinearModule, Errors) {
  expect_error([] { nn::Linear(0, 2); }, "Linear: expected in >= 1 and out >= 1, got 0 and 2");
  expect_error([] { nn::Linear(ones({3})); }, "expected a weight of shape (out, in), got [3]");
  expect_error([] { nn::Linear(ones({3, 2}), ones({2})); }, "expected a bias of shape [3], got [2]");
  expect_error([] { (nn::Linear{3, 2})(ones({4})); }, "linear: ");
}

TEST(LayerNormModule, ValuesAndNames) {
  nn::LayerNorm norm{3, {.eps = 0.5}};
  norm.load_state_dict({{"weight", from_data<double>({1.0, 2.0, 3.0})}, {"bias", from_data<double>({0.0, 0.0, 1.0})}});
  const double rstd = 1 / std::sqrt(2.0 / 3 + 0.5);
  expect_close(norm(from_data({1.f, 2.f, 3.f}, {1, 3})), {-rstd, 0, 3 * rstd + 1}, 1e-6, 1e-6);
  EXPECT_EQ(names_of(norm.named_parameters()), (Names{"weight", "bias"}));
  EXPECT_EQ(names_of((nn::LayerNorm{3, {.bias = false}}).named_parameters()), (Names{"weight"}));
  EXPECT_TRUE((nn::LayerNorm{3, {.elementwise_affine = false}}).named_parameters().empty());
  EXPECT_EQ((nn::LayerNorm{Shape{2, 3}}).weight.shape(), (Shape{2, 3}));
  expect_error([] { nn::LayerNorm{Shape{}}; }, "at least one axis");
  expect_error([] { (nn::LayerNorm{3})(ones({2, 4})); }, "layer_norm: ");
}

TEST(LayerNormModule, Gradients) {
  manual_seed(3);
  nn::LayerNorm norm{Shape{2, 3}};
  check_gradients(norm, randn({4, 2, 3}));
  compare_devices(norm, randn({4, 2, 3}));
  nn::LayerNorm no_bias{5, {.bias = false}};
  check_gradients(no_bias, randn({3, 5}));
  nn::LayerNorm plain{5, {.elementwise_affine = false}};
  check_gradients(plain, randn({3, 5}));
}

TEST(EmbeddingModule, RowsAndGradients) {
  manual_seed(4);
  nn::Embedding table{5, 3};
  const Tensor tokens = from_data({std::int64_t{4}, std::int64_t{0}, std::int64_t{4}, std::int64_t{1}}, {2, 2});
  const std::vector<float> weight = to_vector<float>(table.weight);
  std::vector<double> expected;
  for (const int row : {4, 0, 4, 1}) {
    expected.insert(expected.end(), weight.begin() + row * 3, weight.begin() + row * 3 + 3);
  }
  const Tensor y = table(tokens);
  EXPECT_EQ(y.shape(), (Shape{2, 2, 3}));
  expect_close(y, expected, 0, 0);
  check_gradients(table, tokens);
  compare_devices(table, tokens);
  expect_error([] { nn::Embedding(0, 3); }, "expected count >= 1");
}

TEST(Sequential, NamesOrderAndGradients) {
  manual_seed(5);
  nn::Sequential net{nn::Linear{3, 4}, [](const Tensor& x) { return x.to(float64); }, nn::LayerNorm{4},
                     nn::Sequential{nn::Linear{4, 2, {.bias = false}}, nn::LayerNorm{2}}};
  EXPECT_EQ(net.size(), 4u);
  EXPECT_EQ(names_of(net.named_parameters()),
            (Names{"0.weight", "0.bias", "2.weight", "2.bias", "3.0.weight", "3.1.weight", "3.1.bias"}));
  check_gradients(net, randn({5, 3}));

  nn::Linear first{2, 3}, second{3, 1};
  const Tensor x = randn({4, 2});
  const Tensor expected = second(first(x));
  nn::Sequential chain;
  chain.push_back(std::move(first));
  chain.push_back(std::move(second));
  const nn::Sequential moved = std::move(chain);
  expect_close(moved(x), expected, 0, 0);
  expect_close(nn::Sequential{}(x), x, 0, 0);
  expect_error([] { nn::Sequential{}.push_back(std::function<Tensor(const Tensor&)>{}); },
               "Sequential: expected a function to call, got an empty one");
}

TEST(ModuleList, GrowsAsAChild) {
  struct Net : nn::Module {
    nn::ModuleList<nn::Linear> layers = child("layers", nn::ModuleList<nn::Linear>{});
  };
  Net net;
  for (int i = 0; i < 12; ++i) {
    net.layers.push_back(nn::Linear{1, 1, {.bias = false}});
  }
  net.to(float64);
  const nn::NamedTensors parameters = net.named_parameters();
  ASSERT_EQ(parameters.size(), 12u);
  EXPECT_EQ(parameters[10].first, "layers.10.weight");
  EXPECT_TRUE(parameters[10].second.is_same(net.layers[10].weight));
  EXPECT_EQ(net.layers[3].weight.dtype(), float64);
  net.eval();
  for (const nn::Linear& layer : net.layers) {
    EXPECT_FALSE(layer.is_training());
  }
  expect_error([&] { net.layers[12]; }, "ModuleList: index 12 is out of range for 12 modules");
  expect_error([&] { std::as_const(net.layers)[12]; }, "index 12 is out of range for 12 modules");
}

TEST(LayerNormModule, Errors) {
  EXPECT_EQ(nn::LayerNorm({3}, {.eps = 0}).eps, 0);
  expect_error([] { nn::LayerNorm({3}, {.eps = -1e-9}); }, "LayerNorm: expected eps >= 0, got -1e-09");
  expect_error([] { nn::LayerNorm(Shape{}); }, "LayerNorm: expected at least one axis to normalize over");
}

TEST(RMSNormModule, ValuesAndNames) {
  const nn::RMSNorm norm({2});
  EXPECT_EQ(names_of(norm.named_parameters()), (Names{"weight"}));
  EXPECT_EQ(norm.eps, 1e-6);
  expect_close(norm.weight, {1, 1}, 0, 0);
  nn::init::constant_(norm.weight.detach(), 3);
  // 3 x / sqrt(mean x² + eps): eps is what matters in the second row.
  const double tiny = 1e-3 / std::sqrt(1e-6 + 1e-6);
  expect_close(norm(from_data<float>({3, 4, 1e-3f, 1e-3f}, {2, 2})),
               {9 / std::sqrt(12.5), 12 / std::sqrt(12.5), 3 * tiny, 3 * tiny}, 1e-5, 0);
  const nn::RMSNorm plain({2}, {.elementwise_affine = false});
  EXPECT_TRUE(plain.named_parameters().empty());
  EXPECT_FALSE(plain.weight.defined());
  expect_close(plain(from_data<float>({3, 4})), {3 / std::sqrt(12.5), 4 / std::sqrt(12.5)}, 1e-5, 0);
}

TEST(RMSNormModule, GradientsAndErrors) {
  nn::RMSNorm norm({3});
  check_gradients(norm, randn({4, 3}));
  compare_devices(norm, randn({4, 3}));
  EXPECT_EQ(nn::RMSNorm({3}, {.eps = 0}).eps, 0);
  expect_error([] { nn::RMSNorm({3}, {.eps = -1e-9}); }, "RMSNorm: expected eps >= 0, got -1e-09");
  expect_error([] { nn::RMSNorm(Shape{}); }, "RMSNorm: expected at least one axis to normalize over");
}

TEST(Layers, SmallestAndLargestSizes) {
  EXPECT_EQ(nn::Embedding(1, 1).weight.shape(), (Shape{1, 1}));
  expect_error([] { nn::Embedding(0, 1); }, "Embedding: expected count >= 1 and width >= 1, got 0 and 1");
  expect_error([] { nn::Embedding(1, 0); }, "Embedding: expected count >= 1 and width >= 1, got 1 and 0");
  EXPECT_EQ(nn::MultiheadAttention(1, {.heads = 1}).c_attn.weight.shape(), (Shape{3, 1}));
  expect_error([] { nn::MultiheadAttention(0, {.heads = 1}); }, "expected heads to divide width, got width 0");
  expect_error([] { nn::MultiheadAttention(2, {.heads = 0}); },
               "expected heads to divide width, got width 2 and heads 0");
  EXPECT_EQ(nn::Mlp(1, {}).c_fc.weight.shape(), (Shape{4, 1}));
  expect_error([] { nn::Mlp(0, {}); }, "Mlp: expected a width from 1 to");
  expect_error([] { nn::Mlp(INT64_MAX / 4 + 1, {}); }, "Mlp: expected a width from 1 to 2305843009213693951");
  expect_error([] { nn::Mlp(INT64_MAX / 4, {}); }, "shape: [9223372036854775804, 2305843009213693951] has too many");
}

TEST(Init, ReportsProgress) {
  std::vector<std::int64_t> done, totals;
  const ProgressObserver observer([&](const ProgressReport& report) {
    EXPECT_EQ(report.task, "initializing the model");
    if (report.finished) {
      done.push_back(report.done);
      totals.push_back(report.total);
    }
  });
  const auto make = [] { nn::Linear(8, 5, {.bias = false}); };
  make();  // no reports without Progress
  EXPECT_TRUE(done.empty());
  {
    const nn::init::Progress progress(100);
    make();
    {
      const nn::init::Progress inner(7);
      nn::init::normal_(empty({2, 3}));
    }
    make();
    {
      const nn::init::Skip skip;
      make();
    }
  }
  make();
  EXPECT_EQ(done, (std::vector<std::int64_t>{6, 80}));
  EXPECT_EQ(totals, (std::vector<std::int64_t>{7, 100}));
}

// Overwriting a saved tensor must be detected.
TEST(Init, CountsAsAWrite) {
  for (const auto& fill : std::vector<std::function<void(const Tensor&)>>{
           [](const Tensor& x) { nn::init::constant_(x, 2); }, [](const Tensor& x) { nn::init::normal_(x); },
           [](const Tensor& x) { nn::init::uniform_(x, -1, 1); }}) {
    const Tensor x = ones({2}).requires_grad_(), w = ones({2});
    const Tensor y = x * w;
    const std::uint32_t before = w.version();
    fill(w);
    EXPECT_EQ(w.version(), before + 1);
    expect_error([&] { y.backward(ones({2})); }, "in place");
  }
}

}  // namespace
