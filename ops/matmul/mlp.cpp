#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/matmul/detail/matmul_steps.h>
#include <mica/ops/matmul/mlp.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using detail::multiply;
using detail::product_as_gradient;
using detail::row_count;
using detail::rows_of;

// With z = x · weight1ᵀ + bias1 and h = f(z), the outputs are y and, if backward needs them, h and z, so that second
// derivatives can flow through them. If the kernel can compute f′(z), and all that z depends on is saved anyway, f′(z)
// is saved instead of z.
struct Mlp {
  static constexpr bool composed = true;
  Activation activation;
  Shape x_shape;

  Tensors forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight1, const Tensor& bias1,
                  const Tensor& weight2, const Tensor& bias2) const {
    ctx.set_materialize_grads(false);
    const auto new_output = [&](std::int64_t columns) {
      Shape shape = x.shape();
      shape.back() = columns;
      return empty(shape, x.dtype(), x.device());
    };
    const bool wants_first = ctx.needs_grad(0) || ctx.needs_grad(1) || ctx.needs_grad(2);
    const bool has_function = activation != Activation::none;
    const Tensor y = new_output(weight2.size(0));
    const Tensor h = new_output(weight1.size(0));
    const std::int64_t rows = row_count(x.shape());
    const Tensor h_rows = rows_of(h, rows);
    const auto matrix = [&](const Tensor& t) { return t.defined() ? rows_of(t, rows) : t; };
    kernels::MatmulArgs first{
        .a = matrix(x), .b = transpose(weight1, 0, 1), .bias = bias1, .out = h_rows, .activation = activation};
    const bool from_z = wants_first && has_function && !kernels::has_slope_from_output(activation);
    const bool has_slopes = from_z && ctx.needs_grad(0) && ctx.needs_grad(1) &&
                            on_device(x.device(), [&](auto device) { return kernels::gives_slopes(device, first); });
    const Tensor slopes = has_slopes ? new_output(weight1.size(0)) : Tensor{};
    const Tensor z = from_z && !has_slopes ? new_output(weight1.size(0)) : Tensor{};
    const Tensor v = !wants_first || !has_function || has_slopes ? Tensor{} : z.defined() ? z : h;
    ctx.save_for_backward(ctx.needs_grad(1) ? x : Tensor{}, ctx.needs_grad(0) ? weight1 : Tensor{},
                          wants_first ? weight2 : Tensor{}, ctx.needs_grad(3) ? h : Tensor{}, v, slopes,
                          has_slopes ? bias1 : Tensor{});
    first.slopes = matrix(slopes);
    first.sums = matrix(z);
    multiply(first);
    multiply({.a = h_rows, .b = transpose(weight2, 0, 1), .bias = bias2, .out = rows_of(y, rows)});
    Tensors outputs{y};
    if (ctx.needs_any_grad()) {
      outputs.push_back(h);
      if (z.defined()) {
        outputs.push_back(z);
      }
    }
    return outputs;
  }

  Tensors backward(autograd::Context& ctx, const Tensors& came) const {
    const auto [x, weight1, weight2, h, v, slopes, bias1] = ctx.saved<7>();
    const std::int64_t rows = row_count(x_shape);
    const auto rows_or_none = [&](const Tensor& d) { return d.defined() ? reshape(d, {rows, d.size(-1)}) : d; };
    const Tensor dy = rows_or_none(came[0]);
    const Tensor dh = rows_or_none(came.size() > 1 ? came[1] : Tensor{});
    const Tensor dz = rows_or_none(came.size() > 2 ? came[2] : Tensor{});
    Tensors gradients(5);
    if (dy.defined()) {
      gradients[3] = ctx.needs_grad(3) ? product_as_gradient(3, transpose(dy, 0, 1), rows_or_none(h)) : Tensor{};
      gradients[4] = ctx.needs_grad(4) ? column_sums(dy) : Tensor{};
    }
    if (ctx.needs_grad(0) || ctx.needs_grad(1) || ctx.needs_grad(2)) {
      const bool in_one = dy.defined() && dy.numel() > 0 && weight2.size(1) > 0 && !dh.defined() && !dz.defined() &&
                          !autograd::grad_enabled();
      Tensor dsums;
      if (in_one) {
        const auto matrix = [&](const Tensor& t) { return t.defined() ? rows_of(t, rows) : t; };
        dsums = through_both(contiguous_data(dy), weight2, matrix(v), matrix(slopes), ctx.needs_grad(2), gradients[2]);
      } else {
        dsums = in_steps(dy, dh, dz, weight2, rows_or_none(slopes.defined() ? linear(x, weight1, bias1) : v));
        gradients[2] = ctx.needs_grad(2) && dsums.defined() ? column_sums(dsums) : Tensor{};
      }
      if (dsums.defined()) {
        gradients[0] = ctx.needs_grad(0) ? reshape(matmul(dsums, weight1), x_shape) : Tensor{};
        gradients[1] = ctx.needs_grad(1) ? product_as_gradient(1, transpose(dsums, 0, 1), rows_or_none(x)) : Tensor{};
      }
    }
    return gradients;
  }

 private:
  static Tensor column_sums(const Tensor& d) {
    return d.numel() > 0 && !autograd::grad_enabled()
               ? detail::gradients_of_sums(Activation::none, contiguous_data(d), {}).second
               : sum(d, {0});
  }

  // dz by the kernel that multiplies by weight2; nothing is recorded.
  Tensor through_both(const Tensor& dy, const Tensor& weight2, const Tensor& v, const Tensor& slopes, bool wants_dbias,
                      Tensor& dbias) const {
    const std::int64_t hidden = weight2.size(1);
    const Tensor dsums = empty({dy.size(0), hidden}, dy.dtype(), dy.device());
    dbias = wants_dbias ? empty({hidden}, dy.dtype(), dy.device()) : Tensor{};
    const kernels::MatmulActivationBackward args{.a = dy,
                                                 .b = kernels::readable(weight2.detach()),
                                                 .activation = activation,
                                                 .v = v,
                                                 .slopes = slopes,
                                                 .out = dsums,
                                                 .dbias = dbias};
    on_device(dy.device(), [&](auto device) { kernels::matmul_activation_backward(device, args); });
    return dsums;
  }

  // dz by recorded ops, from the gradients of y, h and z.
  Tensor in_steps(const Tensor& dy, Tensor dh, const Tensor& dz, const Tensor& weight2, const Tensor& v) const {
    const auto plus = [](const Tensor& a, const Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; };
    dh = plus(dy.defined() ? matmul(dy, weight2) : Tensor{}, dh);
    const bool has_function = activation != Activation::none;
    const Tensor from_h =
        dh.defined() && has_function ? detail::unary_gradient(kernels::function_of(activation), dh, v) : dh;
    return plus(from_h, dz);
  }
};

