#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/matmul/matmul_kernels.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

Tensor product(const Tensor& a, const Tensor& b, const Tensor& bias, const Shape& shape) {
  const Tensor y = empty(shape, a.dtype(), a.device());
  if (y.numel() == 0) {
    return y;
  }
  if (a.size(-1) == 0) {
    if (bias.defined()) {
      copy_into(y, broadcast_view(bias, shape));
    } else {
      fill_data(y, 0);
    }
    return y;
  }
  const kernels::MatmulArgs args{.a = kernels::readable(a),
                                 .b = kernels::readable(b),
                                 .bias = bias.defined() ? contiguous_data(bias) : Tensor{},
                                 .out = y};
  on_device(y.device(), [&](auto device) { kernels::matmul(device, args); });
  return y;
}

// (…, M, K) · (…, K, N), both of at least two axes.
struct Matmul {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    Shape shape = broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), "matmul");
    shape.push_back(a.size(-2));
    shape.push_back(b.size(-1));
    ctx.save_for_backward(a, b);
    return product(a, b, {}, shape);
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [a, b] = ctx.saved<2>();
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = sum_to(matmul(dy, transpose(b, -1, -2)), a.shape());
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = sum_to(matmul(transpose(a, -1, -2), dy), b.shape());
    }
    return gradients;
  }
};

struct Linear {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    const std::int64_t in = weight.size(1);
    const std::int64_t out = weight.size(0);
    const std::int64_t rows = numel_of(x.shape().slice(0, x.dim() - 1));
    Shape shape = x.shape();
    shape.back() = out;
    ctx.save_for_backward(x, weight);
    const Tensor flat = rows_of(x, rows, in);
    const Tensor y = product(flat, transpose(weight, 0, 1), bias, {rows, out});
    return as_strided(y, shape, contiguous_strides(shape), 0);
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, weight] = ctx.saved<2>();
    const std::int64_t rows = numel_of(x.shape().slice(0, x.dim() - 1));
    const Tensor dy_rows = reshape(dy, {rows, weight.size(0)});
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = reshape(matmul(dy_rows, weight), x.shape());
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = matmul(transpose(dy_rows, 0, 1), reshape(x, {rows, weight.size(1)}));
    }
    if (ctx.needs_grad(2)) {
      gradients[2] = sum(dy_rows, {0});
    }
    return gradients;
  }

 private:
  // (…, in) as (rows, in): without a copy also where x is a matrix that a product can read.
  static Tensor rows_of(const Tensor& x, std::int64_t rows, std::int64_t in) {
    if (x.dim() == 2) {
      return x;
    }
    const Tensor packed = contiguous_data(x);
    return as_strided(packed, {rows, in}, {in, 1}, packed.handle()->offset);
  }
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  check(a.dim() > 0 && b.dim() > 0, "matmul: expected tensors with at least one axis, got {} and {}", a.shape(),
        b.shape());
  check(is_floating(a.dtype()) && a.dtype() == b.dtype(), "matmul: expected one floating dtype, got {} and {}",
        a.dtype(), b.dtype());
  check(a.device() == b.device(), "matmul: expected one device, got {} and {}", a.device(), b.device());
  const std::int64_t inner = a.size(-1);
  check(inner == b.size(b.dim() == 1 ? 0 : -2), "matmul: expected inner sizes that are equal, got {} and {}", a.shape(),
        b.shape());

  if (a.dim() == 1) {
    return squeeze(matmul(unsqueeze(a, 0), b), b.dim() == 1 ? 0 : -2);
  }
  if (b.dim() == 1) {
    return squeeze(matmul(a, unsqueeze(b, 1)), -1);
  }
  if (a.dim() > 2 && b.dim() == 2) {  // one product over all rows
    Shape shape = a.shape();
    shape.pop_back();
    const std::int64_t rows = numel_of(shape);
    shape.push_back(b.size(1));
    return reshape(autograd::apply(Matmul{}, reshape(a, {rows, inner}), b), shape);
  }
  return autograd::apply(Matmul{}, a, b);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check(weight.dim() == 2, "linear: expected weight of shape (out, in), got {}", weight.shape());
  check(x.dim() > 0 && x.size(-1) == weight.size(1), "linear: expected x of shape (…, {}), got {}", weight.size(1),
        x.shape());
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(),
        "linear: expected x and weight of one floating dtype, got {} and {}", x.dtype(), weight.dtype());
  check(weight.device() == x.device(), "linear: expected weight on {}, got {}", x.device(), weight.device());
  if (bias.defined()) {
    check(bias.shape() == Shape{weight.size(0)}, "linear: expected bias of shape [{}], got {}", weight.size(0),
          bias.shape());
    check(bias.dtype() == x.dtype() && bias.device() == x.device(), "linear: expected bias of {} on {}, got {} on {}",
          x.dtype(), x.device(), bias.dtype(), bias.device());
  }
  return autograd::apply(Linear{}, x, weight, bias);
}

}  // namespace mica
