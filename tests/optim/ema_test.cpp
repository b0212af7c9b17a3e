#include <tests/support.h>

#include <optional>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/rng.h>
#include <mica/nn/linear.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/optim/ema.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/groups.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Values = std::vector<double>;

TEST(Ema, IsItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      const Tensor x = randn({5, 3}, dtype, device).requires_grad_();
      optim::Ema ema({x}, 0.9);
      Values expected = to_vector<double>(x);
      optim::SGD sgd({x}, {.lr = 0.5, .master_weights = false});
      for (int step = 0; step < 5; ++step) {
        x.set_grad(randn({5, 3}, dtype, device));
        sgd.step();
        ema.update();
        const Values values = to_vector<double>(x);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          expected[i] += (1 - 0.9) * (values[i] - expected[i]);
        }
      }
      EXPECT_EQ(ema.averages()[0].dtype(), accumulate_dtype(dtype));
      EXPECT_FALSE(ema.averages()[0].requires_grad());
      const double tolerance = dtype == float64 ? 1e-14 : 1e-6;
      expect_close(ema.averages()[0], expected, tolerance, tolerance);
    }
  }
}

TEST(Ema, Swap) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.0F, 2.0F}, device).to(bfloat16).detach().requires_grad_();
    optim::Ema ema({x}, 0.5);
    x.set_data(from_data({3.0F, 5.0F}, device).to(bfloat16));
    ema.update();
    ema.swap();
    EXPECT_TRUE(ema.is_swapped());
    expect_close(x, Values{2, 3.5}, 0, 0);
    expect_error([&] { ema.update(); }, "Ema: update() was called while the parameters hold the averages");
    ema.swap();
    EXPECT_FALSE(ema.is_swapped());
    expect_close(x, Values{3, 5}, 0, 0);
    expect_close(ema.averages()[0], Values{2, 3.5}, 0, 0);
  }
}

static_assert(!std::is_copy_constructible_v<optim::Ema> && !std::is_copy_constructible_v<optim::GradScaler>);

TEST(Ema, WritesWhileSwappedAreNotLost) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.0F, 2.0F}, device).to(bfloat16).detach().requires_grad_();
    const Tensor alone = ones({2}, bfloat16, device).requires_grad_();
    optim::SGD sgd({x, alone}, {.lr = 1});
    x.set_grad(ones({2}, bfloat16, device));
    sgd.step();  // 0, 1
    detail::Capture capture;
    {
      const detail::Capturing capturing(capture);
      sgd.step();
    }
    x.set_data(from_data({3.0F, 5.0F}, device).to(bfloat16));
    std::optional<optim::Ema> ema(std::in_place, Tensors{x}, 0.5);
    x.set_data(from_data({5.0F, 6.0F}, device).to(bfloat16));
    x.set_grad(ones({2}, bfloat16, device));
    ema->update();
    ema->swap();
    const std::string refused = "SGD: step was called while a parameter of shape [2] holds the average of an Ema";
    expect_error([&] { sgd.step(); }, refused);
    expect_error([&] { capture.calls.back()(); }, refused);  // as a replay does
    expect_close(x, Values{4, 5.5}, 0, 0);
    expect_error([&] { ema->load_state_dict(ema->state_dict()); }, "Ema: load_state_dict() was called while");
    x.set_grad({});
    alone.set_grad(ones({2}, bfloat16, device));
    sgd.step();  // of others
    expect_close(alone, Values{0, 0}, 0, 0);

    x.set_data(x.detach().to(float32));  // moves, but is not another value
    ema->swap();
    expect_close(x, Values{5, 6}, 0, 0);
    x.set_grad(ones({2}, float32, device));
    sgd.step();
    expect_close(x, Values{4, 5}, 0, 0);

    ema->swap();
    {
      const autograd::NoGrad no_grad;
      copy_(x, zeros({2}, float32, device));
    }
    for (int i = 0; i < 2; ++i) {
      expect_error([&] { ema->swap(); }, "Ema: swap: parameter 0 of shape [2] was written by copy_ while it held");
      EXPECT_TRUE(ema->is_swapped());
      expect_close(x, Values{0, 0}, 0, 0);
    }
    ema.reset();  // the parameter keeps what it has
    sgd.step();
    expect_close(x, Values{-1, -1}, 0, 0);

    ema.emplace(Tensors{x}, 0.5);
    ema->swap();
    ema.reset();
    sgd.step();
    expect_close(x, Values{-2, -2}, 0, 0);
  }
}

