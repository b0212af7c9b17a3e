#include <tests/support.h>

#include <functional>

#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/optim/adam.h>
#include <mica/optim/adamw.h>
#include <mica/optim/lion.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Values = std::vector<double>;

/// Steps `optimizer` with random gradients and `reference(theta, g, t)` beside it, for an odd number of parameters
/// that also spans several threads.
template <class Make>
void compare_with_reference(Device device, DType dtype, const Make& make,
                            const std::function<void(Values&, const Values&, int)>& reference, double tolerance) {
  manual_seed(11);
  const Tensor parameter = randn({37, 613}, dtype, device).requires_grad_();
  Values theta = to_vector<double>(parameter);
  auto optimizer = make(parameter);
  for (int t = 1; t <= 4; ++t) {
    const std::uint32_t version = parameter.version();
    const Tensor grad = randn({37, 613}, dtype, device);
    parameter.set_grad(grad);
    optimizer.step();
    reference(theta, to_vector<double>(grad), t);
    EXPECT_GT(parameter.version(), version);
  }
  expect_close(parameter, theta, tolerance, tolerance);
}

std::function<void(Values&, const Values&, int)> adamw_reference(optim::AdamWOptions o) {
  return [o, m = Values(37 * 613), v = Values(37 * 613)](Values& theta, const Values& g, int t) mutable {
    for (std::size_t i = 0; i < theta.size(); ++i) {
      m[i] = o.betas[0] * m[i] + (1 - o.betas[0]) * g[i];
      v[i] = o.betas[1] * v[i] + (1 - o.betas[1]) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(o.betas[0], t));
      const double v_hat = v[i] / (1 - std::pow(o.betas[1], t));
      theta[i] = theta[i] - o.lr * o.weight_decay * theta[i] - o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
    }
  };
}

std::function<void(Values&, const Values&, int)> sgd_reference(optim::SGDOptions o) {
  return [o, b = Values(37 * 613)](Values& theta, const Values& grad, int t) mutable {
    for (std::size_t i = 0; i < theta.size(); ++i) {
      double g = grad[i] + o.weight_decay * theta[i];
      if (o.momentum != 0) {
        b[i] = t == 1 ? g : o.momentum * b[i] + (1 - o.dampening) * g;
        g = o.nesterov ? g + o.momentum * b[i] : b[i];
      }
      theta[i] -= o.lr * g;
    }
  };
}

TEST(AdamW, MatchesReference) {
  const optim::AdamWOptions options{.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-3, .weight_decay = 0.2};
  for (const Device device : test_devices()) {
    for (const auto& [dtype, tolerance] : {std::pair(float64, 1e-13), std::pair(float32, 2e-6)}) {
      compare_with_reference(
          device, dtype, [&](const Tensor& x) { return optim::AdamW({x}, options); }, adamw_reference(options),
          tolerance);
    }
  }
}

TEST(Adam, MatchesReference) {
  const optim::AdamOptions options{.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-3, .weight_decay = 0.2};
  for (const Device device : test_devices()) {
    for (const auto& [dtype, tolerance] : {std::pair(float64, 1e-13), std::pair(float32, 2e-6)}) {
      const auto adamw = adamw_reference({.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-3, .weight_decay = 0});
      compare_with_reference(
          device, dtype, [&](const Tensor& x) { return optim::Adam({x}, options); },
          [&](Values& theta, const Values& grad, int t) {
            Values decayed(grad.size());
            for (std::size_t i = 0; i < grad.size(); ++i) {
              decayed[i] = grad[i] + options.weight_decay * theta[i];
            }
            adamw(theta, decayed, t);
          },
          tolerance);
    }
  }
}