void check_layer(int number, const Tensor& weight, const Tensor& bias, std::int64_t in, const Tensor& x) {
  check(weight.dim() == 2 && weight.size(1) == in, "mlp: expected weight{} of shape (…, {}), got {}", number, in,
        weight.shape());
  check(weight.dtype() == x.dtype() && weight.device() == x.device(),
        "mlp: expected weight{} of {} on {}, got {} on {}", number, x.dtype(), x.device(), weight.dtype(),
        weight.device());
  if (bias.defined()) {
    check(bias.shape() == Shape{weight.size(0)}, "mlp: expected bias{} of shape [{}], got {}", number, weight.size(0),
          bias.shape());
    check(bias.dtype() == x.dtype() && bias.device() == x.device(), "mlp: expected bias{} of {} on {}, got {} on {}",
          number, x.dtype(), x.device(), bias.dtype(), bias.device());
  }
}

}  // namespace

Tensor mlp(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
           Activation activation) {
  check(x.defined() && weight1.defined() && weight2.defined(), "mlp: expected x and two weights, got an undefined one");
  check(x.dim() > 0 && is_floating(x.dtype()), "mlp: expected floating x of shape (…, in), got {} {}", x.dtype(),
        x.shape());
  if (autograd::autocast_narrows(x, weight1, bias1, weight2, bias2)) {
    const auto narrowed = [](const Tensor& t) { return autograd::narrowed(t); };
    return mlp(narrowed(x), narrowed(weight1), narrowed(bias1), narrowed(weight2), narrowed(bias2), activation);
  }
  check_layer(1, weight1, bias1, x.size(-1), x);
  check_layer(2, weight2, bias2, weight1.size(0), x);
  return autograd::apply(Mlp{activation, x.shape()}, x, weight1, bias1, weight2, bias2)[0];
}

}  // namespace mica
