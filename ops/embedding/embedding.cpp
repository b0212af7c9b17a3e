#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/embedding/detail/embedding_gradient.h>
#include <mica/ops/embedding/detail/embedding_kernels.h>
#include <mica/ops/embedding/embedding.h>

namespace mica {

namespace {

// dweight[indices[i]] += dy[i]; without `accumulate`, dweight is initialized to 0.
void add_rows(const Tensor& dy, const Tensor& indices, const Tensor& dweight, bool accumulate) {
  const kernels::EmbeddingBackward args{
      .dy = contiguous_data(dy), .indices = indices, .dweight = dweight, .accumulate = accumulate};
  on_device(dy.device(), [&](auto device) { kernels::embedding_backward(device, args); });
}

// Scatters and adds dy's rows by index: the transpose of embedding().
struct EmbeddingGradient {
  static constexpr bool composed = true;
  Shape table;  // of weight

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& indices) const {
    const Tensor dweight = empty(table, dy.dtype(), dy.device());
    add_rows(dy, indices, dweight, false);
    ctx.save_for_backward(indices);
    return dweight;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddweight) const {
    return {embedding(ddweight, ctx.saved<1>()[0]), {}};
  }
};

struct Embedding {
  static constexpr bool composed = true;
  Shape table;  // of weight

  Tensor forward(autograd::Context& ctx, const Tensor& weight, const Tensor& indices) const {
    Shape shape = indices.shape();
    shape.push_back(table[1]);
    const Tensor y = empty(shape, weight.dtype(), weight.device());
    const kernels::EmbeddingForward args{.weight = contiguous_data(weight), .indices = indices, .y = y};
    on_device(weight.device(), [&](auto device) { kernels::embedding_forward(device, args); });
    ctx.save_for_backward(indices);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    return {detail::embedding_gradient(dy, ctx.saved<1>()[0], table, 0), {}};
  }
};

}  // namespace

namespace detail {

Tensor checked_indices(const char* op, const Tensor& weight, const Tensor& indices) {
  check(weight.dim() == 2 && is_floating(weight.dtype()), "{}: expected floating weight of shape (V, C), got {} {}", op,
        weight.dtype(), weight.shape());
  check(indices.dtype() == int64 || indices.dtype() == int32, "{}: expected indices of int64 or int32, got {}", op,
        indices.dtype());
  check(indices.device() == weight.device(), "{}: expected indices on {}, got {}", op, weight.device(),
        indices.device());
  return contiguous_data(indices.to(int64));
}

Tensor embedding_gradient(const Tensor& dy, const Tensor& indices, const Shape& table, int input) {
  // A tied weight, such as the head's, already has a gradient: add only the rows in use.
  if (const Tensor sum = autograd::take_pending_gradient(input); sum.defined()) {
    add_rows(dy, indices, sum, true);
    return sum;
  }
  return autograd::apply(EmbeddingGradient{table}, dy, indices);
}

}  // namespace detail

Tensor embedding(const Tensor& weight, const Tensor& indices) {
  const Tensor rows = detail::checked_indices("embedding", weight, indices);
  return autograd::apply(Embedding{weight.shape()}, weight, rows);
}

}  // namespace mica