TEST(Lion, MatchesReference) {
  const optim::LionOptions options{.lr = 0.05, .betas = {0.8, 0.95}, .weight_decay = 0.2};
  for (const Device device : test_devices()) {
    for (const auto& [dtype, tolerance] : {std::pair(float64, 1e-13), std::pair(float32, 2e-6)}) {
      Values m(37 * 613);
      compare_with_reference(
          device, dtype, [&](const Tensor& x) { return optim::Lion({x}, options); },
          [&](Values& theta, const Values& g, int) {
            for (std::size_t i = 0; i < theta.size(); ++i) {
              const double direction = options.betas[0] * m[i] + (1 - options.betas[0]) * g[i];
              theta[i] = (1 - options.lr * options.weight_decay) * theta[i] - options.lr * (direction > 0   ? 1
                                                                                            : direction < 0 ? -1
                                                                                                            : 0);
              m[i] = options.betas[1] * m[i] + (1 - options.betas[1]) * g[i];
            }
          },
          tolerance);
    }
  }
}

TEST(Lion, ZerosAndNaN) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.0F, 2.0F, 3.0F}, device).requires_grad_();
    x.set_grad(from_data({0.0F, -1e-30F, NAN}, device));
    optim::Lion lion({x}, {.lr = 0.5});
    lion.step();
    expect_close(x, Values{1, 2.5, NAN}, 0, 0);
    EXPECT_TRUE(lion.state_dict().contains("state.0.exp_avg"));
  }
}

TEST(Adam, OptionErrors) {
  const Tensor x = ones({2}).requires_grad_();
  expect_error([&] { optim::Adam({x}, {.lr = -1}); }, "Adam: ");
  expect_error([&] { optim::Adam({x}, {.betas = {0.9, 1}}); }, "Adam: expected betas in [0, 1), got 0.9 and 1");
  expect_error([&] { optim::Adam({x}, {.eps = -1}); }, "Adam: expected eps >= 0, got -1");
  expect_error([&] { optim::Adam({x}, {.weight_decay = NAN}); }, "Adam: expected weight_decay >= 0, got nan");
  expect_error([&] { optim::Lion({x}, {.lr = NAN}); }, "Lion: ");
  expect_error([&] { optim::Lion({x}, {.betas = {-0.1, 0.9}}); }, "Lion: expected betas in [0, 1), got -0.1 and 0.9");
  expect_error([&] { optim::Lion({x}, {.weight_decay = -1}); }, "Lion: expected weight_decay >= 0, got -1");
}

TEST(SGD, MatchesReference) {
  const optim::SGDOptions cases[] = {{.lr = 0.1},
                                     {.lr = 0.1, .weight_decay = 0.3},
                                     {.lr = 0.1, .momentum = 0.9},
                                     {.lr = 0.1, .momentum = 0.9, .dampening = 0.4, .weight_decay = 0.1},
                                     {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}};
  for (const Device device : test_devices()) {
    for (const optim::SGDOptions& options : cases) {
      for (const auto& [dtype, tolerance] : {std::pair(float64, 1e-13), std::pair(float32, 2e-6)}) {
        compare_with_reference(
            device, dtype, [&](const Tensor& x) { return optim::SGD({x}, options); }, sgd_reference(options),
            tolerance);
      }
    }
  }
}

TEST(AdamW, SixteenBitParametersAreRoundedOnce) {
  const optim::AdamWOptions options{.lr = 0.01, .weight_decay = 0.1};
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      manual_seed(2);
      const Tensor parameter = randn({1001}, dtype, device).requires_grad_();
      const Tensor exact = parameter.detach().to(float64).requires_grad_();
      const Tensor grad = randn({1001}, dtype, device);
      parameter.set_grad(grad);
      exact.set_grad(grad.to(float64));
      optim::AdamW({parameter}, options).step();
      optim::AdamW({exact}, options).step();
      expect_close(parameter, to_vector<double>(exact), dtype == float16 ? 0x1p-11 : 0x1p-8, 1e-6);
    }
  }
}

