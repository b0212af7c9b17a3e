#pragma once

#include <tests/support.h>

#include <string>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/nn/module.h>

namespace mica::testing_support {

/// Compares the gradients of a module's parameters, and of its input if that is floating, with central differences,
/// in float64 and with a random gradient of the output. The module must give the same output each time.
template <class M>
void check_gradients(M& module, const Tensor& input) {
  module.to(float64);
  const Tensor x = is_floating(input.dtype()) ? input.to(float64).detach().requires_grad_() : input;
  const Tensor y = module(x);
  const Tensor dy = randn(y.shape(), float64);
  module.zero_grad();
  x.set_grad({});
  y.backward(dy);

  const std::vector<double> weights = to_vector<double>(dy);
  const auto loss = [&] {
    const std::vector<double> values = no_grad([&] { return to_vector<double>(module(x)); });
    double sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      sum += values[i] * weights[i];
    }
    return sum;
  };
  nn::NamedTensors leaves = module.named_parameters();
  if (x.requires_grad()) {
    leaves.emplace_back("input", x);
  }
  constexpr double kStep = 1e-6;
  for (const auto& [name, leaf] : leaves) {
    ASSERT_TRUE(leaf.grad().defined()) << name;
    ASSERT_TRUE(leaf.is_contiguous()) << name;
    std::vector<double> numeric(static_cast<std::size_t>(leaf.numel()));
    for (std::size_t i = 0; i < numeric.size(); ++i) {
      double& element = leaf.template data<double>()[i];
      const double before = element;
      element = before + kStep;
      const double above = loss();
      element = before - kStep;
      const double below = loss();
      element = before;
      numeric[i] = (above - below) / (2 * kStep);
    }
    expect_close(leaf.grad(), numeric, 1e-4, 1e-6, name);
  }
}

/// Expects the same output and gradients on the GPU as on the CPU, in float32; leaves the module on the CPU in float64.
/// Does nothing without a GPU.
template <class M>
void compare_devices(M& module, const Tensor& input, double tolerance = 1e-4) {
  if (!cuda_available()) {
    return;
  }
  std::vector<Tensor> expected;
  Tensor dy;
  for (const Device device : {Device::cpu(), Device::cuda()}) {
    module.to(device, float32);
    module.zero_grad();
    const Tensor x = input.to(device).detach();
    if (is_floating(x.dtype())) {
      x.requires_grad_();
    }
    const Tensor y = module(x);
    dy = dy.defined() ? dy.to(device) : randn(y.shape());
    y.backward(dy);
    std::vector<Tensor> results{y.detach(), x.grad()};
    for (const Tensor& parameter : module.parameters()) {
      results.push_back(parameter.grad());
    }
    if (device.is_cpu()) {
      expected = results;
      continue;
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      ASSERT_EQ(results[i].defined(), expected[i].defined());
      if (results[i].defined()) {
        expect_close(results[i], expected[i], tolerance, tolerance, "result " + std::to_string(i));
      }
    }
  }
  module.to(Device::cpu(), float64);
}

inline std::vector<std::string> names_of(const nn::NamedTensors& list) {
  std::vector<std::string> result;
  for (const auto& entry : list) {
    result.push_back(entry.first);
  }
  return result;
}

}  // namespace mica::testing_support
