#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/add_gradients.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>

namespace mica::autograd {

namespace {

struct AddGradients {
  static constexpr bool composed = true;

  Tensor forward(Context&, const Tensor& a, const Tensor& b) const {
    const Tensor sum = empty(a.shape(), a.dtype(), a.device());
    copy_into(sum, a);
    add_into(sum, b);
    return sum;
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    return {ctx.needs_grad(0) ? dy : Tensor{}, ctx.needs_grad(1) ? dy : Tensor{}};
  }
};

}  // namespace

Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place) {
  if (in_place) {
    add_into(sum, gradient);
    sum.bump_version("backward");
    return sum;
  }
  if (grad_enabled()) {
    return apply(AddGradients{}, sum, gradient);
  }
  sum = unshared(std::move(sum));
  add_into(sum, gradient);
  return sum;
}

}  // namespace mica::autograd
