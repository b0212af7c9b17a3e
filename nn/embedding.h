#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>

namespace mica::nn {

/// Row indices[i] of `weight` for each integer of `indices` (…), as (…, width): see mica::embedding.
///
/// weight (count, width) is initialized from a normal distribution with mean 0 and standard deviation 1, as in PyTorch.
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t width);

  Tensor operator()(const Tensor& indices) const;
  /// dropout((*this)(indices) + addend), in one pass: see mica::add_embedding.
  Tensor operator()(const Tensor& indices, const Tensor& addend, const Dropout& dropout) const;

  Tensor weight;
};

}  // namespace mica::nn
