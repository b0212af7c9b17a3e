#pragma once

#include <mica/nn/module.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica::nn {

/// The classification loss of logits (…, V), as a module that stores the options: see mica::cross_entropy.
///
/// Class weights, if given, are registered as a buffer, so they are moved and saved with the module.
class CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(const CrossEntropyOptions& options = {});

  Tensor operator()(const Tensor& logits, const Tensor& targets) const;

  CrossEntropyOptions options;
};

}  // namespace mica::nn
