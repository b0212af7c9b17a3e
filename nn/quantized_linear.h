#pragma once

#include <mica/nn/linear.h>
#include <mica/nn/module.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::nn {

struct QuantizedLinearOptions {
  bool bias = true;
  QuantizeOptions quantize = {};
};

/// A Linear whose weight is quantized from the beginning: y = x · W + bias, for x (…, in) and W (in, out); see
/// mica::quantized_matmul. Adapters train on top of it: see nn/lora.h.
///
/// The weight is constant: its tensors are buffers, named "packed", "scale" and "zero" in a state_dict, if its mode has
/// them. The bias is a parameter. Bits, group size and mode are not part of a state_dict: construct the module with the
/// same options before loading one.
class QuantizedLinear : public Linear {
 public:
  /// All weights are 0, to be replaced by load_state_dict().
  QuantizedLinear(std::int64_t in, std::int64_t out, QuantizedLinearOptions options = {});
  /// Uses existing tensors; bias (out) is optional.
  explicit QuantizedLinear(const QuantizedWeight& weight, const Tensor& bias = {});
  /// A copy of `linear` with its weight quantized: see mica::quantize.
  static QuantizedLinear from(const Linear& linear, QuantizeOptions options = {});

  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;
};

/// Quantizes the weights of all linear layers of a model (Linear::quantize), the head included; embeddings stay.
/// Returns the names of the layers.
///
///     nn::quantize(llama, {.bits = 4});
///
/// Throws, if a layer is quantized already or an option is invalid, before anything is changed. Weights that are not
/// finite are found on the way: the layers before are then quantized.
std::vector<std::string> quantize(Module& model, const QuantizeOptions& options = {});

}  // namespace mica::nn
