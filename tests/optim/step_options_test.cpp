#include <tests/support.h>

#include <limits>

#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/adamw.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace step_options_test {

Tensor copy_of(const Tensor& x) { return (x.detach() + 0).requires_grad_(); }

/// Parameters of many sizes and dtypes, with gradients: more than a block searches at once, and more than fit in kernel
/// arguments.
struct Many {
  explicit Many(Device device, std::vector<DType> dtypes) {
    for (std::int64_t i = 0; i < 700; ++i) {
      const DType dtype = dtypes[i % dtypes.size()];
      const std::int64_t n = i % 97 == 0 ? 40'000 + i : i % 5 == 0 ? 0 : i % 61;
      parameters.push_back(randn({n}, dtype, device).requires_grad_());
      parameters.back().set_grad(randn({n}, dtype, device));
    }
  }

  Tensors copies() const {
    Tensors result;
    for (const Tensor& x : parameters) {
      result.push_back(copy_of(x));
      result.back().set_grad(x.grad() + 0);
    }
    return result;
  }

  Tensors parameters;
};

TEST(StepOptions, ClipsAsItSteps) {
  for (const Device device : test_devices()) {
    for (const double max_norm : {0.5, 1e9}) {
      manual_seed(3);
      const Many many(device, {float32, float64});
      const Tensors clipped = many.copies();
      optim::AdamW one(many.parameters, {.lr = 0.1});
      optim::AdamW other(clipped, {.lr = 0.1});
      for (int step = 0; step < 2; ++step) {
        const std::vector<double> grad = to_vector<double>(many.parameters[97].grad());
        const Tensor norm = one.step({.max_grad_norm = max_norm});
        EXPECT_EQ(norm.device(), device);
        EXPECT_EQ(norm.dtype(), float64);
        EXPECT_EQ(norm.shape(), Shape{});
        expect_close(many.parameters[97].grad(), grad, 0, 0);
        if (step == 0) {
          EXPECT_EQ(norm.item(), optim::clip_grad_norm_(clipped, max_norm).item());
        }
        other.step();
      }
      for (std::size_t i = 0; i < clipped.size(); ++i) {
        expect_close(many.parameters[i], clipped[i], 1e-5, 1e-6);
      }
    }
  }
}

TEST(StepOptions, NormOfAllDtypes) {
  for (const Device device : test_devices()) {
    manual_seed(4);
    const Many many(device, {float32, bfloat16, float64, float16});
    double squares = 0;
    for (const Tensor& x : many.parameters) {
      for (const double g : to_vector<double>(x.grad())) {
        squares += g * g;
      }
    }
    optim::SGD optimizer(many.parameters, {.lr = 0});
    const double norm = optimizer.step({.max_grad_norm = std::numeric_limits<double>::infinity()}).item();
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-9 * norm);
    EXPECT_EQ(optimizer.step({.max_grad_norm = 1}).item(), norm);
    EXPECT_FALSE(optimizer.step().defined());
    optimizer.zero_grad();
    EXPECT_EQ(optimizer.step({.max_grad_norm = 1}).item(), 0);
    expect_error([&] { optimizer.step({.max_grad_norm = -1}); }, "SGD: expected max_grad_norm >= 0, got -1");
    expect_error([&] { optimizer.step({.max_grad_norm = NAN}); }, "SGD: expected max_grad_norm >= 0, got nan");
  }
}

