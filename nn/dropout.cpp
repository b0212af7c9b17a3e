#include <mica/core/creation.h>
#include <mica/nn/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>

namespace mica::nn {

Dropout::Dropout(double p) : p(p) {
  check(p >= 0 && p < 1, "Dropout: expected 0 <= p < 1, got {}", p);
}

Tensor Dropout::operator()(const Tensor& x) const {
  if (p == 0 || !is_training()) {
    return x;
  }
  const Tensor kept = rand(x.shape(), float32, x.device()) >= p;
  return where(kept, x * (1 / (1 - p)), 0);
}

}  // namespace mica::nn
