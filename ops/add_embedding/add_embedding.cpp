#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/add_embedding/add_embedding.h>
#include <mica/ops/add_embedding/detail/add_embedding_kernels.h>
#include <mica/ops/dropout/detail/dropped.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/embedding/detail/embedding_gradient.h>
#include <mica/ops/embedding/detail/embedding_kernels.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

namespace {

// The fallback, by the kernels of other ops, one step after the other.
void in_steps(const kernels::AddEmbedding& a) {
  on_device(a.y.device(), [&](auto device) {
    kernels::embedding_forward(device, {.weight = a.weight, .indices = a.indices, .y = a.y});
    kernels::binary(device, functions::Add{}, a.y, a.y, a.addend);
  });
  if (a.dropout.drops()) {
    detail::write_dropped(a.y, a.y, a.dropout);
  }
}

struct AddEmbedding {
  static constexpr bool composed = true;
  ElementDropout dropout;
  Shape table;         // of weight
  Shape addend_shape;  // the last axes of y's

  Tensor forward(autograd::Context& ctx, const Tensor& weight, const Tensor& indices, const Tensor& addend) const {
    Shape shape = indices.shape();
    shape.push_back(table[1]);
    const Tensor y = empty(shape, weight.dtype(), weight.device());
    if (y.numel() > 0) {
      const Tensor weight_rows = contiguous_data(weight);
      const Tensor addend_rows = contiguous_data(addend);
      const kernels::AddEmbedding args{
          .weight = weight_rows, .indices = indices, .addend = addend_rows, .dropout = dropout, .y = y};
      if (!on_device(y.device(), [&](auto device) { return kernels::add_embedding(device, args); })) {
        in_steps(args);
      }
    }
    ctx.save_for_backward(indices);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const Tensor indices = ctx.saved<1>()[0];
    const Tensor dsum = dropout.drops() ? detail::dropped(dy, dropout) : dy;
    return {ctx.needs_grad(0) ? detail::embedding_gradient(dsum, indices, table, 0) : Tensor{},
            {},
            ctx.needs_grad(2) ? sum_to(dsum, addend_shape) : Tensor{}};
  }
};

}  // namespace

Tensor add_embedding(const Tensor& weight, const Tensor& indices, const Tensor& addend, AddEmbeddingOptions options) {
  check(weight.defined() && indices.defined() && addend.defined(),
        "add_embedding: expected weight, indices and addend, got an undefined one");
  const Tensor rows = detail::checked_indices("add_embedding", weight, indices);
  Shape shape = indices.shape();
  shape.push_back(weight.size(1));
  const int leading = shape.size() - addend.dim();
  check(addend.dim() >= 1 && leading >= 0 && shape.slice(leading) == addend.shape(),
        "add_embedding: expected addend whose shape is the last axes of {}, got {}", shape, addend.shape());
  check(addend.dtype() == weight.dtype() && addend.device() == weight.device(),
        "add_embedding: expected addend of weight's dtype and device, {} on {}, got {} on {}", weight.dtype(),
        weight.device(), addend.dtype(), addend.device());
  check(options.p >= 0 && options.p < 1, "add_embedding: expected p in [0, 1), got {}", options.p);
  ElementDropout dropout;
  if (options.training && options.p > 0) {
    dropout = {.key = next_philox_key(), .threshold = ElementDropout::threshold_of(options.p)};
  }
  return autograd::apply(AddEmbedding{dropout, weight.shape(), addend.shape()}, weight, rows, addend);
}

}  // namespace mica
