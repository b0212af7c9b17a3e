#include <mica/autograd/detail/accumulate.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/matmul/detail/matmul_steps.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::detail {

void multiply(kernels::MatmulArgs args) {
  if (args.out.numel() == 0) {
    return;
  }
  const Device device = args.out.device();
  if (args.a.size(-1) > 0) {
    args.a = kernels::readable(args.a);
    args.b = kernels::readable(args.b);
    args.bias = args.bias.defined() ? contiguous_data(args.bias) : args.bias;
    on_device(device, [&](auto on) { kernels::matmul(on, args); });
    return;
  }
  const Tensor& sums = args.sums.defined() ? args.sums : args.out;
  if (args.bias.defined()) {
    copy_into(sums, broadcast_view(args.bias, sums.shape()));
  } else {
    fill_data(sums, 0);
  }
  on_device(device, [&](auto on) { kernels::activate(on, args.activation, sums, args.out); });
}

Tensor product_as_gradient(std::size_t i, const Tensor& a, const Tensor& b) {
  if (a.device().is_cuda() && a.numel() > 0 && b.numel() > 0) {
    if (const Tensor sum = autograd::take_pending_gradient(i); sum.defined()) {
      multiply({.a = a, .b = b, .bias = {}, .out = sum, .accumulate = true});
      return sum;
    }
  }
  return matmul(a, b);
}

std::int64_t row_count(const Shape& shape) { return numel_of(shape.slice(0, shape.size() - 1)); }

Tensor rows_of(const Tensor& x, std::int64_t rows) {
  if (x.dim() == 2) {
    return x;
  }
  const Tensor packed = contiguous_data(x);
  const std::int64_t columns = x.size(-1);
  return as_strided(packed, {rows, columns}, {columns, 1}, packed.handle()->offset);
}

std::pair<Tensor, Tensor> gradients_of_sums(Activation activation, const Tensor& dy, const Tensor& v) {
  const Tensor dz = activation == Activation::none ? dy : empty_like(dy);
  const Tensor dbias = empty({dz.size(1)}, dz.dtype(), dz.device());
  const kernels::ActivationBackward args{.activation = activation, .dy = dy, .v = v, .dz = dz, .dbias = dbias};
  on_device(dz.device(), [&](auto device) { kernels::activation_backward(device, args); });
  return {dz, dbias};
}

}  // namespace mica::detail
