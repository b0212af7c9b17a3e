#include <mica/autograd/autocast.h>
#include <mica/ops/norm/add_layer_norm.h>
#include <mica/ops/norm/detail/norm_function.h>

namespace mica {

namespace {

struct AddLayerNorm : norm::AddNorm {};

}  // namespace

AddLayerNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Shape& normalized_shape,
                                  const Tensor& weight, const Tensor& bias, AddLayerNormOptions options) {
  if (autograd::autocast_widens(x, residual)) {
    options.x_bias = autograd::widened(options.x_bias);
    return add_layer_norm(autograd::widened(x), autograd::widened(residual), normalized_shape,
                          autograd::widened(weight), autograd::widened(bias), options);
  }
  constexpr const char* kOp = "add_layer_norm";
  check(x.defined() && residual.defined(), "{}: expected x and residual, got an undefined one", kOp);
  const norm::RowNorm rows = norm::check_norm(kOp, /*centered=*/true, x, normalized_shape, weight, bias, options.eps);
  norm::check_addends(kOp, x, residual, options.x_bias, normalized_shape, options.p);
  const AddLayerNorm function{{rows, norm::draw_dropout(options.p, options.training)}};
  const auto [sum, y] = autograd::apply(function, x, residual, weight, bias, options.x_bias);
  return {.sum = sum, .y = y};
}

}  // namespace mica
