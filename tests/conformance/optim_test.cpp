#include "fixture.h"
#include "tests/support.h"
#include <mica/mica.h>

using namespace mica;
using namespace mica::conformance;
using testing_support::expect_close;
using testing_support::test_devices;

namespace optim_test {

double tolerance(DType dtype) { return dtype == float64 ? 1e-11 : 1e-5; }

/// A leaf with the elements of `value` on a device.
Tensor parameter(const Tensor& value, Device device) {
  const Tensor x = value.to(device);
  return (x.is_same(value) ? x + 0 : x).detach().requires_grad_();
}

optim::SGDOptions sgd_options(const Json& a) {
  const optim::SGDOptions standard;
  return {.lr = a.value("lr", standard.lr),
          .momentum = a.value("momentum", standard.momentum),
          .dampening = a.value("dampening", standard.dampening),
          .weight_decay = a.value("weight_decay", standard.weight_decay),
          .nesterov = a.value("nesterov", standard.nesterov)};
}

optim::AdamWOptions adamw_options(const Json& a) {
  const optim::AdamWOptions standard;
  return {.lr = a.value("lr", standard.lr),
          .betas = a.value("betas", standard.betas),
          .eps = a.value("eps", standard.eps),
          .weight_decay = a.value("weight_decay", standard.weight_decay)};
}

optim::AdamOptions adam_options(const Json& a) {
  const optim::AdamOptions standard;
  return {.lr = a.value("lr", standard.lr),
          .betas = a.value("betas", standard.betas),
          .eps = a.value("eps", standard.eps),
          .weight_decay = a.value("weight_decay", standard.weight_decay)};
}

/// Repeats the steps of a fixture. Its inputs are the parameters; its dys are their gradients, and its outputs their
/// values, for one step after the other.
template <class Optimizer>
void expect_steps(const Case& c, Optimizer& optimizer, const Tensors& parameters) {
  const std::size_t count = parameters.size();
  for (std::size_t i = 0; i < c.outputs.size(); ++i) {
    const Tensor& p = parameters[i % count];
    p.set_grad(c.dys[i].defined() ? c.dys[i].to(p.device()) : Tensor{});
    if (i % count + 1 < count) {
      continue;
    }
    optimizer.step();
    for (std::size_t j = 0; j < count; ++j) {
      const Tensor& expected = c.outputs[i + 1 - count + j];
      const double close = tolerance(expected.dtype());
      expect_close(parameters[j].detach(), expected, close, close,
                   "parameter " + std::to_string(j) + " after step " + std::to_string(i / count + 1));
    }
  }
}

template <class Optimizer, class Options>
void expect_agreement(const std::string& name, Options options) {
  const Fixture fixture = load_fixture(fixture_paths(true).at(name));
  for (const Device device : test_devices()) {
    for (const Case& c : fixture.cases) {
      SCOPED_TRACE(c.sample + ": " + c.attributes.dump());
      Tensors parameters;
      for (const Tensor& input : c.inputs) {
        parameters.push_back(parameter(input, device));
      }
      if (c.raises.empty() && c.refused.empty()) {
        Optimizer optimizer(parameters, options(c.attributes));
        expect_steps(c, optimizer, parameters);
        continue;
      }
      std::vector<typename Optimizer::Group> groups;
      for (const Json& places : c.about["groups"]) {
        groups.push_back({.parameters = {}, .options = options(c.attributes)});
        for (const std::size_t place : places) {
          groups.back().parameters.push_back(parameters.at(place));
        }
      }
      EXPECT_THROW(Optimizer{groups}, Error) << c.raises << c.refused;
    }
  }
}

TEST(OptimConformance, SGD) { expect_agreement<optim::SGD>("optim_SGD", sgd_options); }

TEST(OptimConformance, AdamW) { expect_agreement<optim::AdamW>("optim_AdamW", adamw_options); }

TEST(OptimConformance, Adam) { expect_agreement<optim::Adam>("optim_Adam", adam_options); }

TEST(OptimConformance, ClipGradNorm) {
  const Fixture fixture = load_fixture(fixture_paths(true).at("optim_clip_grad_norm_"));
  for (const Device device : test_devices()) {
    for (const Case& c : fixture.cases) {
      SCOPED_TRACE(c.sample);
      Tensors parameters;
      for (const Tensor& grad : c.inputs) {
        parameters.push_back(zeros(grad.shape(), grad.dtype(), device).requires_grad_());
        parameters.back().set_grad(parameter(grad, device).detach());
      }
      parameters.push_back(zeros({2}, float32, device).requires_grad_());  // without a gradient
      const auto clip = [&] {
        return optim::clip_grad_norm_(parameters, number(c.attributes["max_norm"]),
                                      c.attributes.value("error_if_nonfinite", false));
      };
      if (!c.raises.empty()) {
        EXPECT_THROW(clip(), Error) << "PyTorch has an error: " << c.raises;
        continue;
      }
      const Tensor norm = clip();
      const double close = tolerance(c.inputs[0].dtype());
      expect_close(norm, c.outputs.back(), close, 0, "norm");
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        expect_close(parameters[i].grad(), c.outputs[i], close, close, "gradient " + std::to_string(i));
      }
    }
  }
}

void expect_rates(const std::string& name, const std::function<double(const Json&, std::int64_t)>& lr) {
  for (const Case& c : load_fixture(fixture_paths(true).at(name)).cases) {
    SCOPED_TRACE(c.sample);
    std::vector<double> rates;
    for (std::int64_t step = 0; step < c.outputs[0].numel(); ++step) {
      rates.push_back(lr(c.attributes, step));
    }
    expect_close(c.outputs[0], rates, 1e-9, 1e-15, "lr");
  }
}

TEST(OptimConformance, CosineSchedule) {
  expect_rates("optim_CosineSchedule", [](const Json& a, std::int64_t step) {
    return optim::CosineSchedule{.peak = number(a["peak"]), .floor = number(a["floor"]), .total = a["total"]}.lr(step);
  });
}

TEST(OptimConformance, LinearSchedule) {
  expect_rates("optim_LinearSchedule", [](const Json& a, std::int64_t step) {
    return optim::LinearSchedule{.peak = number(a["peak"]), .floor = number(a["floor"]), .total = a["total"]}.lr(step);
  });
}

TEST(OptimConformance, OneCycleSchedule) {
  expect_rates("optim_OneCycleSchedule", [](const Json& a, std::int64_t step) {
    return optim::OneCycleSchedule{.peak = number(a["peak"]),
                                   .total = a["total"],
                                   .rise = number(a["rise"]),
                                   .start_factor = number(a["start_factor"]),
                                   .end_factor = number(a["end_factor"]),
                                   .linear = a["linear"]}
        .lr(step);
  });
}

}  // namespace optim_test
