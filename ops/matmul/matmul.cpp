#include <atomic>
#include <tuple>
#include <utility>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/matmul/detail/integer_matmul_kernels.h>
#include <mica/ops/matmul/detail/matmul_steps.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using detail::gradients_of_sums;
using detail::multiply;
using detail::row_count;
using detail::rows_of;

std::atomic<MatmulPrecision> float32_precision = MatmulPrecision::float32;
std::atomic<MatmulTuning> tuning = MatmulTuning::heuristic;

// (…, M, K) · (…, K, N), both of at least two axes.
struct Matmul {
  static constexpr bool composed = true;
  Shape a_shape;
  Shape b_shape;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    Shape shape = broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), "matmul");
    shape.push_back(a.size(-2));
    shape.push_back(b.size(-1));
    // Each input is needed only for the other's gradient.
    ctx.save_for_backward(ctx.needs_grad(1) ? a : Tensor{}, ctx.needs_grad(0) ? b : Tensor{});
    const Tensor y = empty(shape, a.dtype(), a.device());
    multiply({.a = a, .b = b, .bias = {}, .out = y});
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [a, b] = ctx.saved<2>();
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = sum_to(matmul(dy, transpose(b, -1, -2)), a_shape);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = sum_to(matmul(transpose(a, -1, -2), dy), b_shape);
    }
    return gradients;
  }
};

// linear() returns the first output, y. If backward needs the sums z = x · weightᵀ + bias, they are a second output, so
// that they have a history, through which second derivatives can flow.
struct Linear {
  static constexpr bool composed = true;
  Activation activation;
  Shape x_shape;

  Tensors forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    ctx.set_materialize_grads(false);
    Shape shape = x.shape();
    shape.back() = weight.size(0);
    const auto new_output = [&] { return empty(shape, x.dtype(), x.device()); };
    const bool from_output = kernels::has_slope_from_output(activation);
    const bool wants_sums = ctx.needs_any_grad() && activation != Activation::none && !from_output;
    Tensors outputs{new_output()};
    if (wants_sums) {
      outputs.push_back(new_output());
    }
    ctx.save_for_backward(ctx.needs_grad(1) ? x : Tensor{}, ctx.needs_grad(0) ? weight : Tensor{},
                          activation == Activation::none ? Tensor{} : outputs.back());

    const std::int64_t rows = row_count(shape);
    multiply({.a = rows_of(x, rows),
              .b = transpose(weight, 0, 1),
              .bias = bias,
              .out = rows_of(outputs[0], rows),
              .activation = activation,
              .sums = wants_sums ? rows_of(outputs[1], rows) : Tensor{}});
    return outputs;
  }

  Tensors backward(autograd::Context& ctx, const Tensors& came) const {
    const auto [x, weight, v] = ctx.saved<3>();
    const Tensor& dy = came[0];
    const Tensor dsums = came.size() > 1 ? came[1] : Tensor{};
    if (!dy.defined() && !dsums.defined()) {
      return Tensors(3);
    }
    const std::int64_t in = x_shape.back();
    const std::int64_t rows = row_count(x_shape);
    Tensor dz;
    Tensor dbias;
    if (ctx.needs_grad(2) && !dsums.defined() && dy.numel() > 0 && !autograd::grad_enabled()) {
      const bool has_function = activation != Activation::none;
      std::tie(dz, dbias) =
          gradients_of_sums(activation, rows_of(contiguous_data(dy), rows), has_function ? rows_of(v, rows) : Tensor{});
    } else {
      const bool has_function = activation != Activation::none;
      dz = dy.defined() && has_function ? detail::unary_gradient(kernels::function_of(activation), dy, v) : dy;
      dz = !dz.defined() ? dsums : dsums.defined() ? dz + dsums : dz;
      dz = reshape(dz, {rows, dz.size(-1)});
      dbias = ctx.needs_grad(2) ? sum(dz, {0}) : dbias;
    }
    return {ctx.needs_grad(0) ? reshape(matmul(dz, weight), x_shape) : Tensor{},
            ctx.needs_grad(1) ? detail::product_as_gradient(1, transpose(dz, 0, 1), reshape(x, {rows, in})) : Tensor{},
            dbias};
  }
};

