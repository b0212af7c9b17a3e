#include <mica/core/channels_last.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/reduce/sum.h>

namespace mica::detail {

Shape common_shape(const Tensor& a, const Tensor& b, const char* op) {
  check(a.dtype() == b.dtype(), "{}: expected tensors of one dtype, got {} and {}", op, a.dtype(), b.dtype());
  check(a.device() == b.device(), "{}: expected tensors on one device, got {} and {}", op, a.device(), b.device());
  return a.shape() == b.shape() ? a.shape() : broadcast_shapes(a.shape(), b.shape(), op);
}

Tensor new_result(const Shape& shape, DType dtype, const Tensor& a, const Tensor& b) {
  return empty_in_layout(shape, dtype, a.device(), {&a, &b});
}

Tensor unbroadcast(const Tensor& gradient, const Shape& shape) {
  return gradient.shape() == shape ? gradient : sum_to(gradient, shape);
}

double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::float32: return static_cast<float>(value);
    case DType::float16: return Float16(static_cast<float>(value));
    case DType::bfloat16: return BFloat16(static_cast<float>(value));
    default: return value;
  }
}

}  // namespace mica::detail
