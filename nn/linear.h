#pragma once

#include <cstdint>

#include <mica/nn/module.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::nn {

struct LinearOptions {
  bool bias = true;
};

/// Options of a low-rank adapter: see Linear::add_lora().
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 16;   ///< the update is scaled by alpha / rank
  double dropout = 0;  ///< of the adapter's input, in [0, 1)
};

/// The parameters of a low-rank adapter.
struct LoraParameters {
  Tensor a;  ///< (rank, in)
  Tensor b;  ///< (out, rank)
};

/// Throws unless rank ≥ 1, alpha is finite and dropout is in [0, 1).
void check_lora_options(const LoraOptions& options);

/// y = x · weightᵀ + bias, for x (…, in): see mica::linear.
///
/// weight (out, in) and bias (out) are initialized uniformly in ±1/√in, as in PyTorch. Throws unless in, out ≥ 1.
///
/// With an adapter (Hu et al., 2021, arXiv:2106.09685; for all layers of a model see nn/lora.h):
///
///     y = x · weightᵀ + bias + alpha / rank · dropout(x) · lora_aᵀ · lora_bᵀ
///
/// The weight may be quantized, with or without an adapter (QLoRA: Dettmers et al., 2023, arXiv:2305.14314).
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  /// Uses existing tensors. A weight that another module has registered is shared with it.
  explicit Linear(const Tensor& weight, const Tensor& bias = {});
  /// Uses an existing quantized weight (in, out).
  explicit Linear(const QuantizedWeight& weight, const Tensor& bias = {});

  /// Applies `activation`, fused where possible: fc(x, Activation::relu).
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;
  /// The result without the bias, for callers that fuse its addition with another op.
  Tensor product(const Tensor& x) const;

  /// Registers the parameters lora_a (rank, in), initialized uniformly in ±1/√in, and lora_b (out, rank), initialized
  /// to 0, so that the outputs do not change at first. Both have the weight's device and dtype; if it is quantized, the
  /// dtype of its scale, or float32 if it has none. Throws, changing nothing, if there already is an adapter.
  void add_lora(const LoraOptions& options);
  /// The parameters that add_lora(options) would register.
  LoraParameters new_lora(const LoraOptions& options) const;
  /// Registers these as lora_a and lora_b. Throws, changing nothing, if there already is an adapter.
  void add_lora(const LoraOptions& options, const LoraParameters& parameters);
  /// Removes the adapter without adding it to the weight. Throws if there is none.
  void remove_lora();
  /// Adds the adapter's product to the weight and removes the adapter. Throws, changing nothing, if there is none or
  /// the weight is quantized.
  void merge_lora();
  bool has_lora() const { return lora_a.defined(); }
  const LoraOptions& lora_options() const { return lora_options_; }

  /// Quantizes the weight along `in`: the parameter "weight" is replaced by the buffers "packed", "scale" and "zero".
  /// Products are then computed by mica::quantized_matmul; the bias and the activation are applied after its result is
  /// rounded. Scales and zeros get the weight's dtype, whatever options.dtype is. A module that shared the weight keeps
  /// it. Throws, changing nothing, if the weight is quantized already, for the errors of mica::quantize, and if memory
  /// runs out.
  void quantize(QuantizeOptions options);
  bool is_quantized() const { return quantized.packed.defined(); }

  std::int64_t in_features() const { return is_quantized() ? quantized.rows : weight.size(1); }
  std::int64_t out_features() const { return is_quantized() ? quantized.columns() : weight.size(0); }

  Tensor weight;              // undefined if quantized
  Tensor bias;                // undefined without one
  Tensor lora_a, lora_b;      // undefined without an adapter
  QuantizedWeight quantized;  // (in, out), without tensors unless quantized

 protected:
  /// The computation of operator(), without a Scope.
  Tensor forward(const Tensor& x, Activation activation) const;

 private:
  void register_quantized();
  void register_bias();
  Tensor product_without_adapter(const Tensor& x) const;
  Tensor update(const Tensor& x) const;  // the adapter's part of y

  LoraOptions lora_options_;
};

}  // namespace mica::nn
