#include <mica/autograd/autocast.h>
#include <mica/ops/norm/add_rms_norm.h>
#include <mica/ops/norm/detail/norm_function.h>

namespace mica {

namespace {

struct AddRMSNorm : norm::AddNorm {};

}  // namespace

AddRMSNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Shape& normalized_shape,
                              const Tensor& weight, AddRMSNormOptions options) {
  if (autograd::autocast_widens(x, residual)) {
    options.x_bias = autograd::widened(options.x_bias);
    return add_rms_norm(autograd::widened(x), autograd::widened(residual), normalized_shape, autograd::widened(weight),
                        options);
  }
  constexpr const char* kOp = "add_rms_norm";
  check(x.defined() && residual.defined(), "{}: expected x and residual, got an undefined one", kOp);
  const norm::RowNorm rows = norm::check_norm(kOp, /*centered=*/false, x, normalized_shape, weight, {}, options.eps);
  norm::check_addends(kOp, x, residual, options.x_bias, normalized_shape, options.p);
  const AddRMSNorm function{{rows, norm::draw_dropout(options.p, options.training)}};
  const auto [sum, y] = autograd::apply(function, x, residual, weight, Tensor{}, options.x_bias);
  return {.sum = sum, .y = y};
}

}  // namespace mica
