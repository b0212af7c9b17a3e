#pragma once

#include <mica/nn/linear.h>
#include <mica/nn/module.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::nn {

struct QuantizedLinearOptions {
  bool bias = true;
  QuantizeOptions quantize = {};
};

/// y = x · W + bias, for x (…, in) and a quantized weight W (in, out): see mica::quantized_matmul. The bias is added
/// after y's rounding.
///
/// The weight is constant: its tensors are buffers, "packed", "scale" and "zero" in a state_dict, of which only those
/// are there that its mode has. The bias is a parameter. What is no tensor (bits, group size, mode) is not in a
/// state_dict: build the module with the same options before loading one.
class QuantizedLinear : public Module {
 public:
  /// Weights of 0, to be loaded.
  QuantizedLinear(std::int64_t in, std::int64_t out, QuantizedLinearOptions options = {});
  /// Takes existing tensors; a bias (out), or none.
  explicit QuantizedLinear(QuantizedWeight weight, const Tensor& bias = {});
  /// A copy of `linear` with its weight rounded: see mica::quantize.
  static QuantizedLinear from(const Linear& linear, QuantizeOptions options = {});

  Tensor operator()(const Tensor& x) const;

  QuantizedWeight weight;
  Tensor bias;  // undefined without one
};

}  // namespace mica::nn
