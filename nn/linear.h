#pragma once

#include <cstdint>

#include <mica/nn/module.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::nn {

struct LinearOptions {
  bool bias = true;
};

/// Of a low-rank adapter: see Linear::add_lora().
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 16;   ///< the update is scaled by alpha / rank
  double dropout = 0;  ///< of the adapter's input, in [0, 1)
};

/// Throws unless rank ≥ 1, alpha is finite and dropout is in [0, 1).
void check_lora_options(const LoraOptions& options);

/// y = x · weightᵀ + bias, for x (…, in): see mica::linear.
///
/// weight (out, in) and bias (out) start uniform in ±1/√in, as PyTorch's do.
///
/// With an adapter (Hu et al., 2021, arXiv:2106.09685; for all layers of a model see nn/lora.h):
///
///     y = x · weightᵀ + bias + alpha / rank · dropout(x) · lora_aᵀ · lora_bᵀ
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  /// Uses existing tensors. A weight that another module has registered is shared with it.
  explicit Linear(const Tensor& weight, const Tensor& bias = {});

  /// Applies `activation`, fused where possible: fc(x, Activation::relu).
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;
  /// The result without bias, for callers that add it with something else.
  Tensor product(const Tensor& x) const;

  /// Registers the parameters lora_a (rank, in), which starts uniform in ±1/√in, and lora_b (out, rank), which starts
  /// as 0, so that the function is the same at first. Both have the weight's dtype and device. Throws if there is an
  /// adapter.
  void add_lora(const LoraOptions& options);
  /// Adds the adapter's product to the weight and removes the adapter. Throws if there is none.
  void merge_lora();
  bool has_lora() const { return lora_a.defined(); }
  const LoraOptions& lora_options() const { return lora_options_; }

  Tensor weight;
  Tensor bias;            // undefined without one
  Tensor lora_a, lora_b;  // undefined without an adapter

 private:
  Tensor update(const Tensor& x) const;  // the adapter's part of y

  LoraOptions lora_options_;
};

}  // namespace mica::nn