TEST(Ema, SwapsEachParameterWithItsOwnAverage) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.0F, 2.0F}, device).requires_grad_(),
                 y = from_data({30.0F, 40.0F}, device).requires_grad_();
    optim::Ema ema({x, y}, 0.5);
    x.set_data(from_data({3.0F, 6.0F}, device));
    y.set_data(from_data({50.0F, 80.0F}, device));
    ema.update();
    ema.swap();
    expect_close(x, Values{2, 4}, 0, 0);
    expect_close(y, Values{40, 60}, 0, 0);
    ema.swap();
    expect_close(x, Values{3, 6}, 0, 0);
    expect_close(y, Values{50, 80}, 0, 0);
  }
}

TEST(Ema, StateDict) {
  const Tensor x = from_data({1.0F, 2.0F}).requires_grad_(), y = from_data({3.0F}).requires_grad_();
  optim::Ema ema({x, y}, 0.5);
  StateDict state{{"average.0", from_data<double>({7.0, 8.0})}, {"average.1", from_data<double>({9.0})}};
  ema.load_state_dict(state);
  expect_close(ema.averages()[0], Values{7, 8}, 0, 0);
  expect_close(ema.state_dict().at("average.1"), Values{9}, 0, 0);
  state["average.1"] = ones({2});
  state["average.2"] = ones({2});
  state.erase("average.0");
  expect_error([&] { ema.load_state_dict(state); }, "missing: average.0");
  expect_error([&] { ema.load_state_dict(state); }, "average.1: expected floating [1], got float32 [2]");
  expect_error([&] { ema.load_state_dict(state); }, "unexpected: average.2");
  expect_close(ema.averages()[0], Values{7, 8}, 0, 0);
}

TEST(Ema, FollowsItsParametersToAnotherDevice) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const Tensor x = from_data({1.0F, 2.0F}).requires_grad_();
  optim::Ema ema({x}, 0.5);
  x.set_data(from_data({3.0F, 4.0F}, Device::cuda()));
  ema.update();
  EXPECT_EQ(ema.averages()[0].device(), Device::cuda());
  expect_close(ema.averages()[0], Values{2, 3}, 0, 0);
}

TEST(Ema, Errors) {
  const Tensor x = ones({2});
  expect_error([&] { optim::Ema({x}, 1); }, "Ema: expected a decay in [0, 1), got 1");
  expect_error([&] { optim::Ema({x}, NAN); }, "Ema: expected a decay in [0, 1), got nan");
  expect_error([&] { optim::Ema({x, x}); }, "Ema: parameter 1 was given twice");
  expect_error([&] { optim::Ema({ones({2}, int64)}); }, "Ema: expected floating parameters, got int64 as number 0");
  expect_error([&] { optim::Ema({Tensor{}}); }, "got an undefined tensor as number 0");
}

TEST(GroupByName, FirstPatternWins) {
  const Tensor a = ones({1}), b = ones({1}), c = ones({1}), d = ones({1});
  const nn::NamedTensors named{{"h.0.weight", a}, {"h.0.bias", b}, {"h.10.norm.weight", c}, {"lm_head.weight", d}};
  const auto names_in = [&](const Tensors& group) {
    std::string names;
    for (const auto& [name, tensor] : named) {
      for (const Tensor& member : group) {
        names += tensor.is_same(member) ? name + " " : "";
      }
    }
    return names;
  };
  const auto expect = [&](const std::vector<std::vector<std::string>>& patterns,
                          const std::vector<std::string>& expected) {
    const std::vector<Tensors> groups = optim::group_by_name(named, patterns);
    ASSERT_EQ(groups.size(), expected.size());
    for (std::size_t i = 0; i < groups.size(); ++i) {
      EXPECT_EQ(names_in(groups[i]), expected[i]) << i;
    }
  };
  expect({}, {"h.0.weight h.0.bias h.10.norm.weight lm_head.weight "});
  expect({{"*.bias", "*norm*"}}, {"h.0.bias h.10.norm.weight ", "h.0.weight lm_head.weight "});
  expect({{"lm_head.weight"}, {"*weight"}}, {"lm_head.weight ", "h.0.weight h.10.norm.weight ", "h.0.bias "});
  expect({{"h.?.*"}}, {"h.0.weight h.0.bias ", "h.10.norm.weight lm_head.weight "});
  expect({{"h.*.*e*"}}, {"h.0.weight h.10.norm.weight ", "h.0.bias lm_head.weight "});
  expect({{"**"}}, {"h.0.weight h.0.bias h.10.norm.weight lm_head.weight ", ""});
  expect_error([&] { optim::group_by_name(named, {{"*", "*.gamma"}}); }, "no parameter's name matches *.gamma");
  expect_error([&] { optim::group_by_name(named, {{"h.0.weigh"}}); }, "no parameter's name matches h.0.weigh");
  expect_error([&] { optim::group_by_name(named, {{""}}); }, "no parameter's name matches");
}

}  // namespace
