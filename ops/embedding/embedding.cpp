#include <mica/autograd/accumulate.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/embedding/embedding.h>
#include <mica/ops/embedding/embedding_kernels.h>

namespace mica {

namespace {

// dweight[indices[i]] += dy[i]; without `accumulate` to what was 0.
void add_rows(const Tensor& dy, const Tensor& indices, const Tensor& dweight, bool accumulate) {
  const kernels::EmbeddingBackward args{
      .dy = contiguous_data(dy), .indices = indices, .dweight = dweight, .accumulate = accumulate};
  on_device(dy.device(), [&](auto device) { kernels::embedding_backward(device, args); });
}

// dy's rows, added up where their indices say: what embedding() reads, written.
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
    const Tensor indices = ctx.saved<1>()[0];
    // A weight that is used elsewhere too, as the head's, has a gradient already: only the rows looked up change.
    if (const Tensor sum = autograd::take_gradient_so_far(0); sum.defined()) {
      add_rows(dy, indices, sum, true);
      return {sum, {}};
    }
    return {autograd::apply(EmbeddingGradient{table}, dy, indices), {}};
  }
};

}  // namespace

Tensor embedding(const Tensor& weight, const Tensor& indices) {
  check(weight.dim() == 2 && is_floating(weight.dtype()),
        "embedding: expected floating weight of shape (V, C), got {} {}", weight.dtype(), weight.shape());
  check(indices.dtype() == int64 || indices.dtype() == int32, "embedding: expected indices of int64 or int32, got {}",
        indices.dtype());
  check(indices.device() == weight.device(), "embedding: expected indices on {}, got {}", weight.device(),
        indices.device());
  const Tensor rows = contiguous_data(indices.to(int64));
  return autograd::apply(Embedding{weight.shape()}, weight, rows);
}

}  // namespace mica
