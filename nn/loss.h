#pragma once

#include <mica/nn/module.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica::nn {

/// The loss of classifying rows of logits (…, V), as a module that keeps the options: see mica::cross_entropy.
///
/// The classes' weights, where there are some, are a buffer: they move with the module and are saved with it.
class CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(const CrossEntropyOptions& options = {});

  Tensor operator()(const Tensor& logits, const Tensor& targets) const;

  CrossEntropyOptions options;
};

}  // namespace mica::nn
