#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_kernels.h>
#include <mica/ops/tiled_matmul/tiled_matmul.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

struct TiledMatmul {
  static constexpr bool composed = true;
  Activation activation;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    const Tensor y = empty({a.size(0), b.size(1)}, a.dtype(), a.device());
    if (y.numel() > 0 && a.size(1) > 0) {
      const kernels::TiledMatmulArgs args{.a = a, .b = b, .activation = activation, .y = y};
      on_device(y.device(), [&](auto device) { kernels::tiled_matmul(device, args); });
    } else {
      fill_data(y, 0);
    }
    ctx.save_for_backward(a, b, activation == Activation::none ? Tensor{} : y);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [a, b, y] = ctx.saved<3>();
    // The gradient depends on the sign of y only, whose derivative is 0. So y is passed without its history.
    const Tensor dz = y.defined() ? detail::unary_gradient(kernels::function_of(activation), dy, y.detach()) : dy;
    return {ctx.needs_grad(0) ? tiled_matmul(dz, transpose(b, 0, 1)) : Tensor{},
            ctx.needs_grad(1) ? tiled_matmul(transpose(a, 0, 1), dz) : Tensor{}};
  }
};

void check_matrix(const char* name, const Tensor& x) {
  check(x.defined(), "tiled_matmul: expected a defined {}, got an undefined one", name);
  check(x.dim() == 2, "tiled_matmul: expected {} to be a matrix, without leading axes, got shape {}", name, x.shape());
}

}  // namespace

Tensor tiled_matmul(const Tensor& a, const Tensor& b, Activation activation) {
  check_matrix("a", a);
  check_matrix("b", b);
  check(is_floating(a.dtype()) && a.dtype() == b.dtype(), "tiled_matmul: expected one floating dtype, got {} and {}",
        a.dtype(), b.dtype());
  check(a.device() == b.device(), "tiled_matmul: expected one device, got {} and {}", a.device(), b.device());
  check(a.size(1) == b.size(0), "tiled_matmul: expected inner sizes that are equal, got {} and {}", a.shape(),
        b.shape());
  check(activation == Activation::none || activation == Activation::leaky_relu,
        "tiled_matmul: expected the activation none or leaky_relu");
  return autograd::apply(TiledMatmul{activation}, a, b);
}

}  // namespace mica
