#include <mica/nn/dropout.h>
#include <mica/ops/dropout/dropout.h>

namespace mica::nn {

Dropout::Dropout(double p) : p(p) { check(p >= 0 && p < 1, "Dropout: expected 0 <= p < 1, got {}", p); }

Tensor Dropout::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return dropout(x, p, is_training()); });
}

}  // namespace mica::nn
