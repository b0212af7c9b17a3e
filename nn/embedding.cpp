#include <mica/nn/embedding.h>
#include <mica/nn/init.h>
#include <mica/ops/add_embedding/add_embedding.h>
#include <mica/ops/embedding/embedding.h>

namespace mica::nn {

Embedding::Embedding(std::int64_t count, std::int64_t width) {
  check(count >= 1 && width >= 1, "Embedding: expected count >= 1 and width >= 1, got {} and {}", count, width);
  weight = param("weight", init::normal_(empty({count, width})));
}

Tensor Embedding::operator()(const Tensor& indices) const {
  return call(*this, indices, [&](const Tensor& indices) { return embedding(weight, indices); });
}

Tensor Embedding::operator()(const Tensor& indices, const Tensor& addend, const Dropout& dropout) const {
  return call(*this, indices, addend, [&](const Tensor& indices, const Tensor& addend) {
    return add_embedding(weight, indices, addend, {.p = dropout.p, .training = dropout.is_training()});
  });
}

}  // namespace mica::nn
