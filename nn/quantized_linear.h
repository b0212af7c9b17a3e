#pragma once

#include <mica/nn/linear.h>
#include <mica/nn/module.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::nn {

struct QuantizedLinearOptions {
  bool bias = true;
  QuantizeOptions quantize = {};
};

/// A Linear that is constructed with a quantized weight: y = x · W + bias, for x (…, in) and W (in, out); see
/// mica::quantized_matmul. Can be trained with adapters: see nn/lora.h.
///
/// The weight is not trained: its tensors are buffers, named "packed", "scale" and "zero" (those that its mode uses).
/// The bias is a parameter. Bits, group size and mode are not part of a state_dict: construct the module with the same
/// options before loading one.
class QuantizedLinear : public Linear {
 public:
  /// Initializes all weights to 0; load_state_dict() replaces them.
  QuantizedLinear(std::int64_t in, std::int64_t out, QuantizedLinearOptions options = {});
  /// Uses existing tensors; bias (out) is optional.
  explicit QuantizedLinear(const QuantizedWeight& weight, const Tensor& bias = {});
  /// A copy of `linear` with its weight quantized: see mica::quantize.
  static QuantizedLinear from(const Linear& linear, QuantizeOptions options = {});

  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;
};

/// Quantizes the weights of all linear layers of a model to 8, 4, 2 or 1 bits, including the head, but not embeddings.
/// Returns the names of the layers.
///
///     nn::quantize(llama, 4);
///
/// The format depends on the model's device. On a GPU, and for 8 bits and 1 bit, it is that of the function below with
/// its defaults, for which kernels are fastest. On the CPU, 4 and 2 bits have scales and zeros of two levels
/// (quantize_two_levels): groups have 32 weights, and 64 in layers with more outputs than inputs, where rounding costs
/// least. The head has 8 bits in groups of 128. docs/quantization.md has the losses and sizes.
std::vector<std::string> quantize(Module& model, int bits);

/// The same by Linear::quantize with options.
///
/// A layer "lm_head" gets at least `head_bits`: of all layers, it is the one whose rounding costs most. With the other
/// defaults, 4 bits take 4.5 bits a weight in float16 and bfloat16, with scales and zeros, and 5 in float32; 8 bits
/// take 8.5 and 9. docs/quantization.md has the measured losses. On a GPU, the kernel that computes a whole step of a
/// Llama needs a head of as many bits as the other layers.
///
/// Throws, changing nothing, if a layer is quantized already or an option is invalid. Also throws for weights that are
/// not finite, and if memory runs out; the layers before are then quantized already.
std::vector<std::string> quantize(Module& model, const QuantizeOptions& options = {}, int head_bits = 8);

}  // namespace mica::nn
