#include <cmath>

#include <mica/nn/init.h>
#include <mica/nn/linear.h>

namespace mica::nn {

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options) {
  check(in >= 1 && out >= 1, "Linear: expected in >= 1 and out >= 1, got {} and {}", in, out);
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  weight = param("weight", init::uniform_(empty({out, in}), -bound, bound));
  if (options.bias) {
    bias = param("bias", init::uniform_(empty({out}), -bound, bound));
  }
}

Linear::Linear(const Tensor& weight, const Tensor& bias) : weight(weight), bias(bias) {
  check(weight.dim() == 2, "Linear: expected a weight of shape (out, in), got {}", weight.shape());
  param("weight", weight);
  if (bias.defined()) {
    check(bias.shape() == Shape{weight.size(0)}, "Linear: expected a bias of shape [{}], got {}", weight.size(0),
          bias.shape());
    param("bias", bias);
  }
}

Tensor Linear::operator()(const Tensor& x, Activation activation) const {
  const Scope scope(*this);
  return linear(x, weight, bias, activation);
}

Tensor Linear::product(const Tensor& x) const {
  const Scope scope(*this);
  return linear(x, weight);
}

}  // namespace mica::nn