TEST(AdamW, StridedAndUnalignedTensors) {
  for (const Device device : test_devices()) {
    manual_seed(4);
    const Tensor base = randn({6, 9}, float32, device);
    const Tensor strided = as_strided(base, {4, 3}, {2, 9}, 1).requires_grad_();
    const Tensor unaligned = as_strided(randn({14}, float32, device), {4, 3}, {3, 1}, 1).requires_grad_();
    const Tensor grad = as_strided(randn({12}, float32, device), {4, 3}, {1, 4}, 0);
    const std::vector<double> before = to_vector<double>(base);
    for (const Tensor& x : {strided, unaligned}) {
      const Tensor plain = from_data(to_vector<float>(x), x.shape(), device).requires_grad_();
      optim::AdamW optimizer({x, plain}, {.lr = 0.1});
      for (int step = 0; step < 2; ++step) {
        x.set_grad(grad);
        plain.set_grad(from_data(to_vector<float>(grad), x.shape(), device));
        optimizer.step();
      }
      expect_close(x, plain, 0, 0);
    }
    const std::vector<double> after = to_vector<double>(base);
    int changed = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
      changed += before[i] != after[i];
    }
    EXPECT_EQ(changed, 12);
  }
}

TEST(AdamW, SameBitsOnAnyNumberOfThreads) {
  const int threads = num_threads();
  std::vector<std::vector<float>> results;
  for (const int n : {1, 2, 5}) {
    set_num_threads(n);
    manual_seed(6);
    const Tensor x = randn({100'003}).requires_grad_();
    optim::AdamW optimizer({x});
    for (int step = 0; step < 3; ++step) {
      x.set_grad(randn({100'003}));
      optimizer.step();
    }
    results.push_back(to_vector<float>(x));
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Optimizer, SkipsParametersWithoutGradientAndEmptyOnes) {
  for (const Device device : test_devices()) {
    const Tensor a = ones({3}, float32, device).requires_grad_();
    const Tensor b = ones({3}, float32, device).requires_grad_();
    const Tensor none = ones({0, 2}, float32, device).requires_grad_();
    optim::AdamW optimizer({a, b, none}, {.lr = 0.1, .weight_decay = 0});
    a.set_grad(ones({3}, float32, device));
    none.set_grad(ones({0, 2}, float32, device));
    optimizer.step();
    expect_close(b, {1, 1, 1}, 0, 0);
    expect_close(a, {0.9, 0.9, 0.9}, 1e-6, 0);
    // b's first step comes later and is corrected as a first step.
    b.set_grad(ones({3}, float32, device));
    optimizer.step();
    expect_close(b, {0.9, 0.9, 0.9}, 1e-6, 0);
    optimizer.zero_grad();
    EXPECT_FALSE(a.grad().defined());
  }
}

TEST(Optimizer, GroupsAndLearningRates) {
  const Tensor matrix = ones({2, 2}).requires_grad_();
  const Tensor vector = ones({2}).requires_grad_();
  optim::AdamW optimizer(optim::AdamW::decay_matrices({vector, matrix}, {.lr = 0.5, .weight_decay = 0.5}));
  ASSERT_EQ(optimizer.group_count(), 2u);
  matrix.set_grad(zeros({2, 2}));
  vector.set_grad(zeros({2}));
  optimizer.step();
  expect_close(matrix, {0.75, 0.75, 0.75, 0.75}, 0, 0);
  expect_close(vector, {1, 1}, 0, 0);

  optimizer.set_lr(0.25);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.25);
  optimizer.set_lr(1, 0.125);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.125);
  expect_error([&] { optimizer.set_lr(-1); }, "expected lr >= 0, got -1");
}

TEST(Optimizer, FollowsParametersThatMove) {
  for (const Device device : test_devices()) {
    manual_seed(8);
    const Tensor moved = randn({9}).requires_grad_();
    const Tensor stays = from_data(to_vector<float>(moved), {9}).requires_grad_();
    optim::AdamW optimizer({moved, stays}, {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        moved.set_data(moved.detach().to(device, float64));
      }
      const Tensor grad = randn({9});
      moved.set_grad(grad.to(moved.device(), moved.dtype()));
      stays.set_grad(grad);
      optimizer.step();
    }
    EXPECT_EQ(moved.device(), device);
    expect_close(moved, to_vector<double>(stays), 1e-5, 1e-6);
  }
}

TEST(Optimizer, StateDictRoundTrip) {
  for (const Device device : test_devices()) {
    manual_seed(9);
    const Tensor a = randn({5}).requires_grad_();
    const Tensor unused = randn({5}).requires_grad_();
    const Tensor b = from_data(to_vector<float>(a), {5}, device).requires_grad_();
    const Tensor b_unused = randn({5}, float32, device).requires_grad_();
    optim::AdamW first({a, unused}, {.lr = 0.1});
    const auto step = [](optim::AdamW& optimizer, const Tensor& x, const Tensor& grad) {
      x.set_grad(grad.to(x.device()));
      optimizer.step();
    };
    step(first, a, randn({5}));
    step(first, a, randn({5}));
    b.set_data(a.detach().to(device));

    const StateDict state = first.state_dict();
    ASSERT_EQ(state.size(), 3u);
    EXPECT_EQ(state.at("state.0.step").item(), 2);
    optim::AdamW second({b, b_unused}, {.lr = 0.1});
    second.load_state_dict(state);
    const Tensor grad = randn({5});
    step(first, a, grad);  // does not change the state of `second`
    if (device.is_cpu()) {
      b.set_data(b.detach().to(float64).to(float32));  // new memory
    }
    step(second, b, grad);
    EXPECT_EQ(second.state_dict().at("state.0.step").item(), 3);
    expect_close(second.state_dict().at("state.0.exp_avg_sq"),
                 to_vector<double>(first.state_dict().at("state.0.exp_avg_sq")), 1e-6, 0);

    StateDict bad = state;
    bad["state.0.exp_avg"] = ones({4});
    expect_error([&] { second.load_state_dict(bad); }, "expected \"state.0.exp_avg\" of shape [5], got [4]");
    bad = state;
    bad.erase("state.0.exp_avg");
    expect_error([&] { second.load_state_dict(bad); }, "must be given together");
    bad = state;
    bad["state.2.step"] = ones({});
    expect_error([&] { second.load_state_dict(bad); }, "\"state.2.step\" is unexpected: there are 2 parameters");
    EXPECT_EQ(second.state_dict().at("state.0.step").item(), 3);
  }
}

TEST(Optimizer, RefusesBadArguments) {
  const Tensor x = ones({2}).requires_grad_();
  expect_error([&] { optim::AdamW({x}, {.lr = -1}); }, "AdamW: expected lr >= 0, got -1");
  expect_error([&] { optim::AdamW({x}, {.lr = NAN}); }, "AdamW: expected lr >= 0, got nan");
  expect_error([&] { optim::AdamW({x}, {.betas = {0.9, 1}}); }, "AdamW: expected betas in [0, 1), got 0.9 and 1");
  expect_error([&] { optim::AdamW({x}, {.eps = -1}); }, "expected eps >= 0");
  expect_error([&] { optim::AdamW({x}, {.weight_decay = -1}); }, "expected weight_decay >= 0");
  expect_error([&] { optim::AdamW({x, x}); }, "was given twice");
  expect_error([&] { optim::AdamW(Tensors{}); }, "at least one parameter");
  expect_error([&] { optim::SGD({ones({2})}); }, "leaves that require a gradient");
  expect_error([&] { optim::SGD({x}, {.nesterov = true}); }, "nesterov needs momentum");
  expect_error([&] { optim::SGD({x}, {.momentum = -1}); }, "expected momentum >= 0");
}

TEST(Optimizer, RefusesGroupsThatDoNotExist) {
  const Tensor x = ones({2}).requires_grad_();
  optim::AdamW adamw({x});
  optim::SGD sgd({x});
  expect_error([&] { adamw.lr(7); }, "AdamW: group 7 is out of range for 1 groups");
  expect_error([&] { adamw.set_lr(7, 0.1); }, "AdamW: group 7 is out of range for 1 groups");
  expect_error([&] { sgd.lr(1); }, "SGD: group 1 is out of range for 1 groups");
  expect_error([&] { sgd.set_lr(1, 0.1); }, "SGD: group 1 is out of range for 1 groups");
  EXPECT_EQ(adamw.lr(), 1e-3);
}

TEST(Optimizer, RefusesNumbersThatAreNotFinite) {
  const Tensor x = ones({2}).requires_grad_();
  expect_error([&] { optim::AdamW({x}, {.eps = INFINITY}); }, "expected eps >= 0, got inf");
  expect_error([&] { optim::AdamW({x}, {.weight_decay = INFINITY}); }, "expected weight_decay >= 0, got inf");
  expect_error([&] { optim::SGD({x}, {.momentum = INFINITY}); }, "expected momentum >= 0, got inf");
  expect_error([&] { optim::SGD({x}, {.dampening = NAN}); }, "expected a finite dampening, got nan");
  expect_error([&] { optim::SGD({x}, {.weight_decay = INFINITY}); }, "expected weight_decay >= 0, got inf");
}

TEST(Optimizer, RefusesParametersThatOverlap) {
  for (const Device device : test_devices()) {
    const Tensor base = ones({4, 6}, float32, device);
    const auto part = [&](const Shape& shape, const Strides& strides, std::int64_t offset) {
      return as_strided(base, shape, strides, offset).requires_grad_();
    };
    const Tensor rows = part({2, 6}, {6, 1}, 0);
    expect_error(
        [&] {
          optim::AdamW({rows, part({2, 6}, {6, 1}, 6)});
        },
        "AdamW: expected parameters without overlapping elements, got two views that "
        "overlap, of shape [2, 6] and [2, 6]");
    expect_error([&] { optim::SGD({rows, part({6, 2}, {1, 6}, 0)}); }, "two views that overlap");
    expect_error([&] { optim::SGD({part({4, 3}, {6, 2}, 0), part({4, 2}, {6, 3}, 0)}); }, "two views that overlap");
    expect_error([&] { optim::SGD({part({3, 4}, {0, 1}, 0)}); }, "got one of shape [3, 4] and strides [0, 1]");
    expect_error([&] { optim::SGD({part({3, 4}, {1, 1}, 0)}); }, "got one of shape [3, 4]");

    // Interleaved or adjacent views share no element.
    const Tensor even = part({4, 3}, {6, 2}, 0);
    const Tensor odd = part({4, 3}, {6, 2}, 1);
    optim::SGD optimizer({even, odd, ones({0}, float32, device).requires_grad_()}, {.lr = 1});
    even.set_grad(ones({4, 3}, float32, device));
    odd.set_grad(full({4, 3}, 2, float32, device));
    optimizer.step();
    expect_close(even, full({4, 3}, 0), 0, 0);
    expect_close(odd, full({4, 3}, -1), 0, 0);
    optim::AdamW({rows, part({2, 6}, {6, 1}, 12)});
  }
}

TEST(Optimizer, RefusesStepsThatAreNotWholeNumbers) {
  const Tensor x = ones({2}).requires_grad_();
  optim::AdamW optimizer({x});
  const auto with_step = [](const Tensor& step) {
    return StateDict{{"state.0.step", step}, {"state.0.exp_avg", zeros({2})}, {"state.0.exp_avg_sq", zeros({2})}};
  };
  const auto refused = [&](const Tensor& step, const std::string& got) {
    expect_error([&] { optimizer.load_state_dict(with_step(step)); },
                 "AdamW: load_state_dict: expected \"state.0.step\" to be a whole number from 0 to 2^53, got " + got);
  };
  refused(full({}, 1.5), "1.5");
  refused(full({}, -1), "-1");
  refused(full({}, NAN), "nan");
  refused(full({}, INFINITY), "inf");
  refused(full({}, 1e300, float64), "1e+300");
  refused(from_data<std::int64_t>({INT64_MAX}, Shape{}), "9223372036854775807");
  refused(from_data<std::int64_t>({INT64_MIN}, Shape{}), "-9223372036854775808");
  refused(from_data<std::int64_t>({(std::int64_t{1} << 53) + 1}, Shape{}), "9007199254740993");
  EXPECT_TRUE(optimizer.state_dict().empty());

  optimizer.load_state_dict(with_step(full({}, 3, float32)));  // PyTorch stores the step as float32
  x.set_grad(ones({2}));
  optimizer.step();
  EXPECT_EQ(optimizer.state_dict().at("state.0.step").item(), 4);
  optimizer.load_state_dict(with_step(full({}, 0x1p53, float64)));
  optimizer.step();
}

}  // namespace
