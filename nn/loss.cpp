#include <mica/nn/loss.h>

namespace mica::nn {

CrossEntropyLoss::CrossEntropyLoss(const CrossEntropyOptions& options) : options(options) {
  if (options.weight.defined()) {
    this->options.weight = buffer("weight", options.weight);
  }
}

Tensor CrossEntropyLoss::operator()(const Tensor& logits, const Tensor& targets) const {
  return cross_entropy(logits, targets, options);
}

}  // namespace mica::nn