// (…, M, K) · (…, K, N) for integers.
Tensor integer_product(const Tensor& a, const Tensor& b) {
  const Shape batch = broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), "matmul");
  const auto matrices = [&](const Tensor& x) {
    Shape shape = batch;
    shape.push_back(x.size(-2));
    shape.push_back(x.size(-1));
    return reshape(contiguous_data(broadcast_view(x, shape)), {numel_of(batch), x.size(-2), x.size(-1)});
  };
  Shape shape = batch;
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  const Tensor y = empty(shape, a.dtype(), a.device());
  if (y.numel() > 0) {
    const Tensor left = matrices(a), right = matrices(b);
    const Tensor out = reshape(y, {numel_of(batch), a.size(-2), b.size(-1)});
    const kernels::IntegerMatmul args{.a = left, .b = right, .out = out};
    on_device(a.device(), [&](auto device) { kernels::integer_matmul(device, args); });
  }
  return y;
}

Tensor product(const Tensor& a, const Tensor& b) {
  return is_floating(a.dtype()) ? autograd::apply(Matmul{a.shape(), b.shape()}, a, b) : integer_product(a, b);
}

}  // namespace

void set_float32_matmul_precision(MatmulPrecision precision) {
  check(precision <= MatmulPrecision::bfloat16x2,
        "set_float32_matmul_precision: expected one of the enumerators of MatmulPrecision, got {}",
        static_cast<int>(precision));
  float32_precision = precision;
}
MatmulPrecision float32_matmul_precision() { return float32_precision; }

void set_matmul_tuning(MatmulTuning chosen) { tuning = chosen; }
MatmulTuning matmul_tuning() { return tuning; }

bool has_fast_bfloat16(Device device) {
  return on_device(device, [](auto on) { return kernels::has_fast_bfloat16(on); });
}

std::string matmul_algorithms(Device device) {
  return on_device(device, [](auto on) { return kernels::timed_algorithms(on); });
}

void set_matmul_algorithms(std::string_view text, Device device) {
  on_device(device, [&](auto on) { kernels::set_timed_algorithms(on, text); });
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  if (autograd::autocast_narrows(a, b)) {
    return matmul(autograd::narrowed(a), autograd::narrowed(b));
  }
  check(a.dim() > 0 && b.dim() > 0, "matmul: expected tensors with at least one axis, got {} and {}", a.shape(),
        b.shape());
  check(a.dtype() != boolean && a.dtype() == b.dtype(), "matmul: expected one numeric dtype, got {} and {}", a.dtype(),
        b.dtype());
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
    return reshape(product(reshape(a, {rows, inner}), b), shape);
  }
  return product(a, b);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation) {
  if (autograd::autocast_narrows(x, weight, bias)) {
    return linear(autograd::narrowed(x), autograd::narrowed(weight), autograd::narrowed(bias), activation);
  }
  check(weight.dim() == 2, "linear: expected weight of shape (out, in), got {}", weight.shape());
  check(x.dim() > 0 && x.size(-1) == weight.size(1), "linear: expected x of shape (…, {}), got {}", weight.size(1),
        x.shape());
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(),
        "linear: expected x and weight of one floating dtype, got {} and {}", x.dtype(), weight.dtype());
  check(weight.device() == x.device(), "linear: expected weight on {}, got {}", x.device(), weight.device());
  check(activation <= Activation::gelu_tanh, "linear: expected one of the enumerators of Activation, got {}",
        static_cast<int>(activation));
  if (bias.defined()) {
    check(bias.shape() == Shape{weight.size(0)}, "linear: expected bias of shape [{}], got {}", weight.size(0),
          bias.shape());
    check(bias.dtype() == x.dtype() && bias.device() == x.device(), "linear: expected bias of {} on {}, got {} on {}",
          x.dtype(), x.device(), bias.dtype(), bias.device());
  }
  return autograd::apply(Linear{activation, x.shape()}, x, weight, bias)[0];
}

}  // namespace mica
