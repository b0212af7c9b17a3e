#include <mica/autograd/accumulate.h>
#include <mica/core/copy.h>

namespace mica::autograd {

namespace {

bool is_unshared(const Tensor& x) {
  return x.handle().use_count() == 1 && x.handle()->storage.use_count() == 1 && !x.handle()->slot && x.is_contiguous();
}

}  // namespace

Tensor unshared(Tensor gradient) {
  if (is_unshared(gradient)) {
    return gradient;
  }
  const Tensor copy = empty(gradient.shape(), gradient.dtype(), gradient.device());
  copy_into(copy, gradient);
  return copy;
}

Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place) {
  if (in_place) {
    add_into(sum, gradient);
    sum.bump_version();
    return sum;
  }
  sum = unshared(std::move(sum));
  add_into(sum, gradient);
  return sum;
}

}  // namespace mica::autograd