// The order of the sum depends on the sizes, not on the gradients' addresses.
TEST(StepOptions, NormHasTheSameBitsUnaligned) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64, bfloat16, float16}) {
      manual_seed(5);
      const Tensor grad = randn({70'003}, dtype, device);
      const Tensor buffer = zeros({70'004}, dtype, device);
      const Tensor unaligned = as_strided(buffer, {70'003}, {1}, 1);
      copy_into(unaligned, grad);
      const Tensor x = zeros({70'003}, dtype, device).requires_grad_();
      const Tensor y = zeros({70'003}, dtype, device).requires_grad_();
      x.set_grad(grad);
      y.set_grad(unaligned);
      EXPECT_EQ(optim::clip_grad_norm_({x}, 1e9).item(), optim::clip_grad_norm_({y}, 1e9).item());
    }
  }
}

TEST(StepOptions, ParametersOnTwoDevices) {
  if (test_devices().size() < 2) {
    GTEST_SKIP() << "one device";
  }
  manual_seed(6);
  const Tensor here = randn({50'000}).requires_grad_();
  const Tensor there = randn({333}, float32, test_devices()[1]).requires_grad_();
  const Tensors same{copy_of(here), copy_of(there.detach().to(Device::cpu()))};
  optim::AdamW split({here, there}, {.lr = 0.1});
  optim::AdamW together(same, {.lr = 0.1});
  for (int step = 0; step < 3; ++step) {
    here.set_grad(randn({50'000}));
    there.set_grad(randn({333}).to(there.device()));
    same[0].set_grad(here.grad());
    same[1].set_grad(there.grad().to(Device::cpu()));
    const double norm = split.step({.max_grad_norm = 1}).item();
    EXPECT_NEAR(norm, together.step({.max_grad_norm = 1}).item(), 1e-9 * norm);
  }
  expect_close(here, same[0], 1e-5, 1e-6);
  expect_close(there, to_vector<double>(same[1]), 1e-5, 1e-6);
  EXPECT_EQ(split.state_dict().at("state.1.step").item(), 3);
}

TEST(GradScaler, StepsAsWithoutIt) {
  for (const Device device : test_devices()) {
    for (const std::optional<double> max_norm : {std::optional<double>{}, std::optional<double>{0.5}}) {
      manual_seed(7);
      const Tensor weight = randn({40, 30}, float32, device);
      const Tensor x = copy_of(weight);
      const Tensor y = copy_of(weight);
      const Tensor input = randn({40, 30}, float32, device);
      optim::AdamW scaled({x}, {.lr = 0.1});
      optim::AdamW plain({y}, {.lr = 0.1});
      optim::GradScaler scaler({.init_scale = 1024});
      for (int step = 0; step < 3; ++step) {
        scaled.zero_grad();
        scaler.scale(sum(x * x * input)).backward();
        const Tensor norm = scaled.step({.max_grad_norm = max_norm, .scaler = &scaler});
        scaler.update();
        plain.zero_grad();
        sum(y * y * input).backward();
        EXPECT_NEAR(norm.item(), plain.step({.max_grad_norm = max_norm.value_or(1e9)}).item(), 1e-6 * norm.item());
      }
      expect_close(x, y, 1e-6, 1e-7);
      EXPECT_EQ(scaler.scale(), 1024);
    }
  }
}

TEST(GradScaler, SkipsOverflowsAndRecovers) {
  for (const Device device : test_devices()) {
    const Tensor x = full({300}, 2, float16, device).requires_grad_();
    const Tensor unused = full({3}, 2, float16, device).requires_grad_();
    optim::AdamW optimizer({x, unused}, {.lr = 0.5, .weight_decay = 0});
    optim::GradScaler scaler({.init_scale = 65536, .growth_interval = 2});
    std::vector<double> scales;
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      // The gradient of each element is the scale, and 65536 exceeds float16's range.
      scaler.scale(sum(x)).backward();
      const double norm = optimizer.step({.scaler = &scaler}).item();
      EXPECT_EQ(std::isfinite(norm), step != 0 && step != 3) << step;
      scaler.update();
      scales.push_back(scaler.scale());
      if (step == 0) {  // nothing has changed, not even the averages
        expect_close(x, std::vector<double>(300, 2), 0, 0);
        EXPECT_TRUE(optimizer.state_dict().empty());
      }
    }
    EXPECT_EQ(scales, (std::vector<double>{32768, 32768, 65536, 32768, 32768, 65536}));
    EXPECT_EQ(optimizer.state_dict().at("state.0.step").item(), 4);
    expect_close(x, std::vector<double>(300, 0), 0, 1e-3);  // AdamW moves by lr per step for a constant gradient
    expect_close(unused, {2, 2, 2}, 0, 0);
  }
}

// An overflow skips only the step of the optimizer that has it; both use the next scale.
TEST(GradScaler, TwoOptimizers) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({2}, float32, device).requires_grad_();
    const Tensor y = ones({2}, float32, device).requires_grad_();
    optim::SGD first({x}, {.lr = 1}), second({y}, {.lr = 1});
    optim::GradScaler scaler({.init_scale = 8});
    scaler.scale(sum(x) + sum(y)).backward();
    x.set_grad(full({2}, std::numeric_limits<double>::infinity(), float32, device));
    first.step({.scaler = &scaler});
    second.step({.scaler = &scaler});
    scaler.update();
    expect_close(x, {1, 1}, 0, 0);
    expect_close(y, {0, 0}, 0, 0);
    EXPECT_EQ(scaler.scale(), 4);
    scaler.update();  // the overflow was recorded
    EXPECT_EQ(scaler.scale(), 4);
  }
}

TEST(GradScaler, StateDictRoundTrip) {
  for (const Device device : test_devices()) {
    optim::GradScaler first({.init_scale = 4, .growth_interval = 3});
    first.scale(ones({}, float32, device));
    first.update();
    first.update();
    const StateDict state = first.state_dict();
    optim::GradScaler second({.growth_interval = 3});
    second.load_state_dict(state);
    EXPECT_EQ(second.scale(), 4);
    EXPECT_EQ(second.scale(ones({}, float32, device)).item(), 4);
    second.update();
    EXPECT_EQ(second.scale(), 8);

    StateDict bad = state;
    bad["scale"] = zeros({});
    expect_error([&] { second.load_state_dict(bad); }, "GradScaler: load_state_dict: expected \"scale\" > 0, got 0");
    bad["scale"] = zeros({2});
    expect_error([&] { second.load_state_dict(bad); }, "expected a scalar \"scale\", got [2]");
    bad = state;
    bad.erase("growth_tracker");
    expect_error([&] { second.load_state_dict(bad); }, "expected a scalar \"growth_tracker\", got none");
    bad = state;
    bad["more"] = zeros({});
    expect_error([&] { second.load_state_dict(bad); }, "\"more\" is unexpected");
    EXPECT_EQ(second.scale(), 8);
  }
}

TEST(GradScaler, RefusesBadArguments) {
  expect_error([] { optim::GradScaler({.init_scale = 0}); }, "expected init_scale > 0, got 0");
  expect_error([] { optim::GradScaler({.growth_factor = 1}); }, "expected growth_factor > 1, got 1");
  expect_error([] { optim::GradScaler({.backoff_factor = 1}); }, "expected backoff_factor in (0, 1), got 1");
  expect_error([] { optim::GradScaler({.growth_interval = 0}); }, "expected growth_interval >= 1, got 0");
  optim::GradScaler scaler;
  expect_error([&] { scaler.scale(ones({}, int64)); }, "expected a floating loss, got one of int64");
}

// The scale stays a float32 that is finite and normal, and the bounds themselves are reached.
TEST(GradScaler, ScaleStaysInRange) {
  for (const Device device : test_devices()) {
    const auto scale_after = [&](optim::GradScaler& scaler, double gradient) {
      const Tensor x = ones({1}, float32, device).requires_grad_();
      optim::SGD optimizer({x}, {.lr = 0});
      x.set_grad(full({1}, gradient, float32, device));
      optimizer.step({.scaler = &scaler});
      scaler.update();
      return scaler.scale();
    };
    optim::GradScaler up({.init_scale = 0x1p126, .growth_interval = 1});
    EXPECT_EQ(scale_after(up, 1), 0x1p127);
    EXPECT_EQ(scale_after(up, 1), 0x1p127);
    optim::GradScaler down({.init_scale = 0x1p-125, .growth_interval = 1});
    EXPECT_EQ(scale_after(down, INFINITY), 0x1p-126);
    EXPECT_EQ(scale_after(down, INFINITY), 0x1p-126);
    EXPECT_EQ(scale_after(down, 1), 0x1p-125);
  }
}

}  // namespace step_options_test
