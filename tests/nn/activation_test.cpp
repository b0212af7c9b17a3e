#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/activation.h>
#include <mica/nn/containers.h>
#include <mica/nn/dropout.h>
#include <mica/nn/linear.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(Activations, Values) {
  const Tensor x = from_data<double>({-1.5, 0.0, 2.0});
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  const auto exact = [](double v) { return 0.5 * v * (1 + std::erf(v / std::sqrt(2.0))); };
  const auto cubic = [](double v) {
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
  };
  expect_close(nn::ReLU{}(x), {0, 0, 2}, 0, 0);
  expect_close(nn::LeakyReLU{}(x), {-0.015, 0, 2}, 1e-15, 0);
  expect_close(nn::LeakyReLU{0.5}(x), {-0.75, 0, 2}, 0, 0);
  expect_close(nn::GELU{}(x), {exact(-1.5), 0, exact(2)}, 1e-12, 0);
  expect_close(nn::GELU{GeluApproximation::tanh}(x), {cubic(-1.5), 0, cubic(2)}, 1e-12, 0);
  expect_close(nn::SiLU{}(x), {-1.5 * sigmoid(-1.5), 0, 2 * sigmoid(2)}, 1e-12, 0);
  expect_close(nn::Tanh{}(x), {std::tanh(-1.5), 0, std::tanh(2.0)}, 1e-12, 0);
  expect_close(nn::Sigmoid{}(x), {sigmoid(-1.5), 0.5, sigmoid(2)}, 1e-12, 0);
}

TEST(Activations, Gradients) {
  manual_seed(1);
  nn::Sequential net{nn::Linear{3, 4},
                     nn::GELU{},
                     nn::Linear{4, 4},
                     nn::SiLU{},
                     nn::Linear{4, 4},
                     nn::Tanh{},
                     nn::Sigmoid{},
                     nn::Linear{4, 3},
                     nn::ReLU{},
                     nn::LeakyReLU{},
                     nn::GELU{GeluApproximation::tanh}};
  check_gradients(net, randn({5, 3}));
  compare_devices(net, randn({5, 3}));
}

TEST(DropoutModule, OnlyInTraining) {
  for (const Device device : test_devices()) {
    manual_seed(2);
    nn::Sequential net{nn::Dropout{0.25}};
    const Tensor x = ones({10000}, float32, device);
    int dropped = 0;
    for (const double value : to_vector<double>(net(x))) {
      dropped += value == 0;
      EXPECT_TRUE(value == 0 || std::abs(value - 4.0 / 3) < 1e-6) << value;
    }
    EXPECT_NEAR(dropped, 2500, 200);
    net.eval();
    expect_close(net(x), x, 0, 0);
    net.train();
    EXPECT_NE(to_vector<float>(net(x)), to_vector<float>(x));
  }
  expect_error([] { nn::Dropout(1); }, "Dropout: expected 0 <= p < 1, got 1");
  expect_error([] { nn::Dropout(-0.1); }, "expected 0 <= p < 1");
}

}  // namespace
