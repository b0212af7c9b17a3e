#include <mica/ops/norm/detail/norm_checks.h>

namespace mica::norm {

namespace {

void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x,
                     const Shape& normalized_shape) {
  if (!parameter.defined()) {
    return;
  }
  check(parameter.shape() == normalized_shape, "{}: expected {} of shape {}, got {}", op, name, normalized_shape,
        parameter.shape());
  const DType sums = accumulate_dtype(x.dtype());
  check(parameter.dtype() == x.dtype() || parameter.dtype() == sums, "{}: expected {} of {}{}{}, got {}", op, name,
        x.dtype(), sums == x.dtype() ? "" : " or ", sums == x.dtype() ? "" : name_of(sums), parameter.dtype());
  check(parameter.device() == x.device(), "{}: expected {} on {}, got it on {}", op, name, x.device(),
        parameter.device());
}

}  // namespace

RowNorm check_norm(const char* op, bool centered, const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                   const Tensor& bias, double eps) {
  check(x.defined(), "{}: expected a defined x, got an undefined one", op);
  check(is_floating(x.dtype()), "{}: expected x of a floating dtype, got {}", op, x.dtype());
  check(!normalized_shape.empty(), "{}: expected normalized_shape of at least one axis, got []", op);
  const int leading = x.dim() - normalized_shape.size();
  check(leading >= 0 && x.shape().slice(leading) == normalized_shape,
        "{}: expected x of a shape that ends in {}, got {}", op, normalized_shape, x.shape());
  check_parameter(op, "weight", weight, x, normalized_shape);
  check_parameter(op, "bias", bias, x, normalized_shape);
  if (weight.defined() && bias.defined()) {
    check(weight.dtype() == bias.dtype(), "{}: expected bias of weight's {}, got {}", op, weight.dtype(), bias.dtype());
  }
  check(eps >= 0, "{}: expected eps of at least 0, got {}", op, eps);
  const Tensor& parameter = weight.defined() ? weight : bias;
  return {.centered = centered,
          .rows = numel_of(x.shape().slice(0, leading)),
          .columns = numel_of(normalized_shape),
          .row_shape = normalized_shape,
          .weight_dtype = parameter.defined() ? parameter.dtype() : x.dtype(),
          .eps = eps};
}

void check_addends(const char* op, const Tensor& x, const Tensor& residual, const Tensor& x_bias,
                   const Shape& normalized_shape, double p) {
  check(x.defined() && residual.defined(), "{}: expected x and residual, got an undefined one", op);
  check(residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.device() == x.device(),
        "{}: expected residual like x, {} {} on {}, got {} {} on {}", op, x.dtype(), x.shape(), x.device(),
        residual.dtype(), residual.shape(), residual.device());
  check_parameter(op, "x_bias", x_bias, x, normalized_shape);
  if (x_bias.defined()) {
    check(x_bias.dtype() == x.dtype(), "{}: expected x_bias of x's {}, got {}", op, x.dtype(), x_bias.dtype());
  }
  check(p >= 0 && p < 1, "{}: expected p in [0, 1), got {}", op, p);
}

}  // namespace mica::norm
