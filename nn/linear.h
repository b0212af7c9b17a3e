#pragma once

#include <mica/nn/module.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::nn {

struct LinearOptions {
  bool bias = true;
};

/// y = x · weightᵀ + bias, for x (…, in): see mica::linear.
///
/// weight (out, in) and bias (out) start uniform in ±1/√in, as PyTorch's do.
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  /// Uses existing tensors. A weight that another module has registered is shared with it.
  explicit Linear(const Tensor& weight, const Tensor& bias = {});

  /// Applies `activation`, fused where possible: fc(x, Activation::relu).
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;
  /// x · weightᵀ alone, for callers that add the bias with something else.
  Tensor product(const Tensor& x) const;

  Tensor weight;
  Tensor bias;  // undefined without one
};

}  // namespace mica::nn
