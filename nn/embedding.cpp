#include <mica/core/creation.h>
#include <mica/nn/embedding.h>
#include <mica/nn/init.h>
#include <mica/ops/add_embedding/add_embedding.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/embedding/embedding.h>

namespace mica::nn {

Embedding::Embedding(std::int64_t count, std::int64_t width) {
  check(count >= 1 && width >= 1, "Embedding: expected count >= 1 and width >= 1, got {} and {}", count, width);
  weight = param("weight", init::normal_(empty({count, width})));
}

Tensor Embedding::operator()(const Tensor& indices) const {
  return call(*this, indices, [&](const Tensor& indices) { return rows(indices); });
}

Tensor Embedding::rows(const Tensor& indices) const {
  return is_quantized() ? quantized_embedding(quantized, indices, weight.dtype()) : embedding(weight, indices);
}

Tensor Embedding::operator()(const Tensor& indices, const Tensor& addend, const Dropout& dropout) const {
  return call(*this, indices, addend, [&](const Tensor& indices, const Tensor& addend) {
    return is_quantized() ? dropout(rows(indices) + addend)
                          : add_embedding(weight, indices, addend, {.p = dropout.p, .training = dropout.is_training()});
  });
}

void Embedding::set_quantized(const QuantizedWeight& value, DType dtype) {
  check(!is_quantized(), "Embedding: the table is quantized already");
  check_weight("Embedding", value);
  const std::int64_t width = weight.size(1);
  check(value.rows == width && value.columns() == weight.size(0),
        "Embedding: expected a quantized weight of shape [{}, {}], got [{}, {}]", width, weight.size(0), value.rows,
        value.columns());
  const Tensor marker = empty({0, width}, dtype, value.packed.device());
  forget("weight");
  weight = buffer("weight", marker);
  for (const auto& [name, part] : quantized_parts()) {
    if ((value.*part).defined()) {
      fixed_buffer(name, value.*part);
    }
  }
  quantized = value;
}

}  // namespace mica::nn
