#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::nn {

/// Row indices[i] of `weight` for each integer of `indices` (…), as (…, width): see mica::embedding.
///
/// weight (count, width) is initialized from a normal distribution with mean 0 and standard deviation 1, as in PyTorch.
///
/// The table may be quantized: see set_quantized().
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t width);

  Tensor operator()(const Tensor& indices) const;
  /// dropout((*this)(indices) + addend), in one pass: see mica::add_embedding.
  Tensor operator()(const Tensor& indices, const Tensor& addend, const Dropout& dropout) const;

  /// Replaces the weight by a quantized one (width, count) of any format: each token's row is dequantized when it is
  /// looked up, and not trained. Its tensors are buffers as those of Linear::set_quantized(). `dtype` is that of the
  /// results, until the model is converted: `weight` becomes an empty buffer (0, width) that has it. Throws, changing
  /// nothing, if the table is quantized already or the shape differs.
  void set_quantized(const QuantizedWeight& weight, DType dtype);
  bool is_quantized() const { return quantized.packed.defined(); }

  Tensor weight;              // (0, width) if quantized
  QuantizedWeight quantized;  // (width, count), without tensors unless quantized

 private:
  Tensor rows(const Tensor& indices) const;
};

}  // namespace mica::nn
