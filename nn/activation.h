#pragma once

#include <mica/nn/module.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/gated/gated.h>

namespace mica::nn {

// Activations as modules, for Sequential. Elsewhere use the functions (mica::relu, mica::gelu, …).

struct ReLU : Module {
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [](const Tensor& x) { return relu(x); });
  }
};

struct LeakyReLU : Module {
  explicit LeakyReLU(double slope = 0.01) : slope(slope) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [this](const Tensor& x) { return leaky_relu(x, slope); });
  }

  double slope;
};

struct GELU : Module {
  explicit GELU(GeluApproximation approximation = GeluApproximation::none) : approximation(approximation) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [this](const Tensor& x) { return gelu(x, approximation); });
  }

  GeluApproximation approximation;
};

struct SiLU : Module {
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [](const Tensor& x) { return silu(x); });
  }
};

/// gelu(gate) · up for x = [gate | up] of shape (…, 2 n); the result is (…, n).
struct GEGLU : Module {
  explicit GEGLU(GeluApproximation approximation = GeluApproximation::none) : approximation(approximation) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [this](const Tensor& x) { return geglu(x, approximation); });
  }

  GeluApproximation approximation;
};

/// The same with silu.
struct SwiGLU : Module {
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [](const Tensor& x) { return swiglu(x); });
  }
};

struct Tanh : Module {
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [](const Tensor& x) { return tanh(x); });
  }
};

struct Sigmoid : Module {
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [](const Tensor& x) { return sigmoid(x); });
  }
};

}  // namespace mica::nn
