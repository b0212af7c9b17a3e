#pragma once

#include <cstdint>
#include <optional>

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
  bool dora = false;   ///< also trains the length of each row of the weight (DoRA)
};

/// The parameters of a low-rank adapter.
struct LoraParameters {
  Tensor a;               ///< (rank, in)
  Tensor b;               ///< (out, rank)
  Tensor magnitude = {};  ///< (out); with LoraOptions::dora only
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
/// With LoraOptions::dora (Liu et al., 2024, arXiv:2402.09353), the weight with the adapter's product is scaled to rows
/// of the lengths lora_magnitude (out), which are trained, too:
///
///     V = weight + alpha / rank · lora_b · lora_a,    c = lora_magnitude / ‖V‖ by rows, ‖V‖ without a gradient
///     y = x · weightᵀ + bias + (c − 1) · dropout(x) · weightᵀ + c · alpha / rank · dropout(x) · lora_aᵀ · lora_bᵀ
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
  /// to 0, so that the outputs do not change at first; with options.dora also lora_magnitude (out), the lengths of the
  /// weight's rows. All have the weight's device and dtype; if it is quantized, the dtype of its scale, or float32 if
  /// it has none, or what set_quantized() was told. Throws, changing nothing, if there already is an adapter.
  void add_lora(const LoraOptions& options);
  /// The parameters that add_lora(options) would register.
  LoraParameters new_lora(const LoraOptions& options) const;
  /// Registers these as lora_a, lora_b and lora_magnitude. Throws, changing nothing, if there already is an adapter.
  void add_lora(const LoraOptions& options, const LoraParameters& parameters);
  /// Removes the adapter without adding it to the weight. Throws if there is none.
  void remove_lora();
  /// Adds the adapter's product to the weight, scales its rows with DoRA, and removes the adapter. Throws, changing
  /// nothing, if there is none or the weight is quantized.
  void merge_lora();
  bool has_lora() const { return lora_a.defined(); }
  const LoraOptions& lora_options() const { return lora_options_; }

  /// Quantizes the weight along `in`: the parameter "weight" is replaced by the buffers "packed", "scale" and "zero".
  /// Products are then computed by mica::quantized_matmul; the bias and the activation are applied after its result is
  /// rounded. Scales and zeros get the weight's dtype, whatever options.dtype is. A module that shared the weight keeps
  /// it. Throws, changing nothing, if the weight is quantized already, for the errors of mica::quantize, and if memory
  /// runs out.
  void quantize(QuantizeOptions options);
  /// Replaces the weight by a quantized one (in, out) of any format, as the buffers "packed", "scale", "zero",
  /// "scale_factor" and "zero_factor" (those that it has), which keep their dtypes, whatever dtype the model is
  /// converted to. `dtype` is that of the activations, for adapters that are added later. Throws, changing nothing, if
  /// the weight is quantized already or the shape differs.
  void set_quantized(const QuantizedWeight& weight, DType dtype);
  bool is_quantized() const { return quantized.packed.defined(); }

  std::int64_t in_features() const { return is_quantized() ? quantized.rows : weight.size(1); }
  std::int64_t out_features() const { return is_quantized() ? quantized.columns() : weight.size(0); }

  Tensor weight;              // undefined if quantized
  Tensor bias;                // undefined without one
  Tensor lora_a, lora_b;      // undefined without an adapter
  Tensor lora_magnitude;      // undefined without an adapter of DoRA
  QuantizedWeight quantized;  // (in, out), without tensors unless quantized

 protected:
  /// The computation of operator(), without a Scope.
  Tensor forward(const Tensor& x, Activation activation) const;

 private:
  void replace_weight(QuantizedWeight weight, bool fixed);
  void register_quantized(bool fixed = false);
  void register_bias();
  Tensor product_without_adapter(const Tensor& x) const;
  Tensor update(const Tensor& x) const;  // the adapter's part of y
  Tensor adapted_weight() const;         // weight + alpha / rank · lora_b · lora_a, in float32 or float64

  LoraOptions lora_options_;
  std::optional<DType> activations_;  // their dtype, if it is not that of the weight or its scales
};

}  // namespace mica::nn
